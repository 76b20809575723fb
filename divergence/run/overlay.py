"""A run with other tensors at some of its records, which lie in memory; the rest is the run's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run

if TYPE_CHECKING:
    import torch

    from divergence.run.record import Coordinates, Record


class Overlay(Run):
    """``base`` with other tensors at some of its records. ``records`` lists the changed ones alone,
    or with ``whole`` all; ``find`` and ``read`` know all."""

    def __init__(
        self, base: Run, changed: Iterable[tuple[Record, torch.Tensor]], *, whole: bool = False
    ) -> None:
        self._base = base
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
            together = [records.get(record.coordinates, record) for record in base.records]
        super().__init__(base.path, base.manifest, together, torn_tail=base.torn_tail)
        self._fallback = base.fallback

    @property
    def far(self) -> bool:
        """Do the bytes of its base come over a network?"""
        return self._base.far

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site): the changed one where there is one."""
        return super().find(coordinates) or self._base.find(coordinates)

    def has_bytes(self, record: Record) -> bool:
        """Can the record's tensor be read?"""
        return record.coordinates in self._changed or self._base.has_bytes(record)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor as it is here."""
        tensor = self._changed.get(record.coordinates)
        return self._base.read(record, verify=verify) if tensor is None else tensor

    def check(self, record: Record) -> None:
        """What lies in memory has no checksum; the rest is checked in its base."""
        if record.coordinates not in self._changed:
            self._base.check(record)

    def expect(self, records: Iterable[Record]) -> None:
        """Announces to its base what will be read."""
        self._base.expect(record for record in records if record.coordinates not in self._changed)

    def will_read(self, record: Record) -> None:
        """Has its base fetch a record's bytes."""
        if record.coordinates not in self._changed:
            self._base.will_read(record)

    def release(self, records: Iterable[Record]) -> None:
        """Lets the records' bytes leave memory in its base."""
        self._base.release(record for record in records if record.coordinates not in self._changed)
