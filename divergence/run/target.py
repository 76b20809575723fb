"""A run is written to a folder, an archive or a URL; whole or readable at any moment."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import re
import shutil
import struct
import tarfile
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from divergence.errors import RunExistsError, RunFormatError, RunWriteError, UsageError
from divergence.outside import lines as read_lines
from divergence.run.captured import ShardEntry
from divergence.run.command import command_line
from divergence.run.reader import Run, open_store
from divergence.run.record import (
    MANIFEST,
    SHARD_PATTERN,
    TENSORS,
    checked_name,
    is_records_name,
    is_run_name,
    records_name,
)
from divergence.run.remote import Object, Remote
from divergence.run.storage import (
    ARCHIVES,
    MAX_DEFLATED_BYTES,
    Bytes,
    Location,
    Url,
    archive_kind,
    location_of,
    same_location,
    write_shard,
)
from divergence.words import Progress, silent

# A run written to a directory of this machine: what is refused, what may be replaced.


class DirectoryTarget:
    """A directory of this machine: a shard is written beside its place and renamed.

    Of the ranks of one run the first prepares the directory; the others, which begin later, write
    beside it (each node may have a disk of its own: the names of all files differ).
    """

    def __init__(self, path: Path, *, force: bool, rank: int = 0) -> None:
        self.place = path
        self._lock: int | None = None
        if rank == 0:
            self._lock = prepare_directory(path, force=force)
        else:
            (path / TENSORS).mkdir(parents=True, exist_ok=True)
        lines = path / records_name(rank)
        if lines.exists():  # of an earlier run, on a disk that is not the first rank's
            if not force:
                raise _there_already(lines, "directory")
            lines.unlink()
        self._records = open(lines, "ab", buffering=0)  # noqa: SIM115 - see close()

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        """Stores a shard: whole under its name, or not at all."""
        final = self.place / checked_name(name, where=str(self.place))
        with _beside(final.with_suffix(".tmp"), final) as temporary:
            write_shard(temporary, pieces)

    def append_records(self, lines: bytes) -> None:
        """Adds whole lines to the records: all of them or none."""
        before = os.fstat(self._records.fileno()).st_size
        try:
            while lines:  # unbuffered, so that nothing half-written waits for a later retry
                lines = lines[self._records.write(lines) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._records.truncate(before)
            raise

    def replace_manifest(self, text: bytes, *, complete: bool) -> None:
        """Stores manifest.json: a reader meets the old or the new one, never a part. ``complete``:
        it says that it is the last one of a whole run."""
        with _beside(self.place / (MANIFEST + ".tmp"), self.place / MANIFEST) as temporary:
            temporary.write_bytes(text)

    def flush(self) -> Path:
        """Waits until all of the above can be read; where (what Run.open takes)."""
        return self.place

    def close(self) -> None:
        """Closes what is open, after the last manifest."""
        self._records.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _there_already(place: Location, kind: str) -> RunExistsError:
    return RunExistsError(
        f"{place} exists already",
        hint=f"choose another {kind} with -o, or pass --force to replace it",
    )


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
        raise _there_already(path, "directory")
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
    """List what lies among the shards and is none: not named as this program names them, and in no
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


# A run as one file, and back.
#
# Packing copies bytes, it changes none: manifest first (so that whoever has the beginning of a file
# knows what it should be), then the lines, then the shards that lines point at, by name. Nothing of
# the machine goes in (no time, owner or mode), so that one run always gives the same archive, bit
# for bit. Nothing is compressed: floating-point noise shrinks by a tenth or a fifth, and tensors
# are read where they lie. A golden's zip is: lines shrink to a tenth, and it is kept for long.
# In a zip each file begins at a multiple of 64 bytes, by padding its extra field (as Android's
# zipalign does), so that tensors can be used without a copy.

_ALIGNMENT = 64
_ALIGNMENT_FIELD = 0xD935  # of an extra field: Android's "alignment", skipped by other readers


def pack(
    run: str | os.PathLike[str] | Url | Run,
    *,
    out: str | os.PathLike[str] | Url | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Put a run into one file, ``out``: a .tar or .zip, here or at a URL. Default: RUN.tar.

    The file appears whole or not at all. Raises RunExistsError where ``out`` holds something
    and ``force`` is not given, and RunWriteError where it cannot be written.
    """
    source = Run.open(run)
    target = _packing_beside(source.path, ".tar") if out is None else location_of(out)
    if archive_kind(target) is None:
        raise UsageError(
            f"{target} is not the name of an archive",
            hint="it ends in .tar or .zip; a run is copied into a directory by `divergence unpack`",
        )
    if same_location(source.path, target):
        raise RunExistsError(f"{target} is the run that is to be packed")
    with _writing(target):
        check_archive(target, force=force)
        write_archive(source, target, progress=progress)
    return Run.open(target)


def unpack(
    run: str | os.PathLike[str] | Url | Run,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Put a run (an archive, or what is at a URL) into the directory ``out``. Default: its name
    without .tar or .zip.

    The directory appears whole or not at all: it is filled beside and renamed. Raises as ``pack``.
    """
    source = Run.open(run)
    target = _packing_beside(source.path, "") if out is None else location_of(out)
    if isinstance(target, Url) or archive_kind(target) is not None:
        raise UsageError(
            f"{target} is not the name of a directory of this machine",
            hint=command_line("pack", source.path, o="OUT") + " makes an archive, also at a URL",
        )
    if same_location(source.path, target):
        raise RunExistsError(f"{target} is the run that is to be unpacked", hint="give another -o")
    with _writing(target):
        check_directory(target, force=force)
        store_run(source, target, progress=progress)
    return Run.open(target)


def store_run(
    run: Run,
    target: Path,
    *,
    previous: Path | None = None,
    deflate: bool = False,
    agree: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> bool:
    """Writes a run beside its place, a directory or an archive, and renames it into that. True if
    what was there is kept, as ``previous``. ``deflate``: a .zip is compressed. ``agree``: called
    with its bytes when all is written, before anything is replaced. May raise OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(target)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    lock = _locked(folder)
    try:
        new, old = folder / f"new{target.suffix}", folder / "old"
        if archive_kind(target) is not None and not target.is_dir():
            write_archive(run, new, deflate=deflate, progress=progress)
        else:
            new.mkdir()  # with the usual permissions; mkdtemp's are for the owner alone
            write_directory(run, new, progress=progress)
        if agree is not None:
            files = new.rglob("*") if new.is_dir() else [new]
            agree(sum(file.stat().st_size for file in files if file.is_file()))
        kept = target.exists() and previous is not None
        put_in_place(new, target, old)
        if kept and previous is not None:
            if previous.is_dir():
                shutil.rmtree(previous)
            previous.unlink(missing_ok=True)
            old.rename(previous)
        return kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_left(target: Path) -> None:
    """Removes what a process that was killed left beside ``target``, but never the only copy."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????"):
        with contextlib.suppress(RunExistsError, OSError):  # another process is at work there
            lock = _locked(left)
            if lock is not None:
                names = {path.stem for path in left.iterdir()}
                if names <= ({"new", "old"} if target.exists() else {"new"}):
                    shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def put_in_place(new: Path, target: Path, old: Path) -> None:
    """Renames ``new`` to ``target``, and what was there to ``old``: whoever stops this, one of the
    two is there, whole. (Where the system cannot exchange two, a kill may leave it in ``old``.)"""
    if not target.exists():
        os.replace(new, target)
        return
    if _exchanged(new, target):
        os.replace(new, old)
        return
    try:
        os.replace(target, old)
        os.replace(new, target)
    except BaseException:  # also Ctrl-C between the two
        if not target.exists():
            os.replace(old, target)
        raise


def _exchanged(first: Path, second: Path) -> bool:
    """Were the two exchanged, in one step? Linux alone has it."""
    try:
        function = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    code: int = function(here, os.fsencode(first), here, os.fsencode(second), exchange)
    return code == 0


def check_archive(place: Location, *, force: bool) -> None:
    """Raise RunExistsError unless nothing is at ``place``, or (with ``force``) a packed run."""
    if isinstance(place, Url):
        remote = Remote(place, refused=RunWriteError)
        remote.check_bucket()
        is_free = remote.look() is None
    elif place.is_symlink() or (place.exists() and not place.is_file()):
        raise RunExistsError(
            f"{place} exists and is not a file, which a run of this name would be",
            hint="choose another name with -o; one without .tar or .zip becomes a directory",
        )
    else:
        is_free = not place.exists()
    if is_free:
        return
    if not force:
        raise _there_already(place, "name")
    try:
        open_store(place).close()
    except RunFormatError as error:
        raise RunExistsError(
            f"{place} is not a run, so --force does not remove it: {error.message}",
            hint="choose another name with -o, or remove it yourself",
        ) from error


def write_directory(run: Run, folder: Path, *, progress: Progress | None = None) -> None:
    """The files that make the run, and no others, into an empty directory. May raise OSError."""
    (folder / TENSORS).mkdir()
    for name, size, pieces in _files(run, "unpack", progress):
        with open(folder / name, "wb") as written:
            _write(written, pieces, size, f"{run.path}: {name}")


def write_archive(
    run: Run, target: Location, *, deflate: bool = False, progress: Progress | None = None
) -> None:
    """The run as one file, whole or not at all, whatever was there. May raise OSError."""
    is_tar = archive_kind(target) == "tar"
    write = _write_tar if is_tar else functools.partial(_write_zip, deflate=deflate)
    if isinstance(target, Url):
        remote = Remote(target, refused=RunWriteError)
        with tempfile.TemporaryDirectory(prefix="divergence-") as folder:
            made = Path(folder, target.name)
            write(made, run, progress)
            remote.put("", made)
        return
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _beside(temporary, target):
        write(temporary, run, progress)


def _write_tar(path: Path, run: Run, progress: Progress | None) -> None:
    with open(path, "wb") as tar:
        for name, size, pieces in _files(run, "pack", progress):
            entry = tarfile.TarInfo(name)  # mtime 0, mode 0644, nobody's
            entry.size = size
            tar.write(entry.tobuf(tarfile.PAX_FORMAT))
            _write(tar, pieces, size, f"{run.path}: {name}")
            tar.write(bytes(-size % tarfile.BLOCKSIZE))
        # two empty blocks are the end, and a tape's record is full
        end = 2 * tarfile.BLOCKSIZE
        tar.write(bytes(end + -(tar.tell() + end) % tarfile.RECORDSIZE))


def _write_zip(path: Path, run: Run, progress: Progress | None, *, deflate: bool = False) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as folder:
        for name, size, pieces in _files(run, "pack", progress):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.file_size = size
            if deflate and size <= MAX_DEFLATED_BYTES:
                entry.compress_type = zipfile.ZIP_DEFLATED
            # zipfile decides by the same rule whether the header gets 64-bit sizes (20 bytes)
            wide = size * 1.05 > zipfile.ZIP64_LIMIT
            assert folder.fp is not None  # open
            begin = folder.fp.tell() + 30 + len(name) + (20 if wide else 0)
            padding = -(begin + 6) % _ALIGNMENT
            entry.extra = struct.pack(f"<HHH{padding}x", _ALIGNMENT_FIELD, 2 + padding, _ALIGNMENT)
            with folder.open(entry, "w") as written:
                _write(written, pieces, size, f"{run.path}: {name}")


def _files(
    run: Run, event: str, progress: Progress | None
) -> Iterator[tuple[str, int, Iterator[Bytes]]]:
    """(name, size, pieces) of each file that makes the run, in the order of an archive."""
    total = sum(run.files().values())
    done = 0
    for name, size, pieces in run.whole_files():
        checked_name(name, where=str(run.path))
        (progress or silent)(event, done >> 20, total >> 20, name)
        yield name, size, pieces
        done += size


def _write(target: IO[bytes], pieces: Iterator[Bytes], size: int, shown: str) -> None:
    num_bytes = 0
    for piece in pieces:
        target.write(piece)
        num_bytes += len(piece)
    if num_bytes != size:
        raise RunWriteError(f"{num_bytes} of {size} bytes were there to be copied", where=shown)


def _packing_beside(source: Location, suffix: str) -> Path:
    """Name where a run goes that no place was named for: beside it, or here where it is far
    away."""
    path = Path(source.name) if isinstance(source, Url) else source
    stem = path.name.removesuffix(path.suffix) if path.suffix in ARCHIVES else path.name
    if not stem:  # "." or "/"
        raise UsageError(f"{source} gives no name", hint="give one with -o")
    return path.with_name(stem + suffix)


@contextlib.contextmanager
def _writing(target: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunWriteError(
            f"writing failed: {error.strerror or error}",
            where=str(target),
            hint="free some space or choose another place with -o; nothing was left there",
        ) from error


# Where a run is written: a directory, an archive or an object store.
#
# The writer makes shards, lines and manifests; a target stores them. Whether a place may be written
# to is checked twice: before the model is loaded, so that a refusal costs nothing, and when the
# writer begins.
#
# A target's methods raise OSError or RunWriteError, and are called from one thread at a time, but
# for ``replace_manifest``. Shards come before the lines that point at them, also for concurrent
# readers.


def open_target(place: Location, *, force: bool, rank: int = 0) -> Target:
    """The target for ``place``, checked, emptied and ready to write. Raises as check_target.

    ``rank``: of several that write one run, the first opens it before the others.
    """
    if archive_kind(place) is not None:
        if rank == 0:
            check_target(place, force=force)
        return ArchiveTarget(place, force=force, rank=rank)
    if isinstance(place, Url):
        return RemoteTarget(place, force=force, rank=rank)
    return DirectoryTarget(place, force=force, rank=rank)


def check_target(place: Location, *, force: bool) -> None:
    """Raise RunExistsError unless ``place`` is free, empty, or (with ``force``) a run.

    Raises OSError, or RunWriteError, where it cannot be looked at.
    """
    if archive_kind(place) is not None:
        check_archive(place, force=force)
        check_directory(partial_of(place), force=force)
    elif isinstance(place, Url):
        _checked(Remote(place, refused=RunWriteError), force=force)
    else:
        check_directory(place, force=force)


def partial_of(place: Location) -> Path:
    """The directory in which the archive ``place`` is gathered."""
    if isinstance(place, Url):
        # a fixed name for a URL, so that a repeated capture finds what the last one left
        plain = "".join(c if c.isalnum() or c in ".-_" else "_" for c in str(place))
        owner = os.getuid() if hasattr(os, "getuid") else 0
        return Path(tempfile.gettempdir(), f"divergence-{owner}", f"{plain}.partial")
    return place.with_name(place.name + ".partial")


class ArchiveTarget(DirectoryTarget):
    """The target for a name that ends in .tar or .zip: gathered in a directory, packed at the end.

    An archive is always a whole run: a capture that is killed or stopped leaves the directory
    ``NAME.partial``, which is a readable run like any other, and no archive. Packing needs the
    space of the run a second time. For an archive at a URL the directory lies where temporary files
    do (TMPDIR).
    """

    def __init__(self, place: Location, *, force: bool, rank: int = 0) -> None:
        super().__init__(partial_of(place), force=force, rank=rank)
        self._archive, self._packs = place, rank == 0  # when all ranks have written
        self._complete = False

    def replace_manifest(self, text: bytes, *, complete: bool) -> None:
        super().replace_manifest(text, complete=complete)
        self._complete = complete

    def close(self) -> None:
        super().close()
        if self._complete and self._packs:
            run = Run.open(self.place)
            write_archive(run, self._archive)
            run.close()
            shutil.rmtree(self.place)


NUM_WAITING = 4
"""Finished shards that may lie here before the writer has to wait: bounds the local disk."""
GROWTH = 1.2
"""How much longer records.jsonl must be than what is stored before it is stored again."""


class RemoteTarget:
    """The target for a URL. Of several ranks the first empties it, before the others begin.

    Objects are stored whole or not at all, and cannot be added to. So each shard goes as an object
    of its own, in the background, as soon as it is finished, and its local copy is removed;
    ``records.jsonl`` is stored anew when it has grown by a fifth, after all shards that its lines
    point at (altogether some six times its size is sent); the manifest says ``complete: false``
    before anything else, and ``complete: true`` after everything else was found to be there in full
    length.

    What a kill can lose: the lines since the last fifth, and with them the tensors of those lines.
    The shards may be there; without lines they do not count.
    """

    def __init__(self, place: Url, *, force: bool, rank: int = 0) -> None:
        self.place = place
        self._remote = Remote(place, refused=RunWriteError)
        if rank == 0:
            replaced = _checked(self._remote, force=force)
            # the manifest goes first: what is left of a run without one is no run
            self._remote.remove(sorted(replaced, key=lambda name: name != MANIFEST))
        self._lines_name = records_name(rank)
        self._folder = Path(tempfile.mkdtemp(prefix="divergence-"))
        (self._folder / TENSORS).mkdir()
        self._records = open(self._folder / self._lines_name, "ab", buffering=0)  # noqa: SIM115 - see close()
        self._sizes: dict[str, int] = {}
        self._waiting_manifest: bytes | None = None
        self._manifest_lock = threading.Lock()
        self._num_lines_bytes = self._sent_lines_bytes = 0
        self._shards: list[Future[None]] = []
        self._lines: Future[None] | None = None
        self._room = threading.BoundedSemaphore(NUM_WAITING)
        self._pool = ThreadPoolExecutor(NUM_WAITING, thread_name_prefix="divergence-upload")
        self._lines_pool = ThreadPoolExecutor(1, thread_name_prefix="divergence-lines")

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        self._room.acquire()
        try:
            self._raise_failure()
            path = self._folder / checked_name(name, where=str(self.place))
            write_shard(path, pieces)
            self._sizes[name] = path.stat().st_size
            self._shards.append(self._pool.submit(self._send, name, path))
        except BaseException:
            self._room.release()
            raise

    def append_records(self, lines: bytes) -> None:
        self._raise_failure()
        self._num_lines_bytes += len(lines)
        while lines:
            lines = lines[self._records.write(lines) :]
        due = self._num_lines_bytes >= GROWTH * self._sent_lines_bytes
        if due and (self._lines is None or self._lines.done()):
            self._send_lines_soon()

    def replace_manifest(self, text: bytes, *, complete: bool) -> None:
        with self._manifest_lock:
            self._waiting_manifest = text
        if MANIFEST not in self._sizes or complete:
            self._put_manifest()  # the first, and the last of a whole run; else with the next lines

    def flush(self) -> Url:
        if self._lines is not None:
            self._lines.result()
        if self._sent_lines_bytes < self._num_lines_bytes or self._lines_name not in self._sizes:
            self._send_lines_soon().result()
        for shard in self._shards:
            shard.result()
        self._put_manifest()
        self._check_all_there()
        return self.place

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._lines_pool.shutdown(cancel_futures=True)
        self._records.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._put_manifest()

    def _put_manifest(self) -> None:
        with self._manifest_lock:
            text, self._waiting_manifest = self._waiting_manifest, None
            if text is not None:
                self._remote.put(MANIFEST, text)
                self._sizes[MANIFEST] = len(text)

    def _send(self, name: str, path: Path) -> None:
        try:
            self._remote.put(name, path)
        finally:
            path.unlink(missing_ok=True)
            self._room.release()

    def _send_lines_soon(self) -> Future[None]:
        self._lines = self._lines_pool.submit(
            self._send_lines, self._num_lines_bytes, list(self._shards)
        )
        return self._lines

    def _send_lines(self, num_bytes: int, shards: list[Future[None]]) -> None:
        """Stores the first ``num_bytes`` of lines after the shards that they point at."""
        for shard in shards:
            shard.result()
        self._put_manifest()
        part = self._folder / "part"
        shutil.copyfile(self._folder / self._lines_name, part)
        os.truncate(part, num_bytes)  # more may have been added meanwhile
        self._remote.put(self._lines_name, part)
        self._sizes[self._lines_name] = self._sent_lines_bytes = num_bytes

    def _raise_failure(self) -> None:
        under_way = []  # made in one pass: a shard that fails meanwhile must not be dropped unheard
        for shard in self._shards:
            if shard.done():
                shard.result()
            else:
                under_way.append(shard)
        if self._lines is not None and self._lines.done():
            self._lines.result()
        self._shards = under_way

    def _check_all_there(self) -> None:
        there = self._remote.objects()
        for name, size in self._sizes.items():
            stored = there.get(name)
            if stored is None or stored.size != size:
                state = "it is not there" if stored is None else f"{stored.size} bytes are there"
                raise RunWriteError(
                    f"of {name} {size} bytes were stored, but {state}",
                    where=str(self.place / name),
                    hint="does something else write to this place, or remove from it?",
                )


Target = DirectoryTarget | RemoteTarget


def _checked(remote: Remote, *, force: bool) -> dict[str, Object]:
    """The objects of the run that is to be replaced. RunExistsError unless nothing is below the
    URL, or (with ``force``) a run."""
    place = remote.url
    remote.check_bucket()
    there = remote.objects()
    if not there:
        return {}
    if "" in there:
        raise RunExistsError(f"{place} exists and is an object", hint="choose another -o")
    if not force:
        raise _there_already(place, "place")
    files = [name for name in there if name == MANIFEST or is_records_name(name)]
    other = [name for name in there if name not in files and not re.match(SHARD_PATTERN, name)]
    if other or not files:
        what = f"holds {min(other)}" if other else "is not a run"
        raise RunExistsError(
            f"{place} {what}, so --force does not remove it",
            hint="choose another place with -o, or remove it yourself",
        )
    return there
