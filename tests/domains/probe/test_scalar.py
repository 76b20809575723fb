"""Rounding, subnormals, multiply-adds, functions, lanes, rows: known arithmetic is recognised."""

import math

import numpy as np
import pytest
import torch

from divergence.domains.probe.additions import Notebook, cancelling, exact_values
from divergence.domains.probe.quick import (
    FUNCTIONS,
    MODES,
    batch_groups,
    fused_elementwise,
    inputs_of,
    lanes,
    probe_fused,
    probe_rounding,
    probe_subnormals,
    rounding_mode,
    row_share,
    spans,
    subnormals,
    worst_ulp,
)
from divergence.run.manifest import digest_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = 2.0**-7
STEPS = np.array([k + t for k in (0, 1, 2, 5) for t in (0.25, 0.5, 0.75)]) * ULP
VALUES = np.concatenate([1 + STEPS, -1 - STEPS])


@pytest.mark.parametrize("mode", MODES)
def test_each_rounding_is_told_from_the_others(mode):
    """The values between neighbours are answered differently by every mode."""
    low = np.floor(VALUES / ULP) * ULP
    got = MODES[mode](low, low + ULP, VALUES, np.floor(VALUES / ULP) % 2 == 1)
    assert rounding_mode(got, VALUES, ULP) == mode


def test_rounding_that_is_no_mode_is_said_to_be_none():
    """Stochastic rounding, and answers that are no neighbour."""
    low = np.floor(VALUES / ULP) * ULP
    coin = np.arange(len(VALUES)) * 7 % 5 % 2
    assert rounding_mode(low + coin * ULP, VALUES, ULP) == "neither neighbour by one rule"
    assert rounding_mode(low + 2 * ULP, VALUES, ULP) == "not to a neighbour"


def test_this_cpu_rounds_to_nearest_even():
    """Casts and additions of IEEE hardware, in every dtype."""
    notebook = Notebook()
    for dtype in DTYPES:
        probe_rounding(notebook, "cpu", dtype)
    assert {fact.value for fact in notebook.facts} == {"to nearest, ties to even"}
    assert len(notebook.facts) == 5
    assert len(notebook.tensors) == 2 * 2 + 3 * 3


def flush(x: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(x.abs() < tiny, torch.zeros_like(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flushed_subnormals_are_seen_on_either_side(dtype):
    """On input alone, on output alone, on both."""
    keep, by = (lambda x: x), (lambda x, factor: x * factor)
    for before, after, said in (
        (keep, keep, "kept in, kept out"),
        (flush, keep, "flushed to 0 in, kept out"),
        (keep, flush, "kept in, flushed to 0 out"),
        (flush, flush, "flushed to 0 in, flushed to 0 out"),
    ):
        assert subnormals(lambda x, f, b=before, a=after: a(by(b(x), f)), dtype) == said


def test_flushing_is_seen_where_torch_does_it():
    """torch.set_flush_denormal changes what the probe says of this CPU."""
    notebook = Notebook()
    probe_subnormals(notebook, "cpu", torch.float32)
    assert notebook.facts[0].value == "kept in, kept out"
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        flushed = Notebook()
        probe_subnormals(flushed, "cpu", torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert flushed.facts[0].value == "flushed to 0 in, flushed to 0 out"


def test_multiply_adds():
    """b·b + c: fused leaves 2^-26, a rounded product nothing; a mixture is said to be one."""
    fused = lambda b, c: (b.double() * b.double() + c.double()).float()  # noqa: E731
    apart = lambda b, c: b * b + c  # noqa: E731
    assert fused_elementwise(fused) == "fused"
    assert fused_elementwise(apart) == "rounded products"
    half = lambda b, c: torch.cat([fused(b[:8], c[:8]), apart(b[8:], c[8:])])  # noqa: E731
    assert fused_elementwise(half) == "fused in places"
    notebook = Notebook()
    probe_fused(notebook, "cpu")
    said = {fact.subject: fact.value for fact in notebook.facts}
    assert said["mul, then add float32"] == "rounded products"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_are_exact_and_the_true_value_is_float64s(name, dtype):
    """A correctly rounded function is off by half a unit at most; one step more is seen."""
    function = FUNCTIONS[name][0]
    given = inputs_of(name, dtype, 500)
    assert given.isfinite().all()
    assert (given != 0).all()
    right = function(given.double()).to(dtype)
    assert worst_ulp(function, given, right) <= 0.5 + 1e-6
    away = (
        torch.nextafter(right.float(), torch.tensor(torch.inf))
        if dtype == torch.float32
        else (
            (right.float() * (1 + 2.0 ** -torch.tensor(6 if dtype == torch.bfloat16 else 9))).to(
                dtype
            )
        )
    )
    assert worst_ulp(function, given, away) > 0.5


def test_worst_ulp_by_hand():
    """1.5 instead of 1 + 2^-23 is 2^22 - 1 units; not a number is infinitely far."""
    given = torch.tensor([1 + 2.0**-23, 2.0])
    assert worst_ulp(lambda x: x, given, torch.tensor([1.5, 2.0])) == 2**22 - 1
    assert worst_ulp(lambda x: x, given, torch.tensor([torch.nan, 2.0])) == float("inf")


def test_lanes_that_differ_are_counted():
    """Short arrays computed by other code than long ones."""
    given = inputs_of("exp", torch.float32, 200)
    same = lanes(torch.exp, given, "cpu")
    short = lambda x: torch.exp(x) * (1 + 2.0**-20 * (len(x) < 8))  # noqa: E731
    other = lanes(short, given, "cpu")
    assert same == (0, other[1])
    assert 0 < other[0] <= other[1]


def test_rows_and_batches():
    """A kernel that adds otherwise from five rows on."""

    def call(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for k in range(x.shape[1]):
            total = total + x[:, k if len(x) < 5 else -1 - k]
        return total[:, None]

    x = exact_values(3, (17, 301), torch.float32)
    differ, total = row_share(call, x[:16])
    assert 0 < differ <= total == 16
    assert batch_groups(call, x) == [[1, 2, 3, 4], list(range(5, 18))]
    assert row_share(lambda x: x * 2, x[:16]) == (0, 16 * 301)


def test_groups_in_words():
    """Runs of sizes are written once."""
    assert spans([[1], [2, 3, 4], [5, 7, 8]]) == "1 | 2-4 | 5, 7-8"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_the_same_bytes_everywhere(dtype):
    """Held against digests made once; and the cancelling ones do cancel, in any pairing."""
    known = {
        torch.float32: "2cf96ee6c1cf1e1dcbb455ada711a34a",
        torch.bfloat16: "ce5d1e49fbaab69dfe7a16694cc2202b",
        torch.float16: "b7ca3793fc22f8824389c0df8d879057",
    }
    values = exact_values(5, (3, 40), dtype)
    assert digest_tensor(values) == known[dtype]
    leaves, partner = cancelling(6, values, exact_values(7, (2, 40), dtype))
    for row in partner.double():
        for terms in leaves.double():
            assert math.fsum((row * terms).tolist()) == 0
