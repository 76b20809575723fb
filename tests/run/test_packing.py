"""Packing and unpacking: the same bytes, the same file each time, whole or not at all."""

import errno
import os
import tarfile
import zipfile

import pytest
import torch

import divergence
from divergence import Run, pack, unpack
from divergence.errors import RunExistsError, RunFormatError, RunWriteError, UsageError
from divergence.run import target as packing
from divergence.run.writer import RunWriter
from tests.by_hand import put
from tests.digests import without_digests

KINDS = ("tar", "zip")


def files_of(run):
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_same_run(small_run, tmp_path, kind):
    """Byte for byte, and with what is no part of the run left out."""
    (small_run / "notes.txt").write_text("x")
    (small_run / "tensors/r00000-000009.tmp").write_text("half")
    packed = divergence.pack(small_run, out=tmp_path / f"a.{kind}")
    assert packed.verify() == []
    back = divergence.unpack(packed, out=tmp_path / "back")
    (small_run / "notes.txt").unlink()
    (small_run / "tensors/r00000-000009.tmp").unlink()
    assert files_of(tmp_path / "back") == files_of(small_run)
    assert back.verify() == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_run_is_one_file(small_run, tmp_path, kind):
    """Bit for bit, whatever the times of its files, their owner, and where it was in between."""
    one = pack(small_run, out=tmp_path / f"a.{kind}").path.read_bytes()
    os.utime(small_run / "manifest.json", (1, 1))
    (small_run / "records.jsonl").chmod(0o600)
    assert pack(small_run, out=tmp_path / f"b.{kind}").path.read_bytes() == one
    other = pack(tmp_path / f"a.{kind}", out=tmp_path / f"c.{KINDS[kind == 'tar']}")
    again = pack(unpack(other, out=tmp_path / "d"), out=tmp_path / f"d.{kind}")
    assert again.path.read_bytes() == one


def test_the_manifest_comes_first(small_run, tmp_path):
    """Whoever has the beginning of a file knows what it should be."""
    for kind in KINDS:
        pack(small_run, out=tmp_path / f"a.{kind}")
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = tar.getnames()
        assert {(m.mtime, m.uid, m.mode) for m in tar.getmembers()} == {(0, 0, 0o644)}
    with zipfile.ZipFile(tmp_path / "a.zip") as folder:
        assert folder.testzip() is None
        assert folder.namelist() == names
    assert names[:2] == ["manifest.json", "records.jsonl"] and len(names) == 3


def test_default_names(small_run, tmp_path, monkeypatch):
    """Beside the run; without the ending where it is unpacked; here for what is far away."""
    monkeypatch.chdir(tmp_path)
    assert pack("run").path == (tmp_path / "run.tar").relative_to(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert str(unpack("run.tar").path) == "run"
    pack("run", out="memory://bucket/x/far.zip")
    assert str(unpack("memory://bucket/x/far.zip").path) == "far"
    with pytest.raises(UsageError, match="gives no name"):
        monkeypatch.chdir(tmp_path / "run")
        pack(".")


def test_an_incomplete_run_stays_incomplete(tmp_path, manifest):
    """Packing does not make it whole; a shard that no line points at is left out."""
    with pytest.raises(ValueError), RunWriter(tmp_path / "r", manifest()) as writer:
        put(writer, torch.ones(3))
        raise ValueError("stop")
    (without_digests(tmp_path / "r") / "records.jsonl").write_bytes(b"")
    run = pack(tmp_path / "r")
    assert (run.manifest.complete, run.manifest.stopped_by, run.records) == (False, "stop", [])
    with tarfile.open(tmp_path / "r.tar") as tar:
        assert tar.getnames() == ["manifest.json", "records.jsonl"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_not_overwritten(small_run, tmp_path, kind):
    """Except a run, by force; never a foreign file, a directory or the run itself."""
    target = tmp_path / f"a.{kind}"
    pack(small_run, out=target)
    with pytest.raises(RunExistsError, match="exists already"):
        pack(small_run, out=target)
    pack(small_run, out=target, force=True)
    with pytest.raises(RunExistsError, match="is to be packed"):
        pack(target, out=target, force=True)
    target.write_bytes(b"something else")
    with pytest.raises(RunExistsError, match="is not a run, so --force does not remove it"):
        pack(small_run, out=target, force=True)
    target.unlink()
    target.mkdir()
    with pytest.raises(RunExistsError, match="not a file"):
        pack(small_run, out=target, force=True)


def test_unpacking_replaces_only_a_run(small_run, tmp_path):
    """As capture does."""
    run = pack(small_run)
    with pytest.raises(RunExistsError):
        unpack(run)
    unpack(run, force=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("x")
    with pytest.raises(RunExistsError, match="thesis"):
        unpack(run, out=tmp_path / "other", force=True)
    with pytest.raises(RunExistsError, match="is to be unpacked"):
        unpack(small_run, out=small_run, force=True)


@pytest.mark.parametrize("which", [1, 2])
def test_unpacking_that_is_stopped_loses_nothing(small_run, tmp_path, monkeypatch, which):
    """The run that is to be replaced goes when the new one stands in its place; also where the
    system cannot exchange two in one step."""
    monkeypatch.setattr(packing, "_exchanged", lambda *_: False)
    packed, held = pack(small_run), sorted(os.listdir(small_run))
    before, replace, calls = sorted(os.listdir(tmp_path)), os.replace, []

    def stopped(source, target):
        calls.append(source)
        if len(calls) == which:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(packing.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        unpack(packed, out=small_run, force=True)
    assert (sorted(os.listdir(tmp_path)), sorted(os.listdir(small_run))) == (before, held)
    assert Run.open(small_run).verify() == []


@pytest.mark.parametrize("out", ["a.tar.gz", "a", "s3://bucket/a"])
def test_a_name_that_is_no_archive_is_refused(small_run, tmp_path, monkeypatch, out):
    """Before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        pack(small_run, out=out)
    with pytest.raises(UsageError):
        unpack(small_run, out="a.tar")


def test_a_full_disk_leaves_nothing(small_run, tmp_path, monkeypatch):
    """Neither half an archive nor half a directory."""
    packed = pack(small_run, out=tmp_path / "a.tar")
    before = sorted(os.listdir(tmp_path))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing, "_write", full)
    for kind in KINDS:
        with pytest.raises(RunWriteError, match="No space left"):
            pack(small_run, out=tmp_path / f"b.{kind}")
    with pytest.raises(RunWriteError, match="No space left"):
        unpack(packed, out=tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_damaged_run_is_not_packed(small_run, tmp_path):
    """What cannot be opened is refused; a wrong checksum travels, and is found as before."""
    shard = next((small_run / "tensors").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert len(pack(small_run, out=tmp_path / "a.tar").verify()) == 1
    shard.write_bytes(data[:-1])
    with pytest.raises(RunFormatError):
        pack(small_run, out=tmp_path / "b.tar")
    assert not (tmp_path / "b.tar").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_writer_writes_archives(tmp_path, manifest, kind):
    """Gathered beside, packed at the end; the same file as packing the directory gives."""
    place = tmp_path / f"r.{kind}"
    with RunWriter(place, manifest()) as writer:
        put(writer, torch.ones(3))
        assert str(writer.flush()) == f"{place}.partial"
        assert len(Run.open(f"{place}.partial").records) == 1
        assert not place.exists()
    assert Run.open(place).verify() == []
    assert os.listdir(tmp_path) == [place.name]
    unpack(place)
    assert pack(tmp_path / "r", out=tmp_path / f"s.{kind}").path.read_bytes() == place.read_bytes()


def test_a_capture_that_stops_leaves_a_directory(tmp_path, manifest):
    """An archive is always a whole run; what was recorded can be read, and packed."""
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path / "r.tar", manifest()) as writer:
        put(writer, torch.ones(3))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["r.tar.partial"]
    run = Run.open(tmp_path / "r.tar.partial")
    assert (run.manifest.stopped_by, len(run.records)) == ("interrupted", 1)
    with pytest.raises(RunExistsError, match=r"r\.tar\.partial exists already"):
        RunWriter(tmp_path / "r.tar", manifest())
    with RunWriter(tmp_path / "r.tar", manifest(), force=True):
        pass
    assert os.listdir(tmp_path) == ["r.tar"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_file_that_shrinks_while_it_is_packed(small_run, tmp_path, monkeypatch, kind):
    """Nothing is written, where an archive would lie about what it holds."""

    def shorter(run):
        for name, size, pieces in whole_files(run):
            yield name, size, (piece[:-1] for piece in pieces)

    whole_files = Run.whole_files
    monkeypatch.setattr(Run, "whole_files", shorter)
    with pytest.raises(RunWriteError, match="were there to be copied"):
        pack(small_run, out=tmp_path / f"a.{kind}")
    assert not list(tmp_path.glob("*a.*"))
