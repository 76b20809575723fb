"""What a block is made of, for a page: its modules, the worst of each over all forwards."""

from __future__ import annotations

from collections.abc import Iterable

from divergence.analyses.blocks.rows import badness, is_input, main_pass
from divergence.comparison.result import Report
from divergence.comparison.results.sites import SiteResult
from divergence.html.parts import BlockPart, Table
from divergence.layout import count, decimal, shape_text, times

__all__ = ["block_parts"]

_MOST_MODULES = 3000
"""Rows of all blocks together: some 250 kB of a page. Where there are more, the worst of each
block."""


def block_parts(report: Report) -> list[BlockPart]:
    """One for each block, and for each site outside all blocks, in execution order."""
    blocks: dict[str, dict[str, list[SiteResult]]] = {}
    wanted = {main_pass(report.sites), "free"}
    sites = (site for site in report.sites if site.pass_ in wanted)
    for site in sorted(sites, key=lambda site: (site.order, site.site)):
        blocks.setdefault(site.block or site.site, {}).setdefault(site.site, []).append(site)
    num_modules = sum(map(len, blocks.values()))
    most = max(4, _MOST_MODULES // max(1, len(blocks))) if num_modules > _MOST_MODULES else None
    onset = report.verdict.onset
    return [_part(name, sites, most, onset.site if onset else None)
            for name, sites in sorted(blocks.items(), key=_last_run)]  # fmt: skip


def _last_run(item: tuple[str, dict[str, list[SiteResult]]]) -> tuple[int, str]:
    """A block ends after its parts."""
    name, sites = item
    return max(site.order for group in sites.values() for site in group), name


def _part(
    name: str, sites: dict[str, list[SiteResult]], most: int | None, onset: str | None
) -> BlockPart:
    worst = {site: max(group, key=_rank) for site, group in sites.items()}
    shown = [site for site, result in worst.items() if not result.identical or site == onset]
    shown = shown or [site for site in worst if not is_input(site)]
    if most is not None and len(shown) > most:
        kept = set(sorted(shown, key=lambda site: _rank(worst[site]), reverse=True)[:most])
        shown = [site for site in shown if site in kept]
    equal = sum(result.identical for site, result in worst.items() if site not in shown)
    left = len(worst) - len(shown) - equal
    notes = [f"{count(equal, 'more site')} with equal bits."] if equal else []
    notes += [f"{count(left, 'more site')} in the JSON."] if left else []
    own = worst.get(f"{name}:out") or max(worst.values(), key=_rank)
    return BlockPart(
        block=name, facts=_facts(own, sites.values()),
        tables=[_table(name, [worst[site] for site in shown], sites, onset, " ".join(notes))],
    )  # fmt: skip


def _table(
    block: str, results: list[SiteResult], sites: dict[str, list[SiteResult]], onset: str | None,
    note: str,
) -> Table:  # fmt: skip
    titles = ("module", "class", "shape", "relative L2", "× floor", "worst token", "1 − cosine",
              "max |a−b|", "B over A")  # fmt: skip
    rows = [_row(block, result) for result in results]
    kept = [n for n in range(len(titles)) if n < 4 or any(row[n] != "-" for row in rows)]
    flagged = {site for site, group in sites.items() if any(one.flagged for one in group)}
    return Table(
        caption="Modules, the worst forward of each", titles=tuple(titles[n] for n in kept),
        rows=[tuple(row[n] for n in kept) for row in rows], num_left=3, names=True, note=note,
        marks=["onset" if one.site == onset else "flagged" if one.site in flagged else ""
               for one in results],
    )  # fmt: skip


def _rank(site: SiteResult) -> tuple[bool, bool, bool, float, float]:
    """The pass that is judged comes before the free one."""
    nonfinite, flagged, ratio, rel_l2 = badness(site)
    return site.pass_ != "free", nonfinite, flagged, ratio, rel_l2


def _row(block: str, site: SiteResult) -> tuple[str, ...]:
    own = site.site.removeprefix(block).removeprefix(".") or site.site
    return (
        own, site.kind or "-", shape_text(site.shape),
        "equal" if site.identical else decimal(site.rel_l2), times(site.ratio),
        times(site.ratio_max), decimal(site.one_minus_cosine), decimal(site.max_abs),
        times(site.truth.w_median) if site.truth else "-",
    )  # fmt: skip


def _facts(site: SiteResult, groups: Iterable[list[SiteResult]]) -> list[tuple[str, str]]:
    facts = [
        ("class", site.kind or "-"),
        ("dtype", _both(site.reference_dtype, site.candidate_dtype)),
    ]
    facts.append(("relative L2", "equal bits" if site.identical else decimal(site.rel_l2)))
    if site.floor is not None:
        facts.append(("rounding floor", decimal(site.floor)))
    if site.ratio is not None and site.limit is not None:
        facts.append(("× floor, limit", f"{times(site.ratio)}, {times(site.limit)}"))
    if site.truth is not None:
        one = site.truth
        facts.append(("from the truth, A", decimal(one.reference_error)))
        facts.append(("from the truth, B", decimal(one.candidate_error)))
    if site.worst_position is not None and not site.identical:
        facts.append(("worst token", str(site.worst_position)))
    if site.worst_channel is not None and not site.identical:
        facts.append(("worst feature", str(site.worst_channel)))
    flagged = sum(one.flagged for group in groups for one in group)
    if flagged:
        facts.append(("results beyond a limit", str(flagged)))
    return facts


def _both(one: str, two: str) -> str:
    one, two = one.removeprefix("torch."), two.removeprefix("torch.")
    return one if one == two else f"{one} / {two}"
