"""The ring that tensors wait in: no byte is another's while somebody holds it."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.errors import UsageError
from divergence.run import captured as buffer_module
from divergence.run.captured import MIN_BUFFER_BYTES, Buffer, BufferLimits, buffer_bytes


def ring(num_bytes: int) -> Buffer:
    """A ring of exactly so many bytes."""
    return Buffer(
        BufferLimits(
            ring_bytes=num_bytes, shard_bytes=1, line_bytes=1, stored_bytes=1, num_queued=1
        )
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(st.integers(0, 400), st.tuples(st.just("drop"), st.integers(0, 9))), max_size=60
    )
)
def test_places_never_overlap_and_keep_their_bytes(actions):
    """Whatever is taken and dropped in whatever order, each holder reads what it wrote."""
    buffer, held = ring(1024), []
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            if held:
                held.pop(action[1] % len(held))
            continue
        slot = buffer.take(action)
        if slot is None:
            continue
        slot.bytes()[:] = bytes([number % 251]) * action
        assert slot.begin % 16 == 0
        assert slot.begin + action <= 1024
        held.append((slot, number % 251))
        del slot
        assert all(bytes(one.bytes()) == bytes([value]) * one.num_bytes for one, value in held)
    held.clear()
    assert buffer.take(1024) is not None


def test_a_full_ring_has_no_place_until_the_first_is_dropped():
    """Places go in the order of memory: a later one that is dropped makes no room at the front."""
    buffer = ring(64)
    first, second = buffer.take(32), buffer.take(32)
    assert buffer.take(1) is None
    second = None
    assert buffer.take(1) is None
    first = None
    assert buffer.take(64) is not None
    assert (first, second) == (None, None)


def test_a_tensor_larger_than_the_ring_has_no_place():
    """Nor does an empty ring refuse what just fits."""
    buffer = ring(64)
    assert buffer.take(65) is None
    assert buffer.take(64) is not None


def test_pages_that_are_there_are_used_before_new_ones():
    """As long as the writer keeps up, a large ring costs no more memory than a small one."""
    buffer, previous = ring(1 << 20), None
    highest = 0
    for _ in range(1000):
        slot = buffer.take(100)
        highest = max(highest, slot.begin + 100)
        previous = slot  # the one before is dropped here
    assert previous is not None
    assert highest <= 3 * 112


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex128])
def test_a_slot_is_seen_as_a_tensor(dtype):
    """Of its dtype and shape, over the same memory."""
    buffer = ring(1 << 10)
    buffer.take(8)
    values = torch.arange(6).to(dtype).reshape(2, 3)
    slot = buffer.take(values.nbytes)
    slot.fill(values.data_ptr())
    assert torch.equal(slot.tensor(dtype, (2, 3)), values)
    assert bytes(slot.bytes()) == bytes(values.view(torch.uint8).numpy().tobytes())


def test_an_empty_tensor_takes_a_place_without_bytes():
    """Zero elements, whatever the shape."""
    slot = ring(64).take(0)
    assert slot.tensor(torch.float32, (0, 5)).shape == (0, 5)
    assert bytes(slot.bytes()) == b""


def test_large_copies_give_up_pythons_lock_and_are_whole():
    """The long way of copying is the same as the short one."""
    buffer = ring(1 << 22)
    values = torch.arange(1 << 20, dtype=torch.int32)[: (1 << 19)]
    slot = buffer.take(values.nbytes)
    slot.fill(values.data_ptr())
    assert torch.equal(slot.tensor(torch.int32, (1 << 19,)), values)


def test_an_emptied_ring_gives_its_pages_back():
    """And works as before."""
    buffer = ring(1 << 20)
    slot = buffer.take(1 << 20)
    slot.bytes()[:4] = b"abcd"
    buffer.trim()
    assert bytes(slot.bytes()[:4]) == b"abcd"  # held: nothing happens
    del slot
    gc.collect()
    buffer.trim()
    again = buffer.take(8)
    again.bytes()[:8] = b"12345678"
    assert bytes(again.bytes()) == b"12345678"


def test_the_shares_of_a_buffer_add_up():
    """Ring and bookkeeping stay within what was stated."""
    for num_bytes in (MIN_BUFFER_BYTES, 512 << 20, 3 << 30):
        limits = BufferLimits.of(num_bytes)
        rest = 2 * limits.line_bytes + limits.stored_bytes + 1024 * limits.num_queued
        assert limits.ring_bytes + rest <= num_bytes
        assert limits.shard_bytes * 2 <= limits.ring_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (64 << 20, 64 << 20),
        ("67108864", 64 << 20),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("64M", 64 << 20),
        ("100MB", 100_000_000),
        ("1.5GiB", 3 << 29),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(size, num_bytes):
    """Bytes, or a unit: MiB and M are powers of two, MB of ten."""
    assert buffer_bytes(size) == num_bytes


@pytest.mark.parametrize("size", ["", "many", "64Mib/s", "-64MiB", "1e9", "0", 1 << 20, "16MB"])
def test_a_size_that_cannot_work_is_refused(size):
    """With an example; 16 MB is less than the 16 MiB that are needed."""
    with pytest.raises(UsageError, match="--buffer") as caught:
        buffer_bytes(size)
    assert "--buffer 512MiB" in caught.value.hint


def test_a_places_tensor_is_a_slice_of_the_ring():
    """One storage, so that a runtime which knows page-locked memory by its first byte knows it."""
    buffer = ring(1024)
    slots = [buffer.take(24), buffer.take(24)]
    tensors = [slot.tensor(torch.float32, (2, 3)) for slot in slots]
    for slot, tensor in zip(slots, tensors, strict=True):
        assert tensor.untyped_storage().data_ptr() == buffer.tensor.untyped_storage().data_ptr()
        tensor.fill_(slot.begin)
        assert torch.frombuffer(slot.bytes(), dtype=torch.float32).tolist() == [slot.begin] * 6
    assert slots[0].tensor(torch.float32, (2, 3)).data_ptr() == buffer.address + slots[0].begin
    assert buffer.take(0).tensor(torch.int64, (0, 3)).shape == (0, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_loses_no_place_and_gives_none_out_twice():
    """Ctrl-C comes wherever it likes: what is held stays whole, and the rest can be taken."""
    line, ended = 0, False
    while not ended:
        line += 1
        buffer = ring(64)
        first = buffer.take(16)
        first.bytes()[:] = bytes([7]) * 16
        try:
            with interrupt_at(line):
                second = buffer.take(16)
            ended = True
        except KeyboardInterrupt:
            second = None
        third = buffer.take(16)
        third.bytes()[:] = bytes([9]) * 16
        assert bytes(first.bytes()) == bytes([7]) * 16
        del first, second, third
        gc.collect()
        assert buffer.empty
        assert buffer.take(64) is not None
    assert line > 10


@contextlib.contextmanager
def interrupt_at(line: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at the n-th line that runs in the buffer's module, counting entries
    of its functions."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        nonlocal count
        if frame.f_code.co_filename != buffer_module.__file__:
            return None
        if event in ("call", "line"):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
