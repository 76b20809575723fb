"""Who made what is wrong: told by which ranks hold it, and in which part of the buffer.

Who holds a wrong number need not have made it. Where every rank is wrong alike it came from one of
them, or from all; only where others are right is it told by who holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from divergence.analyses.collectives.recorded import RecordedCase
from divergence.collectives.cases import ROOT_RANK
from divergence.facts import Fact, fact

__all__ = ["Made", "groups_of", "made_by", "part_of", "sent_by"]

Wrong = Mapping[int, torch.Tensor]
"""By rank, the elements that are wrong."""


@dataclass(frozen=True, slots=True)
class Made:
    """Who made it, nobody where that is not told. ``assumed``: by the part of the buffer alone.
    ``how``: by what it is known, for the end of the clause."""

    ranks: tuple[int, ...]
    assumed: bool = False
    how: tuple[Fact, ...] = ()


def groups_of(case: RecordedCase, wrong: Wrong) -> list[dict[int, torch.Tensor]]:
    """Ranks that are wrong together: all, where no rank is right, or where what one rank sent is
    wrong on every other; else those that are wrong at the same elements."""
    if len(wrong) == len(case.ranks) or len(_senders(case, wrong)) == 1:
        return [dict(wrong)]
    groups: list[dict[int, torch.Tensor]] = []
    for rank, differ in wrong.items():
        for group in groups:
            if torch.equal(next(iter(group.values())), differ):
                group[rank] = differ
                break
        else:
            groups.append({rank: differ})
    return groups


def made_by(case: RecordedCase, wrong: Wrong) -> Made:
    """Of one group of ranks with wrong sums. Of ``reduce`` the root alone holds anything, which
    does not tell who made it; where all ranks are wrong alike, the one whose part it is."""
    ranks, name = tuple(sorted(wrong)), case.case.collective
    if name == "reduce":
        return Made(())
    if len(ranks) < case.num_ranks or name == "reduce_scatter":
        return Made(ranks)
    part = part_of(_union(wrong), case.num_ranks)
    if part is None:
        return Made(())
    return Made((part,), assumed=True, how=(fact("collectives.own_part"),))


def sent_by(case: RecordedCase, wrong: Wrong) -> Made:
    """Of one group of ranks with wrong bits, where nothing is added: who holds them, or who sent
    them where every other rank has them wrong. What one rank sent and one other alone has wrong may
    be the fault of either: that it is the one that holds it is an assumption."""
    ranks = tuple(sorted(wrong))
    everywhere = len(ranks) == case.num_ranks
    if case.case.collective == "broadcast":
        return _broadcast(case, ranks, everywhere)
    senders = _senders(case, wrong)
    if senders:
        return Made(tuple(senders), assumed=not everywhere, how=(fact("collectives.sent"),))
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    if everywhere or len(givers) != 1:
        return Made(() if everywhere else ranks)
    (giver,) = givers
    if giver in ranks or (case.case.collective == "all_gather" and case.num_ranks > 2):
        return Made(ranks)  # the others got the same, and have it right
    return Made(ranks, assumed=True, how=(fact("collectives.sent_by", rank=giver),))


def _senders(case: RecordedCase, wrong: Wrong) -> set[int]:
    """The one rank whose numbers are wrong on every other, of two others at least; or none."""
    if case.case.collective not in ("all_gather", "all_to_all"):
        return set()
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    others = set(range(case.num_ranks)) - givers
    return givers if len(givers) == 1 and len(wrong) > 1 and others <= set(wrong) else set()


def _broadcast(case: RecordedCase, ranks: tuple[int, ...], everywhere: bool) -> Made:
    """All but the root wrong: sent wrong, or not at all, by nobody that is told."""
    if everywhere:
        return Made((ROOT_RANK,), assumed=True)
    if len(ranks) == case.num_ranks - 1 and ROOT_RANK not in ranks:
        return Made(ranks, assumed=True) if len(ranks) == 1 else Made(())
    return Made(ranks)


def _givers(case: RecordedCase, rank: int, where: torch.Tensor) -> set[int]:
    """Whose numbers should stand at the elements that are wrong."""
    name = case.case.collective
    if name == "broadcast":
        return {ROOT_RANK}
    if name == "send_recv":
        return {(rank - 1) % case.num_ranks}
    each = max(1, len(where) // case.num_ranks)
    return {int(place) // each for place in where.nonzero().flatten()}


def part_of(wrong: torch.Tensor, num_ranks: int) -> int | None:
    """The rank to whose part of the buffer, as reduce-scatter deals it, all wrong elements belong;
    None where they lie in several, or are few of it."""
    each = -(-len(wrong) // num_ranks)
    places = wrong.nonzero().flatten()
    if len(places) == 0 or each < 8:
        return None
    first, last = int(places[0]) // each, int(places[-1]) // each
    return first if first == last and len(places) > 2 else None


def _union(wrong: Wrong) -> torch.Tensor:
    return torch.stack(list(wrong.values())).any(dim=0)
