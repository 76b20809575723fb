"""Both sides against the float64 of one of them, where no more is known than the sums of its error.

Of the side that carries the floor (run.floor) the error e is known, and the difference d of the two
sides. The other side's error f is not. Where one side's error has a part that the other's has not,
the smaller one and that part are as good as orthogonal:

    d = f + e, so f² = d² - e²        the other side is the farther off, or as far by itself
    e = f + d, so f² = e² - d²        it shares a part of e, and has not the rest

so f is taken to be sqrt(|d² - e²|). That is a figure, no measurement, and where d and e are of a
size it is small whatever f is. So it counts for no less than rounding may be: e, as far as that is
within ``typical`` floors of the rounding model (less what ``truth_confirm`` leaves room for). Then
the other side is blamed where it is beyond its limits for certain, by the triangle inequality; the
side of the floor where its own error is beyond what rounding makes, and not the other's by as much.
Where that figure is far below e, the two are judged as without a truth (``AgainstTruth.alike``).

In a free pass d is what was made here, beyond what may be made of what came in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.floor import Thresholds
from divergence.numerics.pairs import SINK_FACTOR, AgainstTruth
from divergence.numerics.sums import RowMetrics
from divergence.run.reader import COLUMNS
from divergence.words import Side

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bounded", "made_here"]


def bounded(
    floor: np.ndarray,
    rows: RowMetrics | None,
    between: np.ndarray,
    side: Side,
    *,
    num_values: int,
    row_floor: Callable[[np.ndarray, np.ndarray | None], np.ndarray | None],
    thresholds: Thresholds,
) -> AgainstTruth | None:
    """``floor`` (T, 6): of ``side``. ``rows``: of the two sides; None where they are equal.
    ``between`` (T,): d, nan in rows that do not count. ``num_values``: of a row, at most.
    ``row_floor``: the rounding model's, from norms. None where nothing can be said."""
    columns = dict(zip(COLUMNS, floor.T, strict=True))
    norm = columns["size"] if rows is None else rows.norm
    update = columns["update"] if rows is None else rows.update_norm
    kept = np.isfinite(between) & np.isfinite(columns["error"]) & np.isfinite(norm) & (norm > 0)
    index = np.flatnonzero(kept)
    if not len(index):
        return None
    norm, between, error = norm[index], between[index], columns["error"][index]
    update = None if update is None else update[index]
    model = row_floor(norm, update)
    if model is None:
        return None
    figure = np.sqrt(np.abs(np.square(between) - np.square(error)))
    usual = np.minimum(error, thresholds.typical / thresholds.truth_confirm * model * norm)
    other = np.maximum(usual, figure)
    fourth = columns["fourth"][index]
    ratio = np.divide(error, fourth, out=np.ones_like(error), where=fourth > 0)
    zeros = np.zeros(len(index))
    none = None if update is None else zeros
    sides = (error, other) if side == "reference" else (other, error)
    return AgainstTruth(
        norm=norm, update=update, reference=sides[0], candidate=sides[1], between=between,
        gain_reference=zeros, gain_candidate=zeros,
        update_gain_reference=none, update_gain_candidate=none,
        spread=np.clip(ratio**4, 1.0, max(1, num_values)),
        sink=norm > SINK_FACTOR * np.median(norm),
        channels=np.zeros((6, 0)), peaks=np.zeros(3), row_index=index,
        alike=figure >= error / thresholds.truth_confirm,
    )  # fmt: skip


def made_here(
    rows: RowMetrics, inherited: RowMetrics | None, beside: float, thresholds: Thresholds
) -> np.ndarray:
    """Of a free pass (T,): d without what came in and what may have been made of that. An error
    that came in moves along, and a module may enlarge it by ``free_gain``."""
    with np.errstate(all="ignore"):
        before, carried = np.full(len(rows.norm), beside), np.zeros(len(rows.norm))
        if inherited is not None:
            own = np.nan_to_num(inherited.rel_l2)
            carried, before = own * inherited.norm, np.maximum(before, own)
        size = rows.norm if rows.update_norm is None else rows.update_norm
        enlarged = thresholds.free_gain * before * size
        rest = np.square(rows.diff) - np.square(carried) - np.square(enlarged)
        made: np.ndarray = np.where(np.isfinite(rows.rel_l2), np.sqrt(np.maximum(rest, 0)), np.nan)
    return made
