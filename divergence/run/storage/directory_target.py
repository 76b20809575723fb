"""A run written to a directory of this machine: what is refused, what may be replaced."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from divergence.errors import RunExistsError
from divergence.outside import lines as read_lines
from divergence.run.process_tuning import DirectFiles
from divergence.run.schema.layout import MANIFEST, TENSORS, checked_name, is_run_name, records_name
from divergence.run.storage.shard import write_shard

if TYPE_CHECKING:
    from divergence.run.writing.captured_tensor import ShardEntry

__all__ = ["DirectoryTarget", "check_directory", "prepare_directory"]


class DirectoryTarget:
    """A directory of this machine: a shard is written beside its place and renamed.

    Of the ranks of one run the first prepares the directory; the others, which begin later, write
    beside it (each node may have a disk of its own: the names of all files differ).
    """

    def __init__(self, path: Path, *, force: bool, rank: int = 0) -> None:
        self.place = path
        self._direct = DirectFiles()
        self._lock: int | None = None
        if rank == 0:
            self._lock = prepare_directory(path, force=force)
        else:
            (path / TENSORS).mkdir(parents=True, exist_ok=True)
        lines = path / records_name(rank)
        if lines.exists():  # of an earlier run, on a disk that is not the first rank's
            if not force:
                raise RunExistsError(
                    f"{lines} exists already",
                    hint="choose another directory with -o, or pass --force to replace it",
                )
            lines.unlink()
        self._records = open(lines, "ab", buffering=0)  # noqa: SIM115 - see close()

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        final = self.place / checked_name(name, where=str(self.place))
        with _beside(final.with_suffix(".tmp"), final) as temporary:
            write_shard(temporary, pieces, direct=self._direct)

    def append_records(self, lines: bytes) -> None:
        before = os.fstat(self._records.fileno()).st_size
        try:
            while lines:  # unbuffered, so that nothing half-written waits for a later retry
                lines = lines[self._records.write(lines) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._records.truncate(before)
            raise

    def replace_manifest(self, text: bytes) -> None:
        with _beside(self.place / (MANIFEST + ".tmp"), self.place / MANIFEST) as temporary:
            temporary.write_bytes(text)

    def flush(self) -> Path:
        return self.place

    def close(self) -> None:
        self._records.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_directory(path: Path, *, force: bool) -> None:
    """Raise RunExistsError unless ``path`` is free, empty, or (with ``force``) a run that nobody is
    writing.

    Raises OSError where it cannot be looked at.
    """
    _check_contents(path, force=force)
    if path.exists():
        lock = _locked(path)
        if lock is not None:
            os.close(lock)


def _locked(path: Path) -> int | None:
    """Locks the directory against other captures until the returned descriptor is closed or this
    process ends. None where there are no locks. Raises RunExistsError where another holds it."""
    try:
        import fcntl
    except ImportError:
        return None
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunExistsError(
            f"another capture is writing to {path}",
            hint="wait for it, or choose another directory with -o",
        ) from None
    except OSError:
        os.close(lock)
        return None
    return lock


def _check_contents(path: Path, *, force: bool) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RunExistsError(
            f"{path} exists and is not a directory", hint="choose another directory with -o"
        )
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if not names or (TENSORS in names and all(_holds_nothing(path / name) for name in names)):
        return  # nothing, or what a capture that was killed at once leaves
    if not force:
        raise RunExistsError(
            f"{path} exists already",
            hint="choose another directory with -o, or pass --force to replace it",
        )
    other = sorted(name for name in names if not is_run_name(name))
    if not other and TENSORS in names:
        other = _foreign_tensors(path)
    if MANIFEST not in names or other:
        # manifest.json alone proves little: other programs have files of that name
        what = f"holds {other[0]}" if other else "is not a run"
        raise RunExistsError(
            f"{path} {what}, so --force does not remove it",
            hint="choose another directory with -o, or remove it yourself",
        )


def _holds_nothing(path: Path) -> bool:
    """Is it a part of a run that was begun, and as yet empty?"""
    if path.is_symlink():
        return False
    if path.name == TENSORS:
        return path.is_dir() and not any(path.iterdir())
    begun = path.name == MANIFEST + ".tmp" or (
        path.name != MANIFEST and is_run_name(path.name) and path.stat().st_size == 0
    )
    return begun and path.is_file()


def _foreign_tensors(path: Path) -> list[str]:
    """What lies among the shards and is none: not named as this program names them, and in no
    record."""
    folder = path / TENSORS
    if folder.is_symlink() or not folder.is_dir():
        return [TENSORS]
    names = {
        f"{TENSORS}/{entry.name}"
        for entry in folder.iterdir()
        if _SHARD.fullmatch(entry.name) is None or (entry.is_dir() and not entry.is_symlink())
    }
    for lines in path.glob("records*.jsonl") if names else ():
        for line in read_lines(lines, error=RunExistsError):
            names -= {name for name in names if f'"{name}"'.encode() in line}
    return sorted(names)


_SHARD = re.compile(r"r[0-9]{5}-[0-9]{6}\.(safetensors|tmp)")


def prepare_directory(path: Path, *, force: bool) -> int | None:
    """Checks, removes the run that is to be replaced, makes the directories. Returns the lock, to
    be closed. May raise OSError."""
    _check_contents(path, force=force)
    path.mkdir(parents=True, exist_ok=True)
    lock = _locked(path)
    place = Path(os.path.abspath(path))
    aside = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    try:
        _check_contents(path, force=force)  # another may have been faster
        if any(path.iterdir()):
            lock = _set_aside(place, aside, lock)
        (path / TENSORS).mkdir(exist_ok=True)
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return lock


def _set_aside(path: Path, aside: Path, lock: int | None) -> int | None:
    """Leaves an empty directory at ``path``. For readers this is one step: the old run is whole or
    gone. Returns the new directory's lock."""
    try:
        if Path.cwd().is_relative_to(path):
            raise OSError("this process stands in it")
        path.rename(aside)
    except OSError:  # or a mount point, or a folder above that is not ours: file by file then
        # the manifest goes last: without it nobody could tell that the rest was a run
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == MANIFEST):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        return lock
    path.mkdir(mode=aside.stat().st_mode & 0o777)
    new = _locked(path)
    if lock is not None:
        os.close(lock)
    return new


@contextlib.contextmanager
def _beside(temporary: Path, final: Path) -> Iterator[Path]:
    """Yields ``temporary`` to write to; renames it to ``final``, or removes it after an error."""
    try:
        yield temporary
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
