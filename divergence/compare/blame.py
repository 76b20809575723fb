"""Blame: which side is farther from the truth than correct rounding explains.

For every site W = err(b, R) / err(a, R) is held against the median W of its siblings, the
same place in the other blocks of its kind. That is a difference of differences: what makes
a block hard (sharp attention, large activations) troubles both sides alike and cancels in
W; what makes one side's kernels coarser troubles all blocks alike and cancels in the
comparison with the siblings. Left is what happened to one side in one block.

Beside the typical token, five narrower questions, each of one side's error over the
other's at the same place: one forward (a decode step), one token, one sink token, one
channel, and a consistent scale error (the gain), which averages rounding away.

A family's W itself beyond ``truth_systematic`` blames a side for all of it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from divergence.compare.result import SiteResult
from divergence.compare.truth import Tally
from divergence.numerics.chance import normal_deviate, spread
from divergence.numerics.floor import Thresholds

if TYPE_CHECKING:
    import torch

__all__ = ["SIDES", "TABLES", "Blame", "Standing", "questions", "standing_of"]

Side = Literal["reference", "candidate", "both"]
SIDES = ("reference", "candidate")
_MIN_ROWS = 8  # fewer rows tell nothing about one channel, or about a scale
TABLES = "rotary"  # computed from float32 angles: the convention is off the truth by position x u
_LEAST_LONE, _LEAST_FAMILY = 0.25, 0.05


Why = Literal["typical", "step", "token", "sink", "channel", "gain", "both"]


@dataclass(frozen=True, slots=True)
class Blame:
    """One question's answer. ``value`` over ``control`` is held against ``limit``; ``share`` is
    how much of the limit is used, > 1 blames ``side``; ``at``: where it is largest."""

    side: Side
    why: Why
    value: float
    control: float
    limit: float
    at: SiteResult
    detail: str = ""

    @property
    def share(self) -> float:
        if self.control <= 0:
            return math.inf
        return self.value / self.control / self.limit


@dataclass(slots=True)
class Standing:
    """How one site stands to the truth, all rows of a phase together.

    ``typical``: each side's median row error in floor units of the rounding model; ``peak``: by
    question and side, the largest excess of that side over the other, and where; ``gains``:
    [(mean difference, its standard error), …] over the stream and over the update, with
    each side's own mean.
    """

    kind: str
    num_values: int
    num_rows: int
    num_columns: int
    typical: dict[str, float]
    peak: dict[str, dict[str, tuple[float, SiteResult]]] = field(default_factory=dict)
    gains: list[dict[str, float]] = field(default_factory=list)
    first: SiteResult | None = None

    def w(self, least: float) -> float:
        a, b = (math.hypot(self.typical[side], least) for side in SIDES)
        return b / a if a > 0 else 1.0


def standing_of(tally: Tally) -> Standing | None:
    """Gather a tally. None where no row is left."""
    import torch

    forwards = [entry for entry in tally.forwards if entry[1].num_rows]
    if not forwards:
        return None
    usual = [~against.sink for _, against, _ in forwards]
    if not any(bool(rows.any()) for rows in usual):
        usual = [against.sink for _, against, _ in forwards]

    def in_floors(errors: torch.Tensor, norm: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
        return errors / norm.clamp_min(1e-300) / floor

    q = {
        side: [in_floors(getattr(t, side), t.norm, floor) for _, t, floor in forwards]
        for side in SIDES
    }
    pooled = {
        side: torch.cat([rows[keep] for rows, keep in zip(q[side], usual, strict=True)])
        for side in SIDES
    }
    typical = {side: float(pooled[side].median()) for side in SIDES}
    last = forwards[0][0].shape[-1] if forwards[0][0].shape else 1
    standing = Standing(
        kind=forwards[0][0].kind or "",
        num_values=sum(t.num_rows for _, t, _ in forwards) * last,
        num_rows=len(pooled["reference"]),
        num_columns=last,
        typical=typical,
        first=min((entry[0] for entry in forwards), key=_order),
    )
    for mine, other in (SIDES, SIDES[::-1]):
        usual_other = max(typical[other], _LEAST_LONE)
        excess = [x / torch.hypot(y, torch.full_like(y, usual_other)) for x, y in
                  zip(q[mine], q[other], strict=True)]  # fmt: skip
        _peak(standing, "token", mine, forwards, excess, usual)
        _peak(standing, "sink", mine, forwards, excess, [t.sink for _, t, _ in forwards])
        steps = []
        for x, y, keep in zip(q[mine], q[other], usual, strict=True):
            if bool(keep.any()):
                x, y = x[keep].median(), y[keep].median()
            else:
                x, y = x.median(), y.median()
            steps.append((x / math.hypot(float(y), usual_other)).reshape(1))
        everywhere = [torch.ones(1, dtype=torch.bool)] * len(steps)
        _peak(standing, "step", mine, forwards, steps, everywhere)
    _channels(standing, forwards)
    _gains(standing, forwards, usual)
    return standing


def _order(result: SiteResult) -> tuple[int, int, int]:
    return (result.sample, result.step, result.order)


def _peak(standing: Standing, why: str, side: str, forwards, excess, keep) -> None:
    best: tuple[float, SiteResult] | None = None
    for (result, _, _), values, rows in zip(forwards, excess, keep, strict=True):
        if bool(rows.any()):
            top = float(values[rows].max())
            if best is None or top > best[0]:
                best = (top, result)
    if best is not None:
        standing.peak.setdefault(why, {})[side] = best


def _channels(standing: Standing, forwards) -> None:
    """√(one side's squared error in a channel over the other's there plus its mean channel's)."""
    if len({len(t.channel_reference) for _, t, _ in forwards}) > 1:
        return  # attention weights: their last axis is the tokens seen so far
    sums = {side: sum(getattr(t, f"channel_{side}") for _, t, _ in forwards) for side in SIDES}
    rows = sum(int((~t.sink).sum()) for _, t, _ in forwards)
    if rows < _MIN_ROWS or len(sums["reference"]) < 2:
        return
    for mine, other in (SIDES, SIDES[::-1]):
        whole = float(sums[other].mean())
        if whole <= 0:
            continue
        excess = (sums[mine] / (sums[other] + whole)).sqrt()
        assert standing.first is not None
        standing.peak.setdefault("channel", {})[mine] = (float(excess.max()), standing.first)


def _gains(standing: Standing, forwards, usual) -> None:
    import torch

    if standing.num_rows < _MIN_ROWS:
        return
    for prefix in ("gain", "update_gain"):
        if any(getattr(t, f"{prefix}_reference") is None for _, t, _ in forwards):
            continue
        rows = {
            side: torch.cat(
                [
                    getattr(t, f"{prefix}_{side}")[keep]
                    for (_, t, _), keep in zip(forwards, usual, strict=True)
                ]
            )
            for side in SIDES
        }
        scale = torch.cat(
            [
                (floor * (t.norm / t.update.clamp_min(1e-300) if prefix != "gain" else 1.0))[keep]
                / t.spread[keep].clamp_min(1.0).sqrt()
                for (_, t, floor), keep in zip(forwards, usual, strict=True)
            ]
        )
        paired = rows["candidate"] - rows["reference"]
        standing.gains.append(
            {
                "difference": float(paired.mean()),
                "error": float(paired.std()) / math.sqrt(len(paired)),
                # all tokens may round a dominant channel the same way
                "common": float(scale.median()),  # per unit of typical error
                "reference": float(rows["reference"].mean()),
                "candidate": float(rows["candidate"].mean()),
            }
        )


def questions(
    mine: Standing,
    siblings: list[Standing],
    *,
    lone_w: float | None,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """Every question's answer, the plainest question first.

    ``siblings``: at least two, or none count; the median is taken over them and this one, so
    that one bad block among three moves nobody's control. ``lone_w``: the W of all blocks, for
    a site without them. ``routed``: one token may go to another expert by rounding. ``widened``:
    what trusted runs have shown, as a factor >= 1.
    """
    family = [mine, *siblings] if len(siblings) >= 2 else []
    assert mine.first is not None
    found = [_typical(mine, family, lone_w, widened, thresholds)]
    if TABLES not in mine.kind.lower():
        limit = thresholds.typical * spread(mine.num_values) * widened
        found.append(Blame("both", "both", min(mine.typical.values()), 1.0, limit, mine.first))
    for why, room, count in (
        ("step", thresholds.truth_step, min(mine.num_values, mine.num_columns)),
        ("channel", thresholds.truth_channel, mine.num_rows),
        ("token", thresholds.truth_token, mine.num_columns),
        ("sink", thresholds.truth_token, mine.num_columns),
    ):
        # one forward's only row is no outlier among its like: a rerouted token fills the channels
        few = ("step", "token", "sink", "channel") if mine.first.step else ("step", "token", "sink")
        if not (routed and why in few):
            found += _excess(mine, family[1:], why, room * widened, spread(count))
    return found + _gain(mine, family, thresholds, widened)


def _typical(
    mine: Standing,
    family: list[Standing],
    lone_w: float | None,
    widened: float,
    thresholds: Thresholds,
) -> Blame:
    least = least_of(mine, family, thresholds)
    w = mine.w(least)
    control = statistics.median(o.w(least) for o in family) if family else (lone_w or 1.0)
    room = thresholds.truth_sibling if family else thresholds.truth_lone
    limit = room * spread(mine.num_values) * widened
    assert mine.first is not None
    if w >= control:
        return Blame("candidate", "typical", w, control, limit, mine.first)
    return Blame(
        "reference", "typical", 1 / max(w, 1e-300), 1 / max(control, 1e-300), limit, mine.first
    )


def least_of(mine: Standing, family: list[Standing], thresholds: Thresholds) -> float:
    """Added to both errors, in floor units: two tiny errors make no large ratio."""
    if not family:
        return _LEAST_LONE
    usual = statistics.median(math.sqrt(math.prod(o.typical.values())) for o in family)
    return max(_LEAST_FAMILY, thresholds.truth_least * usual)


def _excess(
    mine: Standing, siblings: list[Standing], why: Why, limit: float, chance: float
) -> list[Blame]:
    """``chance``: what few numbers do by themselves; the siblings' own excess shows it as well."""
    found: list[Blame] = []
    for side, (value, at) in mine.peak.get(why, {}).items():
        others = [o.peak[why][side][0] for o in siblings if side in o.peak.get(why, {})]
        control = max(chance, statistics.median(others)) if others else chance
        found.append(Blame(side, why, value, control, limit, at))
    return sorted(found, key=lambda one: -one.share)[:1]


def _gain(
    mine: Standing, family: list[Standing], thresholds: Thresholds, widened: float
) -> list[Blame]:
    """A scale error that stands out among the siblings'."""
    found: list[Blame] = []
    for number, own in enumerate(mine.gains):
        others = [o.gains[number] for o in family if len(o.gains) > number]
        if len(others) < 3:
            continue
        usual = statistics.median(o["difference"] for o in others)
        width = 1.4826 * statistics.median(abs(o["difference"] - usual) for o in others)
        common = own["common"] * statistics.median(max(o.typical.values()) for o in family)
        sigma = math.sqrt(own["error"] ** 2 + width**2 + common**2)
        if not 0 < sigma < math.inf:
            continue
        deviations = normal_deviate(abs(own["difference"] - usual) / sigma, mine.num_rows - 1)
        off = {s: abs(own[s] - statistics.median(o[s] for o in others)) for s in SIDES}
        side = max(SIDES, key=lambda s: off[s])
        assert mine.first is not None
        what = ("output", "update")[number]
        found.append(
            Blame(side, "gain", deviations, 1.0, thresholds.truth_gain * widened, mine.first,
                  detail=f"the {what} is scaled by {1 + own[side]:.6g}")
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.share)[:1]
