"""The Sensitivity: how small a fault would be seen, as typed data.

Rendering lives in divergence.report. The JSON form is stable and versioned.
"""

from __future__ import annotations

import msgspec

from divergence.comparison.result import RunSummary, Verdict, strict_json

__all__ = ["SENSITIVITY_SCHEMA_VERSION", "Confirmation", "FaultSize", "Sensitivity"]

SENSITIVITY_SCHEMA_VERSION = 1


class FaultSize(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest size of one fault that is seen at one block.

    ``size``: a share, see ``Sensitivity.units``; found to 9 %. None: not seen up to ``tried``, or,
    where ``reason`` says so, not tried. ``by``: the evidence of the verdict at that size; where
    there is none, the verdict at ``tried``.
    ``escalated_size``: the same with the escalated pass, in which the same fault is planted too;
    None without such a pass.
    """

    block: str
    fault: str
    size: float | None
    tried: float
    by: str | None = None
    escalated_size: float | None = None
    escalated_by: str | None = None
    reason: str | None = None


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """One fault planted for real, in a capture of its own. ``expected``: whether it should be
    seen; ``seen``: whether it was, in that block; ``verdict``: what compare said."""

    block: str
    fault: str
    plant: str
    size: float
    expected: bool
    seen: bool
    verdict: str
    summary: str


class Sensitivity(msgspec.Struct, kw_only=True):
    """The answer of `sensitivity`.

    ``verdict``: of the pair before anything was planted. ``made_here``: the candidate was captured
    for this and is gone. ``escalated``: the candidate has an escalated pass that is judged.
    ``units``: what a fault's size is a share of; ``phrases``: the fault in words, ``{size}`` in
    it; both by fault. ``num_blocks``: all that the runs hold, of which ``blocks`` were planted.
    """

    schema_version: int = SENSITIVITY_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    made_here: bool
    truth: str | None
    num_floor_runs: int
    dtype: str
    escalated: bool
    verdict: Verdict
    num_blocks: int
    num_prompt_tokens: int
    num_trials: int
    blocks: list[str]
    units: dict[str, str]
    phrases: dict[str, str]
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
