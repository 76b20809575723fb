"""What was stored before is recognised, in bounded memory."""

from __future__ import annotations

import math
import tracemalloc

from divergence.numerics.summary import Summary
from divergence.run.writer import DedupIndex

SUMMARY = Summary(min=-1.5, max=2.0, mean=0.1, rms=1.0, absmax=2.0, num_nan=3, num_zero=7)
NOTHING = Summary(min=None, max=None, mean=None, rms=None, absmax=None, num_nan=5)
KIND = ("float32", (2, 3))


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_what_was_added_is_found_again():
    """Place and summary come back as they were, also of a tensor without a finite element."""
    stored = DedupIndex(max_bytes=1 << 20, rank=2)
    stored.add(stored.key(digest(1), KIND), shard=3, clash=0, summary=SUMMARY)
    stored.add(stored.key(digest(2), KIND), shard=4, clash=2, summary=NOTHING)
    place, summary = stored.find(stored.key(digest(1), KIND))
    assert (place.shard, place.key) == ("tensors/r00002-000003.safetensors", digest(1).hex())
    assert summary == SUMMARY
    place, summary = stored.find(stored.key(digest(2), KIND))
    assert place.key == digest(2).hex() + "-2"
    assert summary == NOTHING


def test_equal_bytes_of_another_kind_are_not_found():
    """dtype and shape are part of what a tensor is."""
    stored = DedupIndex(max_bytes=1 << 20, rank=0)
    stored.add(stored.key(digest(1), KIND), shard=0, clash=0, summary=SUMMARY)
    assert stored.find(stored.key(digest(1), ("float32", (3, 2)))) is None
    assert stored.find(stored.key(digest(1), ("int32", (2, 3)))) is None
    assert stored.find(stored.key(digest(2), KIND)) is None


def test_what_is_met_again_outlives_what_is_not():
    """The limit forgets the oldest; a hit makes an entry young."""
    stored = DedupIndex(max_bytes=320 * 20, rank=0)
    stored.add(stored.key(digest(0), KIND), shard=0, clash=0, summary=SUMMARY)
    for number in range(1, 100):
        stored.add(stored.key(digest(number), KIND), shard=0, clash=0, summary=SUMMARY)
        assert stored.find(stored.key(digest(0), KIND)) is not None
    assert stored.find(stored.key(digest(1), KIND)) is None
    assert stored.find(stored.key(digest(99), KIND)) is not None


def test_memory_stays_within_the_limit():
    """A hundred times as many tensors as there is room for take no more than was stated."""
    limit = 1 << 20
    tracemalloc.start()
    try:
        stored = DedupIndex(max_bytes=limit, rank=0)
        for number in range(100 * limit // 320):
            stored.add(stored.key(digest(number), KIND), shard=number % 7, clash=0, summary=SUMMARY)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < limit
    assert math.isclose(stored.find(stored.key(digest(number), KIND))[1].mean, 0.1)
