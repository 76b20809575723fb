"""Codes of activations: made as the scheme says, or not, and by which side.

Looked at in the anchored pass alone, where both sides quantise what the same inputs lead to, and
every quantiser is followed by the reference's codes, so that none inherits another's. With a truth,
each side's codes are held against x / scale before it is rounded; without one, against the
reference's codes, which tells no side. Each forward is one look and all of a site's together are
one more; ``numerics.codes`` states the limits. Where rounding explains everything it is said how
many codes differ, and by how much: what differs there lies on ties. Where no codes were
recorded (kernels that keep them to themselves) a verdict on values is unsure: a code that rounding
flips looks like a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from divergence.comparison.align.pieces import Pair, Pieces
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.measure.floors import work_format
from divergence.comparison.results.findings import Finding, Verdict
from divergence.comparison.results.sites import SiteResult, onset_at, order_of
from divergence.facts import Fact, fact, plain
from divergence.numerics.codes import CodeErrors, CodeQuestion, code_errors, merged
from divergence.numerics.floor import floor_weights
from divergence.run.schema.provenance import QuantizationNote
from divergence.run.schema.site import CODES, HEAD_CODES, is_codes, module_of, starred
from divergence.words import Side, SideOrBoth, letter

if TYPE_CHECKING:
    import torch

__all__ = ["explain", "find"]

_ENDS = {"int8": (-128.0, 127.0), "int16": (-256.0, 256.0), "float8_e4m3fn": (-448.0, 448.0)}
"""Of codes less their zero point: with one, the ends of the range are where it puts them."""
_SIDES: tuple[Side, Side] = ("reference", "candidate")


@dataclass(slots=True)
class _Site:
    """One quantiser: its forwards in order, and the errors of each side in each of them."""

    results: list[SiteResult] = field(default_factory=list)
    errors: dict[Side, list[CodeErrors]] = field(default_factory=dict)
    num_codes: int = 0
    num_different: int = 0
    most_apart: int = 0

    def beyond(self, side: Side) -> tuple[list[CodeQuestion], SiteResult] | None:
        """The looks of one forward, or of all together, that are beyond their limits, and where:
        those of the most codes."""
        parts = self.errors.get(side, [])
        looks = [(part.looks(), at) for part, at in zip(parts, self.results, strict=False)]
        if len(parts) > 1:
            first = next((at for group, at in looks if any(look.usage > 1 for look in group)), None)
            looks.append((merged(parts).looks(), first or self.results[0]))
        off = [([look for look in group if look.usage > 1], at) for group, at in looks]
        nonempty = [item for item in off if item[0]]
        return max(nonempty, key=lambda item: (item[0][0].num_codes, len(item[0])), default=None)


def find(measured: Measured) -> AnalysisResult:
    """One conviction for all quantisers that are off; else how many codes differ."""
    sites, uncoded = _sites(measured), list(_uncoded(measured))
    if not sites:
        return AnalysisResult(findings=uncoded)
    told = measured.truth is not None
    off: list[tuple[_Site, dict[Side, tuple[list[CodeQuestion], SiteResult]]]] = []
    for site in sites.values():
        faults = {side: beyond for side in site.errors if (beyond := site.beyond(side)) is not None}
        if faults:
            off.append((site, faults))
    if not off:
        return AnalysisResult(findings=[_healthy(list(sites.values())), *uncoded])
    off.sort(key=lambda item: order_of(item[0].results[0]))
    first, faults = off[0]
    sides = {side for _, mine in off for side in mine}
    side: SideOrBoth | None = None
    if told:
        side = "both" if len(sides) > 1 else sides.pop()
    _, at = next(iter(faults.values()))
    family = len(off) >= 3 and len(off) > len(sites) / 2
    place = _named(at.site, "what enters ")
    headline = (
        fact("codes_wrong_everywhere", module=module_of(at.site))
        if family
        else fact("codes_wrong_at", place=place, by=side if side in _SIDES else None)
    )
    evidence = [
        _evidence(_named(where.site), who if told else None, looks)
        for _, mine in off[:3]
        for who, (looks, where) in mine.items()
    ]
    return AnalysisResult(
        findings=[
            Finding(
                claim="codes_wrong",
                kind="systematic" if family else "localized",
                headline=[headline],
                onset=onset_at(at),
                place=order_of(first.results[0]),
                equal_inputs=True,
                side=side,
                rests_on=[check("truth", told, "no truth", made=told)],
                evidence=evidence,
                beside=evidence[:1],
                commands=measured.advice.look_at(at.site),
                flags=[at.key],
            ),
            *uncoded,
        ]
    )


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Without codes, what differs by more than rounding may be codes on ties."""
    if verdict.kind not in ("localized", "systematic", "drift") or verdict.confidence == "low":
        return []
    anchored = {site.site for site in measured.sites if site.pass_ == "anchored"}
    coded = {starred(module_of(site)) for site in anchored if is_codes(site)}
    ports = {site.rpartition(":")[2] for site in anchored if is_codes(site)}
    lacking = []
    for run in (measured.reference, measured.candidate):
        note = run.manifest.model.quantization
        if note is None:
            continue
        if note.has_coded_inputs and CODES not in ports:
            lacking.append("activations")
        elif note.has_coded_inputs and verdict.onset is not None:
            block = verdict.onset.block
            inside = [
                path
                for path in run.manifest.plan.modules
                if block is not None and path.startswith(f"{block}.")
            ]
            lacking += _silent(note, coded, {starred(path) for path in inside})
        if note.kv_cache is not None and not ports & set(HEAD_CODES.values()):
            lacking.append("keys and values")
    lacking = [*dict.fromkeys(lacking)]
    if not lacking:
        return []
    why = f"codes of {' and of '.join(lacking)} were not recorded: one that rounding flips looks "
    why += "like a fault"
    return [
        Finding(
            claim="side_not_told", role="abstains", rests_on=[check("measured", False, why)],
            evidence=[plain(why)],
        )
    ]  # fmt: skip


def _silent(note: QuantizationNote, coded: set[str], inside: set[str]) -> Iterator[str]:
    """Of the modules ``inside`` a block: what quantises its inputs and told no code, as stacked
    experts do. A scheme's name may be that of a parameter."""
    for scheme in note.schemes:
        for name in scheme.modules if scheme.activations is not None else ():
            if name not in coded and inside & {name, name.rpartition(".")[0]}:
                yield f"what enters {name}"


def _uncoded(measured: Measured) -> Iterator[Finding]:
    """Where one side alone has no codes although it was asked for them: the first such place of
    each. What it takes there is no code times its scale."""
    a, b = measured.reference, measured.candidate
    if a.manifest.plan.sites != b.manifest.plan.sites:
        return
    made = [
        {(r.site, r.sample, r.step): r.order for r in run.records
         if r.pass_ == "free" and is_codes(r.site)}
        for run in (a, b)
    ]  # fmt: skip
    shared = set.intersection(*({key[1:] for key in orders} for orders in made))
    for side, orders, others in zip(_SIDES, made, reversed(made), strict=True):
        asked = {key: order for key, order in others.items() if key[1:] in shared}
        lacking = [key for key in asked if key not in orders]
        if not lacking:
            continue
        first = min(lacking, key=lambda key: (asked[key], *key))[0]
        num, of = (sum(key[0] == first for key in keys) for keys in (lacking, asked))
        text = (
            f"{letter(side)} makes no codes of {_named(first, 'what enters ')} in {num} of {of} "
            "forwards: what it takes there is no code times its scale"
        )
        yield Finding(claim="context", role="context", evidence=[plain(text)])


def _named(site: str, inputs: str = "") -> str:
    """What the codes of a site are of; ``inputs`` stands before a module whose input they are."""
    path, _, port = site.partition(":")
    path, letters = module_of(path), [each for each in HEAD_CODES if HEAD_CODES[each] == port]
    return f"the {_HEADS[letters[0]]} of {path}" if letters else f"{inputs}{path}"


_HEADS = {"q": "queries", "k": "keys", "v": "values"}


def _sites(measured: Measured) -> dict[str, _Site]:
    a, b = measured.reference, measured.candidate
    results = {(s.pass_, s.sample, s.step, s.site): s for s in measured.sites if s.of is None}
    pieces, sites = Pieces(a, b), dict[str, _Site]()
    for pair in measured.alignment.pairs:
        reference = pair.reference.record
        if pair.pass_ != "anchored" or not is_codes(reference.site):
            continue
        result = results.get((pair.pass_, pair.reference.sample, pair.reference.record.step,
                              reference.site))  # fmt: skip
        both = ((a, pair.reference.record), (b, pair.candidate.record))
        if result is None or not all(run.has_bytes(record) for run, record in both):
            continue
        _add(sites.setdefault(reference.site, _Site()), measured, pieces, pair, result)
    return {name: site for name, site in sites.items() if site.errors}


def _add(site: _Site, measured: Measured, pieces: Pieces, pair: Pair, result: SiteResult) -> None:
    """Measure one forward of a quantiser."""
    x = pieces.tensor(measured.reference, pair.reference)
    y = pieces.tensor(measured.candidate, pair.candidate)
    ends = _ENDS.get(str(x.dtype).removeprefix("torch."))
    if ends is None or x.shape != y.shape or x.dtype != y.dtype:
        return
    wanted = None
    if measured.truth is not None:
        record = measured.truth.record(pair)
        if record is None or not measured.truth.run.has_bytes(record):
            return
        wanted = pieces.rows_of(measured.truth.run.read(record), pair.reference)
        if wanted.shape != x.shape:
            return
    work = work_format(measured.reference.manifest, measured.candidate.manifest)
    floor = floor_weights(work, num_features=x.shape[-1], role="inner")[1]
    real = pieces.row_mask(pair.reference, tuple(x.shape))
    if real is not None:
        x, y = x.flatten(0, -2)[real], y.flatten(0, -2)[real]
        wanted = None if wanted is None else wanted.flatten(0, -2)[real]

    def errors(codes: torch.Tensor, expected: torch.Tensor, within: float) -> CodeErrors:
        return code_errors(
            codes, expected, ends=ends, roundoff=work.unit_roundoff, room=measured.thresholds.token,
            floor=floor, within=within,
        )  # fmt: skip

    site.results.append(result)
    half = 1.0 if str(x.dtype) == "torch.int16" else 0.5
    if wanted is None:
        site.errors.setdefault("candidate", []).append(errors(y, x.double(), half + 0.5))
    else:
        for side, codes in zip(_SIDES, (x, y), strict=True):
            site.errors.setdefault(side, []).append(errors(codes, wanted, half))
    apart = (_lattice(x) - _lattice(y)).abs()
    site.num_codes += apart.numel()
    site.num_different += int((apart > 0).sum())
    site.most_apart = max(site.most_apart, int(apart.max()) if apart.numel() else 0)


def _lattice(codes: torch.Tensor) -> torch.Tensor:
    """How many codes from zero; of floats, the number of floats between."""
    import torch

    if not codes.is_floating_point():
        return codes.int()
    bits = codes.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits)


def _healthy(sites: Sequence[_Site]) -> Finding:
    num = sum(site.num_codes for site in sites)
    different = sum(site.num_different for site in sites)
    text = f"codes of activations: all {num:,} are equal on both sides"
    if different:
        most = max(site.most_apart for site in sites)
        text = (
            f"codes of activations: {different:,} of {num:,} differ, by {most} at most, where "
            "x / scale lies next to the middle between two of them: rounding"
        )
    return Finding(
        claim="context", role="context",
        evidence=[plain(text, num_codes=num, num_different=different)],
    )  # fmt: skip


def _evidence(place: str, side: Side | None, looks: Sequence[CodeQuestion]) -> Fact:
    who = "B's codes against A's" if side is None else f"{letter(side)}'s codes"
    values = {look.what: look.value for look in looks} | {"num_codes": looks[0].num_codes}
    # the mean that tells what it is before the count of what it leads to
    told = "; ".join(
        _text(look) for look in sorted(looks, key=lambda look: look.what == "outliers")
    )
    return plain(f"{place}, {who}: {told}", **values)


def _text(look: CodeQuestion) -> str:
    over = f"(limit {look.limit:.2g}, {look.num_codes:,} codes)"
    if look.what == "outliers":
        return (
            f"{look.value:,.0f} of {look.num_codes:,} are not the nearest to x / scale, but up to "
            f"{look.farthest:.1f} from it"
        )
    if look.what == "inward":
        toward = "near to" if look.value > 0 else "far from"
        return f"{abs(look.value):.2f} too {toward} zero on average {over}"
    if look.what == "offset":
        return f"{look.value:+.2f} on average {over}"
    return f"{100 * look.value:+.2f}% in scale {over}"
