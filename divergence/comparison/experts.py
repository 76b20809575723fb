"""Experts: who was sent where on each side, what routing rounding explains, and what it hides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np

from divergence.comparison.align import Pair, Piece, piece_like
from divergence.comparison.constants import FALSE_ALARM_RATE, FEWEST_WITNESSES, ROUTER_TIE_DISTANCE
from divergence.comparison.result import SiteResult
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.formats import format_named, format_of
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import BACKWARD, is_operator_site, module_of
from divergence.words import Side

# Routers: does rounding explain that two sides sent a token to different experts?
#
# Where the logits decide, which is seen from tokens of which they do (comparison.experts), each
# token's margin tells. Where something beside them decides (a bias, groups), the margin is not
# known, but how often rounding may decide is: a choice changes within twice the logits' own
# difference of a tie, and few tokens lie so near one. A router of which far more tokens differ is
# not excused.


@dataclass(frozen=True, slots=True)
class Flips:
    """Choices of one router that flipped. ``places`` tells apart the tokens sent elsewhere that are
    no tie of their logits (the same token behind the same beginning counts once); ``expected``: how
    many of all tokens rounding may send elsewhere, at most."""

    places: frozenset[tuple[float, ...]]
    expected: float

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], logits: Sequence[np.ndarray | None]) -> Flips:
        """The flips of one forward: both sides' experts (T, k) and logits (T, E)."""
        a, b = logits
        if a is None or b is None or a.shape != b.shape or len(a) != len(rows[0]):
            return cls(frozenset(), math.inf)
        values, other = wide(a), wide(b)
        with np.errstate(all="ignore"):
            apart = np.abs(values - other).max(axis=-1)
            # sigmoids and softmaxes are flat at large logits: what is rounded there moves more
            slope = 1 / (1 + np.exp(np.abs(values).max(axis=-1)))
            near = 2 * apart - tie(a) + ROUTER_TIE_DISTANCE / slope
            spread = 1.5 * _lower_median(np.abs(values - _lower_median(values)[:, None]))
            width = np.minimum(spread, values.std(axis=-1, ddof=1))
            # E logits lie around one boundary: their density is at most about E over their width
            chance = np.nan_to_num(values.shape[-1] * near / width, nan=1.0, posinf=1.0).clip(max=1)
        places = set()
        for token in np.flatnonzero(~same_experts(rows)).tolist():
            gap = _gap(rows[0][token], rows[1][token], values[token])
            if abs(gap) > float(near[token]):
                scaled = (values[token] / max(width[token], 1e-300)).tolist()
                places.add(tuple(round(value, 1) for value in scaled))
        return cls(frozenset(places), float(chance.sum()))

    @classmethod
    def together(cls, forwards: Iterable[Flips]) -> Flips:
        """The flips of all forwards of a router."""
        places = list(forwards)
        return cls(
            frozenset[tuple[float, ...]]().union(*(flips.places for flips in places)),
            sum(flips.expected for flips in places),
        )

    def beyond_chance(self, num_routers: int) -> bool:
        """Are there more than rounding makes, in any of so many? By Chernoff's bound on a Poisson
        number; all routers share the judge's chance of a false alarm."""
        count, expected = len(self.places), max(self.expected, 1e-30)
        return count > expected and (
            count - expected - count * math.log(count / expected)
            < math.log(FALSE_ALARM_RATE / max(1, num_routers))
        )


def logits_decide(manifest: Manifest, router: str) -> bool:
    """Is nothing known that chooses beside the logits of this router (a module's path): no
    parameter next to it but its matrix, as of a bias, and no groups of experts?"""
    parent = router.rpartition(".")[0] + "."
    beside = (
        name.rpartition(".")[2]
        for name in manifest.model.digests
        if name.startswith(parent) and "expert" not in name.removeprefix(parent).partition(".")[0]
    )
    groups = (
        value
        for key, value in manifest.model.config.items()
        if key.rpartition(".")[2].endswith(("n_group", "topk_group", "expert_group"))
    )
    return all(leaf == "weight" for leaf in beside) and all(
        value in (None, 0, 1) for value in groups
    )


def same_experts(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Are the experts (T,) the same on all sides, in whatever order?"""
    first = np.sort(rows[0])
    alike = np.ones(len(first), bool)
    for other in rows[1:]:
        alike &= (np.sort(other) == first).all(axis=-1)
    return alike


def explained_choices(
    alike: np.ndarray,
    rows: Sequence[np.ndarray],
    logits: Sequence[np.ndarray | None],
    usual: Callable[[], Sequence[np.ndarray | None]] = tuple,
    beyond_chance: Callable[[], bool] = bool,
) -> tuple[np.ndarray, float | None]:
    """Tells (T,) whether rounding explains a choice that differs, and the widest gap that it
    decided. ``usual()``: each side's leads in all forwards, which are read where this one leaves a
    doubt; ``beyond_chance()``: did this router send more tokens elsewhere than rounding does? Asked
    where the logits alone do not decide."""
    explained = np.ones_like(alike)
    if alike.all():
        return explained, None
    # an expert more than once: no rounding makes that of the k largest
    in_order = [np.sort(chosen) for chosen in rows]
    twice = np.zeros(len(alike), bool)
    for chosen in in_order:
        twice |= (chosen[:, 1:] == chosen[:, :-1]).any(axis=-1)
    if not twice[alike].any():  # else it is this model's way
        explained &= ~twice
    if any(logit is None for logit in logits):
        return explained, None
    sides = [wide(logit) for logit in logits if logit is not None]
    leads = [lead_of(chosen, values) for chosen, values in zip(rows, sides, strict=True)]
    behind_at_most = np.minimum(*(tie(logit) for logit in logits if logit is not None))
    follow = [lead >= behind_at_most for lead in leads]
    witnesses = [lead for lead, side in zip(leads, follow, strict=True) if side.all()]
    if all(side[alike].all() for side in follow):
        witnesses.append(leads[0][alike])
    behind = -np.minimum(*leads)
    if witnesses and (~alike & explained & (behind > -behind_at_most)).any():
        witnesses += [lead for lead in usual() if lead is not None]
    for lead in witnesses:
        closer = np.searchsorted(np.sort(lead), behind)
        explained &= alike | (behind <= -behind_at_most) | (closer < FEWEST_WITNESSES)
    # what is left: not the logits alone decide (a bias, groups), or there are too few to know
    untold = ~same_experts(rows) & explained & (behind > -behind_at_most)
    if untold.any() and beyond_chance():
        explained &= ~untold
    if not witnesses:
        return explained, None
    gaps = [_gap(rows[0][t], rows[1][t], sides[0][t]) for t in np.flatnonzero(~alike & explained)]
    return explained, max(gaps, default=None)


def lead_of(chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The lead (T,): the least of the chosen experts' values (T, E) less the greatest of the
    others'; not negative where the chosen (T, k) are the k largest."""
    routed = np.zeros(values.shape, bool)
    np.put_along_axis(routed, chosen.astype(np.int64).clip(0, values.shape[-1] - 1), True, axis=1)
    least = np.where(routed, values, np.inf).min(axis=-1)
    most = np.where(routed, -np.inf, values).max(axis=-1)
    difference: np.ndarray = least - most
    return difference


def follows(chosen: np.ndarray, logits: np.ndarray | None) -> bool:
    """Are every token's experts the largest of its logits?"""
    if logits is None or len(chosen) != len(logits):
        return False
    return bool((lead_of(chosen, wide(logits)) >= tie(logits)).all())


def tie(logits: np.ndarray) -> np.ndarray:
    """The tie (T,) of logits (T, E): how far the chosen may lie behind and still be the largest; <
    0."""
    unit = max(ROUTER_TIE_DISTANCE, 2.0 ** -format_of(logits.dtype).mantissa_bits)
    behind: np.ndarray = -unit * np.abs(wide(logits)).max(axis=-1)
    return behind


def _lower_median(values: np.ndarray) -> np.ndarray:
    """The lower median of each row; nan where it holds one."""
    middle = (values.shape[-1] - 1) // 2
    medians: np.ndarray = np.partition(values, middle, axis=-1)[..., middle]
    return np.where(np.isnan(values).any(axis=-1), np.nan, medians)


def _gap(experts_a: np.ndarray, experts_b: np.ndarray, values: np.ndarray) -> float:
    """The gap between the experts that one side alone chose, in these values."""
    left, right = set(experts_a.tolist()), set(experts_b.tolist())
    if left <= right or right <= left:
        return 0.0
    return float(values[sorted(left - right)].max() - values[sorted(right - left)].min())


# Routing: which tokens both sides, and the truth, sent to the same experts.
#
# A router chooses k of E experts for each token: a discrete choice. Where two scores are nearer
# than rounding, correct machines choose differently, and from there on that token's rows are other
# rows: an error of any size, without any fault. All other tokens are computed by the same experts
# on both sides, and one of them that is far off is a fault, of one expert perhaps.
#
# So in an anchored forward (of which every block gets recorded inputs, so that no choice of an
# earlier block plays in) a token is *kept* for judging if it is chosen for alike. One that is not
# is left out and counted, unless rounding does not explain it: where the recorded logits L decide
# (each side's experts are its k largest on every token that is chosen for alike, or one side's on
# every token at all; ten closer ones among them: of this forward, or of all that this side's router
# made), a token whose experts are not the largest of its own side's L was sent elsewhere by the
# choice itself. It is kept, and convicts. So it is where something beside the logits decides, and
# more of the router's tokens went elsewhere than lie near a tie. That the logits themselves are no
# farther off than rounding is judged at the router, like any other result. Nor does rounding choose
# an expert twice.
#
# Known only where every side recorded the choice (recording.structure), else None.
# The free pass tells nothing: one rerouted token changes all later ones.


@dataclass(frozen=True, slots=True)
class Routed:
    """One pair's tokens. ``kept`` (T,) bool: judged; None where all are. ``num_rerouted``: left
    out; ``margin``: the largest gap of the reference's logits that was decided the other way, None
    where none was or it is not known. ``experts``: (T, k) the reference's, None where the pair
    comes before the choice. ``unexplained``: the first choice that rounding does not explain."""

    kept: np.ndarray | None
    num_rerouted: int
    margin: float | None
    experts: np.ndarray | None
    unexplained: Unexplained | None = None


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A choice of one forward that no rounding explains at ``tokens``, rows of ``num_tokens``:
    ``site`` has it, ``router`` made it (of unknown name: None), ``experts`` are both sides';
    ``follows``: does a side's every token go to the largest of its own logits?"""

    site: str
    router: str | None
    tokens: list[int]
    num_tokens: int
    experts: tuple[np.ndarray, np.ndarray]
    follows: tuple[bool, bool]


_ALL = Routed(None, 0, None, None)

_Choice = tuple[str | int | None, ...]
"""(pass, sample, step, block); with ``logits`` before it, of the router."""


class Routing:
    """Routing choices of two runs, read when asked for."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._reference, self._candidate = reference, candidate
        self._blocks = routed_blocks(reference.manifest)
        self._choices: dict[int, dict[_Choice, list[Record]]] = {}
        self._read: dict[tuple[int, str, int, int, str], np.ndarray | None] = {}
        self._usual: dict[tuple[int, str, str], np.ndarray | None] = {}
        self._flips: dict[tuple[str, str], bool] = {}

    def of(
        self, pair: Pair, num_rows: int, truth: tuple[Run, Record] | None = None
    ) -> Routed | None:
        """Return what may be judged of a pair of ``num_rows`` rows; None where that is not known.
        ``truth``: its run and record, whose choices must agree as well."""
        if not self._blocks:
            return _ALL
        block = _block_of(module_of(pair.reference.record.site), self._blocks)
        if block is None and pair.pass_ != "free":
            return _ALL
        if BACKWARD in pair.reference.record.site:
            return self._routed_backward(pair, num_rows, truth)
        if block is None:
            return _ALL
        if pair.pass_ == "free":
            return None
        sides = [(self._reference, pair.reference), (self._candidate, pair.candidate)]
        if truth is not None:
            sides.append((truth[0], piece_like(truth[1], pair)))
        choices = [self._block_choices(run, piece.record) for run, piece in sides]
        if not all(choices) or len({len(records) for records in choices}) > 1:
            return None
        kept = experts = margin = unexplained = None
        for choice in zip(*choices, strict=True):
            if choice[0].order > pair.reference.record.order:
                continue  # chosen later: it plays no part here
            read = [
                self._rows(run, record, piece)
                for (run, piece), record in zip(sides, choice, strict=True)
            ]
            rows = [row for row in read if row is not None]
            if len(rows) < len(read) or any(row.shape != rows[0].shape for row in rows):
                return None
            alike = same_experts(rows)
            logits = [
                self._logits(run, record, piece)
                for (run, piece), record in zip(sides[:2], choice[:2], strict=True)
            ]
            made = [(run, record) for (run, _), record in zip(sides[:2], choice[:2], strict=True)]
            usual = partial(self._usual_leads, made)
            beyond_chance = partial(self._beyond_chance, made, rows[:2], logits)
            explained, gap = explained_choices(alike, rows[:2], logits, usual, beyond_chance)
            tokens = np.flatnonzero(~explained & ~same_experts(rows[:2])).tolist()
            if tokens and unexplained is None:
                router = self._router_of(self._reference, choice[0])
                unexplained = Unexplained(
                    choice[0].site,
                    None if router is None else router.site,
                    tokens,
                    len(alike),
                    (rows[0][tokens], rows[1][tokens]),
                    (follows(rows[0], logits[0]), follows(rows[1], logits[1])),
                )
            alike = alike | ~explained
            kept = alike if kept is None else kept & alike
            experts = rows[0]
            margin = gap if margin is None else max(margin, gap or margin)
        if kept is None:
            return _ALL
        num_rerouted = int((~kept).sum())
        if len(kept) != num_rows:  # rows that are no tokens: sorted by expert, or parts of them
            return (
                _ALL
                if num_rerouted == 0
                else Routed(np.zeros(num_rows, bool), num_rerouted, margin, None)
            )
        return Routed(kept if num_rerouted else None, num_rerouted, margin, experts, unexplained)

    def _routed_backward(
        self, pair: Pair, num_rows: int, truth: tuple[Run, Record] | None
    ) -> Routed:
        """All rows or none: attention carries a rerouted token's gradient to all before it, and a
        parameter's gradient is a sum over the tokens of all prompts."""
        record = pair.reference.record
        nothing = Routed(np.zeros(num_rows, bool), 0, None, None)
        if pair.pass_ == "free":
            return nothing
        sides = [(self._reference, record), (self._candidate, pair.candidate.record)]
        sides += [] if truth is None else [truth]  # each in its own pass
        whole = ":out." in record.site  # of a parameter
        samples = [group[0] for group in self._reference.manifest.tokens.groups]
        count = 0
        for sample in samples if whole else [record.sample]:
            choices = [
                self._block_choices(run, msgspec.structs.replace(own, sample=sample))
                for run, own in sides
            ]
            if not all(choices) or len({len(records) for records in choices}) > 1:
                return nothing
            for choice in zip(*choices, strict=True):
                read = [self._tensor(run, rec) for (run, _), rec in zip(sides, choice, strict=True)]
                rows = [np.sort(_by_token(ids)) for ids in read if ids is not None]
                if len(rows) < len(read) or any(row.shape != rows[0].shape for row in rows):
                    return nothing
                count += int((~same_experts(rows)).sum())
        return _ALL if count == 0 else replace(nothing, num_rerouted=count)

    def is_known(self, pair: Pair) -> bool:
        """Did both sides record the choices of this pair's forward? True where there are none."""
        if _block_of(module_of(pair.reference.record.site), self._blocks) is None:
            return True
        sides = (self._reference, pair.reference), (self._candidate, pair.candidate)
        return pair.pass_ != "free" and all(
            self._block_choices(run, piece.record) for run, piece in sides
        )

    def _block_choices(self, run: Run, record: Record, *kind: str) -> list[Record]:
        """The choices that a record's block made in its forward, in order; with ``logits``, the
        routers' results."""
        choices = self._choices.get(id(run))
        if choices is None:
            choices = self._choices[id(run)] = choices_in(run)
        block = _block_of(module_of(record.site), routed_blocks(run.manifest))
        return choices.get((*kind, record.pass_, record.sample, record.step, block), [])

    def _rows(self, run: Run, record: Record | None, piece: Piece) -> np.ndarray | None:
        """The piece's tokens' rows of a choice (T, k), or of a router's logits (T, E)."""
        tensor = None if record is None else self._tensor(run, record)
        if record is None or tensor is None:
            return None
        return _piece_rows(tensor, record, run.manifest, piece)

    def _logits(self, run: Run, choice: Record, piece: Piece) -> np.ndarray | None:
        """(T, E) of the router beside the experts that were chosen."""
        return self._rows(run, self._router_of(run, choice), piece)

    def _router_of(self, run: Run, choice: Record) -> Record | None:
        """The logits that the choice was made of."""
        parent = module_of(choice.site).rpartition(".")[0] + "."
        beside = (
            record
            for record in self._block_choices(run, choice, "logits")
            if module_of(record.site).startswith(parent)
        )
        return next(beside, None)

    def _router_choices(self, run: Run, choice: Record) -> list[Record]:
        """All choices of the pass that this router made, in whatever prompt and step."""
        return [
            record
            for records in self._choices[id(run)].values()
            for record in records
            if (record.pass_, record.site) == (choice.pass_, choice.site)
        ]

    def _beyond_chance(
        self,
        made: Sequence[tuple[Run, Record]],
        rows: Sequence[np.ndarray],
        logits: Sequence[np.ndarray | None],
    ) -> bool:
        """Judge what this router sent elsewhere in all forwards of the pass that both sides batched
        alike; where that is none, in the one of these ``rows``."""
        (a, choice_a), (b, choice_b) = made
        key = choice_a.pass_, choice_a.site
        if key not in self._flips:
            routers_b = {(r.sample, r.step): r for r in self._router_choices(b, choice_b)}
            forwards = []
            for record in self._router_choices(a, choice_a):
                other = routers_b.get((record.sample, record.step))
                if other is None:
                    continue
                pieces = [
                    (run, own, Piece(own, own.sample)) for run, own in ((a, record), (b, other))
                ]
                chosen = [
                    rows for rows in (self._rows(*side) for side in pieces) if rows is not None
                ]
                if len(chosen) == 2 and chosen[0].shape == chosen[1].shape:
                    forwards.append(Flips.of(chosen, [self._logits(*side) for side in pieces]))
            flips = Flips.together(forwards or [Flips.of(rows, logits)])
            self._flips[key] = flips.beyond_chance(len(self._blocks))
        return self._flips[key]

    def _usual_leads(self, made: Sequence[tuple[Run, Record]]) -> list[np.ndarray | None]:
        """Return, of each run's choice, the leads of all tokens that this router chose for in this
        pass; None where one did not follow its logits, or that is not known."""
        for run, choice in made:
            key = id(run), choice.pass_, choice.site
            if key in self._usual:
                continue
            leads: list[np.ndarray | None] = []
            for record in self._router_choices(run, choice):
                whole = Piece(record, record.sample)
                chosen, logits = self._rows(run, record, whole), self._logits(run, record, whole)
                leads.append(None)
                if chosen is not None and logits is not None and follows(chosen, logits):
                    leads[-1] = lead_of(chosen, wide(logits))
            numbers = [lead for lead in leads if lead is not None]
            self._usual[key] = np.concatenate(numbers) if len(numbers) == len(leads) else None
        return [self._usual[id(run), choice.pass_, choice.site] for run, choice in made]

    def _tensor(self, run: Run, record: Record) -> np.ndarray | None:
        key = (id(run), record.pass_, record.sample, record.step, record.site)
        if key not in self._read:
            if len(self._read) > _REMEMBERED:
                self._read.clear()
            self._read[key] = run.array(record) if run.has_bytes(record) else None
        return self._read[key]


_REMEMBERED = 512


def routed_blocks(manifest: Manifest) -> list[str]:
    """The blocks that choose experts."""
    return [path for path, note in manifest.plan.modules.items() if note.routed]


def _block_of(path: str, blocks: Sequence[str]) -> str | None:
    return next((b for b in blocks if path == b or path.startswith(b + ".")), None)


def choices_in(run: Run) -> dict[_Choice, list[Record]]:
    """Finds by (pass, sample, step, block) which experts, (T, k) integers; with ``logits`` before
    it, the routers' first results."""
    blocks, by_choice = routed_blocks(run.manifest), dict[_Choice, list[Record]]()
    notes = run.manifest.plan.modules
    beside = {path.rpartition(".")[0] for path in notes if path.endswith(".experts")}
    for record in run.records if blocks else ():
        path, port = module_of(record.site), record.site.rpartition(":")[2]
        block = _block_of(path, blocks)
        if block is None or is_operator_site(record.site) or len(record.shape) < 2:
            continue
        key = (record.pass_, record.sample, record.step, block)
        floats = format_named(record.dtype).kind == "float"
        if path.endswith(".experts"):
            if port.startswith("in.") and not floats:
                by_choice.setdefault(key, []).append(record)
        elif port == "out" and floats and path.rpartition(".")[0] in beside:
            by_choice.setdefault(("logits", *key), []).append(record)
    for records in by_choice.values():
        records.sort(key=lambda record: record.order)
    return by_choice


def _piece_rows(
    tensor: np.ndarray, choice: Record, manifest: Manifest, piece: Piece
) -> np.ndarray | None:
    """The rows that a piece has, (T, n), of what ``choice`` records of its forward's tokens."""
    record = piece.record
    if tensor.ndim == 2:
        group = manifest.tokens.group_of(record.sample) or [0]
        if len(tensor) % max(len(group), 1):
            return None
        tensor = tensor.reshape(max(len(group), 1), -1, tensor.shape[-1])
    if record.positions != choice.positions:
        wanted = list(record.positions or ())
        if choice.positions is not None or max(wanted, default=0) >= tensor.shape[1]:
            return None
        tensor = tensor[:, wanted]
    if piece.row is not None:
        tensor = tensor[piece.row : piece.row + 1, piece.left : piece.right]
    return tensor.reshape(-1, tensor.shape[-1])


def _by_token(ids: np.ndarray) -> np.ndarray:
    """Lays (…, k) out as (T, k)."""
    return ids.reshape(-1, ids.shape[-1])


RouteKey = tuple[Side | None, str, int, int, str]
"""(whose escalated pass, pass, sample, step, site)"""


@dataclass(slots=True)
class Routes:
    """Says what is known by (whose, pass, sample, step, site) of what lies behind a choice: each
    token's ratio (T,), nan where it is not judged, and its experts (T, k); ``margin``: the widest
    gap of logits that rounding decided; ``unexplained``: by the first result behind it, a choice
    that it did not. Whose: the side of an escalated pass, else None."""

    found: dict[RouteKey, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    margin: float | None = None
    unexplained: dict[tuple[int, int, str], tuple[SiteResult, Unexplained]] = field(
        default_factory=dict
    )

    def take(self, other: Routes, of: Side | None) -> None:
        """Those of an escalated pass."""
        self.found |= {(of, *key[1:]): value for key, value in other.found.items()}

    def add(self, result: SiteResult, routed: Routed, ratio: np.ndarray | None) -> None:
        if routed.margin is not None:
            self.margin = max(routed.margin, self.margin or 0.0)
        if routed.unexplained is not None:
            place = result.sample, result.step, routed.unexplained.site
            self.unexplained.setdefault(place, (result, routed.unexplained))
        if ratio is not None and routed.experts is not None and len(ratio) == len(routed.experts):
            self.found[route_key(result)] = ratio, routed.experts


def route_key(result: SiteResult) -> RouteKey:
    return result.of, result.pass_, result.sample, result.step, result.site


# Tokens that went to other experts, as rounding alone may send them: where, and how many.


def free_routes_differ(runs: Sequence[Run], sample: int, step: int) -> bool:
    """Did any token of this prompt go to other experts in one of these free runs, up to this step?
    It then took another way, and attention carried it to those behind. True where it is not
    known."""
    first, *others = ((run, choices_in(run)) for run in runs)
    for key, records in first[1].items():
        pass_, prompt, number, *_ = key  # of the routers' logits it has one more
        if pass_ != "free" or prompt != sample or int(number or 0) > step:
            continue
        for place, record in enumerate(records):
            chosen = [(first[0], record)]
            chosen += [
                (run, index[key][place]) for run, index in others if len(index.get(key, ())) > place
            ]
            if len(chosen) < len(runs) or not all(run.has_bytes(choice) for run, choice in chosen):
                return True
            rows = [np.sort(_by_token(run.array(choice))) for run, choice in chosen]
            if any(row.shape != rows[0].shape for row in rows):
                return True
            if not bool(same_experts(rows).all()):
                return True
    return False


def unknown_blocks(manifest: Manifest, sites: Sequence[SiteResult]) -> frozenset[str]:
    """Blocks with experts in which some forward's choices are not known: one token's error says
    nothing there."""
    blocks = frozenset(routed_blocks(manifest))
    anchored = {(s.sample, s.step) for s in sites if s.pass_ == "anchored"}
    free = {(s.sample, s.step) for s in sites if s.pass_ == "free"}
    if not anchored or free - anchored:
        return blocks  # judged from free runs
    return frozenset(
        s.block
        for s in sites
        if s.pass_ != "free"
        and s.block in blocks
        and s.ratio is not None
        and s.num_rerouted is None
    )


def mostly_rerouted(sites: Sequence[SiteResult]) -> Fact | None:
    """Tells whether of a block's tokens, in the prefill or the decode steps, most were not judged
    since the sides sent them to other experts: the first such block."""
    counts: dict[tuple[str, str], list[int]] = {}
    for site in _routed_outs(sites):
        count = counts.setdefault((str(site.block), site.phase), [0, 0])
        count[0] += site.num_rerouted or 0
        count[1] += site.numel // max(site.shape[-1], 1)
    for (block, phase), (moved, num) in counts.items():
        if 2 * moved > num:
            return fact("measure.mostly_rerouted", num=moved, total=num, module=block, phase=phase)
    return None


def routing_notes(sites: Sequence[SiteResult], routes: Routes) -> list[Fact]:
    """Return how many tokens rounding sent elsewhere, where any."""
    outs = _routed_outs(sites)
    moved = [s for s in outs if s.num_rerouted]
    if not moved:
        return []
    blocks = {s.block for s in moved}
    return [
        fact(
            "measure.rerouted",
            num=sum(s.num_rerouted or 0 for s in moved),
            total=sum(s.numel // max(s.shape[-1], 1) for s in outs if s.block in blocks),
            blocks=sorted(map(str, blocks)),
            margin=routes.margin,
        )
    ]


def _routed_outs(sites: Sequence[SiteResult]) -> list[SiteResult]:
    """Outputs of blocks with experts, where the choices are known."""
    return [
        site
        for site in sites
        if site.num_rerouted is not None
        and site.role == "block"
        and site.site.endswith(":out")
        and site.pass_ == "anchored"
    ]
