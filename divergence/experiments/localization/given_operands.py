"""What the operator at the onset was given on each side: which operand differs, and by how much.

An operator that is right by itself on both sides gives other results for one reason alone: it was
given something else. So the page names it: a scalar, a constant, an operand with its difference,
or where it comes from. Nothing is said of what was not recorded.
"""

from __future__ import annotations

from divergence.analyses.operators.operands import given_inputs
from divergence.comparison.calls.graph import Node, forwards_of
from divergence.comparison.results.operators import OperatorResult, OtherInput
from divergence.run.reader import Run

__all__ = ["given_to", "stands_alone"]


def given_to(made: dict[str, Run], first: OperatorResult, pass_: str) -> list[OtherInput]:
    """The tensor operands that differ, the largest difference first; empty for a region, whose
    last operators take other arguments by right."""
    if first.region is not None:
        return []
    one = _node(made["reference"], first.site, first, pass_)
    two = _node(made["candidate"], first.candidate_site, first, pass_)
    if one is None or two is None:
        return []
    return given_inputs(one, two, made["reference"], made["candidate"])


def stands_alone(first: OperatorResult, side: str) -> bool:
    """Is what that side computes there one operator? A region of several is none."""
    if first.region is None:
        return True
    members = first.region.reference if side == "reference" else first.region.candidate
    return len(members) == 1


def _node(run: Run, path: str, first: OperatorResult, pass_: str) -> Node | None:
    for name in dict.fromkeys((pass_, "anchored", "free")):
        nodes = forwards_of(run, name).get((first.sample, first.step), [])
        for node in nodes:
            if node.path == path:
                return node
    return None
