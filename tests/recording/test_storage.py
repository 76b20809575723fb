"""--buffer is kept, by the system's own count, and nobody waits for ever; which loops digest."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from divergence import Run, capture
from divergence.errors import RunWriteError
from divergence.numerics.sums import RESIDENT_BYTES, WORTH_BYTES, has_compiled, kernel_for
from divergence.recording.engines.sessions import about_bytes
from divergence.recording.keeper import BufferKeeper
from divergence.run import target as directory_target
from divergence.run.captured import (
    DEFAULT_BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    Buffer,
    BufferLimits,
    ShardEntry,
    piece_of,
)
from divergence.run.manifest import Sizes
from divergence.run.writer import Reducer, RunWriter, ShardBuilder

MIB = 1 << 20
needs_numba = pytest.mark.skipif(not has_compiled(), reason="numba is not installed")

# Pushes forwards through hooks' keeper and the writer, as a capture does; the model is left out,
# so that the process grows by what the capture takes.
PROGRAM = """
import json, sys
from pathlib import Path
import msgspec, torch
from divergence.recording.keeper import BufferKeeper, Recent
from divergence.run.captured import Buffer, BufferLimits
from divergence.run.manifest import Sizes
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

run, out, kernel = sys.argv[1:4]
buffer_mib, steps, numel, sites = [int(word) for word in sys.argv[4:]]
torch.set_num_threads(1)
manifest = msgspec.structs.replace(Run.open(run).manifest, sizes=Sizes(), complete=False)

def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def capture(out, steps, kernel):
    manifest.sizes = Sizes()
    buffer = Buffer(BufferLimits.of(buffer_mib << 20, kernel=kernel))
    with RunWriter(Path(out), manifest, buffer=buffer) as writer:
        keeper, recent = BufferKeeper(writer, buffer), Recent()
        for step in range(steps):
            for number in range(sites):
                source.add_(1)
                item = recent.kept(source, keeper.keep)
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
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(captured("llama").path),
            str(tmp_path / "run"),
            kernel,
            *map(str, (buffer_mib, steps, numel, sites)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
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
        buffer = Buffer(BufferLimits.of(MIN_BUFFER_BYTES))
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
    buffer = Buffer(BufferLimits.of(MIN_BUFFER_BYTES))
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
    buffer, pending = Buffer(BufferLimits.of(MIN_BUFFER_BYTES)), ShardBuilder(rank=0)
    for number in range(200):
        pending.add(f"{number:032x}", piece_of(torch.full((2048,), float(number))))
    slot = buffer.take(128)
    slot.tensor(torch.int64, (16,)).copy_(torch.arange(16))
    piece = ShardEntry("int64", (16,), slot.bytes(), slot)
    pending.add("ids", piece)
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


def test_half_a_shard_is_no_shard(writing, tmp_path):
    """No more can be written in the middle of a shard: nothing of it is left, nothing points at
    it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer, put = writing()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(RunWriteError, match="File too large"), writer:
            for step in range(100):
                put(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run = Run.open(tmp_path / "run")
    assert run.records == []
    assert list((tmp_path / "run/tensors").iterdir()) == []


def test_a_directory_that_is_removed_meanwhile_is_an_error(writing, tmp_path):
    """Not a hang, and not a run that looks whole."""
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


PROMPT = ["Snow fell on the harbour"]


def test_volume_by_hand():
    """Two linear layers of 3 → 5 and 5 → 3, and a block around them, over 2 + 4 tokens."""
    block = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
    samples = [SimpleNamespace(prompt_ids=[1, 2])]
    linears = about_bytes(block, {"0", "1", "2"}, samples, 4)
    assert linears == 6 * 4 * (8 + 8)  # the GELU has no parameters to tell its width by
    assert about_bytes(block, {"."}, samples, 4) == 6 * 4 * (3 + 3)
    assert about_bytes(block, set(), samples, 4) == 0
    assert about_bytes(torch.nn.GELU(), {"."}, samples, 4) == 0


def test_the_volume_is_near_what_is_seen(shared_run):
    """Within a factor of two of the bytes of every module's tensors (attention weights, which no
    parameter tells of, are small here)."""
    run = shared_run(
        model={"hidden": 256, "num_blocks": 2},
        prompts=PROMPT,
        max_new_tokens=3,
        sites=["modules"],
        probe=False,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.manifest.model.source)
    found = about_bytes(model, set(run.manifest.plan.modules), run.manifest.tokens.samples, 3)
    assert 0.5 < found / run.manifest.sizes.seen_bytes < 2


@pytest.mark.parametrize(
    ("num_bytes", "buffer_bytes", "kernel"),
    [
        (WORTH_BYTES - 1, DEFAULT_BUFFER_BYTES, "numpy"),
        (WORTH_BYTES, DEFAULT_BUFFER_BYTES, "compiled"),
        (WORTH_BYTES, MIN_BUFFER_BYTES, "numpy"),
        (1 << 40, 4 * RESIDENT_BYTES - 1, "numpy"),
    ],
)
def test_compiled_loops_where_they_pay_and_fit(monkeypatch, num_bytes, buffer_bytes, kernel):
    """Many bytes, and a buffer of which the loops' own memory is a small part."""
    monkeypatch.setattr("divergence.numerics.sums.has_compiled", lambda: True)
    assert kernel_for(num_bytes, memory_bytes=buffer_bytes) == kernel


def test_compiled_loops_are_within_the_bound():
    """Their memory is taken off the ring, not added to the buffer."""
    plain, compiled = (
        BufferLimits.of(DEFAULT_BUFFER_BYTES, kernel=kernel) for kernel in ("numpy", "compiled")
    )
    assert plain.ring_bytes - compiled.ring_bytes == RESIDENT_BYTES
    assert compiled.shard_bytes == compiled.ring_bytes // 4


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("full", marks=pytest.mark.slow),
        "sketch",
        pytest.param("stats", marks=pytest.mark.slow),
    ],
)
def test_the_run_is_the_same(tiny_model, tmp_path, monkeypatch, mode):
    """Digests are equal; statistics and sketches are, to rounding."""
    model = str(tiny_model("llama", hidden=256, num_blocks=2, dtype="bfloat16"))

    def captured(name):
        return capture(
            model,
            out=tmp_path / name,
            prompts=PROMPT,
            max_new_tokens=3,
            sites=["modules"],
            store=mode,
            probe=False,
        )

    one = captured("numpy")
    monkeypatch.setattr("divergence.numerics.sums.WORTH_BYTES", 1)
    two = captured("compiled")
    assert "numba" in sys.modules
    for a, b in zip(one.records, two.records, strict=True):
        assert (a.site, a.xxh3, a.shape) == (b.site, b.xxh3, b.shape)
        for name in ("min", "max", "mean", "rms", "absmax"):
            x, y = getattr(a.summary, name), getattr(b.summary, name)
            assert y == pytest.approx(x, rel=1e-6, abs=1e-6 * (a.summary.rms or 0.0))
        assert a.summary.num_zero == b.summary.num_zero
        if a.sketch is not None:
            x, y = one.read_sketch(a).rows, two.read_sketch(b).rows
            assert np.allclose(x, y, rtol=1e-5, atol=1e-5 * x[np.isfinite(x)].max())
