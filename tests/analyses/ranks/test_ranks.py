"""Comparing on several processes: who measures what, and the same report byte for byte."""

import json
import os
import pickle
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divergence import BatchOptions, Run, capture
from divergence import truth as make_truth
from divergence.comparison.align import Pair, Piece, align
from divergence.comparison.measure import processes as ranks
from divergence.comparison.measure.pairs import Measurer, Measuring, measure_all
from divergence.comparison.measure.processes import _packed, _unpacked, num_processes, share_out
from divergence.errors import RunFormatError
from divergence.numerics.summary import summarize
from divergence.run.manifest import Mesh, MeshAxis, Sizes
from divergence.run.ranks import unsharded
from divergence.run.record import Record
from divergence.run.writer import RunWriter
from tests.by_hand import put

ROOT = Path(__file__).parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def pair(size: int, digests: tuple[int, int], row: int | None = None) -> Pair:
    """Two float32 tensors of ``size`` rows."""
    pieces = []
    for digest in digests:
        record = Record(
            pass_="free",
            sample=0,
            step=0,
            site="x:out",
            order=0,
            shape=(size, 8),
            dtype="float32",
            summary=summarize(torch.zeros(1)),
            xxh3=f"{digest:032x}",
        )
        pieces.append(Piece(record, 0, row))
    return Pair(reference=pieces[0], candidate=pieces[1], pass_="free", match="exact")


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 9))
def test_ranks_get_equal_shares(sizes, num_ranks):
    """No rank is ahead of another by more than the largest pair, at any point of the order: so
    whoever waits for a rank's next pair waits for one."""
    owners = share_out([pair(size, (2 * n, 2 * n + 1)) for n, size in enumerate(sizes)], num_ranks)
    load = [0] * num_ranks
    for size, owner in zip(sizes, owners, strict=True):
        load[owner] += size
        assert max(load) - min(load) <= max(sizes)


def test_equal_pairs_stay_together():
    """One block's output is the next one's input: the rank that has measured it does it again for
    nothing. One sample's rows count as what they are."""
    pairs = [pair(8, (1, 2)), pair(8, (3, 4)), pair(8, (1, 2)), pair(8, (5, 6))]
    assert share_out(pairs, 2) == [0, 1, 0, 0]
    assert share_out([pair(8, (1, 2), row=0), pair(1, (3, 4)), pair(1, (5, 6))], 2) == [0, 1, 0]
    assert share_out([], 3) == []


def test_one_process_is_no_torchrun(monkeypatch):
    """WORLD_SIZE alone (a job scheduler sets it) is no invitation."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 1
    for name in names:
        monkeypatch.setenv(name, "4")
    assert num_processes() == 4


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, tiny_model):
    """Runs of all kinds that a comparison measures: repeats with an escalated pass, with operators,
    batched, faulty, without the bytes that did not change, sketched; one damaged; ``truth`` is a's.
    """
    folder = tmp_path_factory.mktemp("fleet")
    model = str(tiny_model("llama", num_blocks=3))
    prompts = ["A bridge is built twice: once on paper", "Snow fell"]
    ops = ["blocks", "ops@model.layers.1", "lm_head:out"]
    capture(model, out=folder / "a", max_new_tokens=3, prompts=prompts, sites=ops)
    again = {
        "same": {},
        "faulty": {"plants": ["model.layers.1.mlp.down_proj:out=scale:1.5"]},
        "escalated": {"escalate": True, "attn_implementation": "eager"},
        "sparse": {"only_changed": True, "sites": ops[::2], "plants": ["model.norm:out=scale:2"]},
        "sketch": {"store": "sketch", "sites": ops[::2], "plants": ["model.norm:out=scale:2"]},
    }
    for name, options in again.items():
        capture(like=folder / "a", out=folder / name, **options)
    capture(
        model,
        out=folder / "batched",
        max_new_tokens=3,
        prompts=prompts,
        batching=BatchOptions(batch=True),
    )
    divide(Run.open(folder / "faulty"), folder / "parts")
    make_truth(folder / "a", out=folder / "truth")
    shutil.copytree(folder / "faulty", folder / "damaged")
    shard = next((folder / "damaged" / "tensors").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder


CANDIDATES = ("same", "faulty", "escalated", "batched", "sparse", "sketch", "parts", "damaged")


def divide(run: Run, out: Path) -> None:
    """The run as two tensor-parallel ranks would have written it: halves of the last axis."""
    manifest = msgspec.structs.replace(
        run.manifest, mesh=Mesh(axes=[MeshAxis(name="tp", size=2)]), sizes=Sizes()
    )
    writers = [
        RunWriter(out, msgspec.structs.replace(manifest, sizes=Sizes()), rank=rank)
        for rank in range(2)
    ]
    for record in run.records:
        if record.call is not None or "/" in record.site:
            continue
        whole = run.read(record)
        even = whole.shape[-1] % 2 == 0
        for writer, part in zip(
            writers, whole.chunk(2, dim=-1) if even else (whole,) * 2, strict=True
        ):
            put(
                writer,
                part.contiguous(),
                pass_=record.pass_,
                sample=record.sample,
                step=record.step,
                site=record.site,
                order=record.order,
                positions=record.positions,
                placement=(f"shard:{whole.ndim - 1}" if even else "replicate",),
            )
    for writer in writers:
        writer.flush()
    writers[1].close(complete=True)
    writers[0].manifest.sizes.num_records += writers[1].manifest.sizes.num_records
    writers[0].close(complete=True)


def launch(*words, cwd, launcher=TORCHRUN, **changes) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_", "MASTER_"))}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=300,
        env={**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes,
    )


def test_a_measurer_is_sent_with_its_runs_by_path(fleet):
    """What another process makes of it finds the same; a run is opened once."""
    a, b = Run.open(fleet / "a"), Run.open(fleet / "faulty")
    measurer, pairs = Measurer(a, b, inputs=a), align(a, b).pairs
    sent = _packed((measurer, pairs))
    assert len(sent) < 1_000 + 2_000 * len(pairs)
    runs: dict = {}
    other, same = _unpacked(sent, runs)
    assert same == pairs
    assert {str(run.path) for run in runs.values()} == {str(a.path), str(b.path)}
    assert other._pieces._inputs is other._reference
    found = [msgspec.to_builtins(measure_all(m, pairs)) for m in (measurer, other)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_two_processes_give_the_report_of_one(fleet):
    """Byte for byte: with a truth, escalated passes, operators, logits, pieces of batches, bytes
    that another run holds, sketches, a run of two ranks, and the error that damage gives. Rank 0
    prints, once."""
    names = ["a", *CANDIDATES]
    done = launch("-m", "divergence", "compare", *names, "--truth", "truth", "--json", cwd=fleet)
    alone = launch(
        *names, "--truth", "truth", "--json", cwd=fleet, launcher=("-m", "divergence", "compare")
    )
    assert alone.returncode == 2  # one run is damaged
    assert done.stdout == alone.stdout
    rows = json.loads(done.stdout)["rows"]
    assert [row["verdict"] for row in rows][1] == "localized"
    assert rows[CANDIDATES.index("parts")]["onset"]["block"] == "model.layers.1"
    assert "wrong checksum" in rows[-1]["problem"]
    passes = {site["pass"] for row in rows for site in (row["report"] or {}).get("sites", ())}
    assert passes == {"anchored", "free", "escalated"}
    reports = [row["report"] for row in rows if row["report"]]
    assert all(report["operators"] for report in reports[:3])
    assert any(site["truth"] for site in reports[1]["sites"])
    assert any(site["logits"] for site in reports[1]["sites"])


@pytest.mark.slow
def test_an_error_is_said_once(fleet):
    """By rank 0; torchrun adds its own summary and ends with 1, the rank with the real code."""
    done = launch("-m", "divergence", "compare", "a", "damaged", cwd=fleet)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("error: wrong checksum") == 1
    assert "exitcode  : 2" in done.stderr
    assert "fault in divergence" not in done.stderr


FAILING = """
import os, sys
from divergence.comparison.measure import processes as ranks

measure = ranks.measure_pairs

def failing(measurer, pairs, progress=None):
    for number, found in enumerate(measure(measurer, pairs, progress)):
        if number == 3 and os.environ["RANK"] == "1":
            {what}
        yield found

ranks.measure_pairs = failing
from divergence.cli.main import run
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [("raise TypeError('odd')", "rank 1: TypeError: odd"), ("os.kill(os.getpid(), 9)", "rank")],
)
def test_a_rank_that_fails_ends_all(fleet, tmp_path, what, said):
    """A fault of another rank is named with it; a killed rank leaves nobody waiting. Exit code 3 is
    the rank's, and no half report is printed."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(what=what))
    done = launch(script, "compare", "a", "faulty", cwd=fleet)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr


class Wire:
    """torch.distributed between threads of one process: what ranks send, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def rank(self, rank: int) -> SimpleNamespace:
        def send(objects, dst):
            self.queues[rank, dst].put(pickle.dumps(objects))

        def receive(objects, src):
            objects[:] = pickle.loads(self.queues[src, rank].get(timeout=300))

        return SimpleNamespace(
            get_rank=lambda: rank,
            get_world_size=lambda: self.size,
            send_object_list=send,
            recv_object_list=receive,
        )


@pytest.fixture
def three(monkeypatch):
    """Rank 0 of three, the others serving in threads, two pairs to a message; all are done and
    nothing is left on the wire at the end."""
    monkeypatch.setattr(ranks, "BATCH_PAIRS", 2)
    wire = Wire(3)
    others = [
        threading.Thread(target=ranks._Ranks(wire.rank(number)).serve, daemon=True)
        for number in (1, 2)
    ]
    for thread in others:
        thread.start()
    first = ranks._Ranks(wire.rank(0))
    yield first
    first.dismiss()
    for thread in others:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert all(one.empty() for one in wire.queues.values())


def case(fleet, name):
    a, b = Run.open(fleet / "a"), unsharded(Run.open(fleet / name))
    measurer, pairs = Measurer(a, b, inputs=a), align(a, b).pairs
    assert len(pairs) > 20
    return measurer, pairs


def plain(results):
    return [msgspec.to_builtins(result) for result in results]


@pytest.mark.slow
def test_one_comparison_after_another(three, fleet):
    """In many messages, with the same results, however often ranks are asked."""
    for name in ("faulty", "same", "parts"):
        alone = measure_all(*case(fleet, name))
        shared = Measuring(measure=three.measure_pairs)
        assert plain(measure_all(*case(fleet, name), shared)) == plain(alone)


@pytest.mark.slow
def test_a_comparison_that_is_given_up_leaves_ranks_ready(three, fleet):
    """Who stops asking half-way, and an error in a rank, stop the others too; the next
    comparison is as if nothing had been."""
    measurer, pairs = case(fleet, "faulty")
    found = three.measure_pairs(measurer, pairs)
    for _ in range(5):
        next(found)
    found.close()
    shared = Measuring(measure=three.measure_pairs)
    with pytest.raises(RunFormatError, match="wrong checksum"):
        measure_all(*case(fleet, "damaged"), shared)
    again = measure_all(*case(fleet, "same"), shared)
    assert plain(again) == plain(measure_all(*case(fleet, "same"), shared))


def test_a_run_that_another_rank_cannot_read(three, fleet, tmp_path):
    """Rank 0 has opened it, the others find none there: the message says what ranks need."""
    shutil.copytree(fleet / "faulty", tmp_path / "here")
    measurer, pairs = case(fleet, tmp_path / "here")
    (tmp_path / "here" / "manifest.json").unlink()
    with pytest.raises(RunFormatError, match="has no manifest") as error:
        list(three.measure_pairs(measurer, pairs))
    assert "every rank must be able to read the runs" in error.value.hint
