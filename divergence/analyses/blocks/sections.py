"""Blocks in a report: the table of each phase, prompts by their worst site, nan and inf; on a page
also the largest errors first, figures, and what each block is made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from divergence.comparison.result import Background, Report, SiteResult
from divergence.document import (
    DECADES,
    FLOORS,
    LIMIT_SHARES,
    BlockPart,
    Column,
    Figures,
    Fold,
    HeatMap,
    HeatScale,
    Plot,
    PlotLine,
    Section,
    Sentence,
    Table,
    each_in,
    named,
    out_of,
)
from divergence.layout import RATIO_DECADES, REL_L2_DECADES, bar
from divergence.run.site import BACKWARD, PHASES, is_of_parameter
from divergence.words import count, decimal, grouped, limit_share, shape_text, times

# Which rows a table of blocks has: a block or trunk site each, prefill and decode apart.
#
# A block's row shows the block's own output where that was recorded and its worst site otherwise,
# at the sample and step where it is worst. The anchored pass is preferred, since its numbers were
# made in the block; the free pass stands beside it.

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
    forwards: Sequence[SiteResult] = ()
    """All of the phase at the worst one's site, in its pass."""

    @property
    def site(self) -> str:
        return self.worst.site

    @property
    def together(self) -> bool:
        """Do all forwards use more of the limit than the worst one, which is within its own?"""
        site = self.worst
        return (
            site.usage is not None
            and site.usage <= 1
            and ((site.limit_usage or 0.0) > 1.05 * site.usage)
        )

    @property
    def share(self) -> float | None:
        """The share of a limit: of all forwards together, else of the worst one."""
        site = self.worst
        alone = site.usage is not None and site.usage > 1
        return site.usage if alone else site.limit_usage

    @property
    def errors(self) -> tuple[float, ...]:
        """What uses that share: both sides' errors against a truth, or their difference."""
        sites = self.forwards if self.together and self.forwards else [self.worst]
        truths = [site.truth for site in sites if site.truth is not None]
        each: list[tuple[float, ...]]
        each = [(truth.reference_error, truth.candidate_error) for truth in truths]
        each = each or [(site.rel_l2,) for site in sites if site.rel_l2 is not None]
        return tuple(
            math.sqrt(statistics.fmean(value * value for value in side))
            for side in zip(*each, strict=True)
        )

    @property
    def worst(self) -> SiteResult:
        result = self.main or self.free
        assert result is not None
        return result


def phases(report: Report) -> list[str]:
    """Lists the phases that were compared, in order of execution."""
    there = {site.phase for site in report.sites}
    return [name for name in PHASES if name in there]


def main_pass(sites: Iterable[SiteResult]) -> str:
    """The pass that the table is about: anchored where there is one."""
    return "anchored" if any(site.pass_ == "anchored" for site in sites) else "free"


def num_bad(site: SiteResult) -> int:
    return site.nonfinite.differ if site.nonfinite is not None else 0


def badness(site: SiteResult) -> tuple[bool, bool, float, float]:
    """Sort key: nan and inf that one side alone has, then what the judge flagged, then the share of
    a limit, then the difference."""
    return num_bad(site) > 0, site.flagged, _rank(site.usage), _rank(site.rel_l2)


def _rank(value: float | None) -> float:
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def _share(row: SiteRow) -> tuple[bool, bool, float, float]:
    """Sort key of a row: as of a site, by what all its forwards use together."""
    site = row.worst
    return num_bad(site) > 0, row.flagged, _rank(row.share), _rank(site.rel_l2)


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
    in_pass = [site for site in sites if site.pass_ in (wanted, "free")]
    # where several are equally bad, the earliest is shown
    in_pass.sort(key=lambda site: (site.sample, site.step, site.order, site.site, site.pass_))
    rows: list[SiteRow] = []
    for name, group in _grouped(in_pass, lambda s: s.site if all_sites else s.block or s.site):
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
            site = max(own or group, key=badness)
            flagged = any(result.flagged for result in group)
            here = onset is not None and name in (onset.site, onset.block)
            same = [s for s in group if (s.site, s.pass_) == (site.site, site.pass_)]
            row = SiteRow(name, False, site, None, flagged, here, same)
            if name not in by_site or _share(row) > _share(by_site[name]):
                by_site[name] = row
    rows = [row for row in by_site.values() if row.flagged or not is_input(row.name)]
    return sorted(rows or by_site.values(), key=_share, reverse=True)


def worst_places(rows: Sequence[SiteRow], *, exact: bool = False) -> list[str]:
    """Tells where each row is worst, and which were measured in the free pass although others were
    not. ``exact``: one forward, also where all of them together use most of the limit."""
    anchored = any(row.worst.pass_ == "anchored" for row in rows)
    return [
        _at(row, exact=exact)
        + ", free pass" * (anchored and row.worst.pass_ == "free" and row.worst.role == "block")
        for row in rows
    ]


def _at(row: SiteRow, *, exact: bool) -> str:
    """A place such as ``prompt 2, token 7``; a share that all forwards together use is of no one
    forward."""
    site = row.worst
    if is_of_parameter(site.site) or (row.together and not exact):
        return "decode, all steps" if site.step else f"all of the {site.phase}"
    sample, position = site.worst_sample, site.worst_position
    if num_bad(site) and site.nonfinite is not None:
        sample, position = site.nonfinite.sample, site.nonfinite.position
    place = f"prompt {site.sample if sample is None else sample}"
    if site.step:
        return f"{place}, step {site.step}"
    place += f", {site.phase}" if exact else ""
    return place if position is None else f"{place}, token {position}"


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
    groups = grouped(sites, key).items()
    return sorted(groups, key=lambda item: (max(site.order for site in item[1]), item[0]))


def _elided(
    rows: list[SiteRow], most: int | None
) -> tuple[list[SiteRow], dict[int, list[Sentence]]]:
    """Some ``most`` rows at most, and below which of them healthy ones are left out that are far
    from anything flagged: how many, and the worst of them."""
    numbers = list(range(len(rows)))
    if most is not None and len(rows) > most:
        marked = [n for n, row in enumerate(rows) if row.onset or row.flagged or row.inner]
        kept = {*numbers[:NUM_AROUND], *numbers[-NUM_AROUND:], *marked}
        # the surroundings of the onset only: with many flagged rows theirs would be everything
        for n in [n for n in marked if rows[n].onset] or marked[:1]:
            kept.update(numbers[max(n - NUM_AROUND, 0) : n + NUM_AROUND + 1])
        numbers = sorted(kept)
    below = {}
    for number, (this, following) in enumerate(pairwise(numbers)):
        if gone := rows[this + 1 : following]:
            worst = max((row.worst for row in gone), key=badness)
            size = times(worst.ratio) if worst.ratio is not None else decimal(worst.rel_l2)
            text = f"… {count(len(gone), 'healthy row')}, at most {size}"
            below[number] = [Sentence(text, indent=2, style="dim")]
    return [rows[n] for n in numbers], below


def prompt_usage(report: Report) -> list[tuple[float, int, SiteResult, float]]:
    """Lists (usage, prompt, site, its ratio), the largest usage first."""
    wanted = main_pass(report.sites)
    worst: dict[int, tuple[float, int, SiteResult, float]] = {}
    for site in report.sites:
        if site.pass_ != wanted or site.usage is None or site.ratio is None:
            continue
        if is_of_parameter(site.site):  # of all prompts together
            continue
        prompts = [(prompt.sample, prompt.usage, prompt.ratio) for prompt in site.prompts]
        for sample, usage, ratio in prompts or [(site.sample, site.usage, site.ratio)]:
            if sample not in worst or usage > worst[sample][0]:
                worst[sample] = (usage, sample, site, ratio)
    return sorted(worst.values(), key=lambda row: (-row[0], row[1]))


# The error of each block as curves, and with a truth the distance of both sides from it.

_PHASES = {
    "prefill": "Prefill: the prompt",
    "backward": "Backward: gradients",
    "optimizer": "Optimizer: updates",
}


def _key(site_name: str) -> str:
    """A row's name on an axis: the number of a block, the module of what is outside them."""
    module = site_name.rpartition(":")[0] or site_name
    return module.rpartition(".")[2]


def curves(report: Report) -> list[Plot]:
    """The curves of the prefill and of decode; none where no block was measured."""
    rows_of = {phase: phase_rows(report, phase) for phase in phases(report)}
    return [plot for phase, rows in rows_of.items() for plot in phase_curves(report, phase, rows)]


def phase_curves(report: Report, phase: str, rows: Sequence[SiteRow]) -> list[Plot]:
    outputs = [row for row in rows if not row.inner and row.worst.rel_l2 is not None]
    if not outputs:
        return []
    steps = len({s.step for s in report.sites if s.step})
    what = _PHASES.get(phase) or f"Decode: {count(steps, 'step')}"
    plots = [_error_plot(phase, what, outputs)]
    truths = [None if row.main is None else row.main.truth for row in outputs]
    apart = [
        (truth.w_median, row.name) for row, truth in zip(outputs, truths, strict=True) if truth
    ]
    if apart:
        a = [None if truth is None else truth.reference_error for truth in truths]
        b = [None if truth is None else truth.candidate_error for truth in truths]
        says = [
            f"{row.name}: no truth here"
            if truth is None
            else f"{row.name}: A {decimal(truth.reference_error)}, "
            f"B {decimal(truth.candidate_error)} from the truth, B over A {times(truth.w_median)}"
            for row, truth in zip(outputs, truths, strict=True)
        ]
        most, where = max(apart, key=lambda item: max(item[0], 1 / item[0] if item[0] else 0.0))
        ratio_text = f"B over A is {times(most)} at {where}, where they are most unlike"
        flagged = [n for n, row in enumerate(outputs) if row.flagged and not num_bad(row.worst)]
        legend = [("dot reference", "A"), ("dot candidate", "B")]
        plots.append(
            Plot(
                id=f"truth-{phase}",
                title=f"Distance from the truth. {what}",
                legend=legend,
                described=f"{'Which side is wrong' if flagged else 'How far each is from it'}: "
                f"{ratio_text}.",
                names=[_key(row.name) for row in outputs],
                onset=next(iter(flagged), None),
                lines=[PlotLine(kind="reference", values=a), PlotLine(kind="candidate", values=b)],
                says=says,
                blocks=[row.name for row in outputs],
            )
        )
    return plots


def _typical(row: SiteRow, *, free: bool) -> float | None:
    """The median token's error, or that of the whole tensor where tokens are not known apart."""
    site = row.free if free else row.main
    if site is None:
        return None
    return site.rel_l2 if site.token_rel_l2_median is None else site.token_rel_l2_median


def _error_plot(phase: str, what: str, rows: Sequence[SiteRow]) -> Plot:
    anchored = any(row.main is not None and row.main.pass_ == "anchored" for row in rows)
    kind = "anchored" if anchored else "free"
    lines = [PlotLine(kind=kind, values=[_typical(row, free=False) for row in rows])]
    if any(row.free is not None for row in rows):
        free = [_typical(row, free=True) for row in rows]
        lines.append(PlotLine(kind="free", values=free))
    floors = [row.worst.floor for row in rows]
    limits = [
        None if site.floor is None or site.limit is None else site.floor * site.limit
        for site in (row.worst for row in rows)
    ]
    with_floor = any(floors)
    flagged = [n for n, row in enumerate(rows) if row.flagged]
    onset = next((n for n, row in enumerate(rows) if row.onset), None)
    flagged_text = f"{count(len(flagged), 'block') if flagged else 'none'} beyond the limit"
    legend = [(f"line {kind}", "made in this block" if anchored else "error at this block")]
    legend += [("line free", "on its own values")] if len(lines) > 1 else []
    if with_floor:
        legend += [("band floor", "one rounding floor"), ("band limit", "up to the limit")]
    legend += [("dot flagged", "beyond the limit")] if flagged else []
    return Plot(
        id=f"error-{phase}",
        title=f"Difference between A and B. {what}",
        legend=legend,
        described=f"Relative L2 of the typical token, worst forward; {flagged_text}.",
        names=[_key(row.name) for row in rows],
        lines=lines,
        flagged=flagged,
        onset=onset,
        band=(floors, limits) if with_floor else None,
        says=[_says(row) for row in rows],
        blocks=[row.name for row in rows],
    )


def _says(row: SiteRow) -> str:
    """A block in one sentence, for the cursor and for who does not see the picture."""
    site = row.worst
    parts = ["equal bits" if site.identical else f"error {decimal(site.rel_l2)}"]
    if site.ratio is not None and not site.identical:
        limit = "" if site.limit is None else f" (limit {times(site.limit)})"
        parts.append(f"{times(site.ratio)} the rounding floor{limit}")
    if row.free is not None:
        parts.append(f"on its own values {decimal(row.free.rel_l2)}")
    if row.flagged:
        parts.append("beyond its limit")
    return f"{row.name}: {', '.join(parts)}"


# Maps of colour: which blocks err in which steps, in which prompts, at which tokens.

_MOST = 128
"""Rows and columns of a map; of more, neighbours share one, and the worst of them is shown."""

Cells = dict[tuple[int, int], list[float]]
"""By row and column: what was measured there."""


def maps(report: Report, background: Background) -> list[HeatMap]:
    """Blocks by steps, by prompts and by tokens, where there are several."""
    wanted = main_pass(report.sites)
    sites = [  # a block's own output, or that of a module outside all blocks
        site
        for site in report.sites
        if site.pass_ == wanted
        and not is_input(site.site)
        and (site.block is None or site.site == f"{site.block}:out")
    ]
    sites.sort(key=lambda site: (site.order, site.site))
    rows = list(dict.fromkeys(site.block or site.site for site in sites))
    scale = LIMIT_SHARES if any(site.usage is not None for site in sites) else DECADES
    by_step: Cells = {}
    by_prompt: Cells = {}
    for site in sites:
        value = site.rel_l2
        if scale is LIMIT_SHARES:
            value = None if site.usage is None else 100 * site.usage
        if site.nonfinite is not None and site.nonfinite.differ:
            value = math.nan
        if value is None:
            continue
        row = rows.index(site.block or site.site)
        by_step.setdefault((row, site.step), []).append(value)
        prompts = site.prompts if scale is LIMIT_SHARES else []
        members = [(prompt.sample, 100 * prompt.usage) for prompt in prompts]
        for sample, used in members or [(site.sample, value)]:
            by_prompt.setdefault((row, sample), []).append(used)
    grids = []
    for id, column, cells in (("steps", "step", by_step), ("prompts", "prompt", by_prompt)):
        columns = sorted({number for _, number in cells})
        several = len(columns) > 1 and any(any(map(scale.step, cell)) for cell in cells.values())
        if several:  # one colour tells nothing
            places = {number: place for place, number in enumerate(columns)}
            placed = {(row, places[number]): cell for (row, number), cell in cells.items()}
            names = [str(number) for number in columns]
            grids.append(_map(id, f"Blocks × {id}", column, rows, names, placed, scale))
    positions = background.positions
    if positions is not None and positions.blocks:
        placed = {
            (y, x): [value]
            for y, values in enumerate(positions.floors)
            for x, value in enumerate(values)
            if value is not None
        }
        title = f"Blocks × tokens of prompt {positions.sample}"
        blocks, tokens = positions.blocks, positions.tokens
        grids.append(_map("tokens", title, "token", blocks, tokens, placed, FLOORS))
    return grids


def _map(
    id: str,
    title: str,
    column: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Cells,
    scale: HeatScale,
) -> HeatMap:
    """A map of at most so many cells, each the worst of neighbours, that says where the largest
    is."""
    tall, wide = (1 + (len(names) - 1) // _MOST for names in (rows, columns))
    groups: Cells = {}
    for (y, x), values in cells.items():
        groups.setdefault((y // tall, x // wide), []).extend(values)
    worst = {
        place: max(values, key=lambda value: (not math.isfinite(value), value))
        for place, values in groups.items()
    }
    rows, columns = (
        [
            " to ".join(dict.fromkeys((names[n : n + step][0], names[n : n + step][-1])))
            for n in range(0, len(names), step)
        ]
        for names, step in ((rows, tall), (columns, wide))
    )
    (y, x), value = max(worst.items(), key=lambda item: (not math.isfinite(item[1]), item[1]))
    largest, beyond = f"{decimal(value)} {scale.unit}", ""
    if scale is FLOORS and math.isfinite(value):
        largest = f"{times(value)} the rounding floor"
    if scale is LIMIT_SHARES:
        num = sum(cell > 100 or not math.isfinite(cell) for cell in worst.values())
        beyond = f"; {num:,} of {count(len(worst), 'cell')} beyond the limit"
        largest = f"{limit_share(value / 100)} of the limit"
    return HeatMap(
        id=f"map-{id}",
        title=title,
        column=column,
        rows=rows,
        columns=columns,
        scale=scale,
        described=f"The largest is {largest}, at {rows[y]}, {column} {columns[x]}{beyond}.",
        values=[[worst.get((y, x)) for x in range(len(columns))] for y in range(len(rows))],
    )


# Tables: a row a block, with what each face shows of it.

_REL_L2 = "|a-b| / |a| at this place"
_MADE = "; A's inputs went in on both sides, so this much is made there"
_FLOORS = "rel L2 of the median token, in units of what rounding makes; worst: of the worst token"
_SHARE = "the share of a limit that is used; over 100% is beyond it, - is held to none"
_R = "|a-b| / |a-truth| of the median token: about 1.4 is rounding"
_W = "|b-truth| / |a-truth| of the median token: about 1 where both are equally right"
_DEEP = "the same once more in float32, in units of what rounding makes there"
_BAR = "rel L2 in units of what rounding makes, on a logarithmic scale"
_FREE = "rel L2 where each side went on with its own values: what has added up so far"


def rows_table(
    rows: Sequence[SiteRow],
    title: str = "",
    detail: str = "",
    *,
    several: bool = False,
    escalated: Mapping[str, float] | None = None,
    below: Mapping[int, list[Sentence]] | None = None,
) -> Table:
    """Rows of blocks with their figures; a column that none of them has is left out. ``several``:
    a place names its prompt; ``escalated``: by site, how large the error is in float32."""
    main = [row.main for row in rows if row.main is not None]
    floor, truth = (any(getattr(s, name) is not None for s in main) for name in ("ratio", "truth"))
    where = "step" if any(site.step for site in main) else "token"
    anchored = any(site.pass_ == "anchored" for site in main)
    decades = RATIO_DECADES if floor else REL_L2_DECADES
    alone = "page" if truth else ""  # a terminal has room for what a truth tells, or for these
    columns = (
        Column("block", face="page"),
        Column("site", face="terminal"),
        Column("worst at", face="page", left=True),
        Column("relative L2", decimal, short="rel L2", meaning=_REL_L2 + _MADE * anchored),
        Column(
            f"p:{where}" if several else where,
            face="terminal",
            meaning=f"prompt and {'decode ' * (where == 'step')}{where} where it is largest"
            if several
            else "",
        ),
        Column("× floor", times, short="floors", face=alone, meaning=_FLOORS),
        Column("worst token", times, short="worst", face=alone),
        Column("share of limit", limit_share, short="of limit", meaning=_SHARE),
        Column("r", times, face="terminal", meaning=_R),
        Column("B over A", times, short="W", meaning=_W),
        Column("float32", times, meaning=_DEEP),
        Column(
            "bar .1-1e3" if floor else "bar 1e-8-1",
            lambda value: bar(value, decades),
            left=True,
            width=10,
            face="terminal",
            meaning=_BAR if floor else "",
        ),
        Column("own values", decimal, short="free L2", meaning=_FREE),
    )
    values = []
    for row, place in zip(rows, worst_places(rows, exact=True), strict=True):
        site, equal, bad = row.main, row.worst.identical, num_bad(row.worst) > 0
        at = None if site is None else site.step or site.worst_position
        named = None if at is None or equal else f"{row.worst.sample}:" * several + str(at)
        length = (site.ratio if floor else site.rel_l2) if site is not None else None
        length = math.inf if bad else length
        against = site.truth if site is not None and not bad else None
        values.append(
            (  # of nan and inf the figures of all other elements say nothing
                row.site if row.inner else row.name,
                "  " * row.inner + row.name,
                None if equal else place,
                math.nan if bad else site and site.rel_l2,
                named,
                None if bad else site and site.ratio,
                None if bad else site and site.ratio_max,
                row.share,
                against and against.r_median,
                against and against.w_median,
                escalated.get(row.site) if escalated else None,
                None if escalated else length or 0.0,
                row.free and row.free.rel_l2,
            )
        )
    return Table(
        title=title,
        detail=detail,
        columns=columns,
        rows=values,
        names=True,
        sparse=True,
        below=below or {},
        marks=["onset " * row.onset + "flagged" * row.flagged for row in rows],
    )


def _phase(
    report: Report, phase: str, rows: list[SiteRow], most: int | None
) -> tuple[Table, Sentence]:
    """A table of some ``most`` rows at most, between which it says what is not there, and how many
    of all rows are beyond the limit."""
    shown, below = _elided(rows, most)
    sites = [site for site in report.sites if site.phase == phase]
    steps, prompts = ({getattr(site, name) for site in sites} for name in ("step", "sample"))
    over = [name for name, values in (("steps", steps), ("prompts", prompts)) if len(values) > 1]
    worst = f"; the worst of all {' and '.join(over)}" if over else ""
    estimated = [row.main.estimated for row in rows if row.main is not None and row.main.estimated]
    errors = [item.relative_error for item in estimated if item.relative_error is not None]
    spread = f" ±{100 * statistics.median(errors):.0f}%" if errors else ""
    worst += f"; estimated{spread}" if estimated else ""
    pass_ = main_pass(sites)
    beyond, equal = sum(row.flagged for row in rows), sum(row.worst.identical for row in rows)
    begins = ", > where it begins" if any(row.onset for row in rows) else ""
    deeper = grouped((s for s in sites if s.pass_ == "escalated"), lambda own: own.site)
    text = f"{count(len(rows), 'row')}: {beyond:,} beyond the limit (!){begins}; "
    table = rows_table(
        shown,
        f"decode, {count(len(steps), 'step')}" if phase == "decode" else phase,
        _PASSES.get(pass_, pass_) + worst,
        several=len(prompts) > 1,
        below=below,
        escalated={site: max(s.ratio or 0.0 for s in own) for site, own in deeper.items()},
    )
    return table, Sentence(f"{text}{equal:,} bit-identical", style="dim")


def _legend(blocks: Sequence[Table | Sentence], face: str) -> list[tuple[str, str]]:
    """Lists what the columns hold, by their titles."""
    tables = (block.on(face) for block in blocks if isinstance(block, Table))
    columns = [column for table in tables for _, column in table.shown]
    return list({column.title: column.meaning for column in columns if column.meaning}.items())


def _prompts(report: Report) -> Table | None:
    rows = prompt_usage(report)
    if len(rows) < 2:
        return None
    beyond = sum(usage > 1 for usage, *_ in rows)
    none = f"{count(len(rows), 'prompt')}, none beyond a limit"
    return Table(
        title="prompts, the worst first",
        num_left=3,
        detail=f"{beyond} of {len(rows)} beyond a limit" if beyond else none,
        columns=(
            "prompt",
            "worst at",
            "phase",
            Column("step", absent=""),
            Column("× floor", times),
            Column("share of limit", limit_share),
        ),
        rows=[
            (sample, site.site, site.phase, site.step or None, ratio, usage)
            for usage, sample, site, ratio in rows
        ],
        marks=["flagged" if usage > 1 else "" for usage, *_ in rows],
        sparse=True,
        most=12,
    )


def _nonfinite(report: Report) -> Table | None:
    sites = [site for site in report.sites if site.nonfinite is not None and site.nonfinite.total]
    if not sites:
        return None
    sites.sort(key=lambda site: (site.sample, site.step, site.order, site.pass_))
    counts = {
        "A": attrgetter("nonfinite.reference_nan", "nonfinite.reference_inf"),
        "B": attrgetter("nonfinite.candidate_nan", "nonfinite.candidate_inf"),
    }
    return Table(
        title="non-finite values",
        num_left=2,
        detail=f"at {count(len(sites), 'site')}; in order:",
        **each_in(
            sites,
            ("site", "site"),
            ("pass", "pass_"),
            ("step", "step"),
            *((Column(f"{side} nan/inf", out_of), get) for side, get in counts.items()),
        ),
        most=5,
    )


# The sections.

_PASSES = {
    "anchored": "anchored pass: each block got A's input",
    "free": "free pass: each run on its own values",
}
_MOST_ROWS = 240
_WORST = 5
_MOST_MODULES = 3000
"""Rows of all blocks together: some 250 kB of a page. Where there are more, the worst of each
block."""


def sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> list[Section]:
    """A page has them in one. In a terminal there is no table of equal sites, unless all are asked
    for."""
    page = background is not None
    parts = (report.operators, *report.parts.values())
    if not report.sites:
        lone = not page and report.verdict.kind != "identical" and not any(parts)
        return [Section(title="sites", detail="none were compared")] if lone else []
    lists = [table for table in (_prompts(report), _nonfinite(report)) if table is not None]
    rows_of = {phase: phase_rows(report, phase, all_sites=every) for phase in phases(report)}
    most = _MOST_ROWS if page else None if every else MAX_ROWS
    tables = [part for phase, rows in rows_of.items() for part in _phase(report, phase, rows, most)]
    if background is not None:
        return [_page(report, background, rows_of, tables, lists)]
    if report.verdict.kind == "identical" and not every:
        return [Section(body=lists)]
    legend = _legend(tables, "terminal")
    legend.append(("more", "every word: docs/glossary.md; every number: --csv FILE, --json"))
    facts = [named(*item, indent=2, width=14) for item in legend]
    return [Section(body=[*lists, *tables]), Section(title="columns", body=facts)]


def _page(
    report: Report,
    background: Background,
    rows_of: Mapping[str, list[SiteRow]],
    tables: Sequence[Table | Sentence],
    lists: Sequence[Table],
) -> Section:
    """The largest errors, the error of each block, where and when it is largest, what a block is
    made of."""
    plots = [plot for phase, rows in rows_of.items() for plot in phase_curves(report, phase, rows)]
    pictures, modules = maps(report, background), block_parts(report)
    equal = all(site.identical for site in report.sites)
    onset = report.verdict.onset
    lead = "there is none: all bits are equal"
    if main_pass(report.sites) == "anchored" and not equal:
        lead = "each block of B was given the input that A recorded, so an error at its output was "
        lead += "made in that block and not inherited. The shaded band is what rounding explains"
    elif not equal:
        lead = "each run went its own way, so a block also carries the errors of those before it. "
        lead += "The shaded band is what rounding in one block explains"
    every = worst_rows(report)
    worst = [row for row in every if not row.worst.identical][:_WORST] or every[:_WORST]
    title = f"the {len(worst)} largest" if len(worst) > 1 else "the largest"
    legend = [named(*item) for item in _legend(tables, "page")]
    return Section(
        id="blocks",
        detail=lead,
        heading="The error of each block" if onset is None else "Where the error is made",
        body=[
            None if equal else rows_table(worst, title),
            Figures(plots, choose=True),
            Figures(pictures) if pictures else None,
            *lists,
            Fold(f"All as a table: {count(len(modules), 'row')}", [*tables, *legend]),
        ],
        parts=modules,
        chosen=(onset.block or onset.site) if onset is not None else worst[0].name,
    )


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
    last = {  # a block ends after its parts
        name: max(site.order for group in sites.values() for site in group)
        for name, sites in blocks.items()
    }
    return [
        _part(name, blocks[name], most, onset.site if onset else None)
        for name in sorted(blocks, key=lambda name: (last[name], name))
    ]


def _part(
    block: str, sites: dict[str, list[SiteResult]], most: int | None, onset: str | None
) -> BlockPart:
    worst = {site: max(group, key=_pass_rank) for site, group in sites.items()}
    shown = [site for site, result in worst.items() if not result.identical or site == onset]
    shown = shown or [site for site in worst if not is_input(site)]
    if most is not None and len(shown) > most:
        kept = set(sorted(shown, key=lambda site: _pass_rank(worst[site]), reverse=True)[:most])
        shown = [site for site in shown if site in kept]
    equal = sum(result.identical for site, result in worst.items() if site not in shown)
    left = len(worst) - len(shown) - equal
    notes = [f"{count(equal, 'more site')} with equal bits."] if equal else []
    notes += [f"{count(left, 'more site')} in the JSON."] if left else []
    own = worst.get(f"{block}:out") or max(worst.values(), key=_pass_rank)
    dtypes = (own.reference_dtype, own.candidate_dtype)
    truth = own.truth
    beyond = {site: sum(each.flagged for each in group) for site, group in sites.items()}
    facts = Table(
        num_left=0,
        sparse=True,
        **each_in(
            [own],
            ("class", "kind"),
            (
                Column("dtype", " / ".join),
                lambda _: dict.fromkeys(d.removeprefix("torch.") for d in dtypes),
            ),
            (Column("relative L2", decimal), "rel_l2"),
            ("bits", lambda site: "equal" if site.identical else None),
            (Column("rounding floor", decimal), "floor"),
            (Column("× floor", times), "ratio"),
            (Column("limit", times), "limit"),
            (Column("from the truth, A", decimal), lambda _: truth and truth.reference_error),
            (Column("from the truth, B", decimal), lambda _: truth and truth.candidate_error),
            ("worst token", lambda site: None if site.identical else site.worst_position),
            ("worst feature", lambda site: None if site.identical else site.worst_channel),
            ("results beyond a limit", lambda _: sum(beyond.values()) or None),
        ),
    )
    modules = Table(
        title="modules, the worst forward of each",
        num_left=3,
        names=True,
        note=" ".join(notes),
        sparse=True,
        **each_in(
            map(worst.__getitem__, shown),
            ("module", lambda site: site.site.removeprefix(block).removeprefix(".") or site.site),
            ("class", "kind"),
            (Column("shape", shape_text), "shape"),
            (Column("relative L2", decimal), "rel_l2"),
            (Column("× floor", times), "ratio"),
            (Column("worst token", times), "ratio_max"),
            (Column("1 − cosine", decimal), "one_minus_cosine"),
            (Column("max |a−b|", decimal), "max_abs"),
            (Column("B over A", times), lambda site: site.truth and site.truth.w_median),
        ),
        marks=["onset" if site == onset else "flagged" if beyond[site] else "" for site in shown],
    )
    return BlockPart(block=block, facts=facts, tables=[modules])


def _pass_rank(site: SiteResult) -> tuple[bool, bool, bool, float, float]:
    """The pass that is judged comes before the free one."""
    return (site.pass_ != "free", *badness(site))
