"""KL and total variation of two distributions of which only the likeliest entries are known.

p of the reference and q of the candidate are known on sets of ids; S holds what both know. What is
left, P = 1 - Σ_S p and Q = 1 - Σ_S q, lies anywhere on the other ids.

    KL(p‖q) >= Σ_S p log(p/q) + P log(P/Q)            (log-sum inequality: a tail as one entry)
    TV(p,q) in ½ (Σ_S |p-q| + [|P-Q| .. P+Q])

KL has no upper bound while q of an id may be anything. Where all of q is known, and no unknown p is
above the least known one m (a top-k list), Σ p log(p/q) over the tail is largest where p = m stands
on the ids of the smallest q. All in nats and float64. Source: Cover and Thomas, Elements of
Information Theory, 2nd ed., theorem 2.7.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = ["Bounds", "divergence_bounds"]

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
    """From the known ids (distinct, >= 0) and their log-probabilities. None where both know no id
    in common, or a value is nan or +inf."""
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
    upper = inner + _most(p_ids, p_log, q_ids, q_log, p_at, q_at, p_tail)
    lower = max(0.0, lower)
    return Bounds(lower, max(lower, upper), tv[0], tv[1], p_tail, q_tail)


def _most(
    p_ids: np.ndarray, p_log: np.ndarray, q_ids: np.ndarray, q_log: np.ndarray, p_at: np.ndarray,
    q_at: np.ndarray, p_tail: float,
) -> float:  # fmt: skip
    """The largest that the tail's part of KL can be; inf where q is not known whole."""
    whole = 1 - float(np.exp(q_log).sum()) < _NOTHING and len(p_at) == len(p_ids)
    if not whole:
        return math.inf
    rest = np.sort(np.delete(q_log, q_at))
    most = math.exp(float(p_log.min()))
    count = math.ceil(p_tail / most - 1e-12)
    if count > len(rest):
        return math.inf  # the list is no top list: its tail has more than it may
    parts = np.full(count, most)
    parts[-1] = p_tail - most * (count - 1)
    return float((parts * (np.log(parts) - rest[:count])).sum())
