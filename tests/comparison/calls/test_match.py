"""Two sequences of calls laid side by side: equal ones, other kernels, other orders."""

import pytest
import torch
from torch.nn import functional as F

from divergence.analyses.operators.measure import distance_of
from divergence.comparison.calls import forwards_of, match_calls

Q, K, V = (torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
W = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))


def project(heads, weight):
    return heads.transpose(1, 2).reshape(1, 6, 32) @ weight


def eager(q, k, v, weight):
    scores = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1)
    return project(scores @ v, weight)


def fused(q, k, v, weight):
    return project(F.scaled_dot_product_attention(q, k, v), weight)


def rms_norm(x):
    return F.rms_norm(x, (32,)) @ W


def unfused_rms_norm(x):
    eps = torch.finfo(x.dtype).eps
    return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()) @ W


@pytest.fixture
def matched(toy):
    """``matched(f, g, inputs)``: (reference's name, candidate's, method) and both lone lists."""

    def match(f, g, inputs, *, by_value=True):
        a, b = toy(f, inputs), toy(g, inputs)
        (ours,), (theirs,) = (forwards_of(run, "anchored").values() for run in (a, b))

        def same(x, y):
            return distance_of(a.read(x.results[0]), b.read(y.results[0]))

        found = match_calls(ours, theirs, apart=same if by_value else None)
        names = [
            (m.reference.path.partition("/")[2], m.candidate.path.partition("/")[2], m.method)
            for m in found[0]
        ]
        return names, *([node.path.partition("/")[2] for node in side] for side in found[1:])

    return match


def test_a_run_matches_itself(matched):
    """Everything, exactly, and nothing is left."""
    names, *lone = matched(eager, eager, [Q, K, V, W])
    assert {method for *_, method in names} == {"exact"}
    assert all(one == two for one, two, _ in names)
    assert lone == [[], []]


def test_a_fused_attention_is_compared_where_it_ends(matched):
    """The weighted sum is what the fused kernel gives; the rest of eager has no partner."""
    names, mine, _ = matched(eager, fused, [Q, K, V, W])
    (found,) = [name for name in names if name[2] == "value"]
    assert found[0] == "aten.bmm#2"
    assert "scaled_dot_product" in found[1]
    assert "aten._softmax" in mine
    assert ("aten.mm", "aten.mm", "exact") in names


def test_a_fault_that_no_value_survives_is_matched_by_dataflow(matched):
    """It goes into the same argument of the same projection."""

    def wrong(q, k, v, weight):
        return fused(-q, k, 7 * v, weight)

    names, *_ = matched(eager, wrong, [Q, K, V, W])
    (found,) = [name for name in names if name[2] == "dataflow"]
    assert found[0] == "aten.bmm#2"
    assert "scaled_dot_product" in found[1]


def test_dataflow_passes_over_copies(matched):
    """The projection is given a copy; what was copied is the end of both attentions."""
    names, *_ = matched(eager, fused, [Q, K, V, W], by_value=False)
    assert [name[0] for name in names if name[2] == "dataflow"] == ["aten.bmm#2"]


def test_a_fused_norm_is_compared_where_it_ends(matched):
    """F.rms_norm against its parts (torch may take it apart itself; then they match as calls)."""
    names, *_ = matched(rms_norm, unfused_rms_norm, [X])
    assert ("aten.mm", "aten.mm", "exact") in names
    assert len(names) >= 2


def test_factors_in_the_other_order_are_the_same_call(matched):
    """silu(x) · y and y · silu(x)."""
    names, *lone = matched(lambda x: F.silu(x) * (x + 1), lambda x: (x + 1) * F.silu(x), [X])
    assert ("aten.mul", "aten.mul", "exact") in names
    assert lone == [[], []]


def test_calls_in_another_order_are_matched_by_name(matched):
    """What a module calls once is the same call wherever it comes."""

    def one(x):
        gate = x.sin()
        return gate.exp() * x.cos()

    def two(x):
        up = x.cos()
        return x.sin().exp() * up

    names, *lone = matched(one, two, [X])
    assert {name[0] for name in names} == {"aten.sin", "aten.exp", "aten.cos", "aten.mul"}
    assert lone == [[], []]


def test_in_place_is_the_same_call(matched):
    """exp_ and exp; the name tells that it is not exactly the same."""
    names, *lone = matched(lambda x: (x * 2).exp(), lambda x: (x * 2).exp_(), [X])
    assert names == [("aten.mul", "aten.mul", "exact"), ("aten.exp", "aten.exp_", "sequence")]
    assert lone == [[], []]


def test_an_extra_call_is_left_alone(matched):
    """One side computes something besides: it has no partner, and the rest has."""
    names, mine, theirs = matched(lambda x: x.exp() + 1, lambda x: x.exp() + 1 + x.sin().sum(), [X])
    assert ("aten.exp", "aten.exp", "exact") in names
    assert mine == []
    assert "aten.sin" in theirs
