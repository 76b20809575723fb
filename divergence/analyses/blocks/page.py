"""Blocks on a page: the error of each, where and when it is largest, what a block is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from divergence.analyses.blocks.curves import phase_curves, usage
from divergence.analyses.blocks.maps import maps
from divergence.analyses.blocks.rows import (
    Elision,
    SiteRow,
    badness,
    elide,
    is_input,
    main_pass,
    phase_rows,
    phases,
    worst_rows,
)
from divergence.analyses.blocks.show import prompt_usage
from divergence.comparison.result import Report
from divergence.comparison.results import Background, SiteResult
from divergence.html.parts import BlockPart, Element, Section, Table, details, el, table
from divergence.layout import count, decimal, shape_text, times
from divergence.run.site import of_parameter

__all__ = ["block_parts", "page", "rows_table"]

_MOST_ROWS = 240
_WORST = 5
_MOST_MODULES = 3000
"""Rows of all blocks together: some 250 kB of a page. Where there are more, the worst of each
block."""


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no site was compared."""
    if not report.sites:
        return []
    figures: dict[str, dict[str, object]] = {}
    plots: list[Element] = []
    tables: list[Element] = []
    rows_of = {phase: phase_rows(report, phase) for phase in phases(report)}
    for phase, every in rows_of.items():
        rows = [row for row in every if not row.inner]
        curves = phase_curves(report, phase, rows)
        plots += [curve.figure() for curve in curves]
        figures |= {curve.id: curve.data() for curve in curves}
        tables.append(table(_table(rows, f"All blocks, {phase}")))
    pictures, more = maps(report, background)
    figures |= more
    parts = block_parts(report)
    equal = all(site.identical for site in report.sites)
    placed = report.verdict.onset is not None
    return [
        Section(
            id="blocks", lead=_lead(report, equal=equal),
            title="Where the error is made" if placed else "The error of each block",
            body=(
                None if equal else table(_worst(report)),
                el("div", *plots, class_="figures"),
                el("div", class_="chosen", id="chosen", hidden=True),
                el("div", *pictures, class_="figures") if pictures else None,
                *_prompts(report),
                details(f"All {count(len(parts), 'row')} as a table", *tables),
            ),
            figures=figures, blocks=parts, chosen=_chosen(report, rows_of.values()),
        )
    ]  # fmt: skip


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


def _table(rows: Sequence[SiteRow], caption: str) -> Table:
    shown = elide(list(rows), max_rows=_MOST_ROWS)
    kept = [row for row in shown if not isinstance(row, Elision)]
    gone = sum(row.num_rows for row in shown if isinstance(row, Elision))
    note = f"{count(gone, 'healthy row')} left out." if gone else ""
    return rows_table(kept, caption, note=note)


def rows_table(rows: Sequence[SiteRow], caption: str, *, note: str = "") -> Table:
    """Rows of blocks with their figures; columns that none of them has are left out."""
    columns: tuple[tuple[str, Callable[[SiteRow], str]], ...] = (
        ("relative L2", lambda row: decimal(row.worst.rel_l2)),
        ("× floor", lambda row: times(row.worst.ratio)),
        ("worst token", lambda row: times(row.worst.ratio_max)),
        ("share of limit", lambda row: _share(row.worst.limit_usage)),
        ("B over A", lambda row: times(row.worst.truth.w_median) if row.worst.truth else "-"),
        ("own values", lambda row: decimal(row.free.rel_l2 if row.free else None)),
    )
    kept = [(title, cell) for title, cell in columns if any(cell(row) != "-" for row in rows)]
    return Table(
        caption=caption, titles=("block", "worst at", *(title for title, _ in kept)), num_left=2,
        rows=[
            (row.site if row.inner else row.name, _where(row), *(cell(row) for _, cell in kept))
            for row in rows
        ],
        marks=["onset" if row.onset else "flagged" if row.flagged else "" for row in rows],
        note=note, names=True,
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%" if value < 2 else times(value)


def _where(row: SiteRow) -> str:
    site = row.worst
    if site.identical:
        return "-"
    if of_parameter(site.site):
        return f"{site.phase}, all prompts"
    sample = site.sample if site.worst_sample is None else site.worst_sample
    forward = f"step {site.step}" if site.step else site.phase
    token = "" if site.worst_position is None or site.step else f", token {site.worst_position}"
    return f"prompt {sample}, {forward}{token}"


def _worst(report: Report) -> Table:
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


def _prompts(report: Report) -> list[Element]:
    rows = prompt_usage(report)
    if len(rows) < 2:
        return []
    shown = rows[:12]
    content = Table(
        caption="Prompts, the worst first", titles=("prompt", "worst at", "forward", "× floor",
                                                    "share of limit"),
        rows=[
            (str(sample), site.site, f"step {site.step}" if site.step else site.phase, times(ratio),
             _share(usage))
            for usage, sample, site, ratio in shown
        ],
        marks=["flagged" if usage > 1 else "" for usage, *_ in shown], num_left=3,
        note=f"{len(rows) - len(shown)} more prompts." if len(rows) > len(shown) else "",
    )  # fmt: skip
    return [table(content)]


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
    titles = ("module", "class", "shape", "relative L2", "× floor", "worst token", "1 − cosine",
              "max |a−b|", "B over A")  # fmt: skip
    rows = [_module_row(block, result) for result in results]
    kept = [n for n in range(len(titles)) if n < 4 or any(row[n] != "-" for row in rows)]
    flagged = {site for site, group in sites.items() if any(forward.flagged for forward in group)}
    return Table(
        caption="Modules, the worst forward of each", titles=tuple(titles[n] for n in kept),
        rows=[tuple(row[n] for n in kept) for row in rows], num_left=3, names=True, note=note,
        marks=["onset" if shown.site == onset else "flagged" if shown.site in flagged else ""
               for shown in results],
    )  # fmt: skip


def _rank(site: SiteResult) -> tuple[bool, bool, bool, float, float]:
    """The pass that is judged comes before the free one."""
    nonfinite, flagged, ratio, rel_l2 = badness(site)
    return site.pass_ != "free", nonfinite, flagged, ratio, rel_l2


def _module_row(block: str, site: SiteResult) -> tuple[str, ...]:
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
