"""Figures as SVG: lines, bars and maps on scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from divergence.document import HeatMap, HeatScale, Plot, PlotLine
from divergence.html.parts import Element, Node, el
from divergence.words import shortened

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
        numbers = [value for value in values if value is not None]
        real = [abs(value) for value in numbers if math.isfinite(value) and value != 0]
        low = math.floor(math.log10(min(real))) if real else -1
        high = math.ceil(math.log10(max(real))) if real else 0
        high = max(high, low + 1)
        return cls(
            max(low, high - _MOST_DECADES),
            high,
            height,
            any(value == 0 for value in numbers),
            any(not math.isfinite(value) for value in numbers),
        )

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
_LONGEST_NAME = 12


def figure(item: Plot | HeatMap) -> Element:
    """A figure with its title, what it shows in words, and what its colours mean."""
    if isinstance(item, Plot):
        area = el("svg", *drawn(item), class_="area", height=HEIGHT + 22, aria_hidden="true")
        ticks = el(
            "svg", *axis_ticks(item, "100%"), class_="ticks", height=HEIGHT, aria_hidden="true"
        )
        picture = el("div", ticks, area, class_="plot", role="img", aria_label=item.label)
        legend, wide = item.legend, item.wide
    else:
        picture, wide = _heat_map(item), item.column == "token"
        classes = (f"cell {kind}" for kind in _classes(item.scale))
        legend = list(zip(classes, item.scale.names, strict=True))
        if any(v is not None and not math.isfinite(v) for row in item.values for v in row):
            legend.append(("cell broken", "nan, inf"))
    keys = [el("li", el("i", class_=f"key {kind}"), text) for kind, text in legend]
    return el(
        "figure",
        el("figcaption", el("strong", item.title), el("span", item.described)),
        el("ul", *keys, class_="legend"),
        el("div", picture, class_="stage", data_figure=item.id),
        id=item.id,
        class_="wide" if wide else None,
    )


def script(item: Plot | HeatMap) -> dict[str, object]:
    """Return what the page's script needs of a figure; two digits are what is said of a cell."""
    if isinstance(item, Plot):
        return {"kind": "line", "says": item.says, "blocks": item.blocks}

    def rounded(value: float) -> float | str:
        return float(f"{value:.2g}") if math.isfinite(value) else f"{value:g}"

    return {
        "kind": "heat",
        "rows": item.rows,
        "columns": item.columns,
        "column": item.column,
        "unit": item.scale.unit,
        "blocks": item.rows,
        "values": [[None if v is None else rounded(v) for v in row] for row in item.values],
    }


def _axis(plot: Plot) -> LogAxis:
    edges = [value for edge in plot.band or () for value in edge]
    return LogAxis.over([*edges, *(v for line in plot.lines for v in line.values)], HEIGHT)


def axis_ticks(plot: Plot, right: str) -> list[Node]:
    """The axis' numbers, ending before ``right``."""
    return [
        el("text", text, x=right, dx=-6, y=_px(min(y + 4, HEIGHT)), text_anchor="end")
        for y, text in _axis(plot).ticks()
    ]


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


def drawn(plot: Plot, width: float | None = None) -> list[Node]:
    """Return what stands right of the axis: ``width`` pixels, or as wide as the reader's window."""
    axis, across = _axis(plot), _Across(len(plot.names), width)
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
        curves = [
            el(
                "svg",
                *curves,
                width="100%",
                height=HEIGHT,
                viewBox=f"0 0 {across.count} {HEIGHT:g}",
                preserveAspectRatio="none",
            )
        ]
    grid: list[Node] = [
        el("line", x1=0, x2=across.end, y1=_px(y), y2=_px(y), class_="grid")
        for y, _ in axis.ticks()
    ]
    if plot.onset is not None:
        x = across.at(plot.onset)
        grid.append(el("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="onset"))
    return [*grid, *curves, *dots, *_names_below(plot.names, across)]


def _heat_map(item: HeatMap) -> Element:
    rows = [row.partition(":")[0].rpartition(".")[2] or row for row in item.rows]
    row_height = max(3.0, min(16.0, 300 / len(rows)))
    height = row_height * len(rows)
    cells: dict[str, list[str]] = {}
    for y, row in enumerate(item.values):
        for x, length, kind in _stretches(row, item.scale):
            cells.setdefault(kind, []).append(f"M{x} {y}h{length}v1h-{length}z")
    paths = [el("path", d="".join(parts), class_=kind) for kind, parts in sorted(cells.items())]
    inner = el(
        "svg",
        *paths,
        width="100%",
        height=height,
        viewBox=f"0 0 {len(item.columns)} {len(rows)}",
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
    )
    ticks: list[Node] = []
    for n in _beside(rows, max(2, int(height // 16))):
        middle = (n + 0.5) * row_height
        name = shortened(rows[n], 8)
        ticks.append(el("text", name, x="100%", dx=-6, y=_px(middle + 4), text_anchor="end"))
    left = el("svg", *ticks, class_="ticks", height=height, aria_hidden="true")
    area = el(
        "svg",
        inner,
        *_names_below(item.columns, _Across(len(item.columns)), height),
        class_="area",
        height=height + 22,
        aria_hidden="true",
    )
    label = f"{item.title}. {item.described}"
    return el("div", left, area, class_="plot", role="img", aria_label=label)


def _classes(scale: HeatScale) -> list[str]:
    """The CSS class of each step."""
    calm = [f"calm{number}" for number in range(scale.num_calm)]
    return [*calm, *(f"hot{n}" for n in range(len(scale.names) - scale.num_calm))]


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
        return el(
            "rect",
            x=x,
            y=_px(y - size),
            width=2 * size,
            height=2 * size,
            transform=f"translate({-size:g})",
            class_=style,
        )
    return el("circle", cx=x, cy=_px(y), r=size, class_=style)


def _stretches(row: Sequence[float | None], scale: HeatScale) -> list[tuple[int, int, str]]:
    """(first column, number of columns, class) of equal colours side by side."""
    classes = _classes(scale)
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
        word = len(names[n]) > 3
        anchor = "start" if word and n == 0 else "end" if word and n == last else "middle"
        x = {"start": "0", "end": across.end}.get(anchor, across.at(n))
        name, y = shortened(names[n], _LONGEST_NAME), _px(height + 16)
        labels.append(el("text", name, x=x, y=y, text_anchor=anchor))
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


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
