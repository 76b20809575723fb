"""What two runs of an operator suite show."""

from __future__ import annotations

from typing import Any

from divergence.comparison.decide import check
from divergence.comparison.result import SuiteOperator, SuiteResult
from divergence.comparison.results import Coverage, Finding, Onset
from divergence.facts import Fact, fact
from divergence.run.command import command
from divergence.run.reader import Run
from divergence.run.site import module_of

__all__ = ["find_in_suites"]


def find_in_suites(result: SuiteResult, a: Run, b: Run, coverage: Coverage) -> Finding:
    """The one finding on two suites."""
    wrong = [item for item in result.operators if item.status == "wrong"]
    evidence = [
        _operator(item) for item in result.operators if item.status in ("wrong", "flushed", "ties")
    ]
    whole = a.manifest.complete and b.manifest.complete and not coverage.unmatched
    covered = [check("coverage", whole, fact("not_every_case"))]
    names = [_name(item) for item in wrong]
    num_differ, total = sum(c.status != "identical" for c in result.cases), len(result.cases)
    if all(item.num_same == item.num_cases for item in result.operators):
        return Finding(
            claim="suite",
            kind="identical",
            headline=[fact("suite.all_same", total=total, wrong=names)],
            rests_on=covered,
            evidence=evidence,
        )
    unjudged = [case for case in result.cases if case.status == "differs"]
    if not wrong and unjudged:
        most = max(unjudged, key=lambda case: case.rel_l2)
        differ = fact(
            "suite.differ_unjudged", num_differ=num_differ, total=total, operator=most.operator,
            rel_l2=most.rel_l2,
        )  # fmt: skip
        return Finding(
            claim="suite",
            kind="undetermined",
            headline=[differ],
            rests_on=[check("measured", False)],
            evidence=evidence,
            commands=[
                command("truth", a.path, o="truth"),
                command("compare", a.path, b.path, truth="truth"),
            ],
        )
    if not wrong:
        return Finding(
            claim="suite",
            kind="within_floor",
            headline=[fact("suite.within_rounding", num_differ=num_differ, total=total)],
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
    worse = fact(
        "suite.worse", side=side, num_wrong=len(wrong), total=len(result.operators), wrong=names
    )
    return Finding(
        claim="suite",
        kind="nonfinite" if only_nonfinite else "systematic" if many else "localized",
        headline=[worse],
        onset=Onset(
            site=bad[0].site, block=None, sample=0, step=0, position=None,
            pass_=a.records[0].pass_,
        ),
        side=side,
        evidence=evidence,
        commands=[command("compare", a.path, b.path, truth="TRUTH", all=True)],
    )  # fmt: skip


def _name(item: SuiteOperator) -> str:
    return item.operator.removeprefix("suite.")


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
        "suite.operator", **values, operator=_name(item), side=item.side or "both",
        reason=worst.reason, case=module_of(worst.site), num=item.num_by_status[item.status],
        num_cases=item.num_cases,
    )  # fmt: skip
