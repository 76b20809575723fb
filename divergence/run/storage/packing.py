"""A run as one file, and back.

Packing copies bytes, it changes none: manifest first (so that whoever has the beginning of a file
knows what it should be), then the lines, then the shards that lines point at, by name. Nothing of
the machine goes in (no time, owner or mode), so that one run always gives the same archive, bit
for bit. Nothing is compressed: floating-point noise does not shrink by more than some percent, and
tensors are read where they lie. In a zip each file begins at a multiple of 64 bytes, by padding
its extra field (as Android's zipalign does), so that tensors can be used without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from divergence.errors import RunExistsError, RunFormatError, RunWriteError, UsageError
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.schema.layout import TENSORS, checked_name
from divergence.run.storage.blob import Bytes
from divergence.run.storage.directory_target import check_directory
from divergence.run.storage.location import (
    ARCHIVES,
    Location,
    Url,
    archive_kind,
    location_of,
    same_location,
)
from divergence.run.storage.remote import Remote
from divergence.run.storage.store import open_store
from divergence.words import Progress, silent

__all__ = ["check_archive", "pack", "put_in_place", "unpack", "write_archive", "write_directory"]


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
    target = _beside(source.path, ".tar") if out is None else location_of(out)
    if archive_kind(target) is None:
        raise UsageError(
            f"{target} is not the name of an archive", hint="it ends in .tar or .zip; a run is "
            "copied into a directory by `divergence unpack`",
        )  # fmt: skip
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
    target = _beside(source.path, "") if out is None else location_of(out)
    if isinstance(target, Url) or archive_kind(target) is not None:
        raise UsageError(
            f"{target} is not the name of a directory of this machine",
            hint=command_line("pack", source.path, o="OUT") + " makes an archive, also at a URL",
        )
    if same_location(source.path, target):
        raise RunExistsError(f"{target} is the run that is to be unpacked", hint="give another -o")
    with _writing(target):
        check_directory(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            new, old = folder / "new", folder / "old"
            new.mkdir()  # with the usual permissions; mkdtemp's are for the owner alone
            write_directory(source, new, progress=progress)
            put_in_place(new, target, old)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return Run.open(target)


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
    if _is_free(place):
        return
    if not force:
        raise RunExistsError(
            f"{place} exists already",
            hint="choose another name with -o, or pass --force to replace it",
        )
    try:
        open_store(place).close()
    except RunFormatError as error:
        raise RunExistsError(
            f"{place} is not a run, so --force does not remove it: {error.message}",
            hint="choose another name with -o, or remove it yourself",
        ) from error


def _is_free(place: Location) -> bool:
    if isinstance(place, Url):
        remote = Remote(place, refused=RunWriteError)
        remote.check_bucket()
        return remote.look() is None
    if place.is_symlink() or (place.exists() and not place.is_file()):
        raise RunExistsError(
            f"{place} exists and is not a file, which a run of this name would be",
            hint="choose another name with -o; one without .tar or .zip becomes a directory",
        )
    return not place.exists()


def write_directory(run: Run, folder: Path, *, progress: Progress | None = None) -> None:
    """The files that make the run, and no others, into an empty directory. May raise OSError."""
    (folder / TENSORS).mkdir()
    for name, size, pieces in _files(run, "unpack", progress):
        with open(folder / name, "wb") as written:
            _write(written, pieces, size, f"{run.path}: {name}")


def write_archive(run: Run, target: Location, *, progress: Progress | None = None) -> None:
    """The run as one file, whole or not at all, whatever was there. May raise OSError."""
    write = _write_tar if archive_kind(target) == "tar" else _write_zip
    if isinstance(target, Url):
        remote = Remote(target, refused=RunWriteError)
        with tempfile.TemporaryDirectory(prefix="divergence-") as folder:
            made = Path(folder, target.name)
            write(made, run, progress)
            remote.put("", made)
        return
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(temporary, run, progress)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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


def _write_zip(path: Path, run: Run, progress: Progress | None) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as folder:
        for name, size, pieces in _files(run, "pack", progress):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.file_size = size
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


def _beside(source: Location, suffix: str) -> Path:
    """Where a run goes that no place was named for: beside it, or here where it is far away."""
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
            f"writing failed: {error.strerror or error}", where=str(target),
            hint="free some space or choose another place with -o; nothing was left there",
        ) from error  # fmt: skip
