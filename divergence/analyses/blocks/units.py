"""The units that are judged: blocks and what stands beside them, with its looks at each forward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.judge import limit_of, observed, outliers
from divergence.comparison.results import SiteResult, Visible, num_rows, order_of
from divergence.numerics.floor import (
    ALLOWED,
    ENOUGH,
    THRESHOLDS,
    Thresholds,
    share_from_nothing,
    spread,
)
from divergence.numerics.formats import format_named
from divergence.run.site import (
    BACKWARD,
    OPTIMIZER,
    PHASES,
    ROOT,
    is_codes,
    is_norm,
    module_of,
    of_parameter,
)
from divergence.words import Side, SideOrBoth

if TYPE_CHECKING:
    from divergence.comparison.judge import Floats, JudgedTable, Level
    from divergence.comparison.measure.truth import RowErrors, TruthStats


# Looks: each forward of each prompt at one site, judged by itself.
#
# A fault in one prompt of eight, or in one decode step of 64, disappears in a median over all of
# them. So each forward is an observation of its own, held against the same forward at the siblings
# of its site (the same place in the other blocks) by the judge (comparison.judge): the rounding
# model stands for the side whose error is known, and the ratio for the other's.
#
# It refuses to judge a forward of few tokens in a block that routes tokens to experts where the
# routing is not known: rounding may send one token elsewhere. Nor one whose difference is a single
# step of the format in a single number (``one_step``): trained models have channels a hundred times
# as large as the others, whose last bit is then the whole error of a decode step.

FEW_ROWS = 8
"""With fewer rows the typical row is held to the limits of a single token."""
_CANCELS = 2
"""Inside a block the terms of a few rows may cancel, which the rounding model does not know: so
many times ``least_sibling`` is added to them."""
_LEAST_BLOCKS = 0.25
"""The blocks' typical ratio counts for no less where a site without siblings is held against it."""


@dataclass(slots=True)
class Look:
    """One forward of one prompt at one site. ``typical``: its median token's ratio; ``share``: of
    the result's numbers that belong to this prompt; ``limit``: of ``typical``; ``usage``: the
    largest share of any limit of this look that is used, over 1 where it is beyond one;
    ``between``: of the limit on the two sides' difference, which needs no truth."""

    result: SiteResult
    sample: int
    typical: float
    num_rows: int
    share: float = 1.0
    limit: float = 0.0
    usage: float = 0.0
    between: float = 0.0
    from_nothing: float | None = None
    """``usage`` as ``share_from_nothing`` has it, where that is another number."""
    worst: float = 0.0
    """Its worst token's ratio."""
    of_token: float = 0.0
    """The share of a single token's limit that its worst token uses."""

    @property
    def place(self) -> PromptStep:
        return self.sample, self.result.step

    @property
    def share_used(self) -> float:
        """Of its limit, as it is told: 0 where nothing is off."""
        if max(self.usage, self.of_token) > 1:
            return max(self.usage, self.of_token)
        return self.usage if self.from_nothing is None else min(1.0, self.from_nothing)


def looks_of(results: Iterable[SiteResult]) -> list[Look]:
    """One look a forward; where a batch was run, one for each of its prompts."""
    looks: list[Look] = []
    for result in results:
        if result.ratio is None:
            continue
        rows, worst = num_rows(result), max(result.ratio_max or 0.0, result.ratio_sink or 0.0)
        if not result.prompts:
            looks.append(Look(result, result.sample, result.ratio, rows, worst=worst))
            continue
        total = sum(prompt.num_rows for prompt in result.prompts)
        looks += [
            Look(
                result, prompt.sample, prompt.ratio, prompt.num_rows, prompt.num_rows / total,
                worst=prompt.ratio_max or 0.0,
            )
            for prompt in result.prompts
        ]  # fmt: skip
    return looks


def one_step(result: SiteResult) -> bool:
    """Is most of the difference (of its squares) that of one number, and that the smallest which
    there is: 1 ulp?

    No fault can be told from it. Two correct results on either side of a rounding boundary differ
    by as much.
    """
    if result.ulp_format is None or not result.rel_l2 or not result.reference_norm:
        return False
    values = result.max_abs, result.max_abs_reference, result.max_abs_candidate
    if any(value is None or not math.isfinite(value) for value in values):
        return False
    largest, reference, candidate = (abs(value) for value in values if value is not None)
    if math.sqrt(2) * largest <= result.rel_l2 * result.reference_norm:  # no square: it overflows
        return False
    form = format_named(result.ulp_format)
    exponent = math.frexp(max(reference, candidate, form.smallest_normal))[1] - 1
    return largest <= math.ldexp(1.0, exponent - form.mantissa_bits)


# Units: all measurements of one site, over samples and steps, brought together for judging.
#
# A unit has *siblings*: the units of its kind (the same class of block, or the same
# place inside it), measured in the same pass and phase. They share dtype, shapes and
# kernels, so they are the controls of an experiment in which one block is suspected.

_Key = TypeVar("_Key")

Kind = tuple[str, str, str, str | None, str, str] | tuple[str, str, str, str | None, str]
"""(block, place inside it, port, class, phase, stack of blocks) or (trunk, path, port, class,
phase): units that are alike."""

Why = Literal["typical", "forward", "token", "sink", "channel", "gain", "both"]
"""The questions that a truth is asked (blocks.sides)."""

TABLES = "rotary"  # computed from float32 angles: the convention is off the truth by position x u


@dataclass(frozen=True, slots=True)
class Blame:
    """One question's answer. ``value`` over ``control`` is held against ``limit``; ``share`` is
    how much of the limit is used, > 1 blames ``side``; ``at``: where it is largest."""

    side: SideOrBoth
    why: Why
    value: float
    control: float
    limit: float
    at: SiteResult
    like: Literal["others", "all"] | None = None
    """Whom of its kind it is held against, where that is not the other blocks."""
    place: PromptStep | None = None
    scaled: Literal["output", "update"] | None = None
    """Of a gain: what is scaled, by ``factor``."""
    factor: float = 1.0
    channel: int | None = None
    """Of a channel's error: which."""

    @property
    def limit_usage(self) -> float:
        if self.control <= 0:
            return math.inf
        return self.value / self.control / self.limit

    @property
    def share_used(self) -> float:
        """``limit_usage`` as it is told of the difference of the two sides. What both are off by
        is no difference, until it is beyond its limit."""
        if self.why == "gain" or self.limit_usage > 1:
            return self.limit_usage
        if self.why == "both":
            return 0.0
        return share_from_nothing(self.value / self.control, self.limit)


@dataclass(frozen=True, slots=True)
class JudgedGains:
    """The scale errors of one kind: ``table`` (M, K), of all rows (K = 1) or of each forward."""

    of: Literal["output", "update"]
    table: JudgedTable
    limit: float
    """The deviate of an outlier."""
    places: list[PromptStep | None]
    sides: Floats
    """(2, M, K): each side's own."""


SURE = 3.0
"""Log odds of 20 to 1."""


@dataclass(frozen=True, slots=True)
class JudgedFamily:
    """The sites of one kind, judged together; the places and rows are those that all of them have.

    ``rows``: None where a row may be elsewhere by rounding (experts), and where each forward has
    but one.
    """

    stats: list[TruthStats]
    least: float
    sites: JudgedTable
    typical: Sequence[float]
    """Of each member the median row's x."""
    usual: float
    """Their median ``w``, in log; ``usual_reach``: by how much chance may move that."""
    usual_reach: float
    places: list[PromptStep]
    forwards: JudgedTable | None
    rows: JudgedTable | None
    errors: RowErrors
    """Of the first member."""
    is_few: Sequence[bool]
    """Has the forward of a place few rows, of which nothing is to be told?"""
    channels: JudgedTable | None
    gains: list[JudgedGains]
    odds: Sequence[float]
    """Of each member, in log: that the farther side's error is larger than in its siblings, against
    that the other's is smaller."""

    def x_of(self, member: int, place: PromptStep | None = None) -> float | None:
        """log W of the two sides' median rows, in one forward or in all; None where not known."""
        stats = self.stats[member]
        forward = stats if place is None else stats.forwards.get(place)
        return None if forward is None else log_ratio(forward.typical, self.least)


def log_ratio(typical: Mapping[Side, float], least: float) -> float | None:
    """log W of a candidate's and a reference's error, ``least`` added to both; None where both are
    without bound, or not known."""
    a, b = (math.hypot(typical[side], least) for side in ("reference", "candidate"))
    if not (a + b > 0 and min(a, b) < math.inf):  # nan, too
        return None
    ends = (min(max(error, 1e-300), 1e300) for error in (b, a))
    return math.log(next(ends)) - math.log(next(ends))


@dataclass(slots=True)
class Unit:
    """All results of one site in one pass and phase (run.schema.site.PHASES), judged together."""

    site: str
    pass_: str
    phase: str
    kind: Kind
    """Units of the same kind are its siblings."""
    results: list[SiteResult] = field(default_factory=list)
    typical: float = 0.0
    """Median over forwards of the median token's ratio."""
    worst: float = 0.0
    """Largest ratio of any token, sink tokens left out."""
    sink: float = 0.0
    """Largest ratio of any sink token."""
    control: float = 0.0
    """Median of the siblings' ``typical``."""
    num_siblings: int = 0
    limit: float = 0.0
    """Limit of ``typical``."""
    worst_limit: float = 0.0
    """Limit of ``worst`` and ``sink``."""
    why: str | None = None
    """The limit that was exceeded, or what the truth blames (blocks.sides); None where the unit is
    within all limits."""
    widened: float = 1.0
    """Factor on all limits, from what trusted runs have shown."""
    stats: TruthStats | None = None
    """The site against the truth, where one was given."""
    judged: tuple[JudgedFamily, int] | None = None
    """All of its kind against the truth, and which of them it is (blocks.sides)."""
    blame: Blame | None = None
    """What the truth blames, if anything."""
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    between: float = 0.0
    """The same over the limits on the two sides' difference, which need no truth."""
    from_nothing: float | None = None
    """``limit_usage`` as ``share_from_nothing`` has it, where a truth was asked."""
    looks: list[Look] = field(default_factory=list)
    """Each forward of each prompt by itself."""
    visible: dict[Level, float] = field(default_factory=dict)
    """Of a block, by level, the smallest error that the truth would have shown (blocks.sides)."""

    @property
    def share_used(self) -> float:
        """Of its limit, as it is told: 0 where nothing is off, 1 or more where it is flagged."""
        used = self.limit_usage
        share = used if used > 1 or self.from_nothing is None else self.from_nothing
        return share if self.why is None else max(1.0, share)

    @property
    def margin(self) -> float:
        """By how much the unit is beyond its limits: of the two that agree, the larger one."""
        if self.blame is None:
            return self.between
        if self.blame.side == "both":
            return self.blame.limit_usage
        return max(self.blame.limit_usage, self.between)

    @property
    def beyond(self) -> list[Look]:
        """The looks that are beyond a limit, in execution order."""
        beyond = (look for look in self.looks if look.usage > 1)
        return sorted(beyond, key=lambda look: order_of(look.result))

    @property
    def side(self) -> SideOrBoth | None:
        """Which run is wrong here, where a truth tells."""
        return None if self.blame is None else self.blame.side

    @property
    def first(self) -> SiteResult:
        """The first result in execution order that is beyond the limit (else the first)."""
        if self.why == "forward" and self.beyond:
            return self.beyond[0].result
        if self.blame is not None and self.blame.why in ("forward", "token", "sink"):
            return self.blame.at
        if self.why in ("token", "sink"):
            limit = self.worst_limit
            beyond = [r for r in self.results if max(r.ratio_max or 0, r.ratio_sink or 0) > limit]
        else:
            beyond = [r for r in self.results if (r.ratio or 0) > self.limit]
        return min(beyond or self.results, key=order_of)


def build_units(results: Iterable[SiteResult], pass_: str) -> list[Unit]:
    """Units of a pass in execution order; only judged floating-point sites."""
    results = list(results)
    stacks = stacks_of(results)
    units: dict[tuple[str, str], Unit] = {}
    for result in results:
        if result.pass_ != pass_ or result.ratio is None:
            continue
        port = result.site.partition(":")[2]
        if is_codes(port):
            continue
        made = result.role == "inner" or OPTIMIZER in result.site  # by clipping
        if port.startswith("in") and (not made or pass_ == "free"):
            continue  # what comes in is judged where it goes out
        if result.block is not None and ".experts." in result.site[len(result.block) :]:
            continue  # rows are whatever tokens were sent there; judged where they come together
        if pass_ == "free" and is_whole(module_of(result.site), stacks):
            continue  # the model, or a whole stack of it: what it inherits is everything
        phase = result.phase
        unit = units.setdefault(
            (result.site, phase), Unit(result.site, pass_, phase, _kind(result, phase))
        )
        unit.results.append(result)
    for unit in units.values():
        unit.typical = statistics.median(
            0.0 if num_rows(r) < FEW_ROWS and one_step(r) else r.ratio or 0.0 for r in unit.results
        )
        unit.worst = max(r.ratio_max or 0.0 for r in unit.results)
        unit.sink = max(r.ratio_sink or 0.0 for r in unit.results)
        unit.looks = looks_of(unit.results)
    return sorted(units.values(), key=lambda unit: min(map(order_of, unit.results)))


def flag(
    units: list[Unit],
    *,
    routed: frozenset[str] = frozenset(),
    thresholds: Thresholds = THRESHOLDS,
    wider: float = 1.0,
) -> list[Unit]:
    """Set limits, ``wider`` times as wide, and flags; returns the flagged units in execution order.

    A unit is flagged where its typical ratio is beyond ``typical`` absolutely, or stands out among
    its siblings (is beyond ``lone`` times that of all blocks' outputs, where it has none, and of a
    parameter's gradient that of the blocks' gradients, if they differ by more: how prompts are
    added up moves them and no output); where one forward of one prompt is or does; or where a
    single token is beyond its limit (not in ``routed`` blocks: there, rounding may send a
    token to another expert). Limits are wider where few numbers are judged.
    """
    outputs = block_outputs(units)
    blocks = medians((unit.phase, unit.typical) for unit in outputs)
    gradients = medians(
        (unit.phase, unit.typical) for unit in units
        if unit.pass_ != "free" and unit.kind[0] == "block" and of_parameter(unit.site)
    )  # fmt: skip
    at_blocks = {
        phase: medians((look.place, look.typical) for unit in outputs if unit.phase == phase
                       for look in unit.looks)
        for phase in PHASES
    }  # fmt: skip
    families = families_of(units)
    # In a free pass a block is allowed what it may make of an error that came in, the first one
    # nothing: their ratios are no measure for each other.
    judged = [family for family in families if len(family) >= 3 and family[0].pass_ != "free"]
    limits = {
        "site": limit_of(sum(len(family) for family in judged)),
        "forward": limit_of(sum(len(unit.looks) for family in judged for unit in family)),
    }
    for family in families:
        alone = len(family) < 3 or family[0].pass_ == "free"
        held = _Siblings() if alone else _beside_siblings(family, limits, thresholds)
        for number, unit in enumerate(family):
            others = [other for other in family if other is not unit]
            unit.limit = absolute = thresholds.typical
            unit.worst_limit = max(thresholds.token, 2 * absolute)
            numel = sum(num_values(result) for result in unit.results)
            few = [few_numbers(r) if num_rows(r) < FEW_ROWS else 1.0 for r in unit.results]
            width = spread(numel) * statistics.median(few)
            if not alone:
                unit.num_siblings = len(others)
                unit.control = statistics.median(other.typical for other in others)
                unit.limit = min(absolute * width, held.sites[number])
            elif unit.phase in blocks and unit.pass_ != "free":
                control = max(blocks[unit.phase], _LEAST_BLOCKS)
                if of_parameter(unit.site):
                    control = max(control, gradients.get(unit.phase, 0.0))
                unit.limit = min(absolute, thresholds.lone * control) * width
            else:
                unit.limit = absolute * width
            farthest = max(unit.results, key=lambda r: max(r.ratio_max or 0.0, r.ratio_sink or 0.0))
            columns = min(_num_columns(result) for result in unit.results)
            unit.limit *= unit.widened * wider
            unit.worst_limit *= spread(columns) * few_numbers(farthest) * unit.widened * wider
            usual = None if unit.pass_ == "free" else blocks.get(unit.phase)
            _hold_looks(
                unit, held.forwards[number] if held.forwards else {}, usual,
                at_blocks[unit.phase], routed, thresholds, wider,
            )  # fmt: skip
            unit.limit_usage = unit.typical / unit.limit
            in_routed = unit.results[0].block in routed
            if not in_routed:
                worst = max(unit.worst, unit.sink)
                unit.limit_usage = max(unit.limit_usage, worst / unit.worst_limit)
                for look in unit.looks:
                    look.of_token = look.worst / unit.worst_limit
            if unit.typical > unit.limit:
                unit.why = "typical"
            elif unit.beyond:
                unit.why = "forward"
            elif max(unit.worst, unit.sink) > unit.worst_limit and not in_routed:
                unit.why = "token" if unit.worst > unit.worst_limit else "sink"
            unit.limit_usage = max(unit.limit_usage, *(look.usage for look in unit.looks))
            unit.between = unit.limit_usage
    return [unit for unit in units if unit.why is not None]


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The ratios beyond which each member stands out among its family: over all forwards, and in
    each."""

    sites: Sequence[float] = ()
    forwards: Sequence[Mapping[PromptStep, float]] = ()


def _beside_siblings(
    family: Sequence[Unit], limits: Mapping[str, float], thresholds: Thresholds
) -> _Siblings:
    places = sorted({look.place for unit in family for look in unit.looks})
    at = {place: column for column, place in enumerate(places)}
    ratios = np.full((len(family), len(places)), math.nan)
    numbers = np.full_like(ratios, math.nan)
    least = np.full_like(ratios, thresholds.least_sibling)
    for member, unit in enumerate(family):
        for look in unit.looks:
            place = member, at[look.place]
            ratios[place] = look.typical
            numbers[place] = numbers_alike(look.result) * look.share
            if look.result.role == "inner" and look.num_rows < FEW_ROWS:
                least[place] *= _CANCELS
    # rows may round alike: the median of many forwards is no more certain than they are
    of_sites, least_of_sites = (
        np.nanmedian(values, axis=1, keepdims=True) for values in (numbers, least)
    )
    typical = np.array([[unit.typical] for unit in family])
    sites = _far(typical, of_sites, least_of_sites, limits["site"], thresholds.ratio_spread)
    forwards = np.full_like(ratios, math.nan)
    if len(places) > 1:
        sigma = thresholds.ratio_forward_spread
        forwards = _far(ratios, numbers, least, limits["forward"], sigma)
        forwards[:, (~np.isnan(ratios)).sum(axis=0) < 3] = math.nan
    return _Siblings(
        sites[:, 0].tolist(),
        [
            {place: float(far) for place, far in zip(places, row, strict=True) if far == far}
            for row in forwards
        ],
    )


def _far(ratios: Floats, numbers: Floats, least: Floats, limit: float, sigma: float) -> Floats:
    """(M, K): the ratio beyond which each would stand out. The floor is a model: no chance is in
    it, and the error that it is held against is of ``numbers``."""
    energy = np.stack([np.ones_like(ratios), np.square(np.minimum(ratios, ALLOWED[1]))])
    x, own = observed(energy, np.stack([np.full_like(numbers, 1e12), numbers]), least)
    table = outliers(x, own, sigma, limit)
    far = np.exp(2 * np.minimum(table.control + table.reach, 300.0)) * (1 + least**2) - least**2
    return np.asarray(np.sqrt(np.maximum(far, 0.0)))


def _hold_looks(
    unit: Unit,
    held: Mapping[PromptStep, float],
    usual: float | None,
    at_blocks: Mapping[PromptStep, float],
    routed: frozenset[str],
    thresholds: Thresholds,
    wider: float,
) -> None:
    """Set each look's limit and usage. The only look of a unit is judged as the unit is. ``held``:
    by forward, the ratio that stands out among the siblings; ``usual``: the blocks' typical one."""
    for look in unit.looks if len(unit.looks) > 1 else ():
        few = look.num_rows < FEW_ROWS
        if few and (unit.results[0].block in routed or one_step(look.result)):
            continue
        width = spread(round(num_values(look.result) * look.share), num_looks=len(unit.looks))
        width *= few_numbers(look.result) if few else 1.0
        look.limit = (thresholds.token if few else thresholds.typical) * width
        if look.place in held:
            look.limit = min(look.limit, held[look.place])
        elif usual is not None:
            # of one row, a few bits are the whole error
            lower = _LEAST_BLOCKS * (2 if few else 1)
            lower *= _CANCELS if few and look.result.role == "inner" else 1
            control = max(usual, at_blocks.get(look.place, 0.0), lower)
            look.limit = min(look.limit, thresholds.lone * width * control)
        look.limit *= unit.widened * wider
        look.usage = look.between = look.typical / look.limit


def num_values(result: SiteResult) -> int:
    """How many independent numbers the result's errors are made of: of an estimate, projections."""
    if is_norm(result.site):
        return ENOUGH
    return result.numel if result.estimated is None else result.estimated.num_values


def _num_columns(result: SiteResult) -> int:
    """The same of one row."""
    if result.estimated is not None:
        return result.estimated.num_projections
    return result.shape[-1] if result.shape else 1


def numbers_alike(result: SiteResult) -> float:
    """How many numbers of one size make an error of that norm and largest element: the largest
    square of n of them is 2 ln n times their mean one."""
    largest, size = result.max_abs, (result.rel_l2 or 0.0) * (result.reference_norm or 0.0)
    if result.estimated is not None or is_norm(result.site):
        return float(ENOUGH)
    if not largest or not 0 < size / largest < math.inf:
        return float(max(1, result.numel))
    alike = max(1.0, (size / largest) ** 2)
    return min(float(max(1, result.numel)), alike * max(1.0, 2 * math.log(alike)))


def few_numbers(result: SiteResult) -> float:
    """Factor on a limit where a few elements hold the error, as a massive activation's rounding.

    The floor is a model, so the error of n numbers in floors is √(χ²_n / n); its quantile that one
    in a million exceeds (Wilson and Hilferty 1931), over that of as many as limits are made for.
    """
    numbers = numbers_alike(result)

    def quantile(n: float) -> float:
        return math.pow(1 - 2 / (9 * n) + 4.75 * math.sqrt(2 / (9 * n)), 1.5)

    return max(1.0, quantile(numbers) / quantile(ENOUGH))


def families_of(units: Iterable[Unit]) -> list[list[Unit]]:
    """Units that are each other's siblings, together."""
    families: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        families.setdefault((unit.pass_, *unit.kind), []).append(unit)
    return list(families.values())


def block_outputs(units: Iterable[Unit]) -> list[Unit]:
    """The blocks' own outputs where blocks got equal inputs."""
    whole = (unit for unit in units if unit.pass_ != "free" and unit.kind[0] == "block")
    return [u for u in whole if not u.kind[1] or u.kind[1:3] == (BACKWARD, "out")]


def medians(values: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """The median by key, where at least three values tell."""
    by_key: dict[_Key, list[float]] = {}
    for key, value in values:
        by_key.setdefault(key, []).append(value)
    return {key: statistics.median(them) for key, them in by_key.items() if len(them) >= 3}


def stacks_of(results: Iterable[SiteResult]) -> set[str]:
    """Paths of the lists of blocks."""
    return {result.block.rpartition(".")[0] for result in results if result.block is not None}


def is_whole(path: str, stacks: set[str]) -> bool:
    """Is it the model, or holds it a whole stack?"""
    return path == ROOT or any(stack.startswith(path + ".") for stack in stacks)


def _kind(result: SiteResult, phase: str) -> Kind:
    path, _, port = result.site.partition(":")
    if result.block is not None:
        # the place inside the block: model.layers.3.mlp.up_proj → .mlp.up_proj; an encoder's
        # blocks are no controls for a decoder's, which run at other shapes
        stack = result.block.rpartition(".")[0]
        return ("block", path[len(result.block) :], port, result.kind, phase, stack)
    return ("trunk", path, port, result.kind, phase)


def visible_of(units: Sequence[Unit], routed: frozenset[str]) -> Visible | None:
    """Of the middle block, the larger one of prefill and decode; None where there is no block."""
    by_phase: dict[str, list[dict[Level, float]]] = {}
    for unit in units:
        if unit.results[0].role == "block":
            sizes = unit.visible or _of_limits(unit, routed=unit.results[0].block in routed)
            by_phase.setdefault(unit.phase, []).append(sizes)
    levels: dict[str, float] = {}
    for members in by_phase.values():
        for level in dict.fromkeys(level for sizes in members for level in sizes):
            known = [sizes[level] for sizes in members if level in sizes]
            levels[level] = max(levels.get(level, 0.0), statistics.median(known))
    finite = {level: size for level, size in levels.items() if size < 1}
    if "site" not in finite:
        return None
    return Visible(
        block=finite["site"], forward=finite.get("forward"), token=finite.get("row"),
        channel=finite.get("channel"),
    )  # fmt: skip


def _of_limits(unit: Unit, *, routed: bool) -> dict[Level, float]:
    """Without a truth: what the two sides may differ by."""
    floors = [result.floor for result in unit.results if result.floor]  # of equal ones it is 0
    if not floors:
        return {}
    floor = statistics.median(floors)
    sizes: dict[Level, float] = {"site": unit.limit * floor}
    looks = [look.limit * (look.result.floor or floor) for look in unit.looks if look.limit]
    if looks:
        sizes["forward"] = statistics.median(looks)
    if not routed:
        sizes["row"] = unit.worst_limit * floor
    return narrowed(sizes)


def narrowed(sizes: dict[Level, float]) -> dict[Level, float]:
    """What is seen in one row is so where it is in all of a forward, or of a block."""
    for level, narrower in (("forward", "row"), ("site", "forward"), ("site", "row")):
        if level in sizes and narrower in sizes:
            sizes[level] = min(sizes[level], sizes[narrower])
    return sizes
