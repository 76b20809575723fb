"""What two sketches tell of a pair, against the pair itself."""

import math

import numpy as np
import pytest
import torch

from divergence.numerics.estimate import _chi_square_share, estimate_pair
from divergence.numerics.pairs import measure_pair
from divergence.numerics.sketches import resolution, sketch_tensor

K = 8


def both(a, b, pooled=0, **more):
    base = more.pop("base", None)
    exact = measure_pair(a, b, base=base, **more)
    found = estimate_pair(
        *(sketch_tensor(x, K, num_pooled=pooled) for x in (a, b)),
        num_features=a.shape[-1],
        base=None if base is None else sketch_tensor(base, K),
        **more,
    )
    return exact, found


def random_pair(tokens=64, features=1024, size=1e-2):
    a = torch.randn(1, tokens, features)
    return a, a + size * torch.randn_like(a)


def test_the_whole():
    """Relative L2, 1 - cos, sqnr and update come out within the stated interval; norms exactly."""
    torch.manual_seed(1)
    a, b = random_pair()
    base = a - 0.3 * torch.randn_like(a)
    (exact, _), (found, _, estimate) = both(a, b, base=base)
    assert estimate.low < exact.rel_l2 < estimate.high
    assert found.rel_l2 == pytest.approx(exact.rel_l2, rel=estimate.relative_error)
    assert found.one_minus_cosine == pytest.approx(exact.one_minus_cosine, rel=0.3)
    assert found.update_rel_l2 == pytest.approx(exact.update_rel_l2, rel=0.2)
    assert found.update_norm == pytest.approx(exact.update_norm, rel=0.1)
    assert found.reference_norm == pytest.approx(float(a.double().norm()), rel=1e-12)
    assert found.candidate_norm == pytest.approx(float(b.double().norm()), rel=1e-12)
    assert (found.numel, found.num_rows) == (exact.numel, exact.num_rows)
    assert found.max_abs is found.ulp_max is found.channel_rel_l2_max is None


def test_rows():
    """Each token's error is estimated, and the one that stands out is named."""
    torch.manual_seed(2)
    a, b = random_pair()
    b[0, 17] += 0.5 * torch.randn(1024)
    (exact, rows), (found, estimated, _) = both(a, b)
    assert found.worst_row == exact.worst_row == 17
    assert np.allclose(estimated.norm, rows.norm, rtol=1e-6)
    ratio = np.square(estimated.rel_l2 / rows.rel_l2)
    assert float(ratio.mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / K / 64))


def one_row(size=1e-2, tokens=64):
    """A pair that differs in one row alone."""
    a, b = random_pair(tokens, size=size)
    other = torch.zeros(1, tokens, 1)
    other[0, torch.randint(tokens, ())] = 1.0
    return a, a + other * (b - a)


@pytest.mark.slow
def test_few_rows():
    """Where one row differs the pooled sums tell by how much, to ±1/√(2K), which is what the
    interval says; 8 projections do not. The row has all of it."""
    torch.manual_seed(5)
    off, held, off_alone = [], 0, []
    for _ in range(60):
        a, b = one_row()
        (exact, rows), (found, estimated, estimate) = both(a, b, pooled=64)
        off.append(found.rel_l2 / exact.rel_l2 - 1)
        held += estimate.low < exact.rel_l2 < estimate.high
        assert found.worst_row == exact.worst_row
        assert estimated.rel_l2[found.worst_row] == pytest.approx(found.token_rel_l2_max)
        ratio = found.token_rel_l2_max / float(rows.rel_l2.max())
        assert ratio == pytest.approx(1 + off[-1], rel=1e-6)
        assert estimate.relative_error < 0.25
        off_alone.append(both(a, b)[1][0].rel_l2 / exact.rel_l2 - 1)
    assert np.std(off) == pytest.approx(1 / math.sqrt(2 * 64), rel=0.35)
    assert np.std(off_alone) > 2 * np.std(off)
    assert held >= 54


@pytest.mark.parametrize("kind", ["all rows", "one channel", "scale"])
def test_many_rows_are_told_as_well_as_without(kind):
    """Pooled sums count by what they know: little where all rows differ, least of a scale."""
    torch.manual_seed(6)
    a, b = random_pair()
    if kind == "one channel":
        b = torch.where(torch.arange(1024) == 5, b, a)
    elif kind == "scale":
        b = 1.01 * a
    (exact, _), (found, _, estimate) = both(a, b, pooled=64)
    _, (_, _, alone) = both(a, b)
    assert estimate.low * (1 - 1e-6) <= exact.rel_l2 <= estimate.high * (1 + 1e-6)
    assert estimate.high - estimate.low <= 1.02 * (alone.high - alone.low)
    assert found.rel_l2 == pytest.approx(exact.rel_l2, rel=0.1)


def test_blocks():
    """Each sample has pooled sums of its own, and the intervals of both make up the whole."""
    torch.manual_seed(7)
    pairs = [one_row(), one_row(size=2e-2)]
    a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
    (exact, _), (_, _, estimate) = both(a, b, pooled=64)
    assert estimate.low < exact.rel_l2 < estimate.high
    assert estimate.relative_error < 0.25 < both(a, b)[1][2].relative_error


def test_without_all_rows_pooled_sums_are_left_aside():
    """A masked row is in the pooled sums, and cannot be taken out of them."""
    torch.manual_seed(8)
    a, b = one_row()
    mask = torch.ones(1, 64, 1, dtype=torch.bool)
    mask[0, 3] = False
    _, (found, rows, estimate) = both(a, b, pooled=64, row_mask=mask)
    _, (wanted, same, interval) = both(a, b, row_mask=mask)
    assert (found.rel_l2, estimate) == (wanted.rel_l2, interval)
    assert np.array_equal(rows.rel_l2, same.rel_l2, equal_nan=True)


def test_what_pooled_sums_cannot_resolve():
    """They round by the whole block: a row that differs by as little is told by its own sums."""
    torch.manual_seed(9)
    a, b = one_row(size=1e-6)
    _, (found, _, estimate) = both(a, b, pooled=64)
    _, (wanted, _, interval) = both(a, b)
    assert (found.rel_l2, estimate) == (wanted.rel_l2, interval)


def test_gain():
    """A scale error is known from the exact norms, far below the noise of the sketch."""
    torch.manual_seed(3)
    a, b = random_pair(size=1e-3)
    (exact, _), (found, _, _) = both(a, b * 1.001)
    assert found.gain == pytest.approx(exact.gain, abs=4 * found.gain_se + 1e-9)
    assert found.gain == pytest.approx(1e-3, abs=1e-5)


def test_scale():
    """Rows that differ in length alone are told exactly, and 1 - cos is 0, not sketch noise."""
    torch.manual_seed(4)
    a = torch.randn(1, 3, 256)
    (exact, _), (found, rows, estimate) = both(a, 1.5 * a)
    assert found.rel_l2 == pytest.approx(0.5, rel=1e-6)
    assert rows.rel_l2 == pytest.approx([0.5] * 3, rel=1e-6)
    assert found.one_minus_cosine < 1e-12 and estimate.high == pytest.approx(0.5, rel=1e-6)
    assert exact.rel_l2 == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4, 100])
@pytest.mark.parametrize("uneven", [False, True])
def test_coverage(tokens, uneven):
    """The interval holds the truth in at least 95 of 100 cases, also where few rows make it up."""
    torch.manual_seed(5)
    held, count = 0, 300
    for _ in range(count):
        a = torch.randn(1, tokens, 128)
        d = torch.randn_like(a)
        if uneven:
            d *= torch.rand(tokens, 1).pow(4)
        exact = float(d.double().norm() / a.double().norm())
        _, (_, _, estimate) = both(a, (a.double() + d.double()).float())
        held += estimate.low <= exact <= estimate.high
    assert held / count >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / count)


def test_chi_square():
    """The quantiles are those of the tables: 8 degrees, 2.180 and 17.535."""
    assert 8 * _chi_square_share(8, -1.959964) == pytest.approx(2.180, rel=0.02)
    assert 8 * _chi_square_share(8, 1.959964) == pytest.approx(17.535, rel=0.01)


def test_masked_rows():
    """Pads are measured apart."""
    torch.manual_seed(6)
    a, b = random_pair(tokens=20)
    b[0, :5] += 1.0
    mask = torch.arange(20) >= 5
    (exact, _), (found, rows, _) = both(a, b, row_mask=mask)
    assert (found.num_rows, found.num_masked) == (15, 5)
    assert found.rel_l2 == pytest.approx(exact.rel_l2, rel=0.4)
    assert found.pad_rel_l2 == pytest.approx(exact.pad_rel_l2, rel=0.5)
    assert np.isnan(rows.rel_l2[:5]).all()


def test_sinks():
    """A row of ten times the usual norm is told apart, exactly."""
    torch.manual_seed(7)
    a, b = random_pair(tokens=20)
    a[0, 3] *= 40
    (exact, _), (found, _, _) = both(a, b)
    assert found.num_sink_tokens == exact.num_sink_tokens == 1
    assert found.rel_l2_without_sinks == pytest.approx(exact.rel_l2_without_sinks, rel=0.4)


def test_equal_and_zero():
    """Equal sketches estimate 0 up to the resolution; x over 0 is inf, 0 over 0 is 0."""
    a = torch.randn(1, 4, 256)
    _, (found, _, estimate) = both(a, a.clone())
    assert (found.rel_l2, estimate.low, estimate.high) == (0.0, 0.0, resolution(256, K))
    assert estimate.relative_error is None
    zero = torch.zeros(1, 4, 256)
    _, (found, _, _) = both(zero, a)
    assert found.rel_l2 == math.inf
    _, (found, _, _) = both(zero, zero)
    assert (found.rel_l2, found.cosine) == (0.0, 1.0)


def test_rows_beyond_float32():
    """A row whose norm float32 cannot hold is left out, not guessed."""
    a, b = random_pair(tokens=3)
    a[0, 1] = 3e38
    _, (found, rows, _) = both(a, b)
    assert math.isnan(rows.rel_l2[1]) and math.isfinite(found.rel_l2)
