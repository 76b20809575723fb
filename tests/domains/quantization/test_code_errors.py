"""Codes against what they stand for: correct rounding passes in any dtype, wrong ones do not."""

import pytest
import torch

from divergence.domains.quantization.coding import code_errors, merged

HOW = {"ends": (-128.0, 127.0), "room": 12.0}
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def quotients(rows=40, features=256, dtype=torch.float32, seed=0):
    """(x as a machine has it, x / scale in float64): the largest of each row lies on ±127.5."""
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    x = x.to(torch.float64) * (1 + 9 * torch.rand(rows, 1, dtype=torch.float64))
    return x.to(dtype), x / (x.abs().amax(-1, keepdim=True) / 127.5)


def codes(x, round_=torch.round, scale=1.0):
    step = x.abs().amax(-1, keepdim=True) / 127.5 * scale
    return round_(x / step).clamp(-128, 127).to(torch.int8)


def beyond(codes, wanted, dtype, **how):
    unit = UNITS[dtype]
    errors = code_errors(codes, wanted, roundoff=unit, floor=2 * unit, **HOW | how)
    return {look.what for look in errors.looks() if look.usage > 1}


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("seed", range(5))
def test_rounding_to_nearest_passes(dtype, seed):
    """Whichever way a machine rounds what lies on a tie, and whatever dtype scales are in."""
    x, wanted = quotients(dtype=dtype, seed=seed)
    assert beyond(codes(x), wanted, dtype) == set()
    nudged = (x.double() * (1 + UNITS[dtype] * torch.randn(x.shape).double())).to(dtype)
    assert beyond(codes(nudged), wanted, dtype) == set()
    assert beyond(codes(nudged), codes(x).double(), dtype, within=1.0) == set()


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x: codes(x, torch.trunc), "inward"),
        (lambda x: codes(x, torch.floor), "offset"),
        (lambda x: codes(x, scale=1.05), "scale"),
        (lambda x: codes(x, scale=x.abs().amax() / x.abs().amax(-1, keepdim=True)), "outliers"),
        (lambda x: (codes(x).int() + 9).clamp(-128, 127).to(torch.int8), "outliers"),
        (lambda x: torch.where(codes(x) == 127, -128, codes(x).int()).to(torch.int8), "outliers"),
    ],
)
def test_wrong_quantisers_do_not(wrong, what, dtype):
    """A cast, a scale, a scale of all rows, a zero point, an overflow."""
    x, wanted = quotients(dtype=dtype)
    assert what in beyond(wrong(x), wanted, dtype)


def test_a_scale_of_128_is_told_in_float32_alone():
    """0.4%: bfloat16's own rounding of scales is as large."""
    for dtype in UNITS:
        x, wanted = quotients(dtype=dtype)
        found = beyond(codes(x, scale=127.5 / 128), wanted, dtype)
        assert ("scale" in found) == (dtype == torch.float32)
        assert bool(found) == (dtype == torch.float32)


def test_floats_of_8_bits_are_counted_in_their_own_steps():
    """The nearest float8 passes; the one below does not."""
    x, _ = quotients()
    wanted = x.double() / x.double().abs().amax(-1, keepdim=True) * 448
    nearest = wanted.to(torch.float8_e4m3fn)
    below = torch.where(nearest.float().abs() > 1, (nearest.view(torch.uint8) - 1), 0)
    low = below.to(torch.uint8).view(torch.float8_e4m3fn)
    ends = {"ends": (-448.0, 448.0)}
    assert beyond(nearest, wanted, torch.float32, **ends) == set()
    assert beyond(low, wanted, torch.float32, **ends)


def test_parts_add_up():
    """All forwards of a site together are one more look."""
    x, wanted = quotients()
    unit = UNITS[torch.float32]
    how = {"roundoff": unit, "floor": unit, **HOW}
    whole = code_errors(codes(x), wanted, **how)
    parts = [code_errors(codes(x)[n::2], wanted[n::2], **how) for n in (0, 1)]
    both = merged(parts)
    assert (both.num, both.num_inner, both.num_outliers) == (
        whole.num,
        whole.num_inner,
        whole.num_outliers,
    )
    assert both.squares == pytest.approx(whole.squares)


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("values", ["beside an outlier", "uniform", "repeated"])
def test_how_numbers_are_spread_is_no_fault(kind, values):
    """Most lie within a step of 0 where one takes the range; a uniform row has a hard end; tokens
    repeat. Each is rounded to the nearest."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2000, 256, generator=generator, dtype=torch.float64) * 2 - 1
    if values == "beside an outlier":
        x = x * 1e-2
        x[:, 7] = 3.0
    elif values == "repeated":
        x = x[:3].repeat(700, 1)
    most = 127 if kind == "int8" else 448
    wanted = x / x.abs().amax(-1, keepdim=True) * most
    own = wanted.round().to(torch.int8) if kind == "int8" else wanted.to(torch.float8_e4m3fn)
    ends = {"ends": (-128.0, 127.0) if kind == "int8" else (-448.0, 448.0)}
    assert beyond(own, wanted, torch.float32, **ends) == set()


def test_one_flipped_code_is_no_scale():
    """Without a truth the other machine's codes have no spread of their own."""
    wanted = torch.ones(64, 64, dtype=torch.float64)
    wanted[5, 3] = 90
    other = wanted.clone()
    other[5, 3] = 91
    how = {"within": 1.0}
    assert beyond(other.to(torch.int8), wanted, torch.float32, **how) == set()
