"""Parameters of a training step are told together: how many are off, and of what.

A kernel's error in a gradient shows in what leaves a block's backward too, or in the parameters of
one class of modules alone, whose product it makes. What is off in others as well was made by the
loop: adding up, reducing, dividing, clipping, stepping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from divergence.comparison.result import SiteResult
from divergence.facts import Fact, fact
from divergence.run.site import BACKWARD, is_norm, is_of_parameter


@dataclass(frozen=True, slots=True)
class ParametersOff:
    """Parameters' gradients off together. ``beyond``: those of ``total`` rows alike that are beyond
    their limit. ``kinds``: the classes of their modules."""

    what: str
    beyond: list[SiteResult]
    total: int
    kinds: frozenset[str]

    @property
    def rows(self) -> Fact:
        """Return what the rows hold, in words."""
        return fact("rows", what=self.what)

    @property
    def cause(self) -> Fact:
        """Return what to look at. Nothing that blocks hand on in the backward is off."""
        if self.what != "gradients":
            return fact("cause_optimizer")
        lone = len(self.kinds) == 1 and len(self.beyond) < self.total
        return fact("cause_gradients", kind=min(self.kinds) if lone else None)


def row_of(site: str) -> str | None:
    """Codes what a parameter's row holds, ``gradients`` or other; None where it is none."""
    if not is_of_parameter(site) or is_norm(site):
        return None
    path, _, port = site.partition(":")
    if path.endswith(BACKWARD):
        return "gradients"
    if port.startswith("in."):
        return "optimizer_gradients"
    return port.rpartition(".")[2] if port.count(".") > 1 else "values"


def together(first: SiteResult, judged: Iterable[tuple[SiteResult, bool]]) -> ParametersOff | None:
    """Return what is off as ``first`` is; None where it is no parameter's, and where a block's
    backward hands on what is off. ``judged``: each row, and whether it is beyond its limit."""
    what, alike = row_of(first.site), [row for row in judged if row[0].pass_ == first.pass_]
    handed_on = any(off and row.site.endswith(f"{BACKWARD}:out") for row, off in alike)
    if what is None or (handed_on and first.phase == "backward"):
        return None
    rows = [(row, off) for row, off in alike if row_of(row.site) == what]
    beyond = [row for row, off in rows if off]
    return ParametersOff(what, beyond, len(rows), frozenset(row.kind or "" for row in beyond))
