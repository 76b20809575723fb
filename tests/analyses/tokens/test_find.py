"""Tokens: what the blocks themselves explain of the distributions is no drift."""

import pytest

from divergence.comparison.result import TokensResult, TruthDiff
from tests.by_hand import measured


@pytest.mark.parametrize(
    ("w", "side", "ratio", "pass_", "drifts"),
    [
        (1.0, "reference", 6.2, "anchored", True),
        (1.8, "reference", 6.2, "anchored", False),  # kernels 1.8 x less exact in every block
        (1 / 1.8, "candidate", 6.2, "anchored", False),
        (1 / 1.8, "reference", 6.2, "anchored", True),  # the farther side has the better blocks
        (1.8, "reference", 30.0, "anchored", True),
        (50.0, "reference", 6.2, "free", True),  # there a block is as far off as what came in
        (50.0, "reference", 60.0, "anchored", True),  # no block explains more than its limit
    ],
)
def test_less_exact_kernels_everywhere_explain_the_logits(judged, w, side, ratio, pass_, drifts):
    """KL goes with the square of the error, so with 1 + W² of the blocks."""
    tokens = TokensResult(
        num_tokens=16,
        num_equal=16,
        forced=True,
        kl_mean=1e-9,
        kl_p99=1e-9,
        floor_side=side,
        floor_kl_mean=1e-10,
        floor_kl_p99=1e-10,
        kl_ratio=ratio,
        kl_limit=6.0,
    )
    numbers = dict.fromkeys(TruthDiff.__struct_fields__, 1.0) | {"w_median": w}
    sites = [
        measured(f"h.{number}:out", 0.5, truth=TruthDiff(**numbers), pass_=pass_)
        for number in range(5)
    ]
    findings = judged(sites, ("blocks", "tokens"), tokens=tokens).findings
    assert any(finding.claim == "drift" for finding in findings) == drifts
