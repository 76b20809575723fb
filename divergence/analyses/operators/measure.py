"""Operators measured and judged: each pair's error, its limits, and where the error comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from divergence.analyses.operators.operands import (
    Pads,
    Region,
    RegionError,
    Regions,
    argument_names,
    counted,
    is_product_region,
    operand_record,
    other_inputs,
    other_operands,
    own_error,
    region_operands,
    regions_in,
)
from divergence.comparison.calls import (
    CallNode,
    Forward,
    IntegerCodes,
    Match,
    Rerouted,
    count_codes,
    forwards_of,
    match_calls,
    match_paths,
    operator_passes,
    reached,
    rerouted_in,
)
from divergence.comparison.constants import ENOUGH_ROWS, NEAR_LIMIT_SHARE, SAME_VALUE_DISTANCE
from divergence.comparison.judge import (
    effective_numbers,
    farthest,
    in_step,
    limit_of,
    made_of,
    observed,
    reach,
)
from divergence.comparison.measure.rating import work_dtype
from divergence.comparison.result import (
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherMask,
    OtherOperand,
    Question,
    RegionResult,
    UnmatchedOperator,
)
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import THRESHOLDS, Thresholds, rare_ratio
from divergence.numerics.formats import format_named
from divergence.numerics.operator import (
    Columns,
    OperatorErrors,
    measure_operator,
    numbers_of,
    slices_of,
)
from divergence.run.manifest import NO_TENSOR, Manifest, ModuleNote
from divergence.run.reader import Run
from divergence.run.site import BACKWARD, module_of, phase_of
from divergence.words import SIDES, Side

# Operators measured: each call of the reference, its partner, and what is right there.
#
# Right is what the same call of the float64 run gave; in a run computed in float64, its own result.

_Item = TypeVar("_Item", OtherInput, OtherOperand)


@dataclass(slots=True)
class OperatorUnit:
    """One matched operator, or the common result of a region, over the forwards of a phase, in
    order."""

    match: Match
    phase: str
    """As in ``phase_of``."""
    forwards: list[tuple[Forward, Match, OperatorErrors | None]] = field(default_factory=list)
    num_equal: int = 0
    num_codes: int = 0
    codes: IntegerCodes = field(default_factory=IntegerCodes)
    other_inputs: list[OtherInput] = field(default_factory=list)
    other_operands: list[OtherOperand] = field(default_factory=list)
    region: Region | None = None
    feeds: list[str] = field(default_factory=list)
    """Paths of the reference's pairs and regions that feed it, also through calls without a
    partner."""
    own: tuple[RegionError, RegionError] | None = None
    """What each side's region adds by itself (analyses.operators.operands)."""
    padded: bool = False
    """Has a forward pads?"""
    untold: bool = False
    """May pads be among what differs, where the axes do not tell which they are?"""
    columns: Columns | None = None
    """What is usual in each column of the result, in a decode step as in the prefill
    (numerics.operator)."""


@dataclass(frozen=True, slots=True)
class MeasuredOperators:
    """``units`` in the reference's execution order; ``lone``: calls without a partner;
    ``unreached``: of these, what leads to nothing that both sides have; ``in_regions``: paths
    of those that a region holds. ``frame``: see OperatorsResult. ``rerouted``: prompts of whose
    backward not all is compared, as tokens are sent to other experts."""

    units: list[OperatorUnit]
    lone: dict[Side, list[CallNode]]
    frame: str
    with_truth: bool
    unreached: dict[Side, list[CallNode]]
    in_regions: dict[Side, set[str]]
    rerouted: list[int]


def measure_operators(
    a: Run,
    b: Run,
    passes: tuple[str, str],
    *,
    truth: Run | None = None,
    truth_pass: str = "anchored",
    rename: Callable[[str], str] = lambda site: site,
) -> MeasuredOperators | None:
    """None where not both sides hold operators in these passes.

    ``passes``: the reference's and the candidate's. Where the reference was computed in float64
    (a replay with ``--truth``), it is the truth. Raises RunFormatError on bad bytes.
    """
    if passes[0] not in operator_passes(a) or passes[1] not in operator_passes(b):
        return None
    for run, pass_ in ((a, passes[0]), (b, passes[1]), (truth, truth_pass)):
        if run is not None:  # most of it will be looked at
            run.expect(record for record in run.records if record.pass_ == pass_)
    calls_a, calls_b = forwards_of(a, passes[0]), forwards_of(b, passes[1])
    true_nodes = {} if truth is None else forwards_of(truth, truth_pass)
    exact = a.manifest.settings.compute_dtype == "float64"
    replays = "replayed" in passes
    # an operator that takes a number out of a tensor returns no tensor
    skipped = [*a.manifest.plan.skipped_operators, *b.manifest.plan.skipped_operators]
    numbers = any(reason.endswith(NO_TENSOR) for reason in skipped)
    units: dict[tuple[str, str, str], OperatorUnit] = {}
    lone, unreached = ({side: list[CallNode]() for side in SIDES} for _ in range(2))
    in_regions = {side: set[str]() for side in SIDES}
    rerouted: list[int] = []
    for forward in sorted(set(calls_a) & set(calls_b)):
        pads = Pads(a.manifest, forward)

        def apart(reference: CallNode, candidate: CallNode) -> float:
            x, y = a.read(reference.results[0]), b.read(candidate.results[0])
            return distance_of(pads.blank(x), pads.blank(y))  # noqa: B023

        pair = calls_a[forward], calls_b[forward]
        matches, only_a, only_b = (
            match_paths(*pair) if replays else match_calls(*pair, apart=apart, rename=rename)
        )
        rights = Rights(truth, calls_a[forward], true_nodes.get(forward, []), exact=exact, run=a)
        partners = {match.reference.path: match.candidate.path for match in matches}

        def read(match: Match, index: int) -> tuple[torch.Tensor | None, ...]:
            results = match.reference.results[index], match.candidate.results[index]
            return a.read(results[0]), b.read(results[1]), rights.of(match.reference, index)  # noqa: B023

        routings = [] if replays else rerouted_in(matches, read, left_out=pads.rows)
        if any(BACKWARD in path for routing in routings for path in routing.behind):
            rerouted.append(forward[0])
        regions = Regions() if replays else regions_in(*pair, matches, rename)
        pairs = [(match, regions.by_pair.get(match.reference.path)) for match in matches]
        pairs += [  # a common result that is an argument: by the calls that make it
            (Match(region.reference[-1], region.candidate[-1], "dataflow"), region)
            for region in regions.of_operands.values()
        ]
        nodes, paired = (
            {n.path: n for n in calls_a[forward]},
            {m.reference.path for m, _ in pairs},
        )
        for match, region in pairs:
            phase = phase_of(match.reference.path, forward[1])
            key = (match.reference.path, match.candidate.path, phase)
            unit = units.setdefault(key, OperatorUnit(match, phase))
            unit.region = unit.region or region
            unit.padded = unit.padded or pads.rows is not None
            members = [match.reference] if region is None else region.reference
            unit.feeds = list(dict.fromkeys([*unit.feeds, *_feeds(members, nodes, paired)]))
            if region is not None and region.consumer is not None:
                unit.forwards.append(
                    (forward, match, _operand_errors(unit, region, a, b, rights, pads))
                )
                continue
            prefill = units.get((*key[:2], "prefill"), unit)
            _measure(unit, prefill, forward, match, a, b, rights, routings, pads)
            if region is not None:
                _add_own(unit, region, a, b)
            if not replays:
                calls = match.reference, match.candidate, a, b
                inputs = other_inputs(*calls, partner=partners.get)
                unit.other_inputs = _worse(unit.other_inputs, inputs)
                others = other_operands(*calls, measured=numbers)
                if region is not None and not others:
                    others = region_operands(region, a, b, measured=numbers)
                unit.other_operands = _worse(unit.other_operands, others)
        for number, (side, only) in enumerate(zip(SIDES, (only_a, only_b), strict=True)):
            in_regions[side] |= regions.members[number]
            for alone, more in (
                (lone[side], only),
                (unreached[side], regions.unreached[number]),
            ):
                paths = {node.path for node in alone}
                alone += [node for node in more if node.path not in paths]
    in_order = sorted(units.values(), key=lambda u: (u.phase == "decode", u.match.reference.order))
    return MeasuredOperators(
        units=in_order,
        lone=lone,
        frame="operator" if replays else "block",
        with_truth=exact or truth is not None,
        unreached=unreached,
        in_regions=in_regions,
        rerouted=rerouted,
    )


def _feeds(members: list[CallNode], nodes: dict[str, CallNode], paired: set[str]) -> list[str]:
    """The pairs that feed a pair or a region, through calls without a partner too."""
    own = {node.path for node in members}
    names: dict[str, None] = {}
    waiting, seen = list(members), set(own)
    while waiting:
        for feed in waiting.pop(0).feeds:
            if feed in paired and feed not in own:
                names[feed] = None
            elif feed not in seen and feed in nodes:
                seen.add(feed)
                waiting.append(nodes[feed])
    return list(names)


def _operand_errors(
    unit: OperatorUnit, region: Region, a: Run, b: Run, rights: Rights, pads: Pads
) -> OperatorErrors | None:
    """The common result of a region that a paired call is given as an argument, as it sees it."""
    consumer, operands = region.consumer, region.operands()
    if consumer is None or operands is None:
        return None
    reference = operand_record(consumer.reference, operands[0], a)
    candidate = operand_record(consumer.candidate, operands[1], b)
    truth = rights.operand(consumer.reference, region.number)
    if reference is None or candidate is None or (truth is None and rights.exist):
        return None
    if {format_named(record.dtype).kind for record in (reference, candidate)} != {"float"}:
        return None
    x, y = a.read(reference), b.read(candidate)
    if x.numel() != y.numel() or (truth is not None and truth.numel() != x.numel()):
        return None
    shape = operands[0].shape
    truth = None if truth is None else truth.reshape(shape)
    cleared = pads.cleared(tuple(shape), x.reshape(shape), y.reshape(shape), truth)
    if cleared is None:
        unit.untold = unit.untold or not torch.equal(x, y.reshape(x.shape))
        return None
    return measure_operator(
        *cleared,
        num_terms=max(map(num_terms, region.reference)),
        of_gradient=unit.phase == "backward",
    )


def _add_own(unit: OperatorUnit, region: Region, a: Run, b: Run) -> None:
    """Return what both sides' products and additions add by themselves."""
    members = (region.reference, region.candidate)
    if not all(is_product_region(nodes) for nodes in members):
        return
    own_errors = own_error(a, members[0]), own_error(b, members[1])
    if own_errors[0] is None or own_errors[1] is None:
        return
    unit.own = unit.own or (RegionError(), RegionError())
    unit.own[0].add(own_errors[0])
    unit.own[1].add(own_errors[1])


def _worse(items: list[_Item], new: list[_Item]) -> list[_Item]:
    """Keep, of each argument, the one that differs most over the forwards."""
    by_argument: dict[tuple[str | None, str], _Item] = {}
    for item in items + new:
        key = getattr(item, "site", None), item.argument
        before = by_argument.get(key)
        if before is None or (item.difference or 0.0) > (before.difference or 0.0):
            by_argument[key] = item
    return list(by_argument.values())


def _measure(
    unit: OperatorUnit,
    prefill: OperatorUnit,
    forward: Forward,
    match: Match,
    a: Run,
    b: Run,
    rights: Rights,
    routings: list[Rerouted],
    pads: Pads,
) -> None:
    """All results of one call; the first that is floating-point is the measured one."""
    errors: OperatorErrors | None = None
    equal = True
    for index, (reference, candidate) in enumerate(
        zip(match.reference.results, match.candidate.results, strict=False)
    ):
        same = reference.xxh3 == candidate.xxh3 and reference.dtype == candidate.dtype
        equal = equal and same
        if reference.numel != candidate.numel or reference.numel == 0:
            continue
        x, y, r = a.read(reference), b.read(candidate), rights.of(match.reference, index)
        kinds = {format_named(record.dtype).kind for record in (reference, candidate)}
        behind = any(match.reference.path in routing.behind for routing in routings)
        cleared = pads.cleared(reference.shape, x, y, r)
        if cleared is None and not (same or behind):  # a routing leaves pads out by itself
            unit.untold = True
            continue
        x, y, r = cleared or (x, y, r)
        if kinds <= {"int", "bool"}:
            unit.num_codes += reference.numel
            if not same:
                count_codes(unit.codes, match, x, y, r, a, b)
        elif kinds == {"float"} and errors is None:
            aligned: tuple[torch.Tensor | None, ...] | None = (x, y, r)
            for routing in routings:
                aligned = aligned and routing.align(match.reference.path, aligned)
            if aligned is not None and (r is not None or not rights.exist):
                p, q, exact = aligned
                assert p is not None and q is not None  # both sides made the result
                if unit.phase == "backward" and exact is not None and _is_another(p, q, exact):
                    continue
                errors = measure_operator(
                    p,
                    q,
                    exact,
                    num_terms=num_terms(match.reference),
                    of_gradient=unit.phase == "backward",
                    cancels=match.reference.name in _CANCELLING,
                    before=prefill.columns,
                )
                if errors is not None:
                    prefill.columns = errors.columns
                    errors = dataclasses.replace(errors, columns=None)
    unit.num_equal += equal
    unit.forwards.append((forward, match, errors))


def _is_another(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> bool:
    """Is the truth's call another than both sides'? Autograd adds up gradients in the order in
    which they come, which is another where the model's code casts and the truth needs not."""
    return min(distance_of(r, x), distance_of(r, y)) > SAME_VALUE_DISTANCE >= distance_of(x, y)


def num_terms(node: CallNode) -> int:
    """Return how many products or terms one number of the result is the sum of."""
    shapes = [operand.shape for operand in node.call.operands]
    name = node.name.partition(".")[2]
    if not shapes:
        return 1
    if name in ("mm", "bmm", "matmul", "linear", "mv", "dot", "_scaled_mm"):
        return shapes[0][-1] if shapes[0] else 1
    if name in ("addmm", "baddbmm", "addmv"):
        return shapes[1][-1] if len(shapes) > 1 and shapes[1] else 1
    if "attention" in name:
        return max(shapes[0][-1], shapes[1][-2]) if len(shapes) > 1 else 1
    if "conv" in name and len(shapes) > 1:
        return math.prod(shapes[1][1:])
    if "norm" in name or "softmax" in name:
        return shapes[0][-1] if shapes[0] else 1
    if name == "cumsum":
        return max(1, max(shapes[0], default=1))
    if name in ("mean", "sum", "var", "std", "prod", "logsumexp", "linalg_vector_norm"):
        return max(1, math.prod(shapes[0]) // max(1, node.results[0].numel))
    return 1


class Rights:
    """Says what is right at each call of the reference in one forward."""

    def __init__(
        self,
        truth: Run | None,
        ours: list[CallNode],
        true_nodes: list[CallNode],
        *,
        exact: bool,
        run: Run,
    ) -> None:
        self._truth, self._run, self._exact = truth, run, exact
        self.exist = exact or truth is not None
        apart = None
        if truth is not None:

            def apart(own: CallNode, true_node: CallNode) -> float:
                return distance_of(run.read(own.results[0]), truth.read(true_node.results[0]))

        matches, _, _ = match_calls(ours, true_nodes, apart=apart)
        self._by_path = {match.reference.path: match.candidate.results for match in matches}
        self._nodes = {match.reference.path: match.candidate for match in matches}
        for node in ours:  # in exact arithmetic a cast changes nothing
            if node.path not in self._by_path and node.is_cast:
                for maker in set(node.feeds[:1]) & self._by_path.keys():
                    self._by_path[node.path] = self._by_path[maker]

    def of(self, node: CallNode, index: int) -> torch.Tensor | None:
        """Return what is right of a result of a call; None where that is not recorded."""
        if self._exact:
            return self._run.read(node.results[index])
        records = self._by_path.get(node.path, ())
        if self._truth is None or index >= len(records):
            return None
        same_size = records[index].numel == node.results[index].numel
        return self._truth.read(records[index]) if same_size else None

    def operand(self, node: CallNode, number: int) -> torch.Tensor | None:
        """Return what is right of an argument of a call; None where that is not recorded."""
        true_node, run = self._nodes.get(node.path), self._truth
        if self._exact:
            true_node, run = node, self._run
        if true_node is None or run is None or number >= len(true_node.call.operands):
            return None
        record = operand_record(true_node, true_node.call.operands[number], run)
        return None if record is None else run.read(record)


def distance_of(x: torch.Tensor, y: torch.Tensor) -> float:
    """‖x - y‖ / ‖x‖; of codes 0 where they are equal, and infinity where nothing can be said."""
    if not (x.is_floating_point() and y.is_floating_point()):
        equal = x.dtype == y.dtype and bool((x.reshape(-1) == y.reshape(-1)).all())
        return 0.0 if equal else float("inf")
    x, y = x.reshape(-1).to(torch.float64), y.reshape(-1).to(torch.float64)
    norm, gap = float(x.norm()), float((x - y).norm())
    return gap / norm if norm > 0 and gap == gap else float("inf")


# One operator against its limits: errors, codes, its operands, and how often a region rounds.
#
# For each operator W = err(b, R) / err(a, R), the floor of one operator (numerics.operator) added
# in quadrature on both sides, so that two exact results give 1 and rounding noise no ratio. Beyond
# ``Thresholds.operator`` the candidate is to blame, below its inverse the reference; few numbers
# may spread wider (numerics.floor). Narrower questions see what a median cannot: one row's error
# over the other side's there, one column's, and one slice's (a head's typical row). They share the
# judge's one chance of a false alarm (comparison.judge), as observations without siblings.
#
# Integers are codes: chosen indices may differ only where rounding explains it, that is where the
# values chosen between are nearer to each other than the two sides' inputs are.
#
# Another number in the call is a fact: the operator is flagged for it however little it changes,
# and it is the onset if nothing before it is wrong. Other dims, flags or dtypes are told, and flag
# nothing by themselves: the same job can be asked for in several ways.
#
# A region of products and additions is held against an ideal product (analyses.operators.operands):
# beyond ``Thresholds.operator_roundings`` the side that rounds so often is named.

_EXPONENTIAL = ("aten._softmax", "aten._log_softmax", "aten.exp")
"""d exp(s) = exp(s) ds: what was an absolute difference is a relative one, ‖s‖ times larger."""
_ADDITIVE = ("aten.add", "aten.sub", "aten.masked_fill", "aten.where")
_CANCELLING = (*_ADDITIVE, "aten.sum", "aten.mean", "aten.cumsum", "aten.var")
"""What went in may cancel, or a mask take the large numbers out of a row: the relative difference
of what is left is larger, the absolute one is not."""


@dataclass(frozen=True, slots=True)
class Size:
    """Holds the largest row's norm of a result without a truth, and its errors by forward."""

    largest: float
    errors: dict[Forward, OperatorErrors]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Rows or columns: ``squares`` (2, N), each side's squared error, ``floor`` (N,), and of how
    many numbers each side's error is made, ``numbers`` (2, N)."""

    squares: torch.Tensor
    floor: torch.Tensor
    numbers: torch.Tensor

    @property
    def errors(self) -> torch.Tensor:
        """(2, N), with the floor in quadrature."""
        return (self.squares + self.floor.square()).sqrt()

    def limits(self, deviate: float, sigma0: float) -> torch.Tensor:
        """(N,): how many times the other side's a side's error may be (comparison.judge)."""
        energy = (self.errors.square() - self.floor.square()) / self.floor.square()
        energy = energy.clamp_min(0.0)
        _, variance = observed(energy.numpy(), self.numbers.numpy(), 1.0)
        far = reach(deviate, variance + sigma0**2)
        return torch.from_numpy(np.exp(np.minimum(far, 300.0)))


@dataclass(slots=True)
class _Pooled:
    """All forwards of a unit: per row (T,), each side's error with the floor in quadrature.
    ``norm``: (T,), ‖R‖; ``rows``, ``columns``: as they are looked at one by one. By side: ``raw``,
    the median row without the floor, ``nonfinite``, ``over_1_ulp``."""

    between: torch.Tensor
    norm: torch.Tensor
    rows: _Parts
    columns: _Parts | None
    slices: list[torch.Tensor]
    num_values: int
    raw: list[float]
    nonfinite: list[int]
    over_1_ulp: list[float]

    @property
    def sizes(self) -> torch.Tensor:
        """(T,): how small each row is beside the median one, at most 1."""
        return (self.norm / self.norm.median()).clamp_max(1.0)


def rate_unit(
    result: OperatorResult,
    unit: OperatorUnit,
    feeds: Sequence[OperatorResult],
    sizes: dict[tuple[str, str], Size],
    thresholds: Thresholds,
    *,
    with_truth: bool,
    num_observations: int,
    alone: bool,
) -> OperatorResult:
    """One unit held against every limit. ``sizes``: of each result so far, by site and phase;
    ``num_observations``: rows of all units; ``alone``: each operator on its own inputs."""
    pooled = _pool(unit)
    if pooled is not None:
        if len(pooled.rows.floor):
            difference = float(pooled.between.square().mean().sqrt())
            floor = float(pooled.rows.floor.median())
            result = replace(result, difference=difference, floor=floor)
        if with_truth:
            result = _against_truth(result, pooled, thresholds, num_observations, alone=alone)
        else:
            entering = {
                feed.site: sizes[key] for feed in feeds if (key := (feed.site, feed.phase)) in sizes
            }
            carried = max((feed.difference or 0.0 for feed in feeds), default=0.0)
            if unit.match.reference.name in _EXPONENTIAL:
                carried *= max([1.0, *(size.largest for size in entering.values())])
            elif unit.match.reference.name in _ADDITIVE:
                # what the differences of all that goes into a sum make of its rows, relative to
                # each: of what goes in as it was made, row by row, as what lies between might
                # order the rows otherwise; a row that has none there (it is 0, or masked)
                # explains its own
                directly = (
                    []
                    if unit.region
                    else [entering[path] for path in unit.match.reference.feeds if path in entering]
                )
                squares: list[torch.Tensor] = []
                for forward, _, errors in unit.forwards:
                    if errors is None:
                        continue
                    total = torch.zeros(len(errors.rows), dtype=torch.float64)
                    for feed in directly:
                        goes_in = feed.errors.get(forward)
                        if goes_in is not None and goes_in.shape == errors.shape:
                            size = (math.prod(errors.shape),)
                            every = torch.full(size, math.nan, dtype=torch.float64)
                            every[goes_in.rows] = goes_in.between * goes_in.norm
                            total += every[errors.rows]
                    relative = torch.where(total.isnan(), errors.between, total / errors.norm)
                    squares.append(relative.square())
                rows = torch.cat(squares) if squares else torch.zeros(0)
                carried = max(carried, (float(rows.mean().sqrt()) if len(rows) else 0.0))
            result = _against_each_other(result, pooled, carried, thresholds)
            by_forward = {at: errors for at, _, errors in unit.forwards if errors is not None}
            largest = max(
                float(forward.norm.max()) if len(forward.norm) else 0.0
                for forward in by_forward.values()
            )
            sizes[result.site, unit.phase] = Size(largest, by_forward)
    result = _rate_masks(result, unit, with_truth=with_truth)
    result = _with_codes(result, unit, with_truth)
    result = _rate_roundings(result, unit, thresholds)
    result = replace(result, other_operands=unit.other_operands)
    if result.why == "nonfinite" or not any(item.is_value for item in unit.other_operands):
        return result
    verdict = result.verdict if result.verdict in ("candidate", "reference", "both") else "differs"
    return replace(
        result,
        measurable=result.limit_usage > 1,
        verdict=verdict,
        limit_usage=math.inf,
        why="operands",
    )


def _pool(unit: OperatorUnit) -> _Pooled | None:
    measured = [errors for _, _, errors in unit.forwards if errors is not None]
    if not measured:
        return None
    reference, candidate, between, floor, norm = (
        torch.cat([getattr(errors, name) for errors in measured])
        for name in ("reference", "candidate", "between", "floor", "norm")
    )
    finite = [errors for errors in measured if len(errors.reference)]  # the others have no columns
    widths = {len(errors.column_floor) for errors in finite}
    counts = torch.cat([errors.counts for errors in measured])
    numbers = torch.cat([errors.numbers for errors in measured], dim=1).minimum(counts)
    squares = torch.stack([reference, candidate]).square()
    energy, apart = squares.numpy(), between.square().numpy()
    # what both inherit from one number, as a head's row from its sharpest score, has one direction
    made = effective_numbers(numbers.numpy(), in_step(energy, apart, numbers.numpy()))
    made, _ = made_of(energy, apart, made, np.ones(len(floor), bool))
    rows = _Parts(squares, floor, torch.from_numpy(made))
    columns = None
    if len(widths) == 1 and len(reference) >= ENOUGH_ROWS:
        squares = torch.stack(
            [
                sum((getattr(errors, f"column_{side}") for errors in finite), torch.zeros(1))
                for side in ("reference", "candidate")
            ]
        )
        fourth = sum((errors.column_fourth for errors in finite), torch.zeros(1))
        base = sum((errors.column_floor for errors in finite), torch.zeros(1)).sqrt()
        columns = _Parts(squares, base, numbers_of(squares, fourth).clamp_max(len(reference)))
    num_rows = max(1, len(reference))
    return _Pooled(
        between=between,
        norm=norm,
        rows=rows,
        columns=columns,
        slices=slices_of(finite, least=ENOUGH_ROWS),
        num_values=sum(len(e.reference) * len(e.column_floor) for e in finite),
        raw=[float(x.median()) if len(x) else 0.0 for x in (reference, candidate)],
        nonfinite=[sum(e.num_nonfinite[side] for e in measured) for side in (0, 1)],
        over_1_ulp=[
            sum(e.over_1_ulp[side] * len(e.reference) for e in measured) / num_rows
            for side in (0, 1)
        ],
    )


def _against_truth(
    result: OperatorResult,
    pooled: _Pooled,
    thresholds: Thresholds,
    num_observations: int,
    *,
    alone: bool,
) -> OperatorResult:
    result = replace(
        result,
        reference_error=pooled.raw[0],
        candidate_error=pooled.raw[1],
        ulp_share_reference=pooled.over_1_ulp[0],
        ulp_share_candidate=pooled.over_1_ulp[1],
    )
    if any(pooled.nonfinite):
        verdict = SIDES[pooled.nonfinite[1] > pooled.nonfinite[0]]
        return replace(result, limit_usage=math.inf, why="nonfinite", verdict=verdict)
    if not len(pooled.rows.floor):
        return result
    wider = rare_ratio(_num_together(pooled.rows))
    a, b = map(_typical, pooled.rows.errors)
    w, peak = b / a, 1.0
    asked: list[tuple[float, Question, Side]] = []  # (share of the limit, why, side)
    asked.append((max(w, 1 / w) / (thresholds.operator * wider), "typical", SIDES[b > a]))

    # an operator has no siblings: its rows and columns are held against the other side's, or where
    # one number may make a row's error, the largest against the largest
    def far(number: float, sigma0: float) -> float:
        return float(farthest(num_observations, number, sigma0))

    together = far(_num_together(pooled.rows), thresholds.lone_spread)
    parts: list[tuple[_Parts, Question]] = [(pooled.rows, "row")]
    if pooled.columns is not None:
        parts.append((pooled.columns, "column"))
    for part, why in parts:
        if result.phase == "backward":
            excess = _excess_of_largest(part.errors, [together] * 2)
        else:
            sigma0 = thresholds.lone_spread if why == "row" else thresholds.row_spread
            excess = _excess(part, part.limits(limit_of(num_observations), sigma0))
        for side, times, usage in excess:
            asked.append((usage, why, side))
            peak = max(peak, times)
    if result.phase != "backward":
        squares, numbers = _by_size(pooled)
        limits = [far(number, thresholds.lone_spread) for number in reversed(numbers)]
        errors = (squares + pooled.rows.floor.square()).sqrt()
        for side, times, usage in _excess_of_largest(errors, limits):
            asked.append((usage, "row", side))
            peak = max(peak, times) if usage > 1 else peak
    for members in pooled.slices:
        error_a, error_b = (_typical(rows[members]) for rows in pooled.rows.errors)
        times = max(error_a / error_b, error_b / error_a)
        limit = far(_num_together(pooled.rows, members), thresholds.row_spread)
        asked.append((times / limit, "slice", SIDES[error_b > error_a]))
        peak = max(peak, times)
    usage, why, side = max(asked)
    if why == "row" and asked[0][0] > 1 and asked[0][2] == side:
        why = "typical"  # all rows are off, not the worst alone
    result = replace(
        result,
        w=w,
        peak=peak,
        limit_usage=usage,
        why=why,
        leans=side,
        verdict=side if usage > 1 else "fine",
    )
    most = thresholds.typical * wider * float(pooled.rows.floor.median())
    if usage <= 1 and alone and min(a, b) > most:
        result = replace(result, verdict="both", why="typical", limit_usage=min(a, b) / most)
    return result


def _typical(rows: torch.Tensor) -> float:
    """The median row; of a few rows their rms, as their median is one of a few."""
    few = len(rows) < ENOUGH_ROWS
    return float(rows.square().mean().sqrt() if few else rows.median())


def _num_together(rows: _Parts, members: torch.Tensor | None = None) -> int:
    """Count the numbers of the typical row's error, of the side where they are fewest, of all rows
    or of some. A median's are those of all rows, a rms' those of the rows it comes of."""
    numbers, squares = rows.numbers, rows.squares
    if members is not None:
        numbers, squares = numbers[:, members], squares[:, members]
    together = numbers.sum(1)
    if numbers.shape[1] < ENOUGH_ROWS:
        together = squares.sum(1).square() / (squares.square() / numbers).sum(1)
    return max(1, round(float(together.nan_to_num(1.0).min())))


def _excess(parts: _Parts, limits: torch.Tensor) -> Iterator[tuple[Side, float, float]]:
    """Return, of each side, the largest of its errors over the other side's there (or its median,
    if larger), and the largest share of a limit that one uses."""
    errors = parts.errors
    for side, own, other in zip(SIDES, errors, errors.flip(0), strict=True):
        times = own / other.clamp_min(other.median())
        top = int((times / limits).argmax())
        yield side, float(times[top]), float(times[top] / limits[top])


def _excess_of_largest(
    errors: torch.Tensor, limits: Sequence[float]
) -> Iterator[tuple[Side, float, float]]:
    """Each side's largest error (2, N) over the other's largest, by side's limits. Of a gradient a
    row's error may come of one number, a sum whose terms cancel (as in a norm's backward): then
    rows differ so much by chance that a row tells nothing beside the same row of the other side."""
    largest = errors.amax(1)
    for side, times, limit in zip(SIDES, (largest / largest.flip(0)).tolist(), limits, strict=True):
        yield side, times, times / limit


def _by_size(pooled: _Pooled) -> tuple[torch.Tensor, list[float]]:
    """(2, N) squared errors of rows by their size, small ones held against the median one, and of
    how many numbers each side's are made. Where a row's error is that of one number (a massive
    activation's), the same row of the other side tells nothing, and where that number is small by
    chance, neither does the row's own size."""
    rows = pooled.rows
    squares = (rows.errors.square() - rows.floor.square()).clamp_min(0.0)
    squares = squares * pooled.sizes.square()
    made_of = (squares.square() / rows.numbers).sum(1).clamp_min(1e-300)
    return squares, (squares.sum(1).square() / made_of).nan_to_num(1.0).tolist()


def _against_each_other(
    result: OperatorResult, pooled: _Pooled, carried: float, thresholds: Thresholds
) -> OperatorResult:
    """Tell without a truth by how much the relative difference grows over what correct code makes
    of what came in, ``carried``, by size where few numbers make a row's. No side is named."""
    if any(pooled.nonfinite):
        return replace(result, limit_usage=math.inf, why="nonfinite", verdict="differs")
    if result.floor is None or result.difference is None:  # no row is left
        return result
    base = math.hypot(math.sqrt(2) * result.floor, carried)
    limit = thresholds.operator_growth * rare_ratio(pooled.num_values)
    few = pooled.rows.numbers[1] < ENOUGH_ROWS
    difference = pooled.between.where(~few, pooled.between * pooled.sizes)
    usage = float(difference.square().mean().sqrt()) / base / limit if base > 0 else 0.0
    if usage > 1:
        return replace(result, limit_usage=usage, verdict="differs", why="typical")
    return replace(result, limit_usage=usage, verdict="fine", why=None)


def _rate_masks(result: OperatorResult, unit: OperatorUnit, *, with_truth: bool) -> OperatorResult:
    """Scores that one side alone hides are another mask, whatever the errors are."""
    masks = [errors.masked for _, _, errors in unit.forwards if errors and errors.masked]
    if not masks or result.why == "nonfinite":
        return result
    square = len(result.shape) > 1 and result.shape[-1] == result.shape[-2]
    wrong = [sum(mask.wrong[side] for mask in masks) for side in (0, 1)]
    side_known = with_truth and wrong[0] != wrong[1]
    return replace(
        result,
        limit_usage=math.inf,
        why="masked",
        verdict=SIDES[wrong[1] > wrong[0]] if side_known else "differs",
        other_mask=OtherMask(
            num_by_reference=sum(mask.by[0] for mask in masks),
            num_by_candidate=sum(mask.by[1] for mask in masks),
            first=masks[0].first,
            of_tokens=unit.phase == "prefill" and not unit.padded and square,
        ),
    )


def _with_codes(result: OperatorResult, unit: OperatorUnit, with_truth: bool) -> OperatorResult:
    if not unit.num_codes:
        return result
    other = unit.codes
    result = replace(result, codes=other.differing / unit.num_codes)
    if result.verdict == "unjudged":
        result = replace(result, verdict="fine")
    if other.unexplained == 0 or result.limit_usage > 1:
        return result
    verdict = "differs"
    if with_truth and other.wrong[0] != other.wrong[1]:
        verdict = SIDES[other.wrong[1] > other.wrong[0]]
    return replace(result, limit_usage=math.inf, why="codes", verdict=verdict)


def _rate_roundings(
    result: OperatorResult, unit: OperatorUnit, thresholds: Thresholds
) -> OperatorResult:
    """A region is flagged for its own roundings, where nothing else flags it more."""
    if unit.own is None:
        return result
    limits = [thresholds.operator_roundings * rare_ratio(own.num_values) for own in unit.own]
    shares = [own.times / limit for own, limit in zip(unit.own, limits, strict=True)]
    if result.verdict == "unjudged":
        result = replace(result, verdict="fine")
    if max(shares) <= result.limit_usage:
        return result
    side = SIDES[shares[1] > shares[0]]
    result = replace(result, limit_usage=max(shares), leans=side)
    if max(shares) <= 1:
        return result
    return replace(result, why="roundings", verdict="both" if min(shares) > 1 else side)


def region_result(unit: OperatorUnit) -> RegionResult:
    region = unit.region
    assert region is not None
    consumer, argument = region.consumer, None
    if consumer is not None:
        names = argument_names(consumer.reference.call)
        argument = names.get(region.number, str(region.number))
    times = (None, None) if unit.own is None else tuple(own.times for own in unit.own)
    origins = (fact("operators.origin", name=name or None) for _, name in region.inputs)
    return RegionResult(
        replaced=region.replaced,
        reference=[node.path for node in region.reference],
        candidate=[node.path for node in region.candidate],
        inputs=list(dict.fromkeys(sentence(origin) for origin in origins)),
        consumer=None if consumer is None else consumer.reference.path,
        argument=argument,
        reference_times=times[0],
        candidate_times=times[1],
    )


# Which operator, and whose: from measured operators to the first one that is to blame.
#
# Within a block errors are inherited: what feeds a wrong operator's result into others makes
# those look wrong too. So an operator is a *source* only if nothing that feeds it is beyond its
# limit (coremltools calls it the failure source), and where something that feeds it is already
# near it on the same side, and the step from it is less than a limit, the onset is moved back to
# that: what doubles an error (a square, a mean) does not make it.
#
# Rounding to whole numbers, as quantisers do, turns a difference of rounding into a whole step
# where a number lies on a tie. So what it gives is not judged by its size, nor is what that alone
# makes large: codes are judged as codes (analyses/codes).

_STEPS = ("aten.round", "aten.floor", "aten.ceil", "aten.trunc")


def rate_operators(
    measured: MeasuredOperators,
    *,
    notes: dict[str, ModuleNote],
    thresholds: Thresholds = THRESHOLDS,
    two_dtypes: bool = False,
) -> OperatorsResult:
    """Judge every unit; ``notes``: the reference's modules, for their class and block.

    ``two_dtypes``: the models' dtypes differ, so the coarser side is farther from the truth by
    right, and by more with every operator: only nan and inf are judged then.
    """
    blocks = [path for path, note in notes.items() if note.role == "block"]
    extra = {
        side: {n.path: n for n in nodes if n.path not in measured.in_regions[side]}
        for side, nodes in measured.lone.items()
    }
    results: list[OperatorResult] = []
    by_path: dict[tuple[str, str], OperatorResult] = {}
    sizes: dict[tuple[str, str], Size] = {}
    steps: set[tuple[str, str]] = set()  # of whole numbers, by path and phase
    untold: dict[tuple[str, str], None] = {}  # what pads may have made, by path and phase
    num_observations = sum(
        len(errors.rows) for unit in measured.units for *_, errors in unit.forwards if errors
    )
    for unit in measured.units:
        # what is shown is the first forward, or that with the most nan and inf on one side alone
        (sample, step), match, _ = max(
            unit.forwards, key=lambda item: sum(item[2].num_nonfinite) if item[2] else 0
        )
        reference, candidate = match.reference, match.candidate
        module = module_of(f"{reference.path}:out")
        note = notes.get(module)
        inside = [b for b in blocks if module == b or module.startswith(b + ".")]
        result = OperatorResult(
            site=reference.path,
            candidate_site=candidate.path,
            match=match.method,
            operator=reference.call.operator,
            candidate_operator=candidate.call.operator,
            kind=note.kind if note else None,
            block=max(inside, key=len) if inside else None,
            source=reference.call.source,
            backward_of=reference.call.backward_of,
            phase=unit.phase,
            order=reference.order,
            sample=sample,
            step=step,
            shape=reference.results[0].shape,
            reference_dtype=reference.results[0].dtype,
            candidate_dtype=candidate.results[0].dtype,
            identical=unit.num_equal == len(unit.forwards),
            region=None if unit.region is None or unit.region.is_copied else region_result(unit),
        )
        feeds = [by_path[key] for key in _keys(unit.feeds, unit.phase) if key in by_path]
        result = rate_unit(
            result,
            unit,
            feeds,
            sizes,
            thresholds,
            with_truth=measured.with_truth,
            num_observations=num_observations,
            alone=measured.frame == "operator",
        )
        if two_dtypes:  # casts are to other dtypes by right
            numbers = [operand for operand in result.other_operands if operand.is_value]
            result = replace(result, other_operands=numbers)
        place, entering = (result.site, unit.phase), set(_keys(unit.feeds, unit.phase))
        judged = not (two_dtypes and result.why != "nonfinite")
        beyond = judged and result.limit_usage > 1
        # what rounds to whole numbers, alike on both sides, or is fed by it; not what one side
        # computes besides, which is no tie
        rounds = bool(entering & steps) or _is_step(result)
        if beyond and unit.region is None and result.why != "nonfinite" and rounds:
            judged = beyond = False
            steps.add(place)
        # fed by what pads may have made, and beyond its limit or not judged: it may be that
        inherits = beyond or not judged or result.verdict == "unjudged"
        if unit.untold or (inherits and entering & untold.keys()):
            judged = False
            untold[place] = None
        if not judged:
            result = replace(result, limit_usage=0.0, why=None, verdict="unjudged")
        if feeds and measured.frame == "block":
            logs = [abs(math.log(feed.w)) for feed in feeds if feed.w]
            result = replace(result, w_entering=math.exp(max(logs)) if logs else None)
        for side in reversed(SIDES):
            if not result.fed_by and result.region is None:
                alone = extra[side]
                if unit.region is not None:  # its copies are members
                    alone = {other.path: other for other in measured.lone[side]}

                def feeding(call: CallNode, alone: dict[str, CallNode] = alone) -> list[CallNode]:
                    return [alone[feed] for feed in call.feeds if feed in alone]

                # calls without a partner that feed it in any forward, also through one another
                ends = [getattr(match, side) for _, match, _ in unit.forwards]
                lone = sorted(reached(ends, feeding), key=lambda node: node.order)
                fed_by = [call.path for call in lone]
                result = replace(result, fed_by=fed_by, fed_by_side=side if fed_by else None)
        # arguments from elsewhere whose values differ by more than what feeds the operator does
        carried = max((feed.difference or 0.0 for feed in feeds), default=0.0)
        most = thresholds.operator_growth * math.hypot(
            math.sqrt(2) * (result.floor or 0.0), carried
        )
        elsewhere = [x for x in unit.other_inputs if x.difference is None or x.difference > most]
        result = replace(result, other_inputs=elsewhere)
        results.append(result)
        by_path[place] = result
    way = first_source(measured, by_path, thresholds)
    verdict = way[0].verdict if way else None
    moved = {id(result) for result in way[1:]}
    results = [replace(row, verdict=verdict) if id(row) in moved else row for row in results]
    remarks = []
    sides = [
        fact(
            "operators.unreached",
            calls=counted(nodes),
            side=side,
            paths=[node.path for node in nodes[:2]],
            more=len(nodes) > 2,
        )
        for side, nodes in measured.unreached.items()
        if nodes
    ]
    if len(sides) > 1:  # what one side computes besides has nothing to be compared with
        remarks.append(fact("operators.nothing_common", sides=sides))
    paths = list(dict.fromkeys(path for path, _ in untold))
    if paths:
        remarks.append(fact("operators.pads", num=len(paths), paths=paths[:2], more=len(paths) > 2))
    samples = measured.rerouted
    if samples:
        remarks.append(fact("operators.rerouted", num=len(samples), samples=samples))
    return OperatorsResult(
        frame="operator" if measured.frame == "operator" else "block",
        judged="truth" if measured.with_truth else "difference",
        num_matched=len(results),
        num_value_matches=sum(result.match == "value" for result in results),
        onset=way[-1].site if way else None,
        side=verdict if verdict in ("reference", "candidate", "both") else None,
        results=results,
        unmatched=[
            UnmatchedOperator(
                side=side, site=node.path, operator=node.call.operator, source=node.call.source
            )
            for side in SIDES
            for node in extra[side].values()
        ],
        remarks=remarks,
    )


def _keys(paths: Iterable[str], phase: str) -> list[tuple[str, str]]:
    """Calls of the same forward, with their phases: a backward is fed by its forward too."""
    return [(path, phase_of(path, int(phase == "decode"))) for path in paths]


def _is_step(result: OperatorResult) -> bool:
    """The same rounding to whole numbers on both sides."""
    names = {
        name.rpartition(".")[0] if name.count(".") > 1 else name
        for name in (result.operator, result.candidate_operator)
    }
    return len(names) == 1 and names <= set(_STEPS)


def first_source(
    measured: MeasuredOperators,
    by_path: dict[tuple[str, str], OperatorResult],
    thresholds: Thresholds,
) -> list[OperatorResult]:
    """Go from the first source in execution order back to where its error was made, which is last;
    the prefill comes before the decode steps. Empty where nothing is beyond its limit."""
    entering = {(unit.match.reference.path, unit.phase): unit.feeds for unit in measured.units}

    def feeds(result: OperatorResult) -> list[OperatorResult]:
        """Those that are judged: what feeds an unjudged one feeds what that feeds."""
        judged: list[OperatorResult] = []
        waiting, seen = [result], {id(result)}
        while waiting:
            current = waiting.pop()
            keys = _keys(entering[current.site, current.phase], current.phase)
            feeds_here = [by_path[key] for key in keys if key in by_path]
            feeds_here = [feed for feed in feeds_here if id(feed) not in seen]
            seen.update(id(feed) for feed in feeds_here)
            judged += [feed for feed in feeds_here if feed.verdict != "unjudged"]
            waiting += [feed for feed in feeds_here if feed.verdict == "unjudged"]
        return judged

    flagged = [r for r in by_path.values() if r.limit_usage > 1 and r.verdict != "unjudged"]
    if measured.frame == "operator":
        return flagged[:1]
    sources = [r for r in flagged if not any(feed.limit_usage > 1 for feed in feeds(r))]
    if not sources:
        return flagged[:1]
    onset = min(sources, key=lambda r: (r.phase == "decode", r.order))
    return _moved_back(onset, feeds, thresholds) if measured.with_truth else [onset]


def _moved_back(
    onset: OperatorResult,
    feeds: Callable[[OperatorResult], list[OperatorResult]],
    thresholds: Thresholds,
) -> list[OperatorResult]:
    """Move on to what feeds it, while that is on the same side's way to the limit and the step from
    it is less than the limit itself: an error that is mostly inherited was made before."""
    side, way = onset.verdict, [onset]
    while onset.why in ("typical", "row", "column", "slice", None):
        before = [
            feed
            for feed in feeds(onset)
            if feed.leans == side
            and feed.limit_usage > NEAR_LIMIT_SHARE
            and onset.limit_usage / feed.limit_usage < thresholds.operator
        ]
        if not before:
            break
        onset = max(before, key=lambda feed: feed.limit_usage)
        way.append(onset)
    return way


# Operators of two runs, in the passes where both sides' blocks had equal inputs.
#
# The anchored pass, or where nothing is found there the escalated one, which in float32 sees a
# wrong formula far below the floor of a 16-bit dtype. Both sides must have recorded operators.


def have_two_dtypes(a: Manifest, b: Manifest) -> bool:
    return a.model.dtype != b.model.dtype or work_dtype(a) != work_dtype(b)


def operator_notes(a: Run, b: Run, operators: OperatorsResult | None) -> list[Fact]:
    """Say why operators that were recorded are not compared; nothing where they are."""
    counts = {
        name: sum(record.call is not None for record in run.records)
        for name, run in (("reference", a), ("candidate", b))
    }
    if operators is not None and have_two_dtypes(a.manifest, b.manifest):
        return [fact("operators.two_dtypes")]
    if operators is not None or not any(counts.values()):
        return []
    if all(counts.values()):
        other_batches = a.manifest.tokens.groups != b.manifest.tokens.groups
        code = "other_batches" if other_batches else "other_block_inputs"
        return [fact(f"operators.{code}")]
    side, other = sorted(counts, key=lambda name: -counts[name])
    return [fact("operators.one_side_only", side=side, num=counts[side], other=other)]
