"""Units: all measurements of one site, over samples and steps, brought together for judging.

A unit has *siblings*: the units of its kind (the same class of block, or the same
place inside it), measured in the same pass and phase. They share dtype, shapes and
kernels, so they are the controls of an experiment in which one block is suspected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from divergence.analyses.blocks.looks import FEW_ROWS, Look, controls, looks_of, one_step
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.results import SiteResult, order_of
from divergence.numerics.floor import ALLOWED, ENOUGH, THRESHOLDS, Thresholds, spread
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
from divergence.words import SideOrBoth

if TYPE_CHECKING:
    from divergence.comparison.measure.truth_stats import TruthStats

__all__ = [
    "TABLES", "Blame", "Kind", "Unit", "Why", "block_outputs", "build_units", "families_of", "flag",
    "medians", "num_values",
]  # fmt: skip

_Key = TypeVar("_Key")

Kind = tuple[str, str, str, str | None, str, str] | tuple[str, str, str, str | None, str]
"""(block, place inside it, port, class, phase, stack of blocks) or (trunk, path, port, class,
phase): units that are alike."""

Why = Literal["typical", "forward", "token", "sink", "channel", "gain", "both"]
"""The questions that a truth is asked (blocks.blame)."""

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

    @property
    def limit_usage(self) -> float:
        if self.control <= 0:
            return math.inf
        return self.value / self.control / self.limit


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
    """The limit that was exceeded, or what the truth blames (blocks.blame); None where the unit is
    within all limits."""
    widened: float = 1.0
    """Factor on all limits, from what trusted runs have shown."""
    stats: TruthStats | None = None
    """The site against the truth, where one was given."""
    blame: Blame | None = None
    """What the truth blames, if anything."""
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    between: float = 0.0
    """The same over the limits on the two sides' difference, which need no truth."""
    looks: list[Look] = field(default_factory=list)
    """Each forward of each prompt by itself."""

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
    stacks = {result.block.rpartition(".")[0] for result in results if result.block is not None}
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
        if pass_ == "free" and _whole(module_of(result.site), stacks):
            continue  # the model, or a whole stack of it: what it inherits is everything
        phase = result.phase
        unit = units.setdefault(
            (result.site, phase), Unit(result.site, pass_, phase, _kind(result, phase))
        )
        unit.results.append(result)
    for unit in units.values():
        unit.typical = statistics.median(r.ratio for r in unit.results if r.ratio is not None)
        unit.worst = max(r.ratio_max or 0.0 for r in unit.results)
        unit.sink = max(r.ratio_sink or 0.0 for r in unit.results)
        unit.looks = looks_of(unit.results)
    return sorted(units.values(), key=lambda unit: min(map(order_of, unit.results)))


def flag(
    units: list[Unit], *, routed: frozenset[str] = frozenset(), thresholds: Thresholds = THRESHOLDS
) -> list[Unit]:
    """Set limits and flags; returns the flagged units in execution order.

    A unit is flagged where its typical ratio is beyond ``typical`` absolutely, or beyond
    ``sibling`` times that of its siblings (``lone`` times that of all blocks' outputs, where it has
    none, and of a parameter's gradient that of the blocks' gradients, if they differ by more: how
    prompts are added up moves them and no output); or where a single token is beyond both token
    limits (not in ``routed`` blocks: there, rounding may send a token to another expert); or where
    one forward of one prompt is beyond the limit that holds for as many looks (blocks.looks).
    Limits are wider where few numbers are judged.
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
    for family in families_of(units):
        _hold_looks(family, blocks, at_blocks[family[0].phase], routed, thresholds)
        for unit in family:
            others = [other for other in family if other is not unit]
            absolute = thresholds.typical
            unit.limit, unit.worst_limit = absolute, max(thresholds.token, 2 * absolute)
            # In a free pass a block is allowed what it may make of an error that came in, the
            # first one nothing: their ratios are no measure for each other.
            if len(others) >= 2 and unit.pass_ != "free":
                unit.num_siblings = len(others)
                unit.control = statistics.median(other.typical for other in others)
                control = max(unit.control, thresholds.least_sibling)
                unit.limit = min(absolute, thresholds.sibling * control)
                tokens = statistics.median(other.worst for other in others)
                # siblings excuse nothing beyond what a threshold may be: that is no rounding
                room = min(thresholds.token_sibling * tokens, ALLOWED[1])
                unit.worst_limit = max(thresholds.token, room)
            elif unit.phase in blocks and unit.pass_ != "free":
                control = max(blocks[unit.phase], thresholds.least_sibling)
                if of_parameter(unit.site):
                    control = max(control, gradients.get(unit.phase, 0.0))
                unit.limit = min(absolute, thresholds.lone * control)
            numel = sum(num_values(result) for result in unit.results)
            columns = min(_num_columns(result) for result in unit.results)
            unit.limit *= spread(numel) * unit.widened
            unit.worst_limit *= spread(columns) * unit.widened
            unit.limit_usage = unit.typical / unit.limit
            in_routed = unit.results[0].block in routed
            if not in_routed:
                worst = max(unit.worst, unit.sink)
                unit.limit_usage = max(unit.limit_usage, worst / unit.worst_limit)
            if unit.typical > unit.limit:
                unit.why = "typical"
            elif unit.beyond:
                unit.why = "forward"
            elif max(unit.worst, unit.sink) > unit.worst_limit and not in_routed:
                unit.why = "token" if unit.worst > unit.worst_limit else "sink"
            unit.limit_usage = max(unit.limit_usage, *(look.usage for look in unit.looks))
            unit.between = unit.limit_usage
    return [unit for unit in units if unit.why is not None]


def _hold_looks(
    family: list[Unit],
    blocks: Mapping[str, float],
    at_blocks: Mapping[PromptStep, float],
    routed: frozenset[str],
    thresholds: Thresholds,
) -> None:
    """Set each look's limit and usage. The only look of a unit is judged as the unit is."""
    if all(len(unit.looks) < 2 for unit in family):
        return
    anchored = family[0].pass_ != "free"  # in a free pass no block is a measure for another
    least = thresholds.least_sibling
    values = [
        {look.place: look.typical for look in unit.looks} if anchored else {} for unit in family
    ]
    held = controls(values, lambda value, at: value / np.maximum(at, least))
    for unit, control in zip(family, held, strict=True):
        for look in unit.looks:
            few = look.num_rows < FEW_ROWS
            if len(unit.looks) < 2 or (few and unit.results[0].block in routed):
                continue
            if few and one_step(look.result):
                continue
            width = spread(round(num_values(look.result) * look.share), num_looks=len(unit.looks))
            # of one row, a few bits are the whole error; inside a block its terms may cancel, too
            lower = least * ((4 if look.result.role == "inner" else 2) if few else 1)
            absolute = (thresholds.token if few else thresholds.typical) * width
            look.limit = absolute
            if look.place in control.at:
                room = max(thresholds.sibling * width, thresholds.forward * control.largest)
                look.limit = min(absolute, room * max(control.at[look.place], lower))
            elif anchored and unit.phase in blocks:
                usual = max(blocks[unit.phase], at_blocks.get(look.place, 0.0), lower)
                look.limit = min(absolute, thresholds.lone * width * usual)
            look.limit *= unit.widened
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


def _whole(path: str, stacks: set[str]) -> bool:
    return path == ROOT or any(stack.startswith(path + ".") for stack in stacks)


def _kind(result: SiteResult, phase: str) -> Kind:
    path, _, port = result.site.partition(":")
    if result.block is not None:
        # the place inside the block: model.layers.3.mlp.up_proj → .mlp.up_proj; an encoder's
        # blocks are no controls for a decoder's, which run at other shapes
        stack = result.block.rpartition(".")[0]
        return ("block", path[len(result.block) :], port, result.kind, phase, stack)
    return ("trunk", path, port, result.kind, phase)
