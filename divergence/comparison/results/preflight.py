"""What was checked before any number, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["PreflightLine", "PreflightStatus"]

PreflightStatus = Literal["same", "differs", "blocking"]


class PreflightLine(msgspec.Struct, frozen=True, kw_only=True):
    """One setting or fact of the two runs that is checked before any number."""

    check: str
    status: PreflightStatus
    reference: str
    candidate: str
    detail: str | None = None
    """What differs, for example the first parameters."""
