"""--buffer is kept: whatever is captured, by the system's own count; and nobody waits for ever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading

import msgspec
import pytest
import torch

from divergence.errors import RunWriteError
from divergence.numerics.kernels import has_compiled
from divergence.recording.keeper import BufferKeeper
from divergence.run.reader import Run
from divergence.run.schema.manifest import Sizes
from divergence.run.storage import directory_target
from divergence.run.writing.buffer import MIN_BUFFER_BYTES, Buffer, Limits
from divergence.run.writing.captured_tensor import ShardEntry, piece_of
from divergence.run.writing.reduction import Reducer
from divergence.run.writing.shard_builder import ShardBuilder
from divergence.run.writing.writer import RunWriter

MIB = 1 << 20
needs_numba = pytest.mark.skipif(not has_compiled(), reason="numba is not installed")

# Pushes forwards through hooks' keeper and the writer, as a capture does; the model is left out,
# so that the process grows by what the capture takes.
PROGRAM = """
import json, sys
from pathlib import Path
import msgspec, torch
from divergence.recording.keeper import BufferKeeper, Recent
from divergence.run.writing.buffer import Buffer, Limits
from divergence.run.schema.manifest import Sizes
from divergence.run.reader import Run
from divergence.run.writing.writer import RunWriter

run, out, kernel = sys.argv[1:4]
buffer_mib, steps, numel, sites = [int(word) for word in sys.argv[4:]]
torch.set_num_threads(1)
manifest = msgspec.structs.replace(Run.open(run).manifest, sizes=Sizes(), complete=False)

def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def capture(out, steps, kernel):
    manifest.sizes = Sizes()
    buffer = Buffer(Limits.of(buffer_mib << 20, kernel=kernel))
    with RunWriter(Path(out), manifest, buffer=buffer) as writer:
        keeper, recent = BufferKeeper(writer, buffer), Recent()
        for step in range(steps):
            for number in range(sites):
                source.add_(1)
                item = keeper.keep(source)
                recent.add(source, item)
                for port in ("in", "out"):
                    writer.put(item, pass_="free", sample=0, step=step, site=f"m.{number}:{port}",
                               order=number)

source = torch.zeros(64)
capture(out + "-warm", 1, "numpy")  # imports, threads
source = torch.zeros(numel)
before = status_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
capture(out, steps, kernel)
grown = status_bytes("VmHWM") - before
print(json.dumps([grown, manifest.sizes.num_records, manifest.sizes.stored_bytes]))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux counts peaks anew"
)
@pytest.mark.parametrize(
    ("buffer_mib", "steps", "numel", "sites", "kernel"),
    [
        (16, 4, 1 << 18, 20, "numpy"),  # tensors of 1 MiB, five times the buffer
        (16, 16, 1 << 18, 20, "numpy"),  # four times as many steps
        pytest.param(64, 12, 1 << 20, 20, "numpy", marks=pytest.mark.slow),  # larger ones
        # 80,000 records of 1 KiB: the bookkeeping counts too
        pytest.param(16, 400, 256, 100, "numpy", marks=pytest.mark.slow),
        # numba and its loops are in the bound
        pytest.param(448, 12, 1 << 20, 20, "compiled", marks=[pytest.mark.slow, needs_numba]),
    ],
)
def test_a_capture_takes_no_more_than_its_buffer(
    buffer_mib, steps, numel, sites, kernel, captured, tmp_path
):
    """The growth of a process's peak resident memory, at several sizes and numbers of steps."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(captured("llama").path), str(tmp_path / "run"),
         kernel, *map(str, (buffer_mib, steps, numel, sites))],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, num_records, stored_bytes = json.loads(done.stdout)
    assert num_records == 2 * steps * sites
    assert stored_bytes == steps * sites * numel * 4
    assert MIB < grown <= buffer_mib * MIB


@pytest.fixture
def writing(tmp_path, captured):
    """``writing()`` → (writer, keep and put one tensor) over the smallest buffer."""
    manifest = msgspec.structs.replace(captured("llama").manifest, sizes=Sizes(), complete=False)

    def start():
        buffer = Buffer(Limits.of(MIN_BUFFER_BYTES))
        writer = RunWriter(tmp_path / "run", manifest, buffer=buffer)
        keeper = BufferKeeper(writer, buffer)

        def put(step: int, num_bytes: int = MIB) -> None:
            tensor = torch.full((num_bytes // 4,), float(step))
            writer.put(
                keeper.keep(tensor), pass_="free", sample=0, step=step, site="a:out", order=0
            )

        return writer, put

    return start


def test_a_few_bytes_that_are_stored_hold_no_place(tmp_path, captured):
    """Token ids wait for their shard; the floats around them are reduced, and the places that
    those had are used again."""
    manifest = msgspec.structs.replace(captured("llama").manifest, sizes=Sizes(), complete=False)
    buffer = Buffer(Limits.of(MIN_BUFFER_BYTES))
    writer = RunWriter(tmp_path / "run", manifest, buffer=buffer, reducer=Reducer("sketch"))
    keeper = BufferKeeper(writer, buffer)
    used = []
    with writer:
        for step in range(9):
            for site, tensor in (
                ("ids:in", torch.full((1, 16), step)),
                ("a:out", torch.full((1, 8, MIB // 32), float(step))),
            ):
                item = keeper.keep(tensor)
                used.append(item.slot.begin)
                writer.put(item, pass_="free", sample=0, step=step, site=site, order=0)
            item = None  # as a capture, which holds none
            writer.drain()
    assert max(used) < 2 * MIB
    run = Run.open(tmp_path / "run")
    assert run.verify() == []
    stored = [run.read(record)[0, 0].item() for record in run.records if record.site == "ids:in"]
    assert stored == list(range(9))


def test_what_has_memory_of_its_own_leaves_the_short_ones_theirs():
    """Sketches lie in no ring: however many there are, token ids after them hold no place."""
    buffer, pending = Buffer(Limits.of(MIN_BUFFER_BYTES)), ShardBuilder(rank=0)
    for number in range(200):
        pending.add(number.to_bytes(16, "big"), piece_of(torch.full((2048,), float(number))))
    slot = buffer.take(128)
    slot.tensor(torch.int64, (16,)).copy_(torch.arange(16))
    piece = ShardEntry("int64", (16,), slot.bytes(), slot)
    pending.add(b"ids" + bytes(13), piece)
    assert not buffer.empty
    del slot, piece
    assert buffer.empty


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_tensor_larger_than_the_buffer_is_stored_all_the_same(writing, tmp_path):
    """Alone, with memory of its own; and what comes after finds the buffer as it was."""
    writer, put = writing()
    with writer:
        put(0)
        put(1, 3 * MIN_BUFFER_BYTES)
        for step in range(2, 40):
            put(step)
    run = Run.open(tmp_path / "run")
    assert [run.read(record)[0].item() for record in run.records] == list(range(40))
    assert run.verify() == []


def test_a_disk_that_fills_up_while_the_model_waits_ends_the_wait(writing, tmp_path, monkeypatch):
    """The buffer is full, the writer gives up: the model gets its error, no deadlock; the shards
    that were written stay readable."""
    writer, put = writing()
    put(0)
    writer.flush()
    monkeypatch.setattr(directory_target, "write_shard", full)
    with pytest.raises(RunWriteError, match="No space left"), writer:
        for step in range(1, 100):
            put(step)
    monkeypatch.undo()
    run = Run.open(tmp_path / "run")
    assert (run.manifest.complete, len(run.records)) == (False, 1)
    assert "No space left" in run.manifest.stopped_by
    assert run.verify() == []
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_half_a_shard_is_no_shard(writing, tmp_path, monkeypatch):
    """The disk fills up in the middle of a shard: nothing of it is left, nothing points at it."""
    written = 0
    writev = os.writev

    def some(file, parts):
        nonlocal written
        written += 1
        if written > 3:
            full()
        return writev(file, [memoryview(parts[0])[: max(1, parts[0].nbytes // 2)]])

    monkeypatch.setattr(os, "writev", some)
    writer, put = writing()
    with pytest.raises(RunWriteError, match="No space left"), writer:
        for step in range(100):
            put(step)
    monkeypatch.undo()
    run = Run.open(tmp_path / "run")
    assert run.records == []
    assert list((tmp_path / "run/tensors").iterdir()) == []


def test_short_writes_are_continued(writing, tmp_path, monkeypatch):
    """A system that writes a little at a time writes everything, in order."""
    writev = os.writev
    monkeypatch.setattr(
        os, "writev", lambda file, parts: writev(file, [memoryview(parts[0])[:100_003]])
    )
    writer, put = writing()
    with writer:
        for step in range(5):
            put(step)
    monkeypatch.undo()
    run = Run.open(tmp_path / "run")
    assert run.verify() == []
    assert [run.read(record)[-1].item() for record in run.records] == list(range(5))


def test_a_directory_that_is_removed_meanwhile_is_an_error(writing, tmp_path):
    """Not a hang, and not a run that looks whole."""
    import shutil

    writer, put = writing()
    with pytest.raises(RunWriteError), writer:
        for step in range(200):
            put(step)
            if step == 3:
                # at once: a shard that is written meanwhile has no place
                (tmp_path / "run/tensors").rename(tmp_path / "removed")
                shutil.rmtree(tmp_path / "removed", ignore_errors=True)
    # read as it stands: a shard that was there already is missing now
    assert not json.loads((tmp_path / "run/manifest.json").read_bytes())["complete"]


def test_ctrl_c_while_waiting_for_the_disk_ends_the_capture(writing, tmp_path, monkeypatch):
    """The wait can be interrupted; what was put before is kept, and the run says so."""
    holding, release = threading.Event(), threading.Event()
    write_shard = directory_target.write_shard

    def slow(path, pieces, **options):
        holding.set()
        release.wait(60)
        write_shard(path, pieces, **options)

    monkeypatch.setattr(directory_target, "write_shard", slow)
    writer, put = writing()

    def interrupt():
        holding.wait(60)
        import _thread
        import time

        time.sleep(0.3)  # the model's thread has filled the buffer by then, and waits
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), writer:
        try:
            for step in range(1000):
                put(step)
        finally:
            release.set()  # the writer may end its shard, now that the model was interrupted
    thread.join()
    run = Run.open(tmp_path / "run")
    assert run.manifest.stopped_by == "interrupted"
    assert 0 < len(run.records) < 100
    assert run.verify() == []
