"""A directory that is replaced: what is not the run's stays, and one capture at a time writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from divergence import Run
from divergence.errors import RunExistsError
from divergence.run.target import check_target
from divergence.run.writer import RunWriter
from tests.by_hand import put

HERE = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["notes.txt", "model.safetensors", "r00000-000000.safetensors.bak", "sub/x", ".hidden"]
)
def test_force_removes_nothing_but_the_run(small_run, manifest, name):
    """Also where it lies among the tensors."""
    other = small_run / "tensors" / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("mine")
    for attempt in (
        lambda: check_target(small_run, force=True),
        lambda: RunWriter(small_run, manifest(), force=True),
    ):
        with pytest.raises(RunExistsError, match="so --force does not remove it"):
            attempt()
    assert other.read_text() == "mine"
    assert len(Run.open(small_run).records) == 3


def test_a_run_of_another_writer_is_replaced(small_run, write_run):
    """Its shards have names of its own, which its records state."""
    (small_run / "tensors/r00000-000000.safetensors").rename(small_run / "tensors/x.safetensors")
    lines = small_run / "records.jsonl"
    lines.write_text(lines.read_text().replace("r00000-000000", "x"))
    assert len(Run.open(small_run).records) == 3
    check_target(small_run, force=True)


def test_links_are_removed_and_not_followed(small_run, manifest, tmp_path):
    """What they lead to is another's."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (small_run / "tensors/r00000-000009.safetensors").symlink_to(mine)
    with RunWriter(small_run, manifest(), force=True):
        pass
    assert mine.read_text() == "mine"
    assert os.listdir(small_run / "tensors") == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_reader_meets_the_old_run_or_the_new_one(
    small_run, manifest, monkeypatch, tmp_path, inside
):
    """The old one leaves its name in one step; from within it file by file, the manifest last."""
    seen, remove = [], shutil.rmtree

    def look(folder, **options):
        seen.append((Path(folder).name, (small_run / "manifest.json").exists()))
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", look)
    if inside:
        monkeypatch.chdir(small_run)
    with RunWriter(small_run, manifest(), force=True):
        pass
    assert (seen[0] == ("tensors", True)) if inside else seen[0][0].startswith(".")
    assert inside or seen[0][1] is False
    assert [entry.name for entry in tmp_path.iterdir() if "replaced" in entry.name] == []
    assert Run.open(small_run).records == []


def _put(writer: RunWriter) -> None:
    put(writer, torch.ones(2))


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", ["run", "run.tar"])
def test_two_captures_into_one_place_do_not_mix(manifest, tmp_path, name, force):
    """The second is refused, also before it has loaded a model; the first is whole."""
    place = tmp_path / name
    with RunWriter(place, manifest(), force=force) as writer:
        for attempt in (
            lambda: check_target(place, force=True),
            lambda: RunWriter(place, manifest(), force=True),
        ):
            with pytest.raises(RunExistsError, match="another capture is writing"):
                attempt()
        _put(writer)
    assert len(Run.open(place).records) == 1
    with RunWriter(place, manifest(), force=True) as writer:  # and then it is free
        _put(writer)


def test_a_capture_that_failed_or_was_killed_holds_no_place(manifest, tmp_path):
    """Its lock ends with it."""
    place = tmp_path / "run"
    with pytest.raises(ZeroDivisionError), RunWriter(place, manifest()):
        raise ZeroDivisionError
    check_target(place, force=True)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from divergence.run.target import prepare_directory\n"
        f"prepare_directory(Path({str(place)!r}), force=True); print('ready', flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "ready\n"
    with RunWriter(place, manifest(), force=True) as writer:
        _put(writer)
    assert json.loads((place / "manifest.json").read_text())["complete"]
