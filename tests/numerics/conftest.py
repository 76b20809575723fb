"""The kernels that measure: what holds for one holds for all."""

import pytest

from divergence.numerics.sums import has_compiled

needs_numba = pytest.mark.skipif(not has_compiled(), reason="numba is not installed")


@pytest.fixture(params=["numpy", pytest.param("compiled", marks=needs_numba)])
def kernel(request) -> str:
    """numpy's loops, then compiled ones where they can be had."""
    return request.param


@pytest.fixture(
    params=["numpy", pytest.param("compiled", marks=needs_numba), pytest.param("cpu", id="device")]
)
def kernel_or_device(request) -> dict:
    """Options of measure_pair: each kernel, then the operators of an accelerator on the CPU."""
    import torch

    if request.param == "cpu":
        return {"device": torch.device("cpu")}
    return {"kernel": request.param}
