"""Tokens: what the blocks themselves explain of the distributions is no drift."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from divergence.analyses.tokens.find import find
from divergence.comparison.results import TokensResult


def _measured(w, *, floor_side="reference", ratio=6.2):
    tokens = TokensResult(
        num_tokens=16,
        num_equal=16,
        forced=True,
        kl_mean=1e-9,
        kl_p99=1e-9,
        floor_side=floor_side,
        floor_kl_mean=1e-10,
        floor_kl_p99=1e-10,
        kl_ratio=ratio,
        kl_limit=6.0,
    )
    block = SimpleNamespace(
        truth=SimpleNamespace(w_median=w), role="block", identical=False, pass_="anchored"
    )
    return SimpleNamespace(tokens=tokens, sites=[block] * 5)


def _is_drift(measured):
    return any(one.claim == "drift" for one in find(measured).findings)


@pytest.mark.parametrize(
    ("w", "side", "ratio", "drifts"),
    [
        (1.0, "reference", 6.2, True),
        (1.8, "reference", 6.2, False),  # kernels 1.8 x less exact in every block
        (1 / 1.8, "candidate", 6.2, False),
        (1 / 1.8, "reference", 6.2, True),  # the farther side has the better blocks
        (1.8, "reference", 30.0, True),
    ],
)
def test_less_exact_kernels_everywhere_explain_the_logits(w, side, ratio, drifts):
    """KL goes with the square of the error, so with 1 + W² of the blocks."""
    assert _is_drift(_measured(w, floor_side=side, ratio=ratio)) is drifts


def test_free_runs_explain_nothing():
    """There a block is as far off as what came in; and no block explains more than its limit."""
    measured = _measured(50.0)
    measured.sites[0].pass_ = "free"
    assert _is_drift(measured)
    assert _is_drift(_measured(50.0, ratio=60.0))
