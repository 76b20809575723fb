"""What the blocks together may make of the logits by rounding, forward by forward.

Each block and each trunk module behind the last block makes an error of its floor (numerics.floor);
what is rounding adds as squares, so the free run's logits may differ by the root of their sum, as a
relative L2. That is a scale which no fault moves: it is made of formats, widths and norms, not of
the two sides' difference.

It leaves out what one block makes of another's error, so it is no limit by itself; limits are
stated multiples of it (``drift`` in numerics.floor).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from divergence.comparison.results.sites import SiteResult, order_of

__all__ = ["Allowed", "allowed_errors", "main_path"]

Allowed = Mapping[tuple[int, int], float]
"""By (sample, step)."""


def main_path(sites: Sequence[SiteResult]) -> dict[tuple[int, int], list[SiteResult]]:
    """The free pass' results that end in the logits, by forward: the first output of every block,
    and of what comes after the last one, in execution order."""
    found: dict[tuple[int, int], list[SiteResult]] = {}
    for site in sites:
        if site.pass_ == "free" and site.site.endswith(":out") and site.rel_l2 is not None:
            found.setdefault((site.sample, site.step), []).append(site)
    paths: dict[tuple[int, int], list[SiteResult]] = {}
    for place, mine in found.items():
        mine = sorted(mine, key=order_of)
        last = max((n for n, s in enumerate(mine) if s.role == "block"), default=None)
        if last is not None:
            paths[place] = [
                s
                for n, s in enumerate(mine)
                if s.role == "block" or (n > last and s.role == "trunk")
            ]
    return paths


def allowed_errors(sites: Sequence[SiteResult]) -> Allowed:
    """The relative error of the last site of each forward that rounding explains."""
    paths = main_path(sites)
    allowed: dict[tuple[int, int], float] = {}
    for (sample, step), path in paths.items():
        square = sum(site.floor**2 for site in path if site.floor is not None)
        if step:  # an encoder runs in the first forward, and its error is in all
            here = {site.site for site in path}
            square += sum(
                site.floor**2
                for site in paths.get((sample, 0), ())
                if site.floor is not None and site.site not in here
            )
        if square:
            allowed[sample, step] = math.sqrt(square)
    return allowed
