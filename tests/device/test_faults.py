"""Kernels that are wrong on the device alone are found there, named, and blamed on its side."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wrong(on_device):
    return on_device("faults", SIMULATED_NPU="wrong=silu")


@pytest.fixture(scope="module")
def short(on_device):
    return on_device("faults", SIMULATED_NPU="short_products=1")


def test_a_wrong_kernel(wrong):
    """2% off: in every block, by the candidate; localize names it, proves it, and writes it up."""
    assert "B is wrong" in wrong["compare"][1]
    code, out, err = wrong["localize"]
    assert code == 0, err
    assert "model.layers.0.mlp.act_fn/aten.silu, by B" in out
    assert "proven      yes" in out
    assert "repro.py" in wrong["reproducer"]


def test_float32_products_of_11_bits(short):
    """TF32 or HF32 that nobody asked for: the first product, by the candidate, its bits probed."""
    assert "B is wrong" in short["compare"][1]
    code, out, err = short["localize"]
    assert code == 0, err
    assert "aten.mm" in out.partition("\n")[0]
    assert "by B" in out.partition("\n")[0]
    kept = "B keeps 10 bits (TF32)"
    assert kept in out
    assert kept in short["compare"][1].replace("\n            ", " ")
