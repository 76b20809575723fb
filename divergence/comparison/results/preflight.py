"""What was checked before any number, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["PreflightLine"]


class PreflightLine(msgspec.Struct, frozen=True, kw_only=True):
    """One thing checked before any number. ``detail``: e.g. the first parameters that differ."""

    check: str
    status: Literal["same", "differs", "blocking"]
    reference: str
    candidate: str
    detail: str | None = None
