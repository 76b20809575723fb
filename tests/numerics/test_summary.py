"""Summaries of tensors."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from divergence.numerics import summary as summary_module
from divergence.numerics.summary import summarize_many
from divergence.run.captured import piece_of

KERNEL = ["numpy"]


@pytest.fixture(autouse=True)
def all_kernels(kernel):
    """Every test below holds for each of them."""
    KERNEL[0] = kernel


def summarize(tensor):
    return summary_module.summarize(tensor, kernel=KERNEL[0])


def _check(tensor, *, found=None, rel=1e-6):
    found = found or summarize(tensor)
    wide = tensor.abs() if tensor.is_complex() else tensor
    x = wide.to(torch.float64).reshape(-1).numpy()
    x = x[np.isfinite(x)]
    assert (found.min, found.max) == (x.min(), x.max())
    assert found.absmax == np.abs(x).max()
    assert found.num_zero == np.count_nonzero(x == 0)
    top = np.abs(x).max() or 1.0
    rms = top * math.sqrt(math.fsum((x / top) ** 2) / len(x))
    assert found.rms == pytest.approx(rms, rel=rel, abs=0)
    assert found.mean == pytest.approx(top * (math.fsum(x / top) / len(x)), rel=rel, abs=1e-9 * rms)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.int8,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (1, 1, 64), (3, 517), (2, 70000)])
def test_any_dtype_and_size(dtype, shape):
    """Every dtype is summarised as exact arithmetic would, from 0-d to several blocks."""
    values = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    _check((values.abs() if dtype in (torch.uint8, torch.uint16) else values).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_whose_squares_overflow_float32(dtype):
    """1e30 beside ones: rms right although a square is 1e60."""
    values = torch.ones(200_000, dtype=torch.float32)
    values[7], values[150_000] = 1e30, -3e30
    _check(values.to(dtype))


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e-20])
def test_tiny_values_do_not_underflow(scale):
    """Subnormals and values whose squares underflow keep mean and rms."""
    _check(torch.full((1000,), scale) * torch.arange(1, 1001))


def test_float64_beyond_the_square_root_of_its_range():
    """1e300 and 1e-300 in float64 neither overflow nor vanish."""
    _check(torch.tensor([1e300, 1.7e308, 1.6e308], dtype=torch.float64))
    _check(torch.tensor([1e-300, 2e-310, -5e-324], dtype=torch.float64))


def test_a_mean_that_cancels():
    """A mean far below rms keeps its digits: the sum runs in float64."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    _check(torch.cat([values, -values, torch.full((10,), 1e-3)]))


def test_nonfinite_values_are_counted_and_left_out():
    """nan and infinities have counts; the rest has the statistics."""
    found = summarize(torch.tensor([math.nan, math.inf, -math.inf, -math.inf, 2.0, -0.0]))
    assert (found.num_nan, found.num_posinf, found.num_neginf, found.num_zero) == (1, 1, 2, 1)
    assert (found.min, found.max, found.mean) == (0.0, 2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_nonfinite_value_spoils_nothing(dtype, value):
    """Wherever it lies, the rest is summarised as if it were not there."""
    values = torch.randn(9001, generator=torch.Generator().manual_seed(3)).to(dtype)
    for at in (0, 4095, 4096, 9000):
        spoilt = values.clone()
        spoilt[at] = value
        _check(spoilt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 7, 64, 1000, 8192, 8193])
def test_a_summary_is_the_same_alone_and_among_others(dtype, numel, kernel):
    """How many tensors waited for the writer must not show in the last digits."""
    generator = torch.Generator().manual_seed(numel)
    pieces = [piece_of(torch.randn(numel, generator=generator).to(dtype)) for _ in range(5)]
    tensors = [(piece.dtype, piece.data) for piece in pieces]
    alone = [summarize_many([tensor], kernel=kernel)[0] for tensor in tensors]
    assert summarize_many(tensors, kernel=kernel) == alone


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, 0), torch.tensor([math.nan])])
def test_nothing_finite_gives_none(tensor):
    """Without a finite element there are no statistics."""
    found = summarize(tensor)
    assert (found.min, found.max, found.mean, found.rms, found.absmax) == (None,) * 5


def test_views_are_read_as_they_look():
    """Transposed and sliced tensors are summarised as shown, not as stored."""
    values = torch.arange(12.0).reshape(3, 4)
    assert summarize(values.t()[1:, ::2]).max == 11.0
    assert summarize(values[:, 1]).min == 1.0


def test_a_wrong_summary_is_noticed():
    """The comparison above can fail."""
    values = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(AssertionError):
        _check(values, found=summarize(values + torch.tensor([0.0, 1e-5, 0.0])))


def test_importing_the_record_types_does_not_import_torch():
    """Summary and formats are named by the reader, which must start without torch."""
    code = (
        "import sys, divergence.numerics.sketches, divergence.numerics.formats;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
