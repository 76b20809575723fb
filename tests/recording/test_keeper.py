"""What is kept of a tensor, and when it is the same one; copies that arrive late."""

import contextlib
import types

import msgspec
import pytest
import torch

from divergence import Run
from divergence.recording.keeper import (
    BufferKeeper,
    CopyKeeper,
    DeviceCopies,
    Recent,
    SideStream,
    can_pin,
    side_stream,
)
from divergence.run.captured import MIN_BUFFER_BYTES, Buffer, BufferLimits
from divergence.run.manifest import Sizes
from divergence.run.writer import RunWriter


class Late:
    """An event whose copy is made when somebody waits for it, or ``arrive`` is called."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        if not self.arrived:
            self._target.copy_(self._source)
            self.arrived = True


class LateStream:
    """A stream that is in no hurry, and remembers what it was given."""

    def __init__(self) -> None:
        self.events: list[Late] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Late:
        self.events.append(Late(target, source))
        return self.events[-1]


class OnDevice(torch.Tensor):
    """A tensor that says it is not in host memory."""

    is_cpu = False


def on_device(values: torch.Tensor) -> torch.Tensor:
    return values.as_subclass(OnDevice)


def room() -> Buffer:
    return Buffer(BufferLimits.of(MIN_BUFFER_BYTES))


@pytest.fixture
def keeper():
    """A keeper over a buffer for a device whose copies are late; and the stream."""
    stream = LateStream()
    writer = types.SimpleNamespace(make_room=lambda num_bytes: None)
    return BufferKeeper(writer, room(), streams=lambda device: stream), stream


def test_a_write_after_the_hook_does_not_reach_the_copy(keeper):
    """The copy is made later than the model's next write in place, and holds what the hook saw."""
    keep, stream = keeper
    source = on_device(torch.arange(4.0))
    item = keep.keep(source)
    source.zero_()
    assert not stream.events[0].arrived
    assert item.tensor.tolist() == [0, 1, 2, 3]
    assert stream.events[0].arrived


def test_a_place_is_no_one_elses_before_its_copy_has_arrived(keeper):
    """An item that is dropped while its copy is under way is waited for, then its place is free."""
    keep, stream = keeper
    item = keep.keep(on_device(torch.ones(4)))
    begin = item.slot.begin
    del item
    assert stream.events[0].arrived
    assert keep._buffer.take(16).begin == begin


def test_clones_on_the_device_are_bounded():
    """Beyond the limit the hook waits for the oldest copy; never for more."""
    stream, buffer = LateStream(), room()
    copies = DeviceCopies(stream, max_bytes=100)
    slots = []
    for number in range(5):
        clone = copies.clone(torch.full((10,), float(number)))
        slots.append(buffer.take(clone.nbytes))
        copies.start(clone, slots[-1])
        assert copies.num_bytes <= 100
    assert [event.arrived for event in stream.events] == [True, True, True, False, False]
    for number, slot in enumerate(slots):
        assert bytes(slot.bytes()) == bytes(torch.full((10,), float(number)).numpy().data)


def test_a_clone_larger_than_the_limit_is_copied_alone():
    """It waits for all before it, and is not refused."""
    stream, buffer = LateStream(), room()
    copies = DeviceCopies(stream, max_bytes=100)
    first = copies.clone(torch.ones(10))
    copies.start(first, buffer.take(first.nbytes))
    large = copies.clone(torch.ones(1000))
    assert stream.events[0].arrived
    copies.start(large, buffer.take(large.nbytes))
    copies.clone(torch.ones(1))
    assert stream.events[1].arrived


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.empty(0, 3),
    ],
    ids=["transposed", "sparse", "conjugated", "empty"],
)
def test_any_layout_arrives_by_its_values(tensor):
    """Clones are dense and contiguous, with nothing pending."""
    copies, buffer = DeviceCopies(LateStream(), max_bytes=1 << 20), room()
    clone = copies.clone(tensor)
    slot = buffer.take(clone.nbytes)
    copies.start(clone, slot)
    slot.bytes()
    found = slot.tensor(clone.dtype, tuple(clone.shape))
    expected = tensor.to_dense() if tensor.is_sparse else tensor
    assert torch.equal(found, expected.resolve_conj())


def test_a_run_is_written_from_late_copies(tmp_path, captured):
    """The writer's thread waits for each copy that it reads; the model's thread for none."""
    stream, buffer = LateStream(), room()
    manifest = msgspec.structs.replace(captured("llama").manifest, sizes=Sizes(), complete=False)
    with RunWriter(tmp_path / "r", manifest, buffer=buffer) as writer:
        keep = BufferKeeper(writer, buffer, streams=lambda device: stream)
        for step in range(50):
            source = on_device(torch.full((1000,), float(step)))
            writer.put(keep.keep(source), pass_="free", sample=0, step=step, site="a:out", order=0)
            source.fill_(-1)
    run = Run.open(tmp_path / "r")
    assert [run.read(record)[0].item() for record in run.records] == list(range(50))
    assert run.verify() == []


def test_a_host_has_no_stream_to_copy_on():
    """CPU tensors are copied in the hook, into memory that needs no lock."""
    assert side_stream(torch.device("cpu")) is None
    assert not can_pin(torch.device("cpu"))


def test_a_side_stream_waits_for_what_was_computed(monkeypatch):
    """The copy runs on the other stream, behind the compute stream, and its event behind it."""
    said = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            said.append(("wait", other))

    class Event:
        def record(self, stream):
            said.append(("record", stream))

    class Target:
        def copy_(self, source, *, non_blocking):
            said.append(("copy", source, non_blocking))

    @contextlib.contextmanager
    def on(stream):
        said.append(("on", stream))
        yield
        said.append(("off", stream))

    module = types.SimpleNamespace(
        Stream=Stream, Event=Event, stream=on, current_stream=lambda d: "own"
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    side = SideStream("device")
    assert isinstance(side.copy(Target(), "tensor"), Event)
    beside = side._stream
    assert said == [
        ("wait", "own"),
        ("on", beside),
        ("copy", "tensor", True),
        ("record", beside),
        ("off", beside),
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["transposed", "strided", "sparse", "with a gradient", "scalar", "empty"],
)
def test_a_copy_holds_the_values_and_nobody_writes_to_it(tensor):
    """Dense, contiguous, detached, in memory of its own."""
    item = CopyKeeper().keep(tensor)
    expected = (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone()
    if not tensor.is_sparse:
        with torch.no_grad():
            tensor.zero_()
    assert item.tensor.is_contiguous()
    assert not item.tensor.requires_grad
    assert torch.equal(item.tensor, expected)


def test_a_tensor_is_recognised_until_it_is_written_to():
    """By identity and version: a view, an equal tensor and a changed one are others."""
    recent, tensor, keep = Recent(), torch.ones(3), CopyKeeper().keep
    item = recent.kept(tensor, keep)
    assert recent.kept(tensor, keep) is item
    assert recent.kept(tensor[:], keep) is not item
    assert recent.kept(torch.ones(3), keep) is not item
    tensor.add_(1)
    assert recent.kept(tensor, keep) is not item


def test_recognition_keeps_no_tensor_alive():
    """Its memory is the model's to give back; an address used again is no recognition."""
    recent, tensor = Recent(), torch.ones(3)
    recent.kept(tensor, CopyKeeper().keep)
    (reference,) = (entry[0] for entry in recent.items.values())
    del tensor
    assert reference() is None


def test_without_a_version_counter_nothing_is_recognised():
    """In inference mode torch counts no writes, so nobody knows."""
    recent, keep = Recent(), CopyKeeper().keep
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert recent.kept(tensor, keep) is not recent.kept(tensor, keep)
