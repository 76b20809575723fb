"""Files of log-probabilities, made runs: what they have in common.

A layout of scores is a module of ``layouts/`` with the functions of ``ScoreLayout``. It gives the
prompts' scores as they stand in the file; every value is checked before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from divergence.errors import DumpError
from divergence.importing.dump import Notes
from divergence.importing.folder import DumpFolder
from divergence.run.reader import Run
from divergence.run.storage.location import Location
from divergence.run.writing.scores import Scores, ScoreSource, put_scores, scores_manifest
from divergence.run.writing.writer import RunWriter

if TYPE_CHECKING:
    from divergence.importing.fields import FieldMap

__all__ = ["ScoreLayout", "Scored", "import_scores"]


@dataclass(slots=True)
class Scored:
    """What a layout found. ``wheres``: of each prompt, the file and line, for errors."""

    source: ScoreSource
    scores: list[Scores] = field(default_factory=list)
    wheres: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Of tokens, by id."""


class ScoreLayout(Protocol):
    """A module of ``layouts/`` that reads log-probabilities."""

    NAME: str
    """What to call it in words."""
    TAKES_MAP: bool

    def recognise(self, folder: DumpFolder) -> bool:
        """Does the folder look like it?"""

    def scores(self, folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
        """Everything in it. Raises DumpError."""


def import_scores(
    reader: ScoreLayout, folder: DumpFolder, place: Location, *, map: str | Path | None,
    like: Run | None, label: str | None, force: bool, command: str | None, notes: Notes,
) -> Run:  # fmt: skip
    """The run. ``like``: a run whose prompts these are; others are refused."""
    from divergence.importing.fields import load_fields

    scored = reader.scores(folder, None if map is None else load_fields(map), notes)
    if not any(score.positions for score in scored.scores):
        raise DumpError("no token has a log-probability", where=str(folder.path))
    for score, where in zip(scored.scores, scored.wheres, strict=True):
        score.tensors(where)
    if like is not None:
        _check_prompts(scored, like)
    manifest = scores_manifest(
        scored.source, [score.tokens for score in scored.scores],
        label=label or f"file of {reader.NAME}", command=command, texts=scored.texts,
        forced_by=None if like is None else like.manifest.id,
        tool=f", importing {reader.NAME}",
    )  # fmt: skip
    with RunWriter(place, manifest, force=force) as writer:
        for number, (score, where) in enumerate(zip(scored.scores, scored.wheres, strict=True)):
            put_scores(writer, number, score, where=where)
    return Run.open(place)


def _check_prompts(scored: Scored, like: Run) -> None:
    theirs = like.manifest.tokens.samples
    if len(theirs) != len(scored.scores):
        raise DumpError(
            f"{len(scored.scores)} prompts, and {like.path} has {len(theirs)}",
            hint="leave --like out to import the file as it is",
        )
    for number, (score, other) in enumerate(zip(scored.scores, theirs, strict=True)):
        mine, its = list(score.prompt_ids), other.prompt_ids
        if mine and its and mine != its:
            raise DumpError(
                f"prompt {number} is not that of {like.path}", where=scored.wheres[number],
                hint="leave --like out to import the file as it is",
            )  # fmt: skip
