"""Overlay: a run in which some tensors are other ones, without a byte written.

What an experiment changes is read from memory, everything else from the run below it. A
changed record carries the checksum of its own bytes, so that a change which rounding undoes
is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from divergence.run.reader import Run
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.record import Coordinates, Record

if TYPE_CHECKING:
    import torch

__all__ = ["Overlay"]


class Overlay(Run):
    """``base`` with other tensors at some of its records. ``records`` lists the changed ones
    alone; ``find`` and ``read`` know all."""

    def __init__(self, base: Run, changed: Iterable[tuple[Record, torch.Tensor]]) -> None:
        self._base = base
        self._changed: dict[Coordinates, torch.Tensor] = {}
        records = []
        for record, tensor in changed:
            assert tuple(tensor.shape) == record.shape, record.site
            records.append(msgspec.structs.replace(record, xxh3=digest_tensor(tensor)))
            self._changed[record.coordinates] = tensor
        super().__init__(base.path, base.manifest, records)

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site): the changed one where there is one."""
        return super().find(coordinates) or self._base.find(coordinates)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor as it is here."""
        tensor = self._changed.get(record.coordinates)
        return self._base.read(record, verify=verify) if tensor is None else tensor
