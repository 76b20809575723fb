"""What is right at each call of the reference: the same call of the float64 run."""

from __future__ import annotations

import torch

from divergence.analyses.operators.inputs import operand_record
from divergence.comparison.calls.graph import Node
from divergence.comparison.calls.match import match_calls
from divergence.run.reader import Run
from divergence.run.schema.record import Record

__all__ = ["Rights", "distance_of"]


class Rights:
    """What is right at each call of the reference in one forward."""

    def __init__(
        self, truth: Run | None, ours: list[Node], right: list[Node], *, exact: bool, run: Run
    ) -> None:
        self._truth, self._run, self._exact = truth, run, exact
        self.exist = exact or truth is not None
        apart = None
        if truth is not None:

            def apart(one: Node, two: Node) -> float:
                return distance_of(run.read(one.results[0]), truth.read(two.results[0]))

        matches, _, _ = match_calls(ours, right, apart=apart)
        self._by_path = {match.reference.path: match.candidate.results for match in matches}
        self._nodes = {match.reference.path: match.candidate for match in matches}
        for node in ours:  # in exact arithmetic a cast changes nothing
            if node.path not in self._by_path and node.is_cast:
                maker = node.feeds[0] if node.feeds else None
                if maker in self._by_path:
                    self._by_path[node.path] = self._by_path[maker]

    def of(self, node: Node, index: int) -> tuple[Run, Record] | None:
        """The run and record that hold it, or None."""
        if self._exact:
            return self._run, node.results[index]
        found = self._by_path.get(node.path, ())
        if self._truth is None or index >= len(found):
            return None
        record = found[index]
        return (self._truth, record) if record.numel == node.results[index].numel else None

    def operand(self, node: Node, number: int) -> torch.Tensor | None:
        """What is right of an argument of a call; None where that is not recorded."""
        right, run = self._nodes.get(node.path), self._truth
        if self._exact:
            right, run = node, self._run
        if right is None or run is None or number >= len(right.call.operands):
            return None
        record = operand_record(right, right.call.operands[number], run)
        return None if record is None else run.read(record)


def distance_of(x: torch.Tensor, y: torch.Tensor) -> float:
    """‖x - y‖ / ‖x‖; of codes 0 where they are equal, and infinity where nothing can be said."""
    if not (x.is_floating_point() and y.is_floating_point()):
        equal = x.dtype == y.dtype and bool((x.reshape(-1) == y.reshape(-1)).all())
        return 0.0 if equal else float("inf")
    x, y = x.reshape(-1).to(torch.float64), y.reshape(-1).to(torch.float64)
    norm, gap = float(x.norm()), float((x - y).norm())
    return gap / norm if norm > 0 and gap == gap else float("inf")
