"""The device digest against its definition in plain integers."""

import numpy as np
import pytest
import torch

from divergence.numerics import sketches as fold
from divergence.numerics.sketches import (
    CHUNK,
    MASK64,
    SEEDS,
    fold_many,
    fold_sums,
    fold_tensor,
    folds_of,
    is_exact_on,
    mixed,
    stream,
)
from divergence.numerics.sums import has_compiled

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
GAMMA = 0x9E3779B97F4A7C15


def by_definition(data: bytes) -> str:
    """docs/dump-format.md, word for word."""
    text = ""
    for at, seed in enumerate(SEEDS):
        words = signed_words(data)
        while True:
            sums = [
                sum(
                    mixed(seed + (i + 1) * GAMMA) * word
                    for i, word in enumerate(words[start : start + CHUNK])
                )
                & MASK64
                for start in range(0, len(words), CHUNK)
            ]
            if len(sums) <= 1:
                break
            words = signed_words(b"".join(one.to_bytes(8, "little") for one in sums))
        value = sums[0] if sums else 0
        text += f"{mixed(value + SEEDS[1 - at] * len(data)):016x}"
    return text


def signed_words(data: bytes) -> list[int]:
    data += bytes(-len(data) % 4)
    return [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(3)
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (2, 3, 64)], ids=str)
def test_any_dtype_and_size(dtype, shape):
    """The torch form gives the defined digest, also where bytes fill no whole word."""
    tensor = random_of(dtype, shape)
    assert fold_tensor(tensor) == by_definition(bytes_of(tensor))


@pytest.mark.parametrize("num_words", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_several_chunks(num_words):
    """Chunks are hashed, and their results hashed again."""
    tensor = torch.arange(num_words, dtype=torch.int32) * 2654435 - 77
    assert fold_tensor(tensor) == by_definition(bytes_of(tensor))


def test_layout_does_not_matter():
    """A transposed view, an unaligned slice and a lazily conjugated tensor are their values."""
    square = torch.randn(8, 6)
    assert fold_tensor(square.T) == fold_tensor(square.T.contiguous())
    odd = torch.arange(40, dtype=torch.uint8)[3:30]
    assert fold_tensor(odd) == by_definition(bytes(range(3, 30)))
    complex_ = torch.randn(5, dtype=torch.complex64)
    assert fold_tensor(complex_.conj()) == fold_tensor(complex_.conj().resolve_conj())


def test_empty_and_zeros():
    """Nothing, one zero byte and two are three different things."""
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in range(3)]
    found = [fold_tensor(tensor) for tensor in tensors]
    assert found == [by_definition(bytes(n)) for n in range(3)]
    assert len(set(found)) == 3


def test_one_bit_changes_it():
    """Any single flipped bit gives another digest, and two swapped words do."""
    tensor = torch.randn(64)
    whole = fold_tensor(tensor)
    seen = {whole}
    for bit in range(32):
        changed = tensor.clone().view(torch.int32)
        changed[17] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        seen.add(fold_tensor(changed))
    swapped = tensor.clone()
    swapped[[3, 9]] = tensor[[9, 3]]
    seen.add(fold_tensor(swapped))
    assert len(seen) == 34


def test_many_at_once():
    """Sums of many tensors come to the host together and give each tensor's digest."""
    tensors = [torch.randn(n) for n in (1, 5, 300)]
    assert folds_of([fold_sums(one) for one in tensors]) == [fold_tensor(one) for one in tensors]
    assert folds_of([]) == []


def test_a_known_value():
    """The example of docs/dump-format.md: the bytes 0 to 7."""
    assert stream(SEEDS[0], 1)[0] == mixed(SEEDS[0] + GAMMA)
    assert fold_tensor(torch.arange(8, dtype=torch.uint8)) == by_definition(bytes(range(8)))


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
@pytest.mark.parametrize("num_bytes", [0, 1, 3, 40, CHUNK * 4, CHUNK * 4 + 9, CHUNK * 11])
def test_compiled(num_bytes):
    """Compiled loops give the same digest, whether they fill chunks or not."""
    torch.manual_seed(num_bytes)
    tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert fold_tensor(tensor, kernel="compiled") == fold_tensor(tensor)


def test_a_known_answer(monkeypatch):
    """A device is believed if it gives the digest that plain integers give."""
    words = stream(SEEDS[0], CHUNK + 77)
    assert by_definition(words.tobytes()) == fold._KNOWN
    assert is_exact_on("cpu")
    is_exact_on.cache_clear()
    exact = fold._sums

    def in_floats(words, multipliers, *, each):
        return exact(words, multipliers, each=each).double().long()

    monkeypatch.setattr(fold, "_sums", in_floats)
    assert not is_exact_on("cpu")
    is_exact_on.cache_clear()


def test_many_at_once_have_the_digests_of_each():
    """Of any lengths, read-only or not."""
    generator = np.random.default_rng(3)
    lengths = [0, 1, 2, 3, 4, 7, 8, 64, 64, 577, 577, 1154, 1 << 15, (1 << 15) + 2, 1 << 19] * 3
    buffers = [memoryview(generator.bytes(length)) for length in lengths]
    each = [fold_tensor(torch.from_numpy(np.frombuffer(one, np.uint8).copy())) for one in buffers]
    assert fold_many(buffers) == each
    assert fold_many([memoryview(bytearray(one)) for one in buffers]) == each
    assert fold_many([]) == []
