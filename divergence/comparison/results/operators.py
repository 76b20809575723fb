"""What compare says of operators: one result per operator and phase, and where it begins; and the
precision audit: in which dtype each part of a model really ran, on each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import msgspec

from divergence.facts import Fact, Worded, fact, sentence
from divergence.words import Side, SideOrBoth

__all__ = [
    "INSIDE", "PARTS", "AuditFinding", "AuditResult", "AuditRow", "AuditedPlace", "CausalCheck",
    "OperatorResult", "OperatorsResult", "OtherInput", "OtherMask", "OtherOperand", "Part",
    "Question", "RegionResult", "UnmatchedOperator", "called_at",
]  # fmt: skip

Question = Literal[
    "typical", "row", "column", "slice", "codes", "nonfinite", "operands", "roundings", "masked"
]
"""By which an operator is beyond its limit."""

OperatorVerdict = Literal["fine", "candidate", "reference", "both", "differs", "unjudged"]


class OtherInput(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """An argument that comes from elsewhere on the two sides: another operator's result, another
    view of one, another weight, or an outside value that differs."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "reference": "origin_in_reference", "candidate": "origin_in_candidate",
    }  # fmt: skip

    argument: str
    origin_in_reference: Fact
    """Where the reference's value comes from."""
    origin_in_candidate: Fact
    """Where the candidate's value comes from."""
    reference: str = ""
    """Where the reference's value comes from, in words."""
    candidate: str = ""
    """Where the candidate's value comes from, in words."""
    viewed: bool = False
    """The origin is the same, but it is viewed in another way (another shape or stride)."""
    difference: float | None = None
    """Relative difference of the values that the operator saw. None where a side did not store
    them."""


class OtherMask(msgspec.Struct, frozen=True, kw_only=True):
    """Scores that one side alone hides: the sides' masks are not the same."""

    num_by_reference: int
    """How many the reference hides, and the candidate does not."""
    num_by_candidate: int
    first: tuple[int, ...]
    """Index of the first of them in the result; the last two numbers are query and key."""
    of_tokens: bool
    """Query and key are tokens' positions: a prefill without pads."""


class OtherOperand(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """A scalar argument, or a constant made outside the recorded modules, that differs between the
    sides. This is a fact about the calls, not a measurement."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "reference": "reference_value", "candidate": "candidate_value",
    }  # fmt: skip

    argument: str
    site: str | None = None
    """Of a region: the reference's call. None where it is the operator of the result itself."""
    kind: Literal["scalar", "constant"]
    reference_value: Fact
    candidate_value: Fact
    reference: str = ""
    """The reference's value, in words."""
    candidate: str = ""
    """The candidate's value, in words."""
    is_value: bool = True
    """The argument enters the arithmetic as a number (an attention scale, an epsilon, a mask).
    False for a dim, size, flag or dtype."""
    difference: float | None = None
    """Relative difference of the number, or of the constant's values. None where it is not a
    number."""


class RegionResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Operators of both sides that compute one thing in different ways, compared as one step."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "replaced"}

    replaced: Fact
    """The candidate's operators in place of the reference's."""
    text: str = ""
    """The same in words, for example ``8 products and 7 additions in place of one product``."""
    reference: list[str]
    """Paths of the reference's operators in execution order. The last one gives the common result;
    where ``argument`` is set, it gives that argument of ``consumer``."""
    candidate: list[str]
    """The same for the candidate."""
    inputs: list[str] = []
    """The values that the reference's operators begin from."""
    consumer: str | None = None
    """The operator, called by both sides, that takes the region's result as ``argument``."""
    argument: str | None = None
    reference_times: float | None = None
    """Error that the reference's operators add on their own recorded inputs, measured against
    float64 and divided by one rounding of the result (1 for an ideal product). None where the
    region is not made of 16-bit products and additions, or an input was not recorded."""
    candidate_times: float | None = None
    """The same for the candidate."""


def called_at(source: str | None, backward_of: str | None) -> str | None:
    """The line of Python that called an operator, or whose backward did; None where unknown."""
    if source is None and backward_of is None:
        return None
    return sentence(fact("operators.called_at", source=source, backward_of=backward_of))


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of the reference and its partner, over all forwards of a phase.

    Errors are relative L2 norms, median over rows (the last axis); a = reference, b = candidate, R
    = truth. A number is None where there was no truth, or nothing to measure.
    """

    site: str
    """Site of the reference's first result, without the port."""
    candidate_site: str
    match: Literal["exact", "sequence", "value", "dataflow"]
    """How the partner was found:

    * ``exact``: same module, operator, call number and shape.
    * ``sequence``: same place in the order of calls.
    * ``value``: other operators that come to the same value, such as the end of a fused kernel.
    * ``dataflow``: the same argument of matched operators, with other values.
    """
    operator: str
    candidate_operator: str
    kind: str | None = None
    """Class of the module that called the operator."""
    block: str | None = None
    source: str | None = None
    """The Python line that called it, or of which it is the backward."""
    backward_of: str | None = None
    """The forward operator, or torch.autograd.Function, of whose backward it is."""
    phase: str
    """``prefill``, ``backward`` or ``decode``."""
    order: int
    sample: int = 0
    step: int = 0
    shape: tuple[int, ...]
    reference_dtype: str
    candidate_dtype: str
    identical: bool = False
    difference: float | None = None
    """err(b, a), rms over rows, since most rows may be equal."""
    reference_error: float | None = None
    """err(a, R)."""
    candidate_error: float | None = None
    """err(b, R)."""
    floor: float | None = None
    """The ideal store error ‖round(R) - R‖ / ‖R‖ and the rounding of the sum, together."""
    w: float | None = None
    """err(b, R) / err(a, R), each with the floor added in quadrature."""
    w_entering: float | None = None
    """The largest ``w`` among the operators that feed this one."""
    peak: float | None = None
    """The largest error of one row, column or slice (such as a head), one side's over the
    other's."""
    ulp_share_reference: float | None = None
    """Share of the reference's elements that are more than one ulp of their dtype from R."""
    ulp_share_candidate: float | None = None
    """The same for the candidate."""
    codes: float | None = None
    """For integers: share of elements that differ."""
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    leans: Side | None = None
    """The side that uses it."""
    fed_by: list[str] = []
    """The operators that feed this one and that only ``fed_by_side`` calls, in order."""
    fed_by_side: Side | None = None
    why: Question | None = None
    """The question by which most of the limit is used."""
    verdict: OperatorVerdict = "unjudged"
    other_inputs: list[OtherInput] = []
    """Arguments that the two sides take from elsewhere."""
    other_operands: list[OtherOperand] = []
    """Scalars and constants that differ."""
    other_mask: OtherMask | None = None
    """Scores that one side alone hides, in the first forward in which one does."""
    measurable: bool = True
    """Where ``other_operands`` are the reason: are the errors alone beyond a limit too?"""
    region: RegionResult | None = None
    """All operators of the region, where the sides call other operators and this is their common
    result."""

    @property
    def called_at(self) -> str | None:
        """The line, and of which operator it is the backward."""
        return called_at(self.source, self.backward_of)


class UnmatchedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that only one side called (in a fused kernel's place, or beyond the other's)."""

    side: Side
    site: str
    operator: str
    source: str | None = None
    """The Python line that called it."""


class CausalCheck(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment: the candidate is run again with the reference's result in place of its own at
    the onset. If the rest is then fine, the onset is the cause."""

    site: str
    """The site whose result was replaced."""
    holds: bool
    """Neither a later operator nor the block's output is beyond its limit any more."""
    num_after: int = 0
    """Number of operators after the onset that were checked."""
    before: float
    """``largest_limit_usage`` without the replacement."""
    largest_limit_usage: float
    """The largest share of its limit that any of these operators still uses."""
    still: list[str] = []
    """The sites that are still beyond their limit."""


class OperatorsResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """All operators of the modules that were recorded."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    frame: Literal["block", "operator"]
    """Where the sides had equal inputs. ``block``: each side ran the block on its own from equal
    inputs, so errors are inherited within it. ``operator``: each operator alone got equal
    inputs."""
    pass_: str = msgspec.field(name="pass", default="anchored")
    """``escalated`` where the difference was found in float32 alone."""
    judged: Literal["truth", "difference"]
    """Judged against a truth, or by the difference of the two sides alone."""
    num_matched: int
    num_value_matches: int = 0
    """How many of ``num_matched`` were matched by value."""
    onset: str | None = None
    """The site where the difference begins; None where nothing is beyond a limit."""
    side: SideOrBoth | None = None
    """The side that is wrong at the onset."""
    results: list[OperatorResult] = []
    unmatched: list[UnmatchedOperator] = []
    causal: CausalCheck | None = None
    remarks: list[Fact] = []
    """What was not compared or not judged, and why."""
    notes: list[str] = []
    """The same in words."""


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
    "reduced gradients",
    "gradient sums",
    "main weights",
    "moments",
    "buffers",
]

PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which they are shown: what is most often wrong first."""


INSIDE = "inside "
"""Before the name of a kernel, where a dtype would stand if it were recorded."""


class AuditedPlace(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One part (such as a softmax) at one place of the model: the dtypes it really ran in."""

    TEXTS: ClassVar[Mapping[str, str]] = {"expected_by": "expected_from"}

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
    expected_from: Fact | None = None
    """The source of that expectation."""
    expected_by: str = ""
    """The same in words."""
    own: bool = False
    """The expectation comes from the model's own code; otherwise it is common practice."""
    below: bool = False
    """``computed`` is narrower than all expected dtypes."""
    num_calls: int = 1


class AuditRow(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One part on both sides."""

    TEXTS: ClassVar[Mapping[str, str]] = {"expected_by": "expected_from"}

    part: Part
    reference: list[str] | None = None
    """The dtypes it was computed in, the most frequent first, or ``inside KERNEL``. Empty where the
    side has no such part; None where the side was not audited."""
    candidate: list[str] | None = None
    """The same for the candidate."""
    expected: list[str] = []
    expected_from: Fact | None = None
    expected_by: str = ""
    own: bool = False
    """The expectation comes from the model's own code; otherwise it is common practice."""
    below: SideOrBoth | None = None
    """The side that is narrower than expected."""
    differs: bool = False
    """The sides computed the same module's part in different dtypes."""
    num_places: int = 0


class AuditFinding(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One thing that the audit found wrong."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "what"}

    part: Part
    what: Fact
    """Who computed what in which dtype, and what was expected."""
    text: str = ""
    """The same as a sentence."""
    operators: list[str] = []
    """Operators of either side where it would be seen first."""


class AuditResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The audit of one run or of two."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    rows: list[AuditRow] = []
    findings: list[AuditFinding] = []
    reference: list[AuditedPlace] | None = None
    """The reference's places. None if it recorded no operators, or computed in float64."""
    candidate: list[AuditedPlace] | None = None
    """The same for the candidate."""
    remarks: list[Fact] = []
    """What to know beside the table."""
    notes: list[str] = []
    """The same in words."""
