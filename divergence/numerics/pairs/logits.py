"""Two sets of logits as distributions: how far apart, and whether the choice changes.

With p = softmax(a), q = softmax(b) and t = log q - log p, the divergence is
KL(A‖B) = Σ p·(-t). Its terms are of size |t| and cancel down to t²/2, so for close
distributions the plain sum is all rounding. Since Σ p·expm1(t) = Σ q - Σ p = 0, adding
that zero gives

    KL = Σ p · (expm1(t) - t),

a sum of terms that are all >= 0 (J. Schulman, "Approximating KL Divergence", 2020,
estimator k3, here summed exactly instead of sampled). For |t| < 1/16 the term itself
is taken from its series t²/2 + t³/6 + ..., where expm1(t) - t would cancel once more.
And t is not the difference of two rounded log-probabilities: with c = b - a it is
c - log Σ p·exp(c), taken as (c - m) - log1p(Σ p·expm1(c - m)) with m = Σ p·c; m only
recentres, so that c - m is as small as the distributions are close. All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from divergence.numerics.pairs.blocks import BLOCK, Grid, run_split

__all__ = [
    "LogitsMetrics", "RowCosts", "kl_divergence", "logit_error", "measure_logits", "row_costs",
    "top_choices",
]  # fmt: skip

_SERIES_BELOW = 1.0 / 16.0
_AT_ONCE = 1 << 22
"""Logits that row_costs takes at a time: 32 MiB of each of its steps."""


class LogitsMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics over rows; field names and meaning of compare's LogitsDiff.

    kl_*: KL(A‖B) per row in nats: mean, median, 90th, 95th, 99th percentile (inverted cdf)
    and max. top1_agreement: share of rows with the same argmax (lowest id on ties).
    top5_overlap: mean |top5(a) ∩ top5(b)| / min(5, V). margin_*: top1 - top2 logit of the
    reference, in logits (inf where V = 1): smallest and median. chosen_logprob_diff_max:
    largest |Δ| over rows of the log-probability, in nats, of the reference's argmax.
    num_rows: rows measured; num_skipped: rows with a nan or +inf logit, or without any
    finite one, on either side; they are in no metric. Without rows everything is 0, except
    the shares, which are 1, and the margins, inf. -inf is a probability of 0:
    0·log 0 = 0, and p > 0 = q gives inf.
    """

    num_rows: int
    num_masked: int
    num_skipped: int
    kl_mean: float
    kl_median: float
    kl_p90: float
    kl_p95: float
    kl_p99: float
    kl_max: float
    worst_row: int | None
    top1_agreement: float
    top5_overlap: float
    margin_min: float
    margin_median: float
    chosen_logprob_diff_max: float


class RowCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What another model's logits cost, row by row; float64 arrays of one length."""

    kl: np.ndarray
    """KL(A‖B) in nats."""
    same_top: np.ndarray
    """Is the likeliest id the same?"""
    logprob_a: np.ndarray
    """log p of the token that follows, in nats; nan where it is not known."""
    logprob_b: np.ndarray


def row_costs(a: torch.Tensor, b: torch.Tensor, following: Sequence[int]) -> RowCosts:
    """Costs of logits b (T, V) against a. ``following``: the id that follows each row, or -1.

    Plain sums in float64: a KL is exact to some 1e-14 nats, far below what quantisation costs.
    Rows with a nan, a +inf or no finite logit have nan. Raises ValueError where shapes differ.
    """
    if a.shape != b.shape or len(following) != len(a):
        raise ValueError(f"shapes differ: {tuple(a.shape)}, {tuple(b.shape)}, {len(following)}")
    parts = []
    count = max(1, _AT_ONCE // max(1, a.shape[-1]))
    for start in range(0, len(a), count):
        rows = slice(start, start + count)
        log_p, log_q = (side[rows].detach().cpu().double().log_softmax(-1) for side in (a, b))
        ids = torch.tensor(following[rows])
        known = (ids >= 0) & ~(log_p.isnan() | log_q.isnan()).any(-1)
        p = log_p.exp()
        kl = torch.where(p > 0, p * (log_p - log_q), torch.where(p.isnan(), p, 0.0)).sum(-1)
        of_next = [
            side.gather(-1, ids.clamp(min=0)[:, None])[:, 0].where(known, math.nan)
            for side in (log_p, log_q)
        ]
        same = log_p.argmax(-1) == log_q.argmax(-1)
        parts.append([column.numpy() for column in (kl.clamp(min=0), same, *of_next)])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return RowCosts(kl=columns[0], same_top=columns[1], logprob_a=columns[2], logprob_b=columns[3])


def measure_logits(
    a: torch.Tensor, b: torch.Tensor, row_mask: torch.Tensor | None = None
) -> LogitsMetrics:
    """Metrics of logits b against a: rows (leading dims) × V, one row at a time or a few.

    ``row_mask``: bool per row, True = measure. Formulas, units and care: LogitsMetrics and
    the module docstring. Raises ValueError where shapes do not match or V is 0.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.ndim == 0 or a.shape[-1] == 0:
        raise ValueError(f"logits need a vocabulary axis, the shape is {tuple(a.shape)}")
    grid_a, grid_b = Grid(a), Grid(b)
    if grid_a.width != 1 or grid_b.width != 1:
        raise ValueError("logits are real numbers")
    rows = np.arange(grid_a.num_rows)
    if row_mask is not None:
        mask = row_mask.detach().cpu().reshape(-1).to(torch.bool).numpy()
        if len(mask) != len(rows):
            raise ValueError(f"the row mask has {len(mask)} entries for {len(rows)} rows")
        rows = rows[mask]
    count = max(1, BLOCK // grid_a.num_cols)
    size = count * grid_a.num_cols
    cols = slice(0, grid_a.num_cols)

    def work(starts: range) -> list[tuple[np.ndarray, ...]]:
        buffer_a, buffer_b = np.empty((2, size))
        blocks = []
        with np.errstate(all="ignore"):
            for start in starts:
                part = rows[start : start + count]
                x, y = grid_a.load(part, cols, buffer_a), grid_b.load(part, cols, buffer_b)
                usable = _usable(x) & _usable(y)
                blocks.append((part[usable], *_measure_rows(x[usable], y[usable])))
        return blocks

    threads = min(8, torch.get_num_threads())
    starts = range(0, len(rows), count)
    measured = [block for part in run_split(work, starts, threads=threads) for block in part]
    num_masked = grid_a.num_rows - len(rows)
    if not measured:
        measured.append((rows, *_measure_rows(np.zeros((0, 1)), np.zeros((0, 1)))))
    return _aggregate(
        *(np.concatenate(columns) for columns in zip(*measured, strict=True)),
        num_masked=num_masked,
        num_wanted=len(rows),
    )


def top_choices(row: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """The ``k`` most probable ids of one row of logits with their log-probabilities.

    log p_i = a_i - max - log Σ exp(a_j - max), in nats, float64. Ties: lowest id first.
    nan logits come last, with log-probability nan for all (their sum is nan).
    """
    values = row.detach().cpu().reshape(-1).to(torch.float64).numpy()
    order = _top(values[None, :], min(k, len(values)))[0]
    with np.errstate(all="ignore"):
        logprobs = values[order] - _logsumexp(values[None, :])[0]
    return [(int(at), float(value)) for at, value in zip(order, logprobs, strict=True)]


def kl_divergence(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """KL(A‖B) of two rows of logits (V,), in nats, float64; formula in the module docstring.

    None where the rows are of other lengths, or one has a nan, a +inf or no finite logit.
    """
    x, y = _row(a), _row(b)
    if x.shape != y.shape or not x.size or not (_usable(x)[0] and _usable(y)[0]):
        return None
    with np.errstate(all="ignore"):
        return float(_kl(*_log_ratio(x, y))[0])


def logit_error(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """rms(d - mean(d)), d = a - b, over a row of logits (V,), in logits, float64.

    The mean is taken off: a constant on all logits changes no probability and no choice,
    so it is no error of a logit against another. Over the ids that are finite on both sides;
    None where there are none, or the rows are of other lengths.
    """
    x, y = _row(a), _row(b)
    if x.shape != y.shape:
        return None
    both = np.isfinite(x) & np.isfinite(y)
    return float((x[both] - y[both]).std()) if both.any() else None


def _row(row: torch.Tensor) -> np.ndarray:
    """(V,) as (1, V) in float64."""
    grid = Grid(row.reshape(1, -1))  # in portions for which torch starts no threads
    return grid.load(slice(0, 1), slice(None), np.empty(row.numel()))


def _usable(x: np.ndarray) -> np.ndarray:
    usable: np.ndarray = np.isfinite(x.max(axis=1))  # max is nan, inf or, where all are -inf, -inf
    return usable


def _logsumexp(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=1)
    sums: np.ndarray = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
    return sums


def _top(x: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest per row, largest first, lowest id first on ties, nan last."""
    ids = np.empty((len(x), k), np.int64)
    for number, row in enumerate(x):
        row = np.where(np.isnan(row), -np.inf, row) if np.isnan(row.max()) else row
        least = np.partition(row, len(row) - k)[len(row) - k] if k else np.inf
        above = np.flatnonzero(row > least)
        above = above[np.argsort(-row[above], kind="stable")]
        equal = np.flatnonzero(row == least)[: k - len(above)]
        ids[number] = np.concatenate([above, equal])
    return ids


def _measure_rows(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    """Per row: KL, same argmax, top-5 overlap, margin, Δ log-probability of the choice."""
    k = min(5, x.shape[1])
    top_x, top_y = _top(x, max(k, 1)), _top(y, max(k, 1))
    number = np.arange(len(x))
    choice = top_x[:, 0]
    p, log_q, t = _log_ratio(x, y)
    overlap = (top_x[:, :, None] == top_y[:, None, :]).any(axis=2).sum(axis=1) / max(k, 1)
    if x.shape[1] > 1:
        margin = x[number, choice] - x[number, top_x[:, 1]]
    else:
        margin = np.full(len(x), math.inf)
    return _kl(p, log_q, t), choice == top_y[:, 0], overlap, margin, np.abs(t[number, choice])


def _log_ratio(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, log q and t = log q - log p per element; see the module docstring. t is 0 where p is an
    exact 0 (a logit of -inf), and -inf where only q is."""
    top = x.max(axis=1, keepdims=True)
    p = np.exp(x - top)
    whole = p.sum(axis=1, keepdims=True)
    p /= whole
    log_p = x - (top + np.log(whole))
    c = y - x
    dead = np.isneginf(x)
    some_dead = bool(dead.any())
    if some_dead:
        c[dead] = 0.0
    lowest = c.min(axis=1)
    heard = c if np.isfinite(lowest).all() else np.where(np.isneginf(c), 0.0, c)
    mean = (p * heard).sum(axis=1, keepdims=True)
    c -= mean
    change = p * np.expm1(c)
    if some_dead:
        # Σ exp(b) also holds what b gives to ids that a rules out: q · exp(LSE b - LSE a - m).
        change = np.where(dead, np.exp(y - (top + np.log(whole)) - mean), change)
    change = change.sum(axis=1, keepdims=True)
    t = c - np.log1p(change)
    wild = ~(c.max(axis=1) < 600.0) | ~(change[:, 0] < math.inf)
    if wild.any():  # expm1 would overflow; so far apart nothing cancels
        t[wild] = y[wild] - _logsumexp(y[wild])[:, None] - log_p[wild]
    log_q = log_p + t
    if some_dead:
        log_q = np.where(dead, y - _logsumexp(y)[:, None], log_q)
        t[dead] = 0.0
    return p, log_q, t


def _kl(p: np.ndarray, log_q: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Σ p (expm1(t) - t), in nats, per row; p·expm1(t) is q - p."""
    terms = t * (1 / 40320)
    for number in (5040, 720, 120, 24, 6, 2):  # the series, by Horner's rule
        terms += 1 / number
        if number > 2:
            terms *= t
    terms *= t
    terms *= t
    terms *= p
    far = (np.abs(t) >= _SERIES_BELOW) | ~(p > 0.0) | np.isnan(t)
    if far.any():
        p_far, t_far = p[far], t[far]
        terms[far] = (np.exp(log_q[far]) - p_far) - np.where(p_far > 0.0, p_far * t_far, 0.0)
    divergences: np.ndarray = terms.sum(axis=1)
    return divergences


def _aggregate(
    rows: np.ndarray,
    kl: np.ndarray,
    same: np.ndarray,
    overlap: np.ndarray,
    margin: np.ndarray,
    logprob_diff: np.ndarray,
    *,
    num_masked: int,
    num_wanted: int,
) -> LogitsMetrics:
    empty = not len(kl)

    def kl_quantile(share: float) -> float:
        return 0.0 if empty else float(np.quantile(kl, share, method="inverted_cdf"))

    return LogitsMetrics(
        num_rows=len(kl),
        num_masked=num_masked,
        num_skipped=num_wanted - len(kl),
        kl_mean=0.0 if empty else float(kl.mean()),
        kl_median=kl_quantile(0.5),
        kl_p90=kl_quantile(0.9),
        kl_p95=kl_quantile(0.95),
        kl_p99=kl_quantile(0.99),
        kl_max=0.0 if empty else float(kl.max()),
        worst_row=None if empty else int(rows[kl.argmax()]),
        top1_agreement=1.0 if empty else float(same.mean()),
        top5_overlap=1.0 if empty else float(overlap.mean()),
        margin_min=math.inf if empty else float(margin.min()),
        margin_median=math.inf if empty else float(np.median(margin)),
        chosen_logprob_diff_max=0.0 if empty else float(logprob_diff.max()),
    )
