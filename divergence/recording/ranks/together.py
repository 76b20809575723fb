"""One run written by several ranks: how they begin it, and how they end it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from divergence.recording.ranks.processes import Ranks
from divergence.run.reader import Run
from divergence.run.schema.layout import MANIFEST
from divergence.run.schema.manifest import Manifest
from divergence.run.storage.location import Url, archive_kind, location_of
from divergence.run.writing.writer import RunWriter

__all__ = ["closed", "on_all", "own_part", "started"]


@contextlib.contextmanager
def started(ranks: Ranks | None, make: Callable[[], RunWriter]) -> Iterator[RunWriter]:
    """The writer. Of several ranks the first starts, the others when the directory is there."""
    if ranks is not None and not ranks.is_first:
        ranks.gather(None)
    with make() as writer:
        if ranks is not None and ranks.is_first:
            ranks.gather(None)
        # inside the writer, so that a run which ends early says which rank ended it
        with contextlib.nullcontext() if ranks is None else ranks.watched():
            yield writer


def on_all(ranks: Ranks | None, *counts: int) -> list[int]:
    """The counts of all ranks, added. A barrier: all ranks must call it."""
    if ranks is None:
        return list(counts)
    return [sum(column) for column in zip(*ranks.gather(counts), strict=True)]


def closed(
    ranks: Ranks, manifest: Manifest, out: str | os.PathLike[str] | Url, note: Callable[[str], None]
) -> Run:
    """The run, once all ranks have closed their part. Nodes without a common disk each hold some
    of its files, and nobody can read it yet: then the manifest alone."""
    ranks.gather(None)
    place = location_of(out)
    end = place if isinstance(place, Url) or archive_kind(place) is not None else place / MANIFEST
    if all(ranks.gather(isinstance(end, Url) or end.exists())):
        return Run.open(place)
    note(
        f"the ranks have no disk in common: {place} can be read when the files of all nodes are "
        "copied into one directory"
    )
    return Run(place, manifest, [])


def own_part(run: Run, rank: int) -> Run:
    """The records that this rank has written so far."""
    if run.manifest.mesh is not None:
        run.records = [record for record in run.records if record.rank == rank]
    return run
