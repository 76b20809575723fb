"""Observations beside today's measurements, for a judge that is one table (columns of numpy).

For each pair of tensors of an alignment (blocks' and modules' inputs and outputs, every pass,
prompt and step) three errors are looked at, e = A - R, B - R and B - A, with R the truth; in an
escalated pass A is the truth and B the float32 pass. Rows are tokens, channels the last axis.

``tokens``, a line a token:
  pair        line of ``pairs``                        row     token's number in the tensor
  mask        0 compared, 1 pad, 2 routed elsewhere, 3 nan or inf on a side (question 6: masks
              with their reasons; such a line is told, and convicts nothing)
  equal       channels whose bits are equal (question 1; and how many agree is a control of its own)
  r2 rn       sum a^2, and its participation ratio (sum a^2)^2 / sum a^4: the model floor is u^2 r2,
              its n is rn (question 2: var log F(n, n); a massive channel has rn near 1)
  z2 zn       the same of a / scale
  u2          sum (a - input)^2 of a block: the floor of what is added, not of the stream
  s2 sn       of each error: sum e^2 and its participation ratio: numerator and denominator of W
              (question 2), with the truth its own floor (question 3)
  c2 cn       the same of e / scale: sees what a massive channel hides
  gain        <e, a> / sum a^2: one factor at all tokens is a structure (question 5, and x 1.005)
``pairs``, a line a pair of tensors, with role, shapes, dtypes and names, what all its compared
tokens come to (the same sums), and
  top tokens, channels: the three largest of the scaled error with their shares (question 5: scope)
  constant    |mean e|^2 T / sum e^2: 1 where all tokens have one vector (a bias)
  gain ugain  <e, a> / sum a^2 and <e, a - input> / sum (a - input)^2 over all tokens
  start       the first token whose error is beyond a tenth of the largest
``profiles``: of each site, pass and phase the scaled error of every channel (a head, a channel, a
row of the vocabulary), ``scales`` among them: 16-bit logarithms.
``small``: tensors of at most 16 channels as they are (routers' scores and choices, gates): their
margins and who was sent where. ``logits``: the largest two and the gap between them on both sides,
and KL(A | B): z of a sampled token (question 4).
``operators``, a line a row of an operator's result: s2 and sn of the three errors, and the floor.

``scale`` of a channel is its rms over all tokens of the site and pass in the reference, at least u
times that of the typical channel. Numbers are log2 in steps of 1/128 (a relative error of 0.27%),
-32768 is zero and 32767 infinite, or what no truth was there for; a gain is in steps of 1/64,
doubled, odd where it is negative, and -32768 where there is none.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from divergence.analyses.operators import measure as operator_errors
from divergence.numerics.arrays import as_tensor
from divergence.numerics.formats import format_named
from divergence.run.site import module_of

__all__ = ["Observed", "logarithm", "of_logarithm", "signed"]

ERRORS = ("A", "B", "D")
SUMS = ("s2", "sn", "c2", "cn")
_SMALL = 16
_TOP = 3
_WIDEST = 4096
"""Channels that have a profile."""


def logarithm(values: Any) -> np.ndarray:
    """As int16: see above."""
    with np.errstate(all="ignore"):
        steps = np.round(128 * np.log2(np.asarray(values, np.float64)))
    steps = np.where(np.isnan(steps) | (steps == np.inf), 32767, np.clip(steps, -32767, 32766))
    return np.where(np.asarray(values) == 0, -32768, steps).astype(np.int16)


def of_logarithm(codes: np.ndarray) -> np.ndarray:
    values = np.exp2(codes.astype(np.float64) / 128)
    return np.where(codes == -32768, 0.0, np.where(codes == 32767, np.inf, values))


def signed(values: Any) -> np.ndarray:
    values = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        steps = np.round(64 * np.log2(np.abs(values)))
    steps = np.where(np.isfinite(steps), np.clip(steps, -16383, 16383), -16384)
    return (2 * steps + (values < 0)).astype(np.int16)


class Observed:
    """The tables of one comparison."""

    def __init__(self, names: dict[str, str]) -> None:
        """``names``: by a run's id its role (a, b, truth)."""
        self._names = names
        self.columns: dict[str, list[np.ndarray]] = defaultdict(list)
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.num_pairs = 0
        self._operator: tuple[Any, ...] = ()

    # ── pairs of tensors ────────────────────────────────────────────────────────────────────────

    def observe(self, measurer: Any, pairs: Sequence[Any]) -> None:
        by_site = defaultdict(list)
        for pair in pairs:
            by_site[pair.pass_, pair.reference.record.site].append(pair)
        with np.errstate(all="ignore"):
            for place, group in by_site.items():
                self._site(measurer, place, group)

    def _site(self, measurer: Any, place: tuple[str, str], pairs: list[Any]) -> None:
        energy: dict[int, list[Any]] = {}
        read = []
        for pair in pairs:
            tensors = self._tensors(measurer, pair)
            if tensors is None:
                continue
            a, _, _, _, mask = tensors
            kept = a[mask == 0].square()
            energy.setdefault(a.shape[1], [0.0, 0])
            total = energy[a.shape[1]]
            total[0] = total[0] + kept.sum(0)
            total[1] += len(kept)
            read.append((pair, tensors))
        scales = {}
        for width, (total, count) in energy.items():
            scale = np.sqrt(total.numpy() / max(count, 1)) if count else np.ones(width)
            roundoff = format_named(pairs[0].reference.record.dtype).unit_roundoff or 2.0**-53
            least = roundoff * np.sqrt(np.mean(scale**2))
            scales[width] = torch.from_numpy(np.maximum(scale, least) if least > 0 else scale + 1)
        profiles: dict[tuple[int, bool], list[Any]] = {}
        for pair, tensors in read:
            width = tensors[0].shape[1]
            sums = self._pair(measurer, place, pair, tensors, scales[width])
            if width <= _WIDEST:
                key = width, pair.reference.record.step > 0
                if key in profiles:
                    profiles[key] = [x + y for x, y in zip(profiles[key], sums, strict=True)]
                else:
                    profiles[key] = sums
        for (width, decode), sums in profiles.items():
            self.texts["profiles"].append(
                f"{place[0]} {place[1]} {'decode' if decode else 'prefill'}"
            )
            self.columns["profiles.width"].append(np.array([width], np.int32))
            self.columns["profiles.scale"].append(scales[width].numpy())
            for name, total in zip(ERRORS, sums, strict=True):
                self.columns[f"profiles.{name}"].append(total.numpy())

    def _tensors(self, measurer: Any, pair: Any) -> tuple[Any, ...] | None:
        """A, B, truth, input (float64, rows by channels) and the mask by row."""
        reference, candidate = measurer._reference, measurer._candidate
        records = pair.reference.record, pair.candidate.record
        if not (reference.has_bytes(records[0]) and candidate.has_bytes(records[1])):
            return None
        pieces = measurer._pieces
        a = as_tensor(pieces.array(reference, pair.reference))
        b = as_tensor(pieces.array(candidate, pair.candidate))
        if a.shape != b.shape or not a.numel():
            return None
        if not a.is_floating_point() or not b.is_floating_point():
            if not a.is_floating_point() and a.shape[-1] <= _SMALL:
                self._keep_small(pair, a, b)
            return None
        width = a.shape[-1] if a.ndim > 1 else 1
        if width <= _SMALL:
            self._keep_small(pair, a, b)
        mask = torch.zeros(a.numel() // width, dtype=torch.uint8)
        true_record = None if measurer._truth is None else measurer._truth.record(pair)
        truth = base = None
        routed_by = None
        if true_record is not None and format_named(true_record.dtype).kind == "float":
            run = measurer._truth.run
            truth = as_tensor(pieces.rows_of(run.array(true_record), pair.reference))
            truth = truth.reshape(-1, width).double() if truth.shape == a.shape else None
            routed_by = (run, true_record)
        routed = measurer._routing.of(pair, len(mask), routed_by)
        if routed is not None and routed.kept is not None and len(routed.kept) == len(mask):
            mask[~routed.kept] = 2
        real = pieces.row_mask(pair.reference, tuple(a.shape))
        if real is not None:
            mask[~real] = 1
        if measurer._is_block(pair):
            base = pieces.base(pair)
            base = None if base is None else as_tensor(base)
            base = (
                None if base is None or base.shape != a.shape else base.reshape(-1, width).double()
            )
        a, b = a.reshape(-1, width).double(), b.reshape(-1, width).double()
        bad = ~(a.isfinite().all(1) & b.isfinite().all(1))
        if truth is not None:
            bad |= ~truth.isfinite().all(1)
        mask[bad & (mask == 0)] = 3
        return a, b, truth, base, mask

    def _keep_small(self, pair: Any, a: torch.Tensor, b: torch.Tensor) -> None:
        record = pair.reference.record
        self.texts["small"].append(f"{pair.pass_} {record.sample} {record.step} {record.site}")
        self.columns["small.shape"].append(np.array([a.numel(), a.shape[-1] if a.ndim else 1]))
        for name, tensor in (("A", a), ("B", b)):
            self.columns[f"small.{name}"].append(
                tensor.reshape(-1).to(torch.float32).numpy().copy()
            )

    def _pair(
        self,
        measurer: Any,
        place: tuple[str, str],
        pair: Any,
        tensors: tuple[Any, ...],
        scale: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The lines of one pair of tensors; gives each error's energy by channel."""
        a, b, truth, base, mask = tensors
        record, note = pair.reference.record, measurer._notes.get(module_of(place[1]))
        num_rows, width = a.shape
        kept = mask == 0
        number, self.num_pairs = self.num_pairs, self.num_pairs + 1
        self.texts["site"].append(place[1])
        self.texts["pass"].append(place[0])
        self.texts["role"].append(getattr(note, "role", None) or "")
        self.texts["dtype"].append(f"{record.dtype} {pair.candidate.record.dtype}")
        runs = measurer._reference, measurer._candidate
        sides = [self._names.get(run.manifest.id, "truth") for run in runs]
        self.texts["sides"].append(" ".join(sides))
        a, b = (torch.where(kept[:, None], side, 0.0) for side in (a, b))
        errors: dict[str, torch.Tensor | None] = {"A": None, "B": None, "D": b - a}
        if truth is not None:
            truth = torch.where(kept[:, None], truth, 0.0)
            errors |= {"A": a - truth, "B": b - truth}
        equal = (a == b).sum(1)
        tokens: dict[str, Any] = {
            "pair": np.full(num_rows, number, np.int32),
            "row": np.arange(num_rows, dtype=np.int32),
            "mask": mask.numpy(),
            "equal": equal.numpy().astype(np.int32),
        }
        whole: dict[str, Any] = {
            "sample": record.sample,
            "step": record.step,
            "order": record.order,
            "rows": num_rows,
            "width": width,
            "pads": int((mask == 1).sum()),
            "routed": int((mask == 2).sum()),
            "bad": int((mask == 3).sum()),
            "equal": int((equal[kept] == width).sum()),
        }
        _add_sums(("r2", "rn"), a, tokens, whole)
        _add_sums(("z2", "zn"), a / scale, tokens, whole)
        update = None if base is None else torch.where(kept[:, None], a - base, 0.0)
        tokens["u2"] = np.zeros(num_rows) if update is None else update.square().sum(1).numpy()
        whole["u2"] = float(tokens["u2"].sum())
        profile = []
        for name, error in errors.items():
            if error is None:
                tokens |= {f"{key}.{name}": np.full(num_rows, math.inf) for key in (*SUMS, "gain")}
                whole |= {f"{key}.{name}": math.inf for key in (*SUMS, "gain", "ugain", "constant")}
                whole |= {f"start.{name}": -1} | _largest(name, "token", None)
                whole |= _largest(name, "channel", None)
                profile.append(torch.zeros(width, dtype=torch.float64))
                continue
            scaled = error / scale
            _add_sums((f"s2.{name}", f"sn.{name}"), error, tokens, whole)
            _add_sums((f"c2.{name}", f"cn.{name}"), scaled, tokens, whole)
            along, norm = (error * a).sum(1), a.square().sum(1)
            tokens[f"gain.{name}"] = (along / norm).numpy()
            whole[f"gain.{name}"] = float(along.sum() / norm.sum())
            whole[f"ugain.{name}"] = math.nan
            if update is not None:
                part = (error * update).sum() / update.square().sum()
                whole[f"ugain.{name}"] = float(part)
            square = error.square().sum()
            mean = error.sum(0).square().sum() / max(1, int(kept.sum()))
            whole[f"constant.{name}"] = float(mean / square) if square else 0.0
            by_token, by_channel = scaled.square().sum(1), scaled.square().sum(0)
            whole |= _largest(name, "token", by_token) | _largest(name, "channel", by_channel)
            beyond = (by_token > 0.01 * by_token.max()).nonzero()
            whole[f"start.{name}"] = int(beyond[0]) if len(beyond) else -1
            profile.append(by_channel)
        for key, column in tokens.items():
            self.columns[f"tokens.{key}"].append(column)
        for key, value in whole.items():
            kind = np.int32 if isinstance(value, int) else np.float64
            self.columns[f"pairs.{key}"].append(np.array([value], kind))
        if place[1] == measurer._logits_site and width > 1:
            self._logits(number, a, b)
        return profile

    def _logits(self, number: int, a: torch.Tensor, b: torch.Tensor) -> None:
        self.columns["logits.pair"].append(np.full(len(a), number, np.int32))
        for name, side in (("A", a), ("B", b)):
            largest = side.topk(2)
            for n, rank in enumerate(("first", "second")):
                indices = largest.indices[:, n].numpy().astype(np.int32)
                self.columns[f"logits.{rank}.{name}"].append(indices)
            gap = largest.values[:, 0] - largest.values[:, 1]
            self.columns[f"logits.gap.{name}"].append(gap.numpy())
        first, second = a.log_softmax(1), b.log_softmax(1)
        kl = (first.exp() * (first - second)).sum(1).clamp_min(0.0)
        self.columns["logits.kl"].append(kl.numpy())

    # ── operators ───────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """Within it, each result of an operator that is measured is looked at."""
        measure, measure_one = operator_errors.measure_operator, operator_errors._measure

        def named(unit: Any, prefill: Any, forward: Any, match: Any, *args: Any) -> None:
            self._operator = (match.reference.path, match.candidate.path, *forward)
            measure_one(unit, prefill, forward, match, *args)
            self._operator = ()

        def seen(a: torch.Tensor, b: torch.Tensor, truth: Any, **options: Any) -> Any:
            errors = measure(a, b, truth, **options)
            if self._operator and errors is not None:
                with np.errstate(all="ignore"):
                    self._operator_rows(a, b, truth, errors, options.get("num_terms", 1))
            return errors

        with (
            mock.patch.object(operator_errors, "measure_operator", seen),
            mock.patch.object(operator_errors, "_measure", named),
        ):
            yield

    def _operator_rows(self, a: Any, b: Any, truth: Any, errors: Any, num_terms: int) -> None:
        first, second, sample, step = self._operator
        width = a.shape[-1] if a.ndim else 1
        kept = errors.rows
        x, y, r = (
            None if t is None else t.reshape(-1, width).double()[kept].nan_to_num(0.0, 0.0, 0.0)
            for t in (a, b, truth)
        )
        assert x is not None and y is not None
        self.texts["operators"].append(f"{first} {second}")
        values = {
            "sample": sample,
            "step": step,
            "rows": len(kept),
            "width": width,
            "terms": num_terms,
        }
        for key, value in values.items():
            self.columns[f"operators.{key}"].append(np.array([value], np.int32))
        lines = {
            "norm": errors.norm.numpy(),
            "floor": errors.floor.numpy(),
            "equal": (x == y).sum(1).numpy().astype(np.int32),
        }
        made = {"A": None if r is None else x - r, "B": None if r is None else y - r, "D": y - x}
        for name, error in made.items():
            second_, fourth = np.full(len(kept), math.inf), np.full(len(kept), math.inf)
            if error is not None:
                square = error.square()
                second_ = square.sum(1).numpy()
                fourth = _ratio(square.sum(1), square.square().sum(1))
            lines |= {f"s2.{name}": second_, f"sn.{name}": fourth}
        for key, column in lines.items():
            self.columns[f"operator_rows.{key}"].append(column)

    def table(self) -> dict[str, np.ndarray]:
        """All columns, joined; texts as they are."""
        table: dict[str, np.ndarray] = {}
        for key, parts in self.columns.items():
            column = np.concatenate(parts)
            if column.dtype == np.float64:
                column = signed(column) if "gain" in key else logarithm(column)
            table[key] = column
        return table | {
            f"text.{key}": np.array(lines, dtype=object) for key, lines in self.texts.items()
        }


def _add_sums(
    names: tuple[str, str], values: torch.Tensor, tokens: dict[str, Any], whole: dict[str, Any]
) -> None:
    """The sum of squares and the participation ratio, of each token and of all."""
    square = values.square()
    second, fourth = square.sum(1), square.square().sum(1)
    tokens[names[0]], tokens[names[1]] = second.numpy(), _ratio(second, fourth)
    total = second.sum()
    whole[names[0]] = float(total)
    whole[names[1]] = float(_ratio(total, fourth.sum()))


def _ratio(second: torch.Tensor, fourth: torch.Tensor) -> np.ndarray:
    return torch.where(fourth > 0, second.square() / fourth, 0.0).numpy()


def _largest(name: str, what: str, energy: torch.Tensor | None) -> dict[str, Any]:
    """The numbers of the largest few and their shares."""
    indices, shares = [-1] * _TOP, [0.0] * _TOP
    if energy is not None:
        total = max(float(energy.sum()), 1e-300)
        largest = energy.topk(min(_TOP, len(energy)))
        indices[: len(largest.indices)] = largest.indices.tolist()
        shares[: len(largest.values)] = (largest.values / total).tolist()
    return {f"{what}{n}.{name}": indices[n] for n in range(_TOP)} | {
        f"{what}_share{n}.{name}": shares[n] for n in range(_TOP)
    }
