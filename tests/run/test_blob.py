"""Bytes of a file of a run: what will be read is fetched ahead, and what cannot be is no error."""

import os

import pytest
import torch

from divergence.errors import RunFormatError
from divergence.run.blobs import LocalBlob
from divergence.run.captured import CapturedTensor
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

needs_preadv = pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system has no preadv")


@pytest.fixture
def asked(monkeypatch):
    """The stretches that were read to fetch them, in a system where nothing is cached."""
    found, preadv = [], os.preadv

    def noted(file, buffers, at, flags=0):
        if flags:
            raise BlockingIOError
        count = preadv(file, buffers, at)
        found.append((at, count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    return found


@needs_preadv
@pytest.mark.parametrize("num_bytes", [1, 1000, 1 << 20, (2 << 20) + 5])
def test_a_stretch_is_fetched_whole(tmp_path, asked, num_bytes):
    """In pieces that stay in a core's cache, from where the blob lies in its file."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    LocalBlob(path, offset=100).will_need(7, num_bytes)
    assert asked[0][0] == 107
    assert sum(count for _, count in asked) == num_bytes
    assert all(count <= 1 << 20 for _, count in asked)
    assert [at for at, _ in asked[1:]] == [at + count for at, count in asked[:-1]]


@needs_preadv
def test_what_is_cached_is_not_read_again(tmp_path, monkeypatch):
    """Both ends tell."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    flags = []

    def cached(file, buffers, at, flag=0):
        flags.append(flag)
        return 1

    monkeypatch.setattr(os, "preadv", cached)
    LocalBlob(path).will_need(0, 1 << 20)
    assert flags == [os.RWF_NOWAIT] * 2


@needs_preadv
def test_nothing_is_fetched_of_nothing(tmp_path, asked):
    """An empty tensor has no bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    LocalBlob(path).will_need(0, 0)
    assert asked == []


def test_a_system_without_the_call_fetches_nothing(tmp_path, monkeypatch):
    """It is a hint."""
    monkeypatch.delattr(os, "preadv", raising=False)
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    LocalBlob(path).will_need(0, 5)


@needs_preadv
@pytest.mark.parametrize("damage", ["removed", "cut", "garbage"])
def test_what_is_wrong_is_left_to_the_reader_to_say(tmp_path, manifest, damage):
    """Fetching ahead neither raises nor hides a damaged shard."""
    with RunWriter(tmp_path / "run", manifest()) as writer:
        writer.put(
            CapturedTensor(torch.randn(1000)), pass_="free", sample=0, step=0, site="m:out", order=0
        )
    run = Run.open(tmp_path / "run")
    (shard,) = (tmp_path / "run/tensors").iterdir()
    if damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:50] if damage == "cut" else b"x" * 50)
    run.will_read(run.records[0])
    with pytest.raises(RunFormatError):
        run.read(run.records[0])


@needs_preadv
def test_a_run_asks_for_its_tensors_bytes(tmp_path, manifest, asked):
    """As many as the record says, of the shard that it names."""
    with RunWriter(tmp_path / "run", manifest()) as writer:
        writer.put(
            CapturedTensor(torch.randn(5000)), pass_="free", sample=0, step=0, site="m:out", order=0
        )
    run = Run.open(tmp_path / "run")
    run.will_read(run.records[0])
    assert sum(count for _, count in asked) == 20000


def test_many_parts_are_read_wherever_they_lie(tmp_path):
    """Neighbours, parts far apart, one twice, in any order; none of a member of a larger file."""
    data = os.urandom(20_000)
    (tmp_path / "file").write_bytes(data)
    member = LocalBlob(tmp_path / "file").part(1_000, 18_000, "member")
    begins = [17_900, 0, 64, 64, 9_000, 128, 9_700]
    found = [bytes(part) for part in member.read_many(begins, 64)]
    assert found == [data[1_000 + begin :][:64] for begin in begins]
    assert member.read_many([], 64) == []
