"""Rating measured pairs: floors and ratios of many at a time, and a SiteResult of each."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from divergence.comparison.align.pairs import Pair, Piece, Pieces
from divergence.comparison.experts import Routed, Routes, Routing
from divergence.comparison.measure.floors import (
    ModelFloor,
    Ratios,
    cancels,
    gradient_format,
    made_here,
    row_floor,
    small_rows,
    stacked,
    usual_norm,
    work_dtype,
)
from divergence.comparison.measure.truth import SamplesBySite, truth_diffs
from divergence.comparison.results import (
    LogitsDiff,
    NonfiniteCount,
    PromptRatio,
    SiteResult,
    TruthDiff,
)
from divergence.numerics.formats import Format, format_named
from divergence.numerics.pairs import AgainstTruth, measure_pair, with_rounding
from divergence.numerics.summary import Summary
from divergence.numerics.sums import SINK_FACTOR, Estimate, PairMetrics, RowMetrics
from divergence.run.reader import COLUMNS, Run
from divergence.run.site import is_gradient, is_of_parameter, module_of
from divergence.words import SIDES, Side, grouped

if TYPE_CHECKING:
    from divergence.run.reader import OwnFloor


# What a module inherits in a free pass was measured before it, so pairs come in the alignment's
# order. Pairs of one kind (rows, formats, width, role) are then rated together, as arrays.


_SHARED = [name for name in PairMetrics.__struct_fields__ if name in SiteResult.__struct_fields__]
_shared_of = operator.attrgetter(*_SHARED)
"""The fields that a SiteResult takes over as they are."""


def nonfinite_of(
    metrics: PairMetrics,
    rows: RowMetrics | None,
    pieces: Pieces,
    piece: Piece,
    shape: tuple[int, ...],
) -> NonfiniteCount | None:
    """Counts of both sides, where there is anything to count, and the prompts that hold it."""
    if not (
        metrics.reference_nan
        or metrics.reference_inf
        or metrics.candidate_nan
        or metrics.candidate_inf
    ):
        return None
    counts = NonfiniteCount(
        reference_nan=metrics.reference_nan,
        reference_inf=metrics.reference_inf,
        candidate_nan=metrics.candidate_nan,
        candidate_inf=metrics.candidate_inf,
        reference_neginf=metrics.reference_neginf,
        candidate_neginf=metrics.candidate_neginf,
        differ=metrics.nonfinite_differ,
        reference_alone=metrics.reference_alone,
        candidate_alone=metrics.candidate_alone,
        mask_alike=metrics.mask_alike,
    )
    if rows is None or rows.nonfinite is None:
        return counts
    worst = rows.nonfinite == rows.nonfinite.max()
    sample, position = pieces.locate(piece, shape, int(worst.argmax()))
    members = pieces.members(piece, shape)
    of_members = worst.reshape(len(members), -1).any(axis=1) if members else []
    prompts = [member for member, holds in zip(members, of_members, strict=True) if holds]
    return msgspec.structs.replace(counts, sample=sample, position=position, prompts=prompts)


_Forward = tuple[int, int, str]
"""(sample, step, module path)."""


class PairNumbers(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Says what was measured of one pair."""

    metrics: PairMetrics | None
    """None where the two are equal, and only the truth was measured."""
    logits: LogitsDiff | None
    rows: RowMetrics | None
    """None where ``metrics`` is."""
    shape: tuple[int, ...]
    """The shape compared."""
    against: AgainstTruth | None = None
    estimate: Estimate | None = None
    """How well the metrics are known, where they were estimated."""
    least: float | None = None
    """The least relative L2, where nothing else is known."""
    statistics_agree: bool = False
    """Does nothing show that the two differ at all?"""


@dataclass(slots=True, eq=False)
class _Rated:
    """A pair on its way to a result."""

    pair: Pair
    numbers: PairNumbers
    metrics: PairMetrics
    rows: RowMetrics
    routed: Routed | None = None
    inherited: RowMetrics | None = None
    beside: float = 0.0
    members: list[int] | None = None
    """Prompts of a batch; None where the pair has no floor."""
    ratios: Ratios | None = None


class Rater:
    """Rates the pairs of two runs; keeps what entered each module."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        pieces: Pieces,
        routing: Routing,
        floor: ModelFloor,
        work: Format,
        shared: Callable[[str], float],
        own_floor: OwnFloor | None = None,
    ) -> None:
        """``work``: what both sides computed in. ``shared``: by site, what all rows share."""
        self.samples = SamplesBySite()
        self.routes = Routes()
        self._reference, self._pieces = reference, pieces
        self._routing, self._floor, self._own_floor = routing, floor, own_floor
        self._floor_side = SIDES[own_floor is not None and own_floor.run is candidate]
        self._shared = shared
        self._work = work
        self._sums = gradient_format(work, reference.manifest, candidate.manifest)
        self._same_dtype = work_dtype(reference.manifest) == work_dtype(candidate.manifest)
        self._notes = reference.manifest.plan.modules
        self._blocks = sorted(
            (path for path, note in self._notes.items() if note.role == "block"),
            key=len,
            reverse=True,
        )
        self._of_site: dict[str, dict[str, str | None]] = {}
        self._entering: dict[_Forward, RowMetrics] = {}
        self._beside: defaultdict[_Forward, float] = defaultdict(float)
        self._earlier: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._entered_block: defaultdict[str, float] = defaultdict(float)
        """The largest error of what entered a block, or a module outside them."""

    def results(
        self, pairs: Sequence[Pair], measured: Sequence[PairNumbers | None]
    ) -> list[SiteResult]:
        """A result for each pair, from what was measured of it. Call in the alignment's order."""
        rated = [
            None
            if numbers is None or numbers.metrics is None
            else self._entered(pair, numbers, numbers.metrics)
            for pair, numbers in zip(pairs, measured, strict=True)
        ]
        floored = [each for each in rated if each is not None and each.members is not None]
        for alike in grouped(floored, self._kind_of).values():
            self._rate(alike)
        against = [None if numbers is None else numbers.against for numbers in measured]
        estimated: Side | None = None
        if self._own_floor is not None:
            estimated = SIDES[self._floor_side == "reference"]
            against = [self._bounded(pair, each) for pair, each in zip(pairs, rated, strict=True)]
        # of a free pass it is what was made here, and no distance from the truth
        distances = [
            None if estimated and pair.pass_ == "free" else errors
            for pair, errors in zip(pairs, against, strict=True)
        ]
        results = [
            self._identical(pair, truth) if each is None else self._result(each, truth)
            for pair, each, truth in zip(
                pairs, rated, truth_diffs(distances, estimated=estimated), strict=True
            )
        ]
        self._keep_samples(pairs, results, against)
        return results

    # --- floors and ratios ----------------------------------------------------------------------

    def _entered(self, pair: Pair, numbers: PairNumbers, metrics: PairMetrics) -> _Rated:
        """A pair with what came into its module, in the order of the alignment. In the free pass a
        block answers only for what it adds."""
        rows, site = numbers.rows, pair.reference.record.site
        assert rows is not None
        if cancels(site, self._site_fields(site)["role"]):
            rows = small_rows(rows, self._usual(pair, rows.norm))
        rated = _Rated(pair, numbers, metrics, rows)
        if metrics.rel_l2 is None:
            return rated
        rated.routed = self._routing.of(pair, len(rows.rel_l2))
        if rated.routed is not None and rated.routed.kept is not None:
            rel_l2 = np.where(rated.routed.kept, rows.rel_l2, math.nan)
            rated.rows = msgspec.structs.replace(rows, rel_l2=rel_l2)  # the others are masked
        form_a, form_b = (format_named(p.record.dtype) for p in (pair.reference, pair.candidate))
        if form_a.kind != "float" or form_b.kind != "float":
            return rated
        estimated = numbers.estimate is not None
        rated.members = [] if estimated else self._pieces.members(pair.reference, numbers.shape)
        if pair.pass_ != "free":
            return rated
        path, _, port = site.partition(":")
        sample, home = pair.reference.sample, (self._site_fields(site)["block"] or module_of(site))
        forward = sample, pair.candidate.record.step, path
        size = metrics.token_rel_l2_median or 0.0
        if is_of_parameter(site):  # made of what entered the block, forward and backward
            rated.beside = self._entered_block[home]
        elif port.startswith("in"):
            if module_of(site) == home:
                self._entered_block[home] = max(size, self._entered_block[home])
            if port == "in":
                self._entering[forward] = rated.rows
                self._earlier[sample, path] = max(size, self._earlier[sample, path])
            elif "mask" not in port:
                self._beside[forward] = max(size, self._beside[forward])
        else:
            inherited = self._entering.get(forward)
            if inherited is not None and inherited.rel_l2.shape == rated.rows.rel_l2.shape:
                rated.inherited = inherited
            rated.beside = max(self._beside[forward], self._earlier[sample, path])
        return rated

    def _kind_of(self, rated: _Rated) -> tuple[object, ...]:
        """Return what pairs that are rated together have in common."""
        record, other = rated.pair.reference.record, rated.pair.candidate.record
        return (
            record.dtype,
            other.dtype,
            _last(rated.numbers.shape),
            self._role(rated.pair),
            len(rated.rows.rel_l2),
            rated.rows.update_norm is None,
            rated.inherited is None,
            len(rated.members or ()),
            is_gradient(record.site),
            self._shared(record.site),
        )

    def _rate(self, alike: list[_Rated]) -> None:
        """The ratios of pairs of one kind."""
        first = alike[0]
        form, work = self._formats(first.pair)
        all_ratios = self._floor.ratios(
            stacked([rated.rows for rated in alike]),
            form=form,
            work=work,
            num_features=_last(first.numbers.shape),
            role=self._role(first.pair),
            inherited=None
            if first.inherited is None
            else stacked([rated.inherited for rated in alike if rated.inherited is not None]),
            beside=np.array([rated.beside for rated in alike]),
            shared=self._shared(first.pair.reference.record.site),
            num_members=max(1, len(first.members or ())),
        )
        for rated, ratios in zip(alike, all_ratios, strict=True):
            rated.ratios = ratios

    def _row_floor(
        self, pair: Pair, width: int, norm: np.ndarray, update: np.ndarray | None
    ) -> np.ndarray | None:
        form, work = self._formats(pair)
        with np.errstate(all="ignore"):
            return row_floor(
                np.maximum(norm, 1e-300),
                update,
                form=form,
                work=work,
                num_features=width,
                role=self._role(pair),
                shared=self._shared(pair.reference.record.site),
            )

    def _formats(self, pair: Pair) -> tuple[Format, Format]:
        """The formats of a pair: (what it is stored in, what it is computed in). Gradients that are
        added up or sent in fewer bits than they are stored in have been rounded to these."""
        forms = [format_named(piece.record.dtype) for piece in (pair.reference, pair.candidate)]
        form = max(forms, key=lambda form: form.unit_roundoff)
        if self._sums is self._work or not is_gradient(pair.reference.record.site):
            return form, self._work
        return max(form, self._sums, key=lambda format_: format_.unit_roundoff), self._sums

    def _usual(self, pair: Pair, norm: np.ndarray) -> float:
        """Return what errors are held against where a row's terms cancelled."""
        form = max(self._formats(pair), key=lambda form: form.unit_roundoff)
        return usual_norm(self._reference, pair.reference.record, norm, form, self._role(pair))

    def _role(self, pair: Pair) -> str:
        return self._site_fields(pair.reference.record.site)["role"] or "inner"

    # --- results --------------------------------------------------------------------------------

    def _site_fields(self, site: str) -> dict[str, str | None]:
        """Block, role and kind of a site's module."""
        fields = self._of_site.get(site)
        if fields is None:
            path = module_of(site)
            note = self._notes.get(path)
            within = (b for b in self._blocks if path == b or path.startswith(b + "."))
            fields = self._of_site[site] = {
                "block": next(within, None),
                "role": note.role if note else None,
                "kind": note.kind if note else None,
            }
        return fields

    def _place(self, pair: Pair) -> dict[str, Any]:
        reference, candidate = pair.reference.record, pair.candidate.record
        return {
            "pass_": pair.pass_,
            "sample": pair.reference.sample,
            "step": candidate.step,
            "site": reference.site,
            "order": reference.order,
            "candidate_site": candidate.site if candidate.site != reference.site else None,
            "match": pair.match,
            "reference_dtype": reference.dtype,
            "candidate_dtype": candidate.dtype,
            **self._site_fields(reference.site),
        }

    def _identical(self, pair: Pair, truth: TruthDiff | None) -> SiteResult:
        """Bit for bit the same: every difference is 0, and nothing is measured."""
        record = pair.reference.record
        summary = record.summary or Summary(min=None, max=None, mean=None, rms=None, absmax=None)
        norm = None if record.summary is None else (summary.rms or 0.0) * math.sqrt(record.numel)
        nan, inf = summary.num_nan, summary.num_posinf + summary.num_neginf
        nonfinite: NonfiniteCount | None = NonfiniteCount(
            reference_nan=nan,
            reference_inf=inf,
            reference_neginf=summary.num_neginf,
            candidate_nan=nan,
            candidate_inf=inf,
            candidate_neginf=summary.num_neginf,
        )
        if not (nan or inf):
            nonfinite = None
        elif self._reference.has_bytes(record):
            # the statistics count rows of padding too, and do not tell the place
            mask = self._pieces.row_mask(pair.reference, record.shape)
            if mask is not None or nan or inf != summary.num_neginf:
                array = self._reference.array(record)
                metrics, rows = measure_pair(array, array, row_mask=mask)
                nonfinite = nonfinite_of(metrics, rows, self._pieces, pair.reference, record.shape)
        zero, prompts = None, []
        if format_named(record.dtype).kind == "float":
            zero = 0.0
            members = self._pieces.members(pair.reference, record.shape)
            num_rows = max(1, record.numel // max(1, _last(record.shape))) // max(1, len(members))
            prompts = [PromptRatio(sample=n, ratio=0.0, num_rows=num_rows) for n in members]
        return SiteResult(
            **self._place(pair),
            shape=record.shape,
            identical=True,
            numel=record.numel,
            rel_l2=0.0,
            cosine=1.0,
            one_minus_cosine=0.0,
            sqnr_db=math.inf,
            max_abs=0.0,
            reference_norm=norm,
            candidate_norm=norm,
            gain=0.0,
            gain_se=0.0,
            ulp_format=None if zero is None else record.dtype,
            ulp_share_over_1=zero,
            ulp_p99=zero,
            ulp_max=zero,
            token_rel_l2_median=0.0,
            token_rel_l2_p99=0.0,
            token_rel_l2_max=0.0,
            channel_rel_l2_max=0.0,
            nonfinite=nonfinite,
            truth=truth,
            num_rerouted=0 if self._routing.is_known(pair) else None,
            ratio=zero,
            ratio_max=zero,
            prompts=prompts,
        )

    def _result(self, rated: _Rated, truth: TruthDiff | None) -> SiteResult:
        pair, numbers, ratios = rated.pair, rated.numbers, rated.ratios
        # a sketch's rows are all that lies behind the first two axes
        shape, routed = numbers.shape, rated.routed
        rows = shape if numbers.estimate is None else (*shape[:2], 1)[: len(shape)]
        worst, kept = rated.metrics.worst_row, None if routed is None else routed.kept
        if kept is not None and bool(kept.any()):
            worst = int(np.nan_to_num(rated.rows.rel_l2, nan=-1.0).argmax())
        sample, position = self._pieces.locate(pair.reference, rows, worst)
        more: dict[str, Any] = {"truth": truth}
        if ratios is not None:
            more |= {
                "floor": ratios.floor,
                "ratio": ratios.typical,
                "ratio_max": ratios.worst,
                "ratio_sink": ratios.sink,
                "ratio_position": self._pieces.locate(pair.reference, rows, ratios.row)[1],
                "prompts": [
                    PromptRatio(
                        sample=(rated.members or [])[number],
                        ratio=ratio,
                        num_rows=count,
                        ratio_max=largest,
                    )
                    for number, ratio, count, largest in ratios.members
                ],
            }
        if numbers.least is not None:
            # what a module adds to what it gets is not known: as much as it hands on, say
            form = self._row_floor(pair, _last(shape), np.ones(1), None)
            more["floor"] = 0.0 if form is None else float(form[0])
        if routed is not None:
            more["num_rerouted"] = routed.num_rerouted
            real = self._pieces.row_mask(pair.reference, shape)
            if kept is not None and real is not None and len(real) == len(kept):
                more["num_rerouted"] = int((~kept & real).sum())  # pads go anywhere
        fields = dict(zip(_SHARED, _shared_of(rated.metrics), strict=True))
        fields |= self._place(pair)
        fields |= more
        result = SiteResult(
            shape=shape,
            worst_sample=sample,
            worst_position=position,
            nonfinite=nonfinite_of(rated.metrics, numbers.rows, self._pieces, pair.reference, rows),
            logits=numbers.logits,
            estimated=numbers.estimate,
            at_least=numbers.least,
            statistics_agree=numbers.statistics_agree,
            **fields,
        )
        if ratios is not None and ratios.rows is not None:
            self.samples.add_ratios(result, ratios.rows)
        if routed is not None and ratios is not None and routed.experts is not None:
            norms = rated.rows.norm, rated.rows.update_norm
            floor = self._row_floor(pair, _last(shape), *norms)
            self.routes.add(result, routed, None if floor is None else rated.rows.rel_l2 / floor)
        return result

    # --- against the truth ----------------------------------------------------------------------

    def _bounded(self, pair: Pair, rated: _Rated | None) -> AgainstTruth | None:
        """Both sides against the float64 of one of them, where no more is known than the sums of
        its error. ``rated``: None where the two are equal.

        Of the side that carries the floor (``OwnFloor``) the error e is known, and the difference d
        of the two sides. The other side's error f is not. Where one side's error has a part that
        the other's has not, the smaller one and that part are as good as orthogonal:

            d = f + e, so f² = d² - e²        the other side is the farther off, or as far by itself
            e = f + d, so f² = e² - d²        it shares a part of e, and has not the rest

        so f is taken to be sqrt(|d² - e²|). That is a figure, no measurement, and where d and e are
        of a size it is small whatever f is. So it counts for no less than rounding may be: e, as
        far as that is within ``typical`` floors of the rounding model (less what ``truth_confirm``
        leaves room for). Then the other side is blamed where it is beyond its limits for certain,
        by the triangle inequality; the side of the floor where its own error is beyond what
        rounding makes, and not the other's by as much. Where that figure is far below e, the two
        are judged as without a truth (``AgainstTruth.alike``).
        """
        assert self._own_floor is not None
        thresholds = self._floor.thresholds
        piece = pair.reference if self._floor_side == "reference" else pair.candidate
        rows_of_floor = self._own_floor.rows(piece.record)
        if rows_of_floor is None or pair.pass_ not in ("free", "anchored"):
            return None
        shape = piece.record.shape
        whole = rows_of_floor.reshape(*shape[:-1], rows_of_floor.shape[1])
        floor = self._pieces.rows_of(whole, piece).reshape(-1, rows_of_floor.shape[1])
        columns = dict(zip(COLUMNS, floor.T, strict=True))
        if rated is None:
            mask = self._pieces.row_mask(piece, shape)
            real = np.zeros(len(floor))
            if mask is not None and len(mask) == len(floor):
                real[~mask] = math.nan
            rows = RowMetrics(
                rel_l2=real,
                diff=np.zeros(len(floor)),
                norm=columns["size"],
                update_norm=columns["update"],
            )
            width, inherited, beside = shape[-1], None, 0.0
        else:
            rows, inherited, beside = rated.rows, rated.inherited, rated.beside
            estimate = rated.numbers.estimate
            width = shape[-1] if estimate is None else estimate.num_projections
        if len(rows.rel_l2) != len(floor):  # or nothing was measured
            return None
        # d, nan in rows that do not count; of a free pass what was made here, beyond what may be
        # made of what came in
        between = np.where(np.isfinite(rows.rel_l2), rows.diff, math.nan)
        if pair.pass_ == "free":
            between = made_here(rows, inherited, beside, thresholds)
        norm, update = rows.norm, rows.update_norm
        kept = np.isfinite(between) & np.isfinite(columns["error"]) & np.isfinite(norm) & (norm > 0)
        index = np.flatnonzero(kept)
        norm, between, error = norm[index], between[index], columns["error"][index]
        update = None if update is None else update[index]
        model = self._row_floor(pair, shape[-1], norm, update)
        if model is None or not len(index):
            return None
        figure = np.sqrt(np.abs(np.square(between) - np.square(error)))
        usual = np.minimum(error, thresholds.typical / thresholds.truth_confirm * model * norm)
        fourth = columns["fourth"][index]
        ratio = np.divide(error, fourth, out=np.ones_like(error), where=fourth > 0)
        numbers = np.clip(ratio**4, 1.0, max(1, width))
        zeros = np.zeros(len(index))
        none = None if update is None else zeros
        own, other = self._floor_side, SIDES[self._floor_side == "reference"]
        sides = {own: error, other: np.maximum(usual, figure)}
        # how much of d lies along e is not known: the figure is made of half as many numbers
        spreads = {f"spread_{own}": numbers, f"spread_{other}": numbers / 2}
        return AgainstTruth(
            **sides,
            **spreads,
            norm=norm,
            update=update,
            between=between,
            gain_reference=zeros,
            gain_candidate=zeros,
            update_gain_reference=none,
            update_gain_candidate=none,
            spread=numbers,
            sink=norm > SINK_FACTOR * np.median(norm),
            channels=np.zeros((6, 0)),
            peaks=np.zeros(3),
            row_index=index,
            alike=figure >= error / thresholds.truth_confirm,
        )

    def _keep_samples(
        self,
        pairs: Sequence[Pair],
        results: Sequence[SiteResult],
        against: Sequence[AgainstTruth | None],
    ) -> None:
        """Return how far both sides are from the truth, for the statistics over a site. Where
        blocks did not get equal inputs, a truth blames none."""
        rated = [
            (number, pair, result, row)
            for number, (pair, result, row) in enumerate(zip(pairs, results, against, strict=True))
            if row is not None and (self._own_floor or pair.pass_ != "free")
        ]

        def kind_of(each: tuple[int, Pair, SiteResult, AgainstTruth]) -> tuple[object, ...]:
            _, pair, result, row = each
            return (
                self._formats(pair)[0].name,
                _last(result.shape),
                self._role(pair),
                row.num_rows,
                row.update is None,
                cancels(result.site, result.role),
                self._shared(result.site),
            )

        floors: dict[int, np.ndarray] = {}
        for alike in grouped(rated, kind_of).values():
            _, first, result, _ = alike[0]
            norms = np.stack([row.norm for *_, row in alike])
            updates = [row.update for *_, row in alike if row.update is not None]
            row_floors = self._row_floor(
                first, _last(result.shape), norms, np.stack(updates) if updates else None
            )
            if row_floors is None:
                continue
            if cancels(result.site, result.role):
                usual = [self._usual(pair, row.norm) or 1.0 for _, pair, _, row in alike]
                small = np.array(usual)[:, None] / np.maximum(norms, 1e-300)
                row_floors = row_floors * np.maximum(1.0, small)
            floors |= {each[0]: floor for each, floor in zip(alike, row_floors, strict=True)}
        for number, _, result, row in rated:
            if (floor := floors.get(number)) is not None:
                if not self._same_dtype or self._shared(result.site):
                    row = with_rounding(row, floor)
                self.samples.add(result, row, floor)


def _last(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1
