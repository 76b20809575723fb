"""A digest of a tensor's bytes by integer operations alone, on whatever device the tensor is.

xxh3 runs on hosts. A digest that an accelerator computes where the tensor lies must be made of
operations that every backend of torch has and that are exact: 64-bit products and sums, modulo
2^64, in any order. So it is two independent multilinear hashes

    h_s(w) = Σ_i m_s,i · w_i   mod 2^64,        s = 1, 2

over the 32-bit words w_i of the bytes (little-endian, taken as signed, the last one padded with
zeros), with multipliers m_s,i = stream(SEEDS[s], i), see below. Words are taken
in chunks of 2^16, so that the multipliers are few and kept; the 64-bit results of the chunks, as
words (low, high), are hashed again in the same way until one chunk is left. In the end the
number of bytes is mixed in: mixed(h_s + gamma_s · num_bytes). 2 × 64 bits, 32 hex digits.

Collisions: two unequal inputs of one length collide under one level of one h with probability at
most 2^-33 over random multipliers (Σ m_i δ_i = 0 mod 2^64 with |δ_i| < 2^32: δ = 2^v · odd with
v ≤ 31 leaves 2^v of 2^64 multipliers; Carter and Wegman, "Universal classes of hash functions",
1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 3), so under both
of them at L levels with at most (L · 2^-33)² (L is 2 up to 8 GiB, 3 beyond): about 2^-64. The
multipliers are fixed, so it is no defence against someone who looks for a collision.

``stream`` is the integer mixer from which every constant of digests and sketches is made:
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
n-th output of a stream is a bijective mix of seed + (n + 1) · the golden gamma, all modulo 2^64.
Constants are computed on the host with integers and only then moved, so they are bit-identical on
every machine whatever its arithmetic does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from divergence.numerics.kernels import Kernel

__all__ = ["CHUNK", "MASK64", "SEEDS", "fold_many", "fold_tensor", "folds_of", "is_exact_on",
           "mixed", "stream"]  # fmt: skip

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
    return folds_of([fold_sums(tensor, kernel=kernel)])[0]


def fold_many(buffers: Sequence[memoryview], *, kernel: Kernel = "numpy") -> list[str]:
    """``fold_tensor`` of the tensor behind each buffer (its bytes, row-major), faster where many
    are small."""
    import torch

    folds = [""] * len(buffers)
    alike: dict[int, list[int]] = {}
    for index, buffer in enumerate(buffers):
        if 0 < buffer.nbytes <= 4 * _FEW_WORDS:
            alike.setdefault(buffer.nbytes, []).append(index)
        else:
            folds[index] = fold_tensor(torch.from_numpy(_array(buffer)), kernel=kernel)
    for num_bytes, members in alike.items():
        step = max(1, _TOGETHER // -(-num_bytes // 4))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            for index, fold in zip(part, _folds([buffers[at] for at in part]), strict=True):
                folds[index] = fold
    return folds


def _array(buffer: memoryview) -> np.ndarray:
    array = np.frombuffer(buffer, np.uint8)
    return array if array.flags.writeable else array.copy()  # torch warns of others


def _folds(buffers: list[memoryview]) -> list[str]:
    """Of buffers of one length, a chunk at most."""
    num_bytes = buffers[0].nbytes
    padding = bytes(-num_bytes % 4)
    joined = b"".join(buffers) if not padding else padding.join([*buffers, b""])
    words = np.frombuffer(joined, np.int32).reshape(len(buffers), -1)
    wide = words.astype(np.int64).view(np.uint64)
    sums = np.dot(wide, _multipliers("cpu").numpy().view(np.uint64)[:, : words.shape[1]].T)
    lengths = np.array([seed * num_bytes & MASK64 for seed in reversed(SEEDS)], np.uint64)
    with np.errstate(over="ignore"):
        digests = _mixed(sums + lengths)
    text = digests.astype(">u8").tobytes().hex()
    return [text[start : start + 32] for start in range(0, len(text), 32)]


@functools.cache
def is_exact_on(device: str) -> bool:
    """Does ``device`` give the digest that is known of certain bytes? Asked once a process.

    They fill three chunks of words of either sign, the last in part: every operation is in it, and
    a device that rounds or saturates 64-bit products, or adds them up in a float, gives another.
    """
    import torch

    words = stream(SEEDS[0], CHUNK + 77).view("int64")
    return fold_tensor(torch.from_numpy(words).to(device)) == _KNOWN


def fold_sums(tensor: torch.Tensor, *, kernel: Kernel = "numpy") -> tuple[torch.Tensor, int]:
    """(both sums as int64 on the tensor's device, number of bytes): nothing is waited for."""
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    words = _words(tensor)
    while True:
        words = _chunks(words, kernel)  # (chunks, 2 sums)
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
    return [
        "".join(
            f"{mixed((value & MASK64) + SEEDS[1 - at] * num_bytes):016x}"
            for at, value in enumerate(values)
        )
        for values, (_, num_bytes) in zip(host, sums, strict=True)
    ]


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


def _chunks(words: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Both sums of each chunk, (chunks, 2). ``words``: of the bytes, or (2, words) where each
    hash has an input of its own."""
    import torch

    each = words.ndim == 2
    words = words if each else words[None]
    count = words.shape[-1]
    multipliers = _multipliers(str(words.device))  # (2, CHUNK)
    if kernel == "compiled" and not each and words.device.type == "cpu":
        from divergence.numerics.compiled.summary import chunk_sums

        return torch.from_numpy(chunk_sums(words[0].numpy(), multipliers.numpy()))
    results = []
    whole = count // CHUNK
    step = 1 if words.device.type == "cpu" else _AT_ONCE  # there, what stays in cache
    for start in range(0, whole, step):
        part = words[:, start * CHUNK : min(start + step, whole) * CHUNK]
        results.append(_sums(part.reshape(len(words), -1, CHUNK), multipliers, each=each))
    if whole * CHUNK < count:
        rest = words[:, None, whole * CHUNK :]
        results.append(_sums(rest, multipliers[:, : rest.shape[-1]], each=each))
    if not results:
        return torch.zeros(0, 2, dtype=torch.int64, device=words.device)
    return torch.cat(results)


def _sums(words: torch.Tensor, multipliers: torch.Tensor, *, each: bool) -> torch.Tensor:
    import numpy as np
    import torch

    wide = words.to(torch.int64)  # (1 or 2, chunks, words)
    if wide.device.type == "cpu" and wide.shape[1] == 1:
        # numpy's product of two integer vectors is three times as fast as torch's two steps
        rows = [wide[at if each else 0, 0].numpy().view("uint64") for at in range(2)]
        products = [
            np.dot(row, multiplier.numpy().view("uint64"))
            for row, multiplier in zip(rows, multipliers, strict=True)
        ]
        return torch.tensor([[int(product.view("int64")) for product in products]])
    return torch.stack(
        [(wide[at if each else 0] * multipliers[at]).sum(-1) for at in range(2)], dim=-1
    )


@functools.lru_cache(maxsize=8)
def _multipliers(device: str) -> torch.Tensor:
    import numpy as np
    import torch

    host = np.stack([stream(seed, CHUNK) for seed in SEEDS]).view(np.int64)
    return torch.from_numpy(host).to(device)


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
