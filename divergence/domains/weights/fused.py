"""How one tensor holds the rows of several: queries, keys and values, or a gate and what it gates.

Each way is tried on some rows: the order of the parts, in how many groups they take turns (one; a
head's, or a group of heads', together; row by row), and whether a side stores its matrices turned.
A part that was changed is no obstacle: the others tell the way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from divergence.domains.weights.checkpoint import Stored
from divergence.domains.weights.relations import ENOUGH, alike

IN_BLOCK = re.compile(r"^(.*\.\d+)\.")
_ROWS = 32
"""Of each part, held against the whole."""


@dataclass(frozen=True, slots=True)
class FusedRows:
    """``names``: the parts in their order; ``rows``: of each; ``flipped``, ``parts_flipped``: is
    the whole's, or the parts', matrix stored turned?"""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    num_groups: int
    flipped: bool
    parts_flipped: bool

    def places(self) -> Iterator[torch.Tensor]:
        """Of each part the numbers of its rows in the whole."""
        each = [rows // self.num_groups for rows in self.rows]
        groups = torch.arange(self.num_groups)[:, None] * sum(each)
        for begin, num in zip(itertools.accumulate([0, *each]), each, strict=False):
            yield (groups + begin + torch.arange(num)).reshape(-1)

    def cut(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each part's name, and its rows."""
        rows = whole.T if self.flipped and whole.ndim == 2 else whole
        for name, places in zip(self.names, self.places(), strict=True):
            yield name, rows[places]


def find_layout(
    name: str,
    tensors: Mapping[str, Stored],
    alone: Sequence[str],
    others: Mapping[str, Stored],
    layouts: dict[str, FusedRows],
) -> FusedRows | None:
    """The way in which ``name`` holds tensors of the other side, of the same block and kind; None
    where it holds none. ``layouts``: of matrices, which their biases follow."""
    shape, block = tensors[name].shape, IN_BLOCK.match(name)
    module, _, kind = name.rpartition(".")
    if block is None or not shape:
        return None
    numbers = re.findall(r"\d+", block[1])
    near = [
        other
        for other in alone
        if other.rpartition(".")[2] == kind
        and (there := IN_BLOCK.match(other)) is not None
        and re.findall(r"\d+", there[1]) == numbers
        and len(others[other].shape) == len(shape)
    ]
    if module in layouts:
        earlier = layouts[module]
        names = tuple(f"{part.rpartition('.')[0]}.{kind}" for part in earlier.names)
        if set(names) <= set(near):
            return replace(earlier, names=names)
    best, layout = ENOUGH, None
    rows: dict[tuple[str, bool], torch.Tensor] = {}
    whole = tensors[name].read().float()
    for tried in _layouts(shape, near, others):
        own = whole.T if tried.flipped else whole
        scores = []
        for part, places in zip(tried.names, tried.places(), strict=True):
            key = part, tried.parts_flipped
            if key not in rows:
                value = others[part].read().float()
                rows[key] = value.T if tried.parts_flipped else value
            some = torch.linspace(0, len(places) - 1, min(_ROWS, len(places))).long()
            scores.append(alike(rows[key][some], own[places[some]]))
        score = float(torch.cat(scores).float().mean())
        if score > best + 1e-6:
            best, layout = score, tried
    if layout is not None:
        layouts[module] = layout
    return layout


def _layouts(
    shape: tuple[int, ...], near: Sequence[str], others: Mapping[str, Stored]
) -> Iterator[FusedRows]:
    """Every way, the plainest first."""
    turns = ((False, False), (True, False), (True, True)) if len(shape) == 2 else ((False, False),)
    for flipped, parts_flipped in turns:
        size, *rest = shape[::-1] if flipped else shape
        shapes = {n: others[n].shape[::-1] if parts_flipped else others[n].shape for n in near}
        fitting = [n for n in near if list(shapes[n][1:]) == rest and shapes[n][0] < size]
        for num in (3, 2):
            for chosen in itertools.combinations(fitting, num):
                if sum(shapes[n][0] for n in chosen) != size:
                    continue
                common = math.gcd(*(shapes[n][0] for n in chosen))
                for groups in (n for n in range(1, common + 1) if common % n == 0):
                    for names in itertools.permutations(chosen):
                        rows = tuple(shapes[n][0] for n in names)
                        yield FusedRows(names, rows, groups, flipped, parts_flipped)
