"""The index of a large run: it says what the lines say, or is not used."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from divergence.errors import RunFormatError
from divergence.run import table
from divergence.run.reader import Run
from divergence.run.schema import parsing
from divergence.run.schema.contents import StoredRecords, count_sites
from divergence.run.storage.packing import pack
from tests.run.test_table import write_many


@pytest.fixture
def run(tmp_path, manifest, monkeypatch):
    """A run that counts as large, and has its index."""
    monkeypatch.setattr(parsing, "LARGE_BYTES", 0)
    monkeypatch.setattr(parsing, "_PORTION_BYTES", 2000)
    monkeypatch.setattr(table, "KEPT_BYTES", 0)
    write_many(tmp_path / "a", manifest(), seed=3)
    assert isinstance(Run.open(tmp_path / "a").records, StoredRecords)
    return tmp_path / "a"


@pytest.fixture
def read_again(monkeypatch):
    """Counts how often lines were read to make columns."""
    times = []
    monkeypatch.setattr(table, "portions", lambda *of: times.append(of) or parsing.portions(*of))
    return times


def rewritten(path, change) -> None:
    """Changes a file's bytes, and nothing of its size and times."""
    before = os.stat(path)
    data = change(path.read_bytes())
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_is_kept_is_used_until_a_file_changes(run, read_again):
    """Lines, shards and the manifest; then it is made again."""
    sites = count_sites(Run.open(run).records)
    assert not read_again
    shard = next((run / "tensors").iterdir())
    for num, path in enumerate((run / "records.jsonl", shard, run / "manifest.json"), 1):
        os.utime(path, ns=(0, 0))
        for _ in range(2):
            assert count_sites(Run.open(run).records) == sites
        assert len(read_again) == num


def test_a_copy_reads_the_lines(run, read_again, tmp_path):
    """Unless it kept the times."""
    shutil.copytree(run, tmp_path / "kept")
    Run.open(tmp_path / "kept")
    assert not read_again
    shutil.copytree(run, tmp_path / "copy", copy_function=shutil.copyfile)
    assert Run.open(tmp_path / "copy").records == Run.open(run).records
    assert len(read_again) == 1


def test_lines_that_changed_unseen_are_an_error_once(run):
    """A digest tells; the index is removed, and the lines count."""
    rewritten(run / "records.jsonl", lambda data: data.replace(b'"order":2,', b'"order":3,'))
    with pytest.raises(RunFormatError, match="changed while it was read") as error:
        list(Run.open(run).records)
    assert "run the command again" in error.value.hint
    assert not (run / "records.index").exists()
    assert {record.order for record in Run.open(run).records if "layers.2:" in record.site} == {3}


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "text", "pickle", "other", "short"])
def test_a_damaged_index_is_made_again(run, read_again, how):
    """Whatever is wrong with it, the lines count."""
    index, sites = run / "records.index", count_sites(Run.open(run).records)
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 255
    if how in ("pickle", "other", "short"):
        with np.load(index) as held:
            arrays = dict(held)
        arrays["site"] = np.array([{}]) if how == "pickle" else arrays["site"][:-1]
        if how == "other":
            del arrays["site"]
        np.savez(index.with_suffix(".npz"), **arrays)
        os.replace(index.with_suffix(".npz"), index)
    else:
        wrong = {"empty": b"", "cut": data[:-100], "flipped": data, "text": b"index"}
        index.write_bytes(wrong[how])
    for _ in range(2):
        assert count_sites(Run.open(run).records) == sites
    assert len(read_again) == 1


def test_what_is_wrong_with_the_run_is_said_as_without(run):
    """A missing shard is found at opening."""
    shard = next((run / "tensors").iterdir())
    shard.unlink()
    with pytest.raises(RunFormatError, match=f"{shard.name} is missing"):
        Run.open(run)


@pytest.mark.parametrize("error", [PermissionError("no"), OSError(28, "No space left on device")])
def test_where_none_can_be_written_the_run_is_read_all_the_same(run, monkeypatch, error):
    """Read-only media, a full disk; nothing half-written is left."""
    (run / "records.index").unlink()

    def refuse(*of, **more):
        raise error

    monkeypatch.setattr(np, "savez", refuse)
    assert len(Run.open(run).records)
    assert {path.name for path in run.iterdir()} == {"manifest.json", "records.jsonl", "tensors"}


def test_it_is_no_part_of_the_run(run, manifest, tmp_path):
    """Archives leave it out; a run that is replaced takes it along."""

    def packed(name):
        pack(run, out=tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert "records.index" not in Run.open(run).files()
    with_index = packed("a.tar")
    (run / "records.index").unlink()
    assert packed("b.tar") == with_index
    Run.open(run)
    write_many(run, manifest(), seed=4, force=True)
    assert not (run / "records.index").exists()


def test_what_a_killed_process_left_is_removed(run):
    """It was never read, and the run stays one that --force may replace."""
    (run / "records.index").rename(run / "records.index.1234.tmp")
    Run.open(run)
    names = {path.name for path in run.iterdir()}
    assert names == {"manifest.json", "records.index", "records.jsonl", "tensors"}


def test_small_and_incomplete_runs_have_none(tmp_path, manifest, monkeypatch):
    """Their lines are soon read, or may still grow."""
    write_many(tmp_path / "a", manifest())
    Run.open(tmp_path / "a")
    monkeypatch.setattr(parsing, "LARGE_BYTES", 0)
    Run.open(tmp_path / "a")
    monkeypatch.setattr(table, "KEPT_BYTES", 0)
    text = (tmp_path / "a" / "manifest.json").read_text()
    (tmp_path / "a" / "manifest.json").write_text(
        text.replace('"complete": true', '"complete": false')
    )
    assert not Run.open(tmp_path / "a").manifest.complete
    assert not (tmp_path / "a" / "records.index").exists()
