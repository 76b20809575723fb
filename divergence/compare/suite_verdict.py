"""The verdict on two runs of an operator suite, and why."""

from __future__ import annotations

import shlex

from divergence.compare.result import Coverage, Evidence, Onset, Verdict
from divergence.compare.suite_result import SuiteOperator, SuiteResult
from divergence.run.reader import Run
from divergence.run.site import module_of

__all__ = ["judge_suites"]

_NAMED = 6  # wrong operators named in the summary


def judge_suites(
    result: SuiteResult, a: Run, b: Run, coverage: Coverage, truth: Run | None
) -> Verdict:
    """The verdict on two suites."""
    one, two = (shlex.quote(str(run.path)) for run in (a, b))
    wrong = [item for item in result.operators if item.status == "wrong"]
    evidence = [
        _fact(item) for item in result.operators if item.status in ("wrong", "flushed", "ties")
    ]
    complete = a.manifest.complete and b.manifest.complete
    if not wrong:
        same = all(item.num_identical == item.num_cases for item in result.operators)
        if same and complete and not coverage.unmatched:
            return Verdict(
                kind="identical", summary=f"all {len(result.cases)} results have the same bits",
                confidence="high", evidence=evidence,
            )  # fmt: skip
        if not result.judged:
            most = result.operators[0]
            return Verdict(
                kind="identical" if same else "undetermined",
                summary=f"{_differing(result)}, the most in {most.operator} (relative difference "
                f"{most.worst.rel_l2:.1e}); which side is right, only the truth tells"
                if not same
                else "what both runs hold has the same bits",
                confidence="low",
                evidence=evidence,
                next=[f"divergence reference {one} -o truth",
                      f"divergence compare {one} {two} --reference truth"],
            )  # fmt: skip
        partial = not (complete and truth is not None and truth.manifest.complete)
        return Verdict(
            kind="within_floor",
            summary=f"{_differing(result)}; both sides are as right as rounding allows",
            confidence="medium" if partial or coverage.unmatched else "high",
            evidence=evidence,
        )
    sides = {item.side for item in wrong}
    side = sides.pop() if len(sides) == 1 else "both"
    bad = [case for case in result.cases if case.status == "wrong"]
    first = bad[0]
    only_nonfinite = all(
        (case.reference and case.reference.num_nonfinite)
        or (case.candidate and case.candidate.num_nonfinite)
        for case in bad
    )
    many = len(wrong) > len(result.operators) / 2
    names = ", ".join(item.operator for item in wrong[:_NAMED])
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    who = {"reference": "the reference", "candidate": "the candidate", "both": "both sides"}[side]
    return Verdict(
        kind="nonfinite" if only_nonfinite else "systematic" if many else "localized",
        summary=f"{who} computed {len(wrong)} of {len(result.operators)} operators worse than "
        f"rounding explains: {names}{more}",
        onset=Onset(
            site=first.site, block=None, sample=0, step=0, position=None,
            pass_=a.records[0].pass_,
        ),
        confidence="high",
        side=side,
        evidence=evidence,
        next=[f"divergence compare {one} {two} --reference TRUTH --all"],
    )  # fmt: skip


def _differing(result: SuiteResult) -> str:
    count = sum(case.status != "identical" for case in result.cases)
    return f"{count} of {len(result.cases)} results differ"


def _fact(item: SuiteOperator) -> Evidence:
    worst = item.worst
    values = {"rel_l2": worst.rel_l2}
    for name, side in (("reference", worst.reference), ("candidate", worst.candidate)):
        if side is not None and side.score is not None:
            values[f"{name}_score"] = side.score
            values[f"{name}_gain"] = side.gain or 0.0
    if worst.w is not None:
        values["w"] = worst.w
    who = {"reference": "the reference", "candidate": "the candidate", "both": "both"}
    number = item.num_by_status[item.status]
    return Evidence(
        text=f"{item.operator}: {who[item.side or 'both']}, {worst.why} "
        f"({module_of(worst.site)}); {number} of {item.num_cases} results",
        values=values,
    )
