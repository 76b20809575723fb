"""The terminal browser: the verdict above, one page of rows below it, keys to go deeper and back.

Names of a run are data: no cell is read as markup, and what does not print is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from divergence.analyses.blocks.sections import (
    badness,
    block_parts,
    main_pass,
    phase_rows,
    phases,
    rows_table,
)
from divergence.comparison.result import Background, Report, SiteResult
from divergence.document import Column, Table, each_in
from divergence.report.summary import analysis_sections, report_lines, verdict_lines
from divergence.words import both_ends, count, decimal, limit_share, printable, times

# What the browser shows: pages of rows, each of which may open another page. No terminal here.
#
# A page is made of a report or of a part of it: of one prompt or of one step the same pages are
# made as of the whole, from those results alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Rows below a title. ``open``: the page behind a row, or None."""

    title: str
    table: Table
    open: Callable[[int], Page | None] = lambda number: None


def blocks(report: Report, title: str = "blocks") -> Page:
    """Each block, prefill and then decode; behind one its modules."""
    rows = [row for phase in phases(report) for row in phase_rows(report, phase)]
    table = rows_table(rows, title).on("page", every=True)

    def behind(number: int) -> Page:
        row = rows[number]
        block = row.worst.block
        alone = row.inner or block is None
        return _forwards(report, row.site) if alone else _modules(report, str(block))

    return Page(title=title, table=table, open=behind)


def prompts(report: Report) -> Page:
    """Each prompt with its worst result; behind one the blocks of its forwards."""
    return _groups(report, "prompt", lambda site: [p.sample for p in site.prompts] or [site.sample])


def steps(report: Report) -> Page:
    """The prefill and each decode step; behind one its blocks."""
    return _groups(report, "step", lambda site: [site.step])


def whole(report: Report) -> Page:
    """Return what `compare -v` prints."""
    rows = [(line.text,) for line in report_lines(report, verbose=True)]
    return Page(title="report", table=Table(columns=("",), rows=rows))


HOMES: dict[str, tuple[str, Callable[[Report], Page]]] = {
    "b": ("Blocks", blocks),
    "p": ("Prompts", prompts),
    "s": ("Steps", steps),
    "r": ("Report", whole),
}
"""By key: the pages that are reached from anywhere."""


def _modules(report: Report, block: str) -> Page:
    """A block's modules, the worst forward of each, and what other analyses know of the block."""
    sites = [site for site in report.sites if site.block == block]
    (part,) = block_parts(_only(report, sites))
    (table,) = part.tables
    own = {site.site.removeprefix(block).removeprefix(".") or site.site: site for site in sites}
    more = [
        table
        for made in analysis_sections(report, background=Background()).values()
        for section in made
        for other in section.parts
        if other.block == block
        for table in other.tables
        if table.title != part.tables[0].title
    ]
    width = len(table.titles) - 1
    rows = [*table.cells(), *((f"{extra.caption} ›", *[""] * width) for extra in more)]

    def opened(number: int) -> Page:
        if number >= len(table.rows):
            extra = more[number - len(table.rows)]
            return Page(title=extra.caption, table=extra)
        return _forwards(report, own[table.rows[number][0]].site)

    shown = Table(
        columns=table.titles,
        rows=rows,
        marks=table.marks,
        num_left=table.num_left,
        note=table.note,
    )
    return Page(title=block, table=shown, open=opened)


def _forwards(report: Report, name: str) -> Page:
    sites = [site for site in report.sites if site.site == name]
    sites.sort(key=lambda site: (site.pass_, site.sample, site.step))
    table = Table(
        **each_in(
            sites,
            ("pass", "pass_"),
            ("prompt", "sample"),
            (Column("step", absent="prefill"), lambda site: site.step or None),
            (
                Column("relative L2", decimal, "equal"),
                lambda site: None if site.identical else site.rel_l2,
            ),
            (Column("× floor", times), "ratio"),
            (Column("limit", times), "limit"),
            (Column("worst token", times), "ratio_max"),
            ("at", "worst_position"),
        ),
        num_left=3,
        marks=["flagged" if site.flagged else "" for site in sites],
    )
    return Page(title=name, table=table, open=lambda number: _result(sites[number]))


def _result(site: SiteResult) -> Page:
    rows = [(name, value) for name, value in _flat(msgspec.to_builtins(site)) if value]
    title = f"{site.pass_}, prompt {site.sample}, step {site.step}"
    return Page(title=title, table=Table(columns=("field", "value"), rows=rows, num_left=2))


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and name != "prompts":
            listed = isinstance(value, list | tuple)
            text = " ".join(map(str, value)) if listed else str(value)
            yield prefix + name, text


def _groups(report: Report, what: str, numbers_of: Callable[[SiteResult], list[int]]) -> Page:
    """The results of each prompt or step, the worst of each; behind one its blocks."""
    wanted = main_pass(report.sites)
    groups: dict[int, list[SiteResult]] = {}
    for site in report.sites:
        for number in numbers_of(site):
            groups.setdefault(number, []).append(site)
    numbers = sorted(groups)
    worst = [max(groups[n], key=lambda s: (s.pass_ == wanted, *badness(s))) for n in numbers]
    rows = [
        (
            None if what == "step" and not number else number,
            None if site.identical else site.site,
            site.rel_l2,
            site.ratio,
            site.usage,
            sum(result.flagged for result in groups[number]),
        )
        for number, site in zip(numbers, worst, strict=True)
    ]
    columns = (
        Column(what, absent="prefill"),
        "worst at",
        Column("relative L2", decimal),
        Column("× floor", times),
        Column("share of limit", limit_share),
        Column("beyond limits", "{:,}".format),
    )
    marks = ["flagged" if any(s.flagged for s in groups[n]) else "" for n in numbers]

    def opened(number: int) -> Page:
        chosen = numbers[number]
        named = "prefill" if what == "step" and not chosen else f"{what} {chosen}"
        return blocks(_only(report, groups[chosen]), named)

    title = f"{what}s"
    note = count(len(rows), what)
    table = Table(columns=columns, rows=rows, num_left=2, marks=marks, note=note)
    return Page(title=title, table=table, open=opened)


def _only(report: Report, sites: list[SiteResult]) -> Report:
    return msgspec.structs.replace(report, sites=sites)


_WIDEST = 200
_MARKS = {"onset": ">", "flagged": "!"}
HELP = """\
Enter       go deeper: a block, a module, one forward
Escape      go back
b p s r     blocks, prompts, steps, the whole report
arrows      choose a row, look to the right
?           this help
q           quit

>  the error begins here       !  beyond its limit

relative L2      |a - b| / |a|
x floor          the same in units of what rounding explains
share of limit   over 100% is beyond the limit
own values       the free pass: each run on its own values
B over A         how much farther B is from the truth
"""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A text; a string alone would be read as markup."""

    text: str

    def __str__(self) -> str:
        return self.text


class Help(ModalScreen[None]):
    """The keys, and what the columns are."""

    CSS = "Help { align: center middle } Help Static { width: auto; border: round; padding: 1 2 }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, "dismiss", "Close") for key in ("escape", "question_mark", "q", "enter")
    ]

    def compose(self) -> ComposeResult:
        yield Static(HELP, markup=False)


class Browser(App[None]):
    """The pages of one report."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #verdict { padding: 0 1; max-height: 6; text-style: bold; }
    #where { padding: 0 1; color: $text-muted; height: 1; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "deeper", "Deeper"),
        Binding("escape", "leave", "Back"),
        *(Binding(key, f"home('{key}')", name) for key, (name, _) in HOMES.items()),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report
        self.stack: list[tuple[Page, int]] = []
        """The pages that led here, each with its row; the last is shown."""

    def compose(self) -> ComposeResult:
        lines = [printable(line.text) for line in verdict_lines(self.report)]
        yield Static("\n".join(lines), markup=False, id="verdict")
        yield Static("", markup=False, id="where")
        yield DataTable[_Cell](cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self.action_home("b" if self.report.sites else "r")

    @property
    def page(self) -> Page:
        return self.stack[-1][0]

    def action_home(self, key: str) -> None:
        """A page that is reached from anywhere."""
        self.stack = []
        self._go(HOMES[key][1](self.report))

    def action_leave(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
            self._show()

    def action_help(self) -> None:
        self.push_screen(Help())

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        page = self.page.open(event.cursor_row)
        if page is not None:
            self.stack[-1] = (self.page, event.cursor_row)
            self._go(page)

    def _go(self, page: Page) -> None:
        """The first row that is marked is chosen: where the error begins, else beyond a limit."""
        marks = [page.table.mark(n) for n in range(len(page.table.marks))]
        wanted = next((mark for mark in _MARKS if mark in marks), None)
        self.stack.append((page, 0 if wanted is None else marks.index(wanted)))
        self._show()

    def _show(self) -> None:
        page, row = self.stack[-1]
        where = " › ".join(printable(both_ends(level.title, 60)) for level, _ in self.stack)
        note = f"   {page.table.note}" if page.table.note else ""
        self.query_one("#where", Static).update(where + note)
        table: DataTable[_Cell] = self.query_one(DataTable)
        table.clear(columns=True)
        table.show_header = any(page.table.titles)
        rows, titles = _rows(page.table), ("", *page.table.titles)
        for n, title in enumerate(titles):  # widths of its own making come a key too late
            table.add_column(title, width=max(map(len, (title, *(row[n].text for row in rows)))))
        for cells in rows:
            table.add_row(*cells)
        table.move_cursor(row=row)
        table.focus()


def _rows(table: Table) -> list[list[_Cell]]:
    """Marks first; figures end where their column ends."""
    cells = [[both_ends(printable(cell), _WIDEST) for cell in row] for row in table.cells()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_word = table.is_word
    return [
        [
            _Cell(_MARKS.get(table.mark(number), "")),
            *(_Cell(cell if is_word[n] else cell.rjust(widths[n])) for n, cell in enumerate(row)),
        ]
        for number, row in enumerate(cells)
    ]
