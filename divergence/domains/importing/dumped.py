"""An importer makes this of a dump: forwards, and the tensors seen in each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from divergence.errors import DumpError
from divergence.numerics.summary import Summary
from divergence.run.record import Apart
from divergence.run.site import escape_path, join_site

_MAX_NAME = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One tensor of one rank. ``plus``: is added to it; some engines hand on what a block returns
    in two parts, its own update and the residual before it."""

    site: str
    tensor: torch.Tensor
    plus: torch.Tensor | None = None
    rank: int = 0
    summary: Summary | None = None
    """What the tool kept in its place: ``tensor`` then has a shape and no memory."""
    checksum: str | None = None
    """``crc32:`` or another name, and hexadecimal digits."""
    off: float = 0.0
    """What the digits of the summary leave open, relative."""
    texts: tuple[tuple[str, float], ...] = ()
    """Its numbers, where they are written as text; each with what makes it one element's size."""
    positions: tuple[int, ...] | None = None
    """Of the tokens that it holds, where it does not hold all."""
    apart: Apart | None = None
    """What the tool said when it compared the tensor with another one."""

    def value(self) -> torch.Tensor:
        """The sum of both parts, rounded once to their dtype, as the engine's own addition does."""
        tensor = self.tensor.detach()
        return tensor if self.plus is None else tensor + self.plus.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedForward:
    """All tensors of one forward, in order of execution."""

    where: str
    """The file or folder, for errors."""
    tensors: list[Dumped]
    number: int
    """Of the forward: in the dump, or among those of ``sample``."""
    numbered: bool = False
    """Is ``number`` its step, and may others be missing? Else they count from 0, without a gap."""
    trains: bool = False
    """Is it one of a training, each with an input of its own?"""
    sample: int | None = None
    """Where the dump says it; else each forward of more than one token begins a new prompt."""


@dataclass(slots=True)
class Notes:
    """Says what was left out and done. ``counts``: end of a sentence → how many tensors."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.append(sentence)

    def add(self, text: str, count: int = 1) -> None:
        self.counts[text] += count

    def sentences(self) -> list[str]:
        counted = [(count, text) for text, count in self.counts.items() if count]
        texts = [f"{count:,} tensor{'s' if count != 1 else ''} {text}" for count, text in counted]
        return [*self.said, *texts]


def module_site(name: str, port: str, call: int = 1) -> str:
    """The site of a module by its torch name. Raises ValueError."""
    path = escape_path(checked_name(name))
    return join_site(path if call == 1 else f"{path}#{call}", port)


def checked_name(name: str) -> str:
    """The name of a module or tensor, if it is one: a model's have some 100 letters, and names of
    names grow beyond any memory. Raises ValueError, which outside.read_as gives its place."""
    if len(name) > _MAX_NAME:
        raise ValueError(f"{name[:60]}... is a name of {len(name):,} letters")
    return name


def first_missing(numbers: Container[int]) -> int:
    """The first number from 0 on that is not there."""
    return next(number for number in itertools.count() if number not in numbers)


def check_ranks(
    steps: Mapping[int, Iterable[int]],
    where: str,
    num: int = 0,
    called: Callable[[int], str] = "rank {}".format,
) -> None:
    """Every step is to have the same ranks, from 0 on, and ``num`` at least. Raises DumpError.
    ``called``: what the dump calls a rank."""
    hint = "copy the files of all ranks together"
    ranks = {rank for there in steps.values() for rank in there}
    if (missing := first_missing(ranks)) < max(num, *ranks):
        raise DumpError(f"{called(missing)} is missing", where=where, hint=hint)
    for step, there in steps.items():
        if lacking := ranks.difference(there):
            raise DumpError(
                f"{called(min(lacking))} is missing at step {step}", where=where, hint=hint
            )


def leaves(value: Any, port: str, is_leaf: Any) -> list[tuple[str, Any]]:
    """(port, leaf) of nested lists and dicts, named as a capture names them: the first is the
    port alone, others carry their index or key."""
    named_leaves: list[tuple[str, Any]] = []

    def walk(value: Any, name: str) -> None:
        if is_leaf(value):
            named_leaves.append((name, value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, checked_name(f"{name}.{index}"))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, checked_name(f"{name}.{key}"))

    walk(value, port)
    return [(port, named_leaves[0][1]), *named_leaves[1:]] if named_leaves else []
