"""Folds and sketches are kept of a tensor in place of its bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from divergence.numerics.arrays import as_array, as_tensor
from divergence.numerics.formats import FORMATS, Format, format_of
from divergence.numerics.sums import Grid, Kernel, chosen

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor


# A digest of a tensor's bytes by integer operations alone, on whatever device the tensor is.
#
# xxh3 runs on hosts. A digest that an accelerator computes where the tensor lies must be made of
# operations that every backend of torch has and that are exact: 64-bit products and sums, modulo
# 2^64, in any order. So it is two multilinear hashes over 32-bit words (docs/dump-format.md,
# ``fold``), 2 x 64 bits; their constants, and those of sketches, are integers of splitmix64
# (Steele, Lea, Flood, OOPSLA 2014), computed on the host: the same on every machine.
#
# Unequal inputs of one length collide with probability at most (L 2^-33)^2 over random multipliers,
# L levels of chunks (2 up to 8 GiB): about 2^-64 (Carter and Wegman, "Universal classes of hash
# functions", 1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 3).
# The multipliers are fixed, so it is no defence against someone who looks for a collision.

CHUNK = 1 << 16
"""Words in a chunk."""
SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""The first 128 bits of π's fraction: chosen by nobody."""
_KNOWN = "99961e94dcdbf63f123c589a690b20f8"
"""The digest of what ``is_exact_on`` hashes, by the definition in plain integers (the tests)."""
_AT_ONCE = 1 << 6
"""Chunks that a device widens to 64 bits at a time: 32 MiB."""
_FEW_WORDS = 1 << 13
"""Tensors of so few words are hashed many at a time, by equal length."""
_TOGETHER = 1 << 18
"""Words widened to 64 bits at a time then: 2 MiB."""


def fold_tensor(tensor: torch.Tensor, *, kernel: Kernel = "numpy") -> str:
    """The digest, 32 hex digits. Waits for the device. ``kernel``: of a host's tensors."""
    if tensor.device.type == "cpu":
        return fold_array(as_array(tensor), kernel=kernel)
    return folds_of([fold_sums(tensor)])[0]


def fold_array(array: np.ndarray, *, kernel: Kernel = "numpy") -> str:
    """The digest of a tensor on the host."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    num_bytes = len(data)
    if num_bytes % 4 or data.ctypes.data % 4:
        data = np.concatenate([data, np.zeros(-num_bytes % 4, np.uint8)])
    words = [data.view(np.int32)] * 2  # of each hash
    if kernel == "compiled":
        from divergence.numerics.compiled import chunk_sums

        sums = list(np.ascontiguousarray(chunk_sums(words[0], _host_multipliers()).T))
    else:
        sums = _chunk_dots(words)
    while len(sums[0]) > 1:  # of each sum the chunks' results in turn
        sums = _chunk_dots([row.view(np.int32) for row in sums])
    return _digest([int(row[0]) if len(row) else 0 for row in sums], num_bytes)


def _chunk_dots(words: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sum each chunk of each hash's words, as int64. numpy's product of two vectors of integers is
    three times as fast as torch's two steps."""
    sums = []
    for own, row in zip(words, _host_multipliers().view(np.uint64), strict=True):
        parts = [own[at : at + CHUNK] for at in range(0, len(own), CHUNK)]
        wide = [np.dot(part.astype(np.int64).view(np.uint64), row[: len(part)]) for part in parts]
        sums.append(np.array(wide, np.uint64).view(np.int64))
    return sums


def _digest(sums: Sequence[int], num_bytes: int) -> str:
    return "".join(
        f"{mixed((value & MASK64) + SEEDS[1 - at] * num_bytes):016x}"
        for at, value in enumerate(sums)
    )


def fold_many(buffers: Sequence[memoryview], *, kernel: Kernel = "numpy") -> list[str]:
    """``fold_tensor`` of the tensor behind each buffer (its bytes, row-major), faster where many
    are small."""
    folds = [""] * len(buffers)
    alike: dict[int, list[int]] = {}
    for index, buffer in enumerate(buffers):
        if 0 < buffer.nbytes <= 4 * _FEW_WORDS:
            alike.setdefault(buffer.nbytes, []).append(index)
        else:
            folds[index] = fold_array(np.frombuffer(buffer, np.uint8), kernel=kernel)
    for num_bytes, members in alike.items():
        step = max(1, _TOGETHER // -(-num_bytes // 4))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            padding = bytes(-num_bytes % 4)
            pieces = [buffers[at] for at in part]
            joined = padding.join([*pieces, b""]) if padding else b"".join(pieces)
            words = np.frombuffer(joined, np.int32).reshape(len(part), -1)
            multipliers = _host_multipliers().view(np.uint64)[:, : words.shape[1]]
            sums = np.dot(words.astype(np.int64).view(np.uint64), multipliers.T)
            lengths = np.array([seed * num_bytes & MASK64 for seed in reversed(SEEDS)], np.uint64)
            with np.errstate(over="ignore"):
                digests = _mixed(sums + lengths)
            for index, digest in zip(part, digests.astype(">u8"), strict=True):
                folds[index] = digest.tobytes().hex()
    return folds


@functools.cache
def is_exact_on(device: str) -> bool:
    """Does ``device`` give the digest that is known of certain bytes? Asked once a process.

    They fill three chunks of words of either sign, the last in part: every operation is in it, and
    a device that rounds or saturates 64-bit products, or adds them up in a float, gives another.
    """
    import torch

    words = stream(SEEDS[0], CHUNK + 77).view("int64")
    return folds_of([fold_sums(torch.from_numpy(words).to(device))]) == [_KNOWN]


def fold_sums(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(both sums as int64 on the tensor's device, number of bytes): nothing is waited for."""
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    words = _words(tensor)
    while True:
        words = _chunks(words)  # (chunks, 2 sums)
        if len(words) <= 1:
            break
        # of each sum the chunks' results in turn: two inputs, one for each hash
        words = words.T.contiguous().view(torch.int32)  # (2 sums, words)
    sums = words[0] if len(words) else words.new_zeros(2)
    return sums, num_bytes


def folds_of(sums: list[tuple[torch.Tensor, int]]) -> list[str]:
    """The digests of many sums, brought from the device in one piece."""
    import torch

    if not sums:
        return []
    host = torch.stack([total for total, _ in sums]).cpu().tolist()
    return [_digest(values, num_bytes) for values, (_, num_bytes) in zip(host, sums, strict=True)]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as signed 32-bit words, zeros behind."""
    import torch

    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)
    if not len(flat):
        return torch.zeros(0, dtype=torch.int32, device=tensor.device)
    if len(flat) % 4 or flat.storage_offset() % 4 or flat.data_ptr() % 4:
        padded = torch.zeros(-(-len(flat) // 4) * 4, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)] = flat
        flat = padded
    return flat.view(torch.int32)


def _chunks(words: torch.Tensor) -> torch.Tensor:
    """Both sums of each chunk, (chunks, 2). ``words``: of the bytes, or (2, words) where each
    hash has an input of its own."""
    import torch

    each = words.ndim == 2
    words = words if each else words[None]
    count = words.shape[-1]
    multipliers = _multipliers(str(words.device))  # (2, CHUNK)
    results = []
    whole = count // CHUNK
    for start in range(0, whole, _AT_ONCE):
        part = words[:, start * CHUNK : min(start + _AT_ONCE, whole) * CHUNK]
        results.append(_sums(part.reshape(len(words), -1, CHUNK), multipliers, each=each))
    if whole * CHUNK < count:
        rest = words[:, None, whole * CHUNK :]
        results.append(_sums(rest, multipliers[:, : rest.shape[-1]], each=each))
    if not results:
        return torch.zeros(0, 2, dtype=torch.int64, device=words.device)
    return torch.cat(results)


def _sums(words: torch.Tensor, multipliers: torch.Tensor, *, each: bool) -> torch.Tensor:
    import torch

    wide = words.to(torch.int64)  # (1 or 2, chunks, words)
    return torch.stack(
        [(wide[at if each else 0] * multipliers[at]).sum(-1) for at in range(2)], dim=-1
    )


@functools.cache
def _host_multipliers() -> np.ndarray:
    """int64 (2, CHUNK)."""
    return np.stack([stream(seed, CHUNK) for seed in SEEDS]).view(np.int64)


@functools.lru_cache(maxsize=8)
def _multipliers(device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(_host_multipliers()).to(device)


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
        return _mixed(at * np.uint64(_GAMMA) + np.uint64(seed & MASK64))


def _mixed(value: np.ndarray) -> np.ndarray:
    """``mixed``, of an array."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    value ^= value >> np.uint64(31)
    return value


# Sketches: 1-2% of a tensor's bytes, from which the distance of two tensors can be estimated.
#
# Of each row k signed sums of its features, dealt out in turn to k buckets, and its norm; of each
# block's rows together K further sums, which tell how much differs where few rows do
# (docs/dump-format.md, ``sketch``, has signs, rows, blocks, k and K). Signs are top bits of integer
# streams, so the matrix is bit-identical on every machine; sums are float64 in any order (float32
# on devices without it), rounded to float32.
#
# The sketch is linear: sketch(a) - sketch(b) is that of d = a - b, and E ‖sketch(d)‖² = ‖d‖² with
# the variance (2/k) (‖d‖⁴ - Σ d_j⁴) at most, that of a dense random projection at a k-th of its
# cost (Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments",
# 1996; Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002: the count
# sketch). Rows have signs of their own, so over T rows of comparable size the relative error of
# ‖d‖² is √(2/(kT)); pooled sums estimate a block's ‖d‖² with the variance (2/K) ‖d‖⁴.
#
# Resolution: a sum rounds to float32 on either side, so no estimate below 0.58 · 2^-24 ‖a‖ is
# told from 0 (numerics.floor's model of two roundings); sums in float32 add √(n/2k) such errors.
# Elements that are no finite numbers count as 0; a row that float32 cannot hold leaves infinities,
# and is not estimated. Integers, bool, complex and float64 (whose errors the resolution would hide)
# are not sketched, nor rows so short that a sketch takes more than half of their bytes.

SIGMA, TAU = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
"""Digits of π after those of divergence.numerics.sketches: chosen by nobody."""

SHIFT = 79
"""By how many buckets a row's pooled sums lie beside those of the row before."""

SumDtype = Literal["float64", "float32"]
"""The precision that a sketch's sums are made in."""

_FEWEST, _MOST, _FEATURES_EACH = 8, 64, 128
_MOST_POOLED, _EACH_POOLED, _EACH_POOLED_LEAST = 128, 2048, 256
_USUAL_BYTES = 2
"""Of a feature, whatever its dtype: runs of two dtypes have the same projections."""
_BLOCK = 1 << 18
"""Elements widened to float64 at a time on a host: 2 MiB, one buffer for all."""
_DEVICE_BLOCK = 1 << 25
_COPIED_BYTES = 1 << 20
"""Of rows that are copied together."""
_UNIT = 2.0**-24


class Projections(NamedTuple):
    """A sketch, float32."""

    rows: Tensor
    """(rows, k + 2): projections, and the norm as high and low part."""
    pooled: Tensor
    """(blocks, K): sums of all rows of a block. K = 0: none."""

    def joined(self) -> torch.Tensor:
        """Join the rows as they are stored, or all on one axis where there are pooled sums."""
        import torch

        rows, pooled = as_tensor(self.rows), as_tensor(self.pooled)
        return torch.cat([rows.reshape(-1), pooled.reshape(-1)]) if pooled.numel() else rows

    @classmethod
    def of(cls, stored: Tensor, shape: Sequence[int], k: int, num_pooled: int) -> Projections:
        """``joined()`` taken apart, of a tensor of ``shape``."""
        num_blocks = grid_of(shape)[0]
        flat = stored.reshape(-1)
        end = len(flat) - num_blocks * num_pooled
        return cls(flat[:end].reshape(-1, k + 2), flat[end:].reshape(num_blocks, num_pooled))


def grid_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """(blocks, rows in each, features in each row)."""
    if len(shape) < 3:
        return (1, *rows_of(shape))
    return shape[0], shape[1], math.prod(shape[2:])


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

    def takes_half(row_bytes: int, k: int) -> bool:
        return 2 * 4 * (k + 2) > row_bytes

    k = min(_MOST, max(_FEWEST, _power_below(features // _FEATURES_EACH)))
    k = max(k, _power_below(_MOST // rows))  # little is saved at few rows, and much is lost
    while k > _FEWEST and takes_half(features * _USUAL_BYTES, k):
        k //= 2
    return None if takes_half(features * form.itemsize, k) else k


def num_pooled(shape: Sequence[int], k: int) -> int:
    """K; 0 where rows are not pooled."""
    _, num_rows, features = grid_of(shape)
    numel = num_rows * features
    most = min(_MOST_POOLED, max(_MOST, numel // _EACH_POOLED), numel // _EACH_POOLED_LEAST)
    power = _power_below(most)
    return power if num_rows > 1 and power > k else 0


def _power_below(number: int) -> int:
    """The largest power of two that is no larger; 1 at least."""
    return 1 << (max(number, 1).bit_length() - 1)


def sketch_bytes(shape: Sequence[int], form: Format) -> int:
    """Count the bytes that are kept of a tensor: its sketch, or all of them."""
    k = num_projections(shape, form)
    if k is None:
        return math.prod(shape) * form.itemsize
    return 4 * (rows_of(shape)[0] * (k + 2) + grid_of(shape)[0] * num_pooled(shape, k))


def resolution(num_features: int, k: int, *, sums: str = "float64") -> float:
    """The relative L2 below which an estimate says nothing."""
    terms = 1.0 + (num_features / k / 2 if sums == "float32" else 0.0)
    return math.sqrt(2) * 0.41 * _UNIT * math.sqrt(terms)


def sketch_tensor(
    tensor: torch.Tensor,
    k: int,
    *,
    num_pooled: int = 0,
    row_numbers: Sequence[int] | np.ndarray | None = None,
    kernel: Kernel = "numpy",
) -> Projections:
    """The sketch, on the tensor's device; nothing is waited for.

    ``num_pooled``: K, a multiple of k. ``row_numbers``: what the rows are called in another tensor
    that holds them as well; one after another where rows are pooled. ``kernel``: see
    numerics.sums; of tensors on a host alone.
    """
    import torch

    num_blocks, num_rows, features = grid_of(tensor.shape)
    x = tensor.detach().reshape(num_blocks * num_rows, features)
    device = str(x.device)
    wide = getattr(torch, sum_dtype_name(device))
    groups = -(-features // k)
    if row_numbers is None:  # a part of a table that grows in powers of two
        tau = _tau_table(1 << max(0, len(x) - 1).bit_length(), groups, device, wide)[: len(x)]
    else:
        tau = _signs_of(np.asarray(row_numbers), groups).to(device=device, dtype=wide)
    sigma = _sigma(features, device, wide)
    out = torch.empty(len(x), k + 2, dtype=torch.float32, device=x.device)
    totals, first = None, 0
    if num_pooled:
        first = 0 if row_numbers is None else int(row_numbers[0])
        totals = torch.zeros(num_blocks, num_pooled, dtype=wide, device=x.device)
    if device == "cpu" and chosen(kernel, format_of(x.dtype)) == "compiled":
        from divergence.numerics.compiled import projections_of

        pooled = turns = None
        if totals is not None:
            pooled, turns = totals.numpy(), (first + np.arange(len(x))) * SHIFT % num_pooled
        _put(out, *projections_of(Grid(x), sigma.numpy(), tau.numpy(), k, turns, pooled))
    else:
        each = max(len(x), 1) if totals is None else num_rows
        at_once = max(1, (_BLOCK if device == "cpu" else _DEVICE_BLOCK) // max(features, 1))
        buffer = torch.empty(min(at_once, each), features, dtype=wide, device=x.device)
        width = k if totals is None else num_pooled
        for block, begin in enumerate(range(0, len(x), each)):
            for start in range(begin, begin + each, at_once):
                part = slice(start, min(start + at_once, begin + each))
                sums = _sketch_rows(x[part], sigma, tau[part], out[part], buffer, width)
                if totals is None:
                    continue
                # rows K apart are turned by as much
                turned = _turned((first + start) % width, width, device)
                whole = len(sums) // width * width
                if whole:
                    square = sums[:whole].view(-1, width, width).sum(0)
                    totals[block] += square.gather(1, turned).sum(0)
                if whole < len(sums):
                    rest = sums[whole:]
                    totals[block] += rest.gather(1, turned[: len(rest)]).sum(0)
    return Projections(out, out.new_empty(num_blocks, 0) if totals is None else totals.float())


def sketch_many(
    tensors: Sequence[tuple[str, memoryview, tuple[int, ...]]],
    ks: Sequence[int],
    pooled: Sequence[int],
    *,
    kernel: Kernel = "numpy",
) -> list[Projections]:
    """``sketch_tensor`` of each tensor, given as (dtype, little-endian bytes, shape), with its k
    and number of pooled sums: faster where many are one row each, as in a decode step, since rows
    of one length are copied together. (A view of each costs more than its bytes.)"""
    import torch

    def elements(dtype: str, data: Any) -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).view(FORMATS[dtype].torch_dtype)

    results: list[Projections | None] = [None] * len(tensors)
    groups: dict[tuple[str, int, int], list[int]] = {}
    for index, ((dtype, data, shape), k, more) in enumerate(zip(tensors, ks, pooled, strict=True)):
        num_rows, features = rows_of(shape)
        if num_rows == 1 and not more:
            groups.setdefault((dtype, features, k), []).append(index)
        else:
            tensor = elements(dtype, data).view(grid_of(shape))
            results[index] = sketch_tensor(tensor, k, num_pooled=more, kernel=kernel)
    for (dtype, features, k), members in groups.items():
        step = max(1, _COPIED_BYTES // (features * FORMATS[dtype].itemsize))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            joined = bytearray().join([tensors[index][1] for index in part])
            stack = elements(dtype, joined).view(len(part), features)
            numbers = np.zeros(len(part), np.int64)
            sketched = sketch_tensor(stack, k, row_numbers=numbers, kernel=kernel)
            for index, row in zip(part, torch.split(as_tensor(sketched.rows), 1), strict=True):
                results[index] = Projections(row, sketched.pooled)
    return [result for result in results if result is not None]


def _sketch_rows(
    x: torch.Tensor,
    sigma: torch.Tensor,
    tau: torch.Tensor,
    out: torch.Tensor,
    buffer: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Rows (T, n) into ``out`` (T, k + 2); their sums in ``width`` buckets, a multiple of k, in
    the precision of ``buffer``."""
    import torch

    num_rows, features = x.shape
    k = out.shape[1] - 2
    values = buffer[:num_rows].copy_(x)
    if x.device.type == "cpu":
        squares = _squares(values)
        if not bool(torch.isfinite(squares).all()):
            values = torch.where(torch.isfinite(values), values, 0.0)
            squares = _squares(values)
    else:
        values = torch.where(torch.isfinite(values), values, 0.0)
        squares = (values * values).sum(-1)
    values.mul_(sigma)
    groups = features // k
    values[:, : groups * k].view(num_rows, groups, k).mul_(tau[:, :groups, None])
    if groups * k < features:
        values[:, groups * k :].mul_(tau[:, groups:])
    whole = features // width * width
    sums = values[:, :whole].view(num_rows, features // width, width).sum(1)
    if whole < features:
        sums[:, : features - whole] += values[:, whole:]
    _put(out, sums if width == k else sums.view(num_rows, width // k, k).sum(1), squares)
    return sums


@functools.lru_cache(maxsize=16)
def _turned(first: int, num_pooled: int, device: str) -> torch.Tensor:
    """Say, by row from ``first`` on and by pooled sum, which of the row's sums goes there."""
    import torch

    buckets = torch.arange(num_pooled)
    return ((buckets - SHIFT * (first + buckets[:, None])) % num_pooled).to(device)


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


@functools.cache
def sum_dtype_name(device: str) -> SumDtype:
    """``float64``, or ``float32`` on devices that lack it."""
    import torch

    try:
        probe = torch.ones(2, dtype=torch.float64, device=device)
        return "float64" if float(probe.sum()) == 2.0 else "float32"
    except (RuntimeError, TypeError):
        return "float32"


def _sign(numbers: np.ndarray) -> np.ndarray:
    return np.where(numbers >> np.uint64(63), -1.0, 1.0).astype(np.float32)


@functools.lru_cache(maxsize=32)
def _sigma(features: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.from_numpy(_sign(stream(SIGMA, features))).to(device=device, dtype=dtype)


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
