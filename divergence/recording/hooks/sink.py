"""What a recorder is given: where records go, and the inputs that it puts in place."""

from __future__ import annotations

from typing import Protocol

import torch

from divergence.run.schema.record import Call, PassName, Placement
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["Anchor", "Sink"]


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
