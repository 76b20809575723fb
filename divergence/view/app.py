"""The terminal browser: the verdict above, one page of rows below it, keys to go deeper and back.

Names of a run are data: no cell is read as markup, and what does not print is written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from divergence.comparison.result import Report
from divergence.html.parts import Table, shortened
from divergence.report.summary import verdict_lines
from divergence.view.pages import HOMES, Page
from divergence.words import printable

__all__ = ["Browser"]

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
        marks = page.table.marks
        wanted = next((mark for mark in _MARKS if mark in marks), None)
        self.stack.append((page, 0 if wanted is None else marks.index(wanted)))
        self._show()

    def _show(self) -> None:
        page, row = self.stack[-1]
        where = " › ".join(printable(shortened(level.title, 60)) for level, _ in self.stack)
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
    cells = [[shortened(printable(cell), _WIDEST) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        [
            _Cell(_MARKS.get(table.mark(number), "")),
            *(
                _Cell(cell if n < table.num_left else cell.rjust(widths[n]))
                for n, cell in enumerate(row)
            ),
        ]
        for number, row in enumerate(cells)
    ]
