"""What hooks share: patches of functions, rows of a batch, forwards, and where tensors go."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from divergence.run.captured import CapturedTensor
from divergence.run.record import Call, PassName, Placement

# What stands in the place of a part of a model or of a library, and is taken out again.
#
# Whatever this tool changes in objects that are not its own is changed here, or by torch's hooks,
# whose handles are context managers themselves: on any exit all is as it was.


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value`` as an attribute of an object, a class or a module; afterwards what was there. Where
    the object had none of its own, its class's is seen again."""
    own = vars(owner)
    held, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if held:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def swapped(
    model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """What ``change`` makes of each parameter and buffer, in its place; it is asked once of one
    that several modules share, and leaves alone what it gives back."""
    made: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = change(tensor)
                if made[id(tensor)] is not tensor:
                    places.append((held, name, tensor))
    for held, name, tensor in places:
        held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


# What a recorder is given: where records go, and the inputs that it puts in place.


class Sink(Protocol):
    """Where records go: a RunWriter, or something that only compares digests."""

    def put(
        self,
        item: CapturedTensor,
        *,
        pass_: PassName,
        sample: int,
        step: int,
        site: str,
        order: int,
        positions: tuple[int, ...] | None = None,
        call: Call | None = None,
        placement: tuple[Placement, ...] | None = None,
    ) -> None: ...


class Anchor(Protocol):
    """Recorded inputs by coordinates; None where nothing was recorded. ``own``: what this run has
    there."""

    def __call__(
        self, sample: int, step: int, site: str, own: torch.Tensor
    ) -> torch.Tensor | None: ...


# Several decode steps in one forward: what each of them would have given alone.
#
# Where a step alone gives one row, a forward of ``count`` steps gives ``count``, (B, 1, D) and (B,
# count, D); where it attends to the tokens up to its own, (B, H, 1, past + 1), all attend to the
# last one's, (B, H, count, past + count), masked. Which axis is which tell the shapes of the first
# step, made alone. A causal mask that a step alone does not have is left out.
#
# The first and the last step are also made alone, and must agree in sites, their order, shapes,
# dtypes and values. Float64 rounds at 2^-53 and float32, the finest dtype that a truth is held
# against, at 2^-24; what differs by more than 2^-30 is another function.

AGREEMENT = 2**-30
"""Relative L2 up to which two float64 results are the same."""


class HeldSink:
    """Keeps what one forward gave, by site and in order."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, item: CapturedTensor, *, site: str, **_: Any) -> None:
        assert item.tensor is not None  # a copy of every byte was kept
        self.tensors[site] = item.tensor

    @property
    def num_bytes(self) -> int:
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())


class Rows:
    """``count`` steps in one forward, of a batch that had ``past`` tokens before."""

    def __init__(self, count: int, *, batch: int, past: int) -> None:
        self._count, self._batch, self._past = count, batch, past
        self.anchored = True
        """Whether each input was recorded as one row in every step, or in none."""

    def of(self, anchor: Anchor) -> Anchor:
        """An Anchor for one forward of all steps."""

        def together(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
            rows = [anchor(sample, step + number, site, own) for number in range(self._count)]
            held = [row for row in rows if row is not None]
            if not held:
                return None
            shape = held[0].shape
            alike = len(held) == self._count and all(row.shape == shape for row in held)
            if not alike or len(shape) < 2 or shape[1] != 1:
                self.anchored = False
                return None
            return torch.cat(held, dim=1)

        return together

    def cut(
        self,
        whole: Mapping[str, torch.Tensor],
        first: Mapping[str, torch.Tensor],
        last: Mapping[str, torch.Tensor],
    ) -> list[dict[str, torch.Tensor]] | None:
        """What each step would have given alone, by site. None if ``first`` and ``last``, which
        were made alone, are not what is cut for them."""
        sites = list(first)
        if list(last) != sites or [site for site in whole if site in first] != sites:
            return None
        steps: list[dict[str, torch.Tensor]] = [{} for _ in range(self._count)]
        known: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
        for site, alone in first.items():
            key = id(whole[site]), alone.shape  # what passes unchanged is cut, and kept, once
            parts = known.get(key) or self._parts(whole[site], alone.shape)
            if not (parts and agree(parts[0], alone) and agree(parts[-1], last[site])):
                return None
            known[key] = parts
            for step, part in zip(steps, parts, strict=True):
                step[site] = part
        return steps

    def _parts(self, whole: torch.Tensor, alone: Sequence[int]) -> list[torch.Tensor]:
        """One a step; empty where the shapes do not tell how to cut."""
        count, past = self._count, self._past
        if whole.ndim != len(alone):
            return []
        parts = [whole] * count
        for axis, (size, single) in enumerate(zip(whole.shape, alone, strict=True)):
            if size == single:
                continue
            if (size, single) == (count, 1):
                parts = [part.narrow(axis, n, 1) for n, part in enumerate(parts)]
            elif (size, single) == (past + count, past + 1):
                parts = [part.narrow(axis, 0, past + 1 + n) for n, part in enumerate(parts)]
            elif (size, single) == (self._batch * count, self._batch):  # rows of the whole batch
                split = (self._batch, count)
                parts = [
                    part.unflatten(axis, split).select(axis + 1, n) for n, part in enumerate(parts)
                ]
            else:
                return []
        return parts


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, or float64 within rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if a.dtype not in (torch.float64, torch.complex128):
        return False
    distance, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b)
    return bool(distance <= AGREEMENT * size)


# Steps whose forwards are others than those of the run that is repeated.
#
# A prompt that is fed in chunks makes several forwards of step 0. Their rows are the rows of one
# whole prefill, and are recorded so: one tensor (B, T, ...). What has no row for each token
# (attention weights, masks) is left out: no part of it is what a whole prefill has.
#
# Without a cache each step is a forward over all tokens. Its blocks are given the recorded rows of
# every step so far; its own row, the last one, is recorded. And a forward that no hook sees: the
# model is called through a function that looks at its result.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """How a run's forwards are made and watched."""

    cached: bool = True
    """Decode steps go on from a cache."""
    chunk: int | None = None
    """Tokens of a prompt that are fed at a time; None for all."""
    hooks: bool = True
    """Modules are watched by hooks; else the model's result alone is."""

    def chunks(self, num_tokens: int) -> Chunks | None:
        """The chunks of a prompt; None where one forward feeds it."""
        few = self.chunk is not None and self.chunk < num_tokens
        return Chunks(self.chunk, num_tokens) if few and self.chunk else None


USUAL = Forwards()


class Chunks:
    """The chunks of one prefill of ``num_tokens``: each of ``size``, the last one of what is left.
    ``first`` is the number of tokens before the present chunk."""

    def __init__(self, size: int, num_tokens: int) -> None:
        self._size, self._num_tokens = size, num_tokens
        self.first = 0
        self._parts: dict[str, list[torch.Tensor]] = {}

    @property
    def length(self) -> int:
        return min(self._size, self._num_tokens - self.first)

    @property
    def is_last(self) -> bool:
        return self.first + self._size >= self._num_tokens

    def end(self) -> bool:
        """The chunk's forward has ended: was it the last one?"""
        last = self.is_last
        self.first += self._size
        return last

    def joined(self, site: str, tensor: torch.Tensor, *, deciding: bool) -> torch.Tensor | None:
        """All chunks' rows at ``site``, given with the last one; else None. ``deciding``: of what
        ``site`` holds the last token alone counts."""
        if deciding:
            return tensor[:, -1:] if self.is_last and tensor.ndim == 3 else None
        if tensor.ndim not in (2, 3) or tensor.shape[1] != self.length:
            return None
        parts = self._parts.setdefault(site, [])
        parts.append(tensor.clone())  # the model may write to it in place
        if not self.is_last:
            return None
        del self._parts[site]
        whole = torch.cat(parts, dim=1)
        return whole if whole.shape[1] == self._num_tokens else None

    def rows(self, recorded: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """This chunk's rows of what a whole prefill got."""
        whole = recorded.ndim > 1 and recorded.shape[1] == self._num_tokens
        if not whole or own.shape[1:2] != (self.length,):
            return recorded
        return recorded[:, self.first : self.first + self.length]


def recorded_rows(
    anchor: Anchor,
    sample: int,
    step: int,
    site: str,
    own: torch.Tensor,
    *,
    chunks: Chunks | None,
    cached: bool,
) -> torch.Tensor | None:
    """What was recorded for this forward's input: of a chunk its rows of the prefill, without a
    cache the rows of all steps up to ``step``. None where one has none, or they do not fit."""
    if cached or not step:
        recorded = anchor(sample, step, site, own)
        return recorded if recorded is None or chunks is None else chunks.rows(recorded, own)
    rows = [anchor(sample, number, site, own) for number in range(step + 1)]
    held = [row for row in rows if row is not None]
    if len(held) < len(rows):
        return None
    if held[-1].shape == own.shape:  # it holds no more than the step's own
        return held[-1]
    shapes = {row.shape[:1] + row.shape[2:] for row in held}
    fit = len(shapes) == 1 and all(row.ndim > 1 for row in held)
    return torch.cat(held, dim=1) if fit else None


def called_through(
    model: torch.nn.Module, post: Callable[[Any, Any, Any, Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """What the model returns, seen by no hook: its ``forward`` is called through another one."""
    forward = model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        post(model, args, kwargs, output)
        return output

    return patched(model, "forward", watched)


def repeated(tell: Callable[[Any], None] | None, times: int) -> Callable[[Any], None] | None:
    """``tell``, so many times for each call; None where there is none."""

    def told(what: Any) -> None:
        for _ in range(times):
            assert tell is not None
            tell(what)

    return None if tell is None else told
