"""The fields of a SiteResult: of a measured pair, and of one that is equal bit for bit."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

from divergence.comparison.align.pieces import Piece, Pieces
from divergence.comparison.results import NonfiniteCount, SiteResult
from divergence.numerics.formats import format_named
from divergence.numerics.pairs import measure_pair
from divergence.numerics.summary import Summary
from divergence.numerics.sums import PairMetrics, RowMetrics
from divergence.run.record import Record

__all__ = ["ModuleFields", "SitePlace", "identical_site", "nonfinite_of", "placed",
           "shared_fields", "without_floor"]  # fmt: skip


class ModuleFields(TypedDict):
    """The fields of a SiteResult that say where in the model its site lies."""

    block: str | None
    role: str | None
    kind: str | None


class SitePlace(ModuleFields):
    """The fields of a SiteResult that say which two tensors it is about."""

    pass_: str
    sample: int
    step: int
    site: str
    order: int
    candidate_site: str | None
    match: str
    reference_dtype: str
    candidate_dtype: str


_PAIRS_OWN = [
    name for name in PairMetrics.__struct_fields__ if name not in SiteResult.__struct_fields__
]  # fmt: skip
_COUNTS = operator.attrgetter("reference_nan", "reference_inf", "candidate_nan", "candidate_inf")


def identical_site(record: Record, place: SitePlace) -> SiteResult:
    """Bit for bit the same: every difference is 0, and nothing is measured."""
    summary = record.summary or Summary(min=None, max=None, mean=None, rms=None, absmax=None)
    norm = None if summary.rms is None else summary.rms * math.sqrt(record.numel)
    if record.summary is not None:
        norm = norm or 0.0
    bad = NonfiniteCount(
        reference_nan=summary.num_nan,
        reference_inf=summary.num_posinf + summary.num_neginf,
        candidate_nan=summary.num_nan,
        candidate_inf=summary.num_posinf + summary.num_neginf,
        reference_neginf=summary.num_neginf,
        candidate_neginf=summary.num_neginf,
    )
    is_float = format_named(record.dtype).kind == "float"
    return SiteResult(
        **place, shape=record.shape, identical=True, numel=record.numel, rel_l2=0.0, cosine=1.0,
        one_minus_cosine=0.0, sqnr_db=math.inf, max_abs=0.0, reference_norm=norm,
        candidate_norm=norm, gain=0.0, gain_se=0.0,
        ulp_format=record.dtype if is_float else None,
        ulp_share_over_1=0.0 if is_float else None, ulp_p99=0.0 if is_float else None,
        ulp_max=0.0 if is_float else None, token_rel_l2_median=0.0, token_rel_l2_p99=0.0,
        token_rel_l2_max=0.0, channel_rel_l2_max=0.0, nonfinite=bad if bad.total else None,
    )  # fmt: skip


def shared_fields(metrics: PairMetrics) -> dict[str, Any]:
    """The fields that SiteResult takes over as they are: those of the same name."""
    fields = msgspec.structs.asdict(metrics)
    for name in _PAIRS_OWN:
        del fields[name]
    return fields


def nonfinite_of(
    metrics: PairMetrics, rows: RowMetrics | None, pieces: Pieces, piece: Piece,
    shape: tuple[int, ...],
) -> NonfiniteCount | None:  # fmt: skip
    """Counts of both sides, where there is anything to count, and the prompts that hold it."""
    if not any(_COUNTS(metrics)):
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


def placed(counts: NonfiniteCount, pieces: Pieces, piece: Piece) -> NonfiniteCount | None:
    """``counts`` of a tensor of the reference that both sides have, without rows of padding, which
    the statistics count, and with the place, which they do not tell."""
    record = piece.record
    mask = pieces.row_mask(piece, record.shape)
    only_masked = not counts.reference_nan and counts.reference_inf == counts.reference_neginf
    if mask is None and only_masked:
        return counts
    tensor = pieces.reference.read(record)
    metrics, rows = measure_pair(tensor, tensor, row_mask=mask)
    return nonfinite_of(metrics, rows, pieces, piece, record.shape)


def without_floor(sites: Sequence[SiteResult]) -> list[SiteResult]:
    """Sites of two probes: their inputs cancel on purpose, and no model's floor fits."""
    return [
        msgspec.structs.replace(
            site, floor=None, ratio=None, ratio_max=None, ratio_sink=None, prompts=[]
        )
        for site in sites
    ]
