"""Sketches: 1-2% of a tensor's bytes, from which the distance of two tensors can be estimated.

Rows are what lies behind the first two axes (tokens) where there are three axes or more, the last
axis for two, the whole for one. A row x of n features becomes k signed sums, its projections:
feature j goes to bucket b = j mod k,

    s_b = Σ_m  tau(t, m) · sigma(m·k + b) · x[m·k + b],        m = j // k,

with signs sigma(j) and tau(t, m) = ±1, t being the row's number. They are the top bits of integer
streams (``stream``): sigma(j) of number j of stream SIGMA, tau(t, m) of number
t·2^32 + m of stream TAU, -1 where the bit is set. So the matrix is defined by integers and
bit-identical on every machine; the sums are float64 in any order (float32 on devices without it;
plain products and sums on those that have float64 but no matrix product of it, as Ascend) and
rounded to float32. Beside them the row's norm, as a float32 and the float32 of what is left.

The sketch is linear: sketch(a) - sketch(b) is that of d = a - b, and E ‖sketch(d)‖² = ‖d‖² with
the variance (2/k) (‖d‖⁴ - Σ d_j⁴) at most, that of a dense random projection at a k-th of its cost
(Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", 1996;
Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002: the count
sketch; buckets here are dealt out in turn, which leaves the variance as it is since signs of
features in one bucket are independent). tau makes the rows' errors independent even where all
rows differ in one direction, so that over T rows of comparable size the relative error of ‖d‖²
is √(2/(kT)).

Resolution: a projection rounds to float32 on either side, so no estimate below 0.58 · 2^-24 ‖a‖ is
told from 0 (numerics.floor's model of two roundings); sums in float32 add √(n/2k) such errors.

k is the power of two below n/128, 8 at least and 64 at most; but where rows are fewer than 8, as in
a decode step, as many as make 64 projections of all rows together.

What is not sketched: integers, bool and complex; float64 (the resolution would hide its errors);
rows so short that the sketch takes more than half of their bytes. Elements that are no finite
numbers count as 0; a row that float32 cannot hold leaves infinities, and is not estimated.

``stream`` is the integer mixer from which every constant of digests and sketches is made:
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
n-th output of a stream is a bijective mix of seed + (n + 1) · the golden gamma, all modulo 2^64.
Constants are computed on the host with integers and only then moved, so they are bit-identical on
every machine whatever its arithmetic does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from divergence.numerics.formats import Format, format_of
from divergence.numerics.kernels import Kernel, chosen
from divergence.numerics.pairs.blocks import Grid

if TYPE_CHECKING:
    import torch

__all__ = ["MASK64", "SIGMA", "TAU", "has_products", "mixed", "num_projections", "resolution",
           "rows_of", "sketch_bytes", "sketch_many", "sketch_tensor", "stream",
           "sum_dtype_name"]  # fmt: skip


SIGMA, TAU = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
"""Digits of π after those of divergence.numerics.summaries.fold: chosen by nobody."""

SumDtype = Literal["float64", "float32"]
"""The precision that a sketch's sums are made in."""

_FEWEST, _MOST, _FEATURES_EACH = 8, 64, 128
_USUAL_BYTES = 2
"""Of a feature, whatever its dtype: runs of two dtypes have the same projections."""
_BLOCK = 1 << 17
"""Elements widened to float64 at a time on a host: 1 MiB, what stays in a core's cache."""
_DEVICE_BLOCK = 1 << 25
_UNIT = 2.0**-24


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, features in each)."""
    lead = min(2, max(len(shape) - 1, 0))
    return math.prod(shape[:lead]), math.prod(shape[lead:])


@functools.lru_cache(maxsize=4096)
def num_projections(shape: Sequence[int], form: Format) -> int | None:
    """k, or None where the bytes are kept as they are."""
    rows, features = rows_of(shape)
    if form.kind != "float" or form.itemsize > 4 or rows * features == 0:
        return None
    k = min(_MOST, max(_FEWEST, _power_below(features // _FEATURES_EACH)))
    k = max(k, _power_below(_MOST // rows))  # little is saved at few rows, and much is lost
    while k > _FEWEST and not _worth_while(features * _USUAL_BYTES, k):
        k //= 2
    return k if _worth_while(features * form.itemsize, k) else None


def _power_below(number: int) -> int:
    """The largest power of two that is no larger; 1 at least."""
    return 1 << (max(number, 1).bit_length() - 1)


def _worth_while(row_bytes: int, k: int) -> bool:
    return 2 * 4 * (k + 2) <= row_bytes


def sketch_bytes(shape: Sequence[int], form: Format) -> int:
    """What is kept of a tensor's bytes: its sketch, or all of them."""
    k = num_projections(shape, form)
    if k is None:
        return math.prod(shape) * form.itemsize
    return rows_of(shape)[0] * (k + 2) * 4


def resolution(num_features: int, k: int, *, sums: str = "float64") -> float:
    """The relative L2 below which an estimate says nothing."""
    terms = 1.0 + (num_features / k / 2 if sums == "float32" else 0.0)
    return math.sqrt(2) * 0.41 * _UNIT * math.sqrt(terms)


def sketch_tensor(
    tensor: torch.Tensor,
    k: int,
    *,
    row_numbers: Sequence[int] | np.ndarray | None = None,
    kernel: Kernel = "numpy",
) -> torch.Tensor:
    """The sketch, (rows, k + 2) float32 on the tensor's device; nothing is waited for.

    ``row_numbers``: what the rows are called in another tensor that holds them as well.
    ``kernel``: see numerics.kernels; of tensors on a host alone.
    """
    import torch

    num_rows, features = rows_of(tensor.shape)
    x = tensor.detach().reshape(num_rows, features)
    device = str(x.device)
    wide = _sum_dtype(device)
    if row_numbers is None:
        tau = _tau(num_rows, -(-features // k), device, wide)
    else:
        tau = _signs_of(np.asarray(row_numbers), -(-features // k)).to(device=device, dtype=wide)
    sigma = _sigma(features, device, wide)
    out = torch.empty(num_rows, k + 2, dtype=torch.float32, device=x.device)
    if device == "cpu" and chosen(kernel, format_of(x.dtype)) == "compiled":
        from divergence.numerics.compiled.summary import projections_of

        _put(out, *projections_of(Grid(x), sigma.numpy(), tau.numpy(), k))
        return out
    block = _BLOCK if x.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, block // features)
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        _sketch_rows(x[part], sigma, tau[part], out[part], wide)
    return out


def sketch_many(
    tensors: Sequence[torch.Tensor], ks: Sequence[int], *, kernel: Kernel = "numpy"
) -> list[torch.Tensor]:
    """``[sketch_tensor(t, k) for t, k in ...]``, faster where many are one row each, as in a
    decode step: rows of one length are stacked."""
    import torch

    results: list[torch.Tensor | None] = [None] * len(tensors)
    groups: dict[tuple[torch.dtype, str, int, int], list[int]] = {}
    for index, (tensor, k) in enumerate(zip(tensors, ks, strict=True)):
        num_rows, features = rows_of(tensor.shape)
        if num_rows == 1:
            key = (tensor.dtype, str(tensor.device), features, k)
            groups.setdefault(key, []).append(index)
        else:
            results[index] = sketch_tensor(tensor, k, kernel=kernel)
    for (_, _, features, k), members in groups.items():
        stack = torch.cat([tensors[index].detach().reshape(1, features) for index in members])
        numbers = np.zeros(len(members), np.int64)
        found = sketch_tensor(stack, k, row_numbers=numbers, kernel=kernel)
        for index, one in zip(members, torch.split(found, 1), strict=True):
            results[index] = one
    return [one for one in results if one is not None]


def _sketch_rows(
    x: torch.Tensor, sigma: torch.Tensor, tau: torch.Tensor, out: torch.Tensor, wide: torch.dtype
) -> None:
    """Rows (T, n) into ``out`` (T, k + 2)."""
    import torch

    k = out.shape[1] - 2
    values = x.to(wide, copy=True)
    if x.device.type == "cpu":
        squares = _squares(values)
        if not bool(torch.isfinite(squares).all()):
            values = torch.where(torch.isfinite(values), values, 0.0)
            squares = _squares(values)
    else:
        values = torch.where(torch.isfinite(values), values, 0.0)
        squares = (values * values).sum(-1)
    signed = values.mul_(sigma)
    whole = signed.shape[1] // k * k
    parts = signed[:, :whole].view(len(x), whole // k, k)
    if has_products(wide, str(x.device)):
        sums = torch.bmm(tau[:, None, : whole // k], parts)[:, 0]  # (T, k)
    else:
        sums = (tau[:, : whole // k, None] * parts).sum(1)
    if whole < signed.shape[1]:
        rest = signed[:, whole:]
        sums[:, : rest.shape[1]] += rest * tau[:, whole // k, None]
    _put(out, sums, squares)


def _put(
    out: torch.Tensor, sums: torch.Tensor | np.ndarray, squares: torch.Tensor | np.ndarray
) -> None:
    """Projections and norms, rounded to float32, the norm with what is left of it."""
    import torch

    sums, squares = torch.as_tensor(sums), torch.as_tensor(squares)
    norm, k = squares.sqrt(), sums.shape[1]
    out[:, :k] = sums
    out[:, k] = norm
    left = norm - out[:, k].to(norm.dtype)
    out[:, k + 1] = torch.nan_to_num(left, nan=0.0, posinf=0.0, neginf=0.0)


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Each row's sum of squares. numpy's loop takes one pass and starts no threads."""
    import torch

    with np.errstate(all="ignore"):
        return torch.from_numpy(np.einsum("ij,ij->i", values.numpy(), values.numpy()))


def sum_dtype_name(device: str) -> SumDtype:
    """``float64``, or ``float32`` on devices that lack it."""
    import torch

    return "float64" if _sum_dtype(device) == torch.float64 else "float32"


@functools.cache
def has_products(dtype: torch.dtype, device: str) -> bool:
    """Does ``device`` multiply matrices of ``dtype``? Asked by multiplying two."""
    import torch

    try:
        two = torch.full((1, 1, 1), 1 + 2.0**-20, dtype=dtype, device=device)
        return float(torch.bmm(two, two)) != 0.0
    except (RuntimeError, TypeError):
        return False


@functools.cache
def _sum_dtype(device: str) -> torch.dtype:
    import torch

    try:
        probe = torch.ones(2, dtype=torch.float64, device=device)
        return torch.float64 if float(probe.sum()) == 2.0 else torch.float32
    except (RuntimeError, TypeError):
        return torch.float32


def _sign(numbers: np.ndarray) -> np.ndarray:
    return np.where(numbers >> np.uint64(63), -1.0, 1.0).astype(np.float32)


@functools.lru_cache(maxsize=32)
def _sigma(features: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.from_numpy(_sign(stream(SIGMA, features))).to(device=device, dtype=dtype)


def _tau(num_rows: int, groups: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """(rows, groups), a part of a table that grows in powers of two."""
    rows = 1 << max(0, num_rows - 1).bit_length()
    return _tau_table(rows, groups, device, dtype)[:num_rows]


@functools.lru_cache(maxsize=32)
def _tau_table(rows: int, groups: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return _signs_of(np.arange(rows), groups).to(device=device, dtype=dtype)


def _signs_of(row_numbers: np.ndarray, groups: int) -> torch.Tensor:
    import torch

    different, at = np.unique(np.asarray(row_numbers, np.int64), return_inverse=True)
    table = [_sign(stream(TAU, groups, start=int(number) << 32)) for number in different]
    if not table:
        return torch.zeros(0, groups)
    return torch.from_numpy(np.stack(table)[at.reshape(-1)])


MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(value: int) -> int:
    """One number of 64 bits, mixed; a bijection."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * _FIRST) & MASK64
    value = ((value ^ (value >> 27)) * _SECOND) & MASK64
    return value ^ (value >> 31)


def stream(seed: int, count: int, *, start: int = 0) -> np.ndarray:
    """Numbers ``start`` to ``start + count - 1`` of the stream ``seed``, uint64: the n-th is
    ``mixed(seed + (n + 1) * gamma)``."""
    with np.errstate(over="ignore"):
        at = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        value = at * np.uint64(_GAMMA) + np.uint64(seed & MASK64)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
        return value ^ (value >> np.uint64(31))
