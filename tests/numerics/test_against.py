"""Two sides against the truth: sums by row and column, by hand and against plain float64."""

import numpy as np
import pytest
import torch

from divergence.numerics import pairs as against_module

CHOSEN: dict = {}


@pytest.fixture(autouse=True)
def all_kernels(kernel_or_device):
    """Every test below holds for each of them."""
    CHOSEN.clear()
    CHOSEN.update(kernel_or_device)


def measure_against(*tensors, **options):
    return against_module.measure_against(*tensors, **CHOSEN, **options)


def test_hand_worked():
    """One row of two columns, worked on paper."""
    truth = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    a, b = torch.tensor([[3.0, 5.0]]), torch.tensor([[6.0, 8.0]])
    found = measure_against(a, b, truth, base=torch.tensor([[3.0, 0.0]]))
    assert found.norm.tolist() == [5.0]
    assert found.update.tolist() == [4.0]
    assert found.reference.tolist() == [1.0]
    assert found.candidate.tolist() == [5.0]
    assert found.between.tolist() == pytest.approx([18**0.5])
    assert found.gain_reference.tolist() == pytest.approx([4 / 25])
    assert found.gain_candidate.tolist() == pytest.approx([1.0])
    assert found.update_gain_reference.tolist() == pytest.approx([4 / 16])
    assert found.channels[0].tolist() == [0.0, 1.0]
    assert found.channels[1].tolist() == [9.0, 16.0]
    assert found.channels[3].tolist() == [9.0, 16.0]
    assert found.spread.tolist() == pytest.approx([1.0])  # the update lies in one column


@pytest.mark.parametrize("shape", [(2, 7, 33), (5, 64), (40,), (1, 3, 2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_and_dtype_as_plain_float64(shape, dtype, monkeypatch):
    """Chunks change nothing: the sums are those of one float64 expression."""
    monkeypatch.setattr(against_module, "_CHUNK_NUMEL", 70)
    make = torch.Generator().manual_seed(3)
    truth = torch.randn(shape, generator=make, dtype=torch.float64)
    a, b = truth.to(dtype), (truth * (1 + 1e-3)).to(dtype)
    found = measure_against(a, b, truth)
    rows = truth.reshape(-1, shape[-1])
    for side, tensor in (("reference", a), ("candidate", b)):
        diff = tensor.double().reshape(-1, shape[-1]) - rows
        np.testing.assert_allclose(getattr(found, side), diff.norm(dim=1), rtol=1e-12, atol=0)
        gain = (diff * rows).sum(1) / rows.square().sum(1)
        np.testing.assert_allclose(getattr(found, f"gain_{side}"), gain, rtol=1e-9, atol=1e-15)
        channel = diff.square().sum(0)
        number = ("reference", "candidate").index(side)
        np.testing.assert_allclose(found.channels[number], channel, rtol=1e-12, atol=0)


def test_masked_rows_and_rows_without_numbers_are_left_out():
    """Pads, nan and inf are no rounding."""
    truth = torch.ones(5, 4, dtype=torch.float64)
    a, b = truth.float().clone(), truth.float().clone()
    a[1, 0], b[2, 1] = float("nan"), float("inf")
    found = measure_against(a, b, truth, row_mask=torch.tensor([True, True, True, True, False]))
    assert found.row_index.tolist() == [0, 3]


def test_a_sink_token_is_in_no_channel():
    """One row of massive norm is marked, and its error kept out of the columns."""
    truth = torch.ones(9, 4, dtype=torch.float64)
    truth[0] *= 1000
    a = truth.float()
    b = a.clone()
    b[0] += 1
    found = measure_against(a, b, truth)
    assert found.sink.tolist() == [True] + [False] * 8
    assert found.channels[1].tolist() == [0.0] * 4
    assert found.candidate[0] == pytest.approx(2.0)


def test_other_shapes_are_refused():
    """Nothing is broadcast."""
    with pytest.raises(ValueError, match="truth has shape"):
        measure_against(torch.ones(2, 3), torch.ones(2, 3), torch.ones(1, 3))


def test_nothing_is_nothing():
    """No rows, no error."""
    found = measure_against(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3))
    assert found.num_rows == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_kernel_gives_the_same(dtype):
    """Rows with nan and inf, sinks, one bad token, a mask and a base: all figures agree."""
    make = torch.Generator().manual_seed(5)
    truth = torch.randn(60, 2100, generator=make, dtype=torch.float64)
    truth[7] *= 300
    noise = torch.randn(2, *truth.shape, generator=make, dtype=torch.float64)
    a, b = (truth * (1 + 4e-3 * part) for part in noise)
    b[11] += 3.0
    a[20, 4], b[31, 2090] = float("nan"), float("-inf")
    base = (truth - torch.randn(truth.shape, generator=make, dtype=torch.float64)).to(dtype)
    mask = torch.arange(60) % 9 != 0
    one, two = (
        against_module.measure_against(
            a.to(dtype), b.to(dtype), truth, row_mask=mask, base=base, **options
        )
        for options in ({}, CHOSEN)
    )
    assert one.sink.sum() == 1
    for name in set(one.__slots__) - {"in_units"}:
        np.testing.assert_allclose(
            getattr(two, name), getattr(one, name), rtol=1e-9, atol=1e-12, err_msg=name
        )


def test_rows_in_each_channels_own_unit_are_those_of_divided_columns():
    """Also of many rows, some of them masked."""
    make = torch.Generator().manual_seed(6)
    truth = torch.randn(300, 1200, generator=make, dtype=torch.float64)
    truth[:, 7] *= 500
    a, b = (truth * (1 + 4e-3 * torch.randn(truth.shape, generator=make)) for _ in range(2))
    mask = torch.arange(300) % 9 != 0
    against = against_module.measure_against(a, b, truth, row_mask=mask)
    unit = torch.from_numpy(against.channels[3]).sqrt()
    wanted = against_module.measure_against(a / unit, b / unit, truth / unit, row_mask=mask)
    in_units = against_module.measure_in_units(against, a, b, truth)
    for name in ("norm", "reference", "candidate", "between", "spread_reference", "spread"):
        np.testing.assert_allclose(getattr(in_units, name), getattr(wanted, name), rtol=1e-9)
    assert in_units.update is None
    assert (in_units.row_index == against.row_index).all()
