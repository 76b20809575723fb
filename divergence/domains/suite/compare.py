"""Two runs of a suite compared: each case measured, and the operators that are off."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from divergence.comparison.advice import beside
from divergence.comparison.analysis import report_of
from divergence.comparison.arithmetic import facts_of_operators
from divergence.comparison.decide import check
from divergence.comparison.result import (
    Coverage,
    Finding,
    Onset,
    Report,
    Skipped,
    VerdictKind,
)
from divergence.domains.suite.result import (
    SuiteCase,
    SuiteOperator,
    SuiteResult,
    SuiteSide,
    SuiteStatus,
)
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, fact
from divergence.numerics.formats import Format, format_of
from divergence.numerics.sums import ratio
from divergence.numerics.ulp import ROUNDING_RMS, spacing, ulp_distance
from divergence.run.command import Command, command, command_line
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import module_of, operator_of, split_site
from divergence.words import Progress, SideOrBoth, common_side, grouped, side_of, silent

# One output of one case of a suite: both sides against the truth.
#
# What a correct implementation may be off by is recorded in the truth, element by element
# (``out.floor``, from simulated rounding of the definition; see ``definition``). With the last
# rounding, uniform in half a spacing of the dtype to either side,
#
#     s_i² = floor_i² + (spacing(R_i) / √12)²        score = rms of (x_i - R_i) / s_i
#
# is 1 for a correct implementation, whatever the operator, the dtype or the values; 0 stands for an
# element that is exact and must be. An error of a row's scale (norm statistics in 16 bits, a
# softmax whose sum is rounded) hides among the elements' own rounding, and averages to
#
#     gain = <x - round(R), R> / ‖R‖²    over its standard deviation (``out.gain``), rms over rows.
#
# The limits are multiples of what rounding explains: 4 for the score, the room that the floor of a
# whole block is given (numerics.floor); 6 for the gain, as for blocks: six standard deviations of
# one row. Codes: with λ codes expected to be off by one (each where rounding may carry the value
# over a half), more than 4 λ + 6 √λ + 3 are too many, by both limits and the chance of few, and
# none may be off by more than one. Indices: a row whose choice has another score than the truth's
# by more than six standard deviations of that difference is wrong; an exactly equal score is a tie.

SCORE_LIMIT = 4.0
GAIN_LIMIT = 6.0
_FEW_CODES = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Truths:
    """Says what the truth holds of one output; what it does not hold is None."""

    value: torch.Tensor
    floor: torch.Tensor | None
    gain: torch.Tensor | None
    scores: torch.Tensor | None


def kind_of(dtype: torch.dtype) -> Literal["values", "codes", "indices"]:
    """``values``, ``codes`` (int8, 8-bit floats) or ``indices``."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return "values"
    return "codes" if dtype.itemsize == 1 else "indices"


def score_of_side(x: torch.Tensor, truth: Truths, *, subnormal: bool) -> SuiteSide:
    """One side against the truth. ``subnormal``: the case's values are; they may be flushed."""
    kind = kind_of(x.dtype)
    if kind == "values":
        form, true = format_of(x.dtype), truth.value
        rounded = true.to(x.dtype)
        finite = rounded.double().isfinite()  # beyond the range both may overflow
        computed = x.double()
        num_nonfinite = int((finite & ~computed.isfinite()).sum())
        kept = finite & computed.isfinite()
        difference = torch.where(kept, computed - true, 0.0)
        zero = (computed == 0.0) & kept & (rounded.double() != 0.0) & subnormal
        before = torch.zeros_like(true) if truth.floor is None else truth.floor.double()
        exact = (before == 0.0) & (rounded.double() == true)
        store = torch.where(exact, 0.0, spacing(true, form) * ROUNDING_RMS)
        deviation = (before.square() + store.square()).sqrt()
        z = torch.where(difference == 0.0, 0.0, difference / deviation)
        p99, largest = _ulp(x, rounded, true, form)
        return SuiteSide(
            error=ratio(float(difference.norm()), float(torch.where(kept, true, 0.0).norm())),
            ulp_p99=p99,
            ulp_max=largest,
            score=_rms(z[kept & ~zero]),
            gain=None
            if truth.gain is None
            else _gain(computed, rounded.double(), kept, zero, truth.gain),
            num_flushed=int(zero.sum()),
            num_nonfinite=num_nonfinite,
        )
    return _codes(x, truth) if kind == "codes" else _indices(x, truth)


def excess(side: SuiteSide, *, expected_off: float | None, count: int) -> float:
    """Return how far beyond its limit a side is: over 1 is beyond."""
    if side.num_nonfinite:
        return math.inf
    if side.score is not None:
        return max(side.score / SCORE_LIMIT, (side.gain or 0.0) / GAIN_LIMIT)
    if side.off_by_one is not None:
        if side.off_by_more:
            return math.inf
        expected = (expected_off or 0.0) * count
        allowed = SCORE_LIMIT * expected + GAIN_LIMIT * math.sqrt(expected) + _FEW_CODES
        return side.off_by_one * count / allowed
    return math.inf if side.rows_wrong else 0.0


def ideal_error(truth: Truths, form: Format) -> tuple[float, float]:
    """(‖round(R)-R‖/‖R‖, ‖floor‖/‖R‖) over the elements that the format holds."""
    rounded = truth.value.to(form.torch_dtype).double()
    kept = rounded.isfinite()
    true = truth.value[kept]
    norm = float(true.norm())
    floor = 0.0 if truth.floor is None else float(truth.floor.double()[kept].norm())
    return ratio(float((rounded[kept] - true).norm()), norm), ratio(floor, norm)


def between(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float | None, float | None]:
    """(rel_l2 or share that differs, ulp p99, ulp max) of the two sides; no ulp of indices."""
    form = format_of(a.dtype)
    if kind_of(a.dtype) != "values":
        share = float((a.float() != b.float()).double().mean()) if a.numel() else 0.0
        return share, None, None
    wide_a, wide_b = a.double(), b.double()
    finite = wide_a.isfinite() & wide_b.isfinite()
    difference = float((wide_a - wide_b)[finite].norm())
    p99, largest = _ulp(b, a, wide_a, form)
    return ratio(difference, float(wide_a[finite].norm())), p99, largest


def _gain(
    computed: torch.Tensor,
    rounded: torch.Tensor,
    kept: torch.Tensor,
    zero: torch.Tensor,
    deviation: torch.Tensor,
) -> float:
    """Rms over rows of <x - round(R), R> / ‖R‖² in standard deviations. Rows with flushed
    elements, or without a deviation, are left out."""
    value = torch.where(kept, rounded, 0.0)
    norm2 = value.square().sum(-1)
    difference = torch.where(kept, computed - rounded, 0.0)
    gain = (difference * value).sum(-1) / torch.where(norm2 > 0, norm2, 1.0)
    usable = (deviation > 0) & (norm2 > 0) & ~zero.any(-1)
    return _rms(gain[usable] / deviation.double()[usable])


def _codes(x: torch.Tensor, truth: Truths) -> SuiteSide:
    """Shares of codes; those that the truth leaves open (nan) are not judged."""
    true = truth.value.float()
    judged = ~true.isnan()
    if x.is_floating_point():
        apart = ulp_distance(x, truth.value, format_of(x.dtype))
        bad = judged & ~x.float().isfinite()
    else:
        apart = (x.long() - truth.value.long()).abs()
        bad = torch.zeros_like(judged)
    count = max(1, int(judged.sum()))
    return SuiteSide(
        off_by_one=int((judged & ~bad & (apart == 1)).sum()) / count,
        off_by_more=int((judged & ~bad & (apart > 1)).sum()) / count,
        num_nonfinite=int(bad.sum()),
    )


def _indices(x: torch.Tensor, truth: Truths) -> SuiteSide:
    """Shares of rows: a row is as bad as its worst choice."""
    true = truth.value
    different = x != true
    if truth.scores is None:
        rows = different if different.ndim < 2 else different.any(-1)
        share = float(rows.double().mean()) if rows.numel() else 0.0
        return SuiteSide(rows_tied=0.0, rows_near=0.0, rows_wrong=share)
    inside = (x >= 0) & (x < truth.scores.shape[-1])
    chosen = torch.where(inside, x, 0)
    gap = (truth.scores.gather(-1, chosen) - truth.scores.gather(-1, true)).abs()
    floor = torch.zeros_like(truth.scores) if truth.floor is None else truth.floor.double()
    spread = torch.hypot(floor.gather(-1, chosen), floor.gather(-1, true))
    ordered = x.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    wrong = (different & ((gap > GAIN_LIMIT * spread) | ~inside)).any(-1) | repeated
    near = (different & (gap > 0)).any(-1) & ~wrong
    tied = different.any(-1) & ~wrong & ~near
    return SuiteSide(
        rows_tied=float(tied.double().mean()),
        rows_near=float(near.double().mean()),
        rows_wrong=float(wrong.double().mean()),
    )


def _ulp(
    x: torch.Tensor, other: torch.Tensor, true: torch.Tensor, form: Format
) -> tuple[float, float]:
    """(p99, max) of the distance in values of ``form`` where |R| >= u·rms(R); see ulp_counts."""
    finite = true.isfinite() & x.isfinite() & other.isfinite()
    if not bool(finite.any()):
        return 0.0, 0.0
    rms = _rms(true[finite])
    kept = finite & (true.abs() >= form.unit_roundoff * rms)
    distance = ulp_distance(x, other, form)[kept].double()
    if not len(distance):
        return 0.0, 0.0
    return float(distance.quantile(0.99, interpolation="higher")), float(distance.max())


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


# What two runs of an operator suite show.


def find_in_suites(
    result: SuiteResult, a: Run, b: Run, coverage: Coverage, truth: Run | None
) -> Finding:
    wrong = [item for item in result.operators if item.status == "wrong"]
    names = [item.operator.removeprefix("suite.") for item in wrong]
    num_differ, total = sum(c.status != "identical" for c in result.cases), len(result.cases)
    whole = a.manifest.complete and b.manifest.complete and not coverage.unmatched

    def finding(kind: VerdictKind, headline: Fact, *commands: Command, **rest: Any) -> Finding:
        evidence = [
            _operator(item)
            for item in result.operators
            if item.status in ("wrong", "flushed", "ties")
        ]
        usual = {"rests_on": [check("coverage", whole, fact("suite.not_every_case"))]}
        return Finding(
            claim="suite",
            kind=kind,
            headline=[headline],
            evidence=evidence,
            commands=list(commands),
            **usual | rest,
        )

    if all(item.num_same == item.num_cases for item in result.operators):
        return finding("identical", fact("suite.all_same", total=total, wrong=names))
    if wrong:
        wrong_side = common_side(item.side or "both" for item in wrong)
        bad = [case for case in result.cases if case.status == "wrong"]
        nonfinite = all(
            any(
                side is not None and side.num_nonfinite for side in (case.reference, case.candidate)
            )
            for case in bad
        )
        many = len(wrong) > max(1, len(result.operators) / 2)
        worse = fact(
            "suite.worse",
            side=wrong_side,
            num_wrong=len(wrong),
            total=len(result.operators),
            wrong=names,
        )
        path = str((a if wrong_side == "reference" else b).path)
        return finding(
            "nonfinite" if nonfinite else "systematic" if many else "localized",
            worse,
            command(
                "repro",
                path,
                site=bad[0].site,
                o=beside(path, "-repro"),
                note=fact("shown_without_model"),
            ),
            side=wrong_side,
            rests_on=[],
            onset=Onset(
                site=bad[0].site,
                block=None,
                sample=0,
                step=0,
                position=None,
                pass_=a.records[0].pass_,
            ),
        )
    if unjudged := [case for case in result.cases if case.status == "differs"]:
        most = max(unjudged, key=lambda case: case.rel_l2)
        differ = fact(
            "suite.differ_unjudged",
            num_differ=num_differ,
            total=total,
            operator=most.operator,
            rel_l2=most.rel_l2,
        )
        return finding(
            "undetermined",
            differ,
            command("truth", a.path, o="truth"),
            command("compare", a.path, b.path, truth="truth"),
            rests_on=[check("measured", False)],
        )
    within = fact("suite.within_rounding", num_differ=num_differ, total=total)
    return finding("within_floor", within)


def _operator(item: SuiteOperator) -> Fact:
    worst = item.worst
    values: dict[str, Any] = {"rel_l2": worst.rel_l2}
    for name, side in (("reference", worst.reference), ("candidate", worst.candidate)):
        if side is not None and side.score is not None:
            values[f"{name}_score"] = side.score
            values[f"{name}_gain"] = side.gain or 0.0
    if worst.w is not None:
        values["w"] = worst.w
    return fact(
        "suite.operator",
        **values,
        operator=item.operator.removeprefix("suite."),
        side=item.side or "both",
        reason=worst.reason,
        case=module_of(worst.site),
        num=item.num_by_status[item.status],
        num_cases=item.num_cases,
    )


# Two runs of an operator suite: which operators does which side compute worse?
#
# Cases are paired by name, whatever the pass; only those with the same input bytes are compared.
# Each output is held to the truth by itself, so a side that is wrong is named without trusting the
# other. Without a truth it is said how far apart the sides are, and no more.

_RANK: dict[SuiteStatus, int] = {
    "wrong": 0,
    "differs": 1,
    "flushed": 2,
    "ties": 3,
    "healthy": 4,
    "identical": 5,
}


def report_on(
    a: Run,
    b: Run,
    *,
    truth: Run | None,
    floor: Sequence[object],
    layers: Sequence[Run],
    progress: Progress | None,
) -> Report:
    """The whole report on two suites. Raises what ``compare`` raises."""
    if layers:
        raise UsageError("--layers means nothing to suites: they have none")
    if floor:
        raise UsageError(
            "--floor means nothing to suites: what rounding explains is in their truth",
            hint=command_line("truth", a.path, o="TRUTH"),
        )
    if truth is not None:
        manifest, hint = truth.manifest, command_line("truth", a.path, o="TRUTH")
        if manifest.settings.compute_dtype is None:
            raise UsageError(f"{truth.path} is no truth: it was not computed in float64", hint=hint)
        if not any(record.site.endswith(".floor") for record in truth.records):
            raise UsageError(
                f"{truth.path} does not hold what a suite is judged by",
                hint=f"{hint} makes one that does",
            )
        ids = {name for run in (a, b) for name in (run.manifest.id, run.manifest.plan.anchored_to)}
        digests = {a.manifest.model.digest, b.manifest.model.digest}
        if manifest.plan.anchored_to not in ids and manifest.model.digest not in digests:
            raise UsageError(f"{truth.path} is the truth of other inputs", hint=hint)
    outputs_a, outputs_b = _outputs(a), _outputs(b)
    a.expect(outputs_a.values())
    b.expect(outputs_b.values())
    if truth is not None:
        truth.expect(truth.records)
    skipped: list[Skipped] = []
    cases: list[SuiteCase] = []
    inputs_a, inputs_b = _inputs(a, b), _inputs(b, a)
    for number, (site, record) in enumerate(outputs_a.items()):
        (progress or silent)("compare", number, len(outputs_a), site)
        other = outputs_b.get(site)
        if other is None:
            skipped.append(Skipped(*record.coordinates, "reference", fact("suite.no_partner")))
            continue
        path = module_of(site)
        if inputs_a.get(path) != inputs_b.get(path):
            skipped.append(Skipped(*record.coordinates, "both", fact("suite.other_inputs")))
        elif (record.shape, record.dtype) != (other.shape, other.dtype):
            reason = fact(
                "suite.other_results",
                reference_dtype=record.dtype,
                reference_shape=record.shape,
                candidate_dtype=other.dtype,
                candidate_shape=other.shape,
            )
            skipped.append(Skipped(*record.coordinates, "both", reason))
        else:
            cases.append(_case(a, b, truth, record, other))
    skipped += [
        Skipped(*record.coordinates, "candidate", fact("suite.no_partner"))
        for site, record in outputs_b.items()
        if site not in outputs_a
    ]
    if not cases:
        raise IncomparableError(
            "nothing was compared: the two suites have no case in common",
            where=f"{a.path} and {b.path}",
            hint=f"the first was left out because: {skipped[0].reason}" if skipped else None,
        )
    operators = []
    for name, cases_of in grouped(cases, lambda case: case.operator).items():
        worst = min(cases_of, key=_badness)
        path = module_of(worst.site)
        operators.append(
            SuiteOperator(
                operator=name,
                reference_implementation=_implementation(a.manifest, path),
                candidate_implementation=_implementation(b.manifest, path),
                status=worst.status,
                side=common_side(case.side for case in cases_of if case.status == worst.status),
                num_cases=len(cases_of),
                num_same=sum(case.same for case in cases_of),
                num_by_status=dict(Counter(case.status for case in cases_of)),
                worst=worst,
            )
        )
    result = SuiteResult(
        judged=truth is not None,
        score_limit=SCORE_LIMIT,
        gain_limit=GAIN_LIMIT,
        operators=sorted(operators, key=lambda operator: _badness(operator.worst)),
        cases=cases,
    )
    coverage = Coverage.of(len(cases), skipped)
    lines, arithmetic = facts_of_operators(a, b)
    finding = find_in_suites(result, a, b, coverage, truth)
    if finding.kind != "identical":
        evidence = [*finding.evidence, *arithmetic.brief()]
        finding = msgspec.structs.replace(finding, evidence=evidence)
    facts = []
    for side, run in (("reference", a), ("candidate", b)):
        for why, num in run.manifest.plan.skipped_operators.items():
            facts.append(fact("suite.skipped", side=side, num=num, reason=why))
        for item in run.manifest.overrides:
            names = {"name": item.name, "used": item.used, "reference": item.reference}
            facts.append(fact("suite.used", side=side, **names))
    return report_of(a, b, finding, coverage, lines, notes=facts, suite=result)


def _outputs(run: Run) -> dict[str, Record]:
    return {
        record.site: record
        for record in run.records
        if split_site(record.site)[1].partition(".")[0] == "out"
    }


def _inputs(run: Run, other: Run) -> dict[str, tuple[object, ...]]:
    """Case → its scalars, and the digests and strides of its tensors. A replay of the other run
    (``divergence replay``) holds no inputs of its own: they are the other's."""
    inputs: dict[str, tuple[object, ...]] = {}
    digests = {record.site: record.xxh3 for record in run.records}
    if run.manifest.plan.anchored_to == other.manifest.id:
        digests = {record.site: record.xxh3 for record in other.records} | digests
    for record in run.records:
        if record.call is not None:
            operands = tuple(
                (digests.get(operand.site or ""), operand.stride)
                for operand in record.call.operands
            )
            inputs[module_of(record.site)] = (record.call.arguments, operands)
    return inputs


def _case(a: Run, b: Run, truth: Run | None, record: Record, other: Record) -> SuiteCase:
    reference, candidate = a.read(record), b.read(other)
    kind = kind_of(reference.dtype)
    rel_l2, p99, largest = between(reference, candidate)
    same = record.xxh3 == other.xxh3
    case = SuiteCase(
        site=record.site,
        operator=operator_of(record.site),
        dtype=record.dtype,
        kind=kind,
        status="identical" if same else "differs",
        same=same,
        rel_l2=rel_l2,
        ulp_p99=p99,
        ulp_max=largest,
    )
    if truth is None:
        return case
    ports = ("", ".floor", ".gain", ".scores")
    records = [truth.find(("replayed", 0, 0, record.site + port)) for port in ports]
    value, *rest = (None if item is None else truth.read(item) for item in records)
    if value is None or value.shape != reference.shape:
        return case
    truths = Truths(value, *rest)
    subnormal = "subnormals" in module_of(record.site).split(".")
    sides = [score_of_side(x, truths, subnormal=subnormal) for x in (reference, candidate)]
    count = reference.numel()
    expected = None
    if kind == "codes" and truths.floor is not None:
        judged = ~truths.value.float().isnan()
        expected = float(truths.floor[judged].double().sum()) / max(1, count)
    over = [excess(side, expected_off=expected, count=count) for side in sides]
    status, side, reason = _status(sides, over, same)
    if kind == "values":
        ideal, before = ideal_error(truths, format_of(reference.dtype))
        errors = [side.error or 0.0 for side in sides]
        w = ratio(errors[1], errors[0]) if any(errors) else 1.0
        case = msgspec.structs.replace(case, ideal_error=ideal, floor=before, w=w)
    return msgspec.structs.replace(
        case,
        status=status,
        side=side,
        reason=reason,
        expected_off=expected,
        reference=sides[0],
        candidate=sides[1],
    )


def _status(
    sides: list[SuiteSide], over: list[float], same: bool
) -> tuple[SuiteStatus, SideOrBoth | None, Fact | None]:
    wrong = [value > 1.0 for value in over]
    if any(wrong):
        worst = sides[0] if over[0] >= over[1] else sides[1]
        return "wrong", side_of(wrong), _reason(worst)
    if same:
        return "identical", None, None
    zeros = [side.num_flushed for side in sides]
    # some round to 0 on every side
    flushed = [zeros[0] > 2 * zeros[1], zeros[1] > 2 * zeros[0]]
    if any(flushed):
        return "flushed", side_of(flushed), fact("suite.flushed")
    tied = [bool(side.rows_tied) for side in sides]
    if any(tied):
        return "ties", side_of(tied), fact("suite.tied")
    return "healthy", None, None


def _reason(side: SuiteSide) -> Fact:
    if side.num_nonfinite:
        return fact("suite.nonfinite", num_nonfinite=side.num_nonfinite)
    if side.score is not None and side.score > SCORE_LIMIT:
        return fact("suite.score", score=side.score, limit=SCORE_LIMIT)
    if side.score is not None:
        return fact("suite.gain", gain=side.gain or 0.0, limit=GAIN_LIMIT)
    if side.off_by_one is not None:
        return fact("suite.codes_off", off_by_one=side.off_by_one, off_by_more=side.off_by_more)
    return fact("suite.rows_wrong", rows_wrong=side.rows_wrong)


def _badness(case: SuiteCase) -> tuple[int, float]:
    """Sort key, worst first."""
    size = case.rel_l2
    if case.reference is not None and case.candidate is not None:
        sides = (case.reference, case.candidate)
        size = max(excess(side, expected_off=case.expected_off, count=1) for side in sides)
    return _RANK[case.status], -size


def _implementation(manifest: Manifest, path: str) -> str:
    note = manifest.plan.modules.get(path)
    return "-" if note is None else note.kind
