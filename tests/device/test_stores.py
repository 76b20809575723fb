"""Runs of a device whose work is late, against a host's: the same bits, however they are kept."""

import pytest


@pytest.fixture(scope="module")
def said(on_device):
    return on_device("stores")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modules", "stats"])
def test_every_bit_arrives(said, name):
    """Copies beside late kernels hold what the hooks saw, and so do digests made there."""
    code, out, err = said[name]
    assert code == 0, err
    assert out.startswith("IDENTICAL: all "), out


@pytest.mark.slow
def test_every_form_is_of_the_same_bits(on_device):
    """Whichever side was first: a repeated run has digests of the kind that the first one has,
    sketches are sums in another order, and a device without float64 matrix products has sketches as
    good."""
    said = on_device("forms")
    assert len(said) == 11
    for name, (code, out, err) in said.items():
        assert code == 0, (name, err)
        assert out.startswith("IDENTICAL: all "), (name, out)


@pytest.mark.slow
def test_no_copy_is_waited_for(said):
    """The buffer's places are page-locked for a runtime that knows it by its first byte alone."""
    assert said["unpinned"] == 0


@pytest.mark.slow
def test_the_model_waits_for_no_copy(said):
    """However much is recorded: what waits is the writer's thread."""
    few, many = said["waits"]
    assert many == few


@pytest.mark.slow
def test_the_machine(said):
    """``env`` names the device."""
    code, out, _ = said["env"]
    assert code == 0
    assert "npu: Ascend910 (simulated) × 2" in out
