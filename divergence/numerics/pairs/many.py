"""Many small pairs of one shape at once: what measure_pair gives of each, from a few numpy calls.

A decode step's tensor holds some hundred numbers, and calling numpy eighty times takes far longer
than its arithmetic. So N pairs are laid side by side, (N, T, D), and every sum runs along the last
axes. The arithmetic is measure_pair's, operation by operation and in the same precision, so the
figures are the same.

A pair that needs care (large, not finite, or beyond float32's range) is left to measure_pair.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from divergence.numerics.formats import Format
from divergence.numerics.pairs.blocks import BLOCK, Grid, columns_of_many, compute_dtype, row_dots
from divergence.numerics.pairs.metrics import PairMetrics, RowMetrics
from divergence.numerics.pairs.pair import ANGLE_SAFE, SINK_FACTOR, narrower
from divergence.numerics.pairs.sums import HIGH, LOW, TOP_HIGH, TOP_LOW, channel_ratios, root_ratios
from divergence.numerics.pairs.ulp import distance_array, key_array
from divergence.numerics.pairs.ulp_counts import smallest_key, stored

__all__ = ["MOST_NUMEL", "NUMEL_AT_ONCE", "measure_many"]

MOST_NUMEL = BLOCK // 4
"""Elements of one pair's side from which on numpy's calls cost little beside its loops."""
NUMEL_AT_ONCE = BLOCK // 2
"""Elements of one side of all pairs of a call: what stays in a core's caches."""

_COUNTED_ULP = 4
"""Most roundings lie fewer ulp apart: counting is then sooner done than sorting."""
_EVERY = slice(None)


def measure_many(
    a: torch.Tensor, b: torch.Tensor, *, base: torch.Tensor | None = None
) -> list[tuple[PairMetrics, RowMetrics] | None]:
    """Metrics of each b[n] against a[n], (N, …): measure_pair(a[n], b[n], base=base[n]) of each.

    None for a pair that measure_pair must take. Raises ValueError where shapes differ.
    """
    for name, other in (("candidate", b), ("base", base)):
        if other is not None and other.shape != a.shape:
            raise ValueError(
                f"the {name} has shape {tuple(other.shape)}, the reference {tuple(a.shape)}"
            )
    large = a[:1].numel() > MOST_NUMEL
    if large or not a.numel() or a.is_complex() or b.is_complex():
        return [None] * len(a)
    with np.errstate(all="ignore"):
        return _Block(a, b, base).measure()


class _Block:
    """One call of measure_many. Arrays are (N,), (N, T) or (N, D) unless said otherwise; ``good``:
    the pairs that are measured here."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, base: torch.Tensor | None) -> None:
        self.shape = tuple(a.shape[1:])
        self.columns = a.shape[-1] if a.ndim > 1 else 1
        self.count, self.rows = len(a), math.prod(a.shape[1:-1])
        grids = [Grid(x.reshape(-1, self.columns)) for x in (a, b, base) if x is not None]
        self.grids = grids
        self.dtype = compute_dtype(*(grid.format for grid in grids))
        self.a, self.b, *rest = (self._wide(grid, self.dtype) for grid in grids)
        self.base = rest[0] if rest else None
        self.good = np.ones(self.count, bool)

    def _wide(self, grid: Grid, dtype: type) -> np.ndarray:
        buffer: np.ndarray = np.empty(grid.bits.size, dtype)
        values: np.ndarray = grid.load(slice(0, grid.num_rows), _EVERY, buffer)
        return values.reshape(self.count, self.rows, self.columns)

    def _dots(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Σ over the columns, (N, T)."""
        flat = (-1, self.columns)
        return row_dots(x.reshape(flat), y.reshape(flat)).reshape(x.shape[:2])

    def _in_range(self, sums: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Whether a pair's sums of squares (N, T) lost nothing to the range of the dtype."""
        if self.dtype is np.float64:
            finite: np.ndarray = np.isfinite(sums).all(axis=1)
            return finite
        small = sums < LOW
        if small.any():
            small &= block.any(axis=2)
        fits: np.ndarray = (sums.max(axis=1) < HIGH) & ~small.any(axis=1)
        return fits

    def measure(self) -> list[tuple[PairMetrics, RowMetrics] | None]:
        a = self.a
        d = a - self.b
        flat = d.reshape(self.count, -1)
        high, low = flat.argmax(axis=1), flat.argmin(axis=1)
        every = np.arange(self.count)
        rise, fall = flat[every, high].astype(np.float64), -flat[every, low].astype(np.float64)
        top = np.maximum(rise, fall)
        self.row_a = self._dots(a, a)
        self.good &= np.isfinite(top) & self._in_range(self.row_a, a)
        if self.dtype is np.float64:  # squares of such values leave float64's range
            most = np.abs(np.stack([x for x in (a, self.b, self.base) if x is not None]))
            most = most.max(axis=(0, 2, 3))
            self.good &= (most == 0.0) | ((most > 2.0**-250) & (most < 2.0**250))
        differs = top != 0.0
        scale = np.ones(self.count)
        far = self.good & differs & ~((top >= TOP_LOW) & (top <= TOP_HIGH))
        if far.any():
            scale[far] = 2.0 ** -np.frexp(top[far])[1].astype(np.float64)
            if self.dtype is np.float32:
                self.good &= (scale > 2.0**-120) & (scale < 2.0**120)
            np.multiply(d, scale.astype(self.dtype)[:, None, None], out=d)
        row_d = self._dots(d, d)
        product = a * d
        squares = self._dots(product, product).sum(axis=1)
        fits = self._in_range(row_d, d)
        if self.dtype is np.float32:
            fits &= (squares > LOW) & (squares < HIGH)
        self.good &= fits | ~differs
        unscale = scale**-2
        self.row_d = row_d * unscale[:, None]
        self.columns_a, self.columns_d = (
            columns_of_many(a, a),
            columns_of_many(d, d) * unscale[:, None],
        )
        along = self._dots(a, d).sum(axis=1) / scale
        at = np.where(rise > fall, high, np.where(fall > rise, low, np.minimum(high, low)))
        self.row_update = None
        if self.base is not None:
            update = a - self.base
            self.row_update = self._dots(update, update)
            self.good &= self._in_range(self.row_update, update)
        return self._finished(differs, along, squares / scale**2, at)

    def _finished(
        self, differs: np.ndarray, along: np.ndarray, squares: np.ndarray, at: np.ndarray
    ) -> list[tuple[PairMetrics, RowMetrics] | None]:
        """``along``: Σ a·d, ``squares``: Σ (a·d)², ``at``: where |d| is largest."""
        count, n = self.count, self.rows * self.columns
        a2, d2 = self.row_a.sum(axis=1), self.row_d.sum(axis=1)
        rel_l2 = root_ratios(d2, a2)
        a2, b2, along, apart = self._angle(a2, d2, along)
        spread = np.maximum(0.0, squares - along**2 / n) * n / max(n - 1, 1)
        gain = np.where(a2 > 0, 0.0 - along / a2, 0.0)
        per_row = root_ratios(self.row_d, self.row_a)
        ordered = np.sort(per_row, axis=1)
        norms = np.sqrt(self.row_a)
        usual = median(np.sort(norms, axis=1))
        sinks = norms > np.where(usual > 0, SINK_FACTOR * usual, math.inf)[:, None]
        update = None if self.row_update is None else np.sqrt(self.row_update.sum(axis=1))
        form = narrower(self.grids[0].format, self.grids[1].format)
        every = np.arange(count)
        largest_a, largest_b = (
            x.reshape(count, -1)[every, at].astype(np.float64) for x in (self.a, self.b)
        )
        columns: dict[str, Any] = {
            "identical": ~differs & self._identical(),
            "rel_l2": rel_l2,
            "cosine": 1.0 - apart,
            "one_minus_cosine": apart,
            "sqnr_db": np.where(rel_l2 > 0, -20.0 * np.log10(rel_l2), math.inf),
            "reference_norm": np.sqrt(a2),
            "candidate_norm": np.sqrt(b2),
            "gain": gain,
            "gain_se": np.where((a2 > 0) & (n > 1), np.sqrt(spread) / a2, math.inf),
            "max_abs": np.where(differs, np.abs(largest_a - largest_b), 0.0),
            "num_sink_tokens": sinks.sum(axis=1),
            "token_rel_l2_median": median(ordered),
            "token_rel_l2_p99": ordered[:, max(0, math.ceil(0.99 * self.rows - 1))],
            "token_rel_l2_max": ordered[:, -1],
            "worst_row": per_row.argmax(axis=1),
            **self._channels(a2),
            **self._ulp(form, differs, a2),
        }
        if update is not None:
            columns["update_rel_l2"] = root_ratios(d2, update**2)
            columns["update_norm"] = update
        self._look_again(columns, differs, largest_a, largest_b, at, sinks)
        always = {
            "numel": n, "num_finite": n, "num_rows": self.rows, "num_masked": 0,
            "ulp_format": None if form is None else form.name, "pad_rel_l2": None,
            "reference_nan": 0, "reference_inf": 0, "candidate_nan": 0, "candidate_inf": 0,
            "update_rel_l2": None, "update_norm": None,
        }  # fmt: skip
        lists = [x.tolist() if isinstance(x, np.ndarray) else x for x in columns.values()]
        names = tuple(columns)
        row_norms, row_diffs = norms, np.sqrt(self.row_d)
        row_updates = None if self.row_update is None else np.sqrt(self.row_update)
        results: list[tuple[PairMetrics, RowMetrics] | None] = []
        for number, (good, values) in enumerate(
            zip(self.good.tolist(), zip(*lists, strict=True), strict=True)
        ):
            if not good:
                results.append(None)
                continue
            metrics = PairMetrics(**always | dict(zip(names, values, strict=True)))
            rows = RowMetrics(
                rel_l2=per_row[number],
                diff=row_diffs[number],
                norm=row_norms[number],
                update_norm=None if row_updates is None else row_updates[number],
            )
            results.append((metrics, rows))
        return results

    def _look_again(
        self,
        columns: dict[str, Any],
        differs: np.ndarray,
        largest_a: np.ndarray,
        largest_b: np.ndarray,
        at: np.ndarray,
        sinks: np.ndarray,
    ) -> None:
        """Adds what only some pairs have: None for the others."""
        some = differs.tolist()
        places = (
            np.unravel_index(at, self.shape) if self.shape else (),
            largest_a.tolist(),
            largest_b.tolist(),
        )
        indices = (
            list(zip(*(axis.tolist() for axis in places[0]), strict=True))
            if self.shape
            else [()] * self.count
        )
        for name, values in (
            ("max_abs_index", indices),
            ("max_abs_reference", places[1]),
            ("max_abs_candidate", places[2]),
        ):
            columns[name] = [
                value if yes else None for yes, value in zip(some, values, strict=True)
            ]
        columns["rel_l2_without_sinks"] = [None] * self.count
        for number in np.flatnonzero(sinks.any(axis=1)):
            rest = ~sinks[number]
            sums = (x[number][rest].sum() for x in (self.row_d, self.row_a))
            columns["rel_l2_without_sinks"][number] = float(root_ratios(*map(np.asarray, sums)))

    def _angle(
        self, a2: np.ndarray, d2: np.ndarray, along: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """‖a‖², ‖b‖², P and 1 - cos, as measure_pair's docstring has it."""
        b2 = a2 - 2.0 * along + d2
        aside = d2 - along**2 / a2
        again = (d2 > 0) & (a2 > 0) & self.good
        again &= (aside < ANGLE_SAFE * d2) | (b2 < ANGLE_SAFE * a2)
        if again.any():
            a, b = (x[again].astype(np.float64) for x in (self.a, self.b))
            factor = (1.0 - along[again] / a2[again])[:, None, None]
            left = a * factor - b
            own, other, rest, beside = (
                self._dots(x, y).sum(axis=1) for x, y in ((a, a), (b, b), (left, left), (a, left))
            )
            a2, b2, along, aside = (x.copy() for x in (a2, b2, along, aside))
            a2[again], b2[again] = own, other
            along[again] = (1.0 - factor[:, 0, 0]) * own + beside
            aside[again] = np.maximum(0.0, rest - beside**2 / own)
        cosine = (a2 - along) / np.sqrt(a2 * b2)
        apart = np.where(cosine > 0.0, aside / b2 / (1.0 + cosine), 1.0 - cosine)
        nothing = (a2 == 0.0) | (b2 == 0.0)
        b2 = np.where(d2 == 0.0, a2, np.where(a2 == 0.0, d2, b2))
        return a2, b2, along, np.where(d2 == 0.0, 0.0, np.where(nothing, 1.0, apart))

    def _channels(self, a2: np.ndarray) -> dict[str, np.ndarray]:
        unit = max(grid.format.unit_roundoff for grid in self.grids[:2])
        least = (unit**2 * a2 / self.columns)[:, None]
        ratios = channel_ratios(self.columns_d, np.maximum(self.columns_a, least))
        worst = ratios.argmax(axis=1)
        return {
            "channel_rel_l2_max": np.sqrt(ratios[np.arange(self.count), worst]),
            "worst_channel": worst,
        }

    def _ulp(self, form: Format | None, differs: np.ndarray, a2: np.ndarray) -> dict[str, Any]:
        names = ("ulp_share_over_1", "ulp_p99", "ulp_max")
        if form is None:
            return dict.fromkeys(names, [None] * self.count)
        n = self.rows * self.columns
        keys_a, keys_b = (
            key_array(stored(grid, form, slice(0, grid.num_rows), _EVERY), form)
            for grid in self.grids[:2]
        )
        rms = np.sqrt(a2 / n).tolist()
        least = [
            smallest_key(form, form.unit_roundoff * value) if good and yes else 0
            for value, good, yes in zip(rms, self.good.tolist(), differs.tolist(), strict=True)
        ]
        flat = (self.count, -1)
        keep = np.abs(keys_a).reshape(flat) >= np.array(least, keys_a.dtype)[:, None]
        distance = distance_array(keys_a, keys_b).reshape(flat) * keep
        counted = keep.sum(axis=1)
        num_above = counted - np.ceil(0.99 * counted).astype(np.int64) + 1
        p99, largest = _tops(distance, num_above.clip(1, n))
        some = differs & (counted > 0)
        return {
            "ulp_share_over_1": np.where(
                some, (distance > 1).sum(axis=1) / np.maximum(counted, 1), 0.0
            ),
            "ulp_p99": np.where(some, p99.astype(np.float64), 0.0),
            "ulp_max": np.where(some, largest.astype(np.float64), 0.0),
        }

    def _identical(self) -> np.ndarray:
        """Whether the bits of both sides are the same."""
        grid_a, grid_b = self.grids[:2]
        if grid_a.format.name != grid_b.format.name:
            return np.zeros(self.count, bool)
        same: np.ndarray = (grid_a.bits == grid_b.bits).reshape(self.count, -1).all(axis=1)
        return same


def _tops(distance: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of distances, (N, n): the ``places``-th largest, and the largest."""
    largest = distance.max(axis=1)
    nth_largest = np.zeros_like(largest)
    open_ = np.ones(len(distance), bool)
    for value in range(_COUNTED_ULP):
        fewer = (distance > value).sum(axis=1) < places
        nth_largest[open_ & fewer] = value
        open_ &= ~fewer
        if not open_.any():
            return nth_largest, largest
    rest, places = distance[open_], places[open_]
    n, most = distance.shape[1], int(places.max())
    tops = np.sort(np.partition(rest, n - most, axis=1)[:, n - most :], axis=1)
    nth_largest[open_] = np.take_along_axis(tops, (most - places)[:, None], 1)[:, 0]
    return nth_largest, largest


def median(ordered: np.ndarray) -> np.ndarray:
    """Of each row of values in order."""
    count = ordered.shape[1]
    low, high = ordered[:, (count - 1) // 2], ordered[:, count // 2]
    return np.where(low == high, low, (low + high) / 2)
