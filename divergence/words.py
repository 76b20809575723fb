"""Words that mean one thing in every room: which side of a comparison, how progress is told, how
text from a run is written where a terminal or Markdown would obey it, and numbers as people read
them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

Progress = Callable[[str, int, int | None, str], None]
"""Called as work goes on, with (event, how much is done, of how much, detail); the total is None
where nobody knows it. ``event``: ``load``, ``digest``, ``probe``, ``free``, ``repeat``,
``anchored``, ``escalated``, ``whole``, ... or ``note`` for a warning in the detail."""


def silent(event: str, done: int, total: int | None, detail: str) -> None:
    """The Progress of work that nobody watches."""


Side = Literal["reference", "candidate"]
"""One of the two runs that are compared."""

SIDES: tuple[Side, Side] = ("reference", "candidate")

SideOrBoth = Literal["reference", "candidate", "both"]
"""Where something was found: in one of them, or in each."""


def other_side(side: str | None) -> Side:
    """The candidate beside the reference, and the reference beside the candidate."""
    return "reference" if side == "candidate" else "candidate"


def side_of(flags: Sequence[bool]) -> SideOrBoth | None:
    """The side whose flag is set, of (reference, candidate); None where neither is."""
    return None if not any(flags) else "both" if all(flags) else SIDES[flags.index(True)]


def common_side(sides: Iterable[SideOrBoth | None]) -> SideOrBoth | None:
    """The side that all name which name one; both where they name two, None where none does."""
    named = set(sides) - {None}
    return None if not named else named.pop() if len(named) == 1 else "both"


SideBothOrNeither = Literal["reference", "candidate", "both", "neither"]
"""The same where it is an answer too that there is nothing in either."""

HEADLINES = {
    "identical": "IDENTICAL",
    "within_floor": "OK",
    "systematic": "DIVERGED",
    "localized": "DIVERGED",
    "nonfinite": "NAN OR INF",
    "drift": "DRIFTED",
    "undetermined": "NO ANSWER",
    "incomparable": "STOPPED",
}
"""The first word of an answer, by the verdict's kind."""


_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """The items of each key, in order."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def letter(side: str | None) -> str:
    """Return the letter that people read for a side: the reference is A, the candidate B."""
    return {"reference": "A", "candidate": "B"}.get(str(side), str(side))


def first_apart(a: Sequence[object], b: Sequence[object]) -> int:
    """Find where two texts, or lists of tokens, begin to differ: at most the shorter's end."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((number for number, (x, y) in pairs if x != y), min(len(a), len(b)))


def shortened(text: str, most: int) -> str:
    """The first of at most ``most`` characters, where the beginning says more."""
    return text if len(text) <= most else text[: most - 1] + "…"


def both_ends(text: str, most: int) -> str:
    """Shorten a name to ``most`` characters at most: both ends tell more than its middle."""
    text = printable_lines(text)
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


_NOT_PLAIN = re.compile(r"[^ -~]")
"""Looked at one by one; of the rest there may be megabytes."""


def printable(text: str) -> str:
    """``text`` on one line, each character that does not print written out; words are untouched."""
    if text.isprintable():
        return text
    return _NOT_PLAIN.sub(lambda at: at[0] if _prints(at[0]) else _written(at[0]), text)


def printable_lines(text: str) -> str:
    """Lines that this tool has put together (``\\n`` between them), each ``printable``."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """JSON with the same meaning that prints: what does not stands as ``\\uXXXX`` (in JSON such
    characters stand in strings alone; line breaks between values stay)."""
    if text.isascii() and "\x7f" not in text:  # JSON itself escapes what is below a space
        return text

    def written(match: re.Match[str]) -> str:
        char = match[0]
        if _prints(char) or char == "\n":
            return char
        units = char.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))

    return _NOT_PLAIN.sub(written, text)


def _prints(char: str) -> bool:
    # spaces of other widths (no-break, ideographic) are text, whatever isprintable says
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _written(char: str) -> str:
    number = ord(char)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_OBEYED = re.compile(r"[^\w .,:;()/+%='-]|_|:(?=/)|(?<=www)\.", re.IGNORECASE)
"""Marks, tags, links and addresses: all that is no letter, digit or plain sign."""


def markdown_code(text: str) -> str:
    """``text`` as a line of code, in which Markdown obeys nothing: no tag, link, mention or end of
    a table's cell. What would end a span of code stands in HTML, each such character a number."""
    plain = printable(text).strip() or "-"
    if "`" not in plain and "|" not in plain:
        return f"`{plain}`"
    return f"<code>{_OBEYED.sub(lambda match: f'&#{ord(match[0])};', plain)}</code>"


_LONG = 9999.5


def figure(value: float, digits: int = 1) -> str:
    """``6.8``, ``1204.6``; ``4.0e+08`` where more digits would say nothing."""
    return f"{value:.{digits}f}" if abs(value) < _LONG or value != value else f"{value:.1e}"


def decimal(value: float | None) -> str:
    """Two significant digits: ``3.1e-04``, ``0``, ``nan``, ``-inf``; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return f"{value:g}"
    return "0" if value == 0 else f"{value:.1e}"


def fixed(value: float | None, digits: int = 3) -> str:
    """A plain number of moderate size: a margin in logits, a log-probability."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if math.isfinite(value) else f"{value:g}"


def signed(value: float | None) -> str:
    """A difference with its sign, in four digits behind the point; ``0`` where there is none."""
    return "-" if value is None else "0" if value == 0 else f"{value:+.4f}"


def chance(value: float | None) -> str:
    """A p value: two significant digits, ``<0.0001``."""
    return "-" if value is None else f"{value:.2g}" if value >= 1e-4 else "<0.0001"


def times(value: float | None) -> str:
    """A ratio: ``<0.1 ×``, ``1.3 ×``, ``650 ×``, ``2.0e+05 ×``; more than a billion is no news."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    if value > 1e9:
        return ">1e+09 ×"
    if value == 0:
        return "0 ×"
    if value < 0.05:
        return "<0.1 ×"
    if value >= 99950:
        return f"{value:.1e} ×"
    return f"{value:.1f} ×" if value < 99.95 else f"{value:.0f} ×"


def limit_share(value: float | None) -> str:
    """Write how much of a limit is used: ``0%``, ``73%``, ``310%``, ``22.3 ×``; a dash for None."""
    if value is None or not value < 10:
        return times(value)
    return f"{100 * value:.0f}%"


def share(value: float | None) -> str:
    """A share in two significant digits: ``100%``, ``0.41%``, ``1.3e-06``; a dash for None."""
    if value is None or not math.isfinite(value) or value < 9.95e-5:
        return decimal(value)
    percent = float(f"{100 * value:.1e}")
    return f"{percent:.{max(0, 1 - math.floor(math.log10(percent)))}f}%"


def relative(value: float, sign: str = "") -> str:
    """A relative difference: ``1.23%``, ``3.1e-05``; with ``+`` for ``sign`` each sign is shown."""
    return f"{value:{sign}.1e}" if 0 < abs(value) < 1e-4 else f"{value:{sign}.2%}"


def count(number: int, noun: str) -> str:
    """``1 site``, ``2 sites``, with thousands apart."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(num_bytes: float) -> str:
    """Bytes in binary units: ``13 B``, ``4.2 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def rank_names(ranks: Sequence[int]) -> str:
    """``0, 1, 2``; of many ranks the first."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "") or "?"


def shape_text(shape: Sequence[int]) -> str:
    """``4x64``."""
    return "x".join(str(length) for length in shape) or "scalar"


def list_names(names: Sequence[str], most: int = 5, by: str = ", ") -> str:
    """The first few, and how many more."""
    rest = len(names) - most
    last = "; and" if by == "; " else " and"
    return by.join(names[:most]) + (f"{last} {rest} more" if rest > 0 else "")
