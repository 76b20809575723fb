"""A thread beside the model's: torch's operators there start no threads."""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path

import pytest
import torch

from divergence.run.own_thread import set_device, without_team
from divergence.run.writing import writer
from divergence.run.writing.item import Item
from divergence.run.writing.writer import RunWriter

TASKS = Path("/proc/self/task")
needs_openmp = pytest.mark.skipif(
    "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info() or os.name != "posix",
    reason="torch was built without OpenMP",
)


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
    assert on_a_thread(lambda: started(without_team)) == (0, 1)
    assert torch.get_num_threads() == 2


@needs_openmp
def test_the_writer_works_alone(two_threads, tmp_path, manifest):
    """And leaves the model's threads as they are."""
    found = []

    class Looking:
        def take(self, items, store):
            found.append(torch.get_num_threads())
            return items

    with RunWriter(tmp_path / "run", manifest(), reducer=Looking()) as writer:
        writer.put(Item(torch.ones(3)), pass_="free", sample=0, step=0, site="a:out", order=0)
    assert found == [1]
    assert torch.get_num_threads() == 2


def test_where_no_openmp_can_be_asked_nothing_is_done(monkeypatch):
    """Other systems, other builds of torch."""
    for answer in (OSError("no"), TypeError("no"), AttributeError("no")):

        def refuse(_, answer=answer):
            raise answer

        monkeypatch.setattr("ctypes.CDLL", refuse)
        without_team()


def test_a_thread_sets_its_device(monkeypatch):
    """The one that it is given, or the current one; of a host or none nothing is asked."""
    asked = []
    module = types.SimpleNamespace(set_device=asked.append, current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for device in (None, torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda")):
        set_device(device)
    assert asked == [torch.device("cuda:1"), 3]


def test_a_device_without_set_device_is_left_alone(monkeypatch):
    """As torch.mps."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    set_device(torch.device("mps"))


def test_the_writers_thread_sets_the_device(tmp_path, manifest, monkeypatch):
    """Before anything else; where it cannot, the run is not written, and says why."""
    asked = []

    def set_device(device):
        asked.append((threading.current_thread().name, device))
        if device.index == 7:
            raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(writer, "set_device", set_device)
    with RunWriter(tmp_path / "r", manifest(), device=torch.device("cuda:1")):
        pass
    assert asked == [("divergence-writer", torch.device("cuda:1"))]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RunWriter(tmp_path / "s", manifest(), device=torch.device("cuda:7")).close(complete=True)
