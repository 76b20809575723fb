"""Codes of a quantiser against what they stand for: which of them no rounding explains.

A code, less its zero point, is the nearest integer (8-bit float) to q = x / scale, kept in its
range. So d = code - q, of floats in units of the distance to the next one, lies within 1/2, but for
the rounding of x, scale and quotient, which moves q by a share r of |q| and of the row's rms. Four
looks at d:

outliers    |d| > 1/2 + room · r · (|q| + rms): not the nearest code. A wrapped overflow, a lost
            zero point, a scale of another row.
inward      the mean of -e · sign(q): 0 for rounding to nearest, 1/2 for a cast that cuts off.
offset      the mean of e: 0; 1/2 for rounding down.
scale       Σ e q / Σ q²: 0; 1/256 where 128 stands for 127.5.

e is the code less the one nearest to q, in the same steps, which of a right quantiser is 0 but
where q lies on a tie. The mean of d is 0 only of numbers that spread over many codes: beside an
outlier that takes the range, most are rounded to 0, d = -q, as if all were cut off; and a float's
steps, and the end of the range, leave a rest of some 1/12 of a step in Σ d q.

A mean may be off by chance, ``DEVIATIONS`` standard errors of single codes (1e-9 a look; of d, at
least the 1/√12 of a number that is rounded anywhere), and by two roundings of the scale, its own
and that of the number it is made of: 2 u, in all rows alike where one channel is the largest of
each. So in bfloat16 no scale is told that is less than 0.8% off. No mean below a tenth is looked
at. Codes at the ends of the range are in no mean: what is cut off there has no rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["DEVIATIONS", "CodeErrors", "CodeQuestion", "code_errors", "merged"]

DEVIATIONS = 6.0
_LEAST = 0.1
_SCALE_ROUNDINGS = 2
_ROUNDED = 1 / math.sqrt(12)

What = Literal["outliers", "inward", "offset", "scale"]


@dataclass(frozen=True, slots=True)
class CodeQuestion:
    """One of the questions: the value, what it may be, and over how many codes."""

    what: What
    value: float
    limit: float
    num_codes: int
    farthest: float = 0.0
    """Of outliers: the largest |d|."""

    @property
    def usage(self) -> float:
        return abs(self.value) / self.limit if self.limit else math.inf * (self.value != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeErrors:
    """Sums over the codes of one tensor or several."""

    num: int
    """Codes."""
    num_inner: int
    """Codes that are in the means."""
    num_outliers: int
    farthest: float
    """The largest |d| of the outliers; 0 without any."""
    offset: float
    inward: float
    squares: float
    """Sums of e, -e · sign(q) and d²."""
    product: float
    power: float
    size: float
    """Sums of e q, q² and |q|."""
    roundoff: float
    """u of the dtype that scales and quotients were computed in."""

    def looks(self) -> list[CodeQuestion]:
        """All four; none where there are no codes."""
        looks = [CodeQuestion("outliers", float(self.num_outliers), 0.0, self.num, self.farthest)]
        if self.num_inner < 2 or not self.power:
            return looks
        n = self.num_inner
        spread = max(math.sqrt(self.squares / n), _ROUNDED)
        scale = _SCALE_ROUNDINGS * self.roundoff
        limit = max(_LEAST, DEVIATIONS * spread / math.sqrt(n) + scale * self.size / n)
        looks.append(CodeQuestion("inward", self.inward / n, limit, n))
        looks.append(CodeQuestion("offset", self.offset / n, limit, n))
        limit = DEVIATIONS * spread / math.sqrt(self.power) + scale
        looks.append(CodeQuestion("scale", self.product / self.power, limit, n))
        return looks


def code_errors(
    codes: torch.Tensor,
    wanted: torch.Tensor,
    *,
    ends: tuple[float, float],
    roundoff: float,
    room: float,
    floor: float,
    within: float = 0.5,
) -> CodeErrors:
    """Of ``codes`` (..., K) against q, ``wanted`` (..., K) in float64.

    ``floor``: r, the relative error that rounding makes of what is quantised; ``room``: how many of
    them any code may be off. ``within``: 1 where ``wanted`` are another machine's codes, and where
    a zero point shifts the ends.
    """
    import torch

    low, high = ends
    q = wanted.double().reshape(-1, wanted.shape[-1])
    code = codes.reshape(q.shape).double()
    inside = q.clamp(low, high)
    step = _float8_step(inside) if codes.is_floating_point() else torch.ones_like(q)
    d = (code - inside) / step
    rms = inside.square().mean(-1, keepdim=True).sqrt()
    allowed = within + room * floor * (inside.abs() + rms) / step
    outliers = d.abs() > allowed
    inner = (q > low + 1) & (q < high - 1)
    nearest = inside.to(codes.dtype).double() if codes.is_floating_point() else inside.round()
    e, qi = ((code - nearest) / step)[inner], (q / step)[inner]
    return CodeErrors(
        num=q.numel(),
        num_inner=int(inner.sum()),
        num_outliers=int(outliers.sum()),
        farthest=float(d[outliers].abs().max()) if bool(outliers.any()) else 0.0,
        offset=float(e.sum()),
        inward=float(-(e * qi.sign()).sum()),
        squares=float(d[inner].square().sum()),
        product=float((e * qi).sum()),
        power=float(qi.square().sum()),
        size=float(qi.abs().sum()),
        roundoff=roundoff,
    )


def merged(parts: list[CodeErrors]) -> CodeErrors:
    """One over all of them."""
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in (
            "num", "num_inner", "num_outliers", "offset", "inward", "squares",
            "product", "power", "size",
        )
    }  # fmt: skip
    return CodeErrors(
        farthest=max(part.farthest for part in parts),
        roundoff=max(part.roundoff for part in parts), **sums,
    )  # fmt: skip


def _float8_step(values: torch.Tensor) -> torch.Tensor:
    """Distance of neighbours in float8_e4m3fn there: 3 fraction bits, subnormal below 2^-6."""
    import torch

    exponent = torch.frexp(values.abs()).exponent - 1
    return torch.ldexp(torch.ones_like(values), exponent.clamp(min=-6) - 3)
