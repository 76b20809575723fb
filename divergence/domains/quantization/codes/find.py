"""Codes of activations: made as the scheme says, or not, and by which side.

Looked at in the anchored pass alone, where both sides quantise what the same inputs lead to, and
every quantiser is followed by the reference's codes, so that none inherits another's. With a truth,
each side's codes are held against x / scale before it is rounded; without one, against the
reference's codes, which tells no side. Each forward is one look and all of a site's together are
one more; ``coding`` states the limits. Where rounding explains everything it is said how
many codes differ, and by how much: what differs there lies on ties. Where no codes were
recorded (kernels that keep them to themselves) a verdict on values is unsure: a code that rounding
flips looks like a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from divergence.comparison.align import Pair, Pieces
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check, in_most
from divergence.comparison.measure.rating import work_format
from divergence.comparison.result import Finding, SiteResult, Verdict, order_of
from divergence.domains.quantization.coding import CodeErrors, CodeQuestion, code_errors, merged
from divergence.facts import Fact, fact
from divergence.numerics.arrays import as_tensor
from divergence.numerics.floor import floor_weights
from divergence.run.site import CODES, HEAD_CODES, is_codes, module_of, starred
from divergence.words import SIDES, Side, common_side

if TYPE_CHECKING:
    import torch

_ENDS = {"int8": (-128.0, 127.0), "int16": (-256.0, 256.0), "float8_e4m3fn": (-448.0, 448.0)}
"""Of codes less their zero point: with one, the ends of the range are where it puts them."""


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
    a, b = measured.reference, measured.candidate
    results = {(s.pass_, s.sample, s.step, s.site): s for s in measured.sites if s.of is None}
    pieces, coded = Pieces(a, b), dict[str, _Site]()
    for pair in measured.alignment.pairs:
        record = pair.reference.record
        if pair.pass_ != "anchored" or not is_codes(record.site):
            continue
        result = results.get((pair.pass_, pair.reference.sample, record.step, record.site))
        if result and a.has_bytes(record) and b.has_bytes(pair.candidate.record):
            _add(coded.setdefault(record.site, _Site()), measured, pieces, pair, result)
    sites = {name: site for name, site in coded.items() if site.errors}
    uncoded = list(_uncoded(measured))
    if not sites:
        return AnalysisResult(findings=uncoded)
    by_truth = measured.truth is not None
    off: list[tuple[_Site, dict[Side, tuple[list[CodeQuestion], SiteResult]]]] = []
    for site in sites.values():
        asked = {side: site.beyond(side) for side in site.errors}
        faults = {side: beyond for side, beyond in asked.items() if beyond is not None}
        if faults:
            off.append((site, faults))
    if not off:
        num = sum(site.num_codes for site in sites.values())
        apart = sum(site.num_different for site in sites.values())
        healthy = fact("codes.all_equal", num_codes=num)
        if apart:
            most = max(site.most_apart for site in sites.values())
            healthy = fact("codes.round_apart", num_codes=num, num_different=apart, most_apart=most)
        context = Finding(claim="context", role="context", evidence=[healthy])
        return AnalysisResult(findings=[context, *uncoded])
    off.sort(key=lambda item: order_of(item[0].results[0]))
    first, faults = off[0]
    side = common_side(side for _, site_off in off for side in site_off) if by_truth else None
    _, at = next(iter(faults.values()))
    family = in_most(len(off), len(sites))
    headline = fact("codes.wrong_everywhere", module=module_of(at.site))
    if not family:
        by = side if side in SIDES else None
        headline = fact("codes.wrong_at", place=_place(at.site), by=by)
    evidence = []
    for _, site_off in off[:3]:
        for who, (looks, where) in site_off.items():
            # the mean that tells what it is before the count of what it leads to
            looks.sort(key=lambda look: look.what == "outliers")
            place, seen = _place(where.site, entering=False), list(map(_look, looks))
            whose = who if by_truth else None
            evidence.append(fact("codes.beyond", place=place, side=whose, looks=seen))
    wrong = measured.finding_at(
        at,
        claim="codes_wrong",
        kind="systematic" if family else "localized",
        headline=[headline],
        place=order_of(first.results[0]),
        equal_inputs=True,
        side=side,
        rests_on=[check("truth", by_truth, fact("codes.no_truth"), made=by_truth)],
        evidence=evidence,
        beside=evidence[:1],
    )
    return AnalysisResult(findings=[wrong, *uncoded])


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Say that without codes what differs by more than rounding may be codes on ties."""
    if verdict.kind not in ("localized", "systematic", "drift") or verdict.confidence == "low":
        return []
    anchored = {site.site for site in measured.sites if site.pass_ == "anchored"}
    coded = {starred(module_of(site)) for site in anchored if is_codes(site)}
    ports = {site.rpartition(":")[2] for site in anchored if is_codes(site)}
    lacking: list[Fact] = []
    for run in (measured.reference, measured.candidate):
        note = run.manifest.model.quantization
        if note is None:
            continue
        if note.has_coded_inputs and CODES not in ports:
            lacking.append(fact("codes.of_activations"))
        elif note.has_coded_inputs and verdict.onset is not None:
            block = verdict.onset.block
            paths = [] if block is None else run.manifest.plan.modules
            inside = {starred(path) for path in paths if path.startswith(f"{block}.")}
            # what quantises its inputs there and told no code, as stacked experts do; a scheme's
            # name may be that of a parameter
            for scheme in note.schemes:
                for name in scheme.modules if scheme.activations is not None else ():
                    if name not in coded and inside & {name, name.rpartition(".")[0]}:
                        lacking.append(fact("codes.entering", module=name))
        if note.kv_cache is not None and not ports & set(HEAD_CODES.values()):
            lacking.append(fact("codes.of_cache"))
    lacking = [*dict.fromkeys(lacking)]
    if not lacking:
        return []
    why = fact("codes.not_recorded", what=lacking)
    return [
        Finding(
            claim="side_not_told",
            role="abstains",
            rests_on=[check("measured", False, why)],
            evidence=[why],
        )
    ]


def _uncoded(measured: Measured) -> Iterator[Finding]:
    """Yield where one side alone has no codes although it was asked for them: the first such place
    of each. What it takes there is no code times its scale."""
    a, b = measured.reference, measured.candidate
    if a.manifest.plan.sites != b.manifest.plan.sites:
        return
    made = [
        {
            (r.site, r.sample, r.step): r.order
            for r in run.records
            if r.pass_ == "free" and is_codes(r.site)
        }
        for run in (a, b)
    ]
    shared = set.intersection(*({key[1:] for key in orders} for orders in made))
    for side, orders, others in zip(SIDES, made, reversed(made), strict=True):
        asked = {key: order for key, order in others.items() if key[1:] in shared}
        lacking = [key for key in asked if key not in orders]
        if not lacking:
            continue
        first = min(lacking, key=lambda key: (asked[key], *key))[0]
        num, total = (sum(key[0] == first for key in keys) for keys in (lacking, asked))
        missing = fact("codes.none_made", side=side, place=_place(first), num=num, total=total)
        yield Finding(claim="context", role="context", evidence=[missing])


def _place(site: str, *, entering: bool = True) -> Fact | str:
    """Return what the codes of a site are of: the queries, keys or values of a module, or its
    input. ``entering``: say of an input that it is one."""
    path, _, port = site.partition(":")
    head = next((key for key, value in HEAD_CODES.items() if value == port), None)
    if head is not None:
        return fact("codes.of_heads", head=head, module=module_of(path))
    return fact("codes.entering", module=module_of(path)) if entering else module_of(path)


def _add(site: _Site, measured: Measured, pieces: Pieces, pair: Pair, result: SiteResult) -> None:
    x = as_tensor(pieces.array(measured.reference, pair.reference))
    y = as_tensor(pieces.array(measured.candidate, pair.candidate))
    ends = _ENDS.get(str(x.dtype).removeprefix("torch."))
    if ends is None or x.shape != y.shape or x.dtype != y.dtype:
        return
    wanted = None
    if measured.truth is not None:
        record = measured.truth.record(pair)
        if record is None or not measured.truth.run.has_bytes(record):
            return
        wanted = as_tensor(pieces.rows_of(measured.truth.run.array(record), pair.reference))
        if wanted.shape != x.shape:
            return
    work = work_format(measured.reference.manifest, measured.candidate.manifest)
    floor = floor_weights(work, num_features=x.shape[-1])[1]
    real = pieces.row_mask(pair.reference, tuple(x.shape))
    if real is not None:
        x, y = x.flatten(0, -2)[real], y.flatten(0, -2)[real]
        wanted = None if wanted is None else wanted.flatten(0, -2)[real]

    def errors(codes: torch.Tensor, expected: torch.Tensor, within: float) -> CodeErrors:
        return code_errors(
            codes,
            expected,
            ends=ends,
            roundoff=work.unit_roundoff,
            room=measured.thresholds.token,
            floor=floor,
            within=within,
        )

    site.results.append(result)
    half = 1.0 if str(x.dtype) == "torch.int16" else 0.5
    if wanted is None:
        site.errors.setdefault("candidate", []).append(errors(y, x.double(), half + 0.5))
    else:
        for side, codes in zip(SIDES, (x, y), strict=True):
            site.errors.setdefault(side, []).append(errors(codes, wanted, half))
    apart = (_lattice(x) - _lattice(y)).abs()
    site.num_codes += apart.numel()
    site.num_different += int((apart > 0).sum())
    site.most_apart = max(site.most_apart, int(apart.max()) if apart.numel() else 0)


def _lattice(codes: torch.Tensor) -> torch.Tensor:
    """Return how many codes it is from zero; of floats, the number of floats between."""
    import torch

    if not codes.is_floating_point():
        return codes.int()
    bits = codes.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits)


def _look(look: CodeQuestion) -> Fact:
    values: dict[str, Any] = {"limit": look.limit, "num_codes": look.num_codes}
    if look.what == "outliers":
        return fact("codes.outliers", num=look.value, farthest=look.farthest, **values)
    if look.what == "inward":
        return fact("codes.inward", codes=abs(look.value), near=look.value > 0, **values)
    if look.what == "offset":
        return fact("codes.offset", codes=look.value, **values)
    return fact("codes.stretched", share=look.value, **values)
