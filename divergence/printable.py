"""Text of a run, made printable: a run may come from anyone.

Control characters and escape sequences move the cursor or colour the screen, a line break forges a
line of a report, and marks of direction let a line read as another one. Each is written out by its
number (``\\x1b``, ``\\u202e``). Every way out goes through here: lines of reports, errors
and warnings on stderr, progress, JSON, markdown.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable", "printable_json", "printable_lines"]


def printable(text: str) -> str:
    """``text`` on one line, each character that does not print written out; words are untouched."""
    if text.isprintable():
        return text
    return "".join(char if _prints(char) else _written(char) for char in text)


def printable_lines(text: str) -> str:
    """Lines that this tool has put together (``\\n`` between them), each ``printable``."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """JSON with the same meaning that prints: what does not stands as ``\\uXXXX`` (in JSON such
    characters stand in strings alone; line breaks between values stay)."""
    if text.isprintable():
        return text
    return "".join(char if _prints(char) or char == "\n" else _in_json(char) for char in text)


def _prints(char: str) -> bool:
    # spaces of other widths (no-break, ideographic) are text, whatever isprintable says
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _written(char: str) -> str:
    number = ord(char)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _in_json(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
