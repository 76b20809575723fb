"""A thread beside the model's: torch's operators there start no threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from divergence.run.item import Item
from divergence.run.own_thread import without_team
from divergence.run.writer import RunWriter

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
