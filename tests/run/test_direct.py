"""Large shards past the system's cache: the same bytes, and the cache where that is refused."""

import errno
import os

import pytest
import torch

from divergence.run import process_tuning as tuning
from divergence.run import shards as shard
from divergence.run.captured import piece_of
from divergence.run.process_tuning import DIRECT_BYTES, DirectFiles
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")


def parts(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


@needs_direct
@pytest.mark.parametrize(
    "sizes",
    [
        (1,), (4096,), (4095, 2), (0, 7, 0), (1 << 20,), ((1 << 20) + 1,), (3, (2 << 20) - 3, 5),
        tuple(range(1, 300)),
    ],
)  # fmt: skip
def test_the_file_is_the_parts_one_after_another(tmp_path, monkeypatch, sizes):
    """Whatever their lengths are: the last block is cut to the file's length."""
    monkeypatch.setattr(tuning, "_SLOW", 0.0)  # a few bytes are never fast
    given, path = parts(*sizes), tmp_path / "file"
    files = DirectFiles()
    if not files.write(path, given):
        pytest.skip("this file system knows no O_DIRECT")
    assert path.read_bytes() == b"".join(given)
    assert files.write(path, parts(5))  # the same buffer again, and a shorter file
    assert path.stat().st_size == 5


def test_a_large_shard_is_written_past_the_cache(tmp_path, monkeypatch):
    """A small one is not; either is read as it was put."""
    written = []

    class Noted(DirectFiles):
        def write(self, path, parts):
            written.append(sum(part.nbytes for part in parts))
            return super().write(path, parts)

    tensors = {f"{number:032x}": torch.randn(1 << 20) for number in range(3)}
    pieces = {key: piece_of(tensor) for key, tensor in tensors.items()}
    shard.write_shard(tmp_path / "large", pieces, direct=Noted())
    shard.write_shard(tmp_path / "small", {"0" * 32: piece_of(torch.ones(8))}, direct=Noted())
    assert [size > DIRECT_BYTES for size in written] == [True]
    from safetensors.torch import load_file

    for key, tensor in load_file(tmp_path / "large").items():
        assert torch.equal(tensor, tensors[key])


@pytest.mark.parametrize("where", ["open", "write"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_gets_the_usual_way(tmp_path, monkeypatch, where, code):
    """Asked once: nothing of the attempt is left in the file, and it is not tried again."""

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    with monkeypatch.context() as patched:
        target = (os, "open") if where == "open" else (tuning, "_write_whole")
        patched.setattr(*target, refuse)
        files = DirectFiles()
        assert not files.write(tmp_path / "file", parts(100))
    assert not files.usable
    assert not files.write(tmp_path / "file", parts(100))
    pieces = {"0" * 32: piece_of(torch.zeros(3 << 20))}
    shard.write_shard(tmp_path / "file", pieces, direct=files)
    assert (tmp_path / "file").stat().st_size > 12 << 20


def test_a_full_disk_is_no_refusal(tmp_path, monkeypatch):
    """It ends the writing, as it would in the cache."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    monkeypatch.setattr(tuning, "_write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        DirectFiles().write(tmp_path / "file", parts(100))


@needs_direct
def test_a_write_that_stops_within_a_block_is_a_full_disk(tmp_path, monkeypatch):
    """What is left could not be written in whole blocks, and must not be left out."""
    monkeypatch.setattr(os, "write", lambda file, block: 100)
    with pytest.raises(OSError, match="No space left"):
        DirectFiles().write(tmp_path / "file", parts(8192))


def test_a_slow_disk_is_left_to_the_cache(tmp_path, monkeypatch):
    """The file that took long is whole; the next goes through the cache."""
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    monkeypatch.setattr(tuning, "_SLOW", 1e18)
    files, given = DirectFiles(), parts(9000)
    assert files.write(tmp_path / "file", given)
    assert (tmp_path / "file").read_bytes() == given[0]
    assert not files.usable


@pytest.mark.parametrize("refused", [False, True])
def test_a_run_reads_back_either_way(tmp_path, manifest, monkeypatch, refused):
    """Through the writer, with tensors of several dtypes in one large shard."""
    if refused:
        monkeypatch.setattr(DirectFiles, "write", lambda *_: False)
    from divergence.run.captured import CapturedTensor

    tensors = [torch.randn(3 << 20), torch.arange(1 << 20), torch.randn(777).to(torch.bfloat16)]
    with RunWriter(tmp_path / "run", manifest()) as writer:
        for order, tensor in enumerate(tensors):
            writer.put(
                CapturedTensor(tensor),
                pass_="free",
                sample=0,
                step=0,
                site=f"m.{order}:out",
                order=order,
            )
    run = Run.open(tmp_path / "run")
    for record, tensor in zip(run.records, tensors, strict=True):
        assert torch.equal(run.read(record), tensor)
    assert run.manifest.sizes.num_shards == 1
