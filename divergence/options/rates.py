"""The stated rate of a link, as ``--link-rate`` takes it."""

from __future__ import annotations

import re

from divergence.errors import UsageError

__all__ = ["link_rate"]

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b|bits?)(?:/s|ps)", re.IGNORECASE)


def link_rate(text: str) -> float:
    """Bytes a second: of ``50GB/s``, ``25GiB/s``, ``400Gb/s``, ``100Mbps``. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"--link-rate {text!r} is no rate", hint="for example 50GB/s, 25GiB/s or 400Gbit/s"
        )
    power = " kmgt".index(match[2].lower() or " ")
    rate = float(match[1]) * float((1024 if match[3] else 1000) ** power)
    return rate if match[4] == "B" else rate / 8  # b and bit, as in 400Gb/s
