"""A tensor on its way into a run, handed over once whatever number of sites it was seen at.

A keeper (recording.keeper) makes it; the writer completes it: what the keeper left open
(digest, summary, place) is found from its bytes, which are then let go. An item without bytes
stores none: its keeper has filled in all that its records will say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.numerics.formats import FORMATS, format_of

if TYPE_CHECKING:
    import torch

    from divergence.numerics.summaries.sketch import SumDtype
    from divergence.run.schema.call import Call
    from divergence.run.schema.record import PassName, Place, Placement, Sketch, Summary
    from divergence.run.writing.buffer import Slot

__all__ = ["CapturedTensor", "Reduced"]


class CapturedTensor:
    """``tensor``: a host tensor that nobody writes to any more, or the shape of one whose bytes
    are copied into ``slot``. ``num_bytes``, ``dtype`` and ``shape`` stay when the bytes go."""

    __slots__ = ("_tensor", "digest", "dtype", "fold", "num_bytes", "place", "placement", "reduced",
                 "shape", "sketch", "slot", "summary")  # fmt: skip

    def __init__(self, tensor: torch.Tensor, slot: Slot | None = None) -> None:
        self._tensor = tensor if slot is None else None
        self.slot = slot
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.dtype = _NAMES.get(tensor.dtype) or _named(tensor.dtype)
        self.shape = tuple(tensor.shape)
        self.digest: str | None = None
        self.fold: str | None = None
        self.summary: Summary | None = None
        self.sketch: Sketch | None = None
        self.place: Place | None = None
        self.reduced: Reduced | None = None
        self.placement: dict[str, str] | None = None  # of a DTensor, by axis of its mesh

    @property
    def tensor(self) -> torch.Tensor | None:
        """The bytes as a tensor, complete; None where there are none (any more)."""
        if self.slot is None:
            return self._tensor
        self.slot.bytes()
        return self.slot.tensor(FORMATS[self.dtype].torch_dtype, self.shape)

    @tensor.setter
    def tensor(self, tensor: torch.Tensor | None) -> None:
        """None: let the bytes go. A place in the ring is another's once nobody holds its Slot."""
        self._tensor, self.slot = tensor, None

    @property
    def has_bytes(self) -> bool:
        return self.slot is not None or self._tensor is not None


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a device made of a tensor, still there: ``sums`` of the fold digest, ``statistics`` and
    ``projections`` where they are wanted."""

    sums: tuple[torch.Tensor, int]
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None
    projections: torch.Tensor | None = None
    sum_dtype: SumDtype = "float64"


if TYPE_CHECKING:
    Put = tuple[
        CapturedTensor, int, PassName, int, int, str, int, tuple[int, ...] | None, Call | None,
        tuple[Placement, ...] | None,
    ]  # fmt: skip
    """What the writer was given: a tensor, the bytes of its own, and the fields of its record."""

_NAMES: dict[torch.dtype, str] = {}
"""Looked up for every tensor: filled as dtypes are met."""


def _named(dtype: torch.dtype) -> str:
    name = _NAMES[dtype] = format_of(dtype).name
    return name
