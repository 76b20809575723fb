"""Lattice distances, against definitions that share nothing with the implementation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics.formats import FORMATS
from divergence.numerics.ulp import NAN_DISTANCE, key_array, stored_bits, ulp_distance

FP8 = [name for name in FORMATS if name.startswith("float8") and hasattr(torch, name)]


def _all_patterns(name):
    form = FORMATS[name]
    if form.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(form.torch_dtype)
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(form.torch_dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float16", *FP8])
def test_keys_number_the_values_in_order(name):
    """Over every bit pattern the key is the number of distinct values between it and zero."""
    values = _all_patterns(name)
    form = FORMATS[name]
    wide = values.to(torch.float64).numpy()
    known = ~np.isnan(wide)
    order = np.unique(wide[known])  # sorts by value and makes -0 and +0 one
    origin = np.searchsorted(order, 0.0) if form.signed else 0
    keys = key_array(stored_bits(values, form), form)
    assert (keys[known] == np.searchsorted(order, wide[known]) - origin).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", *FP8])
def test_nan_is_as_far_as_can_be_from_numbers(name):
    """One nan saturates the distance, two agree."""
    values = _all_patterns(name)
    nan = values[torch.isnan(values.to(torch.float64))][0]
    distance = ulp_distance(values, nan.expand(values.shape), FORMATS[name])
    expected = torch.where(torch.isnan(values.to(torch.float64)), 0, NAN_DISTANCE)
    assert torch.equal(distance, expected)


def _steps(a, b):
    count = 0
    while a != b:
        a = np.nextafter(a, b)
        count += 1
    return count


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.0, -0.0), (1.0, 1.0000005), (-1e-45, 3e-45)])
def test_distance_counts_nextafter_steps(dtype, a, b):
    """float32 and float64 distances are numbers of nextafter steps."""
    x, y = dtype(a), dtype(b) if dtype is np.float32 or b == 0 else dtype(a) + 3 * np.spacing(a)
    form = FORMATS[np.dtype(dtype).name]
    found = ulp_distance(torch.tensor([x]), torch.tensor([y]), form)
    assert found.item() == _steps(x, y)


def test_float64_extremes_saturate():
    """Distances beyond int64 stop at its end instead of wrapping."""
    top = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert ulp_distance(top, -top, FORMATS["float64"]).item() == NAN_DISTANCE


def test_one_ulp_is_not_zero():
    """The helper can fail: neighbours differ, and by exactly one."""
    a = torch.tensor([1.0], dtype=torch.bfloat16)
    b = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert ulp_distance(a, b, FORMATS["bfloat16"]).tolist() == [1]
    assert ulp_distance(a, b, FORMATS["float32"]).tolist() == [65536]


def test_shapes_and_formats_are_checked():
    """Different shapes and integer formats are refused."""
    with pytest.raises(ValueError, match="shapes differ"):
        ulp_distance(torch.ones(2), torch.ones(3), FORMATS["float32"])
    with pytest.raises(ValueError, match="float formats"):
        ulp_distance(torch.ones(2), torch.ones(2), FORMATS["int8"])


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=8),
    st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
)
def test_distance_is_symmetric(pairs, name):
    """ulp(a, b) = ulp(b, a), and ulp(a, a) = 0."""
    a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    form = FORMATS[name]
    assert torch.equal(ulp_distance(a, b, form), ulp_distance(b, a, form))
    assert not ulp_distance(a, a, form).any()
