"""Facts about a machine's arithmetic, as a manifest holds them.

A fact is one probe's answer: in words, and where it is a number, as numbers. ``verified`` says that
the answer was checked against the machine itself; a comparison builds on no other.
"""

from __future__ import annotations

import msgspec

__all__ = ["ArithmeticFact"]


class ArithmeticFact(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One thing that a probe found.

    ``name``: ``probe: what it looked at``, shape and dtype included: facts of equal names compare.
    ``value``: the answer in words; ``unit`` and ``numbers`` where there are numbers. ``digest``:
    equal for equal answers where the words do not hold all of it (a tree, a table of outputs).
    ``evidence``: how it was checked, or why there is no answer.
    """

    name: str
    value: str
    verified: bool
    unit: str | None = None
    numbers: dict[str, float] = {}
    digest: str | None = None
    evidence: str | None = None

    @property
    def probe(self) -> str:
        """``order`` of ``order: sum …``."""
        return self.name.partition(": ")[0]

    @property
    def subject(self) -> str:
        """What follows the probe's name."""
        return self.name.partition(": ")[2]

    @property
    def answer(self) -> tuple[str, str | None]:
        """Equal for equal findings."""
        return (self.value, self.digest)
