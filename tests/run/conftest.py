"""Runs written by hand: a manifest that says little, and any tensors."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from divergence.run.manifest import Manifest
from tests import by_hand
from tests.digests import without_digests


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """``manifest(**changes)`` → a small valid manifest of two prompts."""
    return by_hand.manifest


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """``write_run({"a:out": tensor})`` → the directory of a complete run that holds them. It has
    no digests of its files, so that a test may change these."""
    from divergence.run.captured import CapturedTensor
    from divergence.run.writer import RunWriter

    def write(tensors: dict[str, Any], path: Path | None = None, **changes: Any) -> Path:
        path = path or tmp_path / "run"
        with RunWriter(path, by_hand.manifest(**changes)) as writer:
            for order, (site, tensor) in enumerate(tensors.items()):
                item = tensor if isinstance(tensor, CapturedTensor) else CapturedTensor(tensor)
                writer.put(item, pass_="free", sample=0, step=0, site=site, order=order)
        return without_digests(path)

    return write


@pytest.fixture
def small_run(write_run: Callable[..., Path]) -> Path:
    """Three sites, two tensors: the first two sites share one."""
    import torch

    first = torch.arange(12, dtype=torch.float32).reshape(1, 3, 4)
    return write_run({"a:out": first, "b:in": first.clone(), "b:out": first.to(torch.bfloat16)})


@pytest.fixture
def mutated() -> Callable[[bytes, random.Random], bytes]:
    """``mutated(data, random)`` → the bytes with one kind of damage."""
    return _mutated


def _mutated(data: bytes, random_: random.Random) -> bytes:
    kind = random_.choice(["flip", "flip", "cut", "insert", "remove", "swap", "token"])
    place = random_.randrange(len(data) + 1)
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(random_.choice([1, 1, 4])):
            changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + random_.randbytes(random_.choice([1, 8])) + data[place:]
    if kind == "remove":
        return data[:place] + data[place + random_.choice([1, 9]) :]
    if kind == "swap":
        other = random_.randrange(len(data) + 1)
        low, high = sorted((place, other))
        return data[:low] + data[high:] + data[low:high]
    token = random_.choice([b"1e999", b"-1", b"null", b"[]", b"{}", b'"', b"9" * 25, b"NaN", b"\n"])
    return data[:place] + token + data[place + len(token) :]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An object store in memory under ``far://`` that remembers every request, and can fail.

    ``requests``: (what, path, bytes). ``fail``: called before each with (what, path), may raise;
    ``cut``: called with (path, data) on what was read.
    """
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    from divergence.run import remote

    class Far(MemoryFileSystem):
        protocol = "far"
        store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way: one store a class
        pseudo_dirs = [""]  # noqa: RUF012
        requests: list[tuple[str, str, int]] = []  # noqa: RUF012
        fail = cut = None

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return MemoryFileSystem._strip_protocol(str(path).replace("far://", "memory://"))

        def _note(self, what: str, path: str, num_bytes: int = 0) -> None:
            self.requests.append((what, path.lstrip("/"), num_bytes))
            if Far.fail is not None:
                Far.fail(what, path.lstrip("/"))

        def find(self, path: str, **options: Any) -> Any:
            self._note("list", path)
            return super().find(path, **options)

        def info(self, path: str, **options: Any) -> Any:
            return super().info(path, **options)

        def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
            self._note("get", path, (end or 0) - (start or 0))
            data = super().cat_file(path, start=start, end=end, **options)
            return data if Far.cut is None else Far.cut(path, data)

        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            self._note("put", path, len(value))
            super().pipe_file(path, value, **options)

        def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
            self._note("put", rpath, Path(lpath).stat().st_size)
            # never by pieces: an object is there whole or not at all
            super().pipe_file(rpath, Path(lpath).read_bytes())

        def rm_file(self, path: str) -> None:
            self._note("remove", path)
            if path not in self.store:
                raise FileNotFoundError(path)
            del self.store[path]

    fsspec.register_implementation("far", Far, clobber=True)
    Far.clear_instance_cache()
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    yield Far
    Far.clear_instance_cache()
