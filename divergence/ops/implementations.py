"""What ``--impl`` says, of operators or collectives: ``NAME``, ``WHERE=NAME``, or a function of the
user's, ``WHERE=MODULE:FUNCTION``."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from divergence.errors import UsageError

Wishes = str | Sequence[str] | Mapping[str, Callable[..., Any]]
"""Values of ``--impl``, or functions by what they are to run."""


def pairs_of(wishes: Wishes) -> list[tuple[str, Any]]:
    """(where, what): ``where`` is empty of what is meant everywhere. Raises UsageError for half a
    wish."""
    if isinstance(wishes, Mapping):
        return list(wishes.items())
    pairs = []
    for wish in [wishes] if isinstance(wishes, str) else wishes:
        where, equals, what = wish.rpartition("=")
        if not what or (equals and not where):
            raise UsageError(
                f"--impl {wish!r} has nothing {'before' if what else 'behind'} its '='"
                if equals else "--impl has no name",
                hint="NAME, WHERE=NAME or WHERE=MODULE:FUNCTION",
            )  # fmt: skip
        pairs.append((where, what))
    return pairs


def function_named(name: str, where: str) -> Callable[..., Any]:
    """The function of ``package.module:function``, for ``where``; modules of the directory that the
    command was given in count. Raises UsageError."""
    module, _, attribute = name.partition(":")
    hint = f"--impl {where}=MODULE:FUNCTION, where python -c 'import MODULE' works"
    with _current_directory():
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # the module is the user's own
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            raise UsageError(f"cannot import {name!r}: {kind}{error}", hint=hint) from error
    if not callable(function):
        raise UsageError(f"{name!r} is not a function", hint=hint)
    return function


def label_of(function: Callable[..., Any]) -> str:
    """As a function that was handed over is recorded."""
    label: str = getattr(function, "__qualname__", type(function).__name__)
    return label


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    """The directory is searched first, as ``python -m`` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
