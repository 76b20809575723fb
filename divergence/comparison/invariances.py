"""Differences that the output does not depend on, taken off before they are judged.

A difference of two correct programs is not always rounding. Some quantities are free:

- a constant added to a row's logits: softmax(z + c) = softmax(z). Logits that are centred, that are
  log-probabilities already, or that a bias of one size moves, give the same probabilities.
- one angle a channel in which the rotary tables of all tokens of a prompt are turned: with
  R(θ) the rotation, R(θ_q + φ)ᵀ R(θ_k + φ) = R(θ_k - θ_q), so attention sees differences of
  positions alone. Prompts whose positions begin at another number compute the same model.
- a sign, a factor or an order of the channels that one module of a block gives and the next one
  takes back: heads or neurons in another order with the next matrix's columns in that order, a
  factor of the queries that is taken off the keys.

Whether a difference is of such a form is measured, and by itself excuses nothing. What the form
explains is taken off the candidate, and everything is measured and judged again: only where then
nothing is beyond rounding at these places, the rest of the difference included, and where the free
runs end together, does the output not depend on it. A factor alone is no such form: it must be seen
to be taken back, in equal inputs, by a module that gets it and gives what the other side gives.

Nothing of this is looked at where nothing is beyond its limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from divergence.comparison.align import Pair, Pieces, repeated, same_positions
from divergence.comparison.constants import (
    EXPLAINED_SHARE,
    FEW_ROWS,
    TAKEN_BACK_TIMES,
    WHOLE_SHIFT_DISTANCE,
)
from divergence.comparison.decide import check, confidence_of
from divergence.comparison.result import Finding, Report, SiteResult, order_of
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import Thresholds
from divergence.numerics.formats import format_named
from divergence.run.reader import Overlay
from divergence.run.site import module_of

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured
    from divergence.run.reader import Run
    from divergence.run.record import Coordinates, Record

_QUIET = ("identical", "within_floor")

Changed = dict["Coordinates", tuple["Record", "np.ndarray"]]
"""Records of the candidate, and what they hold without what the output does not depend on."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Says what differs, ``changed`` without it, and what is left there and is not judged."""

    fact: Fact
    changed: Changed
    rounding: float = 0.0


@dataclass(frozen=True, slots=True)
class Freed:
    """``candidate`` without the differences that ``facts`` tell, which stood at ``places``."""

    candidate: Run
    facts: list[Fact]
    places: frozenset[Coordinates]
    rounding: float = 0.0
    """How far angles are off that float32 rounds at other positions, relative to the tables."""

    def report(self, before: Report, after: Report, thresholds: Thresholds) -> Report:
        """``after``, which is of the candidate without them, with what differs told; or ``before``,
        where what is left there is no rounding."""
        verdict = after.verdict
        onset = verdict.onset
        sites = {place[3] for place in self.places}
        if onset is not None and onset.site in sites:
            return before
        headline = list(verdict.headline)
        if verdict.kind == "drift":
            free = (s for s in after.sites if s.pass_ == "free" and s.role in ("block", "trunk"))
            end = max((site.token_rel_l2_max or 0.0 for site in free), default=0.0)
            if not end <= thresholds.free_gain * self.rounding:
                return before
            checks = [check("anchored", True), check("free_runs", False, fact("angles_round_more"))]
            headline = [fact("only_rounding", sure=True, numbers=None)]
            rounds = fact("angles_round", rounding=self.rounding, rel_l2=end)
            verdict = replace(
                verdict,
                kind="within_floor",
                headline=headline,
                side=None,
                checks=checks,
                confidence=confidence_of(checks),
                evidence=[rounds],
                commands=[],
            )
        if verdict.kind == "identical":
            headline = [fact("rest_is_equal")]
            verdict = replace(verdict, kind="within_floor")
        evidence = [*verdict.evidence, *self.facts]
        if verdict.kind in _QUIET:
            alike: dict[str, list[Fact]] = {}  # the same of several places is told once
            for each in self.facts:
                rest = {
                    k: v for k, v in each.values.items() if k not in ("sites", "site", "module")
                }
                alike.setdefault(f"{each.code} {rest}", []).append(each)
            what = [
                same[0] if len(same) == 1 else same[0].with_values(more=len(same) - 1)
                for same in alike.values()
            ]
            headline = [*headline, fact("no_output_depends", what=what)]
            evidence = [*self.facts, *verdict.evidence]
        verdict_told = replace(verdict, headline=headline, evidence=evidence)
        own = {site.key: site for site in before.sites}
        judged = (
            "floor",
            "ratio",
            "ratio_max",
            "ratio_sink",
            "prompts",
            "limit",
            "limit_usage",
            "usage",
            "flagged",
            "truth",
        )
        results: list[SiteResult] = []
        for site in after.sites:
            is_changed = (site.pass_, site.sample, site.step, site.site) in self.places
            if site.key in own and is_changed:
                site = replace(own[site.key], **{name: getattr(site, name) for name in judged})
            results.append(site)
        return replace(
            after,
            verdict=verdict_told,
            reference=before.reference,
            candidate=before.candidate,
            sites=results,
            findings=[
                *(f for f in after.findings if f.claim != "drift" or verdict.kind not in _QUIET),
                Finding(claim="context", role="context", evidence=self.facts),
            ],
        )


def freed(measured: Measured, report: Report) -> Freed | None:
    """The candidate without what no output depends on, where what is flagged has such a form."""
    sites = {site.site for site in report.sites if site.flagged}
    if report.verdict.onset is not None:
        sites.add(report.verdict.onset.site)
    looks = (_constant_of_rows(measured, sites), _turned_tables(measured, sites))
    forms = [*filter(None, looks), *_taken_back(measured, report)]
    if not forms:
        return None
    changed = {place: change for form in forms for place, change in form.changed.items()}
    names = {pair.candidate.record.coordinates: pair for pair in measured.alignment.pairs}
    places = {
        (pair.pass_, pair.reference.sample, pair.candidate.record.step, pair.reference.record.site)
        for coordinates in changed
        if (pair := names.get(coordinates)) is not None
    }
    return Freed(
        candidate=Overlay(measured.candidate, changed.values(), whole=True),
        facts=[form.fact for form in forms],
        places=frozenset({*places, *changed}),
        rounding=max(form.rounding for form in forms),
    )


# A constant of each row of logits.


def _constant_of_rows(measured: Measured, sites: set[str]) -> _Form | None:
    """Finds whether the logits differ by one constant a row. The logits are what the model gives,
    and what a module outside the blocks gives that is handed on unchanged on both sides: what is
    capped or scaled behind it is no softmax's input."""
    own = _logits(measured)
    if not own & sites:
        return None
    pieces = Pieces(measured.reference, measured.candidate)
    pairs = [pair for pair in _float_pairs(measured) if pair.reference.record.site in own]
    squared = explained = largest = 0.0
    for pair in pairs:
        a, b = _tensors(pieces, pair)
        if a.shape != b.shape or a.ndim < 2:
            return None
        constants, sums = _row_constants(a, b)
        squared, explained = squared + sums[0], explained + sums[1]
        largest = max(largest, float(np.abs(constants).max()))
    if not squared or explained < EXPLAINED_SHARE * squared:
        return None
    changed: Changed = {}
    for pair in pairs:
        record = pair.candidate.record
        _, whole = changed.get(record.coordinates, (record, None))
        if whole is None:
            whole = wide(measured.candidate.array(record))
        constants, _ = _row_constants(*_tensors(pieces, pair))
        changed[record.coordinates] = record, _less(whole, pair, constants)
    for record, partner in _escalated(measured, own):
        a, b = wide(partner), wide(measured.candidate.array(record))
        if a.shape == b.shape:
            changed[record.coordinates] = record, b - _row_constants(a, b)[0]
    site = measured.reference.manifest.plan.logits_site
    kl = [s.logits.kl_max for s in measured.sites if s.logits is not None and s.pass_ == "free"]
    shifted = fact("logits_shifted", site=site, largest=largest, kl=max(kl, default=None))
    return _Form(shifted, changed)


def _logits(measured: Measured) -> set[str]:
    """The sites that hold the logits: the run's, and those outside the blocks that hold the very
    same numbers on both sides, in every forward."""
    a, b, rename = measured.reference, measured.candidate, measured.rename
    site = a.manifest.plan.logits_site
    if site is None or b.manifest.plan.logits_site != rename(site):
        return set()
    notes = a.manifest.plan.modules
    trunk = {
        record.site
        for record in a.records
        if record.pass_ == "free"
        and record.site.endswith(":out")
        and (note := notes.get(module_of(record.site))) is not None
        and note.role == "trunk"
    }
    return {site} | {
        other
        for other in trunk - {site}
        if _hands_on(a, other, site) and _hands_on(b, rename(other), rename(site))
    }


def _hands_on(run: Run, site: str, logits: str) -> bool:
    """Does a site hold the logits in every forward, whatever their dtype? Of a batch there is one
    for all its prompts."""
    forwards = [(r.sample, r.step) for r in run.records if (r.pass_, r.site) == ("free", logits)]
    for forward in forwards:
        first, second = run.find(("free", *forward, site)), run.find(("free", *forward, logits))
        if first is None or second is None or first.shape != second.shape:
            return False
        if first.xxh3 is not None and (first.xxh3, first.dtype) == (second.xxh3, second.dtype):
            continue
        if not (run.has_bytes(first) and run.has_bytes(second)):
            return False
        if not np.array_equal(wide(run.array(first)), wide(run.array(second))):
            return False
    return bool(forwards)


def _row_constants(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """(of each row the mean of b - a (…, 1), (Σ(b - a)², what the means explain of it)), over what
    is finite on both sides."""
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore"):
        apart = np.where(finite, b - a, 0.0)
    count = finite.sum(axis=-1, keepdims=True)
    constants = apart.sum(axis=-1, keepdims=True) / np.maximum(count, 1)
    return constants, (float(np.square(apart).sum()), float((np.square(constants) * count).sum()))


def _less(whole: np.ndarray, pair: Pair, constants: np.ndarray) -> np.ndarray:
    """``whole`` less the constants of the rows that the pair is of."""
    piece, rest = pair.candidate, whole.copy()
    positions, others = piece.record.positions, pair.reference.record.positions
    if piece.row is None and positions is None and others is not None:
        rest[:, list(others)] -= constants
    elif piece.row is None:
        rest -= constants
    else:
        rest[piece.row : piece.row + 1, piece.left : piece.right] -= constants
    return rest


def _escalated(measured: Measured, sites: set[str]) -> Iterator[tuple[Record, np.ndarray]]:
    """The candidate's escalated records at these sites, with what each is held against."""
    truth = None if measured.truth is None else measured.truth.run
    site_of = measured.rename
    names = {site_of(site): site for site in sites}
    for record in measured.candidate.records:
        if record.pass_ != "escalated" or record.site not in names:
            continue
        place = record.sample, record.step, names[record.site]
        for run, pass_ in ((truth, "anchored"), (measured.reference, "escalated")):
            partner = None if run is None else run.find((pass_, *place))
            if run is not None and partner is not None and run.has_bytes(partner):
                yield record, run.array(partner)
                break


# Rotary tables, turned by one angle a channel.


def _turned_tables(measured: Measured, sites: set[str]) -> _Form | None:
    """Finds whether cosine and sine are those of the other side, turned by one angle for all tokens
    of a prompt, in all its forwards. The candidate gets the reference's then, also where a block is
    given them; so what the blocks do in the free pass is judged as of equal tables."""
    sides = {"reference": measured.reference, "candidate": measured.candidate}
    tokens = measured.reference.manifest.tokens
    tables = {
        site.site.rpartition(":")[0]
        for site in measured.sites
        if site.site in sites and "rotary" in (site.kind or "").lower()
    }
    ports = ("out", "out.1")
    pairs = {
        (pair.pass_, record.sample, record.step, record.site): pair
        for pair in _float_pairs(measured)
        if (record := pair.reference.record).site.rpartition(":")[0] in tables
    }
    rows_of_batches = {
        piece.row for pair in pairs.values() for piece in (pair.reference, pair.candidate)
    } - {None}
    if not pairs or rows_of_batches:
        return None
    unit = max(format_named(p.candidate.record.dtype).unit_roundoff for p in pairs.values())
    by_content: dict[tuple[str | None, tuple[int, ...]], np.ndarray] = {}
    offsets: dict[int, float] = {}
    rounding = 0.0
    for module in tables:
        forwards = sorted({place[:3] for place in pairs if place[3].startswith(f"{module}:")})
        for pass_, sample in sorted({forward[:2] for forward in forwards}):
            rows: list[tuple[np.ndarray, np.ndarray]] = []
            for forward in forwards:
                if forward[:2] != (pass_, sample):
                    continue
                both = [pairs.get((*forward, f"{module}:{port}")) for port in ports]
                if None in both:
                    return None
                # cos + i sin of both sides (B, T, D), in complex128; nan at pads
                pairs_of_both = [pair for pair in both if pair is not None]
                a, b = repeated(
                    *(
                        _complex(*(run.array(getattr(p, name).record) for p in pairs_of_both))
                        for name, run in sides.items()
                    )
                )
                record = pairs_of_both[0].reference.record
                pads = tokens.pads(record.sample) if record.step == 0 else None
                if pads is not None and a.ndim == 3 and pads.shape == a.shape[:2]:
                    a = np.where(pads[..., None], math.nan, a)
                rows.append((a, b))
            members = measured.reference.manifest.tokens.group_of(sample) or [sample]
            for number, member in enumerate(members):
                turned = _turned(number, rows, unit)
                if turned is None:
                    return None
                offset, rest = turned
                offsets[member] = max(offset, offsets.get(member, offset), key=abs)
                rounding = max(rounding, rest)
    for pair in pairs.values():
        record = pair.candidate.record
        by_content[record.xxh3, record.shape] = measured.reference.array(pair.reference.record)
    changed = {
        record.coordinates: (record, by_content[record.xxh3, record.shape])
        for record in measured.candidate.records
        if record.xxh3 is not None and (record.xxh3, record.shape) in by_content
    }
    further = {sample: offset for sample, offset in offsets.items() if offset}
    if not further:
        return None
    whole = all(abs(offset - round(offset)) < WHOLE_SHIFT_DISTANCE for offset in further.values())
    headline = fact(
        "tables_turned",
        site=f"{min(tables)}:out",
        samples=sorted(further),
        total=len(measured.reference.manifest.tokens.samples),
        offsets=[round(further[sample]) for sample in sorted(further)] if whole else None,
    )
    return _Form(headline, changed, rounding)


def _complex(cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    table = np.empty(cosine.shape, np.complex128)
    table.real, table.imag = wide(cosine), wide(sine)
    return table


def _turned(
    number: int, rows: Sequence[tuple[np.ndarray, np.ndarray]], unit: float
) -> tuple[float, float] | None:
    """(by how many positions the candidate's table of a prompt is turned on, 0.0 for not at all;
    what is left, relative to it). None where it is anything else than turned. ``number``: its row
    of the batch; ``unit``: the unit roundoff of the tables."""
    pieces = []
    for a, b in rows:
        if a.ndim != 3:
            return None
        row = number if a.shape[0] > 1 else 0
        if row >= a.shape[0]:
            return None
        kept = ~np.isnan(a[row]).any(axis=-1)
        pieces.append((a[row][kept], b[row][kept]))
    a, b = (np.concatenate(side) for side in zip(*pieces, strict=True))
    if len(a) < 2 or not np.isfinite(b).all():
        return None
    turn = (a.conj() * b).sum(axis=0) / np.maximum(np.square(np.abs(a)).sum(axis=0), 1e-300)  # (D,)
    turn = turn / np.maximum(np.abs(turn), 1e-300)
    angles = np.sort(np.angle(a[:-1].conj() * a[1:]), axis=0)
    step = angles[(len(angles) - 1) // 2]  # an angle a position
    slow = np.abs(step).argsort(kind="stable")[: max(1, len(step) // 4)]
    slow = slow[np.abs(step[slow]) > 0]
    shifts = np.sort(np.angle(turn)[slow] / step[slow])
    offset = float(shifts[(len(shifts) - 1) // 2]) if len(slow) else 0.0
    # an angle is a product that float32 rounds: by position times u, on either side
    room = 4 * unit + 4 * format_named("float32").unit_roundoff * (len(a) + abs(offset))
    rest = float((np.abs(b - a * turn) / np.maximum(np.abs(a), 1e-300)).max())
    if not rest <= room:
        return None
    return (offset if bool(np.abs(turn - 1).max() > room) else 0.0), rest


def _float_pairs(measured: Measured) -> Iterator[Pair]:
    """Pairs of floats of which both sides have their bytes."""
    for pair in measured.alignment.pairs:
        records = pair.reference.record, pair.candidate.record
        if (
            all(format_named(record.dtype).kind == "float" for record in records)
            and measured.reference.has_bytes(records[0])
            and measured.candidate.has_bytes(records[1])
        ):
            yield pair


def _tensors(pieces: Pieces, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64, in the rows that both have."""
    a = wide(pieces.array(pieces.reference, pair.reference))
    b = wide(pieces.array(pieces.candidate, pair.candidate))
    return same_positions(a, pair.reference.record, b, pair.candidate.record)


# Channels in another order, with other signs or of another size, which a module takes back.


@dataclass(frozen=True, slots=True)
class _Map:
    """The candidate's channels: ``factor * signs * a[:, order]``."""

    order: np.ndarray
    signs: np.ndarray
    factor: float

    def taken_off(self, b: np.ndarray) -> np.ndarray:
        """The candidate's tensor as if it had the reference's channels."""
        rows = wide(b).reshape(*b.shape[:2], -1)
        back = np.empty_like(rows)
        back[..., self.order] = rows * self.signs / self.factor
        return back.reshape(b.shape)


def _taken_back(measured: Measured, report: Report) -> Iterator[_Form]:
    """Yield, of each part of a block (its attention, its MLP) in which sites are beyond their
    limit, where all of them have the reference's channels in another order, with other signs or of
    another size, and the part takes that back: a module is given it and gives what the other side's
    gives; or queries and keys have it and what attention makes of them has not."""
    anchored = [site for site in report.sites if site.pass_ == "anchored" and site.block]
    flagged: dict[str, list[SiteResult]] = {}
    for site in anchored:
        if site.flagged:
            assert site.block is not None
            inside = module_of(site.site).removeprefix(site.block).removeprefix(".")
            flagged.setdefault(f"{site.block}.{inside.partition('.')[0]}", []).append(site)
    for part, results in flagged.items():
        sites = list(dict.fromkeys(s.site for s in sorted(results, key=order_of)))
        maps = {site: _map_of(measured, site) for site in sites}
        if any(channels is None for channels in maps.values()):
            continue
        channel_maps = {site: channels for site, channels in maps.items() if channels is not None}
        last = sites[-1]
        by = module_of(last)
        if not (last == f"{by}:in" and _gives_the_same(last, f"{by}:out", anchored)):
            by = part
            of_scores = set(sites) == {f"{part}.{name}_proj:out" for name in "qk"}
            if not of_scores or not _gives_the_same(sites[0], f"{part}.o_proj:in", anchored):
                continue
        site_of = measured.rename
        names = {site_of(site): site for site in sites}
        changed = {
            record.coordinates: (
                record,
                channel_maps[names[record.site]].taken_off(measured.candidate.array(record)),
            )
            for record in measured.candidate.records
            if record.site in names and measured.candidate.has_bytes(record)
        }
        first = channel_maps[sites[0]]
        moved = first.order != np.sort(first.order)
        yield _Form(
            fact(
                "taken_back",
                sites=sites,
                module=by,
                moved=int(moved.sum()) or None,
                signs=int((first.signs < 0).sum()) or None,
                channels=len(first.signs),
                factor=None if first.factor == 1.0 else first.factor,
            ),
            changed,
        )


def _gives_the_same(before: str, behind: str, sites: Sequence[SiteResult]) -> bool:
    """Is what comes ``behind`` measured and within its limit, and does the difference ``before`` it
    not reach it? What is nothing but zeros tells nothing."""
    given = [site for site in sites if site.site == before]
    given_on = [site for site in sites if site.site == behind]
    if not given_on or any(s.flagged or s.ratio is None or not s.reference_norm for s in given_on):
        return False
    apart = min(site.rel_l2 or 0.0 for site in given)
    return apart > TAKEN_BACK_TIMES * max(site.rel_l2 or 0.0 for site in given_on)


def _map_of(measured: Measured, site: str) -> _Map | None:
    """Say how the candidate's channels at a site come from the reference's, in anchored rows."""
    pieces = Pieces(measured.reference, measured.candidate)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for pair in _float_pairs(measured):
        if pair.pass_ != "anchored" or pair.reference.record.site != site:
            continue
        a, b = _tensors(pieces, pair)
        if a.ndim < 3 or a.shape != b.shape:
            return None
        a, b = (side.reshape(-1, math.prod(side.shape[2:])) for side in (a, b))
        mask = pieces.row_mask(pair.reference, pair.reference.record.shape)
        if mask is not None and len(mask) == len(a):
            a, b = a[mask], b[mask]
        rows.append((a, b))
    if not rows or len({a.shape[1] for a, _ in rows}) > 1:
        return None
    a, b = (np.concatenate(side) for side in zip(*rows, strict=True))
    if len(a) < FEW_ROWS or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    sizes = np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=0)
    if not ((sizes[0] > 0).all() and (sizes[1] > 0).all()):
        return None
    alike = (a / sizes[0]).T @ (b / sizes[1])  # (C, C): A's channels against B's
    own = alike.diagonal()
    order = np.arange(len(own))
    if not (np.abs(own) > EXPLAINED_SHARE).all():
        order = np.abs(alike).argmax(axis=0)
        if len(np.unique(order)) < len(order):
            return None
        own = alike[order, np.arange(len(order))]
    signs = np.sign(own)
    matched = a[:, order] * signs
    factor = float((matched * b).sum() / np.square(matched).sum())
    if abs(factor - 1) < 1 / 256:  # what rounding may make of none
        factor = 1.0
    rest, apart = np.square(b - factor * matched).sum(), np.square(b - a).sum()
    if not factor > 0 or not rest <= (1 - EXPLAINED_SHARE) * apart:
        return None
    return _Map(order, signs, factor)
