"""Matching two sequences of operators: the same model code need not call the same kernels.

Equal calls first: the longest common subsequence by module, operator and shape. What is left
between two such matches are stretches where one side took other operators (a fused kernel, a
vendor's, another release's): there the last results of equally many numbers that are the same
value, up to an error far beyond any rounding, are laid side by side. What lies before
them in the stretch has no partner, and is said to have none.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from divergence.compare.graph import Node

__all__ = ["Match", "match_calls", "match_paths"]

SameValue = Callable[[Node, Node], bool]


@dataclass(frozen=True, slots=True)
class Match:
    """A reference's call and the candidate's of the same meaning."""

    reference: Node
    candidate: Node
    method: Literal["exact", "sequence", "value"]


def match_paths(
    reference: Sequence[Node], candidate: Sequence[Node]
) -> tuple[list[Match], list[Node], list[Node]]:
    """The same for two recordings of the very same calls, as a replay is one: by their names."""
    theirs = {node.path: node for node in candidate}
    found = [Match(one, theirs[one.path], "exact") for one in reference if one.path in theirs]
    matched = {match.reference.path for match in found}
    return (
        found,
        [node for node in reference if node.path not in matched],
        [node for node in candidate if node.path not in matched],
    )


def match_calls(
    reference: Sequence[Node],
    candidate: Sequence[Node],
    *,
    same_value: SameValue | None = None,
    rename: Callable[[str], str] = lambda site: site,
) -> tuple[list[Match], list[Node], list[Node]]:
    """(matches in order, reference's alone, candidate's alone).

    ``rename``: the reference's module names in the candidate's words. ``same_value``: do two
    calls' first results hold the same value? Without it, stretches stay unmatched.
    """

    def key(node: Node) -> tuple:
        module, name, shape = node.key()
        return rename(f"{module}:out").rpartition(":")[0], name, shape

    matcher = difflib.SequenceMatcher(
        None, [key(node) for node in reference], [node.key() for node in candidate], autojunk=False
    )
    found: list[Match] = []
    lone: tuple[list[Node], list[Node]] = ([], [])
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        ours, theirs = list(reference[a0:a1]), list(candidate[b0:b1])
        if tag == "equal":
            for one, two in zip(ours, theirs, strict=True):
                exact = rename(f"{one.path}:out").rpartition(":")[0] == two.path
                found.append(Match(one, two, "exact" if exact else "sequence"))
            continue
        matched = _by_value(ours, theirs, same_value) if same_value else []
        found += matched
        lone[0].extend(n for n in ours if all(n is not m.reference for m in matched))
        lone[1].extend(n for n in theirs if all(n is not m.candidate for m in matched))
    return found, *lone


def _by_value(ours: list[Node], theirs: list[Node], same_value: SameValue) -> list[Match]:
    """Pairs in order, from the end: where a stretch ends both sides hold the same again."""
    found: list[Match] = []
    end = len(theirs)
    for one in reversed(ours):
        for index in reversed(range(end)):
            two = theirs[index]
            if one.results[0].numel == two.results[0].numel and same_value(one, two):
                found.append(Match(one, two, "value"))
                end = index
                break
    return found[::-1]
