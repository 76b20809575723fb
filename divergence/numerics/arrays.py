"""Tensors as numpy holds them, those of formats that numpy lacks too.

numpy has no bfloat16 and no float8. An array of these has records of one field, the bits, which is
named after the format: ``np.dtype([("bfloat16", "<i2")])``. Slicing, joining and reshaping are
numpy's own then, and arithmetic on it is refused rather than wrong. ``wide`` gives the numbers that
it stands for, ``rounded`` the other way, and ``as_array`` and ``as_tensor`` go from and to torch
without a copy; torch is imported where a tensor is asked for.

Rounding is to nearest, ties to even, and goes by way of float32 to what is narrower, as torch's
does: a float64 is rounded twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from divergence.numerics.formats import FORMATS, Format, format_named, format_of

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor | np.ndarray"
"""What is measured: of either kind."""

_PIECE = 1 << 15
"""Elements that are widened in two steps at a time: they stay in a core's caches."""


@functools.cache
def array_dtype(form: Format) -> np.dtype:
    """numpy's dtype of a format, or one of records that are named after it."""
    if form.name == "bfloat16" or form.name.startswith("float8"):
        return np.dtype([(form.name, _bits_dtype(form))])
    return np.dtype(form.name)


def _bits_dtype(form: Format) -> str:
    return "<u1" if form.itemsize == 1 else f"<i{form.itemsize}"


def from_bytes(
    data: bytes | bytearray | memoryview, form: Format, shape: Sequence[int]
) -> np.ndarray:
    """The array that bytes stand for, little-endian and row-major: a view, if they are aligned."""
    dtype = array_dtype(form)
    if not len(data):
        return np.empty(shape, dtype)
    plain = np.frombuffer(data, _bits_dtype(form) if dtype.names else dtype)
    if not plain.flags.aligned:  # an unaligned writer or archive
        plain = plain.copy()
    return plain.view(dtype).reshape(shape)


def as_array(tensor: Tensor) -> np.ndarray:
    """The array of a tensor of any device: a view where that is possible. Arrays are themselves."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    form = format_of(tensor.dtype)
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    dtype = array_dtype(form)
    if dtype.names is None:
        return tensor.numpy()
    return tensor.view(torch.uint8 if form.itemsize == 1 else torch.int16).numpy().view(dtype)


def as_tensor(array: Tensor) -> torch.Tensor:
    """The tensor of an array: a view of it, unless nothing may be written there. Tensors are
    themselves."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    form = format_of(array.dtype)
    plain = bits_of(array) if array.dtype.names else array
    tensor = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
    return tensor.view(form.torch_dtype) if array.dtype.names else tensor


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bit patterns as signed integers of the numbers' width (uint8 for one byte, and bool)."""
    form = format_of(array.dtype)
    return array if form.kind == "bool" else array.view(_bits_dtype(form))


def joined(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Arrays of one dtype one after another. Bits are joined: numpy copies records one by one."""
    dtype = arrays[0].dtype
    if any(array.dtype != dtype for array in arrays) or dtype.names is None:
        return np.concatenate(arrays, axis)
    return np.concatenate([bits_of(array) for array in arrays], axis).view(dtype)


def wide(tensor: Tensor) -> np.ndarray:
    """The numbers in float64, or complex128: a view where that is the tensor's own."""
    array = as_array(tensor)
    form = format_of(array.dtype)
    with np.errstate(invalid="ignore"):  # a nan that signals
        if form.kind == "complex":
            return array.astype(np.complex128, copy=False)
        if not array.dtype.names and form.name != "float16":
            return array.astype(np.float64, copy=False)
        out = np.empty(array.shape)
        widen(bits_of(array), form, out)
    return out


def widen(bits: np.ndarray, form: Format, out: np.ndarray) -> None:
    """The numbers of bit patterns of bfloat16, float16 or a float8 into ``out`` (float32 or
    float64, contiguous), of their shape."""
    if out.dtype == np.float32:
        _widen_to_single(bits, form, out)
        return
    source, flat = bits.reshape(-1), out.reshape(-1)
    single = np.empty(min(_PIECE, len(flat)), np.float32)
    for start in range(0, len(flat), _PIECE):
        part = source[start : start + _PIECE]
        _widen_to_single(part, form, single[: len(part)])
        flat[start : start + _PIECE] = single[: len(part)]


def _widen_to_single(bits: np.ndarray, form: Format, out: np.ndarray) -> None:
    if form.itemsize == 1:
        np.take(_byte_values(form.name), bits, out=out, mode="clip")
        return
    words = out.view(np.int32)
    if form.name == "bfloat16":  # the upper half of a float32
        np.left_shift(bits, 16, out=words, dtype=np.int32)
        return
    # float16: sign, exponent and fraction where float32 has them, and the difference of the
    # exponents' biases, which is exact for subnormals too
    np.left_shift(bits, 13, out=words, dtype=np.int32)
    np.bitwise_and(words, np.int32(-0x70002000), out=words)
    np.multiply(out, np.float32(2.0**112), out=out)
    if np.bitwise_and(bits, 0x7C00).max(initial=0) == 0x7C00:
        special = np.bitwise_and(bits, 0x7C00) == 0x7C00
        words[special] |= 0x7F800000  # inf, and nan with what there is of a fraction


@functools.cache
def _byte_values(name: str) -> np.ndarray:
    """The float32 of each of the 256 patterns of a one-byte float."""
    form = FORMATS[name]
    patterns = np.arange(256)
    if not form.signed:  # float8_e8m0fnu: a bare exponent, and one nan
        return np.where(patterns < 255, np.ldexp(1.0, patterns - 127), np.nan).astype(np.float32)
    fraction = patterns & (2**form.mantissa_bits - 1)
    exponent = (patterns & 0x7F) >> form.mantissa_bits
    lowest = round(np.log2(form.smallest_normal))
    hidden = np.where(exponent > 0, 2.0**form.mantissa_bits, 0.0)
    values = np.ldexp(hidden + fraction, np.maximum(exponent, 1) - 1 + lowest - form.mantissa_bits)
    if form.name.endswith("fnuz"):
        values[0x80] = np.nan
    elif form.name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:  # float8_e5m2, which has infinities
        values[[0x7C, 0xFC]] = np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    signed: np.ndarray = np.where(patterns < 128, values, -values)
    return signed.astype(np.float32)


def rounded(tensor: Tensor, form: Format | str) -> np.ndarray:
    """The tensor in another real format. What is beyond it becomes inf, or nan where the format has
    none: one beyond its largest number either way."""
    form = format_named(form) if isinstance(form, str) else form
    array = as_array(tensor)
    if format_of(array.dtype) == form:
        return array
    dtype = array_dtype(form)
    with np.errstate(all="ignore"):
        if form.kind != "float" or form.itemsize >= 4:
            plain = array.dtype.names is None
            return (array if plain else wide(array)).astype(dtype)
        single = (array if array.dtype.names is None else wide(array)).astype(np.float32)
        if form.name == "float16":
            return single.astype(np.float16)
        if form.name == "bfloat16":
            words = single.view(np.int32)
            upper = (words + 0x7FFF + (words >> 16 & 1)) >> 16
            return np.where(np.isnan(single), 0x7FC0, upper).astype("<i2").view(dtype)
        return _rounded_to_bytes(single, form).view(dtype)


def _rounded_to_bytes(single: np.ndarray, form: Format) -> np.ndarray:
    """Codes of a one-byte float, uint8."""
    values = _byte_values(form.name).astype(np.float64)
    if not form.signed:
        ascending, codes = values[:255], np.arange(255)
        special, beyond = 0xFF, 0xFF
    else:
        codes = np.flatnonzero(np.isfinite(values[:128]))
        ascending = values[codes]
        special = 0x80 if form.name.endswith("fnuz") else 0x7F
        beyond = 0x7C if form.name == "float8_e5m2" else special
    # one more value beyond the largest, to which what is nearer than that is rounded
    step = ascending[-1] - ascending[-2] if form.signed else ascending[-1]
    top = ascending[-1] + step
    ascending, codes = np.append(ascending, top), np.append(codes, beyond)
    middles = (ascending[1:] + ascending[:-1]) / 2
    size = np.abs(single).astype(np.float64)
    if not form.signed:
        place = np.searchsorted(middles, size, side="right")  # a tie is the larger of two scales
    else:
        place = np.searchsorted(middles, size, side="left")
        place = place + ((middles[np.minimum(place, len(middles) - 1)] == size) & (place % 2 == 1))
    code = codes[np.minimum(place, len(codes) - 1)]
    negative = (
        np.signbit(single) & (code != special) if form.signed else np.zeros(single.shape, bool)
    )
    if form.name.endswith("fnuz"):
        negative &= code != 0
    code = np.where(negative, code | 0x80, code)
    return np.where(np.isnan(single), special, code).astype(np.uint8)
