"""Tensors as numpy holds them: every value of every format, as torch reads and rounds it."""

import numpy as np
import pytest
import torch

from divergence.numerics.arrays import as_array, as_tensor, bits_of, joined, rounded, wide, widen
from divergence.numerics.formats import FORMATS

FLOATS = [name for name, form in FORMATS.items() if form.kind == "float"]


def values_of(name: str) -> torch.Tensor:
    """All of a format of one or two bytes; many of a larger one, of every size."""
    dtype = FORMATS[name].torch_dtype
    if FORMATS[name].itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if FORMATS[name].itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    make = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-160, 160, (4000,), generator=make)
    drawn = torch.randn(4000, generator=make, dtype=torch.float64) * sizes
    few = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45], dtype=torch.float64)
    return torch.cat([drawn, few]).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_is_the_tensor(name):
    """Its numbers, its bits and its shape, without a copy; and back."""
    tensor = torch.zeros(3, 4, dtype=FORMATS[name].torch_dtype)
    if FORMATS[name].kind == "float":
        tensor = values_of(name)[:240].reshape(3, 80)
    array = as_array(tensor)
    assert array.shape == tuple(tensor.shape) and wide(array).shape == array.shape
    expected = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    np.testing.assert_array_equal(wide(array), expected)
    back = as_tensor(array)
    assert back.dtype == tensor.dtype and back.data_ptr() == tensor.data_ptr()
    part = array[1:, ::2]
    np.testing.assert_array_equal(wide(part), expected[1:, ::2])
    np.testing.assert_array_equal(wide(joined([array, array], 0)), np.concatenate([expected] * 2))


@pytest.mark.parametrize("name", FLOATS)
def test_every_number_is_read_as_torch_reads_it(name):
    """All bit patterns of each format, signs of zeros included."""
    tensor = values_of(name)
    expected = tensor.double().numpy()
    found = wide(tensor)
    np.testing.assert_array_equal(found, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(expected[known]))
    if FORMATS[name].itemsize <= 2:
        single = np.empty(len(tensor), np.float32)
        with np.errstate(invalid="ignore"):
            widen(bits_of(as_array(tensor)), FORMATS[name], single)
        np.testing.assert_array_equal(single, tensor.float().numpy())


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in FLOATS if FORMATS[name].signed])
def test_numbers_are_rounded_as_torch_rounds_them(name, source):
    """To nearest, ties to even, as far as the format goes: beyond it torch's versions differ."""
    own = values_of(name).double()
    own = own[own.isfinite()].sort().values
    middles = (own[1:] + own[:-1]) / 2  # ties, where the source can tell them
    tensor = torch.cat([values_of(source).double(), own, middles]).to(FORMATS[source].torch_dtype)
    expected = tensor.to(FORMATS[name].torch_dtype).double().numpy()
    found = wide(rounded(tensor, name))
    inside = ~(np.abs(tensor.double().numpy()) > FORMATS[name].max)
    np.testing.assert_array_equal(found[inside], expected[inside])
    beyond = found[~inside]
    assert (np.isnan(beyond) | np.isinf(beyond) | (np.abs(beyond) == FORMATS[name].max)).all()


def test_arithmetic_on_bits_is_refused():
    """A bfloat16 is no number to numpy: nothing is added up by mistake."""
    array = as_array(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(TypeError):
        array + array
