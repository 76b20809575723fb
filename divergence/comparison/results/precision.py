"""What the precision audit says: in which dtype each part of a model really ran, on each side.

Typed data, like the rest of the Report; rendering needs nothing but this.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from divergence.words import SideOrBoth

__all__ = ["PARTS", "AuditFinding", "AuditResult", "AuditRow", "AuditedPlace", "Part"]

Part = Literal[
    "norm statistics",
    "norm weight",
    "softmax",
    "attention scores",
    "router",
    "router product",
    "rotary",
    "rotary table",
    "residual add",
    "matrix product",
    "activation",
    "kv cache",
    "logits",
]

PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which they are shown: what is most often wrong first."""


class AuditedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One part at one place of the model.

    ``module``: path of what called it, ``kind``: its class, where the run tells. ``site``: the
    operator that ``computed`` is told of, without the port; ``operators``: all that belong to the
    part there; ``near``: those beside, where a fault of the part may first be seen. ``source``:
    the Python line. ``operands``, ``result``: dtypes that went in and came out. ``computed``: the
    narrowest dtype that a value was rounded to on the way; None where one kernel did it all
    (``kernel``: its name), whose inside no record shows. ``accumulates``: ``computed`` is of a
    kernel that adds up inside, in a dtype that no record shows. ``expected``: any of these is
    enough, ``expected_by`` whose word that is, ``own``: of the model's own code (else common
    practice). ``below``: narrower than all of them.
    """

    part: Part
    module: str
    kind: str | None = None
    site: str
    operators: list[str]
    near: list[str] = []
    source: str | None = None
    operands: list[str]
    result: str
    computed: str | None
    kernel: str | None = None
    accumulates: bool = False
    expected: list[str] = []
    expected_by: str = ""
    own: bool = False
    below: bool = False
    num_calls: int = 1


class AuditRow(msgspec.Struct, kw_only=True):
    """One part, both sides. ``reference``, ``candidate``: the dtypes it was computed in, the most
    frequent first, or ``inside KERNEL``; empty where the side has no such part, None where it
    was not audited. ``below``: who is narrower than expected (``own`` as in AuditedPlace);
    ``differs``: the sides computed the same module's part in different dtypes.
    """

    part: Part
    reference: list[str] | None = None
    candidate: list[str] | None = None
    expected: list[str] = []
    expected_by: str = ""
    own: bool = False
    below: SideOrBoth | None = None
    differs: bool = False
    num_places: int = 0


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence: who computed what in which dtype, and what was expected. ``operators``: of either
    side, where it would be seen first."""

    part: Part
    text: str
    operators: list[str] = []


class AuditResult(msgspec.Struct, kw_only=True):
    """The audit of one run or of two. None for a side without operators, or computed in float64."""

    rows: list[AuditRow] = []
    findings: list[AuditFinding] = []
    reference: list[AuditedPlace] | None = None
    candidate: list[AuditedPlace] | None = None
    notes: list[str] = []
