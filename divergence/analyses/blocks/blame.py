"""Blame: which side is farther from the truth than correct rounding explains.

For every site W = err(b, R) / err(a, R) is held against the median W of its siblings, the
same place in the other blocks of its kind. That is a difference of differences: what makes
a block hard (sharp attention, large activations) troubles both sides alike and cancels in
W; what makes one side's kernels coarser troubles all blocks alike and cancels in the
comparison with the siblings. Left is what happened to one side in one block.

Beside the typical token, five narrower questions: one forward of one prompt, its W over its
siblings' there, held against the largest that a sibling shows among as many (blocks.looks); and
one side's error over the other's at one token, one sink token, one channel, and a consistent
scale error (the gain), which averages rounding away.

A family's W itself beyond ``truth_systematic`` blames a side for all of it, in one forward as over
all.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from divergence.analyses.blocks.looks import FEW_ROWS, Controls, controls, one_step
from divergence.analyses.blocks.units import TABLES, Blame, Why
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.measure.truth_stats import LEAST_LONE, SIDES, TruthStats
from divergence.numerics.floor import ALLOWED, Thresholds, normal_deviate, spread
from divergence.words import Side

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["forward_controls", "least_of", "lone_control", "questions", "usages"]

_LEAST_FAMILY = 0.05


_Floats = npt.NDArray[np.float64]


def questions(
    mine: TruthStats,
    siblings: list[TruthStats],
    *,
    lone_w: float | None,
    forwards: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """Every question's answer, the plainest question first.

    ``siblings``: at least two, or none count; the median is taken over them and this one, so that
    one bad block among three moves nobody's control. ``lone_w``: the W of all blocks, for a site
    without them. ``forwards``: the controls of this one's forwards. ``routed``: one token may go to
    another expert by rounding. ``widened``: what trusted runs have shown, as a factor >= 1.
    """
    family = [mine, *siblings] if len(siblings) >= 2 else []
    assert mine.first is not None
    blames = [_typical(mine, family, lone_w, widened, thresholds)]
    if TABLES not in mine.kind.lower():
        limit = thresholds.typical * spread(mine.num_values) * widened
        blames.append(Blame("both", "both", min(mine.typical.values()), 1.0, limit, mine.first))
    blames += _forward(mine, family, forwards, routed, widened, thresholds)
    asked: tuple[tuple[Why, float, int], ...] = (
        ("channel", thresholds.truth_channel, mine.num_rows),
        ("token", thresholds.truth_token, mine.num_columns),
        ("sink", thresholds.truth_token, mine.num_columns),
    )
    for why, room, count in asked:
        # one forward's only row is no outlier among its like: a rerouted token fills the channels
        few = ("token", "sink", "channel") if mine.first.step else ("token", "sink")
        if not (routed and why in few):
            blames += _excess(mine, family[1:], why, room * widened, spread(count))
    return blames + _gain(mine, family, thresholds, widened)


def _typical(
    mine: TruthStats,
    family: list[TruthStats],
    lone_w: float | None,
    widened: float,
    thresholds: Thresholds,
) -> Blame:
    least = least_of(family, thresholds)
    w = mine.w(least)
    if family:
        control = statistics.median(o.w(least) for o in family)
    else:
        control = lone_control(w, lone_w or 1.0)
    room = thresholds.truth_sibling if family else thresholds.truth_lone
    limit = room * spread(mine.num_values) * widened
    assert mine.first is not None
    if not _stands_out(w, control, room):
        return Blame("candidate", "typical", 1.0, 1.0, limit, mine.first)
    if w >= control:
        return Blame("candidate", "typical", w, control, limit, mine.first)
    return Blame(
        "reference", "typical", 1 / max(w, 1e-300), 1 / max(control, 1e-300), limit, mine.first
    )


def _stands_out(w: float, control: float, room: float) -> bool:
    """Has one side the larger error, and more so than its control? A side is convicted by its own
    error: where it is not clearly the larger one, by the root of ``room``, it is to blame for
    nothing, however its siblings fare."""
    return max(w, 1 / max(w, 1e-300)) > math.sqrt(room) and (w > 1) == (w > control)


def lone_control(w: float, blocks: float) -> float:
    """Of a site without siblings, or of one forward of all siblings beside the others. The W of the
    ``blocks`` (or others) excuses it where the kernels of one side are coarser everywhere. It never
    blames it: the blocks may be what is wrong."""
    return max(blocks, 1.0) if w > 1 else min(blocks, 1.0)


def forward_controls(family: Sequence[TruthStats], thresholds: Thresholds) -> list[Controls]:
    """What a family shows for the forwards of each of its members."""
    least = least_of(family if len(family) >= 3 else [], thresholds)
    values = [{at: f.w(least) for at, f in stats.forwards.items()} for stats in family]
    return controls(values, _apart, own=True)


def usages(
    mine: TruthStats,
    family: list[TruthStats],
    held: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> dict[PromptStep, tuple[float, float, float]]:
    """By forward: (W over its control, the control, the limit of either direction). Nothing where
    there is but one forward, which is judged as a whole."""
    if len(mine.forwards) < 2:
        return {}
    least = least_of(family, thresholds)
    room = thresholds.truth_sibling if family else thresholds.truth_lone
    by_place: dict[PromptStep, tuple[float, float, float]] = {}
    for place, forward in mine.forwards.items():
        few = forward.num_rows < FEW_ROWS
        if place not in held.at or (few and (routed or one_step(forward.result))):
            continue
        width = spread(forward.num_values, num_looks=len(mine.forwards))
        limit = max(room * width, thresholds.truth_forward * held.largest) * widened
        w = forward.w(least)
        control = max(held.at[place] if family else lone_control(w, held.at[place]), 1e-300)
        excess = w / control if _stands_out(w, control, room) else 1.0
        by_place[place] = excess, control, limit
    return by_place


def _apart(value: _Floats, control: _Floats) -> _Floats:
    """How far a W is from its control, in either direction."""
    over: _Floats = np.maximum(value, 1e-300) / np.maximum(control, 1e-300)
    return np.maximum(over, 1 / over)


def _forward(
    mine: TruthStats,
    family: list[TruthStats],
    held: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """The forward that stands out most."""
    by_place = usages(mine, family, held, routed, widened, thresholds)
    if not by_place:
        return []
    place = max(by_place, key=lambda at: max(by_place[at][0], 1 / max(by_place[at][0], 1e-300))
                / by_place[at][2])  # fmt: skip
    excess, control, limit = by_place[place]
    at = mine.forwards[place].result
    if excess >= 1:
        return [Blame("candidate", "forward", excess * control, control, limit, at, place=place)]
    value, control = 1 / max(excess * control, 1e-300), 1 / max(control, 1e-300)
    return [Blame("reference", "forward", value, control, limit, at, place=place)]


def least_of(family: Sequence[TruthStats], thresholds: Thresholds) -> float:
    """Added to both errors, in floor units: two tiny errors make no large ratio."""
    if not family:
        return LEAST_LONE
    usual = statistics.median(math.sqrt(math.prod(o.typical.values())) for o in family)
    return max(_LEAST_FAMILY, thresholds.truth_least * usual)


def _excess(
    mine: TruthStats, siblings: list[TruthStats], why: Why, limit: float, chance: float
) -> list[Blame]:
    """``chance``: what few numbers do by themselves; the siblings' own excess shows it as well.
    Siblings excuse nothing beyond the largest threshold that there may be: what is wrong in all of
    them at one token is no rounding."""
    blames: list[Blame] = []
    for side, (value, at) in mine.peak.get(why, {}).items():
        others = [o.peak[why][side][0] for o in siblings if side in o.peak.get(why, {})]
        usual = min(statistics.median(others), ALLOWED[1] / limit) if others else 0.0
        control = max(chance, usual)
        blames.append(Blame(side, why, value, control, limit, at))
    return sorted(blames, key=lambda blame: -blame.limit_usage)[:1]


def _gain(
    mine: TruthStats, family: list[TruthStats], thresholds: Thresholds, widened: float
) -> list[Blame]:
    """A scale error that stands out among the siblings'."""
    blames: list[Blame] = []
    for number, own in enumerate(mine.gains):
        others = [o.gains[number] for o in family if len(o.gains) > number]
        if len(others) < 3:
            continue
        usual = statistics.median(o["difference"] for o in others)
        width = 1.4826 * statistics.median(abs(o["difference"] - usual) for o in others)
        common = own["common"] * statistics.median(max(o.typical.values()) for o in family)
        sigma = math.hypot(own["error"], width, common)
        if not 0 < sigma < math.inf:
            continue
        # siblings that are off make no healthy one odd
        apart = min(abs(own["difference"] - usual), abs(own["difference"]))
        deviations = normal_deviate(apart / sigma, mine.num_rows - 1)
        off = {s: abs(own[s] - statistics.median(o[s] for o in others)) for s in SIDES}
        side: Side = max(SIDES, key=lambda s: off[s])
        assert mine.first is not None
        blames.append(
            Blame(side, "gain", deviations, 1.0, thresholds.truth_gain * widened, mine.first,
                  scaled=("output", "update")[number], factor=1 + own[side])
        )  # fmt: skip
    return sorted(blames, key=lambda blame: -blame.limit_usage)[:1]
