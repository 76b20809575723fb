"""Looks: each forward of each prompt at one site, judged by itself.

A fault in one prompt of eight, or in one decode step of 64, disappears in a median over all of
them. So each forward is also held against its own controls: the same forward at the siblings of
its site (the same place in the other blocks). What makes a prompt or a token hard troubles them
all alike, and cancels.

Many looks are taken, and the largest of many is large by chance. Its limit is the larger of two,
both in multiples of the control:

* ``sibling`` · spread(n, num_looks): the rounding model, each look with its share of the chance
  that a single one has (Bonferroni; numerics.floor).
* ``forward`` · M: M is what a sibling's largest look is, over *its* control, among as many looks:
  the median over the siblings. It holds whatever the model leaves out (heavy tails, tokens that
  depend on each other), and grows with the number of looks by itself.

It refuses to judge a forward of few tokens in a block that routes tokens to experts where the
routing is not known: rounding may send one token elsewhere. Nor one whose difference is a single
step of the format in a single number (``one_step``): trained models have channels a hundred times
as large as the others, whose last bit is then the whole error of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.results import SiteResult, num_rows
from divergence.numerics.formats import format_named

__all__ = ["FEW_ROWS", "Controls", "Look", "controls", "looks_of", "one_step"]

FEW_ROWS = 8
"""With fewer rows the typical row is held to the limits of a single token."""


@dataclass(slots=True)
class Look:
    """One forward of one prompt at one site. ``typical``: its median token's ratio; ``share``: of
    the result's numbers that belong to this prompt; ``limit``: of ``typical``; ``usage``: the
    largest share of any limit of this look that is used, over 1 where it is beyond one;
    ``between``: of the limit on the two sides' difference, which needs no truth."""

    result: SiteResult
    sample: int
    typical: float
    num_rows: int
    share: float = 1.0
    limit: float = 0.0
    usage: float = 0.0
    between: float = 0.0

    @property
    def place(self) -> PromptStep:
        return self.sample, self.result.step


def looks_of(results: Iterable[SiteResult]) -> list[Look]:
    """One look a forward; where a batch was run, one for each of its prompts."""
    looks: list[Look] = []
    for result in results:
        if result.ratio is None:
            continue
        rows = num_rows(result)
        if not result.prompts:
            looks.append(Look(result, result.sample, result.ratio, rows))
            continue
        total = sum(prompt.num_rows for prompt in result.prompts)
        looks += [
            Look(result, prompt.sample, prompt.ratio, prompt.num_rows, prompt.num_rows / total)
            for prompt in result.prompts
        ]
    return looks


def one_step(result: SiteResult) -> bool:
    """Is most of the difference (of its squares) that of one number, and that the smallest which
    there is: 1 ulp?

    No fault can be told from it. Two correct results on either side of a rounding boundary differ
    by as much.
    """
    if result.ulp_format is None or not result.rel_l2 or not result.reference_norm:
        return False
    values = result.max_abs, result.max_abs_reference, result.max_abs_candidate
    if any(value is None or not math.isfinite(value) for value in values):
        return False
    largest, reference, candidate = (abs(value) for value in values if value is not None)
    if math.sqrt(2) * largest <= result.rel_l2 * result.reference_norm:  # no square: it overflows
        return False
    form = format_named(result.ulp_format)
    exponent = math.frexp(max(reference, candidate, form.smallest_normal))[1] - 1
    return largest <= math.ldexp(1.0, exponent - form.mantissa_bits)


@dataclass(frozen=True, slots=True)
class Controls:
    """What a family shows for one of its members. ``at``: by place, the median of the others there;
    ``largest``: the median over the others of their own largest excess over their controls."""

    at: dict[PromptStep, float]
    largest: float


def controls(
    values: Sequence[dict[PromptStep, float]],
    excess: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    own: bool = False,
) -> list[Controls]:
    """For each member of a family, given its values by place.

    A place counts where at least two others hold it. ``own``: a member's own value is among those
    of its control. ``excess(values, controls)``: elementwise.
    """
    places = sorted({place for mine in values for place in mine})
    table = np.array([[mine.get(place, np.nan) for place in places] for mine in values])
    if len(values) < 3 or not places:
        return [Controls({}, 1.0) for _ in values]
    held = _middle(table) if own else _middle_of_others(table)
    with np.errstate(invalid="ignore"):
        over = np.nan_to_num(excess(table, held), nan=0.0, posinf=np.finfo(float).max).max(axis=1)
    by_unit = []
    for number, row in enumerate(held):
        at = {place: float(x) for place, x in zip(places, row, strict=True) if not np.isnan(x)}
        others = np.delete(over, number)
        by_unit.append(Controls(at, max(1.0, float(np.median(others)))))
    return by_unit


def _middle(table: np.ndarray) -> np.ndarray:
    """(B, L): the median of each column, at least three of which are known, where a row has it."""
    known = ~np.isnan(table)
    enough = known.sum(axis=0) >= 3
    middle = np.full(table.shape[1], np.nan)
    if enough.any():
        middle[enough] = np.nanmedian(table[:, enough], axis=0)
    return np.where(known, middle, np.nan)


def _middle_of_others(table: np.ndarray) -> np.ndarray:
    """(B, L): the median of the column without the row's own value, where two others are known."""
    known = ~np.isnan(table)
    count = known.sum(axis=0)
    order = np.argsort(table, axis=0)  # nan last
    rank = np.argsort(order, axis=0)
    ordered = np.take_along_axis(table, order, axis=0)
    low, high = np.maximum(0, (count - 2) // 2), np.maximum(0, (count - 1) // 2)
    top = np.maximum(count - 1, 0)

    def without(index: np.ndarray) -> np.ndarray:
        place = np.minimum(index + (index >= rank), top)  # (B, L): that element, the own left out
        return np.take_along_axis(ordered, place, axis=0)

    middle = (without(np.broadcast_to(low, table.shape))
              + without(np.broadcast_to(high, table.shape))) / 2  # fmt: skip
    return np.where(known & (count >= 3), middle, np.nan)
