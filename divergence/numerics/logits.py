"""Logits and log-probabilities of two sides: choices, margins, KL divergence, and the numbers that
trainers watch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from divergence.numerics.arrays import as_array, wide
from divergence.numerics.sums import BLOCK, Grid, num_threads, run_split

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor

# KL and total variation of two distributions of which only the likeliest entries are known.
#
# p of the reference and q of the candidate are known on sets of ids; S holds what both know. What
# is left, P = 1 - Σ_S p and Q = 1 - Σ_S q, lies anywhere on the other ids.
#
#     KL(p‖q) >= Σ_S p log(p/q) + P log(P/Q)            (log-sum inequality: a tail as one entry)
#     TV(p,q) in ½ (Σ_S |p-q| + [|P-Q| .. P+Q])
#
# KL has no upper bound while q of an id may be anything. Where all of q is known, and no unknown p
# is above the least known one m (a top-k list), Σ p log(p/q) over the tail is largest where p = m
# stands on the ids of the smallest q. All in nats and float64. Source: Cover and Thomas, Elements
# of Information Theory, 2nd ed., theorem 2.7.1.

_NOTHING = 1e-6
"""A tail below it is what float32 log-probabilities leave of a distribution that is known whole."""


class Bounds(NamedTuple):
    """KL(p‖q) and TV(p, q) of one token, and the tails' masses."""

    kl_lower: float
    kl_upper: float
    """inf where it has none."""
    tv_lower: float
    tv_upper: float
    p_tail: float
    q_tail: float


def divergence_bounds(
    p_ids: np.ndarray, p_log: np.ndarray, q_ids: np.ndarray, q_log: np.ndarray
) -> Bounds | None:
    """Bound the divergence by the known ids (distinct, >= 0) and their log-probabilities. None
    where both know no id in common, or a value is nan or +inf."""
    _, p_at, q_at = np.intersect1d(p_ids, q_ids, assume_unique=True, return_indices=True)
    log_p, log_q = p_log[p_at].astype(np.float64), q_log[q_at].astype(np.float64)
    if not len(p_at) or not (np.all(log_p < math.inf) and np.all(log_q < math.inf)):
        return None
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore", divide="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    inner = float(terms.sum())
    p_tail, q_tail = max(0.0, 1 - float(p.sum())), max(0.0, 1 - float(q.sum()))
    near = float(np.abs(p - q).sum())
    tv = 0.5 * (near + abs(p_tail - q_tail)), min(1.0, 0.5 * (near + p_tail + q_tail))
    if p_tail < _NOTHING:
        exact = max(0.0, inner)
        return Bounds(exact, exact, tv[0], tv[1], p_tail, q_tail)
    lower = inner + p_tail * math.log(p_tail / q_tail) if q_tail > 0 else math.inf
    lower, upper = max(0.0, lower), math.inf
    if 1 - float(np.exp(q_log).sum()) < _NOTHING and len(p_at) == len(p_ids):  # q is known whole
        rest = np.sort(np.delete(q_log, q_at))
        most = math.exp(float(p_log.min()))
        count = math.ceil(p_tail / most - 1e-12)
        if count <= len(rest):  # else the list is no top list: its tail has more than it may
            parts = np.full(count, most)
            parts[-1] = p_tail - most * (count - 1)
            upper = inner + float((parts * (np.log(parts) - rest[:count])).sum())
    return Bounds(lower, max(lower, upper), tv[0], tv[1], p_tail, q_tail)


# Two sets of logits as distributions: how far apart, and whether the choice changes.
#
# With p = softmax(a), q = softmax(b) and t = log q - log p, the divergence is
# KL(A‖B) = Σ p·(-t). Its terms are of size |t| and cancel down to t²/2, so for close
# distributions the plain sum is all rounding. Since Σ p·expm1(t) = Σ q - Σ p = 0, adding
# that zero gives
#
#     KL = Σ p · (expm1(t) - t),
#
# a sum of terms that are all >= 0 (J. Schulman, "Approximating KL Divergence", 2020,
# estimator k3, here summed exactly instead of sampled). For |t| < 1/16 the term itself
# is taken from its series t²/2 + t³/6 + ..., where expm1(t) - t would cancel once more.
# And t is not the difference of two rounded log-probabilities: with c = b - a it is
# c - log Σ p·exp(c), taken as (c - m) - log1p(Σ p·expm1(c - m)) with m = Σ p·c; m only
# recentres, so that c - m is as small as the distributions are close. All in float64.

_SERIES_BELOW = 1.0 / 16.0
_AT_ONCE = 1 << 22
"""Logits that row_costs takes at a time: 32 MiB of each of its steps."""


class LogitsMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics over rows; field names and meaning of compare's LogitsDiff.

    kl_*: KL(A‖B) per row in nats: mean, 99th percentile (inverted cdf) and max. top1_agreement:
    share of rows with the same argmax (lowest id on ties). top5_overlap: mean |top5(a) ∩ top5(b)|
    / min(5, V). margin_min: smallest top1 - top2 logit of the reference, in logits (inf where
    V = 1). chosen_logprob_diff_max: largest |Δ| over rows of the log-probability, in nats, of the
    reference's argmax. num_rows: rows measured; num_skipped: rows with a nan or +inf logit, or
    without any finite one, on either side; they are in no metric. Without rows everything is 0,
    except the shares, which are 1, and the margin, inf. -inf is a probability of 0: 0·log 0 = 0,
    and p > 0 = q gives inf.
    """

    num_rows: int
    num_skipped: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    margin_min: float
    chosen_logprob_diff_max: float


class RowCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what another model's logits cost, row by row; float64 arrays of one length."""

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
    import torch

    if a.shape != b.shape or len(following) != len(a):
        raise ValueError(f"shapes differ: {tuple(a.shape)}, {tuple(b.shape)}, {len(following)}")
    parts = []
    count = max(1, _AT_ONCE // max(1, a.shape[-1]))
    for start in range(0, len(a), count):
        rows = slice(start, start + count)
        log_p, log_q = (side[rows].detach().cpu().double().log_softmax(-1) for side in (a, b))
        ids = torch.tensor(following[rows])
        comparable = (ids >= 0) & ~(log_p.isnan() | log_q.isnan()).any(-1)
        p = log_p.exp()
        kl = torch.where(p > 0, p * (log_p - log_q), torch.where(p.isnan(), p, 0.0)).sum(-1)
        of_next = [
            side.gather(-1, ids.clamp(min=0)[:, None])[:, 0].where(comparable, math.nan)
            for side in (log_p, log_q)
        ]
        same = log_p.argmax(-1) == log_q.argmax(-1)
        parts.append([column.numpy() for column in (kl.clamp(min=0), same, *of_next)])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return RowCosts(kl=columns[0], same_top=columns[1], logprob_a=columns[2], logprob_b=columns[3])


def measure_logits(a: Tensor, b: Tensor, row_mask: Tensor | None = None) -> LogitsMetrics:
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
        mask = as_array(row_mask).reshape(-1).astype(bool)
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
                blocks.append(_measure_rows(x[usable], y[usable]))
        return blocks

    starts = range(0, len(rows), count)
    measured = [block for part in run_split(work, starts, threads=num_threads()) for block in part]
    if not measured:
        measured.append(_measure_rows(np.zeros((0, 1)), np.zeros((0, 1))))
    kl, same, overlap, margin, logprob_diff = (
        np.concatenate(columns) for columns in zip(*measured, strict=True)
    )
    empty = not len(kl)
    return LogitsMetrics(
        num_rows=len(kl),
        num_skipped=len(rows) - len(kl),
        kl_mean=0.0 if empty else float(kl.mean()),
        kl_p99=0.0 if empty else float(np.quantile(kl, 0.99, method="inverted_cdf")),
        kl_max=0.0 if empty else float(kl.max()),
        top1_agreement=1.0 if empty else float(same.mean()),
        top5_overlap=1.0 if empty else float(overlap.mean()),
        margin_min=math.inf if empty else float(margin.min()),
        chosen_logprob_diff_max=0.0 if empty else float(logprob_diff.max()),
    )


def top_choices(row: Tensor, k: int) -> list[tuple[int, float]]:
    """The ``k`` most probable ids of one row of logits with their log-probabilities.

    log p_i = a_i - max - log Σ exp(a_j - max), in nats, float64. Ties: lowest id first.
    nan logits come last, with log-probability nan for all (their sum is nan).
    """
    values = wide(row).reshape(-1)
    order = _top(values[None, :], min(k, len(values)))[0]
    with np.errstate(all="ignore"):
        logprobs = values[order] - _logsumexp(values[None, :])[0]
    return [(int(at), float(value)) for at, value in zip(order, logprobs, strict=True)]


def log_softmax(row: Tensor) -> np.ndarray:
    """The log-probabilities of one row of logits (V,), in nats, float64."""
    values = wide(row)
    with np.errstate(all="ignore"):
        shifted: np.ndarray = values - values.max()
        log_probs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def kl_divergence(a: Tensor, b: Tensor) -> float | None:
    """KL(A‖B) of two rows of logits (V,), in nats, float64; formula in the module docstring.

    None where the rows are of other lengths, or one has a nan, a +inf or no finite logit.
    """
    x, y = _row(a), _row(b)
    if x.shape != y.shape or not x.size or not (_usable(x)[0] and _usable(y)[0]):
        return None
    with np.errstate(all="ignore"):
        return float(_kl(*_log_ratio(x, y))[0])


def logit_error(a: Tensor, b: Tensor) -> float | None:
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


def _row(row: Tensor) -> np.ndarray:
    """(V,) as (1, V) in float64."""
    return wide(row).reshape(1, -1)


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


# What trainers of reinforcement learning call the gap between rollout and trainer, by its names.
#
# Both gave log-probabilities to the same sampled tokens: l_r the engine that sampled them
# (rollout), l_t the trainer. r = exp(l_t - l_r) is the importance ratio of a token, i runs over
# sequences.
#
#     rollout_probs_diff_mean, _max, _std    |exp l_r - exp l_t|; std with n - 1            verl
#     rollout_actor_probs_pearson_corr       of exp l_r and exp l_t                         verl
#     k1                                     mean(l_r - l_t), verl's rollout_corr/kl
#     k3                                     mean(r - 1 - log r), verl's rollout_corr/k3_kl
#     importance_ratio_mean                  mean r, verl's rollout_is_mean
#     effective_sample_size                  1 / mean((r / mean r)²), rollout_is_eff_sample_size
#     chi2_token                             mean(r²) - 1                                   verl
#     chi2_sequence                          mean_i((Π r)²) - 1, verl's chi2_seq
#     token_mult_prob_error                  mean exp|l_r - l_t|                            NeMo-RL
#     train_rollout_logprob_abs_diff         mean_i of each sequence's mean |l_r - l_t|     slime
#
# Means are over tokens where no index says otherwise. A log ratio is cut at ±20 before exp, as verl
# does (SAFETY_BOUND). verl adds 1e-8 to the mean in the effective sample size, and takes its
# weights cut at a threshold; here they are not. Sources: verl, trainer/ppo/rollout_corr_helper.py
# and utils/debug/metrics.py; NeMo-RL, algorithms/loss_functions.py; slime, backends/*/loss.py.

SAFETY_BOUND = 20.0
PEARSON = "rollout_actor_probs_pearson_corr"


def rollout_metrics(
    rollout: Sequence[np.ndarray], trainer: Sequence[np.ndarray]
) -> dict[str, float]:
    """Compute metrics, by name, of finite log-probabilities, one array a sequence. Empty where
    there is no token; the correlation is left out where one side is constant."""
    pairs = [(r_log, t_log) for r_log, t_log in zip(rollout, trainer, strict=True) if len(r_log)]
    if not pairs:
        return {}
    behind, now = (np.concatenate(part).astype(np.float64) for part in zip(*pairs, strict=True))
    log_ratio = now - behind
    cut = np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
    ratio = np.exp(cut)
    diff = np.abs(np.exp(behind) - np.exp(now))
    sums = np.clip([float((t - r).sum()) for r, t in pairs], -SAFETY_BOUND, SAFETY_BOUND)
    metrics = dict(
        rollout_probs_diff_mean=float(diff.mean()),
        rollout_probs_diff_max=float(diff.max()),
        rollout_probs_diff_std=float(diff.std(ddof=1)) if len(diff) > 1 else 0.0,
        k1=float(-log_ratio.mean()),
        k3=float((np.expm1(cut) - cut).mean()),
        importance_ratio_mean=float(ratio.mean()),
        importance_ratio_max=float(ratio.max()),
        effective_sample_size=float(1 / np.square(ratio / ratio.mean()).mean()),
        chi2_token=float(np.square(ratio).mean() - 1),
        chi2_sequence=float(np.exp(2 * sums).mean() - 1),
        token_mult_prob_error=float(np.exp(np.abs(cut)).mean()),
        train_rollout_logprob_abs_diff=float(np.mean([np.abs(t - r).mean() for r, t in pairs])),
    )
    x, y = (side - side.mean() for side in (np.exp(behind), np.exp(now)))
    whole = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return metrics | {PEARSON: float((x * y).sum()) / whole} if whole > 0 else metrics
