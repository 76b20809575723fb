"""What compare says of operators: one result per operator and phase, and where it begins.

Typed data, like the rest of the Report; rendering needs nothing but this.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import Side, SideOrBoth

__all__ = [
    "CausalCheck",
    "OperatorResult",
    "OperatorsResult",
    "OtherInput",
    "OtherOperand",
    "Question",
    "RegionResult",
    "UnmatchedOperator",
]

Question = Literal[
    "typical", "row", "column", "slice", "codes", "nonfinite", "operands", "roundings"
]
"""By which an operator is beyond its limit."""

OperatorVerdict = Literal["fine", "candidate", "reference", "both", "differs", "unjudged"]


class OtherInput(msgspec.Struct, frozen=True, kw_only=True):
    """An argument that is not the same thing on both sides: another operator's result, another
    view of one, another weight, or a value from outside that differs.

    ``reference``, ``candidate``: where it comes from, in words; ``viewed``: the same origin, looked
    at differently. ``difference``: relative, of the values as the operator saw them; None where
    a side did not store them.
    """

    argument: str
    reference: str
    candidate: str
    viewed: bool = False
    difference: float | None = None


class OtherOperand(msgspec.Struct, frozen=True, kw_only=True):
    """A scalar argument, or a constant made outside the recorded modules, that the sides do not
    share: a fact, not a measurement.

    ``reference``, ``candidate``: the values, in words. ``is_value``: it enters the arithmetic as a
    number (an attention scale, an epsilon, a mask), and is no dim, size, flag or dtype.
    ``difference``: relative, of a number or of a constant's values; None for what is no number.
    """

    argument: str
    kind: Literal["scalar", "constant"]
    reference: str
    candidate: str
    is_value: bool = True
    difference: float | None = None


class RegionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Operators of both sides that compute one thing in different ways, compared as one step.

    ``text``: ``8 products and 7 additions in place of one product`` (the candidate's in place of
    the reference's). ``reference``, ``candidate``: the operators' paths in execution order, the
    last of which gives the common result (or, where ``argument`` is set, makes that argument of
    the operator ``consumer``, which both sides call). ``inputs``: what the reference's begin from.
    ``reference_times``, ``candidate_times``: what the side's own operators add to float64 on their
    own recorded inputs, over one rounding of the result, which an ideal product makes; None where
    it is not a region of products and additions in 16 bits, or an input was not recorded.
    """

    text: str
    reference: list[str]
    candidate: list[str]
    inputs: list[str] = []
    consumer: str | None = None
    argument: str | None = None
    reference_times: float | None = None
    candidate_times: float | None = None


class OperatorResult(msgspec.Struct, kw_only=True):
    """One operator of the reference and its partner, all forwards of a phase together.

    ``site``: of the reference's first result, without the port. ``match``: ``exact`` (same module,
    operator, number and shape), ``sequence`` (same place in the order of calls), ``value``
    (different operators that come to the same value: a fused kernel's end), ``dataflow`` (they
    are the same argument of matched operators, and do not hold the same value). ``kind``: class
    of the module that called it; ``source``: the Python line.

    Errors are relative L2 norms, median over rows (the last axis):
    ``reference_error`` err(a, R), ``candidate_error`` err(b, R); ``difference`` err(b, a), rms over
    rows, as most of them may be equal;
    ``floor``: the ideal store error ‖round(R) - R‖ / ‖R‖ and the rounding of the sum, together.
    ``w``: err(b, R) / err(a, R), each with the floor added in quadrature; ``w_entering``: the
    largest w among what feeds it. ``peak``: the largest error of one row, column or slice (a head,
    say) of one side over the other side's. ``ulp_share_reference``, ``ulp_share_candidate``: share
    of elements more than one ulp of their dtype from R. ``codes``: for integers, the share of
    elements that differ. ``fed_by``: what feeds it that only ``fed_by_side`` calls, in order.
    ``other_inputs``: arguments that the sides take from elsewhere; ``other_operands``: scalars and
    constants that differ, ``measurable``: whether the errors alone are beyond a limit where these
    are the reason. ``region``: where the sides have other operators there, all of them, of
    which this is the common result. ``limit_usage``: how much of the limit
    is used, ``leans``: by which side, ``why``: by which question. None where there was no truth, or
    nothing to measure.
    """

    site: str
    candidate_site: str
    match: Literal["exact", "sequence", "value", "dataflow"]
    operator: str
    candidate_operator: str
    kind: str | None = None
    block: str | None = None
    source: str | None = None
    phase: Literal["prefill", "decode"]
    order: int
    sample: int = 0
    step: int = 0
    shape: tuple[int, ...]
    reference_dtype: str
    candidate_dtype: str
    identical: bool = False
    difference: float | None = None
    reference_error: float | None = None
    candidate_error: float | None = None
    floor: float | None = None
    w: float | None = None
    w_entering: float | None = None
    peak: float | None = None
    ulp_share_reference: float | None = None
    ulp_share_candidate: float | None = None
    codes: float | None = None
    limit_usage: float = 0.0
    leans: Side | None = None
    fed_by: list[str] = []
    fed_by_side: Side | None = None
    why: Question | None = None
    verdict: OperatorVerdict = "unjudged"
    other_inputs: list[OtherInput] = []
    other_operands: list[OtherOperand] = []
    measurable: bool = True
    region: RegionResult | None = None


class UnmatchedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that only one side called (in a fused kernel's place, or beyond the other's)."""

    side: Side
    site: str
    operator: str
    source: str | None = None


class CausalCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The reference's result put in place of the candidate's at the onset: is the rest fine then?

    ``largest_limit_usage``: of any of the ``num_after`` operators after it, how much of its limit
    is still used; ``before``: the same without the substitution. ``holds``: neither one of these
    nor
    the block's output is beyond its limit; ``still``: what is.
    """

    site: str
    holds: bool
    num_after: int = 0
    before: float
    largest_limit_usage: float
    still: list[str] = []


class OperatorsResult(msgspec.Struct, kw_only=True):
    """All operators of the modules that were recorded.

    ``frame``: ``block`` (each side ran the block on its own, from equal inputs: errors are
    inherited within it) or ``operator`` (each operator alone on equal inputs). ``pass``:
    ``escalated`` where it was found in float32 alone. ``judged``: against
    a truth, or by the difference alone. ``onset``: the site where it begins, ``side`` whose.
    """

    frame: Literal["block", "operator"]
    pass_: str = msgspec.field(name="pass", default="anchored")
    judged: Literal["truth", "difference"]
    num_matched: int
    num_value_matches: int = 0
    onset: str | None = None
    side: SideOrBoth | None = None
    results: list[OperatorResult] = []
    unmatched: list[UnmatchedOperator] = []
    causal: CausalCheck | None = None
    notes: list[str] = []
