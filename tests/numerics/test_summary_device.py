"""Statistics made of plain torch operations, against the host's own."""

import math

import pytest
import torch

from divergence.numerics import on_device as summary_device
from divergence.numerics import sketches as sketch
from divergence.numerics.on_device import statistics_on_device, summaries_of
from divergence.numerics.summary import summarize


def on_device(tensor):
    return summaries_of([statistics_on_device(tensor)])[0]


def agree(found, wanted, tolerance):
    counts = ("num_nan", "num_posinf", "num_neginf", "num_zero", "min", "max", "absmax")
    for name in counts:
        one, two = getattr(found, name), getattr(wanted, name)
        assert one == (two if two is None else pytest.approx(two, rel=1e-15, nan_ok=True))
    for name in ("mean", "rms"):
        one, two = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (two is None)
        if one is not None:
            assert one == pytest.approx(two, rel=tolerance, abs=tolerance * (wanted.rms or 1))


TENSORS = {
    "float32": torch.randn(3, 100),
    "bfloat16": (torch.randn(700) * 1e30).bfloat16(),
    "float8": torch.randn(64).to(torch.float8_e4m3fn),
    "large": torch.full((9,), 3e38),
    "tiny": torch.full((9,), 1e-44),
    "holes": torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, -0.0, -7.0]),
    "nothing finite": torch.tensor([math.nan, math.inf]),
    "empty": torch.zeros(0, 4),
    "zeros": torch.zeros(5),
    "integers": torch.arange(-5, 50),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(30, dtype=torch.complex64),
    "transposed": torch.randn(8, 6).T,
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_host_says_the_same(name):
    """Counts and extremes are equal, mean and rms to what float64 sums give."""
    agree(on_device(TENSORS[name]), summarize(TENSORS[name]), 1e-6)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "large", "holes", "integers"])
def test_a_device_without_float64(name, monkeypatch):
    """Scaled float32 sums keep to their stated limit, whatever the magnitude."""
    monkeypatch.setattr(summary_device, "sum_dtype_name", lambda device: "float32")
    agree(on_device(TENSORS[name]), summarize(TENSORS[name]), 3e-6)


def test_in_pieces(monkeypatch):
    """A tensor larger than a block is summed piece by piece."""
    tensor = torch.randn(1000)
    monkeypatch.setattr(summary_device, "_BLOCK", 64)
    agree(on_device(tensor), summarize(tensor), 1e-6)


def test_many_together():
    """Numbers of many tensors, fetched at once, are each tensor's; of none there are none."""
    tensors = list(TENSORS.values())[:4]
    assert summaries_of([statistics_on_device(t) for t in tensors]) == list(map(on_device, tensors))
    assert summaries_of([]) == []


def test_the_host_has_float64():
    """Where float64 exists, it is used."""
    assert sketch.sum_dtype_name("cpu") == "float64"
