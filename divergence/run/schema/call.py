"""A call: one operator, as it was run, with everything that running it again alone needs.

A call stands on the record of the operator's first result, ``PATH/OPERATOR[#CALL]:out``;
its other results are the records ``:out.1``, ``:out.2`` ... of the same operator. ``arguments``
go by the names of the operator's schema. Each is plain JSON, but for objects of one key:

    {"tensor": 2}            the operand of that number in ``operands``
    {"dtype": "float32"}     also "device", "layout", "memory_format"
    {"float": "-inf"}        a number that JSON has no word for: "nan", "inf", "-inf"
    {"complex": [re, im]}

An operand's value is a record of the same forward (``site``: a result of another operator, an
input of the module, or a record of its own, ``PATH/OPERATOR[#CALL]:in.NAME``), or a weight of
the model, by name and digest, which has a record only on request. ``origin`` and ``via`` tell
where the value comes from: the site whose memory it lies in, and the views taken of that.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = ["Call", "Operand", "operand_indices"]

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_SAID = "plain JSON, or an object of one key that stands for what JSON has no word for"
Json = Annotated[object, msgspec.Meta(extra_json_schema={"description": _SAID})]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Operand(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One tensor argument of a call."""

    site: str | None = None
    """The record that holds the value. None for a weight without a record."""
    weight: str | None = None
    """Name of the weight that the operand is, or is a view of."""
    xxh3: _Digest | None = None
    """Digest of the whole weight's bytes. The operand is that weight viewed with ``shape`` and
    ``stride`` from element ``offset`` on."""
    shape: tuple[_Size, ...]
    dtype: str
    stride: tuple[_Size, ...] | None = None
    """In elements; set where the tensor was not contiguous. Kernels are chosen by layout."""
    misalignment_bytes: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    """How far beyond a multiple of 64 bytes the first element lay. Vector kernels begin there, so
    the order of their additions depends on it: a float32 matrix-vector product gives four results
    by the weight's address (benchmarks/alignment.py). Weights that are mapped from a safetensors
    file are not aligned."""
    offset: _Size = 0
    """First element of the view, in elements."""
    origin: str | None = None
    """The site whose memory the value lies in."""
    via: tuple[str, ...] = ()
    """The views that were taken of the origin, in order."""


class Call(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One operator as it was run, with its arguments."""

    operator: str
    """torch's name with its overload (``aten.mm.default``), or a suite's name."""
    arguments: dict[str, Json]
    operands: tuple[Operand, ...] = ()
    source: str | None = None
    """File name, line and function of the Python code that called it."""
    note: str | None = None
    """Why running it again cannot give the same result (``draws random numbers``)."""


def operand_indices(call: Call, name: str) -> list[int]:
    """Numbers of the operands in the argument ``name``, in order; empty for a scalar."""
    found: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and set(value) == {"tensor"}:
            found.append(value["tensor"])
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(call.arguments.get(name))
    return found
