"""Steps whose forwards are others than those of the run that is repeated.

A prompt that is fed in chunks makes several forwards of step 0. Their rows, one chunk after the
other, are the rows of one whole prefill, and so they are recorded: one tensor (B, T, ...) of the
chunks (B, n, ...). What has no row for each token (attention weights, masks) is left out, since no
part of it is what a whole prefill has.

Without a cache each step is a forward over all tokens. Its blocks are given the recorded rows of
every step so far; its own row, the last one, is what is recorded.

And a forward that no hook sees: the model is called through a function that looks at its result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from divergence.recording.hooks.patch import patched
from divergence.recording.hooks.sink import Anchor

__all__ = ["USUAL", "Chunks", "Forwards", "called_through", "recorded_rows", "repeated"]


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

    ``first`` is the number of tokens before the present chunk.
    """

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
    cache the rows of all steps up to ``step``."""
    if step and not cached:
        return _rows_so_far(anchor, sample, step, site, own)
    rows = anchor(sample, step, site, own)
    return rows if rows is None or chunks is None else chunks.rows(rows, own)


def _rows_so_far(
    anchor: Anchor, sample: int, step: int, site: str, own: torch.Tensor
) -> torch.Tensor | None:
    """The recorded rows of all steps up to ``step``; the step's alone where ``own`` holds no more.
    None where a step has none, or they do not fit together."""
    rows = [anchor(sample, number, site, own) for number in range(step + 1)]
    held = [row for row in rows if row is not None]
    if len(held) < len(rows):
        return None
    if held[-1].shape == own.shape:
        return held[-1]
    if any(row.ndim < 2 for row in held):
        return None
    shapes = {row.shape[:1] + row.shape[2:] for row in held}
    return torch.cat(held, dim=1) if len(shapes) == 1 else None


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
