"""A document is what an answer shows, as values: sections of sentences, facts, tables and figures.

An analysis makes its ``Section``s once, in ``sections.py``; report/text.py makes lines of them for
a terminal, and html/ a page. No markup stands in them: a row holds numbers, and its column has the
format in which every face writes them; a figure holds the values that are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from divergence.words import markdown_code


class Column(NamedTuple):
    """One value of each row of a table."""

    title: str
    format: Callable[[Any], str] = str
    absent: str = "-"
    """Stands for None."""
    left: bool = False
    """It begins at the left, although it is not among the first words."""
    width: int = 0
    """At least so many letters in a terminal."""
    own: bool = False
    """The tool's own words: Markdown may obey them."""
    short: str = ""
    """Its title in a terminal, where that is another."""
    face: str = ""
    """``terminal`` or ``page``, where it is shown on one alone."""
    meaning: str = ""
    """What it holds, for who asks: at its title on a page."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """One line of prose, after a label where it has one."""

    text: str
    label: str = ""
    style: str = field(default="", kw_only=True)
    """In a terminal."""
    indent: int = field(default=4, kw_only=True)
    hang: int | None = field(default=None, kw_only=True)
    """Where a terminal goes on with it; None is below where it began."""
    whole: bool = field(default=False, kw_only=True)
    """A command: it stays one line, so that it can be copied."""


def named(name: str, text: str, style: str = "", *, indent: int = 0, width: int = 12) -> Sentence:
    """A name and what it is. ``width``: where a terminal begins with that."""
    return Sentence(text, name, style=style, indent=indent, hang=width)


@dataclass(frozen=True, slots=True)
class Headline:
    """Leads an answer: a word, if there is one, a sentence, and what else is known at once."""

    word: str
    text: str
    style: str = ""
    """In a terminal; its colour says how the answer stands."""
    facts: Sequence[Sentence] = ()
    """Each of ``named``."""

    def __str__(self) -> str:
        return f"{self.word}: {self.text}" if self.word else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values. A column that is a word alone holds texts."""

    title: str = ""
    """Above it; a terminal leaves out that of a section's first table, and of one further in."""
    detail: str = ""
    """Beside the title."""
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Any]]
    marks: Sequence[str] = ()
    """Of each row: nothing, or words of these: ``onset`` (where the error begins), ``odd`` (not as
    most others), ``flagged`` (beyond a limit), ``wrong`` (or beyond what is allowed), ``differs``
    (worth a look), ``below`` (what is usual), ``good``, ``blocks`` (forbids a comparison)."""
    num_left: int = 1
    """The first so many columns are words; the others are figures, and stand to the right."""
    note: str = ""
    names: bool = False
    """The first column holds names of the model's parts."""
    most: int | None = None
    """Rows that a terminal shows; of the others the number is told."""
    more: str = "--all lists them"
    """How a terminal shows the others."""
    below: Mapping[int, Sequence[Sentence]] = field(default_factory=dict)
    """What is said of a row, by its number."""
    folded: str = ""
    """The words behind which a page hides it until it is opened."""
    bare: bool = False
    """A terminal shows no titles."""
    listed: bool = False
    """Rows of (name, state, A, B, detail): in a terminal each is a line of prose, or two."""
    indent: int = 2
    """In a terminal, where no mark stands in front."""
    whole: bool = False
    """A terminal does not fold its rows."""
    sparse: bool = False
    """A column in which no row has a value is left out."""

    @property
    def shown(self) -> list[tuple[int, Column]]:
        """The columns, and where their values stand in a row."""
        columns = [item if isinstance(item, Column) else Column(item) for item in self.columns]
        return [
            (n, column)
            for n, column in enumerate(columns)
            if not self.sparse or n < self.num_left or any(row[n] is not None for row in self.rows)
        ]

    @property
    def is_word(self) -> list[bool]:
        """Do the values of each column that is shown begin at the left?"""
        return [n < self.num_left or column.left for n, (_, column) in enumerate(self.shown)]

    @property
    def caption(self) -> str:
        """Its title and what stands beside it, in one line."""
        return capital(", ".join(filter(None, (self.title, self.detail.rstrip(":")))))

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(column.title for _, column in self.shown)

    def on(self, face: str, *, every: bool = False) -> Table:
        """The table with the columns of this face, ``terminal`` or ``page``, and their titles.
        ``every``: with all rows; else a page has a thousand."""
        columns = [item if isinstance(item, Column) else Column(item) for item in self.columns]
        kept = [n for n, column in enumerate(columns) if column.face in ("", face)]
        shown = [columns[n] for n in kept]
        if face == "terminal":
            shown = [column._replace(title=column.short or column.title) for column in shown]
        rows = [[row[n] for n in kept] for row in self.rows]
        most = None if every else _MOST_ON_PAGE if face == "page" else self.most
        return dataclasses.replace(self, columns=shown, rows=rows, most=most)

    def cells(self) -> list[tuple[str, ...]]:
        """The rows that are shown, as texts."""
        shown = self.shown
        return [
            tuple(column.absent if row[n] is None else column.format(row[n]) for n, column in shown)
            for row in self.rows[: self.most]
        ]

    def markdown(self) -> list[str]:
        """The table for an issue, with nothing of a run in it that Markdown obeys."""
        own = [column.own for _, column in self.shown]
        rows = [
            [
                each if is_own or not each else markdown_code(each)
                for each, is_own in zip(row, own, strict=True)
            ]
            for row in self.cells()
        ]
        lines = [self.titles, ["---"] * len(own), *rows]
        more = [f"| {self.num_more} more {'|' * len(own)}"] * bool(self.num_more)
        return [*(f"| {' | '.join(row)} |" for row in lines), *more]

    @property
    def num_more(self) -> int:
        """Rows that are not shown."""
        return 0 if self.most is None else max(0, len(self.rows) - self.most)

    def mark(self, number: int) -> str:
        """The first of a row's words, by which a page and a browser mark it."""
        return self.marks[number].partition(" ")[0] if number < len(self.marks) else ""


def capital(sentence: str) -> str:
    """A sentence's first word begins with a capital letter, unless it is a name: of a module, a
    task or a file."""
    word = sentence.partition(" ")[0].rstrip(",:;").replace("-", "")
    return sentence[:1].upper() + sentence[1:] if word.isalpha() else sentence


def each_in(
    items: Iterable[Any], *columns: tuple[Column | str, str | Callable[[Any], Any]]
) -> dict[str, Any]:
    """Columns and rows of a table with a row for each of ``items``: beside each column stands the
    attribute whose value it has, or what makes the value of an item."""
    gets = [attrgetter(get) if isinstance(get, str) else get for _, get in columns]
    rows = [tuple(get(item) for get in gets) for item in items]
    return {"columns": [column for column, _ in columns], "rows": rows}


def out_of(numbers: Sequence[int]) -> str:
    """A column's format for several counts: ``3/40``."""
    return "/".join(f"{number:,}" for number in numbers)


_MOST_ON_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """One line of a plot. ``kind``: its colour, and the shape of its points."""

    kind: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over ``names`` on a logarithmic axis, and all that is said of them."""

    id: str
    title: str
    described: str
    """What it shows, in a sentence; for who does not see it too."""
    legend: Sequence[tuple[str, str]]
    """(colour, text) of each."""
    names: Sequence[str]
    lines: Sequence[PlotLine]
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None
    """From the floor to the limit."""
    flagged: Sequence[int] = ()
    """Columns of the first line that are marked."""
    onset: int | None = None
    says: Sequence[str] = ()
    """Each column in a sentence."""
    blocks: Sequence[str] = ()
    """What is shown where a column is chosen."""
    wide: bool = False
    """It takes a line of its own on a page."""

    @property
    def label(self) -> str:
        return f"{self.title}, on a logarithmic axis. {self.described}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatScale:
    """Steps of colour: values below ``bounds[0]`` have the first. ``num_calm``: so many are within
    a limit, the others beyond it, in another hue."""

    bounds: tuple[float, ...]
    names: tuple[str, ...]
    num_calm: int
    unit: str

    def step(self, value: float) -> int:
        """The number of the step; -1 for nan and inf."""
        return bisect_right(self.bounds, value) if math.isfinite(value) else -1


LIMIT_SHARES = HeatScale(
    bounds=(3, 10, 20, 40, 70, 100, 200, 500),
    names=("under 3%", "10%", "20%", "40%", "70%", "100%", "to 200%", "to 500%", "over 500%"),
    num_calm=6,
    unit="% of the limit",
)
"""Shares of a limit, in per cent; beyond 100 the limit is exceeded."""

FLOORS = HeatScale(
    bounds=(0.1, 0.5, 1.0, 3.0, 6.0, 12.0, 25.0, 50.0),
    names=("under 0.1", "0.5", "1", "3", "6", "12", "to 25", "to 50", "over 50"),
    num_calm=6,
    unit="× the rounding floor",
)
"""A single token's error in floors; a threshold of 12 is the default (numerics.floor, token)."""

DECADES = HeatScale(
    bounds=(1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    names=("under 1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "over 1e-2"),
    num_calm=7,
    unit="relative L2",
)
"""Relative differences, where nothing tells what rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Colours of ``values[row][column]``; None is left empty."""

    id: str
    title: str
    described: str
    column: str
    """What a column is: ``step``, ``prompt``, ``token``."""
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    scale: HeatScale


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures side by side, on a page alone. ``choose``: what is chosen in them is shown below."""

    drawings: Sequence[Plot | HeatMap]
    choose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The tokens that both sides chose for one prompt."""

    title: str
    lead: str
    cells: Sequence[tuple[str | None, str | None, float | None]]
    """A's token, B's, and by how many logits A's choice was ahead; None is no token."""
    apart: tuple[str, str] = ("", "")
    """How each side went on by itself."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Strips:
    """Both sides' tokens, one beside the other where they differ; on a page alone."""

    title: str
    strips: Sequence[Strip]


@dataclass(frozen=True, slots=True)
class Fold:
    """Hides a part of a page behind ``summary`` until it is opened."""

    summary: str
    body: Sequence[Block]


Block = Sentence | Table | Figures | Strips | Fold


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """Holds what an analysis knows of one block of the model: shown where the block is chosen."""

    block: str
    facts: Table | None = None
    """What each column holds of it: a table of one row."""
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a document."""

    id: str = ""
    """On a page."""
    title: str = ""
    """Without one a terminal shows the body alone."""
    detail: str = ""
    """Beside the title; on a page below it."""
    heading: str = ""
    """A page's title, where a terminal has none."""
    body: Sequence[Block | None] = ()
    parts: Sequence[BlockPart] = ()
    chosen: str | None = None
    """The block to show first."""
    verbose: bool = False
    """A terminal shows it where more was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs, as a card on a page."""

    letter: str
    name: str
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole answer: what each face shows of it, in the order in which it is read."""

    headline: Headline
    sides: Sequence[Side] = ()
    why: Sequence[str] = ()
    """The facts behind the answer, the strongest first."""
    known: Sequence[Sentence] = ()
    """What was compared with what, where a face shows no sections; each of ``named``."""
    sections: Sequence[Section] = ()
    next: Sequence[str] = ()
    """Commands."""
