"""Goldens by device and dtype in one folder: the one that fits a run best, and why.

A golden of another device or dtype is compared as well, since some golden is better than none; it
is said, and preflight and the policy have their say.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.run.storage.location import archive_kind, location_of

if TYPE_CHECKING:
    from divergence.run.reader import Run

__all__ = ["Choice", "choose_golden", "golden_name", "goldens_in"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The golden that a run is held against."""

    path: Path
    text: str
    """Which one, of how many, and how well it fits."""


def golden_name(run: Run) -> str:
    """What to call a golden among others: ``cpu-bfloat16``."""
    return f"{run.manifest.environment.device_type}-{_dtype(run)}"


def goldens_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The runs in a folder that is none itself; empty for anything else. Hidden ones and what
    ``--keep-previous`` has left are passed over."""
    place = location_of(folder)
    if not isinstance(place, Path) or not place.is_dir() or (place / "manifest.json").exists():
        return []
    return [path for path in sorted(place.iterdir()) if _may_be_golden(path)]


def _may_be_golden(path: Path) -> bool:
    if path.name.startswith(".") or path.stem.endswith(".previous") or path.suffix == ".previous":
        return False
    if path.is_dir():
        return (path / "manifest.json").is_file()
    return path.suffix in (".tar", ".zip") and archive_kind(path) is not None


def choose_golden(
    folder: str | os.PathLike[str], new: str | os.PathLike[str] | Run
) -> Choice | None:
    """The golden in ``folder`` that fits ``new`` best; None where it is no folder of goldens.

    The same dtype counts most, then the same kind of device, then the same device; of equal ones
    the first by name.
    """
    goldens = goldens_in(folder)
    if not goldens:
        return None
    from divergence.run.reader import Run

    run = Run.open(new)
    fits = [(_fit(Run.open(path), run), path) for path in goldens]
    (dtype, kind, device), path = max(fits, key=lambda item: item[0])
    lacks = [what for what, same in (("dtype", dtype), ("kind of device", kind)) if not same]
    if lacks:
        how = f"of another {' and another '.join(lacks)}: none here is {golden_name(run)}"
    else:
        how = "the same device and dtype" if device else "the same kind of device and dtype"
    return Choice(path=path, text=f"{path}, of {len(goldens)} there: {how}")


def _fit(golden: Run, run: Run) -> tuple[bool, bool, bool]:
    expected, other = golden.manifest.environment, run.manifest.environment
    return (
        _dtype(golden) == _dtype(run),
        expected.device_type == other.device_type,
        expected.device_name == other.device_name,
    )


def _dtype(run: Run) -> str:
    return run.manifest.model.dtype.removeprefix("torch.")
