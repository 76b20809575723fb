"""Levels that blame different sides contradict each other: then no side is named.

A block's output by one side, an operator inside it by the other: one fault does not do that. A
truth that belongs to neither may, and so may two faults. Both levels are told, and confidence is
low.
"""

from __future__ import annotations

import msgspec

from divergence.comparison.result import Evidence, Verdict

__all__ = ["contradicted", "contradicts"]

_SIDES = ("reference", "candidate")


def contradicts(verdict: Verdict, side: str | None, block: str | None) -> bool:
    """Does an operator in ``block``, off by ``side``, speak against the verdict of the blocks?"""
    if verdict.side not in _SIDES or side not in _SIDES or verdict.side == side:
        return False
    return verdict.onset is not None and verdict.onset.block in (None, block)


def contradicted(
    verdict: Verdict, side: str | None, operator: str, evidence: list[Evidence]
) -> Verdict:
    """The verdict of the blocks, with what speaks against it, and without a side."""
    assert verdict.onset is not None
    told = f"{verdict.onset.site} by the {verdict.side}, {operator} by the {side}"
    return msgspec.structs.replace(
        verdict,
        summary=f"the evidence contradicts itself: {told}",
        side=None,
        confidence="low",
        evidence=[
            Evidence(
                text=f"the levels blame different sides: {told}. A truth made by other code than "
                "the reference's does that, and two faults do"
            ),
            *verdict.evidence,
            *evidence,
        ],
    )
