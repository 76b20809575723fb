"""What is put in whose place: the two sites of a substitution.

The healthy side's result stands for the guilty one's. Where the guilty side has operators of its
own in front (``fed_by``), not the operator that reads them is to be replaced but what they hand
on, by what the healthy side hands on there: whoever else reads it then has the healthy value too.
"""

from __future__ import annotations

from divergence.comparison.results.operators import OperatorResult
from divergence.run.reader import Run
from divergence.run.schema.record import Call, Operand
from divergence.run.schema.site import is_operator_site

__all__ = ["replaced_sites"]


def replaced_sites(made: dict[str, Run], first: OperatorResult, side: str) -> tuple[str, str]:
    """(site on ``side``, site on the other) of the operator ``first`` or of what feeds it."""
    other = "candidate" if side == "reference" else "reference"
    names = {"reference": first.site, "candidate": first.candidate_site}
    own = f"{names[side]}:out", f"{names[other]}:out"
    if not first.fed_by or first.fed_by_side != side:
        return own
    mine, theirs = (_call(made[one], names[one], first) for one in (side, other))
    if mine is None or theirs is None:
        return own
    for guilty, healthy in zip(mine.operands, theirs.operands, strict=False):
        made_by = _result(guilty)
        if made_by is None or made_by.rpartition(":")[0] != first.fed_by[-1]:
            continue
        given = _result(healthy)
        if given is not None and guilty.via == healthy.via:
            return made_by, given
    return own


def _call(run: Run, path: str, first: OperatorResult) -> Call | None:
    place = (f"{path}:out", first.sample, first.step)
    for record in run.records:
        if record.call is not None and (record.site, record.sample, record.step) == place:
            return record.call
    return None


def _result(operand: Operand) -> str | None:
    """The operator's result that an operand is, or is a view of."""
    for site in (operand.site, operand.origin):
        if site is not None and is_operator_site(site) and ":out" in site:
            return site
    return None
