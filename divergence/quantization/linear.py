"""Linear layers that follow a scheme, in exact integers where the scheme has integers.

Both sides quantised to integers with one scale a row (or tensor): y = s_x s_w Σ_k (x_k - z_x)(w_k -
z_w), the sum exact in every float32 machine: products of codes are whole numbers, and K is taken in
pieces whose sums stay below 2^24, which are then added in int64. No kernel for int8 is asked for,
and none of its faults gets in. In float64, as a truth computes, all of it is exact but the scales.

Otherwise the codes' values are multiplied: in float32 where activations are quantised (8-bit
floats, groups), in the model's dtype where weights alone are.

Weights are quantised once, when the layer is made, from the numbers as loaded, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from divergence.numerics.quantizers import codes_of, grouped, scales_of, values_of
from divergence.quantization.scheme import Scheme

__all__ = [
    "Limits",
    "QuantizedWeight",
    "StoredWeight",
    "exact_product",
    "is_transposed",
    "put_in",
    "take_out",
]

_EXACT = 1 << 24
"""Whole numbers up to here are float32 numbers."""

Limits = tuple[float, float]
"""The least and the largest activation that enters a layer, from calibration."""


def exact_product(x: torch.Tensor, weight: torch.Tensor, *, most: int) -> torch.Tensor:
    """Σ_k x_mk w_nk of whole numbers, float32 (..., K) and (N, K), with |x|·|w| <= ``most``:
    exactly, then rounded once to float32."""
    piece = max(1, _EXACT // most)
    if x.shape[-1] <= piece:
        return nn.functional.linear(x, weight)
    total: torch.Tensor | None = None
    for part, other in zip(x.split(piece, dim=-1), weight.split(piece, dim=-1), strict=True):
        product = nn.functional.linear(part, other).to(torch.int64)
        total = product if total is None else total + product
    assert total is not None
    return total.to(torch.float32)


Watch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(codes less their zero point, what is recorded of them) → other codes, or None."""


class StoredWeight(Protocol):
    """What stands in place of a weight (N, K)."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) → (..., N), in the dtype of ``x``."""


Weights = Mapping[str, Sequence[StoredWeight]]
"""By parameter: its matrices, one or several stacked."""


class QuantizedWeight:
    """A weight (N, K) as codes, and the product of activations with it."""

    def __init__(
        self, weight: torch.Tensor, scheme: Scheme, *,
        smooth: torch.Tensor | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """``smooth``: (K,) what inputs are divided by and weights multiplied with."""
        self.scheme, self.smooth, self.limits = scheme, smooth, limits
        self.watch: Watch | None = None
        """Told of the codes of each input, and may give others to go on with."""
        assert scheme.weights is not None
        wide = weight.detach().float()
        if smooth is not None:
            wide = wide * smooth
        self.scale, self.zero = scales_of(wide, scheme.weights)
        self.codes = codes_of(wide, scheme.weights, self.scale, self.zero)

    def values(self) -> torch.Tensor:
        """What its codes stand for, float32 (N, K)."""
        assert self.scheme.weights is not None
        return values_of(self.codes, self.scheme.weights, self.scale, self.zero)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) → (..., N), in the dtype of ``x``."""
        scheme, dtype = self.scheme, x.dtype
        wide = x.float() if self.smooth is None else x.float() / self.smooth
        if scheme.activations is None:
            return nn.functional.linear(wide.to(dtype), self.values().to(dtype), bias)
        scale, zero = self._scales(wide)
        codes = _less(codes_of(wide, scheme.activations, scale, zero), zero)
        if self.watch is not None:
            told = codes
            if wide.dtype == torch.float64:  # before rounding: how near is a tie?
                steps = torch.where(scale == 0, 1.0, scale)
                told = grouped(wide, scheme.activations) / steps
                if zero is not None:  # the range ends where it puts it
                    low, high = scheme.activations.ends
                    told = told.clamp(low - zero, high - zero)
                told = told.reshape(wide.shape)
            given = self.watch(codes, told)
            codes = codes if given is None else given.to(codes)
        if self._is_whole():
            weights = _less(self.codes, self.zero).float()
            out = exact_product(codes.float(), weights, most=_most(scheme))
            out = out * scale * self.scale.squeeze(-1)
        else:
            values = values_of(codes, scheme.activations, scale)
            out = nn.functional.linear(values, self.values())
        if bias is not None:
            out = out + bias.float()
        return out.to(dtype)

    def _scales(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.scheme.activations is not None
        if not self.scheme.static:
            return scales_of(wide, self.scheme.activations)
        assert self.limits is not None
        shape = (1,) * wide.ndim
        least, most = (torch.full(shape, limit, device=wide.device) for limit in self.limits)
        return scales_of(wide, self.scheme.activations, limits=(least, most))

    def _is_whole(self) -> bool:
        """Whole numbers on both sides, and one scale a row?"""
        return all(
            quantizer is not None and not quantizer.is_float and quantizer.per != "group"
            for quantizer in (self.scheme.weights, self.scheme.activations)
        )


def _less(codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Codes without their zero point: a choice of its own, which would move those of a row."""
    return codes if zero is None else (codes.to(torch.int16) - zero).to(torch.int16)


def _most(scheme: Scheme) -> int:
    """The largest product of two codes, zero points taken off."""
    sizes = []
    for quantizer in (scheme.weights, scheme.activations):
        assert quantizer is not None
        low, high = quantizer.ends
        sizes.append(int(-low if quantizer.symmetric else high - low))
    return sizes[0] * sizes[1]


class _InPlace(TorchFunctionMode):
    """Products with some weights, wherever a module's own forward makes them."""

    def __init__(self, owner: nn.Module, weights: Weights) -> None:
        super().__init__()
        self._table = {}
        for name, quantized in weights.items():
            parameter = owner._parameters[name]
            assert parameter is not None
            self._table[parameter.untyped_storage().data_ptr()] = parameter, quantized

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) >= 2:
            weight = args[1]
            known = self._table.get(weight.untyped_storage().data_ptr())
            if known is not None and weight.shape == known[0].shape[-2:]:
                parameter, quantized = known
                number = (weight.storage_offset() - parameter.storage_offset()) // weight.numel()
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return quantized[number].product(args[0], bias)
        return func(*args, **kwargs)


def put_in(module: nn.Module, weights: Weights) -> None:
    """Make a module's own forward multiply with ``weights``.

    Its class becomes one of the name ``Quantized...``; parameters, hooks and place stay.
    ``take_out`` undoes it.
    """
    take_out(module)
    module.__dict__["_quantized"] = weights
    kind: Any = type(module)
    module.__class__ = _class_for(kind)


def watchable(module: nn.Module) -> QuantizedWeight | None:
    """The matrix of a layer whose input becomes codes; None for any other module."""
    held = module.__dict__.get("_quantized", {}).get("weight", ())
    weight = held[0] if len(held) == 1 else None
    quantises = isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None
    return weight if quantises else None


def take_out(module: nn.Module) -> None:
    """Undo ``put_in``, where it was done."""
    if module.__dict__.pop("_quantized", None) is not None:
        module.__class__ = type(module).__mro__[1]


@functools.cache
def _class_for(kind: Any) -> Any:
    plain = issubclass(kind, nn.Linear) or is_transposed(kind)
    return type(f"Quantized{kind.__name__}", (kind,), {
        "forward": _linear_forward if plain else _own_forward,
    })  # fmt: skip


def is_transposed(kind: type) -> bool:
    """Does this layer of transformers hold its weight as (K, N)?"""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self._quantized["weight"][0].product(input, self.bias)
    return out


def _own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _InPlace(self, self._quantized):
        return super(type(self), self).forward(*args, **kwargs)
