"""Codes of quantised tensors: what makes them, and how far two are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from divergence.errors import UsageError
from divergence.numerics.formats import format_named

if TYPE_CHECKING:
    import torch


# Codes of a quantiser against what they stand for: which of them no rounding explains.
#
# A code, less its zero point, is the nearest integer (8-bit float) to q = x / scale, kept in its
# range. So d = code - q, of floats in units of the distance to the next one, lies within 1/2, but
# for the rounding of x, scale and quotient, which moves q by a share r of |q| and of the row's
# rms. Four looks at d:
#
# outliers    |d| > 1/2 + room · r · (|q| + rms): not the nearest code. A wrapped overflow, a lost
#             zero point, a scale of another row.
# inward      the mean of -e · sign(q): 0 for rounding to nearest, 1/2 for a cast that cuts off.
# offset      the mean of e: 0; 1/2 for rounding down.
# scale       Σ e q / Σ q²: 0; 1/256 where 128 stands for 127.5.
#
# e is the code less the one nearest to q, in the same steps, which of a right quantiser is 0 but
# where q lies on a tie. The mean of d is 0 only of numbers that spread over many codes: beside an
# outlier that takes the range, most are rounded to 0, d = -q, as if all were cut off; and a float's
# steps, and the end of the range, leave a rest of some 1/12 of a step in Σ d q.
#
# A mean may be off by chance, ``DEVIATIONS`` standard errors of single codes (1e-9 a look; of d, at
# least the 1/√12 of a number that is rounded anywhere), and by two roundings of the scale, its own
# and that of the number it is made of: 2 u, in all rows alike where one channel is the largest of
# each. So in bfloat16 no scale is told that is less than 0.8% off. No mean below a tenth is looked
# at. Codes at the ends of the range are in no mean: what is cut off there has no rounding.

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
    """Measure the errors of ``codes`` (..., K) against q, ``wanted`` (..., K) in float64.

    ``floor``: r, the relative error that rounding makes of what is quantised; ``room``: how many of
    them any code may be off. ``within``: 1 where ``wanted`` are another machine's codes, and where
    a zero point shifts the ends.
    """
    import torch

    low, high = ends
    q = wanted.double().reshape(-1, wanted.shape[-1])
    code = codes.reshape(q.shape).double()
    inside = q.clamp(low, high)
    step = torch.ones_like(q)
    if codes.is_floating_point():  # float8_e4m3fn: 3 fraction bits, subnormal below 2^-6
        step = torch.ldexp(step, (torch.frexp(inside.abs()).exponent - 1).clamp(min=-6) - 3)
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
    values = {
        name: (max if name in ("farthest", "roundoff") else sum)(getattr(p, name) for p in parts)
        for name in CodeErrors.__dataclass_fields__
    }
    return CodeErrors(**values)


# Quantisers: from numbers to integer or 8-bit float codes and back, bit for bit.
#
#     code = clamp(round(x / scale) + zero)        value = (code - zero) · scale
#
# Rounding is to nearest, ties to even. scale = max|x| / 127 (7 for int4, the largest number of an
# 8-bit float); all zeros: scale 0, codes 0. Asymmetric: scale = (max - min) / 255, zero =
# round(-128 - min / scale). Ascend's DynamicQuant and vLLM's kernels do so, and SmoothQuant (Xiao
# et al., arXiv 2211.10438). All is computed in the dtype of x.

CodeFormat = Literal["int8", "int4", "float8_e4m3fn"]
Granularity = Literal["tensor", "channel", "token", "group"]
_ENDS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}


class Quantizer(msgspec.Struct, frozen=True, kw_only=True):
    """Says how one kind of tensor is quantised."""

    format: CodeFormat = "int8"
    per: Granularity = "tensor"
    """What shares a scale: the whole tensor; a row, which is an output channel of a weight (N, K)
    and a token of activations (..., K); or ``group`` neighbours in a row."""
    group: int | None = None
    symmetric: bool = True
    """Without a zero point. 8-bit floats never have one."""

    @property
    def is_float(self) -> bool:
        return self.format not in _ENDS

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest code."""
        if self.is_float:
            most = format_named(self.format).max
            return -most, most
        return _ENDS[self.format]


def grouped(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """``x`` (..., K) as (..., K / group, group) where groups share a scale, else as it is.

    Raises UsageError where K is no multiple of the group.
    """
    if quantizer.per != "group":
        return x
    size = quantizer.group or x.shape[-1]
    if x.shape[-1] % size:
        power = x.shape[-1] & -x.shape[-1]
        raise UsageError(
            f"groups of {size} do not divide rows of {x.shape[-1]} numbers",
            hint=f"groups of {min(power, size)} do; or keep the module in floating point",
        )
    return x.reshape(*x.shape[:-1], -1, size)


def scales_of(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale, zero point) for ``x`` (..., K), in its dtype, in shapes that go with ``grouped(x)``.

    The zero point is None for symmetric quantisers. ``limits``: the least and the largest number,
    known from calibration, instead of those of ``x``.
    """
    import torch

    if limits is None:
        rows = grouped(x, quantizer)
        if quantizer.per == "tensor":
            least, most = (part.reshape((1,) * rows.ndim) for part in torch.aminmax(rows))
        else:
            least, most = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    else:
        least, most = limits
    least, most = least.clamp(max=0), most.clamp(min=0)  # 0 has a code
    low, high = quantizer.ends
    if not quantizer.symmetric and not quantizer.is_float:
        scale = (most - least) / (high - low)
        ratio = least / torch.where(scale == 0, 1.0, scale)
        return scale, (low - torch.round(ratio)).clamp(low, high)
    return torch.maximum(-least, most) / high, None


def codes_of(
    x: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """The codes of ``x`` in its own shape: int8 (int4 too) or the 8-bit float dtype.

    ``scale``, ``zero``: as ``scales_of`` gives them.
    """
    import torch

    rows, (low, high) = grouped(x, quantizer), quantizer.ends
    steps = torch.where(scale == 0, 1.0, scale)  # of nothing but zeros
    if quantizer.is_float:
        codes = (rows / steps).clamp(low, high).to(getattr(torch, quantizer.format))
        return codes.reshape(x.shape)
    codes = torch.round(rows / steps)
    codes = (codes if zero is None else codes + zero).clamp(low, high)
    return codes.to(torch.int8).reshape(x.shape)


def values_of(
    codes: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what the codes stand for, in the dtype of ``scale`` and the shape of ``codes``."""
    rows = grouped(codes, quantizer).to(scale.dtype)
    return ((rows if zero is None else rows - zero) * scale).reshape(codes.shape)
