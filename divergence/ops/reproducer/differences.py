"""How far one result is from another, in the few figures that a bug report states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from divergence.numerics.formats import format_of
from divergence.numerics.pairs.ulp import NAN_DISTANCE, ulp_distance

if TYPE_CHECKING:
    import torch

__all__ = ["Difference", "difference", "store_error"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``max_abs``: greatest |a - b|. ``rel_l2``: ‖a - b‖ / ‖b‖ (0/0 = 0, x/0 = inf). ``max_ulp``:
    greatest distance in representable values of a's format, b rounded to it; None where it has
    none. ``num_different`` of ``numel`` elements; all in float64, nan where a value is nan."""

    max_abs: float
    rel_l2: float
    max_ulp: int | None
    num_different: int
    numel: int


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Of ``a`` from ``b``; None where their shapes differ."""
    if a.shape != b.shape:
        return None
    import torch

    a, b = a.reshape(-1), b.reshape(-1)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    one, two = a.to(wide), b.to(wide)
    gap = torch.where(one == two, 0.0, (one - two).abs())  # equal infinities differ by nothing
    top, bottom = float(gap.norm()), float(two.abs().norm())
    ulp = None
    form = format_of(a.dtype)
    if form.kind == "float" and form.name != "float64":
        distances = ulp_distance(a, b.to(a.dtype), form)
        ulp = int(distances.max()) if distances.numel() else 0
        ulp = None if ulp == NAN_DISTANCE else ulp
    return Difference(
        max_abs=float(gap.max()) if gap.numel() else 0.0,
        rel_l2=0.0 if top == 0 else (top / bottom if bottom else math.inf),
        max_ulp=ulp,
        num_different=int((gap != 0).sum()),
        numel=a.numel(),
    )


def store_error(truth: torch.Tensor, dtype: torch.dtype) -> float | None:
    """‖round(R) - R‖ / ‖R‖: what storing the right result in ``dtype`` costs."""
    found = difference(truth.to(dtype), truth)
    return None if found is None else found.rel_l2
