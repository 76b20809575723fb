"""Many pairs at once: the figures of each by itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics.pairs import (
    MOST_NUMEL,
    AgainstTruth,
    against_many,
    measure_against,
    measure_many,
    measure_pair,
)

REL = 1e-12
_ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, 1e-7]
_TRIPLES = [(name,) * 3 for name in ("bfloat16", "float16", "float32", "float64", "int64")] + [
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float64", "float16"),
    ("float8_e4m3fn", "bfloat16", "float32"),
    ("bool", "bool", "bool"),
]


def noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(many, alone):
    """Metrics and rows agree to 1e-12; what is counted or found, exactly."""
    (one, rows_one), (two, rows_two) = many, alone
    for name in one.__struct_fields__:
        x, y = getattr(one, name), getattr(two, name)
        assert type(x) is type(y), name
        if isinstance(x, float):
            assert x == pytest.approx(y, rel=REL, abs=1e-300, nan_ok=True), name
        else:
            assert x == y, name
    for name in ("rel_l2", "norm", "update_norm"):
        x, y = getattr(rows_one, name), getattr(rows_two, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.tolist() == pytest.approx(y.tolist(), rel=REL, abs=0, nan_ok=True), name


@settings(max_examples=300)
@given(
    count=st.integers(1, 6),
    shape=st.lists(st.sampled_from([1, 1, 2, 7, 19, 66]), max_size=3),
    names=st.sampled_from(_TRIPLES),
    size=st.sampled_from([1e-30, 1e-9, 1.0, 1e18]),
    eps=st.sampled_from([0.0, 1e-6, 1e-3, 0.5, "parallel", "longer"]),
    odd=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6), st.sampled_from(_ODD))),
    based=st.booleans(),
)
@pytest.mark.slow
def test_many_pairs_measure_as_each_alone(count, shape, names, size, eps, odd, based):
    """Any formats, values, shapes and bases; what is left to measure_pair is None, and a pair of
    ordinary numbers never is."""
    shape = (count, *shape)
    kinds = [getattr(torch, name) for name in names]
    values = size * noise(shape)
    if eps == "parallel":
        near = values * 1.01
    elif eps == "longer":
        scales = torch.logspace(-3, 3, count, dtype=torch.float64)
        near = values * scales.view(-1, *(1 for _ in shape[1:]))
    else:
        near = values * (1 + eps * noise(shape, 1))
    tensors = [v.to(kind) for v, kind in zip((values, near, 0.5 * values), kinds, strict=True)]
    for side, at, value in odd[:4]:
        if tensors[side].is_floating_point():
            tensors[side].view(-1)[at % values.numel()] = value
    a, b, base = tensors
    found = measure_many(a, b, base=base if based else None)
    assert len(found) == count
    for number, many in enumerate(found):
        if many is None:
            assert odd or size != 1.0 or a[number].numel() > MOST_NUMEL
            continue
        assert_same(many, measure_pair(a[number], b[number], base=base[number] if based else None))


def test_a_sink_row_and_ulp_tails_are_found_in_every_pair():
    """Rows of one pair do not leak into another's medians and percentiles."""
    a = noise((5, 2, 20, 576)).to(torch.bfloat16)
    a[2, 1, 7] *= 50
    b = (a.double() * (1 + 2**-8 * noise(a.shape, 1))).to(torch.bfloat16)
    b[4, 0, 0, :30] *= 3
    for number, many in enumerate(measure_many(a, b)):
        assert_same(many, measure_pair(a[number], b[number]))
    assert [many[0].num_sink_tokens for many in measure_many(a, b)] == [0, 0, 1, 0, 0]


def test_nothing_is_written_to_what_is_measured():
    """float64 tensors are read where they lie."""
    truth = noise((3, 4, 64))
    a, b, base = truth * 1.01, truth * 0.99, truth * 0.5
    kept = [t.clone() for t in (a, b, truth, base)]
    measure_many(a, b, base=base)
    against_many(a, b, truth, base)
    assert all(torch.equal(x, y) for x, y in zip(kept, (a, b, truth, base), strict=True))


def test_shapes_must_match():
    """Raises ValueError, as measure_pair does."""
    with pytest.raises(ValueError, match="candidate has shape"):
        measure_many(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("shape", [(7, 576), (4, 1, 3, 64), (3, 40, 33), (5,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_many_against_a_truth_as_each_alone(shape, dtype, based):
    """Sums, sinks and channels of each pair are its own; a pair with a nan is left out."""
    truth = noise(shape)
    truth.view(shape[0], -1, shape[-1] if len(shape) > 1 else 1)[0, -1] *= 100  # a sink
    a, b = ((truth * (1 + 2**-8 * noise(shape, s))).to(getattr(torch, dtype)) for s in (1, 2))
    b.view(shape[0], -1)[1, 0] *= 3  # an outlier
    a.view(shape[0], -1)[2, 0] = math.nan
    base = (truth * 0.5).to(a.dtype) if based else None
    same = a.clone()
    both = against_many(a, a, truth, base), against_many(a, same, truth, base)
    for one, two in zip(*both, strict=True):
        assert one is two is None or all(
            np.array_equal(getattr(one, name), getattr(two, name))
            for name in one.__slots__
            if getattr(one, name) is not None
        )
    found = against_many(a, b, truth, base)
    assert [one is None for one in found] == [n == 2 for n in range(shape[0])]
    for n, many in enumerate(found):
        if many is None:
            continue
        alone = measure_against(a[n], b[n], truth[n], base=base[n] if based else None)
        for name in AgainstTruth.__struct_fields__:
            x, y = getattr(many, name), getattr(alone, name)
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_allclose(x, y, rtol=REL, atol=1e-16, err_msg=name)
