"""Figures in sentences."""

from __future__ import annotations

__all__ = ["figure"]

_LONG = 9999.5


def figure(value: float, digits: int = 1) -> str:
    """``6.8``, ``1204.6``; ``4.0e+08`` where more digits would say nothing."""
    return f"{value:.{digits}f}" if abs(value) < _LONG or value != value else f"{value:.1e}"
