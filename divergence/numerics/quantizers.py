"""Quantisers: from numbers to integer or 8-bit float codes and back, bit for bit.

    code = clamp(round(x / scale) + zero)        value = (code - zero) · scale

Rounding is to nearest, ties to even. Who makes the codes differs in details that decide every tie,
so a quantiser has a *recipe*:

``plain``               scale = max|x| / 127 (7 for int4, the largest number of an 8-bit float). All
                        zeros: scale 0, codes 0. Asymmetric: scale = (max - min) / 255,
                        zero = round(-128 - min / scale). Ascend's DynamicQuant and vLLM's kernels
                        do so, and SmoothQuant (Xiao et al., arXiv 2211.10438).
``compressed-tensors``  symmetric integers: scale = max|x| / 127.5, the middle of -128 and 127; a
                        scale of 0 becomes the dtype's epsilon; the zero point is clamped, then
                        rounded; codes = round(clamp(x / scale + zero)).
``torchao``             as that, with scales of at least the dtype's smallest normal number, and
                        codes = clamp(round(x · (1 / scale)) + zero).

All is computed in the dtype of x, as those libraries do; give float32 for more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from divergence.errors import UsageError
from divergence.numerics.formats import format_named

if TYPE_CHECKING:
    import torch

__all__ = ["Quantizer", "codes_of", "grouped", "scales_of", "values_of"]

CodeFormat = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
Granularity = Literal["tensor", "channel", "token", "group"]
Recipe = Literal["plain", "compressed-tensors", "torchao"]
_ENDS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}


class Quantizer(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of tensor is quantised."""

    format: CodeFormat = "int8"
    per: Granularity = "tensor"
    """What shares a scale: the whole tensor; a row, which is an output channel of a weight (N, K)
    and a token of activations (..., K); or ``group`` neighbours in a row."""
    group: int | None = None
    symmetric: bool = True
    """Without a zero point. 8-bit floats never have one."""
    recipe: Recipe = "plain"

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

    def __str__(self) -> str:
        per = f"group of {self.group}" if self.per == "group" else self.per
        return f"{self.format}{'' if self.symmetric else ' with zero point'} per {per}"


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
        return _asymmetric(least, most, quantizer)
    size = torch.maximum(-least, most)
    divisor = high if quantizer.recipe == "plain" else (high - low) / 2
    return _at_least(size / divisor, quantizer), None


def _asymmetric(
    least: torch.Tensor, most: torch.Tensor, quantizer: Quantizer
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    low, high = quantizer.ends
    scale = (most - least) / (high - low)
    if quantizer.recipe == "compressed-tensors":
        zero = (low - least / scale).clamp(low, high)
        scale = _at_least(scale, quantizer)
        # an empty range: nan, which a cast to int8 makes 0
        return scale, torch.round(zero.nan_to_num(0.0))
    scale = _at_least(scale, quantizer)
    ratio = least / torch.where(scale == 0, 1.0, scale)
    return scale, (low - torch.round(ratio)).clamp(low, high)


def _at_least(scale: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    import torch

    if quantizer.recipe == "compressed-tensors":
        return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    if quantizer.recipe == "torchao" and not quantizer.is_float:
        return scale.clamp(min=torch.finfo(scale.dtype).smallest_normal)
    return scale


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
    if quantizer.recipe == "torchao":
        codes = torch.round(rows * (1.0 / steps))
        codes = (codes if zero is None else codes + zero).clamp(low, high)
    elif quantizer.recipe == "compressed-tensors":
        ratio = rows / steps
        codes = torch.round((ratio if zero is None else ratio + zero).clamp(low, high))
    else:
        codes = torch.round(rows / steps)
        codes = (codes if zero is None else codes + zero).clamp(low, high)
    return codes.to(torch.int8).reshape(x.shape)


def values_of(
    codes: torch.Tensor,
    quantizer: Quantizer,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the codes stand for, in the dtype of ``scale`` and the shape of ``codes``."""
    rows = grouped(codes, quantizer).to(scale.dtype)
    return ((rows if zero is None else rows - zero) * scale).reshape(codes.shape)
