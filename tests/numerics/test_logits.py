"""Distribution metrics of logits, against mpmath with 60 digits."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics.logits import measure_logits, row_costs, top_choices


def _logits(shape, seed=0, *, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def _log_softmax(row):
    with mpmath.workdps(60):
        values = [mpmath.mpf(value) for value in row.tolist()]
        total = mpmath.log(mpmath.fsum(mpmath.exp(value) for value in values))
        return [value - total for value in values]


def _kl(a, b):
    with mpmath.workdps(60):
        p, q = _log_softmax(a), _log_softmax(b)
        return float(
            mpmath.fsum(mpmath.exp(x) * (x - y) for x, y in zip(p, q, strict=True) if mpmath.exp(x))
        )


@pytest.mark.parametrize("eps", [1e-12, 1e-9, 1e-6, 1e-3, 0.05, 1.0, 30.0, 900.0])
@pytest.mark.parametrize("offset", [0.0, 7.0])
def test_kl_is_exact_however_small(eps, offset):
    """KL from 1e-25 to hundreds of nats is right to 1e-6; a shift of all logits is nothing."""
    a = _logits((3, 50))
    b = a + eps * _logits((3, 50), 1) + offset
    wanted = [_kl(*pair) for pair in zip(a, b, strict=True)]
    found = measure_logits(a, b)
    if offset:  # adding it rounds the float64 logits themselves by 2^-52 of 10
        assert found.kl_max == pytest.approx(max(wanted), rel=1e-6, abs=1e-28)
    else:
        assert found.kl_max == pytest.approx(max(wanted), rel=1e-6, abs=0)
    assert found.kl_mean == pytest.approx(sum(wanted) / 3, rel=1e-6, abs=1e-28)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_widened(dtype):
    """Logits of any float dtype are compared as the numbers they hold."""
    a = _logits((4, 60)).to(dtype)
    b = (a.double() + 1e-2 * _logits((4, 60), 1)).to(dtype)
    wanted = sum(_kl(x.double(), y.double()) for x, y in zip(a, b, strict=True)) / 4
    assert measure_logits(a, b).kl_mean == pytest.approx(wanted, rel=1e-6)


def test_one_confident_token_and_a_long_tail():
    """A peaked distribution whose tail moves: KL 1e-10 is not lost beside p = 1."""
    a = torch.full((1, 1000), -20.0, dtype=torch.float64)
    a[0, 3] = 10.0
    b = a.clone()
    b[0, 500:] += 0.5
    assert measure_logits(a, b).kl_max == pytest.approx(_kl(a[0], b[0]), rel=1e-6, abs=0)


def test_a_vocabulary_longer_than_a_block():
    """A 150k vocabulary in bfloat16 is measured row by row, and agrees with a plain float64 sum."""
    a = _logits((5, 150_000)).bfloat16()
    b = (a.double() + 0.5 * _logits((5, 150_000), 1)).bfloat16()
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    found = measure_logits(a, b)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-6)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-6)
    assert found.top1_agreement == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    at = torch.arange(5), p.argmax(-1)
    assert found.chosen_logprob_diff_max == pytest.approx((p - q)[at].abs().max().item(), rel=1e-6)


def test_identical_logits_agree_exactly():
    """A run against itself: zero divergence, full agreement."""
    a = _logits((2, 3, 40))
    found = measure_logits(a, a.clone())
    assert (found.kl_max, found.top1_agreement, found.top5_overlap) == (0.0, 1.0, 1.0)
    assert found.chosen_logprob_diff_max == 0.0 and found.num_rows == 6


def test_a_changed_choice_is_noticed():
    """The comparison can fail: exchanging two logits changes choice, overlap and margin."""
    a = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0], [9.0, 1.0, 0, 0, 0, 0, 0]])
    b = a.clone()
    b[0, 0], b[0, 6] = -1.0, 5.0
    found = measure_logits(a, b)
    assert found.top1_agreement == 0.5
    assert found.top5_overlap == pytest.approx((4 / 5 + 1) / 2)
    assert found.margin_min == 1.0
    assert found.kl_max > 1.0 and found.chosen_logprob_diff_max == pytest.approx(6.0)


def test_masked_and_unusable_rows_are_left_out_and_counted():
    """Masked rows and rows with nan or inf are in no metric."""
    a, b = _logits((6, 10)), _logits((6, 10), 1)
    b[1, 2], a[2, 0], b[3] = math.nan, math.inf, -math.inf
    mask = torch.tensor([True, True, True, True, True, False])
    found = measure_logits(a, b, mask)
    keep = [0, 4]
    wanted = measure_logits(a[keep], b[keep])
    assert (found.num_rows, found.num_skipped) == (2, 3)
    assert found.kl_max == pytest.approx(wanted.kl_max)
    assert measure_logits(a[:0], b[:0]).num_rows == 0


def test_forbidden_tokens():
    """-inf is a probability of zero: 0·log 0 = 0, and ruling out a likely token costs inf."""
    a, b = torch.tensor([[1.0, 2.0, -math.inf]]), torch.tensor([[1.1, 2.0, -math.inf]])
    assert measure_logits(a, b).kl_max == pytest.approx(_kl(a[0, :2].double(), b[0, :2].double()))
    assert measure_logits(torch.tensor([[1.0, 2.0, 3.0]]), b).kl_max == math.inf
    allowed = torch.tensor([[1.1, 2.0, 0.5]])
    with mpmath.workdps(40):
        p, q = _log_softmax(a[0, :2].double()), _log_softmax(allowed[0].double())
        wanted = float(mpmath.fsum(mpmath.exp(p[i]) * (p[i] - q[i]) for i in range(2)))
    assert measure_logits(a, allowed).kl_max == pytest.approx(wanted, rel=1e-6)


def test_top_choices_are_deterministic_on_ties():
    """Equal logits come lowest id first, with log-probabilities in nats."""
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0, 3.0], dtype=torch.bfloat16)
    found = top_choices(row, 4)
    assert [at for at, _ in found] == [1, 3, 5, 2]
    assert found[0][1] == pytest.approx(torch.log_softmax(row.double(), 0)[1].item())
    assert len(top_choices(row, 99)) == 6 and top_choices(row, 0) == []


def test_shapes_are_checked():
    """Different shapes and logits without a vocabulary are refused."""
    with pytest.raises(ValueError, match="shapes differ"):
        measure_logits(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="vocabulary"):
        measure_logits(torch.ones(2, 0), torch.ones(2, 0))
    with pytest.raises(ValueError, match="row mask"):
        measure_logits(torch.ones(2, 3), torch.ones(2, 3), torch.ones(5))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=8))
def test_kl_is_never_negative(pairs):
    """KL >= 0 for any two rows, which the plain sum does not keep."""
    a, b = (torch.tensor([side], dtype=torch.float64) for side in zip(*pairs, strict=True))
    found = measure_logits(a, b)
    assert found.kl_max >= 0.0
    assert found.kl_max == pytest.approx(max(0.0, _kl(a[0], b[0])), rel=1e-6, abs=1e-28)


def test_costs_are_those_of_each_row():
    """By hand, of every row: KL, whether the likeliest id is the same, log p of what follows."""
    a, b = (torch.randn(5, 7, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    costs = row_costs(a, b, [3, 0, -1, 6, 2])
    p, q = (side.double().log_softmax(-1) for side in (a, b))
    assert costs.kl == pytest.approx((p.exp() * (p - q)).sum(-1).numpy())
    assert costs.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert costs.logprob_a[[0, 1, 3, 4]] == pytest.approx(p[[0, 1, 3, 4], [3, 0, 6, 2]].numpy())
    assert [math.isnan(x) for x in costs.logprob_b] == [False, False, True, False, False]
