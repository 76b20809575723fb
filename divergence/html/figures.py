"""Figures as SVG: lines, bars and maps on scales."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from divergence.html.parts import Element, Node, el

# Scales of figures: where a value stands on a logarithmic axis, which step of colour it has.

_MOST_DECADES = 12


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis of whole decades, ``low`` below and ``high`` above, ``height`` pixels.
    What is zero stands in a lane of its own below, nan and inf in one above."""

    low: int
    high: int
    height: float
    has_zero: bool = False
    has_nonfinite: bool = False

    @classmethod
    def over(cls, values: Iterable[float | None], height: float) -> LogAxis:
        known = [value for value in values if value is not None]
        real = [abs(value) for value in known if math.isfinite(value) and value != 0]
        low = math.floor(math.log10(min(real))) if real else -1
        high = math.ceil(math.log10(max(real))) if real else 0
        high = max(high, low + 1)
        return cls(
            max(low, high - _MOST_DECADES), high, height,
            any(value == 0 for value in known), any(not math.isfinite(value) for value in known),
        )  # fmt: skip

    @property
    def top(self) -> float:
        return _LANE if self.has_nonfinite else 0.0

    @property
    def bottom(self) -> float:
        return self.height - (_LANE if self.has_zero else 0.0)

    def at(self, value: float) -> float:
        """Distance from the upper edge."""
        if not math.isfinite(value):
            return _LANE / 2
        if value == 0:
            return self.height - _LANE / 2
        part = (math.log10(abs(value)) - self.low) / (self.high - self.low)
        return self.bottom - min(max(part, 0.0), 1.0) * (self.bottom - self.top)

    def ticks(self) -> list[tuple[float, str]]:
        """(distance from the upper edge, what stands there), eight decades at most named."""
        step = 1 + (self.high - self.low - 1) // 7
        marks = [
            (self.at(10.0**power), _power(power)) for power in range(self.low, self.high + 1, step)
        ]
        marks += [(self.at(0.0), "equal")] if self.has_zero else []
        return marks + ([(self.at(math.inf), "nan, inf")] if self.has_nonfinite else [])


_LANE = 28.0


def _power(power: int) -> str:
    if -2 <= power <= 3:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


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

    def classes(self) -> Sequence[str]:
        """The CSS class of each step."""
        calm = [f"calm{number}" for number in range(self.num_calm)]
        return [*calm, *(f"hot{n}" for n in range(len(self.names) - self.num_calm))]


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


# Figures as SVG: a line over blocks on a logarithmic axis, and a map of colours.
#
# Own SVG and no library: two kinds of figure are needed. A library that is put into a page is
# larger than all of this, and draws nothing where scripts do not run: in print, in a mail's
# preview. These are drawn without a script, follow the page's colours and width, and have a text
# beside them; the script only adds a cursor.
#
# The width is the reader's: along x all is in percent, or in a nested picture that is stretched and
# whose strokes are not. Along y all is in pixels. So letters keep their size on a phone.

HEIGHT = 232.0
_MOST_DOTS = 130
"""Of one line; more of them are a line."""
_NAMED = 7
"""Names below an axis, at most, for a phone's width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """One line of a plot. ``kind``: its CSS class, and the shape of its points."""

    kind: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over ``names``, and all that is said of them."""

    id: str
    title: str
    described: str
    """What it shows, in a sentence; for who does not see it too."""
    legend: Sequence[tuple[str, str]]
    """(class, text) of each colour."""
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

    @property
    def axis(self) -> LogAxis:
        edges = [value for edge in self.band or () for value in edge]
        return LogAxis.over([*edges, *(v for line in self.lines for v in line.values)], HEIGHT)

    def ticks(self, right: str) -> list[Node]:
        """The axis' numbers, ending before ``right``."""
        return [
            el("text", text, x=right, dx=-6, y=_px(min(y + 4, HEIGHT)), text_anchor="end")
            for y, text in self.axis.ticks()
        ]

    def figure(self) -> Element:
        """On a page, as wide as the reader's window; ``data`` is what its script needs."""
        area = el("svg", *drawn(self), class_="area", height=HEIGHT + 22, aria_hidden="true")
        ticks = el("svg", *self.ticks("100%"), class_="ticks", height=HEIGHT, aria_hidden="true")
        picture = el("div", ticks, area, class_="plot", role="img", aria_label=self.label)
        return figure(self.id, self.title, picture, described=self.described, legend=self.legend,
                      wide=self.wide)  # fmt: skip

    def data(self) -> dict[str, object]:
        return {"kind": "line", "says": self.says, "blocks": self.blocks}


@dataclass(frozen=True, slots=True)
class _Across:
    """Places along x: in pixels of ``width``, or where there is none in shares of the reader's
    width, in which a path's unit is a column."""

    count: int
    width: float | None = None

    @property
    def unit(self) -> float:
        return 1.0 if self.width is None else self.width / self.count

    @property
    def end(self) -> str:
        return "100%" if self.width is None else _px(self.width)

    def at(self, n: int) -> str:
        """The middle of a column."""
        if self.width is None:
            return f"{100 * (n + 0.5) / self.count:.4g}%"
        return _px((n + 0.5) * self.unit)


def figure(
    id: str, title: str, picture: Element, *, described: str,
    legend: Sequence[tuple[str, str]], wide: bool = False,
) -> Element:  # fmt: skip
    """A picture with its title, what it shows in words, and what its colours mean: (class, text).
    ``wide``: it takes a line of its own."""
    keys = [el("li", el("i", class_=f"key {kind}"), text) for kind, text in legend]
    return el(
        "figure",
        el("figcaption", el("strong", title), el("span", described)),
        el("ul", *keys, class_="legend"),
        el("div", picture, class_="stage", data_figure=id),
        id=id, class_="wide" if wide else None,
    )  # fmt: skip


def drawn(plot: Plot, width: float | None = None) -> list[Node]:
    """What stands right of the axis: ``width`` pixels, or as wide as the reader's window."""
    axis, across = plot.axis, _Across(len(plot.names), width)
    curves: list[Node] = []
    if plot.band is not None:
        curves += _band(plot.band, axis, across)
    dots: list[Node] = []
    for line in plot.lines:
        curves += _strokes(line, axis, across)
        marked = set(plot.flagged) if line is plot.lines[0] else set()
        dots += [
            _dot(line.kind, across.at(n), axis.at(v), n in marked)
            for n, v in enumerate(line.values)
            if v is not None and (across.count <= _MOST_DOTS or n in marked)
        ]
    if width is None:
        curves = [el(
            "svg", *curves, width="100%", height=HEIGHT, viewBox=f"0 0 {across.count} {HEIGHT:g}",
            preserveAspectRatio="none",
        )]  # fmt: skip
    grid: list[Node] = [el("line", x1=0, x2=across.end, y1=_px(y), y2=_px(y), class_="grid")
                        for y, _ in axis.ticks()]  # fmt: skip
    if plot.onset is not None:
        x = across.at(plot.onset)
        grid.append(el("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="onset"))
    return [*grid, *curves, *dots, *_names_below(plot.names, across)]


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], *,
    scale: HeatScale, label: str, row_height: float,
) -> Element:  # fmt: skip
    """A map of ``values[row][column]``; None is left empty."""
    height = row_height * len(rows)
    cells: dict[str, list[str]] = {}
    for y, row in enumerate(values):
        for x, length, kind in _stretches(row, scale):
            cells.setdefault(kind, []).append(f"M{x} {y}h{length}v1h-{length}z")
    paths = [el("path", d="".join(parts), class_=kind) for kind, parts in sorted(cells.items())]
    inner = el(
        "svg", *paths, width="100%", height=height, viewBox=f"0 0 {len(columns)} {len(rows)}",
        preserveAspectRatio="none", shape_rendering="crispEdges",
    )  # fmt: skip
    ticks: list[Node] = []
    for n in _beside(rows, max(2, int(height // 16))):
        middle = (n + 0.5) * row_height
        name = _cut(rows[n], 8)
        ticks.append(el("text", name, x="100%", dx=-6, y=_px(middle + 4), text_anchor="end"))
    left = el("svg", *ticks, class_="ticks", height=height, aria_hidden="true")
    area = el(
        "svg", inner, *_names_below(columns, _Across(len(columns)), height), class_="area",
        height=height + 22, aria_hidden="true",
    )  # fmt: skip
    return el("div", left, area, class_="plot", role="img", aria_label=label)


def _band(
    band: tuple[Sequence[float | None], Sequence[float | None]], axis: LogAxis, across: _Across
) -> list[Element]:
    """Steps, since each block has limits of its own: to the floor, and on to the limit."""
    floors, limits = band
    parts: dict[str, list[str]] = {"band floor": [], "band limit": []}
    for n, (low, high) in enumerate(zip(floors, limits, strict=True)):
        if low is None or low <= 0:
            continue
        x, step, y = f"{n * across.unit:g}", f"{across.unit:g}", axis.at(low)
        parts["band floor"].append(f"M{x} {_px(y)}h{step}V{_px(axis.height)}h-{step}z")
        if high is not None and math.isfinite(high) and high > low:
            parts["band limit"].append(f"M{x} {_px(axis.at(high))}h{step}V{_px(y)}h-{step}z")
    return [el("path", d="".join(d), class_=kind) for kind, d in parts.items() if d]


def _strokes(line: PlotLine, axis: LogAxis, across: _Across) -> list[Element]:
    d, pen_up = [], True
    for n, value in enumerate(line.values):
        if value is None or not math.isfinite(value):
            pen_up = True
            continue
        d.append(f"{'M' if pen_up else 'L'}{(n + 0.5) * across.unit:g} {_px(axis.at(value))}")
        pen_up = False
    return [el("path", d="".join(d), class_=f"line {line.kind}")] if d else []


def _dot(kind: str, x: str, y: float, flagged: bool) -> Element:
    style = f"dot {kind}{' flagged' if flagged else ''}"
    size = 5.0 if flagged else 2.6
    if kind == "candidate":  # another shape, for who does not tell the colours apart
        return el("rect", x=x, y=_px(y - size), width=2 * size, height=2 * size,
                  transform=f"translate({-size:g})", class_=style)  # fmt: skip
    return el("circle", cx=x, cy=_px(y), r=size, class_=style)


def _stretches(row: Sequence[float | None], scale: HeatScale) -> list[tuple[int, int, str]]:
    """(first column, number of columns, class) of equal colours side by side."""
    classes = scale.classes()
    stretches: list[tuple[int, int, str]] = []
    for x, value in enumerate(row):
        if value is None:
            continue
        step = scale.step(value)
        kind = "cell " + ("broken" if step < 0 else classes[step])
        if stretches and stretches[-1][2] == kind and stretches[-1][0] + stretches[-1][1] == x:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1, kind)
        else:
            stretches.append((x, 1, kind))
    return stretches


def _names_below(names: Sequence[str], across: _Across, height: float = HEIGHT) -> list[Node]:
    """Numbers at even steps. Words are longer: only the last is named, where there is room."""
    numbers = [n for n, name in enumerate(names) if name.isdigit()]
    step = _even(len(numbers), _NAMED)
    shown = [n for n in numbers if not numbers or int(names[n]) % step == 0]
    if not numbers:
        shown = list(range(0, len(names), 1 + (len(names) - 1) // 4))
    last = len(names) - 1
    if last not in shown and (last - shown[-1]) * 6 > len(names):
        shown.append(last)
    labels: list[Node] = []
    for n in shown:
        word = len(_cut(names[n])) > 3
        anchor = "start" if word and n == 0 else "end" if word and n == last else "middle"
        x = {"start": "0", "end": across.end}.get(anchor, across.at(n))
        labels.append(el("text", _cut(names[n]), x=x, y=_px(height + 16), text_anchor=anchor))
    return labels


def _even(count: int, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, ... that makes at most ``most`` steps of ``count``."""
    step = 1
    while count / step > most:
        step = step * 2 if str(step)[0] != "2" else step * 5 // 2
    return step


def _beside(names: Sequence[str], most: int) -> list[int]:
    """Rows that are named: numbers at even steps, words where no number is near."""
    step = _even(len(names), most)
    numbers = [n for n, name in enumerate(names) if name.isdigit() and int(name) % step == 0]
    words = [n for n, name in enumerate(names) if not name.isdigit()]
    for n in reversed(words):
        if all(abs(n - other) >= step for other in numbers):
            numbers.append(n)
    return sorted(numbers)


def _cut(text: str, most: int = 12) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
