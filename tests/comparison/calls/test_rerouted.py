"""Choices that differ: tokens chosen for alike stay comparable, the others are left out."""

import pytest
import torch

from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.comparison.calls import Rerouted

T, D, E, CHOSEN = 24, 16, 4, 2
X = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(E, D, D, generator=torch.Generator().manual_seed(1)) / D**0.5


def experts(x, scores, wrong=0.0):
    """Rows sorted by expert, through the experts, put back, added up: as grouped kernels do it."""
    values, index = (scores * 1.0).topk(CHOSEN, dim=-1)
    flat, order = index.reshape(-1).sort(stable=True)
    rows = x[order // CHOSEN]
    out = torch.cat([rows[flat == e] @ WEIGHTS[e].to(x.dtype) for e in range(E)]) * (1 + wrong)
    back = torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    picked = (out * 1.0)[back]
    return (picked.view(T, CHOSEN, D) * values[..., None]).sum(1)


def near_ties():
    """Token 5's second and third expert are a rounding apart."""
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(2))
    scores[5] = torch.tensor([0.9, 0.5, 0.5 + 1e-7, 0.1])
    other = scores.clone()
    other[5, 1], other[5, 2] = scores[5, 2], scores[5, 1]
    other += 1e-7 * torch.rand(T, E, generator=torch.Generator().manual_seed(3))
    return scores, other


@pytest.fixture
def judged(toy):
    def judge(scores, other, wrong=0.0):
        a, b = toy(experts, [X, scores]), toy(lambda x, s: experts(x, s, wrong), [X, other])
        truth = toy(experts, [X.double(), scores.double()], compute_dtype="float64")
        measured = measure_operators(a, b, ("anchored", "anchored"), truth=truth)
        return rate_operators(measured, notes={})

    return judge


def test_a_rerouted_token_is_no_fault(judged):
    """Its rows are others, and all rows are sorted otherwise: nothing is wrong."""
    scores, other = near_ties()
    assert not torch.equal(scores.topk(2).indices, other.topk(2).indices)
    result = judged(scores, other)
    assert result.onset is None
    chosen = next(r for r in result.results if "topk" in r.site)
    assert chosen.codes == pytest.approx(1 / (T * CHOSEN))


def test_a_fault_among_rerouted_tokens_is_found(judged):
    """Experts that are 1e-3 off are named, with the other rows laid side by side in order."""
    result = judged(*near_ties(), wrong=1e-3)
    assert "aten.mul" in result.onset
    assert result.side == "candidate"


def test_scores_that_differ_are_named_before_the_choice(judged):
    """Not a tie: the scores came in differently, and the choice only follows."""
    scores, _ = near_ties()
    other = scores.clone()
    other[5] = other[5].flip(0)
    result = judged(scores, other)
    assert result.onset == "./aten.mul"
    (found,) = result.results[0].other_inputs
    assert (found.argument, found.viewed) == ("self", False)


def test_a_backward_behind_a_rerouted_token_is_not_compared():
    """The gradient of a weight is a sum over all tokens, that one too."""
    routing = Rerouted(torch.tensor([True, False, True]), CHOSEN)
    routing.behind |= {"mlp/aten.mul", "mlp#backward/aten.mul"}
    values = torch.ones(3, D), torch.ones(3, D), None
    assert [len(one) for one in routing.align("mlp/aten.mul", values)[:2]] == [2, 2]
    assert routing.align("mlp#backward/aten.mul", values) is None
    assert routing.align("norm#backward/aten.mul", values) == values
