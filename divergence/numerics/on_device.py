"""The sums of a pair on an accelerator: torch operators over chunks that are sent there.

The definitions are those of numerics.sums and numerics.ulp, and so are the types that are
filled: what is made of the sums cannot tell where they were added up. Everything is float64; a
device without it is refused, since a float32 sum over a million elements is not the metric
(float32 inside small blocks is what numpy's loops do, and takes a host's order of passes).
Every dtype that torch can widen there is read, complex ones as their components.

A chunk is 4 million elements a side. It goes by way of page-locked memory where the device has
streams and events: only from there do copies run beside arithmetic. Tensors that fit twice into the
budget stay on the device between the pass for the sums and the one for the distances.

``summarize_on_device`` gives a tensor's statistics on the device that it lies on: nothing is
copied, nothing waited for. The definition is that of numerics.summary. Sums run in
float64 where the device has it, and agree with the host's to 1e-12 of the rms; else in float32 over
values scaled by the largest magnitude, to about 1e-6 of the rms, and integers beyond 2^24 are
rounded first. ``summaries_of`` brings the numbers of many tensors to the host together.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from divergence.errors import UsageError
from divergence.numerics.arrays import as_tensor
from divergence.numerics.formats import Format
from divergence.numerics.sketches import sum_dtype_name
from divergence.numerics.summary import Summary, summary_of
from divergence.numerics.sums import Grid, Rows, Sums, add_row_sums, row_sinks, usual_rows
from divergence.numerics.ulp import MOST_STEPS, Tail, byte_keys

_CHUNK = 1 << 22
_KEPT_BYTES = 1 << 30
_FEW = 1 << 14
_STAGES = threading.local()


def open_device(name: str) -> torch.device:
    """The device called ``name``, shown to add up in float64. UsageError where it cannot."""
    try:
        device = torch.device(name)
        local = os.environ.get("LOCAL_RANK")
        if device.type != "cpu" and device.index is None and local is not None:
            count = torch.get_device_module(device).device_count()
            device = torch.device(device.type, int(local) % max(1, count))
        ones = torch.ones(2, dtype=torch.float64, device=device)
        if float((ones * (1 + 2.0**-40)).sum()) != 2 + 2.0**-39:
            raise TypeError("it rounds float64")
    except (RuntimeError, TypeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"cannot measure on {name}: {reason}",
            hint="the metrics are added up in float64: --device cpu, or an accelerator that has it",
        ) from error
    return device


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on the device; by way of this thread's page-locked buffers where that pays."""
    if tensor.device.type != "cpu" or not _has_streams(device):
        return tensor.to(device)
    stages = getattr(_STAGES, "by_device", None)
    if stages is None:
        stages = _STAGES.by_device = {}
    if device not in stages:
        try:
            stages[device] = _Stage(device)
        except RuntimeError:  # no page-locked memory is to be had
            stages[device] = None
    stage = stages[device]
    return tensor.to(device) if stage is None else stage.send(tensor)


def _has_streams(device: torch.device) -> bool:
    """Events tell when a buffer may be filled again: torch.cuda, torch.xpu and torch_npu do."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and all(hasattr(module, n) for n in ("Event", "current_stream"))


class _Stage:
    """Two page-locked buffers in turn: one is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        empty = torch.empty(0, dtype=torch.uint8)
        self._buffers = [torch.empty(1, dtype=torch.uint8, pin_memory=True), empty]
        self._sent = [self._module.Event(), self._module.Event()]
        self._turn = 0

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        self._turn = 1 - self._turn
        turn, flat = self._turn, tensor.contiguous().view(-1).view(torch.uint8)
        self._sent[turn].synchronize()
        if len(self._buffers[turn]) < len(flat):
            self._buffers[turn] = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
        stage = self._buffers[turn][: len(flat)]
        stage.copy_(flat)
        there = stage.to(self._device, non_blocking=True)
        self._sent[turn].record(self._module.current_stream(self._device))
        return there.view(tensor.dtype).view(tensor.shape)


class OnDevice:
    """One pair's rows on a device, in chunks."""

    def __init__(self, a: Grid, b: Grid, base: Grid | None, device: torch.device) -> None:
        self._a, self._b, self._base, self._device = a, b, base, device
        total = sum(grid.array.nbytes for grid in (a, b))
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = (
            {} if total <= _KEPT_BYTES else None
        )

    def gather(self, sums: Sums, rows: Rows) -> Sums:
        """Run ``sums`` over ``rows``."""
        for part, x, y in self.chunks(rows):
            self._add(sums, part, x, y)
        return sums

    def chunks(self, rows: Rows) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
        """(row numbers, a, b) as they are stored, on the device."""
        rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        count = max(1, _CHUNK // max(1, self._a.num_cols))
        for start in range(0, len(rows) if self._a.num_cols else 0, count):
            part = rows[start : start + count]
            name = (int(part[0]), int(part[-1]))
            if self._kept is not None and name in self._kept:
                x, y = self._kept[name]
            else:
                x, y = (_rows_there(grid, part, self._device) for grid in (self._a, self._b))
                if self._kept is not None:
                    self._kept[name] = (x, y)
            yield part, x, y

    def distances(self, form: Format, **which: Any) -> _Counts:
        """The counting of their distances in ``form``, for divergence.numerics.ulp."""
        return _Counts(self, form, **which)

    def _add(self, sums: Sums, rows: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> None:
        a, b = x.double(), y.double()
        keep = a.isfinite() & b.isfinite()
        num_finite = int(keep.sum())
        if num_finite < a.numel():
            bad = ~keep.all(1)  # mostly few rows
            x, y, bad = a[bad].cpu(), b[bad].cpu(), bad.cpu()
            sums.count_nonfinite(rows[bad.numpy()], x.numpy(), y.numpy())
            a, b = a.masked_fill(~keep, 0.0), b.masked_fill(~keep, 0.0)
        d = a - b
        squares, d_squares, products = a.square(), d.square(), a * d
        whole = torch.stack([products.sum(), products.square().sum(), d.abs().max()]).tolist()
        sums.num_finite += num_finite
        sums.product += whole[0]
        sums.product_squares += whole[1]
        sums.row_a[rows] += squares.sum(1).cpu().numpy()
        sums.row_d[rows] += d_squares.sum(1).cpu().numpy()
        sums.row_finite[rows] |= keep.any(1).cpu().numpy()
        sums.col_a += squares.sum(0).cpu().numpy()
        sums.col_d += d_squares.sum(0).cpu().numpy()
        if whole[2] > sums.max_abs:
            at = int((d.abs() == whole[2]).view(-1).to(torch.uint8).argmax())
            row, col = divmod(at, self._a.num_cols)
            sums.max_abs, sums.max_at = whole[2], int(rows[row]) * self._a.num_cols + col
        if self._base is not None:
            update = a - _rows_there(self._base, rows, self._device).double()
            update = update.masked_fill(~(keep & update.isfinite()), 0.0)
            sums.row_update[rows] += update.square().sum(1).cpu().numpy()


class _Counts:
    """Ulp distances in formats of up to 32 bits: in int64 every distance is itself."""

    def __init__(
        self, pair: OnDevice, form: Format, *, rows: Rows, smallest_key: int, check: bool
    ) -> None:
        self._pair, self._form, self._rows = pair, form, rows
        self._smallest_key, self._check = smallest_key, check

    def guess(self) -> tuple[int, int] | None:
        """Guess from every n-th element of the first chunk."""
        for _, x, y in self._pair.chunks(self._rows):
            distance, _ = self._block(x, y)
            if distance.numel() <= _FEW:
                return None
            sample = distance.view(-1)[:: distance.numel() // _FEW].cpu().numpy()
            low, high = np.quantile(sample, [0.97, 0.999], method="lower")
            return int(low), int(high)
        return None

    def count(self, bound: int, steps: range, *, threads: int) -> list[Tail]:
        """All distances; ``threads`` are the device's own."""
        tail = Tail(bound, steps)
        assert len(steps) <= MOST_STEPS
        for _, x, y in self._pair.chunks(self._rows):
            distance, keep = self._block(x, y)
            wanted = [keep.sum(), (distance > 1).sum(), distance.max(), (distance == bound).sum()]
            wanted += [(distance > step).sum() for step in steps]
            counted, over_1, largest, at, *over = torch.stack(wanted).tolist()
            tail.num_counted += counted
            tail.num_over_1 += over_1
            tail.largest = max(tail.largest, largest)
            if steps:
                tail.num_over += over
            else:
                tail.num_at_bound += at
                tail.beyond.append(distance[distance > bound].cpu().numpy())
        return [tail]

    def _block(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances, 0 where left out, and which count."""
        p, q = self._keys(x), self._keys(y)
        keep = p.abs() >= self._smallest_key
        if self._check:
            keep &= x.double().isfinite() & y.double().isfinite()
        return torch.where(keep, (p - q).abs(), 0), keep

    def _keys(self, values: torch.Tensor) -> torch.Tensor:
        """See divergence.numerics.ulp.key_array."""
        form = self._form
        values = values.to(form.torch_dtype)
        if form.itemsize == 1:
            table = torch.from_numpy(byte_keys(form).astype(np.int64)).to(values.device)
            return table[values.view(torch.uint8).long()]
        bits = values.view({2: torch.int16, 4: torch.int32}[form.itemsize]).long()
        magnitude = bits & (2 ** (8 * form.itemsize - 1) - 1)
        return torch.where(bits < 0, -magnitude, magnitude)


def _rows_there(grid: Grid, rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Some rows of a grid as they are stored, on the device."""
    gapless = int(rows[-1]) - int(rows[0]) == len(rows) - 1
    part = grid.array[int(rows[0]) : int(rows[-1]) + 1] if gapless else grid.array[rows]
    return sent(as_tensor(part), device)


def against_on_device(
    grids: Sequence[Grid], kept: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add up what divergence.numerics.pairs adds up of two sides, the truth, and the block's input
    where there is one: the rows' sums (13, T), which rows are sinks (T,), the columns (6, D)."""
    count, columns = grids[0].num_rows, grids[0].num_cols
    rows = max(1, _CHUNK // max(1, columns))
    sums, channels = np.full((13, count), np.nan), np.zeros((6, columns))
    for start in range(0, count, rows):
        numbers = np.arange(start, min(start + rows, count))
        x, y, r, *rest = (_rows_there(grid, numbers, device).double() for grid in grids)
        out = torch.full((13, len(r)), math.nan, dtype=torch.float64, device=device)
        add_row_sums(x, y, r, rest[0] if rest else None, out, lambda a, b: (a * b).sum(1))
        sums[:, numbers] = out.cpu().numpy()
    sink = row_sinks(np.sqrt(sums[0]), kept)
    usual = np.flatnonzero(usual_rows(sums, kept, sink))
    for start in range(0, len(usual), rows):
        numbers = usual[start : start + rows]
        x, y, r = (_rows_there(grid, numbers, device).double() for grid in grids[:3])
        squares = [part.square() for part in (x - r, y - r, x - y, r)]
        channels[:4] += torch.stack([part.sum(0) for part in squares]).cpu().numpy()
        largest = torch.stack([part.amax(0) for part in squares[:2]]).cpu().numpy()
        np.maximum(channels[4:], largest, out=channels[4:])
    return sums, sink, channels


Statistics = tuple["torch.Tensor", "torch.Tensor"]
"""Floats (min, max, Σx / top, Σ(x / top)², top) and counts (finite, nan, +inf, -inf, zero)."""

_BLOCK = 1 << 25
"""Elements widened at a time: 256 MiB."""


def statistics_on_device(tensor: torch.Tensor) -> Statistics:
    """The numbers of one tensor, where it lies."""
    wide = getattr(torch, sum_dtype_name(str(tensor.device)))
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = flat.to(torch.complex128 if wide == torch.float64 else flat.dtype).abs()
    if not len(flat):
        nothing = torch.tensor([math.inf, -math.inf, 0.0, 0.0, 0.0], dtype=wide, device=flat.device)
        return nothing, torch.zeros(5, dtype=torch.int64, device=flat.device)
    pieces = torch.split(flat, _BLOCK)
    low = torch.stack([_extreme(piece.to(wide), math.inf).amin() for piece in pieces]).amin()
    high = torch.stack([_extreme(piece.to(wide), -math.inf).amax() for piece in pieces]).amax()
    top = torch.maximum(low.abs(), high.abs())
    # a scale of 1 where nothing is finite, or all is zero
    scale = torch.where(torch.isfinite(top) & (top > 0), top, torch.ones_like(top))
    sums = torch.stack([_sums(piece.to(wide), scale) for piece in pieces]).sum(0)
    counts = torch.stack([_counts(piece) for piece in pieces]).sum(0)
    return torch.stack([low, high, sums[0], sums[1], scale]), counts


def _extreme(values: torch.Tensor, instead: float) -> torch.Tensor:
    return torch.where(torch.isfinite(values), values, instead)


def _sums(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scaled = torch.where(torch.isfinite(values), values, 0.0) / scale
    return torch.stack([scaled.sum(), (scaled * scaled).sum()])


def _counts(piece: torch.Tensor) -> torch.Tensor:
    if piece.is_floating_point() and piece.element_size() == 1:
        piece = piece.to(torch.float32)  # float8 has no comparisons of its own
    finite, nan = torch.isfinite(piece), torch.isnan(piece)
    up, down = piece == math.inf, piece == -math.inf
    return torch.stack([mask.sum() for mask in (finite, nan, up, down, piece == 0)])


def summaries_of(statistics: Sequence[Statistics]) -> list[Summary]:
    """The summaries, fetched from the device in two transfers."""
    if not statistics:
        return []
    floats = torch.stack([part for part, _ in statistics]).cpu().tolist()
    counts = torch.stack([part for _, part in statistics]).cpu().tolist()
    summaries = []
    for (low, high, total, squares, scale), (count, *others) in zip(floats, counts, strict=True):
        num = max(1, count)
        mean, rms = scale * total / num, scale * math.sqrt(squares / num)
        summaries.append(summary_of(count, low, high, mean, rms, *others))
    return summaries
