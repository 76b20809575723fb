"""Tests of divergence.domains.suite.definition and cases: the same bytes everywhere."""

import numpy as np
import pytest
import torch

from divergence.domains.suite.capturing import case_path, cases_in
from divergence.domains.suite.definition import (
    cancel,
    draw,
    integers,
    normal,
    outlier_channels,
    to_tensor,
)
from divergence.numerics.drawn import _hash
from divergence.run.manifest import digest_many, digest_tensor

INPUTS = "49a111c005c23cdf1dd7be5b0cc40720"
"""One digest over the inputs of suite:llm. It changes when a case does, and with nothing else: not
with the machine, its instruction set, torch or numpy."""


@pytest.mark.slow
def test_inputs_are_frozen():
    """The suite's inputs are the bytes that they always were."""
    digests = [
        (
            f"{case_path(operator, case)}.{name}",
            digest_tensor(value) if isinstance(value, torch.Tensor) else repr(value),
        )
        for operator, case in cases_in("llm")
        for name, value in case.make().items()
    ]
    assert digest_many(digests) == INPUTS


def test_the_hash_is_splitmix():
    """The first outputs of SplitMix64 with state 0, as its authors publish them."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(one) for one in _hash(0, 3, 0)] == expected


def test_normal_values_are_nearly_normal_and_exact_in_float32():
    """Mean 0, variance 1, no value beyond 6; float32 holds each one."""
    x = normal("x", (100_000,))
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.01
    assert np.abs(x).max() <= 6
    assert (x.astype(np.float32).astype(np.float64) == x).all()


def test_values_depend_on_name_and_shape_alone():
    """Another name or shape gives other values, the same ones the same."""
    assert (normal("x", (5, 7)) == normal("x", (5, 7))).all()
    assert (normal("x", (5, 7)) != normal("y", (5, 7))).any()
    assert (normal("x", (5, 7)).ravel() != normal("x", (35,))).any()


def test_integers_stay_in_range():
    """All of the range is drawn, nothing outside of it."""
    drawn = integers("ids", (1000,), -3, 4)
    assert set(drawn.tolist()) == set(range(-3, 4))


def test_outliers_are_a_few_channels():
    """Three of 129 channels are a thousand times as large, the others are left alone."""
    plain, massive = normal("x", (7, 129)), draw("x", (7, 129), values="outliers", dtype="float32")
    channels = list(range(129))[outlier_channels(129)]
    assert channels == [5, 48, 91]
    assert (massive[:, channels] == plain[:, channels] * 1000).all()
    rest = [c for c in range(129) if c not in channels]
    assert (massive[:, rest] == plain[:, rest]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_subnormals_are_subnormal(dtype):
    """Every value lies below the smallest normal one, most are not zero."""
    x = to_tensor(draw("x", (7, 129), values="subnormals", dtype=dtype), dtype)
    assert (x.double().abs() < torch.finfo(x.dtype).tiny).all()
    assert (x.double() != 0).double().mean() > 0.9


def test_neighbours_cancel():
    """Sums of neighbours are at most 2^-7 of either; an odd last one stays."""
    x = cancel(normal("x", (3, 7)), -1)
    pairs = x[:, :6].reshape(3, 3, 2)
    assert (np.abs(pairs.sum(-1)) <= 2.0**-7 * np.abs(pairs[..., 0])).all()
    assert (x[:, 6] == normal("x", (3, 7))[:, 6]).all()


def test_rounding_to_bfloat16_is_to_nearest_even():
    """1 + 2^-8 lies half-way and goes down to the even 1, 1 + 3·2^-8 up to 1 + 2^-6; subnormals
    are kept."""
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 2.0**-133, -(2.0**-130)])
    expected = [1.0, 1 + 2.0**-6, 1 + 2.0**-7, 2.0**-133, -(2.0**-130)]
    assert to_tensor(x, "bfloat16").double().tolist() == expected


def test_strided_cases_are_strided():
    """A strided case has the values of the plain one, and is not contiguous."""
    cases = {case_path(o, c): c for o, c in cases_in("llm")}
    one = cases["rms_norm.bfloat16.odd.normal"].make()["x"]
    two = cases["rms_norm.bfloat16.odd.strided.normal"].make()["x"]
    assert torch.equal(one, two)
    assert one.is_contiguous()
    assert two.stride() == (132, 1)


def test_the_quick_suite_is_part_of_the_whole():
    """suite:quick has every operator, and no case that suite:llm lacks."""
    whole = {case_path(o, c) for o, c in cases_in("llm")}
    few = {case_path(o, c) for o, c in cases_in("quick")}
    assert few < whole
    assert {p.partition(".")[0] for p in few} == {p.partition(".")[0] for p in whole}
