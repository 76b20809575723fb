"""Loops over tensors that are compiled where numba is there: the same results as numpy's, bit for
bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from divergence.numerics.sums import Grid, Sums

# How compiled loops read numbers: bit patterns to float64 and to lattice keys, in registers.
#
# numpy has no bfloat16 and converts float16 slowly, so both come as integers: uint16 holds bfloat16
# (the upper half of a float32), int16 holds float16. Each function is a few instructions of LLVM's
# own, chosen by type, so that a loop over them becomes vector code; numba's arithmetic on small
# integers would widen them to 64 bits, and its float maximum does not vectorise.
#
# float16 by way of float32: exponent and fraction moved to float32's places and multiplied by 2^112
# (the difference of the biases) is exact for subnormals too; exponent 31 is inf or nan.
#
# Contracting a * b + c and reordering sums is allowed to the compiler; assuming that there is no
# nan or inf is not.

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing.templates import Signature

    Typed = tuple[Signature, Callable[..., Value]]
    # what numba asks of an intrinsic: the types it takes and gives, and what writes the code


Function = TypeVar("Function", bound=Callable[..., object])

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}

_I32, _I64 = (ir.IntType(bits) for bits in (32, 64))


def jit(function: Function) -> Function:
    """numba's compiler with ``_OPTIONS``; machine code is kept on disk where it can be."""
    compiled: Function
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder to keep it in: compiled again in each process
        compiled = njit(**_OPTIONS)(function)
    return compiled


def _instruction(signature_of: Callable[..., Signature]) -> Callable[..., Any]:
    """Make an intrinsic, which loops call on elements of whatever width, of ``write(builder,
    *arguments)``, which makes its code. ``signature_of``: of the elements' types, its own."""

    def decorated(write: Callable[..., Value]) -> Any:
        def typed(typing: BaseContext, *kinds: Type) -> Typed:
            def generate(
                context: BaseContext,
                builder: IRBuilder,
                signature: Signature,
                arguments: Sequence[Value],
            ) -> Value:
                return write(builder, *arguments)

            return signature_of(*kinds), generate

        own = inspect.signature(signature_of).parameters.values()
        first = inspect.Parameter("typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typed.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]  # numba reads it
        typed.__name__ = write.__name__
        return intrinsic(typed)

    return decorated


def _widened(
    context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
) -> Value:
    (value,), (kind,) = arguments, signature.args
    if kind == types.uint16:  # bfloat16
        bits = builder.shl(builder.zext(value, _I32), _I32(16))
        value = builder.bitcast(bits, ir.FloatType())
    elif kind == types.int16:  # float16
        bits = builder.zext(value, _I32)
        body = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
        finite = builder.fmul(builder.bitcast(body, ir.FloatType()), ir.FloatType()(2.0**112))
        special = builder.icmp_unsigned(">=", body, _I32(0x0F800000))
        unsigned = builder.select(
            special, builder.or_(body, _I32(0x7F800000)), builder.bitcast(finite, _I32)
        )
        sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
        value = builder.bitcast(builder.or_(unsigned, sign), ir.FloatType())
    if kind != types.float64:
        value = builder.fpext(value, ir.DoubleType())
    return value


def _number(typing: BaseContext, stored: Type) -> Typed:
    return types.float64(stored), _widened


number: Any = intrinsic(_number)
"""The float64 that a stored element stands for."""


@_instruction(lambda value: types.int64(types.float64))
def magnitude(builder: IRBuilder, x: Value) -> Value:
    """The bits of |value| as int64: in the order of the magnitudes, inf and then nan beyond."""
    return builder.and_(builder.bitcast(x, _I64), _I64(2**63 - 1))


@_instruction(lambda value: types.int64(types.float64))
def sign_of_order(builder: IRBuilder, x: Value) -> Value:
    """The bits of ``value`` as an int64 in the order of the values: -nan, -inf, ..., inf, nan."""
    bits = builder.bitcast(x, _I64)
    return builder.xor(bits, builder.lshr(builder.ashr(bits, _I64(63)), _I64(1)))


@_instruction(lambda bits: bits(bits))
def key(builder: IRBuilder, x: Value) -> Value:
    """Position on the lattice of a signed bit pattern; see divergence.numerics.ulp."""
    sign = builder.ashr(x, x.type(x.type.width - 1))
    return builder.sub(builder.xor(builder.lshr(sign, x.type(1)), x), sign)


_UNSIGNED: dict[int, Type] = {16: types.uint16, 32: types.uint32, 64: types.uint64}


@_instruction(lambda left, right: _UNSIGNED[left.bitwidth](left, left))
def distance(builder: IRBuilder, x: Value, y: Value) -> Value:
    """|x - y| as an unsigned integer of the same width, exact where it wraps."""
    higher = builder.icmp_signed(">", x, y)
    return builder.sub(builder.select(higher, x, y), builder.select(higher, y, x))


@_instruction(lambda value, low, high: types.boolean(value, value, value))
def in_range(builder: IRBuilder, x: Value, low: Value, high: Value) -> Value:
    """low <= |x| <= high."""
    negated = builder.sub(x.type(0), x)
    size = builder.select(builder.icmp_signed("<", x, x.type(0)), negated, x)
    return builder.and_(builder.icmp_signed(">=", size, low), builder.icmp_signed("<=", size, high))


@_instruction(lambda keep, value: value(types.boolean, value))
def or_zero(builder: IRBuilder, keep: Value, x: Value) -> Value:
    """``x`` where ``keep``, else 0."""
    return builder.select(keep, x, x.type(0))


@_instruction(lambda left, right: left(left, left))
def larger(builder: IRBuilder, x: Value, y: Value) -> Value:
    """The larger of two signed integers of one type."""
    return builder.select(builder.icmp_signed(">", x, y), x, y)


@_instruction(lambda left, right: left(left, left))
def farther(builder: IRBuilder, x: Value, y: Value) -> Value:
    """The larger of two distances of one type."""
    return builder.select(builder.icmp_unsigned(">", x, y), x, y)


@_instruction(lambda count, condition: count(count, types.boolean))
def add_if(builder: IRBuilder, count: Value, condition: Value) -> Value:
    """``count`` + 1 where ``condition``, in the counter's own width."""
    return builder.add(count, builder.zext(condition, count.type))


# The sums of divergence.numerics.sums in one compiled pass, and those of pairs.against.
#
# Everything is float64, so no finite 16- or 32-bit value leaves the range, and a row's sums are
# exact to 1e-15. A tile of up to 32 rows and 2048 columns keeps its column sums in the first
# cache and hands them over when all its elements were finite on both sides; a tile that holds a nan
# or inf is left out and listed, for the way that leaves out single elements (Sums.careful).
#
# Against a truth one pass gathers the rows' sums; a second, over the rows that count in the
# columns, the columns'. A row with a nan or inf has a sum that is neither finite nor used.

_TALL, _WIDE = 32, 2048
_STORED = {"bfloat16": np.uint16, "float16": np.int16}


@jit
def _add_rows(
    a: np.ndarray,
    b: np.ndarray,
    base: np.ndarray,
    with_base: bool,
    rows: np.ndarray,
    row_a: np.ndarray,
    row_d: np.ndarray,
    row_update: np.ndarray,
    row_finite: np.ndarray,
    col_a: np.ndarray,
    col_d: np.ndarray,
    totals: np.ndarray,
    largest: np.ndarray,
) -> np.ndarray:
    """Adds to the arrays and to ``totals`` (P, Q); ``largest``: bits of max |d|, its row, its
    column. Returns the tiles left out, (first, last, start, stop) each."""
    num_rows, num_cols = len(rows), a.shape[1]
    left_out = np.empty((-(-num_rows // _TALL) * -(-num_cols // _WIDE), 4), np.int64)
    num_left_out = 0
    tile_a, tile_d = np.empty(_WIDE), np.empty(_WIDE)
    sums = np.empty((_TALL, 3))
    for first in range(0, num_rows, _TALL):
        last = min(first + _TALL, num_rows)
        for start in range(0, num_cols, _WIDE):
            stop = min(start + _WIDE, num_cols)
            count = stop - start
            tile_a[:count] = 0.0
            tile_d[:count] = 0.0
            product = squares = 0.0
            top, top_place = np.int64(0), -1
            for place in range(first, last):
                x_row, y_row = a[rows[place], start:stop], b[rows[place], start:stop]
                a2 = d2 = p = q = 0.0
                most = np.int64(0)
                for j in range(count):
                    x = number(x_row[j])
                    d = x - number(y_row[j])
                    xx, dd, xd = x * x, d * d, x * d
                    most = larger(most, magnitude(d))
                    a2 += xx
                    d2 += dd
                    p += xd
                    q += xd * xd
                    tile_a[j] += xx
                    tile_d[j] += dd
                sums[place - first, 0] = a2
                sums[place - first, 1] = d2
                product += p
                squares += q
                if most > top:
                    top, top_place = most, place
            if top >= _INF:
                left_out[num_left_out] = (first, last, start, stop)
                num_left_out += 1
                continue
            for place in range(first, last):
                row = rows[place]
                row_a[row] += sums[place - first, 0]
                row_d[row] += sums[place - first, 1]
                row_finite[row] = True
                if with_base:
                    row_update[row] += _update(a[row, start:stop], base[row, start:stop])
            for j in range(count):
                col_a[start + j] += tile_a[j]
                col_d[start + j] += tile_d[j]
            totals[0] += product
            totals[1] += squares
            # of equal ones the first in row-major order
            if top_place >= 0 and (
                top > largest[0] or (top == largest[0] and rows[top_place] < largest[1])
            ):
                row = rows[top_place]
                largest[0], largest[1] = top, row
                for j in range(start, stop):
                    if magnitude(number(a[row, j]) - number(b[row, j])) == top:
                        largest[2] = j
                        break
    return left_out[:num_left_out]


@jit
def _update(x_row: np.ndarray, z_row: np.ndarray) -> float:
    """Σ(a - base)² over what is finite."""
    total = 0.0
    for j in range(len(x_row)):
        u = number(x_row[j]) - number(z_row[j])
        total += u * u
    if magnitude(total) < _INF:  # reordering may make 0 of np.isfinite's x - x
        return total
    total = 0.0
    for j in range(len(x_row)):
        u = number(x_row[j]) - number(z_row[j])
        if magnitude(u) < _INF:
            total += u * u
    return total


@jit
def _largest(values: np.ndarray) -> np.int64:
    """Bits of the largest finite magnitude."""
    top = np.int64(0)
    for i in range(values.shape[0]):
        row = values[i]
        most = np.int64(0)
        for j in range(len(row)):
            most = larger(most, magnitude(number(row[j])))
        if most >= _INF:
            most = np.int64(0)
            for j in range(len(row)):
                size = magnitude(number(row[j]))
                if size < _INF:
                    most = larger(most, size)
        top = larger(top, most)
    return top


def largest_magnitude(grid: Grid) -> float:
    """The largest finite |x|; 0 where none is finite. The grid must be readable."""
    return float(np.array([_largest(stored(grid))]).view(np.float64)[0])


def stored(grid: Grid) -> np.ndarray:
    """A grid's numbers as compiled loops read them."""
    return grid.bits.view(_STORED.get(grid.format.name, grid.format.name))


def gather_compiled(sums: Sums, rows: np.ndarray | slice) -> Sums:
    """Run ``sums`` over ``rows``; the grids must be readable (numerics.sums)."""
    if isinstance(rows, slice):
        rows = np.arange(rows.start, rows.stop)
    a, b = stored(sums.a), stored(sums.b)
    base = a if sums.base is None else stored(sums.base)
    totals, largest = np.zeros(2), np.array([0, -1, -1])
    left_out = _add_rows(
        a,
        b,
        base,
        sums.base is not None,
        rows,
        sums.row_a,
        sums.row_d,
        sums.row_update,
        sums.row_finite,
        sums.col_a,
        sums.col_d,
        totals,
        largest,
    )
    sums.product += float(totals[0])
    sums.product_squares += float(totals[1])
    sums.num_finite += len(rows) * sums.a.num_cols
    if largest[1] >= 0:
        sums.max_abs = float(largest[:1].view(np.float64)[0])
        sums.max_at = int(largest[1]) * sums.a.num_cols + int(largest[2])
    for first, last, start, stop in left_out.tolist():
        sums.num_finite -= (last - first) * (stop - start)
        with np.errstate(all="ignore"):
            sums.careful(rows[first:last], slice(start, stop))
    return sums


@jit
def _rows(a: np.ndarray, b: np.ndarray, truth: np.ndarray, out: np.ndarray) -> None:
    for i in range(truth.shape[0]):
        x_row, y_row, r_row = a[i], b[i], truth[i]
        rr = aa = bb = ab = ar = br = r4 = a4 = b4 = 0.0
        for j in range(len(r_row)):
            r = number(r_row[j])
            da, db = number(x_row[j]) - r, number(y_row[j]) - r
            d = number(x_row[j]) - number(y_row[j])
            square = r * r
            rr += square
            square_a, square_b = da * da, db * db
            aa += square_a
            bb += square_b
            ab += d * d
            ar += da * r
            br += db * r
            r4 += square * square
            a4 += square_a * square_a
            b4 += square_b * square_b
        out[0, i] = rr
        out[1, i] = aa
        out[2, i] = bb
        out[3, i] = ab
        out[4, i] = ar
        out[5, i] = br
        out[9, i] = r4
        out[11, i] = a4
        out[12, i] = b4


@jit
def _updates(
    a: np.ndarray, b: np.ndarray, truth: np.ndarray, base: np.ndarray, out: np.ndarray
) -> None:
    for i in range(truth.shape[0]):
        x_row, y_row, r_row, z_row = a[i], b[i], truth[i], base[i]
        uu = au = bu = u4 = 0.0
        for j in range(len(r_row)):
            r = number(r_row[j])
            u = r - number(z_row[j])
            square = u * u
            uu += square
            au += (number(x_row[j]) - r) * u
            bu += (number(y_row[j]) - r) * u
            u4 += square * square
        out[6, i] = uu
        out[7, i] = au
        out[8, i] = bu
        out[10, i] = u4


@jit
def _channels(
    a: np.ndarray, b: np.ndarray, truth: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> None:
    of_a, of_b, of_ab, of_r, top_a, top_b = out[0], out[1], out[2], out[3], out[4], out[5]
    for i in rows:
        x_row, y_row, r_row = a[i], b[i], truth[i]
        for j in range(len(r_row)):
            x, y, r = number(x_row[j]), number(y_row[j]), number(r_row[j])
            square_a, square_b = (x - r) * (x - r), (y - r) * (y - r)
            of_a[j] += square_a
            of_b[j] += square_b
            top_a[j] = max(top_a[j], square_a)
            top_b[j] = max(top_b[j], square_b)
            of_ab[j] += (x - y) * (x - y)
            of_r[j] += r * r


def row_sums(a: Grid, b: Grid, truth: Grid, base: Grid | None = None) -> np.ndarray:
    """Thirteen sums per row, (13, T), numbered as divergence.numerics.pairs does."""
    x, y, r = (stored(grid) for grid in (a, b, truth))
    out = np.full((13, len(r)), np.nan)
    _rows(x, y, r, out)
    if base is not None:
        _updates(x, y, r, stored(base), out)
    return out


def add_channels(a: Grid, b: Grid, truth: Grid, rows: np.ndarray, out: np.ndarray) -> None:
    """Adds ``rows`` to the columns ``out`` (6, D), see AgainstTruth."""
    _channels(stored(a), stored(b), stored(truth), rows, out)


# A tensor's summary, device digest and sketch, each in one compiled pass; definitions:
# divergence.numerics.sketches.
#
# The summary's squares are float64, so those of 16- and 32-bit values cannot leave the range;
# whether those of float64 values did is for the caller to see from the largest magnitude.
#
# The sketch's signed features go through a buffer of one row: added up as they are widened, they
# would wait for one another. A row that holds a nan or inf is read a second time, those counting as
# 0.

_RUN = 4096
_INF = 0x7FF0000000000000


@jit
def _totals(values: np.ndarray, sums: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> None:
    """``sums``: Σx, Σx². ``ends``: smallest and largest, as bits in their order. ``counts``:
    finite, nan, +inf, -inf, zero."""
    for start in range(0, len(values), _RUN):
        stop = min(start + _RUN, len(values))
        run = values[start:stop]
        total = squares = 0.0
        zeros = np.int64(0)
        low = high = sign_of_order(number(run[0]))
        most = np.int64(0)
        for j in range(stop - start):
            x = number(run[j])
            order, size = sign_of_order(x), magnitude(x)
            total += x
            squares += x * x
            high = larger(high, order)
            low = ~larger(~low, ~order)
            most = larger(most, size)
            zeros = add_if(zeros, size == 0)
        if most < _INF:
            sums[0] += total
            sums[1] += squares
            ends[0], ends[1] = min(ends[0], low), max(ends[1], high)
            counts[0] += stop - start
            counts[4] += zeros
            continue
        for j in range(stop - start):
            x = number(run[j])
            order, size = sign_of_order(x), magnitude(x)
            if size > _INF:
                counts[1] += 1
            elif size == _INF:
                counts[2 if order > 0 else 3] += 1
            else:
                sums[0] += x
                sums[1] += x * x
                ends[0], ends[1] = min(ends[0], order), max(ends[1], order)
                counts[0] += 1
                counts[4] += size == 0


@jit
def _row_totals(values: np.ndarray, sums: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> None:
    for i in range(values.shape[0]):
        _totals(values[i], sums[i], ends[i], counts[i])


def totals_of(grid: Grid) -> list[tuple[list[float], list[float], list[int]]]:
    """Return of each row (Σx, Σx²), the smallest and largest of what is finite, and how many
    numbers are finite, nan, +inf, -inf and zero; the grid must be readable (numerics.sums)."""
    count = grid.num_rows
    sums, counts = np.zeros((count, 2)), np.zeros((count, 5), np.int64)
    ends = np.tile(np.array([2**63 - 1, -(2**63)]), (count, 1))
    _row_totals(stored(grid), sums, ends, counts)
    flipped = np.where(ends < 0, ends ^ np.int64(2**63 - 1), ends).view(np.float64) + 0.0
    return list(zip(sums.tolist(), flipped.tolist(), counts.tolist(), strict=True))


@jit
def _add_products(words: np.ndarray, multipliers: np.ndarray, sums: np.ndarray) -> None:
    """Adds to ``sums`` (chunks, 2), modulo 2^64. ``words``: int32, the same for both sums."""
    size = multipliers.shape[1]
    for chunk in range(sums.shape[0]):
        start = chunk * size
        first, second = np.int64(0), np.int64(0)
        for i in range(min(size, len(words) - start)):
            word = np.int64(words[start + i])
            first += multipliers[0, i] * word
            second += multipliers[1, i] * word
        sums[chunk, 0] += first
        sums[chunk, 1] += second


def chunk_sums(words: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Both sums of each chunk of ``words`` (int32), int64 (chunks, 2). ``multipliers``: int64
    (2, words in a chunk)."""
    sums = np.zeros((-(-len(words) // multipliers.shape[1]), 2), dtype=np.int64)
    _add_products(words, multipliers, sums)
    return sums


@jit
def _project_rows(
    values: np.ndarray,
    sigma: np.ndarray,
    tau: np.ndarray,
    turns: np.ndarray,
    sums: np.ndarray,
    squares: np.ndarray,
    pooled: np.ndarray,
) -> None:
    """Adds to ``sums`` (rows, k) and ``pooled`` (blocks, K or 0); sets ``squares`` (rows,)."""
    num_cols, k, num_pooled = values.shape[1], sums.shape[1], pooled.shape[1]
    each = values.shape[0] // max(1, pooled.shape[0])
    width = max(k, num_pooled)
    signed, wide = np.empty(num_cols), np.empty(width)
    for row in range(values.shape[0]):
        row_values = values[row]
        total, most = 0.0, np.int64(0)
        for j in range(num_cols):
            x = number(row_values[j])
            total += x * x
            most = larger(most, magnitude(x))
        for j in range(num_cols):  # a loop of its own: the compiler takes eight at a time in each
            signed[j] = sigma[j] * number(row_values[j])
        if most >= _INF:
            total = 0.0
            for j in range(num_cols):
                x = number(row_values[j])
                if magnitude(x) >= _INF:
                    x = 0.0
                signed[j] = sigma[j] * x
                total += x * x
        squares[row] = total
        wide[:] = 0.0
        at = 0
        for group in range(num_cols // k):
            sign, there = tau[row, group], wide[at : at + k]
            for place in range(k):
                there[place] += sign * signed[group * k + place]
            at = at + k if at + k < width else 0
        for j in range(num_cols // k * k, num_cols):
            wide[j % width] += tau[row, num_cols // k] * signed[j]
        for group in range(width // k):
            for place in range(k):
                sums[row, place] += wide[group * k + place]
        if num_pooled:  # views: an index that may be negative keeps loops from being vector code
            turn, total = turns[row], pooled[row // each]
            head, tail, over = total[turn:], total[:turn], wide[num_pooled - turn :]
            for place in range(len(head)):
                head[place] += wide[place]
            for place in range(len(tail)):
                tail[place] += over[place]


def projections_of(
    grid: Grid,
    sigma: np.ndarray,
    tau: np.ndarray,
    k: int,
    turns: np.ndarray | None = None,
    pooled: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(projections (rows, k), sums of squares (rows,)) in float64. ``sigma``: ±1 by feature,
    ``tau``: ±1 by row and group, both float64. ``pooled`` (blocks, K): a row's sums of K buckets
    are added to its block's, by its number in ``turns`` (int64, below K) farther on. The grid must
    be readable (numerics.sums)."""
    sums, squares = np.zeros((grid.num_rows, k)), np.zeros(grid.num_rows)
    if turns is None or pooled is None:
        turns, pooled = _NO_TURNS, _NOT_POOLED
    _project_rows(stored(grid), sigma, tau, turns, sums, squares, pooled)
    return sums, squares


_NO_TURNS, _NOT_POOLED = np.zeros(0, np.int64), np.zeros((1, 0))


# Ulp distances of two arrays of bit patterns, counted in compiled loops.
#
# Runs of 2048 are counted in integers of the patterns' own width, so that a vector holds as many
# as it can; each run's counts are then added up in 64 bits. What is counted and why:
# divergence.numerics.ulp.

RUN_DISTANCES = 2048


@jit
def count_steps(
    a: np.ndarray,
    b: np.ndarray,
    rows: np.ndarray,
    low: np.signedinteger,
    high: np.signedinteger,
    nothing: np.signedinteger,
    zero: np.unsignedinteger,
    one: np.unsignedinteger,
    steps: tuple[np.unsignedinteger, ...],
    counts: np.ndarray,
    over: np.ndarray,
) -> None:
    s0, s1, s2, s3, s4 = steps
    for row in rows:
        for start in range(0, a.shape[1], RUN_DISTANCES):
            stop = min(start + RUN_DISTANCES, a.shape[1])
            x_row, y_row = a[row, start:stop], b[row, start:stop]
            n = over1 = n0 = n1 = n2 = n3 = n4 = top = zero
            for j in range(stop - start):
                p, q = key(x_row[j]), key(y_row[j])
                keep = in_range(p, low, high) & in_range(q, nothing, high)
                d = or_zero(keep, distance(p, q))
                n = add_if(n, keep)
                over1 = add_if(over1, d > one)
                n0 = add_if(n0, d > s0)
                n1 = add_if(n1, d > s1)
                n2 = add_if(n2, d > s2)
                n3 = add_if(n3, d > s3)
                n4 = add_if(n4, d > s4)
                top = farther(top, d)
            counts[0] += n
            counts[1] += over1
            counts[2] = max(counts[2], np.uint64(top))
            over[0] += n0
            over[1] += n1
            over[2] += n2
            over[3] += n3
            over[4] += n4


@jit
def pick_beyond(
    a: np.ndarray,
    b: np.ndarray,
    rows: np.ndarray,
    low: np.signedinteger,
    high: np.signedinteger,
    nothing: np.signedinteger,
    zero: np.unsignedinteger,
    one: np.unsignedinteger,
    bound: np.unsignedinteger,
    counts: np.ndarray,
    run: np.ndarray,
    beyond: np.ndarray,
) -> int:
    """``counts``: counted, over 1, largest, at the bound. Returns how many ``beyond`` got."""
    num_beyond = 0
    for row in rows:
        for start in range(0, a.shape[1], RUN_DISTANCES):
            stop = min(start + RUN_DISTANCES, a.shape[1])
            x_row, y_row = a[row, start:stop], b[row, start:stop]
            n = over1 = at = top = zero
            for j in range(stop - start):
                p, q = key(x_row[j]), key(y_row[j])
                keep = in_range(p, low, high) & in_range(q, nothing, high)
                d = or_zero(keep, distance(p, q))
                n = add_if(n, keep)
                over1 = add_if(over1, d > one)
                at = add_if(at, d == bound)
                top = farther(top, d)
                run[j] = d
            counts[0] += n
            counts[1] += over1
            counts[2] = max(counts[2], np.uint64(top))
            counts[3] += at
            if top > bound:
                for j in range(stop - start):
                    beyond[num_beyond] = run[j]
                    num_beyond += run[j] > bound
    return num_beyond
