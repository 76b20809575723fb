"""Operators alone on the device: replayed, written up, probed, and the whole suite."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(on_device):
    return on_device("operators")


@pytest.mark.parametrize("name", ["replayed", "itself"])
def test_replays(said, name):
    """There and on a host the same bits."""
    code, out, err = said[name]
    assert code == 0, err
    assert out.startswith("IDENTICAL"), out


def test_a_reproducer(said):
    """One operator of a device's run, as a script."""
    code, _, err = said["repro"]
    assert code == 0, err


def test_facts(said):
    """A host's arithmetic is found on the device, and short products are told from it."""
    assert said["probe"][0] == 0, said["probe"][2]
    assert said["short products"][0] == 0, said["short products"][2]
    assert "(TF32), rounded of its float32 inputs" in said["short products"][1]
    assert "TF32" not in said["probe"][1]


def test_the_suite(said):
    """Of other kernels nothing is blamed; of a wrong one the device is."""
    assert said["suite"][0] == 0, said["suite"][2]
    code, out, _ = said["wrong suite"]
    assert code == 0
    assert "silu" in out.partition("\n")[0], out


def test_the_suite_by_the_vendors_operators(said):
    """In place of torch's; what it lacks is left out with the reason, and a wrong one is named."""
    assert "impl: torch_npu instead of torch" in said["vendor's"][1]
    assert "rope: module 'torch_npu' has no attribute 'npu_rotary_mul'" in said["vendor's"][1]
    code, out, err = said["vendor's suite"]
    assert code == 0, err
    assert out.startswith("OK"), out
    code, out, err = said["wrong vendor's suite"]
    assert code == 0, err
    assert out.partition("\n")[0].endswith("rms_norm, add_rms_norm"), out
    assert "B is wrong" in out
