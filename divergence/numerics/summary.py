"""Summaries of tensors: extremes, mean, rms and counts, cheap enough for every capture.

One pass in cache-sized blocks. A block whose minimum and maximum are finite holds no
nan and no inf, so that one comparison decides for the fast path. Sums run in float64;
squares are taken in float32 only where the largest magnitude keeps them in range
(2^-40 .. 2^50), and are scaled by a power of two before squaring elsewhere, so that
1e30 in bfloat16 and subnormals come out right to 1e-6 relative.

numpy is imported on the first call, not with this module: records name ``Summary``.

``summarize_many``: a decode step leaves many small tensors of one shape. Summarised one by one,
each costs more interpreter time than arithmetic; stacked, they share it. The arithmetic is that of
summarize(): a row whose values are not all finite, or whose squares could leave float32's or
float64's range, goes there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from divergence.numerics.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

    from divergence.numerics.arrays import Tensor
    from divergence.numerics.sums import Grid, Kernel

    Buffer = bytes | bytearray | memoryview


_SAFE_LOW, _SAFE_HIGH = 2.0**-40, 2.0**50
"""Largest magnitudes between which float32 squares of a block neither overflow when summed
(2^100 · 2^15 < 2^128) nor lose to underflow (2^15 · 2^-126 against at least 2^-80)."""

_FLOAT64_LOW, _FLOAT64_HIGH = 2.0**-400, 2.0**400
"""The same for float64 squares."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Statistics of one tensor over its finite elements, accumulated in float64.

    ``min``, ``max``, ``mean``, ``rms``, ``absmax`` are None where no element is
    finite (an empty or all-NaN tensor). Counts are over all elements.
    Complex tensors are summarised through their magnitudes.
    """

    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    absmax: float | None
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0
    num_zero: int = 0


_COUNTS = ("num_nan", "num_posinf", "num_neginf", "num_zero")


def summary_of(
    count: int, low: float, high: float, mean: float, rms: float, *others: int
) -> Summary:
    """Make the summary of ``count`` finite elements; ``others``: how many are nan, +inf, -inf and
    zero."""
    counts = dict(zip(_COUNTS, others, strict=True))
    if not count:
        return Summary(min=None, max=None, mean=None, rms=None, absmax=None, **counts)
    top = max(abs(low), abs(high))
    return Summary(min=low, max=high, mean=mean, rms=rms, absmax=top, **counts)


def summarize(tensor: Tensor, *, kernel: Kernel = "numpy") -> Summary:
    """Summary of ``tensor`` (any device, any dtype of divergence.numerics.formats).

    mean = Σx / n and rms = sqrt(Σx² / n) over the n finite elements, in the tensor's own
    unit; mean is exact to 1e-6 of max(|mean|, 1e-9 rms). -0 counts as zero. nan and ±inf
    are counted and left out. Integers beyond 2^53 are rounded to float64 first. ``kernel``: see
    numerics.sums; what compiled loops do not read goes numpy's way.
    """
    import numpy as np

    from divergence.numerics.arrays import as_array, wide
    from divergence.numerics.sums import BLOCK, Grid, chosen, compute_dtype

    array = as_array(tensor)
    if array.dtype.kind == "c":
        array = np.abs(wide(array))
    grid = Grid(array.reshape(1, -1))
    if chosen(kernel, grid.format) == "compiled":
        summary = summarize_rows(grid)[0]
        if summary is not None:
            return summary
    dtype = compute_dtype(grid.format)
    buffer = np.empty(min(BLOCK, grid.num_cols), dtype)
    tally = _Tally()
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, grid.num_cols, BLOCK):
            tally.add(grid.load(slice(0, 1), slice(start, start + BLOCK), buffer))
    return tally.summary()


def summarize_rows(grid: Grid) -> list[Summary | None]:
    """Each row's summary from compiled loops; None where squares left float64's range. The grid
    must be readable (numerics.sums)."""
    from divergence.numerics.compiled import totals_of

    summaries: list[Summary | None] = []
    for (total, squares), (low, high), (count, *others) in totals_of(grid):
        top, num = max(abs(low), abs(high)) if count else 0.0, max(1, count)
        if top == 0.0 or _FLOAT64_LOW <= top <= _FLOAT64_HIGH:
            mean, rms = total / num, math.sqrt(squares / num)
            summaries.append(summary_of(count, low, high, mean, rms, *others))
        else:
            summaries.append(None)
    return summaries


class _Tally:
    """Running sums of one tensor: Σx is ``total`` · 2^``exponent``, Σx² is ``squares`` ·
    4^``exponent``, so that neither leaves float64's range whatever the values are."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self.total = self.squares = 0.0
        self.exponent = -2000  # below every float64
        self.count = self.num_nan = self.num_posinf = self.num_neginf = self.num_zero = 0

    def add(self, block: np.ndarray) -> None:
        import numpy as np

        from divergence.numerics.sums import row_dots

        low, high = float(block.min()), float(block.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            self.num_nan += int(np.count_nonzero(np.isnan(block)))
            self.num_posinf += int(np.count_nonzero(block == np.inf))
            self.num_neginf += int(np.count_nonzero(block == -np.inf))
            block = block[np.isfinite(block)].reshape(1, -1)
            if block.size == 0:
                return
            low, high = float(block.min()), float(block.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.count += block.size
        if low <= 0.0 <= high:
            self.num_zero += int(np.count_nonzero(block == 0))
        top = max(abs(low), abs(high))
        if top == 0.0:
            return
        exponent = 0
        if not _SAFE_LOW <= top <= _SAFE_HIGH:
            exponent = math.frexp(top)[1]
            block = np.ldexp(block.astype(np.float64), -exponent)
        if exponent > self.exponent:
            shift = max(self.exponent - exponent, -1100)
            self.total = math.ldexp(self.total, shift)
            self.squares = math.ldexp(self.squares, 2 * shift)
            self.exponent = exponent
        shift = exponent - self.exponent
        self.total += math.ldexp(float(block.sum(dtype=np.float64)), shift)
        squares = row_dots(block, block)[0]
        self.squares += math.ldexp(float(squares), 2 * shift)

    def summary(self) -> Summary:
        num = max(1, self.count)
        return summary_of(
            self.count,
            self.low,
            self.high,
            math.ldexp(self.total / num, self.exponent),
            math.ldexp(math.sqrt(self.squares / num), self.exponent),
            self.num_nan,
            self.num_posinf,
            self.num_neginf,
            self.num_zero,
        )


_STACKED = ("float64", "float32", "float16", "bfloat16")
_SMALL_BYTES = {name: FORMATS[name].itemsize << 13 for name in _STACKED}
"""The largest tensors that are summarised together with others."""
_BLOCK_BYTES = {name: FORMATS[name].itemsize << 15 for name in _STACKED}


def summarize_many(
    tensors: Sequence[tuple[str, Buffer]], *, kernel: Kernel = "numpy"
) -> list[Summary]:
    """Summaries of tensors given as (dtype, little-endian bytes), faster than one by one where many
    are small and alike.

    mean and rms of a tensor have the same bits whatever it is summarised with; those of
    ``summarize`` may differ in the last digits of the tensor's compute dtype.
    """
    results: list[Summary | None] = [None] * len(tensors)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, (dtype, data) in enumerate(tensors):
        num_bytes = len(data)
        if 0 < num_bytes <= _SMALL_BYTES.get(dtype, 0):
            groups.setdefault((dtype, num_bytes), []).append(index)
    for (dtype, num_bytes), indices in groups.items():
        rows = max(1, _BLOCK_BYTES[dtype] // num_bytes)
        for start in range(0, len(indices), rows):
            part = indices[start : start + rows]
            # one alone too: the last digits must not depend on how many happened to wait
            together = bytearray().join([tensors[index][1] for index in part])
            result = _stacked(_flat(dtype, together).view(len(part), -1), kernel)
            for index, summary in zip(part, result, strict=True):
                results[index] = summary
    return [
        summarize(_flat(dtype, data), kernel=kernel) if result is None else result
        for (dtype, data), result in zip(tensors, results, strict=True)
    ]


def _flat(dtype: str, data: Buffer) -> torch.Tensor:
    """The elements on one axis, without a copy."""
    import torch

    if len(data) == 0:
        return torch.empty(0, dtype=FORMATS[dtype].torch_dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(FORMATS[dtype].torch_dtype)


def _stacked(stack: torch.Tensor, kernel: Kernel) -> list[Summary | None]:
    """One summary a row; None where it needs the careful way."""
    import numpy as np
    import torch

    from divergence.numerics.sums import Grid, row_dots

    if kernel == "compiled":
        return summarize_rows(Grid(stack))
    x = stack.to(torch.float64).numpy()
    values = stack.numpy() if stack.dtype == torch.float32 else x
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = values.min(axis=1).astype(np.float64), values.max(axis=1).astype(np.float64)
        top = np.maximum(np.abs(low), np.abs(high))
        plain = np.isfinite(low) & np.isfinite(high) & (top < _FLOAT64_HIGH)
        plain &= (top > _FLOAT64_LOW) | (top == 0)
        mean = x.mean(axis=1)
        rms = np.sqrt(row_dots(x, x) / x.shape[1])
        zero = values == 0
        zeros = zero.sum(axis=1) if zero.any() else np.zeros(len(x), np.int64)
    columns = zip(
        plain.tolist(),
        low.tolist(),
        high.tolist(),
        mean.tolist(),
        rms.tolist(),
        top.tolist(),
        zeros.tolist(),
        strict=True,
    )
    return [
        Summary(min=a, max=b, mean=m, rms=r, absmax=t, num_zero=z) if ok else None
        for ok, a, b, m, r, t, z in columns
    ]
