"""Number formats by name: what a dtype can represent, without importing torch.

A run on disk names its dtypes in text, and reading one must not cost torch's
import; so the table below is constants, and ``Format.torch_dtype`` looks torch up
only when asked. Constants follow IEEE 754-2019 (binary16/32/64), the bfloat16
layout (8-bit significand, binary32's exponent), "FP8 Formats for Deep Learning"
(arXiv 2209.05433) for e4m3fn and e5m2, arXiv 2206.02915 for the fnuz pair (no -0,
no inf, one nan at 0x80, exponent bias one higher), and the OCP Microscaling
specification v1.0 for e8m0fnu (a bare exponent: no sign, no zero).

What it refuses: sub-byte and quantised dtypes, which hold no number per element.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Literal

import msgspec

from divergence.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

FormatKind = Literal["float", "int", "bool", "complex"]


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One storage format. For complex formats every number is that of one component.

    ``unit_roundoff`` u = 2^-(mantissa_bits + 1): largest relative error of rounding to
    nearest in the normal range; 0 for ints and bool. ``mantissa_bits``: explicit fraction
    bits (ints: value bits without the sign). ``smallest_normal``, ``smallest_subnormal``
    and ``max`` are finite and positive (ints: 1, 1 and the largest value).
    """

    name: str
    kind: FormatKind
    itemsize: int
    mantissa_bits: int
    unit_roundoff: float
    smallest_normal: float
    smallest_subnormal: float
    max: float
    signed: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype. Raises UsageError where this torch is too old to have it."""
        import torch

        dtype: torch.dtype | None = getattr(torch, self.name, None)
        if dtype is None:
            raise UsageError(
                f"torch {torch.__version__} has no dtype {self.name}",
                hint="install a newer torch, or leave tensors of this dtype out",
            )
        return dtype


_INTEGERS = (
    ("bool", 1, 1),
    ("uint8", 1, 8),
    ("int8", 1, 7),
    ("uint16", 2, 16),
    ("int16", 2, 15),
    ("uint32", 4, 32),
    ("int32", 4, 31),
    ("uint64", 8, 64),
    ("int64", 8, 63),
)
"""(name, bytes, value bits)."""
_FLOATS: tuple[tuple[str, FormatKind, int, int, int, float], ...] = (
    ("float8_e8m0fnu", "float", 1, 0, -127, 2.0**127),
    ("float8_e5m2", "float", 1, 2, -14, 57344.0),
    ("float8_e5m2fnuz", "float", 1, 2, -15, 57344.0),
    ("float8_e4m3fn", "float", 1, 3, -6, 448.0),
    ("float8_e4m3fnuz", "float", 1, 3, -7, 240.0),
    ("bfloat16", "float", 2, 7, -126, (2 - 2.0**-7) * 2.0**127),
    ("float16", "float", 2, 10, -14, 65504.0),
    ("float32", "float", 4, 23, -126, (2 - 2.0**-23) * 2.0**127),
    ("float64", "float", 8, 52, -1022, (2 - 2.0**-52) * 2.0**1023),
    ("complex64", "complex", 8, 23, -126, (2 - 2.0**-23) * 2.0**127),
    ("complex128", "complex", 16, 52, -1022, (2 - 2.0**-52) * 2.0**1023),
)
"""(name, kind, bytes, fraction bits, exponent of the smallest normal number, largest)."""

FORMATS: dict[str, Format] = {
    name: Format(
        name=name,
        kind="bool" if name == "bool" else "int",
        itemsize=itemsize,
        mantissa_bits=bits,
        unit_roundoff=0.0,
        smallest_normal=1.0,
        smallest_subnormal=1.0,
        max=float(2**bits - 1),
        signed=name.startswith("int"),
    )
    for name, itemsize, bits in _INTEGERS
} | {
    name: Format(
        name=name,
        kind=kind,
        itemsize=itemsize,
        mantissa_bits=bits,
        unit_roundoff=2.0 ** -(bits + 1),
        smallest_normal=2.0**exponent,
        smallest_subnormal=2.0**exponent * 2.0**-bits,
        max=largest,
        signed=bits > 0,
    )
    for name, kind, itemsize, bits, exponent, largest in _FLOATS
}

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "f8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "f8_e5m2": "float8_e5m2",
    "e5m2": "float8_e5m2",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
    "e8m0fnu": "float8_e8m0fnu",
    "f8_e8m0": "float8_e8m0fnu",
    "char": "int8",
    "byte": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "cfloat": "complex64",
    "c64": "complex64",
    "cdouble": "complex128",
    "c128": "complex128",
}


@functools.lru_cache(maxsize=256)
def format_named(name: str) -> Format:
    """The format called ``name``: torch's, safetensors' or a usual short name, any case,
    with or without ``torch.``. Raises UsageError with near names."""
    text = name.strip().lower().removeprefix("torch.")
    form = FORMATS.get(_ALIASES.get(text, text))
    if form is None:
        near = difflib.get_close_matches(text, [*FORMATS, *_ALIASES], n=3, cutoff=0.5)
        raise UsageError(
            f"no number format is called {name!r}",
            hint=f"did you mean {', '.join(near)}?" if near else f"one of {', '.join(FORMATS)}",
        )
    return form


def format_of(dtype: torch.dtype | np.dtype) -> Format:
    """The format of a torch dtype, or of an array's (numerics.arrays). Raises UsageError for dtypes
    that hold no plain number per element (quantised, packed sub-byte)."""
    records = getattr(dtype, "names", None)
    form = FORMATS.get(records[0] if records else str(dtype).removeprefix("torch."))
    if form is None:
        raise UsageError(
            f"tensors of dtype {dtype} cannot be compared number by number",
            hint="dequantise them first, or leave this site out",
        )
    return form


def is_float(form: Format) -> bool:
    """Is ``form`` a real floating-point format (ulp distances exist in it)?"""
    return form.kind == "float"
