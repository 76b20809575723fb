"""Why multiple choice flips: at near ties, or since the choices' likelihoods moved.

A choice flips where the margin (in nats) between the reference's choice and the candidate's is made
up. Rounding moves every margin a little; where it moved by no more than rounding explains, the flip
is one at a near tie, which another machine would make elsewhere. Where it moved by more, the cause
is worth a look in the tensors.

The limit is four standard deviations of a margin's shift. Its scale is the mean |shift| that these
two sides show between the two likeliest choices, but no more than what the coarser dtype explains
(√2 times analyses.logprobs.pattern's bound for one log-probability): so a fault that shifts every
document cannot pass as rounding. A mean |x| of a normal is 0.8 standard deviations.

``capture_flips`` goes from a score to the tensors: the prompts that flipped become a run. They come
from the reference's files, as they were rendered there; the documents whose margin moved most come
first. Of multiple choice one forward is recorded, the one that ranks the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divergence.analyses.logprobs.pattern import BY_DTYPE, WIDEST
from divergence.errors import UsageError
from divergence.evaluations.formats import prompts_of
from divergence.evaluations.pairing import Pairs
from divergence.evaluations.result import Captured, FlipCauses
from divergence.evaluations.rows import Evaluation, ScoreRow, Series, SeriesName
from divergence.facts import Fact, fact
from divergence.recording.prompts import Prompt
from divergence.words import Progress

__all__ = ["OF_ALL", "capture_flips", "causes_of", "explained", "flips_of", "shift_of"]

_LIMIT = 4.0
_MEAN_TO_SIGMA = math.sqrt(math.pi / 2)
OF_ALL = fact("evaluations.shifts_of_all")


def shift_of(a: ScoreRow, b: ScoreRow) -> float | None:
    """How far the margin between A's choice and B's moved; between A's two likeliest where both
    chose alike. None without the likelihoods of the same choices."""
    if a.choices is None or b.choices is None or len(a.choices) != len(b.choices):
        return None
    mine, theirs = a.choices, b.choices
    first, other = mine.index(max(mine)), theirs.index(max(theirs))
    if other == first:
        other = max((n for n in range(len(mine)) if n != first), key=mine.__getitem__)
    return abs((mine[first] - mine[other]) - (theirs[first] - theirs[other]))


def causes_of(pairs: Pairs, dtypes: Sequence[str | None]) -> FlipCauses | None:
    """None without likelihoods, and where no score flipped and rounding explains the margins."""
    if not pairs.single:
        return None
    shifts = [shift_of(a, b) for a, b in pairs.rows]
    judged = np.array([shift is not None for shift in shifts])
    if not judged.any():
        return None
    values = np.array([math.nan if shift is None else shift for shift in shifts])
    limit, source = _limit(values[judged], dtypes)
    diff = pairs.candidate - pairs.reference
    if not diff.any() and np.median(values[judged]) <= limit:
        return None
    flips = judged & (diff != 0)
    ties, real = flips & (values <= limit), flips & ~(values <= limit)
    return FlipCauses(
        limit=limit, source=source, num_ties=int(ties.sum()), num_shifts=int(real.sum()),
        difference_of_ties=float(diff[ties].sum() / len(diff)),
        difference_of_shifts=float(diff[real].sum() / len(diff)),
        median_shift=float(np.median(values[judged])), num_judged=int(judged.sum()),
    )  # fmt: skip


def _limit(shifts: np.ndarray, dtypes: Sequence[str | None]) -> tuple[float, Fact]:
    bound, source = explained(dtypes)
    limit = _LIMIT * _MEAN_TO_SIGMA * float(shifts.mean())
    return (limit, OF_ALL) if limit <= bound else (bound, source)


def explained(dtypes: Sequence[str | None]) -> tuple[float, Fact]:
    """How far a margin may move by the rounding of the coarser dtype, in nats, and of which."""
    known = [dtype for dtype in dtypes if dtype in BY_DTYPE]
    coarse = max(known, key=lambda dtype: BY_DTYPE[dtype]) if len(known) == len(dtypes) else None
    bound = math.sqrt(2) * (WIDEST if coarse is None else BY_DTYPE[coarse])
    source = fact("evaluations.rounding", dtype=coarse or "bfloat16", known=coarse is not None)
    return _LIMIT * _MEAN_TO_SIGMA * bound, source


def flips_of(pairs: Pairs) -> list[int]:
    """The pairs whose scores differ, the largest shift of a margin first; losses first."""
    order = [
        (-(shift_of(a, b) or 0.0), y - x, number)
        for number, ((a, b), x, y) in enumerate(
            zip(pairs.rows, pairs.reference, pairs.candidate, strict=True)
        )
        if x != y
    ]
    return [number for _, _, number in sorted(order)]


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
        by_place = prompts_of(side.format, series, {row.place for row in rows})
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
