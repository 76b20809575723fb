"""Integer results: what differs, and whether rounding of the inputs explains it.

Indices that an operator chose may differ where the values chosen between are as near as the two
sides' inputs are; other integers may not differ where the same numbers went in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from divergence.comparison.calls.expert_routing import CHOOSING
from divergence.comparison.calls.graph import Node
from divergence.comparison.calls.match import Match
from divergence.run.reader import Run

__all__ = ["Codes", "count_codes"]


@dataclass(slots=True)
class Codes:
    """Integer results. ``differing``: elements that the sides do not share; ``unexplained``: of
    these, what rounding of the inputs does not explain; ``wrong``: of the unexplained ones,
    what differs from the truth, on each side."""

    differing: int = 0
    unexplained: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])


def count_codes(
    codes: Codes,
    match: Match,
    x: torch.Tensor,
    y: torch.Tensor,
    r: torch.Tensor | None,
    a: Run,
    b: Run,
) -> None:
    other = x != y.reshape(x.shape)
    codes.differing += int(other.sum())
    p, q = _entering(match.reference, a), _entering(match.candidate, b)
    name = match.reference.name.partition(".")[2]
    known = None if p is None or q is None else (p, q)
    if name in CHOOSING and known and all(t.is_floating_point() for t in known):
        odd = other & ~_rounding_explains(*known, x, y.reshape(x.shape), match.reference)
    else:  # the same numbers went in: the codes must be the same; else they may not be
        equal = known is not None and torch.equal(*known)
        odd = other if equal else torch.zeros_like(other)
    codes.unexplained += int(odd.sum())
    if r is not None and not r.is_floating_point() and r.numel() == x.numel():
        r = r.reshape(x.shape)
        for side, chosen in enumerate((x, y.reshape(x.shape))):
            codes.wrong[side] += int((odd & (chosen != r)).sum())


def _entering(node: Node, run: Run) -> torch.Tensor | None:
    """The first operand's value, as the operator saw it."""
    if not node.call.operands:
        return None
    own, operand = node.results[0], node.call.operands[0]
    if operand.site is None:
        return None
    record = run.find((own.pass_, own.sample, own.step, operand.site))
    return None if record is None else run.read(record).reshape(operand.shape)


def _rounding_explains(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, y: torch.Tensor, node: Node
) -> torch.Tensor:
    """Per chosen index: are the two choices nearer to each other than the inputs p, q are? Exact
    ties are not explained: there the order of ties is the operator's own."""
    dim = node.call.arguments.get("dim", -1)
    if not isinstance(dim, int) or p.shape != q.shape or p.ndim != x.ndim:
        return torch.zeros(x.shape, dtype=torch.bool)
    p, q = p.double(), q.double()
    gaps = [(side.gather(dim, x) - side.gather(dim, y)).abs() for side in (p, q)]
    apart = (p - q).abs().amax(dim, keepdim=True)
    near = (gaps[0] <= 4 * apart) & (gaps[1] <= 4 * apart)
    return near & ~((gaps[0] == 0) & (gaps[1] == 0))
