"""The prompts whose scores flipped, as a run: from a score to the tensors.

Prompts come from the reference's files, as they were rendered there; the documents whose margin
moved most come first. Of multiple choice one forward is recorded, the one that ranks the choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from divergence.errors import UsageError
from divergence.evaluations.flips import flips_of
from divergence.evaluations.formats import format_named
from divergence.evaluations.pairing import Pairs
from divergence.evaluations.result import Captured
from divergence.evaluations.rows import Evaluation, Series, SeriesName
from divergence.recording.prompts import Prompt
from divergence.words import Progress

__all__ = ["capture_flips"]


def capture_flips(
    side: Evaluation, paired: Mapping[SeriesName, tuple[Series, Pairs]], *, model: str | Path,
    out: str | Path, num_prompts: int, max_new_tokens: int | None, progress: Progress | None,
    **options: Any,
) -> Captured:  # fmt: skip
    """Raises UsageError where nothing flipped, or the format holds no prompts."""
    prompts: dict[Prompt, str] = {}
    num_flips, choices = 0, True
    for series, pairs in paired.values():
        flips = flips_of(pairs)
        num_flips += len(flips)
        rows = [pairs.rows[flip][0] for flip in flips[: max(0, num_prompts - len(prompts))]]
        by_place = format_named(side.format).prompts(series, {row.place for row in rows})
        for row in rows:
            if row.place in by_place:
                prompts.setdefault(by_place[row.place], row.document)
                choices = choices and row.choices is not None
    if not prompts:
        raise UsageError(
            "no score flipped, so there is no prompt to record" if not num_flips
            else f"{side.format}'s files do not hold the prompts of the {num_flips:,} flips",
            where=side.path, hint="divergence capture MODEL --prompts FILE records any prompts",
        )  # fmt: skip
    from divergence.recording.api import capture

    if max_new_tokens is None and choices:
        max_new_tokens = 1
    run = capture(
        str(model), out=out, prompts=list(prompts), max_new_tokens=max_new_tokens,
        progress=progress, **options,
    )  # fmt: skip
    return Captured(path=str(run.path), num_prompts=len(prompts), documents=list(prompts.values()))
