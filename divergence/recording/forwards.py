"""What a recorder shares with what makes forwards: patches, forwards, where tensors go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    has_own, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def swapped(
    model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Put what ``change`` makes of each parameter and buffer in its place; it is asked once of one
    that several modules share, and leaves alone what it gives back."""
    made: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        tensors: dict[str, Any]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = change(tensor)
                if made[id(tensor)] is not tensor:
                    places.append((tensors, name, tensor))
    for tensors, name, tensor in places:
        tensors[name] = made[id(tensor)]
    try:
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


# What a recorder is given: where records go, and the inputs that it puts in place.


class Sink(Protocol):
    """Takes records: a RunWriter, or something that only compares digests."""

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
    """Says how a run's forwards are made and watched."""

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


def steps_joined(
    anchor: Anchor, sample: int, steps: range, site: str, own: torch.Tensor
) -> torch.Tensor | None:
    """The rows of all ``steps``, one after another (B, T, ...). None where one has none, or where
    they are not made of rows."""
    rows = []
    for step in steps:
        recorded = anchor(sample, step, site, own)
        if recorded is None:
            return None
        rows.append(recorded)
    shapes = {row.shape[:1] + row.shape[2:] for row in rows}
    fit = len(shapes) == 1 and all(row.ndim > 1 for row in rows)
    return torch.cat(rows, dim=1) if fit else None
