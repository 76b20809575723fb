"""Runs in S3: a real API served on this machine, credentials, buckets, connections that break."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from divergence import Run, pack, unpack
from divergence.errors import RunExistsError, RunFormatError, RunWriteError
from divergence.run import remote
from divergence.run import writer as writing
from divergence.run.storage import location_of
from divergence.run.target import check_target
from divergence.run.writer import RunWriter
from tests.by_hand import put


def written(url: str, manifest, num: int = 6) -> Run:
    with RunWriter(url, manifest()) as writer:
        for step in range(num):
            put(writer, torch.full((64, 64), float(step)), step=step)
    return Run.open(url)


class BreakingProxy:
    """Passes bytes on to a server; cuts connections off in the middle of an answer.

    ``breaks``: how many connections are still to be cut, after ``limit`` bytes of answers.
    """

    def __init__(self, server: str) -> None:
        host, port = server.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self.breaks, self.limit, self.num_broken = 0, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.breaks > 0 and passed + len(data) > self.limit:
                    self.breaks -= 1
                    self.num_broken += 1
                    target.sendall(data[: max(0, self.limit - passed)])
                    break
                target.sendall(data)
                passed += len(data)
        for one in (source, target):  # close alone waits for the other thread's recv
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                one.close()


@pytest.fixture
def proxy(s3, monkeypatch) -> Iterator[BreakingProxy]:
    """S3 through a connection that can break; ``s3`` itself stays whole."""
    import s3fs

    proxy = BreakingProxy(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # so that it is divergence that tries again
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.close()


# --- all is well -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_written_to_a_bucket_and_read_from_it(s3, manifest):
    """As a directory of objects."""
    run = written(f"{s3}/runs/a", manifest)
    assert run.manifest.complete and run.verify() == []
    assert torch.equal(run.read(run.records[3]), torch.full((64, 64), 3.0))
    with pytest.raises(RunExistsError, match="exists already"):
        RunWriter(f"{s3}/runs/a", manifest())
    with RunWriter(f"{s3}/runs/a", manifest(), force=True):
        pass
    assert Run.open(f"{s3}/runs/a").records == []


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_in_a_bucket_is_a_run(s3, manifest, tmp_path, kind):
    """Written there, packed to there, read by ranges, unpacked from there."""
    run = written(f"{s3}/a.{kind}", manifest)
    assert run.manifest.complete and run.verify() == []
    here = unpack(run, out=tmp_path / "here")
    assert here.records == run.records and here.verify() == []
    again = pack(here, out=f"{s3}/b.{kind}")
    assert again.records == run.records
    assert pack(again, out=tmp_path / f"b.{kind}").verify() == []


# --- refusals ----------------------------------------------------------------------------------


def test_a_missing_bucket_is_named(s3, manifest):
    """For reading and for writing, before anything is computed."""
    with pytest.raises(RunFormatError, match="there is nothing at s3://no-such-bucket/a"):
        Run.open("s3://no-such-bucket/a")
    for url in ("s3://no-such-bucket/a", "s3://no-such-bucket/a.tar"):
        with pytest.raises(RunWriteError, match="there is no bucket 'no-such-bucket'"):
            RunWriter(url, manifest())
        with pytest.raises(RunWriteError, match="there is no bucket 'no-such-bucket'"):
            check_target(location_of(url), force=False)


def test_no_credentials_is_one_clear_error(s3, manifest, monkeypatch):
    """With the variables that would set them; nothing is tried again."""
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    for action in (
        lambda: Run.open(f"{s3}/a"),
        lambda: Run.open(f"{s3}/a.tar"),
        lambda: RunWriter(f"{s3}/a", manifest()),
    ):
        with pytest.raises((RunFormatError, RunWriteError), match="no credentials") as caught:
            action()
        assert "AWS_PROFILE" in caught.value.hint


def test_nobody_listens(s3, manifest, monkeypatch):
    """An endpoint that is down is one error that names the URL."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(RunFormatError, match="failed 3 times") as caught:
        Run.open(f"{s3}/a")
    assert caught.value.where == f"{s3}/a"


# --- connections that break --------------------------------------------------------------------


@pytest.mark.slow
def test_reading_survives_connections_that_break_in_the_middle(s3, manifest, proxy):
    """Tried again, and every byte is right."""
    url = str(written(f"{s3}/a", manifest, num=40).path)
    run = Run.open(url)
    proxy.limit, proxy.breaks = 30_000, 2
    assert run.verify() == []
    assert proxy.num_broken == 2


@pytest.mark.slow
def test_reading_through_a_connection_that_stays_broken_ends_in_one_error(s3, manifest, proxy):
    """Not in tensors of zeros."""
    run = written(f"{s3}/a", manifest, num=40)
    run = Run.open(run.path)
    proxy.limit, proxy.breaks = 1000, 10_000
    with pytest.raises(RunFormatError, match="reading failed 3 times") as caught:
        run.read(run.records[-1])
    assert caught.value.where.startswith(f"{s3}/a/tensors/")


@pytest.mark.slow
def test_writing_survives_connections_that_break(s3, manifest, proxy, monkeypatch):
    """The run is whole."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    with RunWriter(f"{s3}/a", manifest()) as writer:
        proxy.limit, proxy.breaks = 10, 2
        for step in range(6):
            put(writer, torch.full((64, 64), float(step)), step=step)
            writer.drain()
    assert proxy.num_broken == 2
    run = Run.open(f"{s3}/a")
    assert run.manifest.complete and run.verify() == [] and len(run.records) == 6


@pytest.mark.slow
def test_writing_through_a_connection_that_stays_broken_leaves_nothing_whole(
    s3, manifest, proxy, monkeypatch
):
    """One error that names the URL; what is there says that it is incomplete."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    wrong = pytest.raises(RunWriteError, match="writing failed 3 times")
    with wrong as caught, RunWriter(f"{s3}/a", manifest()) as writer:
        put(writer, torch.zeros(64, 64))
        writer.flush()
        proxy.limit, proxy.breaks = 10, 10_000
        for step in range(1, 50):
            put(writer, torch.full((64, 64), float(step)), step=step)
            writer.drain()
    assert caught.value.where.startswith(f"{s3}/a/")
    proxy.breaks = 0
    run = Run.open(f"{s3}/a")
    assert not run.manifest.complete
    assert run.verify() == [] and len(run.records) >= 1


@pytest.mark.slow
def test_packing_over_a_connection_that_breaks(s3, manifest, proxy, tmp_path):
    """An object is there whole, or not at all."""
    with RunWriter(tmp_path / "a", manifest()) as writer:
        put(writer, torch.zeros(64, 64))
    proxy.limit, proxy.breaks = 10, 10_000
    with pytest.raises(RunWriteError):
        pack(tmp_path / "a", out=f"{s3}/a.tar")
    proxy.breaks = 0
    with pytest.raises(RunFormatError, match="there is nothing at"):
        Run.open(f"{s3}/a.tar")
    assert pack(tmp_path / "a", out=f"{s3}/a.tar").verify() == []
