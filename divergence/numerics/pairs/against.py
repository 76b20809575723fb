"""Two implementations against the truth: how far each is from what is right.

a = reference, b = candidate, R = truth (float64). Rows are tokens, columns features.
One pass in float64 gathers, per row, ‖a-R‖, ‖b-R‖, ‖a-b‖, ‖R‖ and ‖R - x‖ (x: the block's
input) and, per column, Σ(a-R)², Σ(b-R)² and ΣR², so that a wrong head or channel is seen
which a row's norm dilutes by √D, and the largest row of the first two: one element is no channel.

The gain of a row is <d, R>/‖R‖² with d = a-R or b-R: a consistent scale error, far below
the rounding of single elements, since that averages out over D columns. How many columns
really take part is the participation ratio (ΣR²)²/ΣR⁴: with a few massive channels it is
small, and their own rounding looks like a gain (PairMetrics.gain sees only a against b).

Rows that are masked, or hold a nan or inf on any side, are left out. Sink rows (norm over
10 × the median, see numerics.pair) and rows whose error is over 8 × the median row's count in
the rows, not in the columns: one bad token is no bad channel.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import torch

from divergence.numerics.formats import format_of
from divergence.numerics.kernels import Kernel, chosen
from divergence.numerics.pairs.blocks import Grid, row_dots
from divergence.numerics.pairs.pair import SINK_FACTOR

__all__ = ["AgainstTruth", "against_many", "measure_against", "with_rounding"]

_OUTLIER = 8.0
"""A row is left out of the columns when its relative error exceeds this many medians."""
_CHUNK_NUMEL = 1 << 18
"""Elements per chunk: three operands of 2 MiB in float64 stay in cache."""


class AgainstTruth(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Per kept row (T,) and per column (D,), float64."""

    norm: np.ndarray
    """‖R‖."""
    update: np.ndarray | None
    """‖R - x‖; None without a base."""
    reference: np.ndarray
    """‖a-R‖."""
    candidate: np.ndarray
    """‖b-R‖."""
    between: np.ndarray
    """‖a-b‖."""
    gain_reference: np.ndarray
    """<a-R, R>/‖R‖²."""
    gain_candidate: np.ndarray
    update_gain_reference: np.ndarray | None
    """<a-R, R-x>/‖R-x‖²; None without a base."""
    update_gain_candidate: np.ndarray | None
    spread: np.ndarray
    """Participation ratio of R, of R - x where there is a base."""
    sink: np.ndarray
    """bool."""
    channels: np.ndarray
    """(6, D): over rows but sinks, Σ of (a-R)², (b-R)², (a-b)² and R², and the largest (a-R)² and
    (b-R)²."""
    peaks: np.ndarray
    """(3,): of the first three rows of ``channels`` the largest channel."""
    row_index: np.ndarray
    """The kept rows' numbers in the whole tensor."""
    alike: np.ndarray
    """bool. Where one side's error follows from the other's and ``between``: are both of a size,
    for certain? True where both are measured."""

    @property
    def num_rows(self) -> int:
        return len(self.norm)


def with_rounding(against: AgainstTruth, floor: np.ndarray) -> AgainstTruth:
    """The same with one more rounding on both sides: what is left of the difference between two
    dtypes is less than a fault then, also where one side is exact.

    ``floor`` (T,): that of the coarser dtype, of two implementations; one makes 1/√2 of it.
    """
    rounding = floor * against.norm / math.sqrt(2)
    channels = against.channels.copy()
    usual = np.square(rounding[~against.sink])
    channels[:2] += usual.sum() / max(1, channels.shape[1])
    return msgspec.structs.replace(
        against,
        reference=np.hypot(against.reference, rounding),
        candidate=np.hypot(against.candidate, rounding),
        channels=channels,
        peaks=channels[:3].max(axis=1, initial=0.0),
    )


def against_many(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, base: torch.Tensor | None = None
) -> list[AgainstTruth | None]:
    """``measure_against`` of each of N tensors of one shape, (N, …); None for one that holds a nan
    or inf, or whose squares leave float64. ``b`` may be ``a`` itself: equal sides take half the
    work."""
    columns = a.shape[-1] if a.ndim > 1 else 1
    count = len(a)
    if not a.numel():
        return [None] * count
    sums = np.zeros((12, a.numel() // columns))
    with np.errstate(all="ignore"):
        x, r, *rest = (_wide(t, columns) for t in (a, truth, base) if t is not None)
        # by the number of the row sum, and of the row of ``channels`` that it adds to
        terms = {(1, 0): x - r, (0, 3): r}
        if b is not a:
            y = _wide(b, columns)
            terms |= {(2, 1): y - r, (3, 2): x - y}
        sides = [(number, terms[number, number - 1]) for number in ((1,) if b is a else (1, 2))]
        for number, error in sides:
            sums[3 + number] = row_dots(error, r)
        if rest:
            update = r - rest[0]
            sums[6] = row_dots(update, update)
            for number, error in sides:
                sums[6 + number] = row_dots(error, update)
            np.square(update, out=update)
            sums[10] = row_dots(update, update)
        fourth = np.square(r)
        sums[9] = row_dots(fourth, fourth)
        for (number, _), term in terms.items():
            sums[number] = row_dots(term, term)
        if b is a:
            sums[[2, 5, 8]] = sums[[1, 4, 7]]
        by_pair = sums.reshape(12, count, -1)
        sink, unusual = _apart(by_pair)
        channels = np.zeros((count, 6, columns))
        for (_, number), term in terms.items():
            if len(term) == count:
                np.square(term, out=channels[:, number])
                if number < 2:
                    channels[:, 4 + number] = channels[:, number]
                continue
            term = term.reshape(count, -1, columns)
            if unusual.any():
                term = np.where(unusual[:, :, None], 0.0, term)
            np.einsum("ntd,ntd->nd", term, term, out=channels[:, number])
            if number < 2:
                largest = np.maximum(term.max(axis=1), -term.min(axis=1))
                np.square(largest, out=channels[:, 4 + number])
        if b is a:
            channels[:, [1, 5]] = channels[:, [0, 4]]
        derived = _derived(by_pair, with_base=bool(rest))
        good = np.asarray(np.isfinite(by_pair[[0, 1, 2, 3, 6]]).all(axis=(0, 2)))
        rows = np.arange(by_pair.shape[2])
    fields = derived | {
        "sink": sink, "channels": channels, "peaks": channels[:, :3].max(axis=2),
        "row_index": [rows] * count, "alike": [np.ones(len(rows), bool)] * count,
    }  # fmt: skip
    each = [fields[name] for name in AgainstTruth.__struct_fields__]
    columns_of = [[None] * count if values is None else list(values) for values in each]
    return [
        AgainstTruth(*values) if fine else None
        for fine, *values in zip(good.tolist(), *columns_of, strict=True)
    ]


def _wide(tensor: torch.Tensor, columns: int) -> np.ndarray:
    """Rows in float64: a view where that is the tensor's own. Never write to it."""
    grid = Grid(tensor.reshape(-1, columns))
    return grid.load(slice(0, grid.num_rows), slice(None), np.empty(tensor.numel()))


def _apart(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of N pairs' rows (12, N, T): the sinks, and what stays out of the columns, (N, T)."""
    norms = np.sqrt(sums[0])
    middle = (norms.shape[1] - 1) // 2
    limit = SINK_FACTOR * np.sort(norms, axis=1)[:, middle, None]
    sink = (norms > limit) & (limit > 0)
    size = np.sqrt(sums[1:3].max(axis=0) / np.maximum(sums[0], 1e-300))
    ordered = np.sort(np.where(sink, math.nan, size), axis=1)
    middles = np.maximum((~sink).sum(axis=1) - 1, 0) // 2
    limit = _OUTLIER * np.take_along_axis(ordered, middles[:, None], 1)
    return sink, sink | ((size > limit) & (limit > 0))


def _derived(sums: np.ndarray, *, with_base: bool) -> dict[str, Any]:
    """The rows' fields of AgainstTruth, from their twelve sums."""
    norm2, ref, cand, between, ref_r, cand_r, up2, ref_u, cand_u, r4, u4, _ = sums
    top, fourth = (up2, u4) if with_base else (norm2, r4)
    return {
        "norm": np.sqrt(norm2),
        "update": np.sqrt(up2) if with_base else None,
        "reference": np.sqrt(ref),
        "candidate": np.sqrt(cand),
        "between": np.sqrt(between),
        "gain_reference": _over(ref_r, norm2),
        "gain_candidate": _over(cand_r, norm2),
        "update_gain_reference": _over(ref_u, up2) if with_base else None,
        "update_gain_candidate": _over(cand_u, up2) if with_base else None,
        "spread": _over(np.square(top), fourth),
    }


def measure_against(
    a: torch.Tensor,
    b: torch.Tensor,
    truth: torch.Tensor,
    *,
    row_mask: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    kernel: Kernel = "numpy",
    device: torch.device | None = None,
) -> AgainstTruth:
    """Both sides against ``truth``; all of one shape, any float dtype.

    ``row_mask``: bool, one per row, True = measure. ``base``: the block's input x. ``kernel``: see
    numerics.kernels; formats that compiled loops do not read go torch's way. ``device``: add up
    there instead.
    Raises ValueError where shapes differ.
    """
    for name, other in (("candidate", b), ("truth", truth), ("base", base)):
        if other is not None and other.shape != a.shape:
            raise ValueError(
                f"the {name} has shape {tuple(other.shape)}, the reference {tuple(a.shape)}"
            )
    columns = a.shape[-1] if a.ndim else 1
    plain = device is None and row_mask is None and kernel == "numpy"
    if plain and 0 < a.numel() <= _CHUNK_NUMEL:
        small = against_many(a[None], b[None], truth[None], None if base is None else base[None])
        if small[0] is not None:
            return small[0]
    x, y, r = (t.reshape(-1, columns) for t in (a, b, truth))
    start = None if base is None else base.reshape(-1, columns)
    count = x.shape[0]
    kept = torch.ones(count, dtype=torch.bool)
    if row_mask is not None:
        kept &= row_mask.reshape(-1).to(torch.bool)
    forms = [format_of(t.dtype) for t in (a, b, truth, base) if t is not None]
    if device is None and chosen(kernel, *forms) == "compiled":
        sums, sink, channels = _in_loops(x, y, r, start, kept)
    else:
        sums, sink, channels = _in_chunks(x, y, r, start, kept, device)
    good = kept & sums[:4].isfinite().all(0)
    with np.errstate(all="ignore"):
        derived = _derived(sums[:, good].numpy(), with_base=base is not None)
    return AgainstTruth(
        **derived,
        sink=sink[good].numpy(),
        channels=channels.numpy(),
        peaks=channels.numpy()[:3].max(axis=1, initial=0.0),
        row_index=good.nonzero().flatten().numpy(),
        alike=np.ones(int(good.sum()), bool),
    )


def _in_chunks(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, base: torch.Tensor | None,
    kept: torch.Tensor, device: torch.device | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The rows' sums (12, T), which rows are sinks (T,), the columns (6, D), in torch."""
    count, columns = truth.shape
    chunk = _CHUNK_NUMEL if device is None else 1 << 22
    rows = max(1, chunk // max(1, columns))

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        if device is None:
            return tensor.double()
        from divergence.numerics.on_device import sent

        return sent(tensor, device).double()

    norms = [wide(part).norm(dim=1).cpu() for part in torch.split(truth, rows)]
    sink = _sinks(torch.cat(norms or [torch.zeros(0).double()]), kept)
    sums = torch.full((12, count), float("nan"), dtype=torch.float64)
    channels = torch.zeros(6, columns, dtype=torch.float64)
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        x, y, r = (wide(t[part]) for t in (a, b, truth))
        part_sums = torch.full((12, len(r)), float("nan"), dtype=torch.float64, device=r.device)
        _gather(x, y, r, None if base is None else wide(base[part]), part_sums)
        sums[:, part] = part_sums.cpu()
        good = kept[part] & sums[:, part][:4].isfinite().all(0) & ~sink[part]
        good = good.to(r.device)
        _add_columns(x[good], y[good], r[good], channels)
    usual = kept & sums[:4].isfinite().all(0) & ~sink
    bad = _outliers(sums, usual)
    if len(bad):
        usual[bad] = False
        channels.zero_()
        for numbers in torch.split(usual.nonzero().flatten(), rows):
            _add_columns(wide(a[numbers]), wide(b[numbers]), wide(truth[numbers]), channels)
    return sums, sink, channels


def _in_loops(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, base: torch.Tensor | None,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same in compiled loops."""
    from divergence.numerics.compiled.sums import add_channels, row_sums

    sums = row_sums(a, b, truth, base)
    sink = _sinks(sums[0].sqrt(), kept)
    usual = kept & sums[:4].isfinite().all(0) & ~sink
    usual[_outliers(sums, usual)] = False
    channels = torch.zeros(6, truth.shape[1], dtype=torch.float64)
    add_channels(a, b, truth, usual.nonzero().flatten(), channels)
    return sums, sink, channels


def _sinks(norms: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    usual = norms[kept & norms.isfinite()]
    limit = SINK_FACTOR * float(usual.median()) if len(usual) else 0.0
    return norms > limit if limit > 0 else torch.zeros(len(norms), dtype=torch.bool)


def _add_columns(a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, out: torch.Tensor) -> None:
    """What rows add to the columns ``out`` (6, D)."""
    squares = [part.square() for part in (a - truth, b - truth, a - b, truth)]
    out[:4] += torch.stack([part.sum(0) for part in squares]).cpu()
    if len(a):
        largest = torch.stack([part.amax(0) for part in squares[:2]]).cpu()
        torch.maximum(out[4:], largest, out=out[4:])


def _gather(
    a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, x: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Twelve sums per row, (T, D) → out (12, T)."""
    da, db = a - r, b - r
    squares = r.square()
    out[0] = squares.sum(1)
    out[1] = da.square().sum(1)
    out[2] = db.square().sum(1)
    out[3] = (a - b).square().sum(1)
    out[4] = (da * r).sum(1)
    out[5] = (db * r).sum(1)
    out[9] = squares.square().sum(1)
    if x is not None:
        update = r - x
        squares = update.square()
        out[6] = squares.sum(1)
        out[7] = (da * update).sum(1)
        out[8] = (db * update).sum(1)
        out[10] = squares.square().sum(1)


def _outliers(sums: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Numbers of the usual rows in which one side's error is far above the median row's."""
    size = (sums[1:3].amax(0) / sums[0].clamp_min(1e-300)).sqrt()
    if not bool(usual.any()):
        return usual.nonzero().flatten()
    limit = _OUTLIER * size[usual].median()
    return (usual & (size > limit) & (limit > 0)).nonzero().flatten()


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """The quotient; 0 where the denominator is 0."""
    return np.where(bottom > 0, top / np.maximum(bottom, 1e-300), 0.0)
