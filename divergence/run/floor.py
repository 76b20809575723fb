"""The floor that a run carries: sums of its own error e = a - R, R its own float64 pass.

The pass ``floor`` holds them of every output of a block, and of the modules outside blocks, that is
a float tensor of rows. By site and group of prompts, step 0 is one tensor (rows, 6), the rows of
the free pass's forwards one after the other, by step, as far as the float64 pass came. Of a block's
output, step 1 is one tensor (2, D), over all forwards of all prompts, filed under the first group.

Roots are stored, in bfloat16: it has float32's range, and 8 bits are ample for statistics.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from divergence.run.reader import Run
from divergence.run.schema.contents import each_of
from divergence.run.schema.record import Record

__all__ = ["COLUMNS", "OwnFloor", "floor_of"]

COLUMNS = ("error", "size", "update", "fourth", "scaled", "scaled_fourth")
"""By row: ‖e‖, ‖a‖, ‖a - x‖ (x what entered the block; elsewhere ‖a‖), (Σe⁴)^¼, ‖e/s‖,
(Σ(e/s)⁴)^¼, s each channel's rms in a over all forwards of the site."""

_Key = tuple[int, str]
"""(first sample of the group, site)."""


def floor_of(run: Run) -> OwnFloor | None:
    """The floor that ``run`` carries; None where it carries none."""
    return OwnFloor(run) if "floor" in run.manifest.plan.passes else None


class OwnFloor:
    """Reads the rows of one run's floor, forward by forward."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._records: dict[_Key, Record] = {}
        self.channels: dict[str, Record] = {}
        """By site: ‖e‖ and ‖a‖ of each channel, (2, D)."""
        for record in each_of(run.records):
            if record.pass_ == "floor" and record.step == 0:
                self._records[record.sample, record.site] = record
            elif record.pass_ == "floor":
                self.channels[record.site] = record
        self._steps: dict[_Key, dict[int, int]] = defaultdict(dict)
        """By step, the number of rows."""
        for record in each_of(run.records):
            key = record.sample, record.site
            if record.pass_ == "free" and key in self._records and record.shape:
                self._steps[key][record.step] = record.numel // max(1, record.shape[-1])
        self._read: tuple[_Key, np.ndarray] | None = None

    def rows(self, own: Record) -> np.ndarray | None:
        """``COLUMNS`` of each row (T, 6) of a record of the run's free pass; None where the floor
        does not hold it."""
        key = own.sample, own.site
        record = self._records.get(key)
        if record is None or record.shape[1:] != (len(COLUMNS),) or not self.run.has_bytes(record):
            return None
        if self._read is None or self._read[0] != key:
            self._read = key, self.run.read(record).double().numpy()
        steps = self._steps[key]
        start = sum(num for step, num in steps.items() if step < own.step)
        stop = start + steps.get(own.step, 0)
        return self._read[1][start:stop] if start < stop <= record.shape[0] else None
