"""The sums of a run's own error, made while its float64 pass runs (run.floor).

A's recorded tensor is read as its inputs are; the float64 one goes on to where it is stored, if it
is. The sums are written when the pass is over, into shards of their own: a golden takes them along
and leaves the tensors behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from divergence.numerics.formats import format_named
from divergence.recording.hooks.sink import Sink
from divergence.run.reader import Run
from divergence.run.schema.contents import each_of
from divergence.run.schema.manifest import ModuleNote
from divergence.run.schema.record import Record
from divergence.run.schema.site import module_of
from divergence.run.writing.captured_tensor import CapturedTensor
from divergence.run.writing.writer import RunWriter

__all__ = ["FloorSink"]


class FloorSink:
    """Takes the tensors of the float64 pass. ``own``: the run whose free pass it is anchored to;
    ``sink``: where the tensors go, or None where none is to be kept."""

    def __init__(self, own: Run, notes: Mapping[str, ModuleNote], sink: Sink | None) -> None:
        self._own, self._notes, self._sink = own, notes, sink
        self._rows: dict[tuple[int, str], dict[int, np.ndarray]] = defaultdict(dict)
        self._channels: dict[str, np.ndarray] = {}
        self._orders: dict[str, int] = {}
        self._free: dict[str, dict[tuple[int, int], Record]] = defaultdict(dict)
        """By site, and by prompt and step, what has a floor."""
        for record in each_of(own.records):
            note = notes.get(module_of(record.site))
            outer = note is not None and note.role != "inner" and ":out" in record.site
            rows = len(record.shape) >= 2 and record.numel > 0
            rows = rows and format_named(record.dtype).kind == "float"
            if record.pass_ == "free" and outer and rows and own.has_bytes(record):
                self._free[record.site][record.sample, record.step] = record
        self._scales: dict[str, np.ndarray] = {}

    def put(
        self, item: CapturedTensor, *, sample: int, step: int, site: str, order: int, **rest: Any
    ) -> None:
        record = self._free[site].get((sample, step))
        if record is not None and item.tensor is not None:
            with _disable_current_modes():
                self._rows[sample, site][step] = self._sums(record, item.tensor)
            self._orders[site] = order
        if self._sink is not None:
            self._sink.put(item, sample=sample, step=step, site=site, order=order, **rest)

    def _sums(self, record: Record, truth: torch.Tensor) -> np.ndarray:
        """Of each row, and into the channels'."""
        columns = record.shape[-1]
        num_rows = record.numel // columns
        if tuple(truth.shape) != record.shape:
            return np.full((num_rows, 6), np.nan)
        a = self._read(record)
        update = a
        if self._is_block(record.site):
            path = record.site.partition(":")[0]
            entered = self._own.find(("free", record.sample, record.step, f"{path}:in"))
            if entered is not None and entered.shape == record.shape:
                update = a - self._read(entered)
        error = a - truth.double().reshape(-1, columns).numpy()
        with np.errstate(all="ignore"):
            squares = np.square(error)
            scaled = np.square(error / self._scale(record.site, columns))
            if self._is_block(record.site):
                good = np.isfinite(squares).all(axis=1)
                sums = np.stack([squares[good].sum(axis=0), np.square(a[good]).sum(axis=0)])
                self._channels[record.site] = self._channels.get(record.site, 0.0) + sums
            seconds = [squares, np.square(a), np.square(update), scaled]
            error2, size, updated, scaled2 = (np.sqrt(part.sum(axis=1)) for part in seconds)
            fourth, scaled4 = (np.square(x).sum(axis=1) ** 0.25 for x in (squares, scaled))
        return np.stack([error2, size, updated, fourth, scaled2, scaled4], axis=1)

    def _scale(self, site: str, columns: int) -> np.ndarray:
        """Each channel's rms over all forwards; of a channel that is 0 throughout any number."""
        if site not in self._scales:
            total, count = np.zeros(columns), 0
            for record in self._free[site].values():
                if record.shape[-1] == columns:
                    total += np.square(np.nan_to_num(self._read(record))).sum(axis=0)
                    count += record.numel // columns
            rms = np.sqrt(total / max(1, count))
            self._scales[site] = np.where(rms > 0, rms, 1.0)
        scale = self._scales[site]
        return scale if len(scale) == columns else np.ones(columns)

    def _read(self, record: Record) -> np.ndarray:
        rows: np.ndarray = self._own.read(record).double().reshape(-1, record.shape[-1]).numpy()
        return rows

    def _is_block(self, site: str) -> bool:
        note = self._notes.get(module_of(site))
        return note is not None and note.role == "block" and site.endswith(":out")

    def write(self, writer: RunWriter) -> bool:
        """The records of the pass ``floor``, by site and prompt. False where there is none."""
        writer.flush()  # behind all shards of tensors
        for (sample, site), steps in self._rows.items():
            rows = np.concatenate([steps[step] for step in sorted(steps)])
            self._put(writer, rows, sample=sample, step=0, site=site)
        first = min((sample for sample, _ in self._rows), default=0)
        for site, sums in self._channels.items():
            self._put(writer, np.sqrt(sums), sample=first, step=1, site=site)
        return bool(self._rows)

    def _put(
        self, writer: RunWriter, values: np.ndarray, *, sample: int, step: int, site: str
    ) -> None:
        tensor = torch.from_numpy(values).to(torch.bfloat16)
        writer.put(
            CapturedTensor(tensor), pass_="floor", sample=sample, step=step, site=site,
            order=self._orders[site],
        )  # fmt: skip
