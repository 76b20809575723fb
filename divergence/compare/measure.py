"""Measuring the pairs: reads both tensors, calls numerics, writes a SiteResult.

Equal checksums are equal tensors: their bytes are checked against them, not measured.
A pair of tensors that occurs at several sites (one block's output is the next one's
input) is measured once. Pads are masked by the samples' token counts, and rows are turned back into
token positions.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.compare.align import Pair, Piece
from divergence.compare.floors import Floor
from divergence.compare.result import LogitsDiff, NonfiniteCount, SiteResult
from divergence.errors import RunFormatError
from divergence.numerics.formats import Format, format_named
from divergence.numerics.logits import measure_logits
from divergence.numerics.pair import PairMetrics, RowMetrics, measure_pair
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import module_of

if TYPE_CHECKING:
    import torch

__all__ = ["Found", "Measurer"]


_REMEMBERED = 256  # recent pairs: an output returns as the next input soon, or not at all


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of one pair: metrics, rows for judging, the shape compared."""

    metrics: PairMetrics
    logits: LogitsDiff | None
    rows: RowMetrics
    shape: tuple[int, ...]


class Measurer:
    """Measures pairs of two runs; keeps what repeats."""

    def __init__(self, reference: Run, candidate: Run, floor: Floor) -> None:
        self._reference, self._candidate = reference, candidate
        self._floor = floor
        self._work = _work_format(reference.manifest, candidate.manifest)
        self._notes = reference.manifest.plan.modules
        self._logits_site = reference.manifest.plan.logits_site
        self._blocks = sorted(
            (path for path, note in self._notes.items() if note.role == "block"),
            key=len, reverse=True,
        )  # fmt: skip
        self._cache: dict[tuple, Found] = {}
        self._lock = threading.Lock()
        self._entering: dict[tuple[int, int, str], RowMetrics] = {}
        self._beside: dict[tuple[int, int, str], float] = {}
        self._earlier: dict[tuple[int, str], float] = {}

    def read_ahead(self, pair: Pair) -> None:
        """Bring a pair's bytes into memory and check them; ``look`` says what is wrong."""
        with contextlib.suppress(RunFormatError):
            self._check(pair)

    def _check(self, pair: Pair) -> None:
        """Both sides' bytes are what their records say; each tensor is looked at once."""
        self._reference.read(pair.reference.record)
        self._candidate.read(pair.candidate.record)

    def look(self, pair: Pair) -> Found | None:
        """Read and measure; None where the bytes are equal. Safe to call from several threads.

        Raises RunFormatError on bad bytes.
        """
        if _equal(pair):
            self._check(pair)  # equal by what was recorded: true only if the bytes agree with it
            return None
        note = self._notes.get(module_of(pair.reference.record.site))
        return self._find(pair, note is not None and note.role == "block")

    def judge(self, pair: Pair, found: Found | None) -> SiteResult:
        """The pair's SiteResult with its floor, from what ``look`` found. Call in the order of
        the alignment: in a free pass, what a module inherits was judged before it."""
        one, two = pair.reference.record, pair.candidate.record
        path = module_of(one.site)
        note = self._notes.get(path)
        place = {
            "pass_": pair.pass_,
            "sample": pair.reference.sample,
            "step": one.step,
            "site": one.site,
            "order": one.order,
            "candidate_site": two.site if two.site != one.site else None,
            "match": pair.match,
            "block": self.block_of(path),
            "role": note.role if note else None,
            "kind": note.kind if note else None,
            "reference_dtype": one.dtype,
            "candidate_dtype": two.dtype,
        }
        if found is None:
            return self._identical(pair, place)
        sample, position = self._locate(pair.reference, found.shape, found.metrics.worst_row)
        result = SiteResult(
            **place,
            **_of_metrics(found.metrics),
            shape=found.shape,
            identical=found.metrics.identical,
            worst_sample=sample,
            worst_position=position,
            nonfinite=_nonfinite(found.metrics),
            logits=found.logits,
        )
        self._judge_rows(pair, result, found.rows)
        return result

    def _identical(self, pair: Pair, place: dict) -> SiteResult:
        result = _identical(pair.reference.record, place)
        if result.ulp_format is not None:
            result.ratio = result.ratio_max = 0.0
        return result

    def _judge_rows(self, pair: Pair, result: SiteResult, rows: RowMetrics) -> None:
        """Fill floor and ratios. In the free pass a block answers only for what it adds."""
        one, two = (format_named(p.record.dtype) for p in (pair.reference, pair.candidate))
        if one.kind != "float" or two.kind != "float":
            return
        inherited, beside = None, 0.0
        if pair.pass_ == "free":
            path, _, port = result.site.partition(":")
            key = (result.sample, result.step, path)
            if port.startswith("in"):
                self._enter(key, port, result, rows)
            else:
                inherited = self._entering.get(key)
                beside = max(
                    self._beside.get(key, 0.0), self._earlier.get((result.sample, path), 0.0)
                )
        found = self._floor.ratios(
            rows,
            form=one if one.unit_roundoff >= two.unit_roundoff else two,
            work=self._work,
            num_features=result.shape[-1] if result.shape else 1,
            role=result.role or "inner",
            inherited=inherited,
            beside=beside,
        )
        if found is not None:
            result.floor, result.ratio, result.ratio_max = found.floor, found.typical, found.worst

    def _enter(
        self, key: tuple[int, int, str], port: str, result: SiteResult, rows: RowMetrics
    ) -> None:
        """Note the error with which a module was entered in the free pass."""
        size = result.token_rel_l2_median
        if port == "in":
            self._entering[key] = rows
            earlier = (key[0], key[2])
            self._earlier[earlier] = max(self._earlier.get(earlier, 0.0), size)
        elif "mask" not in port:
            self._beside[key] = max(self._beside.get(key, 0.0), size)

    def block_of(self, path: str) -> str | None:
        """The block that ``path`` is or lies in."""
        for block in self._blocks:
            if path == block or path.startswith(block + "."):
                return block
        return None

    def _find(self, pair: Pair, is_block: bool) -> Found:
        one, two = pair.reference.record, pair.candidate.record
        base = self._base(pair) if is_block and one.site.endswith(":out") else None
        logits = one.site == self._logits_site
        whole = pair.reference.row is None and pair.candidate.row is None
        key = (
            one.xxh3,
            one.dtype,
            two.xxh3,
            two.dtype,
            one.shape,
            logits,
            one.positions,
            two.positions,
            base is not None,
            one.step == 0,
        )
        known = self._cache.get(key) if whole else None
        if known is not None:
            return known
        a, b = (
            self._tensor(self._reference, pair.reference),
            self._tensor(self._candidate, pair.candidate),
        )
        if base is not None and one.positions is None and two.positions is not None:
            base = _same_positions(base, one, b, two)[0]
        a, b = _same_positions(a, one, b, two)
        mask = self._row_mask(pair.reference, tuple(a.shape))
        if base is not None and not whole:
            base = self._rows_of(base, pair.reference)
        # One thread a pair: whole pairs are what runs side by side, where cores are many.
        metrics, rows = measure_pair(a, b, row_mask=mask, base=base, threads=1)
        found = None
        if logits and a.ndim >= 1 and a.numel():
            values = measure_logits(a, b, row_mask=mask)
            if values.num_rows > values.num_skipped:  # else no row was finite enough to measure
                found = LogitsDiff(
                    **{name: getattr(values, name) for name in LogitsDiff.__struct_fields__}
                )
        result = Found(metrics, found, rows, tuple(a.shape))
        if whole:
            with self._lock:
                self._cache[key] = result
                if len(self._cache) > _REMEMBERED:
                    self._cache.pop(next(iter(self._cache)))
        return result

    def _tensor(self, run: Run, piece: Piece) -> torch.Tensor:
        return self._rows_of(run.read(piece.record), piece)

    def _rows_of(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The piece's own part of a record's tensor, or of one of the same shape."""
        if piece.row is None:
            return tensor
        if tensor.ndim == 1:
            return tensor[piece.row : piece.row + 1]
        return tensor[piece.row : piece.row + 1, piece.left : piece.right].contiguous()

    def _base(self, pair: Pair) -> torch.Tensor | None:
        """The input that the block had in the reference, if it has the output's shape.

        In an anchored pass that is the free input of the run which anchored it. Where that is
        a third run, which is not at hand, the reference's own stands in for it.
        """
        one, two = pair.reference.record, pair.candidate.record
        run, other = self._reference, one
        if one.pass_ == "anchored" and two.pass_ == "free":
            run, other = self._candidate, two
        site = other.site.rpartition(":")[0] + ":in"
        record = run.find(("free", other.sample, other.step, site))
        if record is None or record.shape != one.shape or record.positions != one.positions:
            return None
        if format_named(record.dtype).kind != "float":
            return None
        return run.read(record)

    def _row_mask(self, piece: Piece, shape: Sequence[int]) -> torch.Tensor | None:
        """True for real tokens, per row (all leading axes); None where nothing is padded."""
        if piece.row is not None or piece.record.step > 0 or len(shape) < 3:
            return None
        manifest = self._reference.manifest
        group = next((g for g in manifest.tokens.groups if g and g[0] == piece.record.sample), [])
        samples = [manifest.tokens.samples[number] for number in group]
        if not any(s.num_left_pad or s.num_right_pad for s in samples):
            return None
        length = samples[0].num_left_pad + len(samples[0].prompt_ids) + samples[0].num_right_pad
        kept = piece.record.positions
        expected = length if kept is None else len(kept)
        if shape[0] != len(samples) or shape[1] != expected:
            return None
        import torch

        mask = torch.ones(len(samples), length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            mask[row, : sample.num_left_pad] = False
            if sample.num_right_pad:
                mask[row, -sample.num_right_pad :] = False
        if kept is not None:
            mask = mask[:, list(kept)]
        inner = math.prod(shape[2:-1])
        return mask.reshape(-1, 1).expand(-1, inner).reshape(-1).contiguous()

    def _locate(
        self, piece: Piece, shape: Sequence[int], row: int | None
    ) -> tuple[int | None, int | None]:
        """(sample, token index) of a row, where rows are tokens: pads are not counted."""
        if row is None or len(shape) < 3:
            return None, None
        record, tokens = piece.record, self._reference.manifest.tokens
        inner = max(math.prod(shape[2:-1]), 1)
        member, token = row // (inner * shape[1]), row // inner % shape[1]
        group = next((g for g in tokens.groups if g and g[0] == record.sample), [piece.sample])
        split = piece.row is not None or shape[0] != len(group)
        number = piece.sample if split else group[member]
        sample = tokens.samples[number]
        pads = 0 if piece.row is not None else sample.num_left_pad
        if record.positions is not None:
            known = token < len(record.positions)
            return number, record.positions[token] - pads if known else None
        if record.step == 0:
            length = pads + len(sample.prompt_ids) + sample.num_right_pad
            return number, token - pads if shape[1] <= length else None
        # what was fed before: an encoder-decoder's decoder has a prompt of its own
        before = len(sample.decoder_prompt_ids or sample.prompt_ids)
        return number, before + record.step - 1 + token


def _work_format(*manifests: Manifest) -> Format:
    """The coarser of the formats that the models compute in; 8-bit weights are widened first."""
    forms = [format_named(manifest.model.dtype) for manifest in manifests]
    forms = [form for form in forms if form.itemsize >= 2] or [format_named("float32")]
    return max(forms, key=lambda form: form.unit_roundoff)


def _equal(pair: Pair) -> bool:
    one, two = pair.reference.record, pair.candidate.record
    return (
        one.xxh3 == two.xxh3 and one.dtype == two.dtype and one.shape == two.shape
        and one.positions == two.positions
        and pair.reference.row is None and pair.candidate.row is None
    )  # fmt: skip


def _identical(record: Record, place: dict) -> SiteResult:
    """Bit for bit the same: every difference is 0, and nothing is measured."""
    summary = record.summary
    norm = (summary.rms or 0.0) * math.sqrt(record.numel)
    bad = NonfiniteCount(
        reference_nan=summary.num_nan,
        reference_inf=summary.num_posinf + summary.num_neginf,
        candidate_nan=summary.num_nan,
        candidate_inf=summary.num_posinf + summary.num_neginf,
    )
    is_float = format_named(record.dtype).kind == "float"
    return SiteResult(
        **place, shape=record.shape, identical=True, numel=record.numel, rel_l2=0.0, cosine=1.0,
        one_minus_cosine=0.0, sqnr_db=math.inf, max_abs=0.0, reference_norm=norm,
        candidate_norm=norm, gain=0.0, gain_se=0.0,
        ulp_format=record.dtype if is_float else None,
        ulp_share_over_1=0.0 if is_float else None, ulp_p99=0.0 if is_float else None,
        ulp_max=0.0 if is_float else None, token_rel_l2_median=0.0, token_rel_l2_p99=0.0,
        token_rel_l2_max=0.0, channel_rel_l2_max=0.0, nonfinite=bad if bad.total else None,
    )  # fmt: skip


def _same_positions(
    a: torch.Tensor, one: Record, b: torch.Tensor, two: Record
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where one side holds all tokens and the other some, pick those out."""
    if one.positions == two.positions or a.shape == b.shape:
        return a, b
    if one.positions is not None:
        return a, b[:, list(one.positions)]
    return a[:, list(two.positions)], b


_SHARED = frozenset(SiteResult.__struct_fields__) & frozenset(PairMetrics.__struct_fields__)


def _of_metrics(metrics: PairMetrics) -> dict:
    """The fields that SiteResult takes over as they are."""
    return {name: getattr(metrics, name) for name in _SHARED - {"nonfinite", "identical"}}


def _nonfinite(metrics: PairMetrics) -> NonfiniteCount | None:
    found = NonfiniteCount(
        reference_nan=metrics.reference_nan,
        reference_inf=metrics.reference_inf,
        candidate_nan=metrics.candidate_nan,
        candidate_inf=metrics.candidate_inf,
    )
    return found if found.total else None
