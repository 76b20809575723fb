"""A tensor on its way into a run, handed over once whatever number of sites it was seen at.

A keeper (divergence.capture.keep) makes it; the writer completes it: what the keeper left open
(digest, summary, place) is found from the bytes in ``tensor``, which is then let go. An item
without ``tensor`` stores no bytes: its keeper has filled in all that its records will say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.numerics.formats import format_of

if TYPE_CHECKING:
    import torch

    from divergence.run.record import Place, Sketch, Summary

__all__ = ["Item", "Reduced"]


class Item:
    """``tensor``: a host tensor that nobody writes to any more; ``num_bytes``, ``dtype`` and
    ``shape`` are its, and stay when it goes."""

    __slots__ = ("digest", "dtype", "fold", "num_bytes", "place", "reduced", "shape", "sketch",
                 "summary", "tensor")  # fmt: skip

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until the writer has taken it
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.dtype = format_of(tensor.dtype).name
        self.shape = tuple(tensor.shape)
        self.digest: str | None = None
        self.fold: str | None = None
        self.summary: Summary | None = None
        self.sketch: Sketch | None = None
        self.place: Place | None = None
        self.reduced: Reduced | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a device made of a tensor, still there: ``sums`` of the fold digest, ``statistics`` and
    ``projections`` where they are wanted."""

    sums: tuple[torch.Tensor, int]
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None
    projections: torch.Tensor | None = None
    sum_dtype: str = "float64"
