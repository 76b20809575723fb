"""Distances in ulp of a pair, counted in blocks, against the whole lattice."""

import math

import numpy as np
import pytest
import torch

from divergence.numerics import pairs as pair_module
from divergence.numerics.formats import FORMATS
from divergence.numerics.ulp import ulp_distance

REL = 1e-6
CHOSEN: dict = {}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def all_kernels(kernel_or_device):
    """Every test below holds for each of them."""
    CHOSEN.clear()
    CHOSEN.update(kernel_or_device)


def measure_pair(a, b, **options):
    """(metrics, rel_l2 of each row)."""
    metrics, rows = pair_module.measure_pair(a, b, **CHOSEN, **options)
    return metrics, torch.from_numpy(rows.rel_l2)


def _noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _pair(shape, dtype, *, eps=1e-2, seed=0):
    a = _noise(shape, seed)
    return a.to(dtype), (a * (1 + eps * _noise(shape, seed + 1))).to(dtype)


def _ulp_by_definition(a, b, name):
    form = FORMATS[name]
    distance = ulp_distance(a, b, form).reshape(-1).numpy()
    x = a.to(torch.float64).reshape(-1).numpy()
    rms = math.sqrt((x**2).mean())
    distance = np.sort(distance[np.abs(x) >= form.unit_roundoff * rms])
    p99 = distance[math.ceil(0.99 * len(distance)) - 1]
    return (distance > 1).mean(), p99, distance[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-5, 3e-3, 3e-1])
@pytest.mark.parametrize("shape", [(50,), (30, 1000), (3, 70001)])
def test_ulp_counts_are_those_of_all_distances(dtype, eps, shape):
    """Share, exact p99 and max equal those of the sorted list of all unmasked distances."""
    a, b = _pair(shape, dtype, eps=eps)
    metrics, _ = measure_pair(a, b)
    found = (metrics.ulp_share_over_1, metrics.ulp_p99, metrics.ulp_max)
    assert found == _ulp_by_definition(a, b, metrics.ulp_format)


def test_ulp_percentile_survives_a_misleading_sample():
    """Where only the sampled runs differ, the guess is lowered until the percentile is exact."""
    a = torch.ones(40, 4096, dtype=torch.bfloat16)
    b = a.clone()
    b[0, :1024] = 5.0
    metrics, _ = measure_pair(a, b, block=16384)
    assert metrics.ulp_p99 == 0.0 and metrics.ulp_max > 100
    assert metrics.ulp_share_over_1 == 1024 / a.numel()


def test_cancelled_elements_are_no_ulp():
    """Elements below u·rms(a) are masked: they are millions of ulp apart for nothing."""
    a = torch.ones(1000)
    a[3] = 1e-12
    b = a.clone()
    b[3] = -1e-12
    assert measure_pair(a, b)[0].ulp_max == 0.0
