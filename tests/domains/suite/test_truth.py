"""Tests of divergence.domains.suite.definition: simulated rounding is as large as real rounding."""

import math

import pytest
import torch

from divergence.domains.suite.definition import samples, stored
from divergence.numerics.formats import format_named

SINGLE, BRAIN = format_named("float32"), format_named("bfloat16")


def spread(function, form=SINGLE, *, equal=False, count=64) -> torch.Tensor:
    """Standard deviation of the results around the exact one."""
    right = function()
    found = [result - right for result in samples(function, form, equal=equal, count=count)]
    return torch.stack(found).square().mean(0).sqrt()


def test_one_operation_is_off_by_a_rounding():
    """A product that float32 does not hold is off by 0.29 of its spacing, one that it holds by
    nothing."""
    x = torch.tensor([1.1, 1.5], dtype=torch.float64)
    found = spread(lambda: x * x, count=400)
    assert 0.26 < float(found[0]) / 2.0**-23 < 0.32
    assert found[1] == 0.0


def test_moving_values_is_exact():
    """Views, copies, comparisons and maxima make no error."""
    x = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def move():
        y = torch.cat([x.T, x.T.flip(0)], 1).contiguous()
        return torch.where(y > 0.5, y, -y).amax(0).clamp(max=0.9)

    assert float(spread(move, count=3).max()) == 0.0


@pytest.mark.parametrize("length", [256, 4096])
def test_sums_are_off_as_real_sums_are(length):
    """A float32 sum of random terms, one after the other, errs as much as is simulated, within a
    factor of two."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(200, length, generator=generator)
    total = torch.zeros(200)
    for column in range(length):
        total = total + x[:, column]
    real = float((total.double() - x.double().sum(-1)).square().mean().sqrt())
    simulated = float(spread(lambda: x.double().sum(-1), count=8).square().mean().sqrt())
    assert 0.5 < simulated / real < 2.0


def test_running_sums_carry_on_their_errors():
    """A float32 running sum errs at its end as is simulated, within a factor of two."""
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(200)
    for column in range(x.shape[1]):
        total = total + x[:, column]
    real = float((total.double() - x.double().sum(-1)).square().mean().sqrt())
    simulated = spread(lambda: x.double().cumsum(-1), count=8)
    assert 0.5 < float(simulated[:, -1].square().mean().sqrt()) / real < 2.0
    assert float(simulated[:, 2].mean()) < float(simulated[:, -1].mean()) / 5


def test_equal_terms_round_one_way():
    """4096 times 0.7 added in float32 is off by far more than random terms; that is allowed."""
    x = torch.full((1, 4096), 0.7)
    total = torch.zeros(1)
    for column in range(4096):
        total = total + x[:, column]
    real = float((total.double() - x.double().sum(-1)).abs())
    usual = float(spread(lambda: x.double().sum(-1)))
    allowed = float(spread(lambda: x.double().sum(-1), equal=True))
    assert real > 10 * usual
    assert real < 4 * allowed


def test_cancellation_is_seen():
    """1 + erf(x) at x = -3 is 2e-5, with the absolute error of a number near 1."""
    x = torch.full((100,), -3.0, dtype=torch.float64)
    found = float(spread(lambda: 1.0 + torch.erf(x)).mean())
    assert 0.3 < found / (4 * 2.0**-24 / math.sqrt(12)) < 1.5


def test_stored_results_round_to_the_dtype():
    """What is stored is off by 0.29 of bfloat16's spacing there, and exact in the truth."""
    x = torch.full((400,), 1.1, dtype=torch.float64)
    assert torch.equal(stored(x), x)
    found = float(spread(lambda: stored(x), BRAIN, count=4).square().mean().sqrt())
    assert 0.26 < found / 2.0**-7 < 0.32


def test_overflow_is_infinite():
    """exp(100) is beyond float32, so x / (1 + exp(x)) is 0 there in a sample."""
    x = torch.tensor([100.0], dtype=torch.float64)
    assert [float(y) for y in samples(lambda: x / (1 + torch.exp(x)), SINGLE, count=2)] == [0, 0]


def test_samples_are_always_the_same():
    """Two runs of the simulation give the same bits, and leave torch's generator alone."""
    x = torch.full((5,), 1.1, dtype=torch.float64)
    before = torch.get_rng_state()
    one = [y.tolist() for y in samples(lambda: x * x, SINGLE)]
    two = [y.tolist() for y in samples(lambda: x * x, SINGLE)]
    assert one == two
    assert len({tuple(y) for y in one}) == len(one)
    assert torch.equal(torch.get_rng_state(), before)
