"""Scores that one side alone hides are another mask: a fact, by whichever way the mask is made."""

import pytest
import torch

from divergence.analyses.operators.find import finding_of
from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.facts import worded

PASSES = ("anchored", "anchored")
X = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(0))
NUMBER = torch.arange(24)


def causal(query, key):
    return key <= query


def window(width):
    return lambda query, key: (key <= query) & (key > query - width)


def everything(query, key):
    return key >= 0 * query


def attention(seen, *, how="added", filling=None, inside=False):
    """Scores and a mask, which is added as a table, filled in, or chosen by ``where``. ``inside``:
    it is made by recorded operators, else it is given."""
    given = seen(NUMBER[:, None], NUMBER[None])

    def forward(x):
        scores = x @ x.transpose(-1, -2) / 8
        low = torch.finfo(x.dtype).min if filling is None else filling
        mask = given
        if inside:
            number = torch.arange(24)
            mask = seen(number[:, None], number[None])
        if how == "added":
            scores = scores + torch.zeros(24, 24, dtype=x.dtype).masked_fill(~mask, low)
        elif how == "filled":
            scores = scores.masked_fill(~mask, low)
        else:
            scores = torch.where(mask, scores, torch.full_like(scores, low))
        return scores.softmax(-1) @ x

    return forward


@pytest.fixture
def judged(toy):
    def judge(f, g, *, dtype=torch.float32, truth=True, pads=((0, 24, 0),)):
        x = X.to(dtype)
        a, b = toy(f, [x], pads=pads), toy(g, [x], pads=pads)
        right = toy(f, [x.double()], compute_dtype="float64", pads=pads) if truth else None
        return rate_operators(measure_operators(a, b, PASSES, truth=right), notes={})

    return judge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["added", "filled", "chosen"])
@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (window(4), window(5), "in B token 4 sees token 0, which A hides"),
        (causal, everything, "in B token 0 sees token 1, which A hides"),
        (causal, window(8), "in A token 8 sees token 0, which B hides"),
    ],
)
def test_the_first_token_that_sees_another_is_named(judged, dtype, how, mine, other, words):
    """A window of one too many, no causality, a window that is not meant: the operator that hides
    is named, not the softmax, which is right on both sides, and the side is B."""
    result = judged(attention(mine, how=how), attention(other, how=how, inside=True), dtype=dtype)
    finding = worded(finding_of(result))
    assert words in finding.summary
    assert "softmax" not in result.onset
    assert result.side == "candidate"


def test_without_a_truth_no_side_is_named(judged):
    """The masks differ for sure; whose is meant two runs do not tell."""
    result = judged(attention(window(4)), attention(window(5), inside=True), truth=False)
    assert "token 4 sees token 0" in worded(finding_of(result)).summary
    assert result.side is None


@pytest.mark.parametrize("filling", [-torch.inf, -1e5, -3e38])
def test_another_number_that_hides_the_same_is_no_fault(judged, filling):
    """Minus infinity, the least finite number and one far below every score hide alike."""
    result = judged(attention(causal), attention(causal, filling=filling, inside=True))
    assert result.onset is None


def test_queries_of_a_padded_batch_are_not_called_tokens(judged):
    """With pads on the left a row of scores is not the token of that number."""
    other = attention(window(5), how="filled", inside=True)
    result = judged(attention(window(4), how="filled"), other, pads=((3, 21, 0),))
    assert "in B query 7 sees key 3, which A hides" in worded(finding_of(result)).summary
