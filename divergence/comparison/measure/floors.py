"""Floors for measured pairs: what correct implementations may differ by, row by row.

The seam for judging: a Floor turns the rows of one pair into ratios (error made here
over floor). ModelFloor uses the rounding model of numerics.floor. With a truth, errors
against it are judged as well (blocks.blame), in units of the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from divergence.numerics.formats import Format
from divergence.numerics.pairs.metrics import RowMetrics
from divergence.numerics.pairs.pair import SINK_FACTOR
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds, floor_weights

if TYPE_CHECKING:
    import torch

__all__ = ["Floor", "ModelFloor", "Ratios", "row_floor"]


@dataclass(frozen=True, slots=True)
class Ratios:
    """``floor``: the median row's floor as a rel_l2; ``typical``: median row's error over
    its floor; ``worst``: the largest row's. Sink rows are apart: ``sink``, the largest of them,
    None where there is none. ``members``: of a batch, each member's (number, typical, rows)."""

    floor: float
    typical: float
    worst: float
    sink: float | None = None
    members: tuple[tuple[int, float, int], ...] = ()


class Floor(Protocol):
    """Judges rows. ``form``: what the site is stored in; ``work``: what the model computes in,
    which is narrower where it keeps its stream in float32. In a free pass, ``inherited``: the
    rows of the same module's input, and ``beside``: the relative error of what else came in
    (encoder states, rotary tables, and through attention or a cache the tokens before).
    ``num_members``: of a batch, whose rows follow each other in equal parts."""

    def ratios(
        self,
        rows: RowMetrics,
        *,
        form: Format,
        work: Format,
        num_features: int,
        role: str,
        inherited: RowMetrics | None,
        beside: float,
        num_members: int = 1,
    ) -> Ratios | None: ...


class ModelFloor:
    """The floor from the stated rounding model; no reference run needed."""

    def __init__(self, thresholds: Thresholds = THRESHOLDS) -> None:
        self._thresholds = thresholds

    def ratios(
        self,
        rows: RowMetrics,
        *,
        form: Format,
        work: Format,
        num_features: int,
        role: str,
        inherited: RowMetrics | None,
        beside: float,
        num_members: int = 1,
    ) -> Ratios | None:
        """None where there is no row to judge, or nothing rounds (integers)."""
        import torch

        real = torch.isfinite(rows.rel_l2) & (rows.norm > 0)
        update = None if rows.update_norm is None else rows.update_norm[real]
        norm = rows.norm[real]
        floor = row_floor(norm, update, form=form, work=work, num_features=num_features, role=role)
        if floor is None:
            return None
        known = ~torch.isnan(rows.rel_l2)
        if bool(known.any()) and int(torch.isinf(rows.rel_l2).sum()) * 2 > int(known.sum()):
            # most rows are zero in the reference alone: no rounding does that
            return Ratios(floor=0.0, typical=math.inf, worst=math.inf)
        if not bool(real.any()):
            return None
        rel = rows.rel_l2[real]
        share = torch.ones_like(norm) if update is None else update / norm
        made, before = rel, torch.full_like(rel, beside)
        if inherited is not None and inherited.rel_l2.shape == rows.rel_l2.shape:
            own = inherited.rel_l2[real].nan_to_num(0.0)
            carried = own * inherited.norm[real] / norm
            made = (rel**2 - carried**2).clamp_min(0).sqrt()
            before = torch.maximum(before, own)
        # What a module makes of an error that came in: its update moves along.
        allowed = (floor**2 + (self._thresholds.free_gain * share * before) ** 2).sqrt()
        ratio = made / allowed
        sinks = norm > SINK_FACTOR * norm.median()  # never the half of all rows
        usual = ratio[~sinks]
        return Ratios(
            floor=float(floor[~sinks].median()),
            typical=float(usual.median()),
            worst=float(usual.max()),
            sink=float(ratio[sinks].max()) if bool(sinks.any()) else None,
            members=_members(ratio, real, ~sinks, num_members) if num_members > 1 else (),
        )


def _members(
    ratio: torch.Tensor, real: torch.Tensor, usual: torch.Tensor, num_members: int
) -> tuple[tuple[int, float, int], ...]:
    """(number, median ratio, rows) of each member of a batch; ``ratio``, ``usual``: the rows that
    are ``real``."""
    import torch

    rows_each = max(1, len(real) // num_members)
    member = (torch.arange(len(real)) // rows_each)[real]
    found = []
    for number in range(num_members):
        mine = (member == number) & usual
        if bool(mine.any()):
            found.append((number, float(ratio[mine].median()), int(mine.sum())))
    return tuple(found)


def row_floor(
    norm: torch.Tensor,
    update_norm: torch.Tensor | None,
    *,
    form: Format,
    work: Format,
    num_features: int,
    role: str,
) -> torch.Tensor | None:
    """The rounding model's floor of each row as a rel_l2, (T,); None where nothing rounds.

    ``norm``, ``update_norm``: the rows' ‖out‖ > 0 and ‖f(x)‖, see numerics.floor.
    """
    part: Literal["block", "inner", "trunk"] = (
        "block" if role == "block" else "inner" if role == "inner" else "trunk"
    )
    store, update = floor_weights(form, num_features=num_features, role=part)
    if work.unit_roundoff > form.unit_roundoff:
        update = floor_weights(work, num_features=num_features, role=part)[1]
    if store == 0:
        return None
    share = 1.0 if update_norm is None else update_norm / norm
    return (store**2 + (update * share) ** 2) ** 0.5 + 0.0 * norm
