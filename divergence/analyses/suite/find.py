"""What two runs of an operator suite show."""

from __future__ import annotations

from divergence.comparison.decide import check
from divergence.comparison.result import SuiteOperator, SuiteResult
from divergence.comparison.results.findings import Finding, Onset
from divergence.comparison.results.sites import Coverage
from divergence.facts import Fact, plain
from divergence.run.command import command
from divergence.run.reader import Run
from divergence.run.schema.site import module_of

__all__ = ["find_in_suites"]

_NAMED = 6  # wrong operators named in the summary


def find_in_suites(result: SuiteResult, a: Run, b: Run, coverage: Coverage) -> Finding:
    """The one finding on two suites."""
    wrong = [item for item in result.operators if item.status == "wrong"]
    told = ("wrong", "flushed", "ties")
    evidence = [_fact(item) for item in result.operators if item.status in told]
    whole = a.manifest.complete and b.manifest.complete and not coverage.unmatched
    covered = [check("coverage", whole, "not every case was compared")]
    if all(item.num_same == item.num_cases for item in result.operators):
        both = f", but {_names(wrong)} beyond what rounding explains on both" if wrong else ""
        return Finding(
            claim="suite",
            kind="identical",
            headline=[plain(f"all {len(result.cases)} results have the same bits{both}")],
            rests_on=covered,
            evidence=evidence,
        )
    if not wrong:
        unjudged = [case for case in result.cases if case.status == "differs"]
        if unjudged:
            most = max(unjudged, key=lambda case: case.rel_l2)
            return Finding(
                claim="suite",
                kind="undetermined",
                headline=[
                    plain(
                        f"{_differing(result)}, the most in {most.operator} (relative difference "
                        f"{most.rel_l2:.1e}); which side is right, only the truth tells"
                    )
                ],
                rests_on=[check("measured", False, "")],
                evidence=evidence,
                commands=[
                    command("truth", a.path, o="truth"),
                    command("compare", a.path, b.path, truth="truth"),
                ],
            )
        return Finding(
            claim="suite",
            kind="within_floor",
            headline=[plain(f"{_differing(result)}; both sides are as right as rounding allows")],
            rests_on=covered,
            evidence=evidence,
        )
    sides = {item.side or "both" for item in wrong}
    side = sides.pop() if len(sides) == 1 else "both"
    bad = [case for case in result.cases if case.status == "wrong"]
    only_nonfinite = all(
        any(side is not None and side.num_nonfinite for side in (case.reference, case.candidate))
        for case in bad
    )
    many = len(wrong) > max(1, len(result.operators) / 2)
    who = {"reference": "A", "candidate": "B", "both": "both sides"}[side]
    return Finding(
        claim="suite",
        kind="nonfinite" if only_nonfinite else "systematic" if many else "localized",
        headline=[plain(f"{who} computed {len(wrong)} of {len(result.operators)} operators worse than "
        f"rounding explains: {_names(wrong)}")],
        onset=Onset(
            site=bad[0].site, block=None, sample=0, step=0, position=None,
            pass_=a.records[0].pass_,
        ),
        side=side,
        evidence=evidence,
        commands=[command("compare", a.path, b.path, truth="TRUTH", all=True)],
    )  # fmt: skip


def _names(operators: list[SuiteOperator]) -> str:
    names = [item.operator.removeprefix("suite.") for item in operators]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _differing(result: SuiteResult) -> str:
    count = sum(case.status != "identical" for case in result.cases)
    return f"{count} of {len(result.cases)} results differ"


def _fact(item: SuiteOperator) -> Fact:
    worst = item.worst
    values = {"rel_l2": worst.rel_l2}
    for name, side in (("reference", worst.reference), ("candidate", worst.candidate)):
        if side is not None and side.score is not None:
            values[f"{name}_score"] = side.score
            values[f"{name}_gain"] = side.gain or 0.0
    if worst.w is not None:
        values["w"] = worst.w
    who = {"reference": "A", "candidate": "B", "both": "both"}
    number = item.num_by_status[item.status]
    return plain(
        f"{item.operator.removeprefix('suite.')}: {who[item.side or 'both']}, {worst.why} "
        f"({module_of(worst.site)}); {number} of {item.num_cases} results",
        **values,
    )
