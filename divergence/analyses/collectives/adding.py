"""Orders of addition in words, and what two collectives promise of each other by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from divergence.analyses.collectives.definitions import bits_differ, exact_sum
from divergence.analyses.collectives.recorded import Recorded, RecordedCase
from divergence.analyses.collectives.replaying import replay
from divergence.collectives.cases import CollectiveCase
from divergence.collectives.orders import Stretch, name_order, stretches_text
from divergence.comparison.results.suites import IdentityRow, OrderRow
from divergence.numerics.formats import format_named

__all__ = ["Identity", "Key", "identities", "order_row"]

Key = tuple[str, str, str]
"""Collective, dtype, size."""

_ROUNDING_RMS = 0.4247
"""rms of a rounding in units of u x, where the significand of x is distributed as 1/m: the error is
uniform over ± u, and E[1/m²] = 3 / (8 ln 2), so √(3 / (8 ln 2) / 3)."""


def order_row(
    recorded: Recorded, case: CollectiveCase, elements: int, stretches: list[Stretch]
) -> OrderRow:
    """One order in words, replayed on what the run recorded at that dtype and size."""
    n = recorded.num_ranks
    trials, measured = [], None
    for values in ("random", "cancelling", "outlier"):
        recorded_case = recorded.find(
            CollectiveCase(case.collective, case.dtype, case.size, values)
        )
        out = None if recorded_case is None or not recorded_case.has_inputs else recorded_case.whole
        if recorded_case is None or out is None:
            continue
        trials.append((recorded_case.inputs, out))
        if values == "random":
            error = exact_sum(recorded_case.inputs).error(out)
            terms = torch.stack(recorded_case.inputs).double()
            measured = float(error.square().mean().sqrt() / terms.square().mean().sqrt())
    replayed = replay(stretches, trials)
    named = name_order(stretches, n)
    return OrderRow(
        collective=case.collective, dtype=case.dtype, size=case.size, elements=elements,
        order=named, first=stretches_text(stretches, n), num_chunks=len(stretches),
        accumulates=replayed.accumulates, num_replayed=replayed.num,
        expected=_expected(stretches, case.dtype, replayed.accumulates, n), measured=measured,
    )  # fmt: skip


def _expected(
    stretches: list[Stretch], dtype: str, accumulates: str | None, num_ranks: int
) -> float | None:
    """rms error of a sum of n terms of variance 1 (trees: E[error²] = c² u² Σ size(node)); a wider
    accumulator leaves the last rounding, of a sum of variance n."""
    known = [stretch for stretch in stretches if stretch.tree is not None]
    if not known or accumulates is None:
        return None
    form, inner = format_named(dtype), format_named(accumulates)
    if inner.unit_roundoff < form.unit_roundoff:
        return _ROUNDING_RMS * form.unit_roundoff * math.sqrt(num_ranks)
    total = sum((part.stop - part.start) * part.tree.partials for part in known if part.tree)
    mean = total / sum(part.stop - part.start for part in known)
    return float(_ROUNDING_RMS * inner.unit_roundoff * mean**0.5)


@dataclass(frozen=True, slots=True)
class Identity:
    """One composed case. ``differ``: elements that are added alike and yet differ."""

    composed: RecordedCase
    row: IdentityRow
    differ: torch.Tensor


def identities(recorded: Recorded, orders: Mapping[Key, list[Stretch]]) -> list[Identity]:
    """AR = RS + AG, case by case: bit for bit where both add every element in the same order."""
    pairs = []
    for composed in recorded.cases():
        if composed.case.collective != "rs_ag" or not composed.has_inputs:
            continue
        dtype, size, values = composed.case.dtype, composed.case.size, composed.case.values
        direct = recorded.find(CollectiveCase("all_reduce", dtype, size, values))
        if direct is not None and not direct.has_inputs:
            continue
        first, second = None if direct is None else direct.whole, composed.whole
        if direct is None or first is None or second is None:
            continue
        ways = [orders.get((name, dtype, size)) for name in ("all_reduce", "reduce_scatter")]
        alike = _added_alike(ways[0], ways[1], len(first))
        differ = bits_differ(first, second)
        if alike is not None:  # at the edge between two chunks it is not known
            differ &= alike
        bound = exact_sum(direct.inputs).bound
        usage = ((first.double() - second.double()).abs() / (2 * bound).clamp_min(5e-324)).max()
        row = IdentityRow(
            dtype=dtype, size=size, values=values, promised=alike is not None,
            num_different=int(differ.sum()), elements=len(differ), limit_usage=float(usage),
        )  # fmt: skip
        pairs.append(Identity(composed, row, differ))
    return pairs


def _added_alike(
    direct: list[Stretch] | None, composed: list[Stretch] | None, size: int
) -> torch.Tensor | None:
    """(size,) of bool: the elements that are known to be added in the same order; None where some
    are known to be added in another."""
    if not direct or not composed:
        return None
    number: dict[object, int] = {}
    known = []
    for stretches in (direct, composed):
        trees = torch.full((size,), -1)
        for part in stretches:
            if part.tree is None:
                return None
            trees[part.start : part.stop] = number.setdefault(part.tree, len(number))
        known.append(trees)
    both = (known[0] >= 0) & (known[1] >= 0)
    same = known[0] == known[1]
    return both if bool(same[both].all()) and 2 * int(both.sum()) > size else None
