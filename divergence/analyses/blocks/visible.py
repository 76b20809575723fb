"""What would have been seen: the smallest error of a block that is beyond its limit, by level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from divergence.analyses.blocks.units import Unit
from divergence.comparison.results import Visible

if TYPE_CHECKING:
    from divergence.analyses.blocks.sides import JudgedFamily
    from divergence.comparison.judge import Floats, JudgedTable, Level

Sizes = dict["Level", float]
"""By level, relative L2 of the block's output."""


def visible_of(units: Sequence[Unit], routed: frozenset[str]) -> Visible | None:
    """Of the middle block, the larger one of prefill and decode; None where there is no block."""
    by_phase: dict[str, list[Sizes]] = {}
    for unit in units:
        if unit.results[0].role == "block":
            sizes = unit.visible or _of_limits(unit, routed=unit.results[0].block in routed)
            by_phase.setdefault(unit.phase, []).append(sizes)
    levels: dict[str, float] = {}
    for members in by_phase.values():
        for level in dict.fromkeys(level for sizes in members for level in sizes):
            known = [sizes[level] for sizes in members if level in sizes]
            levels[level] = max(levels.get(level, 0.0), statistics.median(known))
    finite = {level: size for level, size in levels.items() if size < 1}
    if "site" not in finite:
        return None
    return Visible(
        block=finite["site"], forward=finite.get("forward"), token=finite.get("row"),
        channel=finite.get("channel"),
    )  # fmt: skip


def _of_limits(unit: Unit, *, routed: bool) -> Sizes:
    """Without a truth: what the two sides may differ by."""
    floors = [result.floor for result in unit.results if result.floor]  # of equal ones it is 0
    if not floors:
        return {}
    floor = statistics.median(floors)
    sizes: Sizes = {"site": unit.limit * floor}
    looks = [look.limit * (look.result.floor or floor) for look in unit.looks if look.limit]
    if looks:
        sizes["forward"] = statistics.median(looks)
    if not routed:
        sizes["row"] = unit.worst_limit * floor
    return _narrowed(sizes)


def _narrowed(sizes: Sizes) -> Sizes:
    """What is seen in one row is so where it is in all of a forward, or of a block."""
    for level, narrower in (("forward", "row"), ("site", "forward"), ("site", "row")):
        if level in sizes and narrower in sizes:
            sizes[level] = min(sizes[level], sizes[narrower])
    return sizes


def of_tables(unit: Unit, judged: JudgedFamily, member: int, *, routed: bool) -> Sizes:
    """With one: what an error of B, beside the rounding that it has as A has it, would have to be
    for W to stand out. A site without siblings, and tables that were not made, say nothing."""
    stats = judged.stats[member]
    if stats.rows is None:
        return {}
    floor = stats.floor
    middle = np.median if routed else np.mean

    def size(table: JudgedTable, energy: Floats, least: float | Floats) -> Floats:
        return _sizes(table, member, energy, least, unit.widened)

    energy = stats.rows.only(judged.errors.key).energy[0]
    whole = np.array([middle(stats.rows.energy[0])])
    sizes: Sizes = {"site": floor * _typical(size(judged.sites, whole, judged.least))}
    if judged.forwards is not None:
        rows = [energy[judged.errors.place == number] for number in range(len(judged.places))]
        by_place = np.array([middle(each) for each in rows])
        asked = size(judged.forwards, by_place, judged.least)[~np.array(judged.is_few)]
        if len(asked):
            sizes["forward"] = floor * _typical(asked)
    if judged.rows is not None:
        sizes["row"] = floor * _typical(size(judged.rows, energy, judged.least))
    channels = stats.channels
    known = channels is not None and channels.total > 0 and not (routed and unit.results[0].step)
    if judged.channels is not None and channels is not None and known:
        sizes["channel"] = _typical(
            size(judged.channels, channels.energy[0], channels.least)
        ) / math.sqrt(channels.total)
    return _narrowed(sizes)


def _typical(sizes: Floats) -> float:
    return float(np.nanmedian(sizes))


def _sizes(
    table: JudgedTable, member: int, energy: Floats, least: float | Floats, widened: float
) -> Floats:
    """Of each column f² = (e² + least²) (exp 2x - exp 2x0), x where it stands out, x0 where it is.
    Infinite where so few numbers convict nothing."""
    control, reach = table.control[member], table.reach[member] + math.log(widened)
    stands_out = np.maximum(control + reach, reach / 2)
    with np.errstate(all="ignore"):
        grown = np.exp(2 * np.minimum(stands_out, 300.0)) - np.exp(2 * np.minimum(control, 300.0))
        size = np.sqrt((energy + np.square(least)) * grown)
        return np.where(stands_out < 300.0, size, math.inf)
