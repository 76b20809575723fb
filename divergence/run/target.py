"""The directory a run is written to: what is refused, what may be replaced.

Asked twice with the same answer: before the model is loaded, so that a refusal costs
nothing, and by the writer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from divergence.errors import RunExistsError
from divergence.run.layout import MANIFEST, RUN_NAMES, TENSORS

__all__ = ["check_target", "prepare_target"]


def check_target(path: Path, *, force: bool) -> None:
    """Raise RunExistsError unless ``path`` is free, empty, or (with ``force``) a run.

    Raises OSError where it cannot be looked at.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RunExistsError(f"{path} exists and is not a directory")
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if not names:
        return
    if not force:
        raise RunExistsError(
            f"{path} exists already",
            hint="choose another directory with -o, or pass --force to replace it",
        )
    if MANIFEST not in names or not names <= RUN_NAMES:
        # manifest.json alone proves little: other programs have files of that name
        other = sorted(names - RUN_NAMES)
        what = f"holds {other[0]}" if other else "is not a run"
        raise RunExistsError(
            f"{path} {what}, so --force does not remove it",
            hint="choose another directory with -o, or remove it yourself",
        )


def prepare_target(path: Path, *, force: bool) -> None:
    """Check, remove the run that is to be replaced, make the directories. May raise OSError."""
    check_target(path, force=force)
    if path.exists():
        shutil.rmtree(path)
    (path / TENSORS).mkdir(parents=True)
