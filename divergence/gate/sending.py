"""What is sent of a comparison beside the report: the reproducer of `localize`, found by its pair.

A folder of `localize` holds the ids of its two runs (pair.json). It is looked for beside the runs
and where one works. Only files that a reproducer consists of are read, and no link is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from divergence.errors import RunWriteError
from divergence.ops.reproducer.repro import FILES

if TYPE_CHECKING:
    from divergence.run.reader import Run

__all__ = ["reproducer_beside", "write_whole"]

_PAIR_BYTES = 4096
_MOST_BYTES = 256 << 20
"""Larger ones are no attachment."""


def reproducer_beside(a: Run, b: Run) -> dict[str, bytes]:
    """The files of the reproducer that `localize` made of this pair; empty where there is none."""
    pair = {"reference": a.manifest.id, "candidate": b.manifest.id}
    for folder in _folders(a, b):
        if _pair_of(folder) != pair:
            continue
        repro = folder / "repro"
        files = [repro / name for name in FILES if _is_file(repro / name)]
        if files and sum(file.stat().st_size for file in files) <= _MOST_BYTES:
            return {file.name: file.read_bytes() for file in files}
    return {}


def _folders(a: Run, b: Run) -> Iterator[Path]:
    places = [Path()]
    places += [run.path.parent for run in (a, b) if isinstance(run.path, Path)]
    for place in dict.fromkeys(place.resolve() for place in places):
        with contextlib.suppress(OSError):
            yield from sorted(path for path in place.iterdir() if path.is_dir())


def _pair_of(folder: Path) -> object:
    file = folder / "pair.json"
    if not _is_file(file) or file.stat().st_size > _PAIR_BYTES:
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def write_whole(target: Path, data: bytes) -> None:
    """A file that is there whole or not at all."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, target)
    except OSError as error:
        raise RunWriteError(
            f"writing failed: {error.strerror or error}", where=str(target), hint="another -o"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
