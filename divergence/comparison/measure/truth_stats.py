"""TruthStats: how one site stands to the truth, over all rows of a phase and forward by forward.

Each side's errors are in floors of the rounding model. blocks.blame asks questions of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.measure.truth import TruthSamples
from divergence.comparison.results.sites import SiteResult
from divergence.words import Side

if TYPE_CHECKING:
    import torch

    from divergence.numerics.pairs.against import AgainstTruth

    _Forwards = Sequence[tuple[SiteResult, AgainstTruth, torch.Tensor]]
    """Each with its rows' floor (T,)."""

__all__ = ["LEAST_LONE", "SIDES", "Forward", "TruthStats", "stats_of"]

SIDES: tuple[Side, Side] = ("reference", "candidate")
LEAST_LONE = 0.25
_MIN_ROWS = 8  # fewer rows tell nothing about one channel, or about a scale


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of one prompt: each side's median row error, in floor units. ``num_values``: of
    how many independent numbers its error is made: rounding is relative, so of a row as many as its
    participation ratio (ΣR²)²/ΣR⁴ says, not as many as it has columns."""

    result: SiteResult
    typical: dict[Side, float]
    num_rows: int
    num_values: int

    def w(self, least: float) -> float:
        a, b = (math.hypot(self.typical[side], least) for side in SIDES)
        return b / a if a > 0 else 1.0


@dataclass(slots=True)
class TruthStats:
    """How one site stands to the truth, all rows of a phase together, and forward by forward.

    ``typical``: each side's median row error in floor units of the rounding model; ``peak``: by
    question and side, the largest excess of that side over the other, and where; ``gains``:
    [(mean difference, its standard error), …] over the stream and over the update, with
    each side's own mean.
    """

    kind: str
    num_values: int
    num_rows: int
    num_columns: int
    typical: dict[Side, float]
    peak: dict[str, dict[Side, tuple[float, SiteResult]]] = field(default_factory=dict)
    gains: list[dict[str, float]] = field(default_factory=list)
    first: SiteResult | None = None
    forwards: dict[PromptStep, Forward] = field(default_factory=dict)

    def w(self, least: float) -> float:
        a, b = (math.hypot(self.typical[side], least) for side in SIDES)
        return b / a if a > 0 else 1.0


def stats_of(samples: TruthSamples) -> TruthStats | None:
    """Statistics of the samples of one site and phase. None where no row is left."""
    import torch

    forwards = [entry for entry in samples.forwards if entry[1].num_rows]
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
    stats = TruthStats(
        kind=forwards[0][0].kind or "",
        num_values=sum(t.num_rows for _, t, _ in forwards) * last,
        num_rows=len(pooled["reference"]),
        num_columns=last,
        typical=typical,
        first=min((entry[0] for entry in forwards), key=_order),
    )
    for mine, other in (SIDES, SIDES[::-1]):
        usual_other = max(typical[other], LEAST_LONE)
        excess = [x / torch.hypot(y, torch.full_like(y, usual_other)) for x, y in
                  zip(q[mine], q[other], strict=True)]  # fmt: skip
        _peak(stats, "token", mine, forwards, excess, usual)
        _peak(stats, "sink", mine, forwards, excess, [t.sink for _, t, _ in forwards])
    _channels(stats, forwards)
    _gains(stats, forwards, usual)
    for number, (result, against, _) in enumerate(forwards):
        rows = {side: q[side][number] for side in SIDES}
        for sample, members in _prompts(result, against):
            keep = usual[number] & members if bool((usual[number] & members).any()) else members
            place = sample, result.step
            stats.forwards[place] = Forward(
                result,
                {side: float(rows[side][keep].median()) for side in SIDES},
                int(keep.sum()),
                max(1, round(float(against.spread[keep].clamp_min(1.0).sum()))),
            )
    return stats


def _prompts(result: SiteResult, against: AgainstTruth) -> list[tuple[int, torch.Tensor]]:
    """(prompt, its rows): all rows are one prompt's unless the forward held several, whose rows
    then follow each other in equal parts."""
    import torch

    everything = torch.ones(against.num_rows, dtype=torch.bool)
    if len(result.prompts) < 2:
        return [(result.prompts[0].sample if result.prompts else result.sample, everything)]
    rows_each = math.prod(result.shape[1:-1])
    found = []
    for number, prompt in enumerate(result.prompts):
        members = against.row_index // rows_each == number
        if bool(members.any()):
            found.append((prompt.sample, members))
    return found


def _order(result: SiteResult) -> tuple[int, int, int]:
    return (result.sample, result.step, result.order)


def _peak(
    stats: TruthStats,
    why: str,
    side: Side,
    forwards: _Forwards,
    excess: Sequence[torch.Tensor],
    keep: Sequence[torch.Tensor],
) -> None:
    best: tuple[float, SiteResult] | None = None
    for (result, _, _), values, rows in zip(forwards, excess, keep, strict=True):
        if bool(rows.any()):
            top = float(values[rows].max())
            if best is None or top > best[0]:
                best = (top, result)
    if best is not None:
        stats.peak.setdefault(why, {})[side] = best


def _channels(stats: TruthStats, forwards: _Forwards) -> None:
    """√(one side's squared error in a channel over the other's there plus what the other makes in
    any channel: its mean one's, or its typical row error's share by size where that is more.
    Rounding goes with the values: a massive activation holds nearly all of its row's error.

    Of forwards of one row the channel's largest is left out: one bad token is no bad channel."""
    import torch

    if len({len(t.channel_reference) for _, t, _ in forwards}) > 1:
        return  # attention weights: their last axis is the tokens seen so far
    sums = {side: sum(getattr(t, f"channel_{side}") for _, t, _ in forwards) for side in SIDES}
    rows = sum(int((~t.sink).sum()) for _, t, _ in forwards)
    if rows < _MIN_ROWS or len(sums["reference"]) < 2:
        return
    norm = sum((t.channel_norm for _, t, _ in forwards), torch.zeros(()))
    for mine, other in (SIDES, SIDES[::-1]):
        whole = float(sums[other].mean())
        if whole <= 0:
            continue
        share = _usual_error(forwards, other) ** 2 * norm
        excess = (sums[mine] - _largest_row(forwards, mine)) / (
            sums[other] + share.clamp_min(whole)
        )
        excess = excess.clamp_min(0.0).sqrt()
        assert stats.first is not None
        stats.peak.setdefault("channel", {})[mine] = (float(excess.max()), stats.first)


def _usual_error(forwards: _Forwards, side: Side) -> float:
    """The median row's relative error, sinks apart."""
    import torch

    rows = [(getattr(t, side) / t.norm.clamp_min(1e-300))[~t.sink] for _, t, _ in forwards]
    return float(torch.cat(rows).median())


def _largest_row(forwards: _Forwards, side: Side) -> torch.Tensor:
    """Of each channel, the largest squared error in a forward that has one row alone (D,)."""
    import torch

    alone = [getattr(t, f"channel_{side}") for _, t, _ in forwards if t.num_rows == 1]
    if len(alone) < _MIN_ROWS:
        return torch.zeros_like(getattr(forwards[0][1], f"channel_{side}"))
    return torch.stack(alone).amax(0)


def _gains(stats: TruthStats, forwards: _Forwards, usual: Sequence[torch.Tensor]) -> None:
    import torch

    if stats.num_rows < _MIN_ROWS:
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
                (
                    floor
                    if t.update is None or prefix == "gain"
                    else floor * (t.norm / t.update.clamp_min(1e-300))
                )[keep]
                / t.spread[keep].clamp_min(1.0).sqrt()
                for (_, t, floor), keep in zip(forwards, usual, strict=True)
            ]
        )
        paired = rows["candidate"] - rows["reference"]
        stats.gains.append(
            {
                "difference": float(paired.mean()),
                "error": float(paired.std()) / math.sqrt(len(paired)),
                # all tokens may round a dominant channel the same way
                "common": float(scale.median()),  # per unit of typical error
                "reference": float(rows["reference"].mean()),
                "candidate": float(rows["candidate"].mean()),
            }
        )
