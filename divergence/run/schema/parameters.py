"""What a manifest has of each parameter beside its digest: enough to say how two of them that are
not equal belong together, without the weights."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from divergence.run.schema.record import Count

__all__ = ["NUM_SUMS", "ParameterNote", "ValuesForm"]

ValuesForm = Literal["bfloat16", "float16", "float32", "float64"]
NUM_SUMS = 4
"""Sums of each of three kinds in ``ParameterNote.sums``."""


class ParameterNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One floating-point parameter or buffer."""

    dtype: str
    shape: list[Count]
    form: ValuesForm
    """The narrowest format that holds its values exactly, bfloat16 before float16."""
    values: str
    """xxh3-128 of the values in that format: equal for equal values, whatever their dtype."""
    rounded: dict[ValuesForm, str] = {}
    """By narrower format: xxh3-128 of the values rounded to it."""
    norm: float
    sums: Annotated[list[float], msgspec.Meta(min_length=3 * NUM_SUMS, max_length=3 * NUM_SUMS)]
    """Sums with signs that are the same on every machine: four by column, four by row, four by
    both. Those by column are the same for any order of rows, and the other way round."""
    levels: Count | None = None
    """Its first numbers are whole multiples of one step, up to so many: it was quantised."""
