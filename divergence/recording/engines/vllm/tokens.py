"""The tokens that vLLM's requests are fed, chosen as transformers' batches choose theirs.

Each prompt is fed its greedy choice, or the recorded token; once it has ended it is fed padding
while others of its batch go on, so that all make equally many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from divergence.errors import ModelError
from divergence.recording.engines.generate import GroupResult, control

__all__ = ["Tokens"]


class Tokens:
    """Of ``num`` prompts, ``count`` each. ``forced``: what to feed; ``ends``: after which a prompt
    has ended; ``agree``: makes several ranks feed the same."""

    def __init__(
        self,
        forced: list[list[int]] | None,
        *,
        num: int,
        count: int,
        pad: int,
        ends: set[int],
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        rows = [None] * num if forced is None else [[row] for row in forced]
        self._controls = [control(row, count, ends, None) for row in rows]
        self._fed: list[list[int]] = [[] for _ in rows]
        self._count, self._pad, self._ends, self._agree = count, pad, ends, agree

    def choose(self, places: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, V) of the prompts at ``places`` → what lets vLLM's sampler no other choice."""
        return torch.cat([
            self._only(place, row)
            for place, row in zip(places, logits.float().split(1), strict=True)
        ])  # fmt: skip

    def _only(self, place: int, scores: torch.Tensor) -> torch.Tensor:
        token = self._pad
        if self._num_steps(place) is None:
            token = int(self._controls[place](None, scores).argmax())
        if self._agree is not None:
            token = self._agree([token])[0]
        self._fed[place].append(token)
        only = torch.full_like(scores, float("-inf"))
        only[0, token] = 0.0
        return only

    def _num_steps(self, place: int) -> int | None:
        """Up to the prompt's end; None where it has not ended."""
        fed = self._fed[place]
        return next((step + 1 for step, token in enumerate(fed) if token in self._ends), None)

    @property
    def done(self) -> bool:
        """Has each prompt ended, and made the steps of those that ended last?"""
        found = [self._num_steps(place) for place in range(len(self._fed))]
        known = [num for num in found if num is not None]
        return len(known) == len(found) and min(map(len, self._fed)) >= max(known)

    def result(self) -> GroupResult:
        """Raises ModelError where vLLM made fewer forwards than were asked for."""
        ended = [self._num_steps(place) or self._count for place in range(len(self._fed))]
        count = max(ended) if self.done else self._count
        made = min(map(len, self._fed))
        if made < count:
            raise ModelError(
                f"vLLM made {made} forwards where {count} tokens were to be fed",
                hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
            )
        return GroupResult(
            [fed[:count] for fed in self._fed],
            [[choice[0] for choice in one.chosen[:count]] for one in self._controls],
            [[] for _ in self._fed],
            {token for one in self._controls for token in one.seen},
        )
