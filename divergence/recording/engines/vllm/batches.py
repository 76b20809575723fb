"""Whose rows they are: what vLLM's scheduler put into one forward, as samples and steps.

vLLM runs the tokens of all scheduled requests as rows (N, ...): request after request, without
padding, in an order of its own. transformers runs a batch as (B, T, ...), with pads before shorter
prompts. A ``StepRows`` is the rows of one forward that belong to one step, laid out as transformers
does; where nothing was computed (pads, prompts that other forwards run) it holds zeros.

A forward has one part for each step in it: usually one; several where the scheduler lets some
prompts wait and so runs their prefill beside other prompts' decode steps. ``Gathered`` then puts
the parts of a step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.run.schema.manifest import SampleTokens
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["EngineForward", "Gathered", "StepRows", "alone", "forward_of"]

Shown = Callable[[torch.Tensor], torch.Tensor | None]
"""A hook on values in transformers' form: what it puts in their place; None for nothing."""
Through = Callable[[Shown, torch.Tensor], torch.Tensor | None]
"""Shows rows (N, ...) to such a hook; gives the rows with what it put there; None for nothing."""


def alone(shown: Shown, rows: torch.Tensor) -> torch.Tensor | None:
    """Through of one prompt: (N, ...) is (1, N, ...)."""
    new = shown(rows.unsqueeze(0))
    return None if new is None else new[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one forward that belong to one step."""

    step: int
    members: tuple[int, ...]
    """Places in the batch of the prompts that are in it."""
    shape: tuple[int, int]
    """(B, T) of the whole batch at this step."""
    rows: torch.Tensor
    """(n,) which rows of the forward they are."""
    places: torch.Tensor
    """(n,) where in (B · T) each of them belongs."""
    in_order: bool
    """These are all rows of the forward and all of the batch, one after the other."""

    def spread(self, tensor: torch.Tensor, *, fill: int = 0) -> torch.Tensor:
        """(N, ...) → (B, T, ...)"""
        batch = tensor
        if not self.in_order:
            batch = tensor.new_full((self.shape[0] * self.shape[1], *tensor.shape[1:]), fill)
            batch[self.places] = tensor[self.rows]
        return batch.reshape(*self.shape, *tensor.shape[1:])

    def put(self, batch: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (N, ...) with the values of ``batch`` (B, T, ...) in this part's rows."""
        values = batch.flatten(0, 1)
        if self.in_order:
            return values
        tensor = tensor.clone()
        tensor[self.rows] = values[self.places].to(tensor.dtype)
        return tensor


@dataclass(frozen=True, slots=True)
class EngineForward:
    """One forward of vLLM."""

    parts: tuple[StepRows, ...]
    """By step."""
    last: tuple[StepRows, ...]
    """The same of its requests' last rows, of which vLLM computes logits."""
    requests: tuple[int, ...]
    """The place in the batch of each request, in the order of rows."""
    num_rows: int


def forward_of(runner: Any, samples: Sequence[SampleTokens]) -> EngineForward:
    """The forward that vLLM's worker is about to run. A request is named by its place in the batch.

    Raises ModelError for rows that are no whole prompt and no decode step.
    """
    batch, ends = runner.input_batch, runner.query_start_loc.np
    steps: dict[int, list[tuple[int, int, int]]] = {}  # step → (place, number, first row)
    requests = tuple(int(name.partition("-")[0]) for name in batch.req_ids)
    for number, place in enumerate(requests):
        count = int(ends[number + 1] - ends[number])
        done, length = int(batch.num_computed_tokens_cpu[number]), len(samples[place].prompt_ids)
        expected = 1 if done else length
        if count != expected or 0 < done < length:
            raise ModelError(
                f"vLLM runs {count} tokens of prompt {place} behind {done}, where {expected} were "
                "expected: its scheduler has divided the prompt, or begun it again",
                hint="a larger --engine-option kv_cache_gib, or fewer prompts in a batch",
            )
        step = done - length + 1 if done else 0
        steps.setdefault(step, []).append((place, number, int(ends[number])))
    first = samples[0]
    size = len(samples)
    padded = first.num_padded
    parts, last = [], []
    for step, prompts in sorted(steps.items()):
        rows: list[int] = []
        places: list[int] = []
        for place, _, start in prompts:
            count = 1 if step else len(samples[place].prompt_ids)
            begin = place if step else place * padded + samples[place].num_left_pad
            rows += range(start, start + count)
            places += range(begin, begin + count)
        members = tuple(place for place, _, _ in prompts)
        shape = size, 1 if step else padded
        parts.append(_part(step, members, shape, rows, places, num_rows=int(ends[len(requests)])))
        numbers = [number for _, number, _ in prompts]
        last.append(_part(step, members, (size, 1), numbers, list(members), num_rows=len(requests)))
    return EngineForward(tuple(parts), tuple(last), requests, int(ends[len(requests)]))


def _part(
    step: int, members: tuple[int, ...], shape: tuple[int, int], rows: list[int],
    places: list[int], *, num_rows: int,
) -> StepRows:  # fmt: skip
    whole = list(range(shape[0] * shape[1]))
    return StepRows(
        step=step, members=members, shape=shape, rows=torch.tensor(rows),
        places=torch.tensor(places), in_order=rows == places == whole and num_rows == len(whole),
    )  # fmt: skip


class Gathered:
    """A sink for one step that several forwards run: each gives the rows of its own prompts."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        """The prompts that are there."""
        self.part: tuple[int, ...] = ()
        """Those of the present forward."""
        self.tensors: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {}
        """By site: tensor (B, ...), token positions where not all."""

    def put(
        self,
        item: CapturedTensor,
        *,
        site: str,
        positions: tuple[int, ...] | None = None,
        **_: object,
    ) -> None:
        tensor = item.tensor
        assert tensor is not None  # a copy of every byte was kept
        if site not in self.tensors:
            self.tensors[site] = tensor.clone(), positions
            return
        rows = list(self.part)
        self.tensors[site][0][rows] = tensor[rows]
