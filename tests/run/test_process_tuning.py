"""Tuning of the process: each part comes and goes, one switch turns all off, and the bits stay."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

import divergence
from divergence.comparison.api import compare
from divergence.errors import ConfigError
from divergence.recording.api import capture
from divergence.recording.api import truth as make_truth
from divergence.run import process_tuning as tuning
from divergence.run import shards as shard
from divergence.run.captured import CapturedTensor
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

TASKS = Path("/proc/self/task")
needs_openmp = pytest.mark.skipif(
    "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info() or os.name != "posix",
    reason="torch was built without OpenMP",
)


@pytest.fixture
def off(monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, "0")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def on_a_thread(action):
    found = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


# --- the switch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [("", True), ("1", True), ("True", True), ("0", False), ("false", False)]
)
def test_the_switch_is_on_unless_it_is_false(monkeypatch, text, expected):
    """Written as every other setting that is true or false."""
    monkeypatch.setenv(tuning.VARIABLE, text)
    assert tuning.enabled() is expected


def test_another_word_is_refused(monkeypatch):
    """The error names the variable and says what to write."""
    monkeypatch.setenv(tuning.VARIABLE, "maybe")
    with pytest.raises(ConfigError, match="'maybe' is neither true nor false") as caught:
        tuning.enabled()
    assert caught.value.where == tuning.VARIABLE


def test_the_switch_turns_every_part_off(off, monkeypatch):
    """No part does anything to the process."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("OpenMP was asked"))
    tuning.disable_openmp()
    with tuning.quick_thread_switches(), tuning.collect_garbage_rarely():
        assert sys.getswitchinterval() == interval
        assert gc.get_threshold() == thresholds
    assert tuning.short_copy() is ctypes.memmove
    assert not tuning.DirectFiles().usable
    memory = mmap.mmap(-1, 1 << 20)
    memory[0] = 7
    tuning.request_huge_pages(memory)
    assert not tuning.release_pages(memory)
    assert memory[0] == 7


def test_no_other_module_tunes_the_process():
    """What one switch turns off lies in one file."""
    names = r"setswitchinterval|\bgc\.|PYFUNCTYPE|madvise|MADV_|fadvise|O_DIRECT|mallopt"
    package = Path(divergence.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(names, line.partition("#")[0])
    }
    assert found == {"run/process_tuning.py"}


# --- the same bits -----------------------------------------------------------------------------

VOLATILE = frozenset({"id", "created", "seconds", "path"})


def answer(report) -> object:
    """The report's JSON without what differs from one capture of the same to the next."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items() if key not in VOLATILE}
        return [plain(part) for part in value] if isinstance(value, list) else value

    return plain(json.loads(report.to_json()))


@pytest.mark.parametrize("store", [pytest.param("full", marks=pytest.mark.slow), "sketch"])
def test_results_have_the_same_bits_without_it(
    tiny_model, tmp_path, monkeypatch, two_threads, store
):
    """Every tensor of a capture, of its repetition with a fault and of the truth; the answer."""
    model = str(tiny_model("llama", hidden=128, dtype="bfloat16"))
    monkeypatch.setattr(shard, "DIRECT_BYTES", 4096)  # so that small shards go past the cache
    past_the_cache = []
    write = tuning.DirectFiles.write
    monkeypatch.setattr(
        tuning.DirectFiles, "write",
        lambda self, *rest: past_the_cache.append(self.usable) or write(self, *rest),
    )  # fmt: skip
    runs, answers = {}, {}
    for value in ("1", "0"):
        monkeypatch.setenv(tuning.VARIABLE, value)
        (tmp_path / value).mkdir()
        monkeypatch.chdir(tmp_path / value)
        past_the_cache.clear()
        a = capture(
            model, out="a", prompts=["A bridge is built twice."], max_new_tokens=2,
            sites=["modules"], store=store, probe=False,
        )  # fmt: skip
        b = capture(like=a, out="b", plants=["model.layers.1.mlp:out=scale:1.2"], probe=False)
        truth = make_truth(a, out="t") if store == "full" else None
        made = [run for run in (a, b, truth) if run is not None]
        assert past_the_cache
        assert any(past_the_cache) == (value == "1" and hasattr(os, "O_DIRECT"))
        answers[value] = answer(compare("a", "b", truth=truth))
        runs[value] = [Run.open(tmp_path / value / run.path.name) for run in made]
    for on, without in zip(runs["1"], runs["0"], strict=True):
        assert len(on.records) == len(without.records) > 50
        for x, y in zip(on.records, without.records, strict=True):
            assert (x.site, x.step, x.pass_, x.xxh3) == (y.site, y.step, y.pass_, y.xxh3)
            assert x.summary == y.summary
            p, q = (
                run.read(record) if record.sketch is None else run.read_sketch(record).joined()
                for run, record in ((on, x), (without, y))
            )
            assert p.dtype == q.dtype
            assert torch.equal(
                p.contiguous().reshape(-1).view(torch.uint8),
                q.contiguous().reshape(-1).view(torch.uint8),
            )
    assert answers["1"] == answers["0"]
    assert answers["1"]["verdict"]["kind"] == "localized"


# --- Python's threads and garbage collector ----------------------------------------------------


def test_a_pass_is_tuned_and_the_process_comes_back():
    """Within it threads hand over sooner and the collector runs rarely; after it, also by an
    error, all is as before."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    with (
        pytest.raises(KeyboardInterrupt), tuning.quick_thread_switches(),
        tuning.collect_garbage_rarely(),
    ):  # fmt: skip
        assert sys.getswitchinterval() < interval
        assert gc.get_threshold()[0] > thresholds[0]
        raise KeyboardInterrupt
    assert sys.getswitchinterval() == interval
    assert gc.get_threshold() == thresholds


def test_thresholds_come_back_after_overlapping_blocks():
    """Whoever is last to leave restores them."""
    before = gc.get_threshold()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with tuning.collect_garbage_rarely():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with tuning.collect_garbage_rarely():
        assert gc.get_threshold()[0] == 100_000
        thread.start()
        assert inside.wait(30)
    assert gc.get_threshold()[0] == 100_000
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


def test_a_collector_that_is_switched_off_stays_so():
    """A threshold of 0 is not raised."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with tuning.collect_garbage_rarely():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


# --- OpenMP ------------------------------------------------------------------------------------


@needs_openmp
@pytest.mark.skipif(not TASKS.exists(), reason="only Linux lists threads")
def test_no_thread_is_started(two_threads):
    """Where a large operator of any other thread starts one, which stays."""

    def started(prepare) -> tuple[int, int]:
        prepare()
        before = {task.name for task in TASKS.iterdir()}  # some of these may be ending
        torch.ones(1 << 20).add(1)
        new = {task.name for task in TASKS.iterdir()} - before
        return len(new), torch.get_num_threads()

    num_new, num_threads = on_a_thread(lambda: started(lambda: None))
    assert (num_new >= 1, num_threads) == (True, 2)
    assert on_a_thread(lambda: started(tuning.disable_openmp)) == (0, 1)
    assert torch.get_num_threads() == 2


@needs_openmp
@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("0", 2)])
def test_the_writer_works_alone(two_threads, tmp_path, manifest, monkeypatch, value, expected):
    """And leaves the model's threads as they are. Without tuning it has a team of its own."""
    monkeypatch.setenv(tuning.VARIABLE, value)
    found = []

    class Looking:
        def take(self, items, store):
            found.append(torch.get_num_threads())
            return items

    with RunWriter(tmp_path / "run", manifest(), reducer=Looking()) as writer:
        writer.put(
            CapturedTensor(torch.ones(3)), pass_="free", sample=0, step=0, site="a:out", order=0
        )
    assert found == [expected]
    assert torch.get_num_threads() == 2


def test_where_no_openmp_can_be_asked_nothing_is_done(monkeypatch):
    """Other systems, other builds of torch."""
    for error in (OSError("no"), TypeError("no"), AttributeError("no")):

        def refuse(_, error=error):
            raise error

        monkeypatch.setattr("ctypes.CDLL", refuse)
        tuning.disable_openmp()
