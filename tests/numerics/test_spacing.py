"""Tests of divergence.numerics.ulp."""

import math

import pytest
import torch

from divergence.numerics.formats import format_named
from divergence.numerics.ulp import spacing


def test_spacing():
    """Of float32: 2^-23 at 1 and just below 2, 2^-24 below 1, 2^-149 among subnormals and at 0."""
    x = torch.tensor([1.0, 1.99, 0.99, -1.0, 1e-42, 0.0, math.inf], dtype=torch.float64)
    expected = [2.0**-23, 2.0**-23, 2.0**-24, 2.0**-23, 2.0**-149, 2.0**-149]
    found = spacing(x, format_named("float32"))
    assert found[:6].tolist() == expected
    assert found[6].isnan()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_spacing_is_the_distance_to_the_next_value(name):
    """For every finite positive value but the largest, by its bit pattern."""
    form = format_named(name)
    dtype = form.torch_dtype
    pattern = {1: torch.uint8, 2: torch.int16}[form.itemsize]
    bits = torch.arange(0, 2 ** (8 * form.itemsize - 1), dtype=torch.int32).to(pattern)
    values = bits.view(dtype).double()
    values = values[values.isfinite()]
    assert torch.equal(spacing(values[:-1], form), values.diff())
