"""Why an operator is not run again. Never an error: what is skipped is counted and shown."""

from __future__ import annotations

__all__ = ["Refusal", "Unsafe"]


class Refusal(Exception):
    """``str(refusal)`` is the reason under which the call is counted: it names no site, so that
    calls of one reason are counted together. ``detail``: what is particular to this call."""

    def __init__(self, reason: str, *, detail: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Unsafe(Refusal):
    """Running it could reach beyond what it is given: not here, and in no script."""
