"""Sums over rows, blocks and channels of two tensors, and the metrics that are made of them."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from divergence.numerics.arrays import as_array, bits_of, wide, widen
from divergence.numerics.formats import Format, format_of

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor


# Which loops measure: numpy's, always there, or compiled ones (numba, the extra ``fast``).
#
# Compiled loops are several times faster and cost their start: numba's import, and compiling for
# this processor once (the machine code is kept on disk). So they are taken where the tensors are
# large enough to pay for it. Both measure the same (divergence.numerics.compiled). On a device
# torch measures, in a thread that has set it: runtimes keep the current device by thread.

Kernel = Literal["numpy", "compiled"]

READABLE = frozenset({"bfloat16", "float16", "float32", "float64"})
"""The formats that compiled loops read."""

WORTH_BYTES = 1 << 30
"""From this many bytes on compiled loops pay for their start (benchmarks/compare_kernel.py)."""

RESIDENT_BYTES = 112 << 20
"""What numba and the machine code take of memory (benchmarks/compare_kernel.py)."""


@functools.cache
def has_compiled() -> bool:
    """Can compiled loops be had here? Imports nothing."""
    return importlib.util.find_spec("numba") is not None


def kernel_for(num_bytes: int, *, memory_bytes: int | None = None) -> Kernel:
    """The faster one for ``num_bytes`` of tensors, both sides; compiled loops only where their own
    memory is a small part of ``memory_bytes``."""
    fits = memory_bytes is None or memory_bytes >= 4 * RESIDENT_BYTES
    return "compiled" if fits and num_bytes >= WORTH_BYTES and has_compiled() else "numpy"


def chosen(kernel: Kernel, *formats: Format) -> Kernel:
    """``kernel`` where it reads all of ``formats``, else numpy."""
    return kernel if all(form.name in READABLE for form in formats) else "numpy"


def set_device(device: torch.device | None) -> None:
    """Makes ``device`` the calling thread's current one; nothing is done for a host, or None.

    On Ascend a thread that set no device has no context ("ctx is NULL", 107002). On CUDA its first
    call makes a context on device 0, which takes memory there whatever device the model is on.
    """
    if device is None or device.type == "cpu":
        return
    import torch

    module = torch.get_device_module(device)
    if device.index is not None and hasattr(module, "set_device"):
        module.set_device(device)
    elif hasattr(module, "set_device"):
        module.set_device(module.current_device())


class Estimate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Says how well a difference is known that was estimated from sketches.

    ``relative_error``: half the width of rel_l2's 95% interval, on its wider side, over rel_l2
    (null where that is 0); ``low``, ``high``: the interval's ends. ``num_projections`` of a row,
    ``num_values`` of all rows compared. ``resolution``: below this relative L2 an estimate says
    nothing.
    """

    relative_error: float | None
    low: float
    high: float
    num_projections: int
    num_values: int
    resolution: float


# A tensor as a grid of rows, read in blocks that stay in cache and hold exact floats.
#
# Everything in numerics streams: a tensor may be a memory map larger than memory, so
# it is never copied whole and never written to. A block is either a view of the
# tensor (float32, float64) or its widening into a caller's buffer. bfloat16, float16,
# float8, bool and 8/16-bit integers are exact in float32; everything else goes to
# float64 (integers beyond 2^53 are rounded there, and nowhere else).
#
# Arithmetic on blocks is numpy's: its loops release the interpreter lock and start no
# threads of their own. A dtype that numpy lacks is widened by its bits (numerics.arrays).
#
# ``run_split`` shares blocks out between threads: numpy's loops release the interpreter lock, so
# threads scale.

BLOCK = 128 * 1024
"""Elements in a block: large enough that calling numpy (about 40 us a block) costs little, small
enough for a core's caches."""

_SEGMENT = 2048
"""Longest run of products summed in the block's own precision; longer sums are carried on in
float64. BLAS' dot keeps at least 16 running sums, so float32 stays near 2^-24 · sqrt(128)."""

_MOST_THREADS = 8

Rows = slice | np.ndarray
"""Which rows of a grid: a slice, or row numbers where a mask leaves gaps."""


class Grid:
    """A tensor read as ``num_rows`` rows (product of the leading dims) of ``num_cols``.

    A 0-d tensor is one row of one. Complex tensors are read as their components,
    interleaved (``width`` 2): norms and inner products over components are those of the
    complex vector, real part.
    """

    def __init__(self, tensor: Tensor) -> None:
        array = as_array(tensor)
        self.format: Format = format_of(array.dtype)
        self.scale = 1.0  # float64 only: a power of two that load() multiplies by
        self.width = 1
        if self.format.kind == "complex":
            array = np.ascontiguousarray(array).view(f"f{self.format.itemsize // 2}")
            self.width = 2
        self.num_cols = array.shape[-1] if array.ndim else 1
        self.num_rows = math.prod(array.shape[:-1])
        self.array: np.ndarray = np.ascontiguousarray(array).reshape(self.num_rows, self.num_cols)
        self.bits: np.ndarray = (
            self.array.view(f"i{self.array.itemsize}") if self.width == 2 else bits_of(self.array)
        )
        # the values, where numpy has the dtype and converts it as fast as its bits
        widened = self.array.dtype.names is not None or self.format.name == "float16"
        self._values: np.ndarray | None = None if widened else self.array

    def load(self, rows: Rows, cols: slice, out: np.ndarray) -> np.ndarray:
        """The block ``[rows, cols]`` in ``out``'s dtype: a view where that is the tensor's
        own (never write to the result), else widened into the flat buffer ``out``."""
        if self._values is not None and self._values.dtype == out.dtype:
            values = self._values[rows, cols]
            return values if self.scale == 1.0 else values * self.scale
        part = (self.bits if self._values is None else self._values)[rows, cols]
        block = out[: part.size].reshape(part.shape)
        if self._values is not None:
            np.copyto(block, part, casting="unsafe")
        else:
            widen(part, self.format, block)
        return block if self.scale == 1.0 else np.multiply(block, self.scale, out=block)

    def at(self, flat: int) -> float:
        """One element by its row-major number, unscaled."""
        row, col = divmod(flat, self.num_cols)
        return float(wide(self.array[row : row + 1, col : col + 1])[0, 0])


def compute_dtype(*formats: Format) -> type[np.float32] | type[np.float64]:
    """float32 if it holds every value of all formats, else float64."""
    for form in formats:
        integral = form.kind in ("int", "bool")
        if (form.itemsize > 2) if integral else (form.mantissa_bits > 23):
            return np.float64
    return np.float32


# numpy >= 2.0: one BLAS dot per row
_vecdot: Callable[[np.ndarray, np.ndarray], np.ndarray] = getattr(
    np, "vecdot", functools.partial(np.einsum, "...j,...j->...")
)


def row_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_j x[i, j] y[i, j] per row, float64 across segments of 2048, exact to 1e-6 of
    Σ|x y| (float32) or 1e-15 (float64)."""
    rows, cols = x.shape
    if cols == 1:
        return np.asarray(x[:, 0] * y[:, 0], np.float64)
    if cols <= _SEGMENT:
        return _vecdot(x, y).astype(np.float64)
    whole = cols - cols % _SEGMENT
    parts = (rows, whole // _SEGMENT, _SEGMENT)  # splitting the last axis copies nothing
    sums = _vecdot(x[:, :whole].reshape(parts), y[:, :whole].reshape(parts))
    total: np.ndarray = sums.sum(axis=1, dtype=np.float64)
    if whole < cols:
        total += _vecdot(x[:, whole:], y[:, whole:])
    return total


def column_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_i x[i, j] y[i, j] per column in float64. Runs of at most 64 rows are summed in the
    block's own precision: taller blocks are folded, k rows side by side."""
    rows, cols = x.shape
    if rows == 1:
        return np.asarray(x[0] * y[0], np.float64)
    if rows <= 64:
        return np.asarray(np.einsum("ij,ij->j", x, y), np.float64)
    fold = -(-rows // 64)
    whole = rows - rows % fold
    shape = (whole // fold, fold * cols)
    sums = np.einsum("ij,ij->j", x[:whole].reshape(shape), y[:whole].reshape(shape))
    total: np.ndarray = sums.reshape(fold, cols).sum(axis=0, dtype=np.float64)
    if whole < rows:
        total += np.multiply(x[whole:], y[whole:]).sum(axis=0, dtype=np.float64)
    return total


def columns_of_many(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``column_dots`` of each of N blocks, (N, T, D) → (N, D)."""
    if x.shape[1] == 1:
        return np.asarray((x * y)[:, 0], np.float64)
    if x.shape[1] <= 64:
        return np.asarray(np.einsum("nij,nij->nj", x, y), np.float64)
    return np.array([column_dots(*block) for block in zip(x, y, strict=True)])


Result = TypeVar("Result")


def num_threads() -> int:
    """Count the threads that look at tensors side by side: OMP_NUM_THREADS, or one a processor of
    this process, eight at most."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_THREADS, int(text) if text.isdecimal() else own or 1))


def run_split(work: Callable[[Any], Result], items: Any, *, threads: int) -> list[Result]:
    """``work`` on ``threads`` contiguous parts of ``items``, a list, range or array; results in the
    items' order."""
    threads = max(1, min(threads, len(items)))
    edges = [len(items) * number // threads for number in range(threads + 1)]
    parts = [items[edges[number] : edges[number + 1]] for number in range(threads)]
    if threads == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))


# The sums every pair metric is made of, gathered block by block.
#
# With d = a - b only three whole sums are needed: A = Σa², E = Σd², P = Σ a·d. Then
# ‖b‖² = A - 2P + E and b·a = A - P, and nothing large is ever subtracted from
# something nearly equal to it. Q = Σ(a·d)² gives the spread of P. A and E are kept
# per row and per column as well.
#
# Float32 inside a block: a and b are exact there and a - b is rounded once (2^-24),
# so every product is right to 2e-7; sums of more than 1024 terms are float64. Range is
# what float32 lacks. d is scaled by a power of two where its largest magnitude is
# small or large. Where a row's sum of squares leaves [2^-70, 2^100] without being zero
# throughout, or a value is not finite, the block is done again in float64 ("careful").
#
# Of elements that are no finite number it counts how many there are, where the two sides do not
# agree, and who is alone. Two elements agree where both are finite, both are nan (whatever their
# payload), or both are the same infinity: place and sign count, not the number. -inf against a
# finite value below -10,000 is counted apart (``mask_alike``): in an attention mask both say
# "never", since exp(-10,000) is 0 in every format up to float64, and masks are written with -inf,
# with the lowest finite number or with -10,000 (BERT, GPT-2). Whether a site is a mask is not
# known here.

LOW, HIGH = 2.0**-70, 2.0**100
TOP_LOW, TOP_HIGH = 2.0**-10, 2.0**20


class Sums:
    """Accumulators for some rows of a pair. Row arrays are shared between workers, which own
    disjoint rows; everything else is this worker's and is merged with ``add``."""

    def __init__(
        self, a: Grid, b: Grid, base: Grid | None, *, dtype: type, rows: tuple[np.ndarray, ...]
    ) -> None:
        self.a, self.b, self.base = a, b, base
        self.row_a, self.row_d, self.row_update, self.row_finite, self.row_nonfinite = rows
        self.col_a, self.col_d = np.zeros((2, a.num_cols))
        self.product = self.product_squares = 0.0  # P, Q
        self.max_abs, self.max_at = 0.0, -1  # -1: no difference yet
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        self.num_finite = 0
        self._dtype = dtype
        self._buffers: np.ndarray = np.empty(
            (4, min(BLOCK, max(1, a.num_rows * a.num_cols))), dtype
        )

    def block(self, rows: Rows, cols: slice) -> None:
        """Take in one block."""
        buffer_a, buffer_b, buffer_d, scratch = self._buffers
        a = self.a.load(rows, cols, buffer_a)
        b = self.b.load(rows, cols, buffer_b)
        d = np.subtract(a, b, out=buffer_d[: a.size].reshape(a.shape))
        top = max(float(d.max()), -float(d.min()))
        row_a = row_dots(a, a)
        if not (math.isfinite(top) and self._in_range(row_a, a)):
            self.careful(rows, cols)
            return
        scale = 1.0
        if top and not TOP_LOW <= top <= TOP_HIGH:
            scale = 2.0 ** -math.frexp(top)[1]
            if self._dtype is np.float32 and not 2.0**-120 < scale < 2.0**120:
                self.careful(rows, cols)
                return
            np.multiply(d, self._dtype(scale), out=d)
        row_d = row_dots(d, d) if top else np.zeros(len(a))
        if top and not self._in_range(row_d, d):
            self.careful(rows, cols)
            return
        product = np.multiply(a, d, out=scratch[: a.size].reshape(a.shape)) if top else None
        if product is not None:
            squares = float(row_dots(product, product).sum())
            if self._dtype is np.float32 and not LOW < squares < HIGH:
                self.careful(rows, cols)
                return
            self.product_squares += squares / scale**2
        self.num_finite += a.size
        self._gather(rows, cols, a, d, row_a, row_d, top=top, scale=scale)
        if self.base is not None:
            base = self.base.load(rows, cols, buffer_b)
            update = np.subtract(a, base, out=scratch[: a.size].reshape(a.shape))
            squares_of_rows = row_dots(update, update)
            if not self._in_range(squares_of_rows, update):
                wide = a.astype(np.float64) - base
                wide[~np.isfinite(wide)] = 0.0
                squares_of_rows = row_dots(wide, wide)
            self.row_update[rows] += squares_of_rows

    def _in_range(self, sums: np.ndarray, block: np.ndarray) -> bool:
        """Say whether the rows' sums of squares lost nothing to float32's range."""
        if self._dtype is np.float64:
            return bool(np.isfinite(sums).all())
        if not sums.max() < HIGH:  # also where it is nan
            return False
        small = sums < LOW
        return not (small.any() and block[small].any())

    def careful(self, rows: Rows, cols: slice) -> None:
        """One block (at most BLOCK elements) in float64, with every element left out that is
        not finite on both sides."""
        a, b = (grid.load(rows, cols, np.empty(BLOCK)).copy() for grid in (self.a, self.b))
        keep = np.isfinite(a) & np.isfinite(b)
        if not keep.all():
            self.count_nonfinite(rows, a, b)
            a[~keep] = 0.0
            b[~keep] = 0.0
        self.num_finite += int(np.count_nonzero(keep))
        self.row_finite[rows] |= keep.any(axis=1)
        d = a - b
        top = float(np.abs(d).max())
        product = a * d
        self.product_squares += float(row_dots(product, product).sum())
        self._gather(rows, cols, a, d, row_dots(a, a), row_dots(d, d), top=top, finite=False)
        if self.base is not None:
            base = self.base.load(rows, cols, np.empty(BLOCK))
            usable = keep & np.isfinite(base)
            update = np.where(usable, a - base, 0.0)
            self.row_update[rows] += row_dots(update, update)

    def count_nonfinite(self, rows: Rows, a: np.ndarray, b: np.ndarray) -> None:
        """Take in what is not finite in one block, and which of its rows hold it."""
        sides = ("a", a), ("b", b)
        nan, finite = ({side: test(x) for side, x in sides} for test in (np.isnan, np.isfinite))
        low, high = ({side: test(x) for side, x in sides} for test in (np.isneginf, np.isposinf))
        differ = (nan["a"] != nan["b"]) | (low["a"] != low["b"]) | (high["a"] != high["b"])
        most = NEVER * self.a.scale
        with np.errstate(invalid="ignore"):
            never = (low["a"] & finite["b"] & (b <= most)) | (low["b"] & finite["a"] & (a <= most))
        masks = {"differ": differ, "mask_alike": never}
        for side, other in ("ab", "ba"):
            masks |= {
                f"{side}_nan": nan[side],
                f"{side}_inf": low[side] | high[side],
                f"{side}_neginf": low[side],
                f"{side}_alone": ~finite[side] & finite[other],
            }
        for name, mask in masks.items():
            self.nonfinite[name] += int(np.count_nonzero(mask))
        apart, whole = (differ & ~never).any(axis=1), (finite["a"] & finite["b"]).all(axis=1)
        seen = np.where(apart, APART, np.where(whole, 0, ALIKE))
        self.row_nonfinite[rows] = np.maximum(self.row_nonfinite[rows], seen)

    def _gather(
        self,
        rows: Rows,
        cols: slice,
        a: np.ndarray,
        d: np.ndarray,
        row_a: np.ndarray,
        row_d: np.ndarray,
        *,
        top: float,
        scale: float = 1.0,
        finite: bool = True,
    ) -> None:
        self.row_a[rows] += row_a
        self.col_a[cols] += column_dots(a, a)
        if finite:
            self.row_finite[rows] = True
        if not top:
            return
        unscale = scale**-2
        self.row_d[rows] += row_d * unscale
        self.col_d[cols] += column_dots(d, d) * unscale
        self.product += float(row_dots(a, d).sum()) / scale
        if top >= self.max_abs:
            # where the largest difference is; of equal ones the first in row-major order
            high, low = int(d.argmax()), int(d.argmin())
            rise, fall = float(d.flat[high]), -float(d.flat[low])
            at = high if rise > fall else low if fall > rise else min(high, low)
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            row = int(numbers[at // d.shape[1]])
            flat = row * self.a.num_cols + cols.start + at % d.shape[1]
            if top > self.max_abs or flat < self.max_at:
                self.max_abs, self.max_at = top, flat

    def add(self, other: Sums) -> None:
        """Merge a worker that took later rows."""
        self.col_a += other.col_a
        self.col_d += other.col_d
        self.product += other.product
        self.product_squares += other.product_squares
        self.num_finite += other.num_finite
        for name, count in other.nonfinite.items():
            self.nonfinite[name] += count
        if other.max_abs > self.max_abs:
            self.max_abs, self.max_at = other.max_abs, other.max_at


def tiles(rows: Rows, num_cols: int, *, block: int = BLOCK) -> list[tuple[Rows, slice]]:
    """Blocks of at most ``block`` elements that cover ``rows``, in order: whole rows where
    eight of them fit, else pieces of up to eight rows."""
    count = len(range(rows.start, rows.stop)) if isinstance(rows, slice) else len(rows)
    if count == 0 or num_cols == 0:
        return []
    tall = max(1, min(8, count, block))
    wide = min(num_cols, max(1, block // tall))
    tall = max(tall, block // num_cols)
    blocks: list[tuple[Rows, slice]] = []
    for first in range(0, count, tall):
        last = min(first + tall, count)
        if isinstance(rows, slice):
            part: Rows = slice(rows.start + first, rows.start + last)
        else:
            part = rows[first:last]
            if part[-1] - part[0] == len(part) - 1:
                part = slice(int(part[0]), int(part[-1]) + 1)  # no gap: a view, no copy
        for start in range(0, num_cols, wide):
            blocks.append((part, slice(start, min(start + wide, num_cols))))
    return blocks


def gather(sums: Sums, rows: Rows, *, block: int = BLOCK) -> Sums:
    """Run ``sums`` over ``rows``."""
    with np.errstate(all="ignore"):
        for part, cols in tiles(rows, sums.a.num_cols, block=block):
            sums.block(part, cols)
    return sums


NONFINITE = tuple(
    "a_nan a_inf a_neginf b_nan b_inf b_neginf differ a_alone b_alone mask_alike".split()
)
"""What is counted. ``a_inf``: infinities of both signs, ``a_neginf`` those below; ``differ``:
places where the sides do not agree; ``a_alone``: of them, those where b is finite."""

NEVER = -10_000.0
ALIKE, APART = 1, 2
"""Of a row that holds nan or inf: the sides agree at each, or not (``mask_alike`` is agreement)."""


def ratio(x: float, y: float) -> float:
    """x / y with 0/0 = 0 and x/0 = inf."""
    return x / y if y else (math.inf if x else 0.0)


def root_ratio(x2: float, y2: float) -> float:
    return ratio(math.sqrt(x2), math.sqrt(y2))


def root_ratios(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    """√x2 / √y2 with 0/0 = 0 and x/0 = inf."""
    x, y = np.sqrt(x2), np.sqrt(y2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x == 0.0, 0.0, x / y)


def channel_ratios(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    """x2 / y2 with 0/0 = 0 and x/0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: np.ndarray = x2 / y2
    if not y2.all():
        ratios[x2 == 0.0] = 0.0
    return ratios


# The tokens that follow, by two sides' log-probabilities: Δp and perplexity, in one definition.
#
# As llama.cpp's ``--kl-divergence`` tells them: Δp is the other side's probability of a token less
# the first one's, as a share of 1. A quantile is a value that was seen.


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """``base`` and ``other``: exp of the mean of -log p. Errors are nan of a single token, and take
    tokens as independent."""

    num_tokens: int
    delta_p_mean: float
    delta_p_error: float
    delta_p_rms: float
    delta_p_p1: float
    delta_p_p99: float
    delta_logprob_mean: float
    """Of |Δ log p|."""
    base: float
    other: float
    ln_ratio: float
    """ln of the other's perplexity less that of the base's."""
    ln_ratio_error: float
    ln_correlation: float | None
    """None where one side's log-probabilities are all the same."""


def following_of(values: np.ndarray, other: np.ndarray) -> Following | None:
    """Measure how one follows the other, of log-probabilities, one a token; tokens that are not
    finite on both sides are left out. None where there are none."""
    finite = np.isfinite(values) & np.isfinite(other)
    values, other = values[finite], other[finite]
    if not len(values):
        return None
    delta, ratio = np.exp(other) - np.exp(values), values - other
    varies = len(values) > 1 and values.std() > 0 and other.std() > 0
    return Following(
        num_tokens=len(values),
        delta_p_mean=float(delta.mean()),
        delta_p_error=standard_error(delta),
        delta_p_rms=math.sqrt(float((delta * delta).mean())),
        delta_p_p1=quantile(delta, 0.01),
        delta_p_p99=quantile(delta, 0.99),
        delta_logprob_mean=float(np.abs(ratio).mean()),
        base=_exp(-float(values.mean())),
        other=_exp(-float(other.mean())),
        ln_ratio=float(ratio.mean()),
        ln_ratio_error=standard_error(ratio),
        ln_correlation=float(np.corrcoef(values, other)[0, 1]) if varies else None,
    )


def quantile(values: np.ndarray, share: float) -> float:
    """The least value that was seen which so large a share does not pass."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; nan of fewer than two values, or where one is not
    finite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


# The sums against a truth, and which rows count in the columns (numerics.pairs).

SINK_FACTOR = 10.0
"""A sink token's norm exceeds this many times the median row norm (massive activations:
Sun et al., arXiv 2402.17762; attention sinks: Xiao et al., arXiv 2309.17453)."""

OUTLIER = 8.0
"""A row is left out of the columns when its relative error exceeds this many medians."""


def add_row_sums(a: Any, b: Any, r: Any, base: Any, out: Any, dots: Callable[..., Any]) -> Any:
    """Thirteen sums per row, (T, D) → out (13, T), of arrays or of tensors. ``b`` may be ``a``
    itself: equal sides take half the work. Returns what the first four rows of channels are the
    squares of, by row."""
    terms = {3: r}
    update = None if base is None else r - base
    for number, side in enumerate((a,) if b is a else (a, b), 1):
        error = terms[number - 1] = side - r
        out[number], out[3 + number] = dots(error, error), dots(error, r)
        if update is not None:
            out[6 + number] = dots(error, update)
        square = error * error
        out[10 + number] = dots(square, square)
    square = r * r
    out[0], out[9] = dots(r, r), dots(square, square)
    if update is not None:
        out[6] = dots(update, update)
        update *= update
        out[10] = dots(update, update)
    if b is a:
        out[[2, 5, 8, 12]], out[3] = out[[1, 4, 7, 11]], 0.0
    else:
        terms[2] = a - b
        out[3] = dots(terms[2], terms[2])
    return terms


def row_sinks(norms: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Say which of the rows are sinks, by their norms in the truth."""
    usual = norms[kept & np.isfinite(norms)]
    limit = SINK_FACTOR * _lower_median(usual) if len(usual) else 0.0
    return norms > limit if limit > 0 else np.zeros(len(norms), bool)


def usual_rows(sums: np.ndarray, kept: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """The rows that count in the columns: finite, no sinks, and none in which one side's error is
    far above the median row's."""
    usual: np.ndarray = kept & np.isfinite(sums[:4]).all(axis=0) & ~sink
    if usual.any():
        size = np.sqrt(sums[1:3].max(axis=0) / np.maximum(sums[0], 1e-300))
        limit = OUTLIER * _lower_median(size[usual])
        usual &= ~((size > limit) & (limit > 0))
    return usual


def _lower_median(values: np.ndarray) -> float:
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])
