"""A capture that is stopped half-way leaves a run that can be read: kill, interrupt, full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from divergence import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

ROOT = Path(__file__).parents[1]
NUM_PROMPTS, NUM_STEPS = 40, 300

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
from divergence.run import writer
writer.SHARD_SECONDS, writer.SHARD_BYTES = 0.1, {shard_bytes}
if {file_bytes}:
    import resource, transformers.models.llama.modeling_llama
    resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}))
from divergence.cli.main import run
run()
"""
"""The command line, with shards in short order, and with a limit on the size of files."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with prompts for a capture of some minutes."""
    folder = tmp_path_factory.mktemp("survival")
    lines = [json.dumps({"input_ids": [3 + n, 40, 50, 60]}) for n in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def start(place: Path, model: Path, name: str, *, file_bytes: int = 0, shard_bytes: int = 1 << 20):
    program = PROGRAM.format(file_bytes=file_bytes, shard_bytes=shard_bytes)
    arguments = ["capture", model, "-o", name, "--prompts", "prompts.jsonl", "--sites", "modules"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments), "--max-new-tokens", str(NUM_STEPS)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_shards(process: subprocess.Popen, run: Path, count: int = 2) -> None:
    wait_for(process, lambda: len(list(run.glob("tensors/*.safetensors"))) >= count)


def wait_for(process: subprocess.Popen, done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no shard within minutes")


def stop(process: subprocess.Popen, number: int) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def killed(place, llama):
    """A run whose process was killed outright."""
    process = start(place, llama, "killed")
    wait_for_shards(process, place / "killed")
    assert stop(process, signal.SIGKILL)[0] == -signal.SIGKILL
    return place / "killed"


@pytest.fixture(scope="module")
def interrupted(place, llama):
    """(run, exit code, stdout, stderr) of a capture that met Ctrl-C."""
    process = start(place, llama, "interrupted")
    wait_for_shards(process, place / "interrupted")
    return place / "interrupted", *stop(process, signal.SIGINT)


def stopped_in_bucket(place: Path, model: Path, url: str, number: int) -> tuple[int, str, str]:
    """A capture into a bucket that met a signal once some lines were stored."""
    import s3fs

    def some_lines() -> bool:
        found = s3fs.S3FileSystem(use_listings_cache=False).find(url, detail=True)
        sizes = [entry["size"] for name, entry in found.items() if name.endswith(".jsonl")]
        return sum(sizes) > 60_000

    process = start(place, model, url)
    wait_for(process, some_lines)
    return stop(process, number)


@pytest.mark.slow
def test_a_killed_capture_is_readable(killed):
    """Everything before the last shard: opened, whole, and said to be incomplete."""
    run = Run.open(killed)
    assert not run.manifest.complete
    assert run.manifest.stopped_by is None
    assert len(run.records) > 100
    assert run.verify() == []
    assert {record.sample for record in run.records} <= set(range(NUM_PROMPTS))


@pytest.mark.slow
def test_an_interrupted_capture_is_readable(interrupted):
    """Exit code 130, no traceback; what was seen until then is written."""
    path, code, out, err = interrupted
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err
    run = Run.open(path)
    assert (run.manifest.complete, run.manifest.stopped_by) == (False, "interrupted")
    assert len(run.records) == run.manifest.sizes.num_records > 100
    assert not run.torn_tail
    assert run.verify() == []
    assert not [file for file in path.rglob("*") if file.suffix == ".tmp"]


@pytest.mark.slow
def test_a_capture_into_a_bucket_that_is_killed_is_readable(place, llama, s3):
    """An incomplete run of what the stored lines name."""
    assert stopped_in_bucket(place, llama, f"{s3}/a", signal.SIGKILL)[0] == -signal.SIGKILL
    run = Run.open(f"{s3}/a")
    assert not run.manifest.complete
    assert len(run.records) > 100
    assert run.verify() == []


@pytest.mark.slow
def test_a_capture_into_a_bucket_that_is_interrupted_loses_nothing(place, llama, s3):
    """What was seen until then is sent, and the run says what stopped it."""
    code, out, err = stopped_in_bucket(place, llama, f"{s3}/a", signal.SIGINT)
    assert (code, out, "Traceback" in err) == (130, "", False), err
    run = Run.open(f"{s3}/a")
    assert (run.manifest.complete, run.manifest.stopped_by) == (False, "interrupted")
    assert len(run.records) == run.manifest.sizes.num_records > 100
    assert run.verify() == []


@pytest.mark.slow
def test_an_interrupted_capture_into_an_archive_leaves_a_directory(place, llama):
    """No archive, and a run that can be read, or packed."""
    process = start(place, llama, "a.tar")
    wait_for_shards(process, place / "a.tar.partial")
    code, out, err = stop(process, signal.SIGINT)
    assert (code, out, "Traceback" in err) == (130, "", False), err
    assert not (place / "a.tar").exists()
    run = Run.open(place / "a.tar.partial")
    assert run.manifest.stopped_by == "interrupted"
    assert len(run.records) > 100 and run.verify() == []


@pytest.mark.slow
def test_a_terminated_capture_is_readable(place, llama):
    """SIGTERM, as batch systems send it."""
    process = start(place, llama, "terminated")
    wait_for_shards(process, place / "terminated")
    code, out, err = stop(process, signal.SIGTERM)
    assert code not in (0, 1)
    assert (out, "Traceback" in err) == ("", False)
    run = Run.open(place / "terminated")
    assert not run.manifest.complete
    assert len(run.records) > 100
    assert run.verify() == []


@pytest.mark.slow
def test_compare_says_how_far_incomplete_runs_go(invoke, killed, interrupted):
    """What both hold is compared; the rest is counted, and nobody takes it for the whole."""
    code, out, err = invoke("compare", killed, interrupted[0])
    assert code in (0, 2), err
    assert "Traceback" not in err
    assert "had no partner" in out
    code, out, _ = invoke("compare", killed, interrupted[0], "--json")
    report = json.loads(out)
    assert report["verdict"]["kind"] in ("identical", "undetermined")
    assert not report["reference"]["complete"]
    coverage = report["coverage"]
    counts = (len(Run.open(killed).records), len(Run.open(interrupted[0]).records))
    assert coverage["num_compared"] == min(counts)
    assert coverage["num_only_reference"] + coverage["num_only_candidate"] == abs(
        counts[0] - counts[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [pytest.param("killed", marks=pytest.mark.slow), "interrupted"])
def test_inspect_and_check_know_an_incomplete_run(invoke, stopped, request):
    """It is shown as such, and cannot become a golden."""
    run = request.getfixturevalue(stopped)
    run = run if stopped == "killed" else run[0]
    code, out, _ = invoke("inspect", run, "--verify")
    assert code == 0
    assert out.startswith("INCOMPLETE")
    assert "0 B in 0 shards" not in out  # as a manifest says that was written before the first
    code, _, err = invoke("check", "golden", run, "--bless")
    assert code == 2
    assert "incomplete" in err


@pytest.mark.slow
def test_an_incomplete_run_is_replaced_by_force_alone(llama, interrupted, invoke):
    """It may be all that is left of a long night."""
    run = interrupted[0]
    before = sorted(path.name for path in (run / "tensors").iterdir())
    code, _, err = invoke("capture", llama, "-o", run, "-q")
    assert code == 2
    assert "exists already" in err
    assert sorted(path.name for path in (run / "tensors").iterdir()) == before


@pytest.mark.slow
def test_a_full_disk_ends_a_capture_with_a_clear_message(place, llama):
    """Exit code 2; earlier shards stay readable, and no temporary file is left."""
    # a limit on file size refuses a write half-way, as a full disk does
    process = start(place, llama, "full", file_bytes=4_000_000, shard_bytes=200_000)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert "error: writing failed" in err
    assert "free some space" in err
    assert "Traceback" not in err
    run = Run.open(place / "full")
    assert not run.manifest.complete
    assert len(run.records) > 100
    assert run.verify() == []
    assert not run.torn_tail
    assert not [file for file in (place / "full").rglob("*") if file.suffix == ".tmp"]
