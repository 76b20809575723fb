"""Two runs of an operator suite: which operators does which side compute worse?

Cases are paired by name, whatever the pass; only those with the same input bytes are compared.
Each output is held to the truth by itself (see suite.measure), so a side that is wrong
is named without trusting the other. Without a truth it is said how far apart the sides are, and
no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from divergence.analyses.suite.find import find_in_suites
from divergence.analyses.suite.measure import (
    GAIN_LIMIT,
    SCORE_LIMIT,
    Truths,
    between,
    excess,
    ideal_error,
    kind_of,
    score_of_side,
)
from divergence.comparison.analysis import report_of
from divergence.comparison.arithmetic import facts_of_operators
from divergence.comparison.result import (
    Report,
    SuiteCase,
    SuiteOperator,
    SuiteResult,
    SuiteSide,
    SuiteStatus,
)
from divergence.comparison.results import Coverage, Skipped
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_of
from divergence.run.command import command_line
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import module_of, operator_of, split_site
from divergence.words import Progress, SideOrBoth, silent

__all__ = ["compare_suites", "report_on"]

_TRUTH_PORTS = (".floor", ".gain", ".scores")
_RANK: dict[SuiteStatus, int] = {
    "wrong": 0, "differs": 1, "flushed": 2, "ties": 3, "healthy": 4, "identical": 5,
}  # fmt: skip


def report_on(
    a: Run, b: Run, *, truth: Run | None, floor: Sequence[object], layers: Sequence[Run],
    progress: Progress | None,
) -> Report:  # fmt: skip
    """The whole report on two suites. Raises what ``compare`` raises."""
    if layers:
        raise UsageError("--layers means nothing to suites: they have none")
    if floor:
        raise UsageError(
            "--floor means nothing to suites: what rounding explains is in their truth",
            hint=command_line("truth", a.path, o="TRUTH"),
        )
    result, coverage = compare_suites(a, b, truth=truth, progress=progress)
    lines, arithmetic = facts_of_operators(a, b)
    finding = find_in_suites(result, a, b, coverage)
    if finding.kind != "identical":
        evidence = [*finding.evidence, *arithmetic.brief()]
        finding = msgspec.structs.replace(finding, evidence=evidence)
    return report_of(a, b, finding, coverage, lines, notes=_notes(a, b), suite=result)


def _notes(a: Run, b: Run) -> list[Fact]:
    """What each side skipped or was told to use."""
    facts = []
    for side, run in (("reference", a), ("candidate", b)):
        for reason, num in run.manifest.plan.skipped_operators.items():
            facts.append(fact("suite.skipped", side=side, num=num, reason=reason))
        for item in run.manifest.overrides:
            names = {"name": item.name, "used": item.used, "reference": item.reference}
            facts.append(fact("suite.used", side=side, **names))
    return facts


def compare_suites(
    a: Run, b: Run, *, truth: Run | None = None, progress: Progress | None = None
) -> tuple[SuiteResult, Coverage]:
    """Measure every output that both runs hold. Raises IncomparableError where there is none, and
    UsageError for a truth of other inputs."""
    if truth is not None:
        _check_truth(truth, a, b)
    ours, theirs = _outputs(a), _outputs(b)
    a.expect(ours.values())
    b.expect(theirs.values())
    if truth is not None:
        truth.expect(truth.records)
    skipped: list[Skipped] = []
    cases: list[SuiteCase] = []
    inputs_a, inputs_b = _inputs(a, b), _inputs(b, a)
    for number, (site, record) in enumerate(ours.items()):
        (progress or silent)("compare", number, len(ours), site)
        other = theirs.get(site)
        if other is None:
            skipped.append(_skip(record, fact("suite.no_partner"), "reference"))
            continue
        path = module_of(site)
        if inputs_a.get(path) != inputs_b.get(path):
            skipped.append(_skip(record, fact("suite.other_inputs"), "both"))
        elif (record.shape, record.dtype) != (other.shape, other.dtype):
            reason = fact(
                "suite.other_results", reference_dtype=record.dtype, reference_shape=record.shape,
                candidate_dtype=other.dtype, candidate_shape=other.shape,
            )  # fmt: skip
            skipped.append(_skip(record, reason, "both"))
        else:
            cases.append(_case(a, b, truth, record, other))
    skipped += [
        _skip(theirs[site], fact("suite.no_partner"), "candidate")
        for site in theirs
        if site not in ours
    ]
    if not cases:
        raise IncomparableError(
            "nothing was compared: the two suites have no case in common",
            where=f"{a.path} and {b.path}",
            hint=f"the first was left out because: {skipped[0].reason}" if skipped else None,
        )
    result = SuiteResult(
        judged=truth is not None,
        score_limit=SCORE_LIMIT,
        gain_limit=GAIN_LIMIT,
        operators=_operators(cases, a.manifest, b.manifest),
        cases=cases,
    )
    return result, Coverage.of(len(cases), skipped)


def _outputs(run: Run) -> dict[str, Record]:
    """Results of all cases by site, in order."""
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


def _check_truth(truth: Run, a: Run, b: Run) -> None:
    manifest, hint = truth.manifest, command_line("truth", a.path, o="TRUTH")
    if manifest.settings.compute_dtype is None:
        raise UsageError(f"{truth.path} is no truth: it was not computed in float64", hint=hint)
    if not any(record.site.endswith(".floor") for record in truth.records):
        raise UsageError(
            f"{truth.path} does not hold what a suite is judged by",
            hint=f"{hint} makes one that does",
        )
    known = {a.manifest.id, b.manifest.id, a.manifest.plan.anchored_to, b.manifest.plan.anchored_to}
    digests = {a.manifest.model.digest, b.manifest.model.digest}
    if manifest.plan.anchored_to not in known and manifest.model.digest not in digests:
        raise UsageError(f"{truth.path} is the truth of other inputs", hint=hint)


def _case(a: Run, b: Run, truth: Run | None, record: Record, other: Record) -> SuiteCase:
    reference, candidate = a.read(record), b.read(other)
    kind = kind_of(reference.dtype)
    rel_l2, p99, largest = between(reference, candidate)
    same = record.xxh3 == other.xxh3
    case = SuiteCase(
        site=record.site, operator=operator_of(record.site), dtype=record.dtype, kind=kind,
        status="identical" if same else "differs", same=same, rel_l2=rel_l2, ulp_p99=p99,
        ulp_max=largest,
    )  # fmt: skip
    truths = None if truth is None else _truths(truth, record.site)
    if truths is None or truths.value.shape != reference.shape:
        return case
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
        case = msgspec.structs.replace(case, ideal_error=ideal, floor=before, w=_w(sides))
    return msgspec.structs.replace(
        case, status=status, side=side, reason=reason, expected_off=expected,
        reference=sides[0], candidate=sides[1],
    )  # fmt: skip


def _truths(truth: Run, site: str) -> Truths | None:
    records = [truth.find(("replayed", 0, 0, site + port)) for port in ("", *_TRUTH_PORTS)]
    value, *rest = (None if record is None else truth.read(record) for record in records)
    return None if value is None else Truths(value, *rest)


def _w(sides: list[SuiteSide]) -> float:
    top, bottom = sides[1].error or 0.0, sides[0].error or 0.0
    if bottom == 0.0:
        return 1.0 if top == 0.0 else float("inf")
    return top / bottom


def _status(
    sides: list[SuiteSide], over: list[float], same: bool
) -> tuple[SuiteStatus, SideOrBoth | None, Fact | None]:
    wrong = [value > 1.0 for value in over]
    if any(wrong):
        worst = sides[0] if over[0] >= over[1] else sides[1]
        return "wrong", _side(wrong), _reason(worst)
    if same:
        return "identical", None, None
    zeros = [side.num_flushed for side in sides]
    # some round to 0 on every side
    flushed = [zeros[0] > 2 * zeros[1], zeros[1] > 2 * zeros[0]]
    if any(flushed):
        return "flushed", _side(flushed), fact("suite.flushed")
    tied = [bool(side.rows_tied) for side in sides]
    if any(tied):
        return "ties", _side(tied), fact("suite.tied")
    return "healthy", None, None


def _side(which: list[bool]) -> SideOrBoth:
    return "both" if all(which) else "reference" if which[0] else "candidate"


def _reason(side: SuiteSide) -> Fact:
    """What the limit was exceeded by."""
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


def _operators(cases: list[SuiteCase], a: Manifest, b: Manifest) -> list[SuiteOperator]:
    by_operator: dict[str, list[SuiteCase]] = {}
    for case in cases:
        by_operator.setdefault(case.operator, []).append(case)
    operators = []
    for name, mine in by_operator.items():
        worst = min(mine, key=_badness)
        sides = {case.side for case in mine if case.status == worst.status} - {None}
        path = module_of(worst.site)
        operators.append(
            SuiteOperator(
                operator=name,
                reference_implementation=_implementation(a, path),
                candidate_implementation=_implementation(b, path),
                status=worst.status,
                side=None if not sides else sides.pop() if len(sides) == 1 else "both",
                num_cases=len(mine),
                num_same=sum(case.same for case in mine),
                num_by_status=dict(Counter(case.status for case in mine)),
                worst=worst,
            )
        )
    return sorted(operators, key=lambda operator: _badness(operator.worst))


def _implementation(manifest: Manifest, path: str) -> str:
    note = manifest.plan.modules.get(path)
    return "-" if note is None else note.kind


def _skip(record: Record, reason: Fact, side: SideOrBoth) -> Skipped:
    return Skipped(
        pass_=record.pass_, sample=record.sample, step=record.step, site=record.site,
        why=reason, side=side,
    )  # fmt: skip
