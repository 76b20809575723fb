"""Regular expressions matched in time that grows with pattern times text, whatever the pattern.

The patterns of a run's sites come with the run, and Python's own ``re`` tries every way in which
``(a+)+`` may divide a text: some thirty characters keep it busy for a day. Here the parsed pattern
becomes the states of an automaton, and each pair of state and place in the text is visited once.
Syntax and meaning are those of ``re`` (its own parser is used) for what says whether a whole text
matches. References to groups, conditions, atomic groups and possessive repeats are refused: no
automaton has them. Flags count for a whole pattern, as in ``(?i)norm.*``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from re import _constants as code  # type: ignore[attr-defined]  # re's parser has no types: names
from re import _parser  # type: ignore[attr-defined]  # the same
from typing import Any

MAX_STATES = 2_000
"""Of one pattern, with its counted repeats written out."""

_Item = tuple[object, Any]
"""What re's parser returns: an operation and its argument, of the kind that the operation takes."""

_State = tuple[str, Any, tuple[int, ...]]
"""Kind, argument (of the kind that the kind takes) and the states that may follow."""

_SIMPLE = {code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN}


def fullmatcher(pattern: str) -> Callable[[str], bool]:
    """A predicate: does all of a text match? Raises re.error for what cannot be matched so."""
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags & (re.MULTILINE | re.LOCALE):
            raise re.error("the flags m and L mean nothing in a site")
        program = _Program(parsed.state.flags)
        accept = program.add("accept")
        start = program.sequence(list(parsed), accept)
    except (OverflowError, RecursionError) as error:
        raise re.error("it repeats or nests too deeply") from error
    return lambda text: _Match(program.states, text).reaches(start, 0)


class _Program:
    """States as (kind, argument, states that may follow)."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.states: list[_State] = []

    def add(self, kind: str, argument: Any = None, *following: int) -> int:
        if len(self.states) >= MAX_STATES:
            raise re.error(f"it has more than {MAX_STATES} states; repeat less")
        self.states.append((kind, argument, following))
        return len(self.states) - 1

    def sequence(self, items: list[_Item], then: int) -> int:
        """The first state of ``items``, one after the other, and then ``then``: built backwards."""
        for operation, argument in reversed(items):
            then = self._item(operation, argument, then)
        return then

    def _item(self, operation: object, argument: Any, then: int) -> int:
        if operation in _SIMPLE:
            return self.add("char", _one_char(operation, argument, self.flags), then)
        if operation is code.SUBPATTERN:
            _, added, removed, items = argument
            if added or removed:
                raise re.error("flags for a part are not taken; write [aA] for either case")
            return self.sequence(list(items), then)
        if operation is code.BRANCH:
            firsts = [self.sequence(list(items), then) for items in argument[1]]
            return self.add("split", None, *firsts)
        if operation in (code.MAX_REPEAT, code.MIN_REPEAT):  # lazy or not: the same texts match
            low, high, items = argument
            return self._repeat(low, high, list(items), then)
        if operation in (code.ASSERT, code.ASSERT_NOT):
            direction, items = argument
            inner = self.sequence(list(items), self.add("here"))
            width = None if direction > 0 else items.getwidth()[0]
            return self.add("look", (inner, width, operation is code.ASSERT), then)
        if operation is code.AT:
            return self.add("at", argument, then)
        raise re.error("it refers to a group, or holds an atomic group or a possessive repeat")

    def _repeat(self, low: int, high: Any, items: list[_Item], then: int) -> int:
        if high is code.MAXREPEAT:
            loop = self.add("split")  # what follows is known once it has been built
            first = self.sequence(items, loop)
            self.states[loop] = ("split", None, (first, then))
            then = loop
        else:
            for _ in range(high - low):
                then = self.add("split", None, self.sequence(items, then), then)
        for _ in range(low):
            then = self.sequence(items, then)
        return then


def _one_char(operation: object, argument: Any, flags: int) -> Callable[[str], object]:
    """Does one character match? By ``re`` itself, which has nothing to try again here."""
    if operation is code.ANY:
        words = "."
    elif operation is code.IN:
        words = _in_words(argument)
    else:
        words = f"[{'^' if operation is code.NOT_LITERAL else ''}{re.escape(chr(argument))}]"
        if operation is code.LITERAL and not flags & re.IGNORECASE:
            return chr(argument).__eq__
    return re.compile(words, flags).fullmatch


_CATEGORIES = {
    code.CATEGORY_DIGIT: r"\d", code.CATEGORY_NOT_DIGIT: r"\D", code.CATEGORY_SPACE: r"\s",
    code.CATEGORY_NOT_SPACE: r"\S", code.CATEGORY_WORD: r"\w", code.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _in_words(items: list[_Item]) -> str:
    """The parsed set of characters as ``re`` would write it."""
    parts = []
    for operation, argument in items:
        if operation is code.NEGATE:
            parts.append("^")
        elif operation is code.LITERAL:
            parts.append(re.escape(chr(argument)))
        elif operation is code.RANGE:
            parts.append("-".join(re.escape(chr(bound)) for bound in argument))
        else:
            parts.append(_CATEGORIES[argument])
    return f"[{''.join(parts)}]"


_PLACES: dict[object, Callable[[str, int], bool]] = {
    code.AT_BEGINNING: lambda text, at: at == 0,
    code.AT_BEGINNING_STRING: lambda text, at: at == 0,
    code.AT_END: lambda text, at: at == len(text) or (at == len(text) - 1 and text[at] == "\n"),
    code.AT_END_STRING: lambda text, at: at == len(text),
    code.AT_BOUNDARY: lambda text, at: _word(text, at - 1) != _word(text, at),
    code.AT_NON_BOUNDARY: lambda text, at: _word(text, at - 1) == _word(text, at),
}


def _word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


class _Match:
    """One text. ``accept`` is reached at its end, ``here`` (the end of what is looked at) anywhere
    ahead, or behind at the place that looks."""

    def __init__(self, states: list[_State], text: str) -> None:
        self._states, self._text = states, text
        self._ahead: dict[int, list[bool]] = {}

    def reaches(self, start: int, begin: int, end: int | None = None) -> bool:
        """Forward from one place; ``end``: where ``here`` counts."""
        text, states = self._text, self._states
        waiting, seen = [(start, begin)], {(start, begin)}
        while waiting:
            state, at = waiting.pop()
            kind, argument, following = states[state]
            if kind == "char":
                if at == len(text) or not argument(text[at]):
                    continue
                at += 1
            elif kind == "accept" or kind == "here":
                if at == (len(text) if kind == "accept" else end):
                    return True
                continue
            elif not self._passes(kind, argument, at):
                continue
            for other in following:
                if (other, at) not in seen:
                    seen.add((other, at))
                    waiting.append((other, at))
        return False

    def _passes(self, kind: str, argument: Any, at: int) -> bool:
        if kind == "split":
            return True
        if kind == "at":
            return _PLACES[argument](self._text, at)
        inner: int
        width: int | None
        wanted: bool
        inner, width, wanted = argument
        if width is None:
            return self._looks_ahead(inner)[at] == wanted
        return (at >= width and self.reaches(inner, at - width, at)) == wanted

    def _looks_ahead(self, inner: int) -> list[bool]:
        """By place, whether ``here`` can be reached from it: from the text's end backwards, so that
        all places together cost no more than one."""
        if inner not in self._ahead:
            text, states = self._text, self._states
            parts = _reachable(states, inner)
            wanted = [False] * (len(text) + 1)
            later: set[int] = set()
            for at in range(len(text), -1, -1):
                now = {part for part in parts if states[part][0] == "here"}
                if at < len(text):
                    now |= {
                        part
                        for part in parts
                        if states[part][0] == "char"
                        and states[part][2][0] in later
                        and states[part][1](text[at])
                    }
                waiting = list(now)
                while waiting:
                    for part in parts[waiting.pop()]:
                        kind, argument, _ = states[part]
                        if part in now or kind == "char" or not self._passes(kind, argument, at):
                            continue
                        now.add(part)
                        waiting.append(part)
                later, wanted[at] = now, inner in now
            self._ahead[inner] = wanted
        return self._ahead[inner]


def _reachable(states: list[_State], start: int) -> dict[int, list[int]]:
    """The states after ``start``, each with those that lead to it."""
    parts: dict[int, list[int]] = {start: []}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        for other in states[state][2]:
            if other not in parts:
                parts[other] = []
                waiting.append(other)
            parts[other].append(state)
    return parts
