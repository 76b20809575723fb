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
    """One part (such as a softmax) at one place of the model: the dtypes it really ran in."""

    part: Part
    module: str
    """Path of the module that called it."""
    kind: str | None = None
    """Class of that module, where the run records it."""
    site: str
    """The operator that ``computed`` describes, without the port."""
    operators: list[str]
    """All operators that belong to the part here."""
    near: list[str] = []
    """Operators next to them, where a fault of the part may first be seen."""
    source: str | None = None
    """The Python line."""
    operands: list[str]
    """Dtypes that went in."""
    result: str
    """Dtype that came out."""
    computed: str | None
    """The narrowest dtype that a value was rounded to on the way. None where one kernel did all of
    it and no record shows its inside."""
    kernel: str | None = None
    """Name of that kernel."""
    accumulates: bool = False
    """``computed`` belongs to a kernel that adds up inside, in a dtype that no record shows."""
    expected: list[str] = []
    """The dtypes that are wide enough; any one of them will do."""
    expected_by: str = ""
    """The source of that expectation."""
    own: bool = False
    """The expectation comes from the model's own code; otherwise it is common practice."""
    below: bool = False
    """``computed`` is narrower than all expected dtypes."""
    num_calls: int = 1


class AuditRow(msgspec.Struct, kw_only=True):
    """One part on both sides."""

    part: Part
    reference: list[str] | None = None
    """The dtypes it was computed in, the most frequent first, or ``inside KERNEL``. Empty where the
    side has no such part; None where the side was not audited."""
    candidate: list[str] | None = None
    """The same for the candidate."""
    expected: list[str] = []
    expected_by: str = ""
    own: bool = False
    """The expectation comes from the model's own code; otherwise it is common practice."""
    below: SideOrBoth | None = None
    """The side that is narrower than expected."""
    differs: bool = False
    """The sides computed the same module's part in different dtypes."""
    num_places: int = 0


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the audit found wrong."""

    part: Part
    text: str
    """A sentence: who computed what in which dtype, and what was expected."""
    operators: list[str] = []
    """Operators of either side where it would be seen first."""


class AuditResult(msgspec.Struct, kw_only=True):
    """The audit of one run or of two."""

    rows: list[AuditRow] = []
    findings: list[AuditFinding] = []
    reference: list[AuditedPlace] | None = None
    """The reference's places. None if it recorded no operators, or computed in float64."""
    candidate: list[AuditedPlace] | None = None
    """The same for the candidate."""
    notes: list[str] = []
