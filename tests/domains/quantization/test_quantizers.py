"""Codes and scales, and the values that codes stand for."""

import pytest
import torch

from divergence.domains.quantization.coding import (
    Quantizer,
    codes_of,
    grouped,
    scales_of,
    values_of,
)
from divergence.errors import UsageError


def inputs():
    """By name: (6, 64) float32 of what hurts quantisers."""
    normal = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    outliers, zeros = normal.clone(), normal.clone()
    outliers[:, 5] *= 300.0
    zeros[2] = 0.0
    return {"normal": normal, "outliers": outliers, "zero row": zeros, "positive": normal.abs()}


QUANTIZERS = [
    Quantizer(format=format, per=per, group=16 if per == "group" else None, symmetric=symmetric)
    for format in ("int8", "int4", "float8_e4m3fn")
    for per in ("tensor", "channel", "group")
    for symmetric in (True, False)
    if symmetric or format != "float8_e4m3fn"
]


def ids(value):
    return str(value).replace(" ", "_")


def test_plain_is_max_over_127_and_ties_go_to_even():
    """By hand."""
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]])
    scale, zero = scales_of(x, Quantizer(per="token"))
    assert zero is None
    assert scale.tolist() == [[1.0]]
    assert codes_of(x, Quantizer(per="token"), scale).tolist() == [[0, 2, 2, 0, -2, 127]]


def test_a_row_of_zeros_has_codes_of_zero():
    """Nothing is divided by a scale of zero."""
    x = torch.zeros(2, 8)
    for quantizer in QUANTIZERS:
        if quantizer.per == "group":
            continue
        scale, zero = scales_of(x, quantizer)
        codes = codes_of(x, quantizer, scale, zero)
        assert torch.equal(values_of(codes, quantizer, scale, zero), x), quantizer


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=ids)
def test_values_are_within_half_a_step(quantizer):
    """Of numbers inside the range; of 8-bit floats within half of the spacing there."""
    for name, x in inputs().items():
        scale, zero = scales_of(x, quantizer)
        back = values_of(codes_of(x, quantizer, scale, zero), quantizer, scale, zero)
        error = grouped((back - x).abs(), quantizer)
        step = scale * (0.5 + 1e-4)
        if zero is not None:
            step = scale * (1.0 + 1e-4)  # the zero point is rounded too
        if quantizer.is_float:
            step = torch.maximum(grouped(x.abs(), quantizer) * 2.0**-4, scale * 2.0**-10)
        assert bool((error <= step).all()), name


def test_calibrated_limits_replace_those_of_the_tensor():
    """What lies beyond them saturates."""
    x = torch.tensor([[1.0, -4.0, 2.0, 300.0]])
    quantizer = Quantizer(per="tensor")
    limits = torch.tensor([[-127.0]]), torch.tensor([[64.0]])
    scale, zero = scales_of(x, quantizer, limits=limits)
    assert codes_of(x, quantizer, scale, zero).tolist() == [[1, -4, 2, 127]]  # saturated


def test_groups_that_do_not_divide_are_refused():
    """With the size of the groups."""
    with pytest.raises(UsageError, match="groups of 5"):
        scales_of(torch.ones(2, 8), Quantizer(per="group", group=5))
