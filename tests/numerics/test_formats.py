"""Number formats."""

import pytest
import torch

from divergence.errors import UsageError
from divergence.numerics.formats import FORMATS, format_named, format_of, is_float

HERE = [name for name in FORMATS if hasattr(torch, name)]


@pytest.mark.parametrize("name", [n for n in HERE if FORMATS[n].kind in ("float", "complex")])
def test_float_constants_are_torchs(name):
    """The table agrees with torch.finfo wherever torch knows the format."""
    form = FORMATS[name]
    dtype = form.torch_dtype
    info = torch.finfo(dtype)
    assert form.max == info.max
    assert form.itemsize == dtype.itemsize
    assert format_of(dtype) is form
    if form.itemsize == 1:
        return  # finfo halves eps of e5m2fnuz, and e8m0fnu has no subnormals: see the next test
    assert form.smallest_normal == info.smallest_normal
    assert form.unit_roundoff == info.eps / 2
    assert form.smallest_subnormal == info.smallest_normal * info.eps


@pytest.mark.parametrize("name", [n for n in HERE if n.startswith("float8")])
def test_byte_formats_are_what_their_patterns_decode_to(name):
    """Constants of 8-bit floats are those of the list of all their values."""
    form = FORMATS[name]
    every = torch.arange(256, dtype=torch.uint8).view(form.torch_dtype).to(torch.float64)
    values = every[every.isfinite() & (every > 0)].unique()
    above_one = values[values > 1][0].item()
    assert form.max == values[-1].item()
    assert form.smallest_subnormal == values[0].item()
    assert form.unit_roundoff == (above_one - 1) / 2
    assert form.signed == bool((every < 0).any())
    gaps = values.diff()
    first_change = values[:-1][gaps > gaps[0]][0].item()  # gaps double at each binade
    assert form.smallest_normal == (first_change / 2 if form.mantissa_bits else values[0].item())


@pytest.mark.parametrize("name", [n for n in HERE if FORMATS[n].kind == "int"])
def test_integer_constants_are_torchs(name):
    """Integer formats hold exactly torch's range."""
    info = torch.iinfo(FORMATS[name].torch_dtype)
    assert FORMATS[name].max == float(info.max)
    assert FORMATS[name].signed == (info.min < 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("double", "float64"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("I64", "int64"),
        ("bool", "bool"),
    ],
)
def test_usual_names_are_understood(text, name):
    """torch's, safetensors' and short names lead to one format."""
    assert format_named(text).name == name


def test_an_unknown_name_is_refused_with_near_ones():
    """A misspelt format is an error that names what may have been meant."""
    with pytest.raises(UsageError) as caught:
        format_named("bflot16")
    assert "bfloat16" in caught.value.hint


def test_a_packed_dtype_is_refused():
    """Dtypes without one plain number per element are refused, not guessed at."""
    with pytest.raises(UsageError):
        format_of(torch.quint8)


def test_only_real_floats_are_floats():
    """Complex, integer and bool formats have no ulp."""
    floats = {name for name, form in FORMATS.items() if is_float(form)}
    assert floats == {name for name in FORMATS if "float" in name}
