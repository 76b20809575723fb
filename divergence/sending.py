"""bundle(): what is sent of a comparison, in one zip; with the reproducer of `localize`, found by
its pair.

A folder of `localize` holds the ids of its two runs (pair.json). It is looked for beside the runs
and where one works. Only files that a reproducer consists of are read, and no link is followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from divergence.errors import DumpError, RunExistsError, RunWriteError, UsageError
from divergence.ops.reproducer import FILES
from divergence.output import check_output, write_output
from divergence.outside import inside, json_value, read_bytes

if TYPE_CHECKING:
    from divergence.comparison.result import Report
    from divergence.run.reader import Run
    from divergence.words import Progress

_PAIR_BYTES = 4096
_ANSWER_BYTES = 64 << 20
_MOST_BYTES = 256 << 20
"""Larger ones are no attachment."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The zip that was written, its size in bytes, the names in it, and the report it rests on."""

    path: Path
    num_bytes: int
    files: list[str]
    report: Report


def bundle(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    out: str | Path,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    name_map: str | Path | None = None,
    device: str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Compare two runs and put into the zip ``out`` what a vendor or a colleague needs to see:
    README.md, report.md, report.json, the report as a page, its picture, both manifests, and what
    `localize` has left of this pair beside the runs: its answer and the operator's reproducer. The
    runs are not in it; paths, keys and the names of this host and user are taken out of all text.
    ``truth``, ``floor``, ``name_map``, ``device``: as in ``compare``. ``force``: replaces ``out``.

    Raises UsageError where ``out`` is no .zip file, RunExistsError where it exists and ``force`` is
    false, RunWriteError, and what ``compare`` raises.
    """
    from divergence.comparison.api import compare
    from divergence.report.bundle import Redaction, bundle_files, zipped
    from divergence.run.reader import Run
    from divergence.run.storage import folder_of

    if not str(out).lower().endswith(".zip"):
        raise UsageError("a bundle is a .zip file", hint="-o bug.zip")
    target = Path(folder_of(out))
    if target.exists() and not force:
        raise RunExistsError(f"{target} exists already", hint="another -o, or --force")
    check_output(target, what="bundle", error=RunWriteError, make_folder=True)
    report = compare(
        reference,
        candidate,
        truth=truth,
        floor=floor,
        name_map=name_map,
        device=device,
        progress=progress,
    )
    runs = {"A": Run.open(reference), "B": Run.open(candidate)}
    named = {str(run.path): letter for letter, run in runs.items()}
    named |= {str(reference): "A", str(candidate): "B"}
    if truth is not None:
        named[str(truth)] = "TRUTH"
    manifests = {name: run.manifest for name, run in runs.items()}
    machines = {name: manifest.environment for name, manifest in manifests.items()}
    files = bundle_files(
        report, machines, Redaction(named), manifests=manifests, **_left_beside(*runs.values())
    )
    data = zipped(files)
    write_output(data, target, what="bundle", error=RunWriteError, make_folder=True)
    return Bundle(target, len(data), list(files), report)


class _Left(TypedDict):
    """Holds what a descent of `localize` left: the files of its reproducer, and its answer."""

    reproducer: dict[str, bytes]
    localization: object


def _left_beside(a: Run, b: Run) -> _Left:
    """Read what the folder of this pair beside the runs holds; empty where there is none."""
    pair = {"reference": a.manifest.id, "candidate": b.manifest.id}
    places = [Path(), *(run.path.parent for run in (a, b) if isinstance(run.path, Path))]
    folders: list[Path] = []
    for place in dict.fromkeys(place.resolve() for place in places):
        with contextlib.suppress(OSError):
            folders += sorted(path for path in place.iterdir() if path.is_dir())
    for folder in folders:
        if _json_in(folder, "pair.json", most=_PAIR_BYTES) != pair:
            continue
        files = [file for name in FILES if (file := _file_in(folder, f"repro/{name}"))]
        if sum(file.stat().st_size for file in files) > _MOST_BYTES:
            files = []
        answer = _json_in(folder, "localize.json", most=_ANSWER_BYTES)
        if files or answer is not None:
            reproducer = {file.name: file.read_bytes() for file in files}
            return _Left(reproducer=reproducer, localization=answer)
    return _Left(reproducer={}, localization=None)


def _json_in(folder: Path, name: str, *, most: int) -> object:
    file = _file_in(folder, name)
    try:
        if file is not None:
            return json_value(read_bytes(file, most=most), where=str(file))
    except DumpError:
        pass
    return None


def _file_in(folder: Path, name: str) -> Path | None:
    """A regular file below, through no link; the folder is none either."""
    try:
        return inside(folder.parent, f"{folder.name}/{name}")
    except DumpError:
        return None
