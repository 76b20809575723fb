"""Operators measured: each call of the reference, its partner, and what is right there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from divergence.compare.graph import Forward, Node, forwards_of, operator_passes
from divergence.compare.inputs import other_inputs
from divergence.compare.match import Match, match_calls, match_paths
from divergence.compare.operators_result import OtherInput
from divergence.compare.rerouted import CHOOSING, Rerouted, rerouted_in
from divergence.numerics.formats import format_named
from divergence.numerics.operator import OperatorErrors, measure_operator
from divergence.run.reader import Run
from divergence.run.record import Record

__all__ = ["Measured", "OperatorUnit", "measure_operators", "num_terms"]

_SAME = 0.2
"""Two results are the same value where they differ by less, relatively: far beyond any rounding
and any fault worth the name, and far below what two different values of a block differ by."""


@dataclass(slots=True)
class Codes:
    """Integer results. ``differing``: elements that the sides do not share; ``unexplained``: of
    these, what rounding of the inputs does not explain; ``wrong``: of the unexplained ones,
    what differs from the truth, on each side."""

    differing: int = 0
    unexplained: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(slots=True)
class OperatorUnit:
    """One matched operator over the forwards of a phase, in order."""

    match: Match
    phase: str
    forwards: list[tuple[Forward, Match, OperatorErrors | None]] = field(default_factory=list)
    num_equal: int = 0
    num_codes: int = 0
    codes: Codes = field(default_factory=lambda: Codes())
    other_inputs: list[OtherInput] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """``units`` in the reference's execution order; ``frame``: see OperatorsResult."""

    units: list[OperatorUnit]
    lone: dict[str, list[Node]]
    frame: str
    with_truth: bool
    skipped: dict[str, int]


def measure_operators(
    a: Run,
    b: Run,
    passes: tuple[str, str],
    *,
    truth: Run | None = None,
    truth_pass: str = "anchored",
    rename: Callable[[str], str] = lambda site: site,
) -> Measured | None:
    """None where not both sides hold operators in these passes.

    ``passes``: the reference's and the candidate's. Where the reference was computed in float64
    (a replay with ``--reference``), it is the truth. Raises RunFormatError on bad bytes.
    """
    if passes[0] not in operator_passes(a) or passes[1] not in operator_passes(b):
        return None
    for run, pass_ in ((a, passes[0]), (b, passes[1]), (truth, truth_pass)):
        if run is not None:  # most of it will be looked at
            run.expect(record for record in run.records if record.pass_ == pass_)
    ours, theirs = forwards_of(a, passes[0]), forwards_of(b, passes[1])
    right = {} if truth is None else forwards_of(truth, truth_pass)
    exact = a.manifest.settings.compute_dtype == "float64"
    replays = "replayed" in passes
    units: dict[tuple[str, str, str], OperatorUnit] = {}
    lone: dict[str, list[Node]] = {"reference": [], "candidate": []}
    for forward in sorted(set(ours) & set(theirs)):
        phase = "prefill" if forward[1] == 0 else "decode"

        def same(one: Node, two: Node) -> bool:
            return _same_value(a.read(one.results[0]), b.read(two.results[0]))

        if replays:
            matches, only_a, only_b = match_paths(ours[forward], theirs[forward])
        else:
            matches, only_a, only_b = match_calls(
                ours[forward], theirs[forward], same_value=same, rename=rename
            )
        rights = _Rights(truth, ours[forward], right.get(forward, []), exact=exact, run=a)
        partners = {match.reference.path: match.candidate.path for match in matches}

        def read(match: Match, index: int) -> tuple[torch.Tensor | None, ...]:
            right_there = rights.of(match.reference, index)  # noqa: B023
            return (
                a.read(match.reference.results[index]),
                b.read(match.candidate.results[index]),
                None if right_there is None else right_there[0].read(right_there[1]),
            )

        routings = [] if replays else rerouted_in(matches, read)
        for match in matches:
            key = (match.reference.path, match.candidate.path, phase)
            unit = units.setdefault(key, OperatorUnit(match, phase))
            _measure(unit, forward, match, a, b, rights, routings)
            if not replays:
                unit.other_inputs = _worse(
                    unit.other_inputs,
                    other_inputs(match.reference, match.candidate, a, b, partner=partners.get),
                )
        for side, nodes in (("reference", only_a), ("candidate", only_b)):
            known = {node.path for node in lone[side]}
            lone[side] += [node for node in nodes if node.path not in known]
    in_order = sorted(units.values(), key=lambda u: (u.phase == "decode", u.match.reference.order))
    return Measured(
        units=in_order,
        lone=lone,
        frame="operator" if replays else "block",
        with_truth=exact or truth is not None,
        skipped={},
    )


def _worse(known: list[OtherInput], new: list[OtherInput]) -> list[OtherInput]:
    """Of each argument the one that differs most, over the forwards."""
    by_argument = {item.argument: item for item in known}
    for item in new:
        before = by_argument.get(item.argument)
        if before is None or (item.difference or 0.0) > (before.difference or 0.0):
            by_argument[item.argument] = item
    return list(by_argument.values())


class _Rights:
    """What is right at each call of the reference in one forward."""

    def __init__(
        self, truth: Run | None, ours: list[Node], right: list[Node], *, exact: bool, run: Run
    ) -> None:
        self._truth, self._run, self._exact = truth, run, exact
        self.exist = exact or truth is not None
        matches, _, _ = match_calls(ours, right)
        self._by_path = {match.reference.path: match.candidate.results for match in matches}
        for node in ours:  # in exact arithmetic a cast changes nothing
            if node.path not in self._by_path and node.is_cast:
                maker = node.feeds[0] if node.feeds else None
                if maker in self._by_path:
                    self._by_path[node.path] = self._by_path[maker]

    def of(self, node: Node, index: int) -> tuple[Run, Record] | None:
        """The run and record that hold it, or None."""
        if self._exact:
            return self._run, node.results[index]
        found = self._by_path.get(node.path, ())
        if self._truth is None or index >= len(found):
            return None
        record = found[index]
        return (self._truth, record) if record.numel == node.results[index].numel else None


def _measure(
    unit: OperatorUnit,
    forward: Forward,
    match: Match,
    a: Run,
    b: Run,
    rights: _Rights,
    routings: list[Rerouted],
) -> None:
    """All results of one call; the first that is floating-point is the measured one."""
    errors: OperatorErrors | None = None
    equal = True
    for index, (one, two) in enumerate(
        zip(match.reference.results, match.candidate.results, strict=False)
    ):
        right = rights.of(match.reference, index)
        same = one.xxh3 == two.xxh3 and one.dtype == two.dtype
        equal = equal and same
        if one.numel != two.numel or one.numel == 0:
            continue
        x, y = a.read(one), b.read(two)
        r = None if right is None else right[0].read(right[1])
        kinds = {format_named(record.dtype).kind for record in (one, two)}
        if kinds <= {"int", "bool"}:
            unit.num_codes += one.numel
            if not same:
                _count_codes(unit.codes, match, x, y, r, a, b)
        elif kinds == {"float"} and errors is None:
            aligned: tuple[torch.Tensor | None, ...] | None = (x, y, r)
            for routing in routings:
                aligned = aligned and routing.align(match.reference.path, aligned)
            if aligned is not None and (r is not None or not rights.exist):
                errors = measure_operator(*aligned, num_terms=num_terms(match.reference))
    unit.num_equal += equal
    unit.forwards.append((forward, match, errors))


def _count_codes(
    codes: Codes,
    match: Match,
    x: torch.Tensor,
    y: torch.Tensor,
    r: torch.Tensor | None,
    a: Run,
    b: Run,
) -> None:
    other = x != y.reshape(x.shape)
    codes.differing += int(other.sum())
    entering = [_entering(node, run) for node, run in ((match.reference, a), (match.candidate, b))]
    name = match.reference.name.partition(".")[2]
    if name in CHOOSING and all(t is not None and t.is_floating_point() for t in entering):
        odd = other & ~_rounding_explains(*entering, x, y.reshape(x.shape), match.reference)
    else:  # the same numbers went in: the codes must be the same; else they may not be
        equal = None not in entering and torch.equal(*entering)
        odd = other if equal else torch.zeros_like(other)
    codes.unexplained += int(odd.sum())
    if r is not None and not r.is_floating_point() and r.numel() == x.numel():
        r = r.reshape(x.shape)
        for side, chosen in enumerate((x, y.reshape(x.shape))):
            codes.wrong[side] += int((odd & (chosen != r)).sum())


def _entering(node: Node, run: Run) -> torch.Tensor | None:
    """The first operand's value, as the operator saw it."""
    if not node.call.operands or node.call.operands[0].site is None:
        return None
    own, operand = node.results[0], node.call.operands[0]
    record = run.find((own.pass_, own.sample, own.step, operand.site))
    return None if record is None else run.read(record).reshape(operand.shape)


def _rounding_explains(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, y: torch.Tensor, node: Node
) -> torch.Tensor:
    """Per chosen index: are the two choices nearer to each other than the inputs p, q are? Exact
    ties are not explained: there the order of ties is the operator's own."""
    dim = node.call.arguments.get("dim", -1)
    if not isinstance(dim, int) or p.shape != q.shape or p.ndim != x.ndim:
        return torch.zeros(x.shape, dtype=torch.bool)
    p, q = p.double(), q.double()
    gaps = [(side.gather(dim, x) - side.gather(dim, y)).abs() for side in (p, q)]
    apart = (p - q).abs().amax(dim, keepdim=True)
    near = (gaps[0] <= 4 * apart) & (gaps[1] <= 4 * apart)
    return near & ~((gaps[0] == 0) & (gaps[1] == 0))


def num_terms(node: Node) -> int:
    """How many products or terms one number of the result is the sum of."""
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
        terms = 1
        for size in shapes[1][1:]:
            terms *= size
        return terms
    if "norm" in name or "softmax" in name:
        return shapes[0][-1] if shapes[0] else 1
    total = 1
    for size in shapes[0]:
        total *= size
    if name in ("mean", "sum", "cumsum", "var", "std", "prod", "logsumexp", "linalg_vector_norm"):
        out = max(1, node.results[0].numel)
        return max(1, total // out) if name != "cumsum" else max(1, max(shapes[0], default=1))
    return 1


def _same_value(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not (x.is_floating_point() and y.is_floating_point()):
        return x.dtype == y.dtype and bool((x.reshape(-1) == y.reshape(-1)).all())
    x, y = x.reshape(-1).to(torch.float64), y.reshape(-1).to(torch.float64)
    norm = float(x.norm())
    return norm > 0 and float((x - y).norm()) < _SAME * norm
