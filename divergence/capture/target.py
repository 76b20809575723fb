"""The directory that a capture is about to write."""

from __future__ import annotations

from pathlib import Path

from divergence.errors import RunExistsError, RunWriteError
from divergence.run.reader import Run
from divergence.run.target import check_target

__all__ = ["check_output"]


def check_output(out: Path, *, force: bool, like: Run | None) -> None:
    """Refuse before hours of work what the writer would refuse after them."""
    if like is not None and out.exists() and out.resolve() == like.path.resolve():
        raise RunExistsError(f"{out} is the run to be repeated", hint="choose another -o")
    try:
        check_target(out, force=force)
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
