"""Whose truth is it? A truth belongs to the code and the weights of the reference.

A float64 run repeats what the code says, so one that was made by faulty code has the fault, and
blames the side that lacks it. Two things tell whose it is.

*Code.* Where both manifests hold digests of the source of each module class, they must be the
reference's. Only the classes that both name are held against each other.

*Values.* Two float64 runs of one code agree wherever both hold the same site, pass, sample and
step. Sums may be added in another order on another machine, so up to ``SHARP`` times the rounding
model of numerics.floor in float64 is allowed (its inputs are equal only where each block is given
them, so anchored passes alone are held against each other). ``SHARP``: attention turns a relative
error of its scores into |s| times as much of its probabilities, and trained models reach |s| of 10
and more; 64 allows for some. That is near 1e-13 in small models and 1e-12 in large ones, five
orders below what float32 rounds. Largest measured between kernel sets of one CPU: 1.4e-15.

Where the two sides' own code differs, a truth cannot tell whose is right: it has the reference's.
``why_no_side`` says so then, unless a forward was replaced on the candidate alone. And where
nothing is known of the code, the reference is not blamed by a truth with which the candidate
agrees: so it looks where the candidate's code made it.

What it cannot tell: code that is the same on both machines and wrong.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from divergence.comparison.results.findings import Verdict
from divergence.numerics.formats import format_named
from divergence.numerics.rounding.floor import floor_weights
from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Record
from divergence.run.schema.site import is_operator_site

if TYPE_CHECKING:
    import torch

__all__ = [
    "SHARP",
    "Agreement",
    "Disagreement",
    "disagreement",
    "limit_of",
    "other_code",
    "replaced_in",
    "why_no_side",
    "without_pads",
]

SHARP = 64.0
"""How much wider than the rounding model two float64 runs may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """The first site where two float64 runs differ by more than ``limit`` (relative L2)."""

    site: str
    sample: int
    step: int
    rel_l2: float
    limit: float

    def __str__(self) -> str:
        where = f"{self.site} (sample {self.sample}, step {self.step})"
        return (
            f"{where} differs by {self.rel_l2:.2e}, and two float64 runs of one code by at most "
            f"{self.limit:.0e}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """``num_compared``: sites and forwards that both runs hold; ``first``: where they disagree."""

    num_compared: int
    first: Disagreement | None


def disagreement(one: Run, two: Run, *, inside: str | None = None) -> Agreement:
    """Hold two float64 runs that are anchored to the same run against each other. ``inside``: in
    this block alone."""
    if one.manifest.plan.anchored_to != two.manifest.plan.anchored_to:
        return Agreement(num_compared=0, first=None)
    count, first = 0, None
    for record in one.records:
        if record.pass_ != "anchored" or is_operator_site(record.site):
            continue
        if inside is not None and not record.site.startswith((f"{inside}.", f"{inside}:")):
            continue
        other = two.find(record.coordinates)
        if other is None or other.positions != record.positions:
            continue
        found = _distance(one, record, two, other)
        count += 1
        if found is not None and (first is None or _place(record) < _place(first[0])):
            first = (record, *found)
    if first is None:
        return Agreement(num_compared=count, first=None)
    record, distance, limit = first
    first_off = Disagreement(
        site=record.site, sample=record.sample, step=record.step, rel_l2=distance, limit=limit
    )
    return Agreement(num_compared=count, first=first_off)


def _place(record: Record) -> tuple[int, int, int]:
    return (record.sample, record.step, record.order)


def _distance(one: Run, record: Record, two: Run, other: Record) -> tuple[float, float] | None:
    """(relative L2, limit) where it is beyond the limit."""
    if record.xxh3 is not None and record.xxh3 == other.xxh3:
        return None
    form = format_named(record.dtype)
    limit = limit_of(one.manifest, record)
    if record.shape != other.shape or record.dtype != other.dtype:
        return math.inf, limit
    if not (one.has_bytes(record) and two.has_bytes(other)):
        return None
    x, y = one.read(record), two.read(other)
    if form.kind != "float":
        return None if bool((x == y).all()) else (math.inf, 0.0)
    kept = [without_pads(one.manifest, record, tensor.double()) for tensor in (x, y)]
    if kept[0] is None or kept[1] is None:
        return None
    x, y = kept[0], kept[1]
    same = x.isfinite()
    if not bool((same == y.isfinite()).all()):
        return math.inf, limit
    x, y = x.where(same, x.new_zeros(())), y.where(same, y.new_zeros(()))
    norm, apart = float(x.norm()), float((x - y).norm())
    distance = apart / norm if norm else (math.inf if apart else 0.0)
    return (distance, limit) if distance > limit else None


def without_pads(manifest: Manifest, record: Record, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with the rows of pads set to 0: what stands there is no result (a row that sees
    no key has one value in one kernel and another in the next). None where a batch has pads and
    the tensor's axes are not (B, T, ...): which of its rows are pads is not known."""
    group = next((g for g in manifest.tokens.groups if record.sample == g[0]), [record.sample])
    samples = [manifest.tokens.samples[number] for number in group]
    if record.step or not any(s.num_left_pad or s.num_right_pad for s in samples):
        return tensor
    lengths = {s.num_left_pad + len(s.prompt_ids) + s.num_right_pad for s in samples}
    if tensor.ndim < 2 or tensor.shape[0] != len(group) or {tensor.shape[1]} != lengths:
        return None
    tensor = tensor.clone()
    for row, sample in enumerate(samples):
        tensor[row, : sample.num_left_pad] = 0
        tensor[row, tensor.shape[1] - sample.num_right_pad :] = 0
    return tensor


def limit_of(manifest: Manifest, record: Record) -> float:
    """How far two float64 runs of one code may be apart at a site (relative L2)."""
    note = manifest.plan.modules.get(record.site.rpartition(":")[0])
    role = "block" if note is None else note.role
    features = record.shape[-1] if record.shape else 1
    stores, update = floor_weights(format_named("float64"), num_features=features, role=role)
    return SHARP * math.hypot(stores, update)


def other_code(one: Manifest, two: Manifest, block: str | None = None) -> list[str]:
    """Classes of modules whose code differs between two runs, of ``block`` where one is given.

    Empty where a run does not say. A class that one run alone has counts where something was
    replaced in it.
    """
    mine, theirs = _code(one), _code(two)
    if not mine or not theirs:
        return []
    found: list[str] = []
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if a is not None and b is not None:
            odd = _differing(_odd(a), _odd(b))
            if a.digest != b.digest:
                if any(_concerns(n, name, m, block) for n, m in ((a, one), (b, two))):
                    found.append(name)
            elif any(_lies_in(path, block) for path in odd):
                found.append(name)
            continue
        note, manifest = (b, two) if a is None else (a, one)
        if getattr(note, "replaced", ()) and _concerns(note, name, manifest, block):
            found.append(name)
    return found


def replaced_in(manifest: Manifest, block: str | None) -> list[str]:
    """Code put in the place of a class' own: of the modules inside ``block``, or of all."""
    found: list[str] = []
    for name, note in _code(manifest).items():
        odd = [path for path in _odd(note) if _lies_in(path, block)]
        if odd or (not _odd(note) and _concerns(note, name, manifest, block)):
            found += list(getattr(note, "replaced", ())) or [f"{name} in {path}" for path in odd]
    return found


def _code(manifest: Manifest) -> dict[str, Any]:
    """Notes on the code by class of module; empty where the run does not say."""
    return getattr(manifest.model, "code", None) or {}


def _odd(note: Any) -> dict[str, str]:
    """Modules of a class that run other code than most, by path."""
    return getattr(note, "odd", None) or {}


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [path for path in {**a, **b} if a.get(path) != b.get(path)]


def _lies_in(path: str, block: str | None) -> bool:
    return block is None or path == block or path.startswith(f"{block}.")


def _concerns(note: Any, name: str, manifest: Manifest, block: str | None) -> bool:
    """May a module of this class run in ``block``? Where its places are not recorded, by the
    classes of the recorded modules; functions of torch run everywhere."""
    places = getattr(note, "places", None)
    if block is None or getattr(note, "origin", None) == "torch":
        return True
    if places:
        starred = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", block)
        return any(_lies_in(place, starred) for place in places)
    kinds = {
        module.kind.partition("/")[0]
        for path, module in manifest.plan.modules.items()
        if path.startswith(f"{block}.")
    }
    return not kinds or name in kinds or name.rpartition(".")[2] in kinds


def why_no_side(verdict: Verdict, truth: Run, a: Manifest, b: Manifest) -> str | None:
    """Why the truth cannot tell the side that the verdict names; None where it can."""
    if verdict.side == "reference" and verdict.kind in ("localized", "systematic", "drift"):
        return _unknown_owner(truth.manifest, a if truth.manifest.like != b.id else b)
    if verdict.side == "candidate":
        return _whose_code(a, b, None if verdict.onset is None else verdict.onset.block)
    return None


def _unknown_owner(truth: Manifest, own: Manifest) -> str | None:
    codes = [getattr(one.model, "code", None) for one in (truth, own)]
    if None in codes or all(codes):  # not recorded by this format, or held against each other
        return None
    return (
        "the truth is far from the reference and near the candidate: so a faulty reference looks, "
        "and so does a truth that the candidate's code made. The runs do not tell their code, so "
        "no side is named: make the truth again on the reference's machine"
    )


def _whose_code(a: Manifest, b: Manifest, block: str | None) -> str | None:
    names = other_code(a, b, block)
    if not names or (replaced_in(b, block) and not replaced_in(a, block)):
        return None
    mine = replaced_in(a, block)
    return (
        f"the sides run different code ({', '.join(names[:4])}), and the truth has the "
        "reference's: by it the candidate is off, but whose code is right it cannot tell"
        + (f". The reference's was replaced: {', '.join(mine[:3])}" if mine else "")
    )
