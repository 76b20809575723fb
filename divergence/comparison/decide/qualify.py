"""What qualifies any verdict: settings that differ, force, a run compared with itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from divergence.comparison.decide.confidence import confidence_of
from divergence.comparison.results.findings import Check, Evidence, Verdict
from divergence.comparison.results.preflight import PreflightLine

__all__ = ["COMPUTED_OTHERWISE", "WITH_ITSELF", "of_one_run", "qualified"]

COMPUTED_OTHERWISE = ("dtype", "quantization", "attention", "batch shape", "engine")
"""Checks of preflight whose difference lets a correct machine compute other numbers."""
_PRECISION = ("dtype", "quantization")
_QUIET = ("within_floor", "undetermined", "drift")
"""Where nothing else is named, every setting is said first; beside a named place, the precision."""
_SILENT = ("incomparable", "identical")
WITH_ITSELF = "a run compared with itself proves nothing"


def qualified(verdict: Verdict, preflight: Sequence[PreflightLine]) -> Verdict:
    """``verdict`` with the settings that differ at the head of its summary, and without certainty
    where a blocking difference was overridden: that explains whatever is found."""
    checks = COMPUTED_OTHERWISE if verdict.kind in _QUIET else _PRECISION
    differing = [
        f"{line.check} {line.reference} / {line.candidate}"
        for line in preflight
        if line.check in checks and line.status == "differs"
    ]
    if differing and verdict.kind not in _SILENT:
        verb = "differs" if len(differing) == 1 else "differ"
        verdict = msgspec.structs.replace(
            verdict, summary=f"{', '.join(differing)} {verb}; beyond that, {verdict.summary}"
        )
    forced = [line.check for line in preflight if line.status == "blocking"]
    if not forced:
        return verdict
    other = f"other {' and '.join(forced)}"
    return _unsure(
        msgspec.structs.replace(
            verdict,
            summary=f"{verdict.summary} (compared by force: {other})",
            side=None,
            evidence=[
                Evidence(text=f"{other}, which may explain everything below"), *verdict.evidence,
            ],
        ),
        Check(name="same_experiment", state="failed", detail=other),
    )  # fmt: skip


def of_one_run(
    verdict: Verdict, run_id: str, *, judged_by_truth: bool, num_held: int, next_command: str
) -> Verdict:
    """The verdict on two runs of one id: equal bits are no finding then. What differs all the same
    (a damaged copy, ranks that disagree), and what a truth says of both, stays. ``num_held``:
    tensors that several ranks hold and agree on."""
    fact = Evidence(text=f"both are run {run_id}: one of them, or both, is a copy")
    check = Check(name="two_runs", state="failed")
    if verdict.kind == "within_floor" or judged_by_truth:
        verdict = _unsure(verdict, check)
    elif verdict.kind in ("identical", "undetermined"):
        but = f", but that its ranks agree on the {num_held} tensors that several hold"
        both = "; it is far from the truth" if verdict.side == "both" else ""
        verdict = _unsure(
            msgspec.structs.replace(
                verdict,
                kind="undetermined",
                summary=f"{WITH_ITSELF}{but if num_held else ''}{both}",
                side="both" if both else None,
                onset=None,
                next=[next_command],
            ),
            check,
        )
    return msgspec.structs.replace(verdict, evidence=[fact, *verdict.evidence])


def _unsure(verdict: Verdict, check: Check) -> Verdict:
    checks = [*verdict.checks, check]
    return msgspec.structs.replace(verdict, checks=checks, confidence=confidence_of(checks))
