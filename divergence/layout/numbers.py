"""Numbers as people read them: fixed digits, no surprises with nan, inf and zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["bar", "count", "decimal", "fixed", "shape_text", "share", "size", "times"]

BAR_WIDTH = 10
RATIO_DECADES = (-1, 3)
"""A ratio's bar spans 0.1 to 1000 floors."""
REL_L2_DECADES = (-8, 0)
"""Without a floor the bar spans a relative difference of 1e-8 to 1."""


def decimal(value: float | None) -> str:
    """Two significant digits: ``3.1e-04``, ``0``, ``nan``, ``-inf``; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return f"{value:g}"
    return "0" if value == 0 else f"{value:.1e}"


def fixed(value: float | None, digits: int = 3) -> str:
    """A plain number of moderate size: a margin in logits, a log-probability."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if math.isfinite(value) else f"{value:g}"


def times(value: float | None) -> str:
    """A ratio: ``<0.1x``, ``1.3x``, ``650x``, ``2.0e+05x``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return f"{value:g}"
    if value == 0:
        return "0x"
    if value < 0.05:
        return "<0.1x"
    if value >= 99950:
        return f"{value:.1e}x"
    return f"{value:.1f}x" if value < 99.95 else f"{value:.0f}x"


def share(value: float | None) -> str:
    """A share in two significant digits: ``100%``, ``0.41%``, ``1.3e-06``; a dash for None."""
    if value is None or not math.isfinite(value) or value < 9.95e-5:
        return decimal(value)
    percent = float(f"{100 * value:.1e}")
    return f"{percent:.{max(0, 1 - math.floor(math.log10(percent)))}f}%"


def bar(value: float | None, decades: tuple[int, int]) -> str:
    """Filled cells on a logarithmic scale; full for nan and inf, empty for 0 and None."""
    if value is None or value == 0:
        return ""
    low, high = decades
    if not math.isfinite(value):
        share = 1.0
    else:
        share = (math.log10(abs(value)) - low) / (high - low)
    return "█" * round(BAR_WIDTH * min(max(share, 0.0), 1.0))


def count(number: int, noun: str) -> str:
    """``1 site``, ``2 sites``, with thousands apart."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(num_bytes: float) -> str:
    """Bytes in binary units: ``13 B``, ``4.2 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def shape_text(shape: Sequence[int]) -> str:
    """``4x64``."""
    return "x".join(str(length) for length in shape) or "scalar"
