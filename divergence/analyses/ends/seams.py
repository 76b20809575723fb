"""Seams: what one block or trunk module hands on to the next, on each side by itself.

An anchored pass puts the reference's recorded tensor in the place of every block's and trunk
module's input, so what the code between them does is seen in the free pass alone; and there a
module is charged with what it adds, not with what comes in. So the seams are looked at
themselves. On each side an input is held, by its digest, against the outputs recorded before it in
the same forward:

- handed on unchanged on both sides: nothing is made there;
- unchanged on one side, changed on the other: what the other does there is measured on that side
  alone, x the input and y the output that the first side hands on, ‖x - y‖/‖y‖ of each row. One
  cast makes at most u in each element (round to nearest), two of them 2u, u the unit roundoff of
  the coarsest format in play: beyond that it is no rounding, and no other error is in the way.
  Where the two sides are closer at the input than that change, the output before it was apart
  already, and other code leads to the same tensor;
- changed on both sides (an embedding that is scaled, logits that are capped): the two sides'
  difference at the input is held against what the outputs before it carry, like that of a module
  in a free pass.

It says nothing of what both sides change alike, nor of an input whose partner was not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from divergence.comparison.align.pairs import Pair
from divergence.comparison.analysis import Measured
from divergence.comparison.results import SiteResult
from divergence.numerics.floor import Thresholds, floor_weights, spread
from divergence.numerics.formats import Format, format_named
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import ROOT, is_operator_site, module_of
from divergence.words import Side

if TYPE_CHECKING:
    import torch

_CASTS = 2.0
"""Roundings to nearest that a tensor may pass on its way: to a narrower format, and back."""

Way = Literal["changed", "grown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Something happens between ``before`` and ``site``, seen in the forward of ``result``.

    ``way``: ``changed`` on the side ``by`` alone, by ``size`` (the largest row's relative change),
    or ``grown``: the two sides' difference, over what the outputs before it carry. ``limit``: what
    ``size`` is held against. ``side``: which run is wrong, where a truth tells.
    """

    before: str
    site: str
    result: SiteResult
    way: Way
    size: float
    limit: float
    by: Side | None = None
    side: Side | None = None

    @property
    def beyond(self) -> bool:
        """Is it more than rounding?"""
        return not self.size <= self.limit


def find_seams(measured: Measured) -> list[Seam]:
    """Every seam at which something happens, in execution order, within its limit or beyond."""
    a, truth = measured.reference, measured.truth
    looked = _Looked(
        a=a,
        b=measured.candidate,
        truth=None if truth is None else truth.run,
        results={(s.pass_, s.sample, s.step, s.site): s for s in measured.sites},
        thresholds=measured.thresholds,
    )
    seams: list[Seam] = []
    first: dict[int, list[Pair]] = {}  # outputs of the first forward, which later ones use again
    for pairs in _forwards(measured.alignment.pairs, a.manifest):
        sample, step = pairs[0].reference.sample, pairs[0].reference.record.step
        seams += looked.in_forward(pairs, first.get(sample, []) if step else [])
        if step == 0:
            first[sample] = [pair for pair in pairs if not _takes(pair.reference.record.site)]
    return seams


def _forwards(pairs: Iterable[Pair], manifest: Manifest) -> Iterator[list[Pair]]:
    """The free pairs of blocks and trunk, one forward after another."""
    forwards: dict[tuple[int, int], list[Pair]] = {}
    known: dict[tuple[str, str], bool] = {}
    for pair in pairs:
        if pair.pass_ != "free":
            continue
        record = pair.reference.record
        key = record.site, record.dtype
        if key not in known:
            known[key] = is_passage(record, manifest)
        if known[key]:
            forwards.setdefault((pair.reference.sample, record.step), []).append(pair)
    for pairs_of_one in forwards.values():
        yield sorted(pairs_of_one, key=lambda pair: pair.reference.record.order)


def is_passage(record: Record, manifest: Manifest) -> bool:
    """A float tensor that a block or trunk module takes or gives."""
    if is_operator_site(record.site) or "mask" in record.site.partition(":")[2]:
        return False
    note = manifest.plan.modules.get(module_of(record.site))
    if note is None or note.role not in ("block", "trunk"):
        return False
    return format_named(record.dtype).kind == "float"


def _takes(site: str) -> bool:
    """Does something come out of the code between modules here? The model's own output does."""
    path, _, port = site.partition(":")
    return port.startswith("in") or path == ROOT


def _of(pair: Pair, side: int) -> Record:
    return (pair.reference, pair.candidate)[side].record


_Key = tuple[str | None, str, tuple[int, ...], tuple[int, ...] | None]
"""(digest, dtype, shape, positions) of what a record holds."""


def _digest(record: Record) -> str | None:
    return record.xxh3 or record.fold


def _key(record: Record) -> _Key:
    return _digest(record), record.dtype, record.shape, record.positions


class _Given:
    """The outputs so far, in order, and by what they hold: for the reference, the candidate."""

    def __init__(self, pairs: Iterable[Pair], is_block: Callable[[Pair], bool]) -> None:
        self.pairs: list[Pair] = []
        self._is_block = is_block
        self._last_block = 0
        self._by_key: tuple[dict[_Key, list[Pair]], ...] = ({}, {})
        for pair in pairs:
            self.add(pair)

    def add(self, pair: Pair) -> None:
        if self._is_block(pair):
            self._last_block = len(self.pairs)
        self.pairs.append(pair)
        for side in (0, 1):
            record = _of(pair, side)
            if _digest(record) is not None:
                self._by_key[side].setdefault(_key(record), []).append(pair)

    def since_last_block(self) -> list[Pair]:
        """The last block's output and what came after it; all where there is no block."""
        return self.pairs[self._last_block :]

    def equal_to(self, record: Record, side: int) -> list[Pair]:
        """By their digests."""
        return [] if _digest(record) is None else self._by_key[side].get(_key(record), [])


def _is_main(site: str) -> bool:
    """The stream itself, not what comes in beside it (tables, an encoder's states)."""
    return site.partition(":")[2] in ("in", "out")


@dataclass(frozen=True, slots=True)
class _Looked:
    a: Run
    b: Run
    truth: Run | None
    results: dict[tuple[str, int, int, str], SiteResult]
    thresholds: Thresholds

    def in_forward(self, pairs: Sequence[Pair], earlier: Sequence[Pair]) -> list[Seam]:
        """``earlier``: outputs of the first forward, such as an encoder's."""
        seams: list[Seam] = []
        given = _Given(earlier, self._is_block)
        for pair in pairs:
            record = pair.reference.record
            result = self.results.get(("free", pair.reference.sample, record.step, record.site))
            if _takes(record.site) and result is not None and not result.identical:
                seam = self._seam(pair, given, result)
                if seam is not None:
                    seams.append(seam)
            if not _takes(record.site):
                given.add(pair)
        return seams

    def _seam(self, pair: Pair, given: _Given, result: SiteResult) -> Seam | None:
        mine, theirs = pair.reference.record, pair.candidate.record
        ours = self._sources(self.a, mine, given, 0)
        others = self._sources(self.b, theirs, given, 1)
        if any(source is other for source in ours for other in others):
            return None  # the same output is handed on: no number is made
        if ours:
            return self._changed(self.b, theirs, ours[0].candidate.record, ours[0], result)
        if others:
            return self._changed(self.a, mine, others[0].reference.record, others[0], result)
        if not _is_main(mine.site):
            return None
        here = [p for p in given.since_last_block() if p.reference.record.step == mine.step]
        return self._grown(here, result)

    def _sources(self, run: Run, record: Record, given: _Given, side: int) -> list[Pair]:
        """The outputs before it that are this very tensor, the last one first; else one behind the
        last block of which it holds some rows."""
        sources = list(reversed(given.equal_to(record, side)))
        last = given.since_last_block()
        if not sources:  # of a tensor in parts there is no digest: the nearest ones are read
            near = ((pair, _of(pair, side)) for pair in reversed(last))
            sources = [
                pair
                for pair, other in near
                if None in (_digest(record), _digest(other)) and _same(run, record, other)
            ]
        if sources or record.positions is None:
            return sources
        narrowed = (
            pair
            for pair in reversed(last)
            if _narrowed(record, _of(pair, side)) and _equal(run, record, _of(pair, side))
        )
        return [pair] if (pair := next(narrowed, None)) is not None else []

    def _changed(
        self, run: Run, record: Record, before: Record, source: Pair, result: SiteResult
    ) -> Seam | None:
        """What ``run`` does to the tensor that the other side hands on."""
        import torch

        by: Side = "reference" if run is self.a else "candidate"
        name = source.reference.record.site
        if record.shape != before.shape and not _narrowed(record, before):
            size = math.inf
        elif not (run.has_bytes(record) and run.has_bytes(before)):
            return self._grown([source], result)  # by how much is not known of one side alone
        else:
            x, y = _rows(run, record, before)
            norm = y.norm(dim=-1)
            rows = torch.where(norm > 0, (x - y).norm(dim=-1) / norm, (x - y).norm(dim=-1))
            rows = rows[torch.isfinite(rows)]
            size = float(rows.max()) if len(rows) else 0.0
        unit = max(form.unit_roundoff for form in self._formats(record, before))
        limit = _CASTS * unit
        if result.token_rel_l2_max is not None and result.token_rel_l2_max < size / 2:
            # the outputs before it were apart, and meet here: other code, the same tensor
            limit = math.inf
        return Seam(
            before=name, site=result.site, result=result, way="changed", size=size, limit=limit,
            by=by, side=self._side(result, source, by),
        )  # fmt: skip

    def _formats(self, *records: Record) -> list[Format]:
        forms = [format_named(record.dtype) for record in records]
        forms += [format_named(run.manifest.model.dtype) for run in (self.a, self.b)]
        return [form for form in forms if form.kind == "float" and form.itemsize >= 2]

    def _side(self, result: SiteResult, source: Pair, by: Side) -> Side | None:
        """With a truth: the side that does what the truth does not."""
        if self.truth is None:
            return None
        site = result.site, result.candidate_site or result.site
        before = source.reference.record.site, source.candidate.record.site
        for end, start in zip(site, before, strict=True):
            record, other = (
                self.truth.find(("free", result.sample, result.step, name)) for name in (end, start)
            )
            if record is None or other is None:
                continue
            if _same(self.truth, record, other) or (
                _narrowed(record, other) and _equal(self.truth, record, other)
            ):
                return by
            return "reference" if by == "candidate" else "candidate"
        return None

    def _grown(self, given: Sequence[Pair], result: SiteResult) -> Seam | None:
        """Both sides compute something there: the difference over what came in.

        ``given``: the outputs since the last block's, since which of them is used is not known."""
        if result.token_rel_l2_median is None or not given:
            return None
        errors = [self._error(p) for p in given]
        carried = [error for error in errors if error is not None]
        if len(carried) < len(errors):
            return None
        entering = max(carried, default=0.0)
        forms = self._formats(given[-1].reference.record, given[-1].candidate.record)
        unit = max(forms, key=lambda form: form.unit_roundoff)
        store, update = floor_weights(
            unit, num_features=result.shape[-1] if result.shape else 1, role="trunk"
        )
        made = math.sqrt(max(0.0, result.token_rel_l2_median**2 - entering**2))
        allowed = math.sqrt(store**2 + update**2 + (self.thresholds.free_gain * entering) ** 2)
        size = made / allowed
        count = result.numel if result.estimated is None else result.estimated.num_values
        limit = self.thresholds.typical * spread(count)
        if size <= limit:
            return None
        return Seam(
            before=given[-1].reference.record.site, site=result.site, result=result, way="grown",
            size=size, limit=limit,
        )  # fmt: skip

    def _is_block(self, pair: Pair) -> bool:
        note = self.a.manifest.plan.modules.get(module_of(pair.reference.record.site))
        return note is not None and note.role == "block"

    def _error(self, pair: Pair) -> float | None:
        record = pair.reference.record
        result = self.results.get(("free", pair.reference.sample, record.step, record.site))
        return None if result is None else result.token_rel_l2_max


def _same(run: Run, record: Record, other: Record) -> bool:
    """Are they one tensor, bit for bit?"""
    if (other.dtype, other.shape, other.positions) != (
        record.dtype, record.shape, record.positions
    ):  # fmt: skip
        return False
    if None not in (_digest(record), _digest(other)):
        return _digest(other) == _digest(record)
    return _equal(run, record, other)


def _narrowed(record: Record, other: Record) -> bool:
    """Does it hold some of the other's token positions?"""
    return (
        record.positions is not None
        and other.positions is None
        and len(record.shape) == len(other.shape) >= 2
        and record.shape[0] == other.shape[0]
        and record.shape[2:] == other.shape[2:]
        and max(record.positions, default=0) < other.shape[1]
    )


def _rows(run: Run, record: Record, before: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, the second narrowed to the rows of the first."""
    x, y = run.read(record), run.read(before)
    if record.shape != before.shape and record.positions is not None:
        y = y[:, list(record.positions)]
    return x.double(), y.double()


def _equal(run: Run, record: Record, other: Record) -> bool:
    import torch

    if not (run.has_bytes(record) and run.has_bytes(other)):
        return False
    x, y = _rows(run, record, other)
    run.release((record, other))
    return torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())
