"""Blocks in a report: the table of each phase, prompts by their worst site, nan and inf; on a page
also the largest errors first, figures, and what each block is made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from divergence.analyses.blocks.figures import maps, phase_curves
from divergence.analyses.blocks.rows import (
    Elision,
    SiteRow,
    badness,
    elide,
    escalated_ratios,
    is_input,
    main_pass,
    phase_rows,
    phases,
    prompt_usage,
    usage,
    worst_places,
    worst_rows,
)
from divergence.comparison.result import Report
from divergence.comparison.results import Background, SiteResult
from divergence.document import BlockPart, Column, Facts, Figures, Section, Sentence, Table
from divergence.html.figures import Plot
from divergence.html.parts import Element, details
from divergence.html.sections import table
from divergence.layout import (
    RATIO_DECADES,
    REL_L2_DECADES,
    bar,
    count,
    decimal,
    limit_share,
    shape_text,
    times,
)

_MAX_PROMPTS = 12
_MAX_NONFINITE = 5


def sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> list[Section]:
    """A page has them in one. In a terminal there is no table of equal sites, unless all are asked
    for."""
    if background is not None:
        return _page(report, background) if report.sites else []
    made = [
        Section(body=[each])
        for each in (_prompts(report, every=every), _nonfinite(report, every=every))
        if each is not None
    ]
    equal = report.verdict.kind == "identical" and not every
    parts = (report.operators, report.collectives, report.suite, report.logprobs)
    if report.sites and not equal:
        made += _tables(report, every=every)
    elif not equal and not any(parts):
        made.append(Section(title="sites", detail="none were compared"))
    return made


def _prompts(report: Report, *, every: bool = False) -> Table | None:
    """One row a prompt, in the order of how much they use of their limits."""
    rows = prompt_usage(report)
    if len(rows) < 2:
        return None
    beyond = sum(usage > 1 for usage, *_ in rows)
    none = f"{count(len(rows), 'prompt')}, none beyond a limit"
    return Table(
        caption="Prompts, the worst first", title="prompts", grid=True, gives=(1,), num_left=3,
        detail=f"{beyond} of {len(rows)} beyond a limit" if beyond else none,
        columns=("prompt", "worst at", "forward", Column("× floor", times),
                 Column("share of limit", limit_share)),
        rows=[
            (sample, site.site, f"step {site.step}" if site.step else site.phase, ratio, usage)
            for usage, sample, site, ratio in rows
        ],
        marks=["flagged" if usage > 1 else "" for usage, *_ in rows],
        most=None if every else _MAX_PROMPTS,
    )  # fmt: skip


def _nonfinite(report: Report, *, every: bool = False) -> Table | None:
    sites = [(site, site.nonfinite) for site in report.sites
             if site.nonfinite is not None and site.nonfinite.total]  # fmt: skip
    if not sites:
        return None
    sites.sort(key=lambda item: (item[0].sample, item[0].step, item[0].order, item[0].pass_))
    return Table(
        caption="Non-finite values, in order", title="non-finite values", num_left=2, widest=42,
        detail=f"at {count(len(sites), 'site')}; in order:",
        columns=("site", "pass", "step", "A nan/inf", "B nan/inf"),
        rows=[
            (site.site, site.pass_, site.step, f"{number.reference_nan:,}/{number.reference_inf:,}",
             f"{number.candidate_nan:,}/{number.candidate_inf:,}")
            for site, number in sites
        ],
        most=None if every else _MAX_NONFINITE,
    )  # fmt: skip


# In a terminal: a table of each phase, and what its columns hold.

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


def _tables(report: Report, *, every: bool) -> list[Section]:
    """Each phase under its heading."""
    made = []
    titles: set[str] = set()
    for phase in phases(report):
        sites = [site for site in report.sites if site.phase == phase]
        rows = phase_rows(report, phase, all_sites=every)
        content = _phase_table(report, phase, sites, rows, every=every)
        titles.update(content.titles)
        steps, prompts = ({getattr(site, name) for site in sites} for name in ("step", "sample"))
        over = [
            name for name, values in (("steps", steps), ("prompts", prompts)) if len(values) > 1
        ]
        worst = f"; the worst of all {' and '.join(over)}" if over else ""
        pass_ = main_pass(sites)
        beyond, equal = sum(row.flagged for row in rows), sum(row.worst.identical for row in rows)
        begins = ", > where it begins" if any(row.onset for row in rows) else ""
        text = f"{count(len(rows), 'row')}: {beyond:,} beyond the limit (!){begins}; "
        made.append(Section(
            title=f"decode, {count(len(steps), 'step')}" if phase == "decode" else phase,
            detail=_PASSES.get(pass_, pass_) + worst + _estimated(rows),
            body=[content, Sentence(f"{text}{equal:,} bit-identical", style="dim")],
        ))  # fmt: skip
    legend = [item for item in _LEGEND.items() if item[0] in titles]
    legend.append(("more", "every word: docs/glossary.md; every number: --csv FILE, --json"))
    return [*made, Section(title="columns", body=[Facts(legend, width=14)])]


def _phase_table(
    report: Report, phase: str, sites: Sequence[SiteResult], rows: list[SiteRow], *, every: bool
) -> Table:
    below: dict[int, list[Sentence]] = {}
    shown: list[SiteRow] = []
    for item in rows if every else elide(rows):
        if isinstance(item, SiteRow):
            shown.append(item)
            continue
        worst = item.worst.worst
        most = times(worst.ratio) if worst.ratio is not None else decimal(worst.rel_l2)
        text = f"… {count(item.num_rows, 'healthy row')}, at most {most}"
        below[len(shown) - 1] = [Sentence(text, indent=2, style="dim")]
    where = "step" if phase == "decode" else "token"
    several = len({site.sample for site in sites}) > 1
    with_floor = any(site.ratio is not None for site in sites)
    with_truth = any(row.main is not None and row.main.truth is not None for row in rows)
    with_free = any(row.free is not None for row in rows)
    escalated = escalated_ratios(report, phase)

    def numbers(row: SiteRow) -> list[object]:
        """A column has a value in each row or in none."""
        site = row.main
        deep = times(escalated.get(row.site)) if escalated else None
        free = decimal(row.free.rel_l2 if row.free else None) if with_free else None
        if site is None:
            return ["-", "-", None, None, deep, None if escalated else 0.0, free]
        place = site.step if phase == "decode" else site.worst_position
        at = "-" if place is None or site.identical else f"{site.sample}:" * several + str(place)
        pair = [site.ratio, site.ratio_max]
        if with_truth:
            pair = [site.truth.r_median, site.truth.w_median] if site.truth else [None, None]
        length = (site.ratio if with_floor else site.rel_l2) or 0.0
        return [decimal(site.rel_l2), at, *pair, deep, None if escalated else length, free]

    decades = RATIO_DECADES if with_floor else REL_L2_DECADES
    return Table(
        grid=True, sparse=True, below=below,
        columns=(
            "site", "rel L2", f"p:{where}" if several else where,
            Column("r" if with_truth else "floors", times),
            Column("W" if with_truth else "worst", times), "float32",
            Column("bar .1-1e3" if with_floor else "bar 1e-8-1",
                   lambda value: bar(value, decades), left=True),
            "free L2",
        ),
        rows=[("  " * row.inner + row.name, *numbers(row)) for row in shown],
        marks=["onset " * row.onset + "flagged" * row.flagged for row in shown],
    )  # fmt: skip


def _estimated(rows: list[SiteRow]) -> str:
    """How well the rows are known that were estimated."""
    known = [row.main.estimated for row in rows if row.main is not None and row.main.estimated]
    errors = [estimate.relative_error for estimate in known if estimate.relative_error is not None]
    if not known:
        return ""
    spread = f" ±{100 * statistics.median(errors):.0f}%" if errors else ""
    return f"; estimated{spread}"


# On a page: the error of each block, where and when it is largest, what a block is made of.

_MOST_ROWS = 240
_WORST = 5
_MOST_MODULES = 3000
"""Rows of all blocks together: some 250 kB of a page. Where there are more, the worst of each
block."""


def _page(report: Report, background: Background) -> list[Section]:
    plots: list[Plot] = []
    tables: list[Element] = []
    rows_of = {phase: phase_rows(report, phase) for phase in phases(report)}
    for phase, every in rows_of.items():
        rows = [row for row in every if not row.inner]
        plots += phase_curves(report, phase, rows)
        shown = elide(rows, max_rows=_MOST_ROWS)
        gone = sum(row.num_rows for row in shown if isinstance(row, Elision))
        note = f"{count(gone, 'healthy row')} left out." if gone else ""
        kept = [row for row in shown if not isinstance(row, Elision)]
        tables.append(table(rows_table(kept, f"All blocks, {phase}", note=note)))
    pictures = maps(report, background)
    parts = block_parts(report)
    equal = all(site.identical for site in report.sites)
    placed = report.verdict.onset is not None
    return [Section(
        id="blocks", lead=_lead(report, equal=equal),
        heading="Where the error is made" if placed else "The error of each block",
        body=[
            None if equal else _worst_table(report),
            Figures(plots, choose=True),
            Figures(pictures) if pictures else None,
            _prompts(report),
            _nonfinite(report),
            details(f"All {count(len(parts), 'row')} as a table", *tables),
        ],
        parts=parts, chosen=_chosen(report, rows_of.values()),
    )]  # fmt: skip


def _lead(report: Report, *, equal: bool) -> str:
    if equal:
        return "There is none: all bits are equal."
    if main_pass(report.sites) == "anchored":
        return (
            "Each block of B was given the input that A recorded, so an error at its output was "
            "made in that block and not inherited. The shaded band is what rounding explains."
        )
    return (
        "Each run went its own way, so a block also carries the errors of those before it. The "
        "shaded band is what rounding in one block explains."
    )


def rows_table(rows: Sequence[SiteRow], caption: str, *, note: str = "") -> Table:
    """Rows of blocks with their figures; columns that none of them has are left out."""
    return Table(
        caption=caption, num_left=2, note=note, names=True, sparse=True,
        columns=("block", "worst at", Column("relative L2", decimal), Column("× floor", times),
                 Column("worst token", times), Column("share of limit", limit_share),
                 Column("B over A", times), Column("own values", decimal)),
        rows=[
            (row.site if row.inner else row.name, "-" if site.identical else place, site.rel_l2,
             site.ratio, site.ratio_max, site.limit_usage, site.truth and site.truth.w_median,
             row.free and row.free.rel_l2)
            for row, place in zip(rows, worst_places(rows, exact=True), strict=True)
            for site in [row.worst]
        ],
        marks=["onset" if row.onset else "flagged" if row.flagged else "" for row in rows],
    )  # fmt: skip


def _worst_table(report: Report) -> Table:
    """The rows that use most of their limits, as the terminal's first screen has them."""
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical] or every
    num = min(_WORST, len(rows))
    return rows_table(rows[:_WORST], f"The {num} largest" if num > 1 else "The largest")


def _chosen(report: Report, rows_of: Iterable[list[SiteRow]]) -> str | None:
    onset = report.verdict.onset
    if onset is not None:
        return onset.block or onset.site
    rows = [row for every in rows_of for row in every if not row.inner]
    worst = max(rows, key=usage, default=None)
    return None if worst is None else worst.name


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
        tables=[
            _modules_table(name, [worst[site] for site in shown], sites, onset, " ".join(notes))
        ],
    )  # fmt: skip


def _modules_table(
    block: str, results: list[SiteResult], sites: dict[str, list[SiteResult]], onset: str | None,
    note: str,
) -> Table:  # fmt: skip
    flagged = {site for site, group in sites.items() if any(forward.flagged for forward in group)}
    return Table(
        caption="Modules, the worst forward of each", num_left=3, names=True, note=note,
        sparse=True,
        columns=("module", "class", Column("shape", shape_text), "relative L2",
                 Column("× floor", times), Column("worst token", times),
                 Column("1 − cosine", decimal), Column("max |a−b|", decimal),
                 Column("B over A", times)),
        rows=[
            (site.site.removeprefix(block).removeprefix(".") or site.site, site.kind, site.shape,
             "equal" if site.identical else decimal(site.rel_l2), site.ratio, site.ratio_max,
             site.one_minus_cosine, site.max_abs, site.truth and site.truth.w_median)
            for site in results
        ],
        marks=["onset" if shown.site == onset else "flagged" if shown.site in flagged else ""
               for shown in results],
    )  # fmt: skip


def _rank(site: SiteResult) -> tuple[bool, bool, bool, float, float]:
    """The pass that is judged comes before the free one."""
    nonfinite, flagged, ratio, rel_l2 = badness(site)
    return site.pass_ != "free", nonfinite, flagged, ratio, rel_l2


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
        truth = site.truth
        facts.append(("from the truth, A", decimal(truth.reference_error)))
        facts.append(("from the truth, B", decimal(truth.candidate_error)))
    if site.worst_position is not None and not site.identical:
        facts.append(("worst token", str(site.worst_position)))
    if site.worst_channel is not None and not site.identical:
        facts.append(("worst feature", str(site.worst_channel)))
    flagged = sum(result.flagged for group in groups for result in group)
    if flagged:
        facts.append(("results beyond a limit", str(flagged)))
    return facts


def _both(reference: str, candidate: str) -> str:
    reference, candidate = reference.removeprefix("torch."), candidate.removeprefix("torch.")
    return reference if reference == candidate else f"{reference} / {candidate}"
