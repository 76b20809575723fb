"""The place that a capture is about to write."""

from __future__ import annotations

from divergence.errors import RunExistsError, RunWriteError
from divergence.run.archive_target import partial_of
from divergence.run.location import Location, archive_kind, same_location
from divergence.run.reader import Run
from divergence.run.target import check_target

__all__ = ["check_output"]


def check_output(out: Location, *, force: bool, like: Run | None) -> None:
    """Refuse before hours of work what the writer would refuse after them."""
    gathered = out if archive_kind(out) is None else partial_of(out)
    if like is not None and (same_location(out, like.path) or same_location(gathered, like.path)):
        raise RunExistsError(f"{out} is the run to be repeated", hint="choose another -o")
    try:
        check_target(out, force=force)
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
