"""The Sensitivity: how small a fault would be seen, as typed data.

Rendering lives in divergence.report. The JSON form is stable and versioned.
"""

from __future__ import annotations

import msgspec

from divergence.comparison.result import RunSummary, strict_json
from divergence.comparison.results.findings import Verdict

__all__ = ["SENSITIVITY_SCHEMA_VERSION", "Confirmation", "FaultSize", "Sensitivity"]

SENSITIVITY_SCHEMA_VERSION = 1


class FaultSize(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest size of one fault that is seen at one block."""

    block: str
    fault: str
    size: float | None
    """A share of what ``Sensitivity.units`` names, found to within 9 %. None: the fault was not
    seen up to ``tried``, or was not tried and ``reason`` says why."""
    tried: float
    """The largest size that was tried; 0 where none was."""
    by: str | None = None
    """The evidence of the verdict at ``size``. Where ``size`` is None: the verdict at ``tried``."""
    escalated_size: float | None = None
    """The smallest size that is seen with the escalated pass, in which the same fault is planted
    too. None without such a pass."""
    escalated_by: str | None = None
    """The evidence of the verdict at ``escalated_size``."""
    reason: str | None = None
    """Why the fault was not tried here."""


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that was really planted, in a capture of its own."""

    block: str
    fault: str
    plant: str
    """The fault as `capture --plant` takes it."""
    size: float
    expected: bool
    """It should be seen."""
    seen: bool
    """It was seen, and in that block."""
    verdict: str
    """The verdict that `compare` gave."""
    summary: str


class Sensitivity(msgspec.Struct, kw_only=True):
    """The answer of `sensitivity`."""

    schema_version: int = SENSITIVITY_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    made_here: bool
    """The candidate was captured for this and has been deleted."""
    truth: str | None
    num_floor_runs: int
    dtype: str
    escalated: bool
    """The candidate has an escalated pass that is judged."""
    verdict: Verdict
    """The verdict of the pair before anything was planted."""
    num_blocks: int
    """Number of blocks in the runs."""
    num_prompt_tokens: int
    num_trials: int
    blocks: list[str]
    """The blocks that faults were planted in."""
    units: dict[str, str]
    """By fault: what its size is a share of."""
    phrases: dict[str, str]
    """By fault: the fault in words, with ``{size}`` in place of the number."""
    sizes: list[FaultSize]
    confirmations: list[Confirmation] = []
    notes: list[str] = []
    next: list[str] = []

    def of(self, fault: str) -> list[FaultSize]:
        """The sizes of one fault, block by block."""
        return [size for size in self.sizes if size.fault == fault]

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole answer as strict JSON; nan and inf become strings."""
        return strict_json(self, indent=indent)
