"""Blocks in a report: prompts by their worst site, nan and inf, and the table of sites."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from divergence.comparison.result import Report
from divergence.comparison.results import SiteResult
from divergence.layout import (
    BLANK,
    MAX_WIDTH,
    RATIO_DECADES,
    REL_L2_DECADES,
    Line,
    bar,
    columns,
    count,
    cut,
    decimal,
    heading,
    line,
    prose,
    times,
)
from divergence.run.site import BACKWARD, PHASES, of_parameter

# Which rows the table of a report has: a block or trunk site each, prefill and decode apart.
#
# A block's row shows the block's own output where that was recorded and its worst
# site otherwise, at the sample and step where it is worst. The anchored pass is
# preferred, since its numbers were made in the block; the free pass stands beside it.

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


def _place(site: SiteResult) -> tuple[bool, bool, float, float]:
    bad = site.nonfinite is not None and site.nonfinite.differ > 0
    return bad, site.flagged, _rank(site.usage), _rank(site.rel_l2)


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


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """No table of equal sites, unless all are asked for."""
    same_bits = report.verdict.kind == "identical" and not all_sites
    without_sites = report.suite is not None or report.logprobs is not None
    return [
        *prompt_lines(report, all_sites=all_sites),
        *_nonfinite_lines(report.sites, all_sites=all_sites),
        *([] if same_bits or without_sites else table_lines(report, all_sites=all_sites)),
    ]


def _nonfinite_lines(sites: list[SiteResult], *, all_sites: bool) -> list[Line]:
    nonfinite = [site for site in sites if site.nonfinite is not None and site.nonfinite.total]
    if not nonfinite:
        return []
    nonfinite.sort(key=lambda site: (site.sample, site.step, site.order, site.pass_))
    shown = nonfinite if all_sites else nonfinite[:5]
    lines = [heading("non-finite values", f"at {count(len(nonfinite), 'site')}; in order:")]
    rows = [("site", "pass", "step", "A nan/inf", "B nan/inf")]
    for site in shown:
        n = site.nonfinite
        assert n is not None
        reference = f"{n.reference_nan:,}/{n.reference_inf:,}"
        candidate = f"{n.candidate_nan:,}/{n.candidate_inf:,}"
        rows.append((site.site, site.pass_, str(site.step), reference, candidate))
    lines += columns(rows, widest=42)
    if len(shown) < len(nonfinite):
        lines.append(line((f"  … {len(nonfinite) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


MAX_PROMPTS = 12


def prompt_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """One row a prompt, in the order of how much they use of their limits."""
    rows = prompt_usage(report)
    if len(rows) < 2:
        return []
    shown = rows if all_sites else rows[:MAX_PROMPTS]
    beyond = sum(usage > 1 for usage, *_ in rows)
    lines = [
        heading(
            "prompts",
            f"{beyond} of {len(rows)} beyond a limit" if beyond
            else f"{count(len(rows), 'prompt')}, none beyond a limit",
        )
    ]  # fmt: skip
    table = [("prompt", "worst site", "forward", "error / floor", "share of limit", "")]
    for usage, sample, site, ratio in shown:
        forward = f"step {site.step}" if site.step else site.phase
        mark = "!" if usage > 1 else ""
        table.append((str(sample), site.site, forward, f"{ratio:.2f}", f"{usage:.2f}", mark))
    lines += columns(table, widest=48)
    if len(shown) < len(rows):
        lines.append(line((f"  … {len(rows) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


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


MARK_WIDTH = 4
_PASSES = {
    "anchored": "anchored pass: each block got A's input",
    "free": "free pass: each run on its own values",
}
_LEGEND = {
    "rel L2": "|a-b| / |a| at this place; in an anchored pass A's inputs went in on both sides, so "
    "this much is made there",
    "p:token": "prompt and token where it is largest",
    "p:step": "prompt and decode step where it is largest",
    "r": "|a-b| / |a-truth| of the median token: about 1.4 is rounding",
    "W": "|b-truth| / |a-truth| of the median token: about 1 where both are equally right",
    "floors": "rel L2 of the median token, in units of what rounding makes; worst: of the worst "
    "token",
    "float32": "the same once more in float32, in units of what rounding makes there",
    "bar .1-1e3": "rel L2 in units of what rounding makes, on a logarithmic scale",
    "free L2": "rel L2 where each side went on with its own values: what has added up so far",
}
"""What a column holds, by its title."""


def table_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Both phases' tables, each under its heading, and what their columns hold."""
    if not report.sites and (report.operators is not None or report.collectives is not None):
        return []  # operators or collectives alone were compared
    if not report.sites:
        return [heading("sites", "none were compared"), BLANK]
    lines: list[Line] = []
    titles: dict[str, None] = {}
    for phase in phases(report):
        table = _phase_columns(report, phase)
        lines += [*_phase_lines(report, phase, table, all_sites=all_sites), BLANK]
        titles |= dict.fromkeys(column.title for column in table)
    legend = [
        prose(f"  {name}", text, width=14) for name, text in _LEGEND.items() if name in titles
    ]
    more = prose(
        "  more", "every word: docs/glossary.md; every number: --csv FILE, --json", width=14
    )
    return [*lines, heading("columns"), *legend, more, BLANK]


class _Column(NamedTuple):
    """One number of each row. ``left``: a bar, which begins at the left."""

    title: str
    cell: Callable[[SiteRow], str]
    left: bool = False


def _phase_columns(report: Report, phase: str) -> list[_Column]:
    """What is known of the sites of one phase, in the order of the columns."""
    sites = [site for site in report.sites if site.phase == phase]
    rows = phase_rows(report, phase, all_sites=True)
    several = len({site.sample for site in sites}) > 1
    with_floor = any(site.ratio is not None for site in sites)
    with_worst = any(site.ratio_max is not None for site in sites)
    with_truth = any(row.main is not None and row.main.truth is not None for row in rows)
    escalated = escalated_ratios(report, phase)
    where = "step" if phase == "decode" else "token"

    def of_main(read: Callable[[SiteResult], str]) -> Callable[[SiteRow], str]:
        return lambda row: "-" if row.main is None else read(row.main)

    def place(site: SiteResult) -> str:
        at = _at(site, phase)
        return f"{site.sample}:{at}" if several and at != "-" else str(at)

    cols = [
        _Column("rel L2", of_main(lambda site: decimal(site.rel_l2))),
        _Column(f"p:{where}" if several else where, of_main(place)),
    ]
    if with_truth:
        cols += [
            _Column("r", of_main(lambda site: times(site.truth.r_median if site.truth else None))),
            _Column("W", of_main(lambda site: times(site.truth.w_median if site.truth else None))),
        ]
    else:
        cols += [_Column("floors", of_main(lambda site: times(site.ratio)))] * with_floor
        cols += [_Column("worst", of_main(lambda site: times(site.ratio_max)))] * with_worst
    if escalated:
        cols.append(_Column("float32", lambda row: times(escalated.get(row.site))))
    else:
        cols.append(_bar_column(with_floor=with_floor))
    if any(row.free is not None for row in rows):
        cols.append(_Column("free L2", lambda row: decimal(row.free.rel_l2 if row.free else None)))
    return cols


def _bar_column(*, with_floor: bool) -> _Column:
    def drawn(row: SiteRow) -> str:
        site = row.main
        if site is None:
            return ""
        if with_floor:
            return bar(site.ratio, RATIO_DECADES)
        return bar(site.rel_l2, REL_L2_DECADES)

    return _Column("bar .1-1e3" if with_floor else "bar 1e-8-1", drawn, left=True)


def _phase_lines(
    report: Report, phase: str, table: Sequence[_Column], *, all_sites: bool
) -> list[Line]:
    sites = [site for site in report.sites if site.phase == phase]
    rows = phase_rows(report, phase, all_sites=all_sites)
    shown = list(rows) if all_sites else elide(rows)
    known = [row for row in shown if not isinstance(row, Elision)]
    cells = [[column.cell(row) for column in table] for row in known]
    sizes = [max(map(len, texts)) for texts in zip([c.title for c in table], *cells, strict=True)]
    room = MAX_WIDTH - MARK_WIDTH - sum(size + 2 for size in sizes)
    name_width = min(max(len(row.name) + 2 * row.inner for row in rows), room)

    def across(texts: Sequence[str]) -> str:
        return "".join(
            "  " + (text.ljust(size) if column.left else text.rjust(size))
            for text, size, column in zip(texts, sizes, table, strict=True)
        )

    num_steps = len({site.step for site in sites})
    what = f"decode, {count(num_steps, 'step')}" if phase == "decode" else phase
    over = [
        text
        for text, several in (
            ("steps", num_steps > 1),
            ("prompts", len({site.sample for site in sites}) > 1),
        )
        if several
    ]
    worst = f"; the worst of all {' and '.join(over)}" if over else ""
    lines = [
        heading(what, _PASSES.get(main_pass(sites), main_pass(sites)) + worst + _estimated(rows)),
        line(
            (" " * MARK_WIDTH + "site".ljust(name_width) + across([c.title for c in table]), "dim")
        ),
    ]
    texts = iter(cells)
    for row in shown:
        if isinstance(row, Elision):
            lines.append(_elision(row))
            continue
        name = cut("  " * row.inner + row.name, name_width).ljust(name_width)
        mark = (">" if row.onset else " ") + ("!" if row.flagged else " ")
        style = "bold red" if row.onset else "yellow" if row.flagged else ""
        lines.append(line(f" {mark} ", (name + across(next(texts)), style)))
    return [*lines, _footer(rows)]


def _estimated(rows: list[SiteRow]) -> str:
    """How well the rows are known that were estimated."""
    known = [row.main.estimated for row in rows if row.main is not None and row.main.estimated]
    errors = [estimate.relative_error for estimate in known if estimate.relative_error is not None]
    if not known:
        return ""
    spread = f" ±{100 * statistics.median(errors):.0f}%" if errors else ""
    return f"; estimated{spread}"


def _footer(rows: list[SiteRow]) -> Line:
    num_flagged = sum(row.flagged for row in rows)
    num_same = sum(row.worst.identical for row in rows)
    told = f"{count(len(rows), 'row')}: {num_flagged:,} beyond the limit (!)"
    told += ", > where it begins" if any(row.onset for row in rows) else ""
    return line((f"    {told}; {num_same:,} bit-identical", "dim"))


def _elision(gap: Elision) -> Line:
    worst = gap.worst.worst
    value = times(worst.ratio) if worst.ratio is not None else decimal(worst.rel_l2)
    return line((f"  … {count(gap.num_rows, 'healthy row')}, at most {value}", "dim"))


def _at(site: SiteResult, phase: str) -> int | str:
    if site.identical:
        return "-"
    if phase == "decode":
        return site.step
    return "-" if site.worst_position is None else site.worst_position
