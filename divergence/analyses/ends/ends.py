"""The ends: what an anchored pass cannot see, since it puts the reference's tensors in place.

What lies between blocks, before the final norm, before and behind the head (ends.seams), in
sampling (ends.sampling), and what is no number that rounds: masks and positions
(ends.integers). Each is exact or nearly so, and judged on each side by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from divergence.analyses.ends.integers import Integers, find_integers
from divergence.analyses.ends.sampling import Misfit, find_misfits
from divergence.analyses.ends.seams import Seam, find_seams
from divergence.comparison.align.pairs import Alignment
from divergence.comparison.results.sites import SiteResult, order_of
from divergence.numerics.rounding.floor import Thresholds
from divergence.run.reader import Run

__all__ = ["Ends", "find_ends"]

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What was found; ``logits_site`` of the reference, where its tokens come from."""

    seams: Sequence[Seam] = ()
    integers: Sequence[Integers] = ()
    misfits: Sequence[Misfit] = ()
    logits_site: str | None = None

    @property
    def broken(self) -> list[Seam]:
        """Seams beyond their limit, in execution order."""
        return sorted((s for s in self.seams if s.beyond), key=lambda seam: order_of(seam.result))

    @property
    def unequal(self) -> list[Integers]:
        """Integers that are wrong on a side, in execution order."""
        found = (one for one in self.integers if one.judged)
        return sorted(found, key=lambda one: (order_of(one.result), one.result.pass_ != "anchored"))

    def notes(self) -> list[str]:
        """What is no fault by itself and worth knowing."""
        found: list[str] = []
        small = {(s.before, s.site, s.by): s for s in self.seams if not s.beyond}
        for (before, site, by), seam in list(small.items())[:_SHOWN]:
            how = f"by no more than rounding ({seam.size:.1e})"
            if seam.limit == float("inf"):
                how = "and the two sides meet there: other code, the same tensor"
            found.append(
                f"between {before} and {site} the {by} changes what the other side hands on, {how}"
            )
        choices = [one for one in self.integers if one.choice and not one.judged]
        if choices:
            most = max(choices, key=lambda one: one.num_different / max(1, one.num_compared))
            found.append(
                f"choices made of numbers differ at {len({c.result.site for c in choices})} sites, "
                f"most at {most.result.site}: {most.num_different} of {most.num_compared} tokens; "
                "rounding may decide them, so they are judged by their scores"
            )
        return found


def find_ends(
    a: Run,
    b: Run,
    alignment: Alignment,
    sites: Sequence[SiteResult],
    *,
    truth: Run | None,
    thresholds: Thresholds,
) -> Ends:
    """Look at everything that no pass of blocks shows."""
    return Ends(
        seams=find_seams(a, b, alignment, sites, truth=truth, thresholds=thresholds),
        integers=find_integers(a, b, alignment, sites, truth=truth),
        misfits=find_misfits(a, b),
        logits_site=a.manifest.plan.logits_site,
    )
