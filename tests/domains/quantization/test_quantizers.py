"""Codes and scales, bit for bit those of the libraries that define them."""

import math

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype):
    """By name: (6, 64) of what hurts quantisers."""
    made = torch.Generator().manual_seed(3)
    normal = torch.randn(6, 64, generator=made)
    outliers = normal.clone()
    outliers[:, 5] *= 300.0
    zeros = normal.clone()
    zeros[2] = 0.0
    ties = torch.arange(-32, 32).repeat(6, 1) + 0.5
    ties[:, -1] = 127.0
    infinite = normal.clone()
    infinite[1, 3] = math.inf
    found = {
        "normal": normal,
        "outliers": outliers,
        "zero row": zeros,
        "all zero": torch.zeros(6, 64),
        "subnormal": normal * 1e-39,
        "ties": ties,
        "halves": ties * 2 - 0.5,
        "positive": normal.abs(),
        "infinite": infinite,
        "tiny": normal * 2.0**-24,
    }
    return {name: x.to(dtype) for name, x in found.items()}


QUANTIZERS = [
    Quantizer(format=format, per=per, group=16 if per == "group" else None, symmetric=symmetric)
    for format in ("int8", "int4", "float8_e4m3fn")
    for per in ("tensor", "channel", "group")
    for symmetric in (True, False)
    if symmetric or format != "float8_e4m3fn"
]


def same_bits(codes, expected):
    """Where both are nan (infinity by an infinite scale) its sign is anybody's."""
    nan = codes.float().isnan()
    alike = (codes.view(torch.int8) == expected.view(torch.int8)) | nan
    return torch.equal(nan, expected.float().isnan()) and bool(alike.all())


def ids(value):
    return str(value).replace(" ", "_")


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=ids)
def test_codes_are_those_of_compressed_tensors(quantizer, dtype):
    """Code by code, in every dtype, granularity and symmetry."""
    library = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    ours = Quantizer(
        format=quantizer.format,
        per=quantizer.per,
        group=quantizer.group,
        symmetric=quantizer.symmetric,
        recipe="compressed-tensors",
    )
    args = library.QuantizationArgs(
        num_bits=4 if ours.format == "int4" else 8,
        type="float" if ours.is_float else "int",
        symmetric=ours.symmetric,
        strategy=ours.per,
        group_size=ours.group,
    )
    for name, x in inputs(dtype).items():
        rows = grouped(x, ours)
        dims = None if ours.per == "tensor" else (-1,)
        least = rows.amin() if dims is None else rows.amin(-1, keepdim=ours.per == "channel")
        most = rows.amax() if dims is None else rows.amax(-1, keepdim=ours.per == "channel")
        theirs, their_zero = helpers.calculate_qparams(least, most, args)
        scale, zero = scales_of(x, ours)
        assert torch.equal(scale.reshape(theirs.shape), theirs), name
        if not ours.symmetric:
            assert torch.equal(zero.reshape(theirs.shape).to(their_zero.dtype), their_zero), name
        dtype_of_codes = torch.float8_e4m3fn if ours.is_float else torch.int8
        expected = forward.quantize(
            x, theirs, None if ours.symmetric else their_zero, args, dtype=dtype_of_codes
        )
        codes = codes_of(x, ours, scale, zero)
        assert same_bits(codes, expected), name


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=ids)
def test_codes_are_those_of_torchao(quantizer, dtype):
    """Code by code, where that library is installed."""
    pytest.importorskip("torchao")
    from torchao.quantization import quant_primitives as ao

    ours = Quantizer(
        format=quantizer.format,
        per=quantizer.per,
        group=quantizer.group,
        symmetric=quantizer.symmetric,
        recipe="torchao",
    )
    for name, x in inputs(dtype).items():
        block = {"tensor": x.shape, "channel": (1, x.shape[1]), "group": (1, 16)}[ours.per]
        scale, zero = scales_of(x if not ours.is_float else x.float(), ours)
        if ours.is_float:
            theirs = ao._choose_scale_float8(x.float(), list(block), torch.float8_e4m3fn)
            assert torch.equal(scale.reshape(theirs.shape), theirs), name
            if ours.per == "group" or not bool((theirs > 0).all()):
                continue  # it divides 0 by 0, which is nan; ours are codes of 0
            expected = ao._quantize_affine_float8(x, theirs)
            codes = codes_of(x.float(), ours, scale)
            assert same_bits(codes, expected), name
            continue
        kind = ao.MappingType.SYMMETRIC if ours.symmetric else ao.MappingType.ASYMMETRIC
        low, high = ours.ends
        theirs, their_zero = ao.choose_qparams_affine(
            x, kind, block, torch.int8, int(low), int(high)
        )
        assert torch.equal(scale.reshape(theirs.shape), theirs), name
        if zero is not None and name != "infinite":
            assert torch.equal(zero.reshape(theirs.shape).int(), their_zero.int()), name
        if name == "infinite":
            continue  # nan codes: a cast of nan to an integer is anything
        expected = ao.quantize_affine(x, block, theirs, their_zero, torch.int8, int(low), int(high))
        assert torch.equal(codes_of(x, ours, scale, zero), expected), name


def test_plain_is_max_over_127_and_ties_go_to_even():
    """The simplest recipe, by hand."""
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
    for name in ("normal", "outliers", "zero row", "positive"):
        x = inputs(torch.float32)[name]
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
