"""How much of what the reference recorded was compared, pass by pass, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import SideOrBoth

__all__ = ["Coverage", "PassCoverage", "Skipped"]


class PassCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one pass of the reference was compared.

    num_reference = num_compared + num_missing + num_skipped + num_empty + num_elsewhere.
    """

    pass_: str = msgspec.field(name="pass")
    """The name under which the pass is compared. It is ``anchored`` also where the candidate was
    anchored to the reference's free pass; ``num_reference`` then counts what the anchored pass
    should have recorded again."""
    what: Literal["tensors", "operators", "tokens"]
    """What is counted: ``tensors`` of modules, ``operators`` (their results and operands), or
    generated ``tokens``, whose pass is ``free``."""
    num_reference: int
    """How many the reference recorded."""
    num_compared: int
    """Measured against a partner."""
    num_missing: int = 0
    """The candidate has no partner."""
    num_skipped: int = 0
    """The candidate has a partner that cannot be compared: another shape, other positions or other
    tokens before it."""
    num_empty: int = 0
    """Without any element on both sides, so nothing could differ."""
    num_elsewhere: int = 0
    """Judged in another way, which ``elsewhere`` names."""
    num_extra: int = 0
    """Records of modules that only the candidate has, although the reference's sites would have
    recorded them. Not part of the sum above."""
    elsewhere: str | None = None
    """How those of ``num_elsewhere`` are judged: weights by their digests, inputs that the anchored
    pass puts in place, or a pass that the candidate repeats more closely."""
    reason: str | None = None
    """Why the first missing, skipped or extra one was not compared."""

    @property
    def share(self) -> float:
        """Compared over compared + missing + skipped + extra; 1 where nothing was to compare."""
        total = self.num_compared + self.num_missing + self.num_skipped + self.num_extra
        return self.num_compared / total if total else 1.0


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was not compared, and why. It never counts as a pass."""

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    reason: str
    side: SideOrBoth
    """The side that has the tensor."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was recorded was compared.

    The numbers count pairs of tensors. Operators and tokens are counted in ``passes`` alone, and in
    ``num_only_reference`` where the candidate lacks them.
    """

    num_compared: int
    num_only_reference: int
    """Recorded by the reference alone."""
    num_only_candidate: int
    """Recorded by the candidate alone."""
    num_skipped: int
    """Recorded by both, but not comparable."""
    unmatched: list[Skipped] = []
    """The tensors without a partner and the skipped ones, with the reason of each."""
    passes: list[PassCoverage] = []
    """For each pass: what the reference recorded, and what became of it."""
