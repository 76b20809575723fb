"""What an importer makes of a dump: forwards, and the tensors seen in each.

A layout is a module of ``layouts/`` with the functions of ``DumpLayout``. It knows where another
tool puts its tensors and what it calls them, and gives each the site that a capture would. What
follows from several of them (ranks, tokens, the run that is repeated) is found by ``building``, for
all layouts alike. A further format is one more module, named in ``layouts/__init__.py``.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from divergence.run.schema.site import escape_path, join_site

if TYPE_CHECKING:
    import torch

    from divergence.importing.folder import DumpFolder
    from divergence.importing.rules import Rules

__all__ = [
    "BLOCK",
    "DumpLayout",
    "Dumped",
    "DumpedForward",
    "Notes",
    "adds_residual",
    "checked_name",
    "first_missing",
    "leaves",
    "module_site",
    "same_kind",
]

_MAX_NAME = 1_000

BLOCK = re.compile(r"(?:.+\.)?(?:layers|layer|h|blocks)\.(\d+)")
"""Path of a repeated block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One tensor of one rank. ``plus``: is added to it; some engines hand on what a block returns
    in two parts, its own update and the residual before it."""

    site: str
    tensor: torch.Tensor
    plus: torch.Tensor | None = None
    rank: int = 0

    def value(self) -> torch.Tensor:
        """The sum of both parts, rounded once to their dtype, as the engine's own addition does."""
        tensor = self.tensor.detach()
        return tensor if self.plus is None else tensor + self.plus.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedForward:
    """All tensors of one forward, in order of execution. ``where``: the file or folder, for errors.
    ``sample`` and ``step``: where the dump says them; else each forward of more than one token
    begins a new prompt. ``num_ranks``: as far as the dump tells."""

    where: str
    tensors: list[Dumped]
    number: int
    sample: int | None = None


@dataclass(slots=True)
class Notes:
    """What was left out, and what was done. ``counts``: end of a sentence → how many tensors."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def add(self, text: str, count: int = 1) -> None:
        self.counts[text] += count

    def sentences(self) -> list[str]:
        counted = [(count, text) for text, count in self.counts.items() if count]
        texts = [f"{count:,} tensor{'s' if count != 1 else ''} {text}" for count, text in counted]
        return [*self.said, *texts]


class DumpLayout(Protocol):
    """A module of ``layouts/``."""

    NAME: str
    """What to call it in words."""
    TAKES_MAP: bool
    """Do rules of a map say what its names are?"""

    def recognise(self, folder: DumpFolder) -> bool:
        """Does the folder look like such a dump?"""

    def read(
        self, folder: DumpFolder, rules: Rules | None, notes: Notes
    ) -> Iterator[DumpedForward]:
        """Its forwards in order. Raises DumpError. It is called twice: to check, then to write."""


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


def adds_residual(path: str) -> bool:
    """May the norm at this path get and return a residual beside its input? Those of a block and of
    the model do; one inside a sublayer may have another second input, a gate."""
    parent, _, name = path.rpartition(".")
    beside = BLOCK.fullmatch(parent) is not None or BLOCK.match(path) is None
    return beside and ("norm" in name or name.startswith("ln_"))


def same_kind(part: torch.Tensor, other: torch.Tensor) -> bool:
    """Are both floating, of one shape and one dtype: parts that may be added?"""
    return part.shape == other.shape and part.dtype == other.dtype and part.is_floating_point()


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
