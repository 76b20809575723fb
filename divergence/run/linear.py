"""Regular expressions matched in time that grows with pattern times text, whatever the pattern.

The patterns of a run's sites come with the run, and Python's own ``re`` tries every way in which
``(a+)+`` may divide a text: some thirty characters keep it busy for a day. Here the parsed pattern
becomes the states of an automaton, and each pair of state and place in the text is visited once,
from the text's end backwards.
Syntax and meaning are those of ``re`` (its own parser is used) for what says whether a whole text
matches. References to groups, conditions, atomic groups and possessive repeats are refused: no
automaton has them. Flags count for a whole pattern, as in ``(?i)norm.*``.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
        end = program.add("end")
        start = program.sequence(list(parsed), end)
    except (OverflowError, RecursionError) as error:
        raise re.error("it repeats or nests too deeply") from error
    return lambda text: _Match(program.states, text).reaches(start, end, 0, len(text))[0]


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
            end = self.add("end")
            inner = self.sequence(list(items), end)
            width = None if direction > 0 else items.getwidth()[0]
            return self.add("look", (inner, end, width, operation is code.ASSERT), then)
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
    """One text, and which of its places lead to the end of the pattern or of a part of it."""

    def __init__(self, states: list[_State], text: str) -> None:
        self._states, self._text = states, text
        self._before: dict[int, list[int]] = defaultdict(list)
        """By state, those that lead to it."""
        for number, (_, _, following) in enumerate(states):
            for other in following:
                self._before[other].append(number)
        self._ahead: dict[int, list[bool]] = {}

    def reaches(
        self, start: int, end: int, low: int, high: int, *, anywhere: bool = False
    ) -> list[bool]:
        """By place from ``low`` to ``high``: does ``start`` there lead to ``end`` at ``high``, or
        ``anywhere`` up to it? From the last place backwards, so that all of them cost no more than
        one."""
        text, states, leads = self._text, self._states, []
        now: set[int] = set()
        for at in range(high, low - 1, -1):
            later, now = now, {end} if anywhere or at == high else set()
            if at < high:
                before = (state for other in later for state in self._before[other])
                now |= {n for n in before if states[n][0] == "char" and states[n][1](text[at])}
            waiting = list(now)
            while waiting:
                for state in self._before[waiting.pop()]:
                    kind, argument, _ = states[state]
                    if state not in now and kind != "char" and self._passes(kind, argument, at):
                        now.add(state)
                        waiting.append(state)
            leads.append(start in now)
        return leads[::-1]

    def _passes(self, kind: str, argument: Any, at: int) -> bool:
        if kind == "split":
            return True
        if kind == "at":
            return _PLACES[argument](self._text, at)
        inner, end, width, wanted = argument
        if width is None:
            if inner not in self._ahead:
                self._ahead[inner] = self.reaches(inner, end, 0, len(self._text), anywhere=True)
            return bool(self._ahead[inner][at] == wanted)
        return bool((at >= width and self.reaches(inner, end, at - width, at)[0]) == wanted)
