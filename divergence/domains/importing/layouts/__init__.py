"""A format is a ``Layout``: modules of this folder have one or several; formats.py names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from divergence.domains.importing.dumped import DumpedForward, Notes
from divergence.domains.importing.rules import Rules
from divergence.domains.importing.scores import FieldMap, Scored
from divergence.run.foreign import DumpFolder


@dataclass(frozen=True, slots=True)
class Layout:
    """A format, which knows where another tool puts its tensors and what it calls them, and gives
    each the site that a capture would. What follows from several of them (ranks, tokens, the run
    that is repeated) is found by survey.py, for all alike. It has ``read`` or ``scores``."""

    words: str
    """What to call it."""
    recognise: Callable[[DumpFolder], bool]
    """Does the folder look like it?"""
    read: Callable[[DumpFolder, Rules | None, Notes], Iterator[DumpedForward]] | None = None
    """Its forwards in order. Raises DumpError. It is called twice: to check, then to write."""
    scores: Callable[[DumpFolder, FieldMap | None, Notes], Scored] | None = None
    """All log-probabilities in it. Raises DumpError."""
    dtype: str | None = None
    """What models are taken to compute in, where tensors are written wider than that."""
    takes_map: bool = False
    """May a map say what its names or fields are?"""


def holding(*patterns: re.Pattern[str]) -> Callable[[DumpFolder], bool]:
    """Has the folder a file of such a name?"""

    def recognise(folder: DumpFolder) -> bool:
        return any(pattern.fullmatch(name) for name in folder.names for pattern in patterns)

    return recognise
