"""Which rows a table of blocks has: a block or trunk site each, prefill and decode apart.

A block's row shows the block's own output where that was recorded and its worst site otherwise, at
the sample and step where it is worst. The anchored pass is preferred, since its numbers were made
in the block; the free pass stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from divergence.comparison.result import Report
from divergence.comparison.results import SiteResult
from divergence.run.site import BACKWARD, PHASES, of_parameter

MAX_ROWS = 40
NUM_AROUND = 4
"""Healthy rows kept on either side of a flagged one, and at both ends."""


class SiteRow(NamedTuple):
    """One line of the table. ``main``: the pass that is judged, if it was recorded here."""

    name: str
    inner: bool
    main: SiteResult | None
    free: SiteResult | None
    flagged: bool
    onset: bool

    @property
    def site(self) -> str:
        """The site that the row's numbers are of."""
        return self.worst.site

    @property
    def worst(self) -> SiteResult:
        result = self.main or self.free
        assert result is not None
        return result


class Elision(NamedTuple):
    """Healthy rows that were left out, and the worst of them."""

    num_rows: int
    worst: SiteRow


def phases(report: Report) -> list[str]:
    """Those of PHASES that were compared, in order of execution."""
    there = {site.phase for site in report.sites}
    return [name for name in PHASES if name in there]


def main_pass(sites: Iterable[SiteResult]) -> str:
    """The pass that the table is about: anchored where there is one."""
    return "anchored" if any(site.pass_ == "anchored" for site in sites) else "free"


def escalated_ratios(report: Report, phase: str) -> dict[str, float]:
    """By site, the escalated pass's largest ratio over the float32 floor in this phase."""
    ratios: dict[str, float] = {}
    for site in report.sites:
        if site.pass_ == "escalated" and site.phase == phase:
            ratio = site.ratio if site.ratio is not None else 0.0
            ratios[site.site] = max(ratio, ratios.get(site.site, 0.0))
    return ratios


def badness(site: SiteResult) -> tuple[bool, bool, float, float]:
    """Sort key: non-finite values first, then what the judge flagged, then floor units."""
    nonfinite = site.nonfinite is not None and site.nonfinite.total > 0
    return (nonfinite, site.flagged, _rank(site.ratio), _rank(site.rel_l2))


def _rank(value: float | None) -> float:
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def phase_rows(report: Report, phase: str, *, all_sites: bool = False) -> list[SiteRow]:
    """Rows of one phase in execution order; each site of its own with ``all_sites``."""
    sites = [site for site in report.sites if site.phase == phase]
    wanted = main_pass(sites)
    onset = report.verdict.onset
    if onset is not None and onset.phase != phase:
        onset = None

    hidden = {s.site for s in sites if s.pass_ == "escalated" and s.flagged}

    def row(name: str, group: list[SiteResult], *, inner: bool, onset_here: bool) -> SiteRow:
        free = [site for site in group if site.pass_ == "free"]
        main = [site for site in group if site.pass_ == wanted]
        return SiteRow(
            name=name,
            inner=inner,
            main=max(main, key=badness, default=None),
            free=max(free, key=badness, default=None) if wanted != "free" else None,
            flagged=any(site.flagged or site.site in hidden for site in group),
            onset=onset_here,
        )

    # the escalated pass has one column, not rows of its own
    known = [site for site in sites if site.pass_ in (wanted, "free")]
    # where several are equally bad, the earliest is shown
    known.sort(key=lambda site: (site.sample, site.step, site.order, site.site, site.pass_))
    rows: list[SiteRow] = []
    for name, group in _grouped(known, lambda s: s.site if all_sites else s.block or s.site):
        own = [site for site in group if site.block is None or is_output(site)]
        here = onset is not None and (
            onset.site == name if all_sites else name in (onset.site, onset.block)
        )
        shown = row(name, group if all_sites else own or group, inner=False, onset_here=here)
        if here and onset is not None and not all_sites:
            # the block of the onset is opened: its parts in the order in which they ran
            parts = [site for site in group if site.site != name + ":out"]
            inner = dict(_grouped(parts, lambda s: s.site))
            for site, part in inner.items():
                if site != name:
                    within = site.removeprefix(name).removeprefix(".")  # mlp:out
                    rows.append(row(within, part, inner=True, onset_here=site == onset.site))
            shown = shown._replace(onset=onset.site not in inner or onset.site == name)
        bad = any(s.flagged or s.site in hidden for s in group)
        rows.append(shown._replace(flagged=bad))
    if all_sites:
        return rows
    # an input is another site's output; where nothing else was recorded it is all there is
    telling = [row for row in rows if row.flagged or row.onset or not is_input(row.name)]
    return telling or rows


def worst_rows(report: Report) -> list[SiteRow]:
    """One row a block or site, by the share of a limit that it uses; each is of the phase and shows
    the forward that uses most. What is beyond a limit, or not finite, comes first."""
    by_site: dict[str, SiteRow] = {}
    onset = report.verdict.onset
    for phase in phases(report):
        sites = [site for site in report.sites if site.phase == phase]
        wanted = main_pass(sites)
        groups = _grouped(
            [site for site in sites if site.pass_ == wanted or site.flagged],
            lambda site: site.block or site.site,
        )
        for name, group in groups:
            own = [site for site in group if site.block is None or is_output(site)]
            site = max(own or group, key=_place)
            flagged = any(result.flagged for result in group)
            here = onset is not None and name in (onset.site, onset.block)
            row = SiteRow(name, False, site, None, flagged, here)
            if name not in by_site or _share(row) > _share(by_site[name]):
                by_site[name] = row
    rows = [row for row in by_site.values() if row.flagged or not is_input(row.name)]
    return sorted(rows or by_site.values(), key=_share, reverse=True)


def worst_places(rows: Sequence[SiteRow], *, exact: bool = False) -> list[str]:
    """Where each is worst, and which were measured in the free pass although others were not.
    ``exact``: one forward, also where all of them together use most of the limit."""
    anchored = any(row.worst.pass_ == "anchored" for row in rows)
    return [
        _at(site, exact=exact)
        + ", free pass" * (anchored and site.pass_ == "free" and site.role == "block")
        for site in (row.worst for row in rows)
    ]


def _at(site: SiteResult, *, exact: bool) -> str:
    """``prompt 2, token 7``, ``prompt 0, step 3``; a share that all forwards together use is of no
    one forward."""
    together = site.usage is not None and (site.limit_usage or 0.0) > 1.05 * site.usage
    if of_parameter(site.site) or (together and not exact):
        return "decode, all steps" if site.step else f"{site.phase}, all prompts"
    sample, position = site.worst_sample, site.worst_position
    if num_bad(site) and site.nonfinite is not None:
        sample, position = site.nonfinite.sample, site.nonfinite.position
    place = f"prompt {site.sample if sample is None else sample}"
    if site.step:
        return f"{place}, step {site.step}"
    place += f", {site.phase}" if exact else ""
    return place if position is None else f"{place}, token {position}"


def num_bad(site: SiteResult) -> int:
    """How many numbers are not finite on one side alone."""
    return site.nonfinite.differ if site.nonfinite is not None else 0


def _place(site: SiteResult) -> tuple[bool, bool, float, float]:
    return num_bad(site) > 0, site.flagged, _rank(site.usage), _rank(site.rel_l2)


def _share(row: SiteRow) -> tuple[bool, bool, float, float]:
    bad, *_ = _place(row.worst)
    return bad, row.flagged, _rank(row.worst.limit_usage), _rank(row.worst.rel_l2)


def is_output(site: SiteResult) -> bool:
    """Is it what a block, or its backward, hands on?"""
    return site.site in (f"{site.block}:out", f"{site.block}{BACKWARD}:out")


def is_input(name: str) -> bool:
    """Is it a site of what enters a module?"""
    _, colon, port = name.rpartition(":")
    return bool(colon) and port.split(".")[0] == "in"


def _grouped(
    sites: list[SiteResult], key: Callable[[SiteResult], str]
) -> list[tuple[str, list[SiteResult]]]:
    """Sites by key, groups in order of their last execution: a block ends after its parts."""
    groups: dict[str, list[SiteResult]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return sorted(groups.items(), key=lambda item: (max(site.order for site in item[1]), item[0]))


def elide(rows: list[SiteRow], *, max_rows: int = MAX_ROWS) -> list[SiteRow | Elision]:
    """About ``max_rows`` rows at most; healthy ones far from anything flagged are counted."""
    if len(rows) <= max_rows:
        return list(rows)
    marked = [i for i, row in enumerate(rows) if row.onset or row.flagged or row.inner]
    kept = {*range(NUM_AROUND), *range(len(rows) - NUM_AROUND, len(rows)), *marked}
    # the surroundings of the onset only: with many flagged rows theirs would be everything
    for i in [i for i in marked if rows[i].onset] or marked[:1]:
        kept.update(range(max(i - NUM_AROUND, 0), min(i + NUM_AROUND + 1, len(rows))))
    shown: list[SiteRow | Elision] = []
    gone: list[SiteRow] = []
    for i, row in enumerate(rows):
        if i not in kept:
            gone.append(row)
            continue
        if gone:
            shown.append(Elision(len(gone), max(gone, key=lambda r: badness(r.worst))))
            gone = []
        shown.append(row)
    return shown


def prompt_usage(report: Report) -> list[tuple[float, int, SiteResult, float]]:
    """(usage, prompt, site, its ratio), the largest usage first."""
    wanted = main_pass(report.sites)
    worst: dict[int, tuple[float, int, SiteResult, float]] = {}
    for site in report.sites:
        if site.pass_ != wanted or site.usage is None or site.ratio is None:
            continue
        if of_parameter(site.site):  # of all prompts together
            continue
        prompts = [(prompt.sample, prompt.usage, prompt.ratio) for prompt in site.prompts]
        for sample, usage, ratio in prompts or [(site.sample, site.usage, site.ratio)]:
            if sample not in worst or usage > worst[sample][0]:
                worst[sample] = (usage, sample, site, ratio)
    return sorted(worst.values(), key=lambda row: (-row[0], row[1]))


def usage(row: SiteRow) -> float:
    """By which rows are ordered; a nan is the largest."""
    value = row.worst.limit_usage
    value = row.worst.rel_l2 if value is None else value
    return 0.0 if value is None else math.inf if math.isnan(value) else value
