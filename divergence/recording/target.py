"""The place that a capture is about to write."""

from __future__ import annotations

from collections.abc import Iterable

from divergence.errors import RunExistsError, RunWriteError
from divergence.run.reader import Run
from divergence.run.storage.archive_place import partial_of
from divergence.run.storage.location import Location, archive_kind, same_location
from divergence.run.storage.target import check_target

__all__ = ["check_output"]


def check_output(
    out: Location, *, force: bool, like: Run | None, substitutes: Iterable[Run] = ()
) -> None:
    """Refuse before hours of work what the writer would refuse after them, and to replace a run
    that the capture reads: ``like``, and those whose results are put in place of operators'."""
    gathered = out if archive_kind(out) is None else partial_of(out)
    read = [(like, "the run to be repeated")] if like is not None else []
    read += [(run, "the run that --substitute reads") for run in substitutes]
    for run, what in read:
        if same_location(out, run.path) or same_location(gathered, run.path):
            raise RunExistsError(f"{out} is {what}", hint="choose another -o")
    try:
        check_target(out, force=force)
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
