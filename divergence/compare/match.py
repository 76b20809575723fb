"""Matching two sequences of operators: the same model code need not call the same kernels.

Equal calls first: the longest common subsequence by module, operator and shape, and what modules
call once, in whatever order. What is left
between two such matches are stretches where one side took other operators (a fused kernel, a
vendor's, another release's): there the last results of equally many numbers that are the same
value, up to an error far beyond any rounding, are laid side by side. Where a fault is so large that
no value is the same, dataflow decides: what a matched call was given as the same argument on
both sides is the same thing, whatever its value; copies and casts between are passed over. What
lies before them in the stretch has no partner, and is said to have none.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from divergence.compare.graph import Node, maker_of
from divergence.run.call import Operand

__all__ = ["Match", "match_calls", "match_paths"]

SameValue = Callable[[Node, Node], bool]


@dataclass(frozen=True, slots=True)
class Match:
    """A reference's call and the candidate's of the same meaning."""

    reference: Node
    candidate: Node
    method: Literal["exact", "sequence", "value", "dataflow"]


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
    found += _by_name(reference, candidate, lone, rename)
    found += _by_dataflow(found, *lone)
    found.sort(key=lambda match: match.reference.order)
    return found, *lone


def _by_name(
    reference: Sequence[Node],
    candidate: Sequence[Node],
    lone: tuple[list[Node], list[Node]],
    rename: Callable[[str], str],
) -> list[Match]:
    """The same calls in another order: those that their modules make once. Taken from ``lone``."""

    def once(nodes: Sequence[Node]) -> set[str]:
        counts = Counter((node.module, node.name) for node in nodes)
        return {node.path for node in nodes if counts[node.module, node.name] == 1}

    theirs = {node.path: node for node in lone[1] if node.path in once(candidate)}
    found: list[Match] = []
    for node in [node for node in lone[0] if node.path in once(reference)]:
        two = theirs.get(rename(f"{node.path}:out").rpartition(":")[0])
        if two is not None and two.results[0].shape == node.results[0].shape:
            found.append(Match(node, two, "exact"))
            lone[0].remove(node)
            lone[1].remove(two)
    return found


def _by_dataflow(found: list[Match], ours: list[Node], theirs: list[Node]) -> list[Match]:
    """Matches of calls without a partner whose results go into the same argument of matched
    ones; both are taken from the lists."""
    more: list[Match] = []
    for match in found:
        if match.reference.name != match.candidate.name:
            continue  # their arguments need not mean the same
        pairs = zip(match.reference.call.operands, match.candidate.call.operands, strict=False)
        for one, two in pairs:
            chains = _makers(one, ours), _makers(two, theirs)
            pair = next(((x, y) for x in chains[0] for y in chains[1] if _alike(x, y)), None)
            if pair is not None:
                more.append(Match(*pair, "dataflow"))
                ours.remove(pair[0])
                theirs.remove(pair[1])
    return more


def _makers(operand: Operand, nodes: list[Node]) -> list[Node]:
    """The call without a partner that made it, and, while that only copied, the one before."""
    by_path = {node.path: node for node in nodes}
    found: list[Node] = []
    made = maker_of(operand)
    while made in by_path:
        node = by_path[made]
        found.append(node)
        if node.name not in _COPIES or not node.call.operands:
            break
        made = maker_of(node.call.operands[0])
    return found


_COPIES = ("aten.clone", "aten.copy", "aten._to_copy", "aten.contiguous")


def _alike(one: Node, two: Node) -> bool:
    """The same shape but for axes of length 1: the numbers are in the same order."""
    shapes = [[size for size in node.results[0].shape if size != 1] for node in (one, two)]
    return shapes[0] == shapes[1]


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
