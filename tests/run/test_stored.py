"""What was stored before is recognised, in bounded memory."""

import math
import tracemalloc

import pytest

from divergence.numerics.summary import Summary
from divergence.run.record import Place
from divergence.run.writer import DedupIndex

KIND = ("float32", (2, 3))


def content(number: int) -> tuple[str, str, tuple[int, ...]]:
    return number.to_bytes(16, "little").hex(), *KIND


def place(number: int) -> Place:
    return Place(shard=f"tensors/r00000-{number % 7:06d}.safetensors", key=content(number)[0])


def summary() -> Summary:
    """Of numbers that are nobody else's, as a tensor's are."""
    least, most, mean = map(float, ("-1.5", "2.0", "0.1"))
    return Summary(min=least, max=most, mean=mean, rms=most / 2, absmax=most * 1.5, num_nan=3)


def test_what_was_added_is_found_again():
    """Place and summary come back as they were."""
    stored = DedupIndex(max_bytes=1 << 20)
    stored.add(content(1), place(1), summary())
    assert stored.find(content(1)) == (place(1), summary())


def test_equal_bytes_of_another_kind_are_not_found():
    """dtype and shape are part of what a tensor is."""
    stored = DedupIndex(max_bytes=1 << 20)
    stored.add(content(1), place(1), summary())
    assert stored.find((content(1)[0], "float32", (3, 2))) is None
    assert stored.find((content(1)[0], "int32", (2, 3))) is None
    assert stored.find(content(2)) is None


def test_what_is_met_again_outlives_what_is_not():
    """The limit forgets the oldest; a hit makes an entry young."""
    stored = DedupIndex(max_bytes=800 * 20)
    stored.add(content(0), place(0), summary())
    for number in range(1, 100):
        stored.add(content(number), place(number), summary())
        assert stored.find(content(0)) is not None
    assert stored.find(content(1)) is None
    assert stored.find(content(99)) is not None


@pytest.mark.slow
def test_memory_stays_within_the_limit():
    """A hundred times as many tensors as there is room for take no more than was stated."""
    limit = 1 << 20
    tracemalloc.start()
    try:
        stored = DedupIndex(max_bytes=limit)
        for number in range(100 * limit // 800):
            stored.add(content(number), place(number), summary())
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < limit
    assert math.isclose(stored.find(content(number))[1].mean, 0.1)
