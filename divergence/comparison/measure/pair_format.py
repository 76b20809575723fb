"""The number formats that a pair is judged in: what it is stored in, and what was computed in."""

from __future__ import annotations

from divergence.comparison.align.pieces import Pair
from divergence.numerics.formats import Format, format_named
from divergence.run.schema.manifest import Manifest

__all__ = ["storage_format", "work_format"]


def storage_format(pair: Pair) -> Format:
    """The coarser of the two formats that a pair is stored in."""
    forms = [format_named(piece.record.dtype) for piece in (pair.reference, pair.candidate)]
    return max(forms, key=lambda form: form.unit_roundoff)


def work_format(*manifests: Manifest) -> Format:
    """The coarser of the formats that the models compute in; 8-bit weights are widened first."""
    forms = [format_named(manifest.model.dtype) for manifest in manifests]
    forms = [form for form in forms if form.itemsize >= 2] or [format_named("float32")]
    return max(forms, key=lambda form: form.unit_roundoff)
