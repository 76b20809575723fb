"""How much of what the reference recorded was compared, pass by pass, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import SideOrBoth

__all__ = ["Coverage", "PassCoverage", "Skipped"]


class PassCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """What the reference holds of one pass, and what became of each of it.

    ``what``: ``tensors`` (of modules), ``operators`` (their results and operands) or ``tokens``
    (generated ones; their pass is ``free``). ``pass``: under which name it is compared:
    ``anchored`` also where the reference's own pass is the free one that the candidate was
    anchored to; ``num_reference`` is then what the anchored pass should have shown again.

    num_reference = num_compared + num_missing + num_skipped + num_empty + num_elsewhere:

    ``num_compared``: measured against a partner. ``num_missing``: the candidate has none.
    ``num_skipped``: it has one that cannot be compared (shape, positions, other tokens before it).
    ``num_empty``: without any element on both sides, so that nothing could differ.
    ``num_elsewhere``: judged otherwise, as ``elsewhere`` says: weights by their digests, inputs
    that the anchored pass puts in place, a pass that the candidate repeats more closely.
    ``num_extra``, beside these: records of modules that only the candidate has although the
    reference's sites would have recorded them. ``reason``: of the first that is missing, skipped
    or extra.
    """

    pass_: str = msgspec.field(name="pass")
    what: Literal["tensors", "operators", "tokens"]
    num_reference: int
    num_compared: int
    num_missing: int = 0
    num_skipped: int = 0
    num_empty: int = 0
    num_elsewhere: int = 0
    num_extra: int = 0
    elsewhere: str | None = None
    reason: str | None = None

    @property
    def share(self) -> float:
        """Compared over compared + missing + skipped + extra; 1 where nothing was to compare."""
        total = self.num_compared + self.num_missing + self.num_skipped + self.num_extra
        return self.num_compared / total if total else 1.0


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that were not compared, and why; never counted as passes."""

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    reason: str
    side: SideOrBoth


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was recorded was compared. ``passes``: by pass, what the reference holds
    and what became of it; the other numbers are sums over pairs of tensors. Operators and tokens
    are in ``passes`` alone, and in ``num_only_reference`` where the candidate lacks them."""

    num_compared: int
    num_only_reference: int
    num_only_candidate: int
    num_skipped: int
    unmatched: list[Skipped] = []
    passes: list[PassCoverage] = []
