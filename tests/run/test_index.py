"""The index of a large run: it says what the lines say, or is not used."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from divergence.errors import RunFormatError
from divergence.run import contents as parsing
from divergence.run import shards as store
from divergence.run.contents import RecordTable, count_sites, index_folder
from divergence.run.reader import Run
from divergence.run.target import pack
from tests.digests import without_digests
from tests.run.test_table import write_many


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "divergence" / "indices"


def indices() -> list:
    """The files in the cache folder."""
    return sorted(index_folder().iterdir()) if index_folder().exists() else []


@pytest.fixture
def run(tmp_path, manifest, monkeypatch):
    """A run that counts as large, and has its index."""
    monkeypatch.setattr(parsing, "LARGE_BYTES", 0)
    monkeypatch.setattr(parsing, "_PORTION_BYTES", 2000)
    monkeypatch.setattr(parsing, "KEPT_BYTES", 0)
    write_many(tmp_path / "a", manifest(), seed=3)
    without_digests(tmp_path / "a")
    assert isinstance(Run.open(tmp_path / "a").records, RecordTable)
    return tmp_path / "a"


@pytest.fixture
def read_again(monkeypatch):
    """Counts how often lines were read to make columns."""
    times, own = [], parsing.portions
    monkeypatch.setattr(parsing, "portions", lambda *of: times.append(of) or own(*of))
    return times


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
    """Whatever times it kept: what its sender checked is not believed."""
    shutil.copytree(run, tmp_path / "copy")
    assert Run.open(tmp_path / "copy").records == Run.open(run).records
    assert len(read_again) == 1


def test_a_change_that_keeps_size_and_time_is_seen(run, read_again):
    """The system notes when a file was really changed."""
    path = run / "records.jsonl"
    before = os.stat(path)
    path.write_bytes(path.read_bytes().replace(b'"order":2,', b'"order":3,'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert {record.order for record in Run.open(run).records if "layers.2:" in record.site} == {3}
    assert len(read_again) == 1


def test_lines_that_changed_unseen_are_an_error_once(run, monkeypatch):
    """A digest tells; the index is removed, and the lines count."""
    monkeypatch.setattr(store._Directory, "stamp", lambda *of: (1,))
    Run.open(run)
    path = run / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"order":2,', b'"order":3,'))
    with pytest.raises(RunFormatError, match="changed while it was read") as error:
        list(Run.open(run).records)
    assert "run the command again" in error.value.hint
    assert not indices()
    assert {record.order for record in Run.open(run).records if "layers.2:" in record.site} == {3}


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "text", "pickle", "other", "short"])
def test_a_damaged_index_is_made_again(run, read_again, how):
    """Whatever is wrong with it, the lines count."""
    (index,), sites = indices(), count_sites(Run.open(run).records)
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 255
    if how in ("pickle", "other", "short"):
        with np.load(index) as held:
            arrays = dict(held)
        arrays["site"] = np.array([{}]) if how == "pickle" else arrays["site"][:-1]
        if how == "other":
            del arrays["site"]
        with open(index, "wb") as file:
            np.savez(file, **arrays)
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
    indices()[0].unlink()

    def refuse(*of, **more):
        raise error

    monkeypatch.setattr(np, "savez", refuse)
    assert len(Run.open(run).records)
    assert not indices()
    assert {path.name for path in run.iterdir()} == {"manifest.json", "records.jsonl", "tensors"}


def test_a_delivered_index_is_never_read(run, read_again, cache, tmp_path, capsys):
    """A sender who writes one for the run, wherever earlier or present versions looked for it,
    changes no answer, no archive, no golden and no file beside them."""
    sites, packed = count_sites(Run.open(run).records), pack(run, out=tmp_path / "plain.tar").path
    read_again.clear()
    index = indices()[0]
    with np.load(index) as arrays:
        forged = dict(arrays)
    text = forged["names"].tobytes().replace(b"tensors/r00000-", b"../../conftest")
    forged["names"] = np.frombuffer(text, np.uint8)
    for name in ("records.index", index.name):
        with open(run / name, "wb") as file:
            np.savez(file, **forged)
    shutil.copytree(run, tmp_path / "sent")
    shutil.rmtree(cache)
    sent = Run.open(tmp_path / "sent")
    assert count_sites(sent.records) == sites
    assert [str(store.place) for store, *_ in read_again] == [str(tmp_path / "sent")]
    assert sent.files().keys() == Run.open(run).files().keys()
    pack(sent, out=tmp_path / "sent.tar")
    assert (tmp_path / "sent.tar").read_bytes() == packed.read_bytes()


def test_an_index_that_others_may_write_is_not_read(run, read_again):
    """In a cache folder that several users share, one could forge another's."""
    indices()[0].chmod(0o666)
    Run.open(run)
    assert len(read_again) == 1


def test_the_cache_stays_small(run, monkeypatch, tmp_path):
    """The oldest indices go, and what killed processes left."""
    monkeypatch.setattr("divergence.run.contents._MOST_FILES", 3)
    (index_folder() / "left.tmp").touch()
    os.utime(index_folder() / "left.tmp", ns=(0, 0))
    for number in range(4):
        shutil.copytree(run, tmp_path / f"copy{number}")
        Run.open(tmp_path / f"copy{number}")
    assert [path.suffix for path in indices()] == [".index"] * 3


def test_small_and_incomplete_runs_have_none(tmp_path, manifest, monkeypatch):
    """Their lines are soon read, or may still grow."""
    write_many(tmp_path / "a", manifest())
    Run.open(tmp_path / "a")
    monkeypatch.setattr(parsing, "LARGE_BYTES", 0)
    Run.open(tmp_path / "a")
    monkeypatch.setattr(parsing, "KEPT_BYTES", 0)
    text = (without_digests(tmp_path / "a") / "manifest.json").read_text()
    (tmp_path / "a" / "manifest.json").write_text(
        text.replace('"complete": true', '"complete": false')
    )
    assert not Run.open(tmp_path / "a").manifest.complete
    assert not indices()
