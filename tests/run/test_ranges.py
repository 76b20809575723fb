"""Ranges: few requests, no byte that was not needed, bounded memory, failures that are told."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divergence.run import remote as module
from divergence.run.remote import Ranges, coalesced

CONTENT = bytes(range(251)) * 4000
"""Some 1 MB in which every place within 251 bytes is another."""


class Store:
    """Serves CONTENT under any name and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.broken = False
        self._lock = threading.Lock()

    def __call__(self, name: str, begin: int, end: int) -> bytes:
        with self._lock:
            self.asked.append((name, begin, end))
        if self.broken:
            raise OSError("gone")
        return CONTENT[begin:end]

    @property
    def num_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.asked)


@pytest.fixture
def store() -> Store:
    return Store()


def test_what_was_not_announced_is_one_exact_request(store):
    """No more bytes than were asked for."""
    ranges = Ranges(store)
    assert bytes(ranges.get("a", 1000, 1100)) == CONTENT[1000:1100]
    assert store.asked == [("a", 1000, 1100)]
    assert bytes(ranges.get("a", 5, 5)) == b""
    assert len(store.asked) == 1


def test_neighbours_are_one_request(store):
    """Announced ranges within the gap are fetched together; a part of what is kept costs none."""
    ranges = Ranges(store)
    ranges.expect([("a", 0, 100), ("a", 100, 300), ("a", 1000, 1200)])
    for begin, end in ((0, 100), (100, 300), (1000, 1200), (1050, 1100)):
        assert bytes(ranges.get("a", begin, end)) == CONTENT[begin:end]
    assert store.asked == [("a", 0, 1200)]


def test_what_lies_far_apart_is_not_read_along(store, monkeypatch):
    """Two requests cost less than the bytes between."""
    monkeypatch.setattr(module, "GAP_BYTES", 1000)
    ranges = Ranges(store)
    ranges.expect([("a", 0, 100), ("a", 50_000, 50_100), ("b", 100, 200)])
    for name, begin in (("a", 0), ("a", 50_000), ("b", 100)):
        ranges.get(name, begin, begin + 100)
    ranges.close()
    assert sorted(store.asked) == [("a", 0, 100), ("a", 50_000, 50_100), ("b", 100, 200)]


def test_a_large_range_is_fetched_in_parts(store, monkeypatch):
    """So that one tensor comes over several connections."""
    monkeypatch.setattr(module, "SPAN_BYTES", 300_000)
    ranges = Ranges(store)
    assert bytes(ranges.get("a", 7, 900_007)) == CONTENT[7:900_007]
    assert sorted(store.asked) == [
        ("a", 7, 300_007),
        ("a", 300_007, 600_007),
        ("a", 600_007, 900_007),
    ]


def test_memory_is_bounded_and_what_was_dropped_is_fetched_again(store, monkeypatch):
    """Least recently used first; half the budget may be filled ahead."""
    monkeypatch.setattr(module, "GAP_BYTES", 0)
    monkeypatch.setattr(module, "SPAN_BYTES", 1000)
    ranges = Ranges(store, budget_bytes=4000)
    wanted = [("a", k * 2000, k * 2000 + 1000) for k in range(20)]
    ranges.expect(wanted)
    for name, begin, end in wanted:
        assert bytes(ranges.get(name, begin, end)) == CONTENT[begin:end]
        assert ranges.num_bytes <= 4000
    assert store.num_bytes == 20_000  # each once
    ranges.get(*wanted[0])
    assert store.num_bytes > 20_000


def test_a_failure_is_told_and_can_be_tried_again(store):
    """A range that could not be fetched is not kept as if it had been."""
    ranges = Ranges(store)
    store.broken = True
    with pytest.raises(OSError, match="gone"):
        ranges.get("a", 0, 10)
    store.broken = False
    assert bytes(ranges.get("a", 0, 10)) == CONTENT[:10]


_RANGE = st.tuples(st.sampled_from("ab"), st.integers(0, 2000), st.integers(0, 500)).map(
    lambda t: (t[0], t[1], t[1] + t[2])
)


@given(wanted=st.lists(_RANGE, max_size=40), gap=st.integers(0, 300), span=st.integers(50, 3000))
@pytest.mark.slow
def test_ranges_put_together_cover_what_is_wanted(wanted, gap, span):
    """Every wanted range lies in one of them; nothing but gaps is added; none grows too long."""
    patch = pytest.MonkeyPatch()
    with patch.context() as changed:
        changed.setattr(module, "GAP_BYTES", gap)
        changed.setattr(module, "SPAN_BYTES", span)
        spans = coalesced(wanted)
    wanted = [one for one in wanted if one[1] < one[2]]
    needed = {(name, byte) for name, begin, end in wanted for byte in range(begin, end)}
    for name, begin, end in spans:
        assert (name, begin) in needed and (name, end - 1) in needed
        idle = 0
        for byte in range(begin, end):
            idle = 0 if (name, byte) in needed else idle + 1
            assert idle <= gap
    assert all(one[2] - one[1] <= span or one in wanted for one in spans)
    for name, begin, end in wanted:
        assert any(n == name and b <= begin and end <= e for n, b, e in spans)
    assert len(set(spans)) == len(spans) <= len(set(wanted))


@pytest.mark.slow
@given(wanted=st.lists(_RANGE, max_size=30))
def test_any_order_of_reading_gives_the_right_bytes(wanted):
    """Whatever was announced, and with a budget that holds next to nothing."""
    ranges = Ranges(Store(), budget_bytes=700)
    ranges.expect(reversed(wanted))
    for name, begin, end in wanted:
        assert bytes(ranges.get(name, begin, end)) == CONTENT[begin:end]
    ranges.close()
