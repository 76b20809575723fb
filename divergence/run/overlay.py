"""A run with other tensors at some of its records, which lie in memory; the rest is the run's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run, View

if TYPE_CHECKING:
    import torch

    from divergence.run.record import Coordinates, Record


class Overlay(View):
    """``run`` with other tensors at some of its records. ``records`` lists the changed ones alone,
    or with ``whole`` all; ``find`` and ``read`` know all."""

    def __init__(
        self, run: Run, changed: Iterable[tuple[Record, torch.Tensor]], *, whole: bool = False
    ) -> None:
        self._changed: dict[Coordinates, torch.Tensor] = {}
        records: dict[Coordinates, Record] = {}
        for record, tensor in changed:
            records[record.coordinates] = msgspec.structs.replace(
                record, xxh3=digest_tensor(tensor), shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )  # fmt: skip
            self._changed[record.coordinates] = tensor
        together = list(records.values())
        if whole:
            together = [records.get(record.coordinates, record) for record in run.records]
        super().__init__(run, together)

    def stored(self, record: Record) -> Iterable[Record]:
        """The record, unless it lies in memory: what does has no checksum either."""
        return () if record.coordinates in self._changed else (record,)

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site): the changed one where there is one."""
        return super().find(coordinates) or self.run.find(coordinates)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor as it is here."""
        tensor = self._changed.get(record.coordinates)
        return self.run.read(record, verify=verify) if tensor is None else tensor
