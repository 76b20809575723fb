"""Compiled loops beside numpy's: the same figures, whatever is measured."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics.pairs import measure_pair
from divergence.numerics.sums import has_compiled

REL = 1e-6
_ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, 1e-7]

_TRIPLES = [(name,) * 3 for name in ("bfloat16", "float16", "float32", "float64")] + [
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float64", "float16"),
]


_NEAR = {
    "gain",
    "one_minus_cosine",
    "cosine",
    "sqnr_db",  # within 1e-6 of another scale
    "max_abs_index",
    "worst_row",
    "worst_channel",
    "max_abs_reference",
    "max_abs_candidate",  # ties
}


def _noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
@settings(max_examples=200)
@given(
    shape=st.tuples(st.integers(0, 70), st.integers(0, 40), st.sampled_from([1, 1, 60])),
    names=st.sampled_from(_TRIPLES),
    size=st.sampled_from([1e-30, 1e-9, 1.0, 1e18]),
    eps=st.sampled_from([0.0, 1e-6, 1e-3, 0.5]),
    odd=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6), st.sampled_from(_ODD))),
    options=st.sets(st.sampled_from(["base", "mask", "threads"])),
)
@pytest.mark.slow
def test_both_kernels_measure_the_same(shape, names, size, eps, odd, options):
    """Compiled loops and numpy agree to 1e-6 on any formats, values, masks and bases."""
    rows, cols, more = shape
    cols *= more
    kinds = [getattr(torch, name) for name in names]
    values = size * _noise((rows, cols))
    noise = values * (1 + eps * _noise((rows, cols), 1))
    tensors = [v.to(kind) for v, kind in zip((values, noise, 0.5 * values), kinds, strict=True)]
    for side, at, value in odd[:4]:
        if rows * cols:
            tensors[side].view(-1)[at % (rows * cols)] = value
    a, b, base = tensors
    given_ = {"base": base} if "base" in options else {}
    if "mask" in options:
        given_["row_mask"] = _noise((rows,), 2) > 0
    threads = 2 if "threads" in options else 1
    (one, rows_one), (two, rows_two) = (
        measure_pair(a, b, kernel=kernel, threads=threads, **given_)
        for kernel in ("numpy", "compiled")
    )
    for name in set(one.__struct_fields__) - _NEAR:
        x, y = getattr(one, name), getattr(two, name)
        if isinstance(x, float):
            assert y == pytest.approx(x, rel=REL, abs=0, nan_ok=True), name
        else:
            assert x == y, name
    assert two.cosine == pytest.approx(one.cosine, abs=1e-6)
    assert two.gain == pytest.approx(one.gain, rel=REL, abs=1e-6 * min(one.gain_se, 1.0))
    for x, y in ((rows_one.rel_l2, rows_two.rel_l2), (rows_one.norm, rows_two.norm)):
        assert y.tolist() == pytest.approx(x.tolist(), rel=REL, abs=0, nan_ok=True)
    if "base" in options:
        wanted = rows_one.update_norm.tolist()
        assert rows_two.update_norm.tolist() == pytest.approx(wanted, rel=REL, abs=0, nan_ok=True)
