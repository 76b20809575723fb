"""Runs of a device whose work is late, against a host's: the same bits, however they are kept."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def said(on_device):
    return on_device("stores")


@pytest.mark.parametrize(
    "name", ["modules", "measured there", "operators", "only changed", "threads"]
)
def test_every_bit_arrives(said, name):
    """Copies beside late kernels hold what the hooks saw."""
    code, out, err = said[name]
    assert code == 0, err
    assert out.startswith("IDENTICAL: all "), out


@pytest.mark.parametrize("mode", ["stats", "hash"])
@pytest.mark.parametrize("order", ["", ", device first"])
def test_digests_of_a_host_and_a_device(said, mode, order):
    """A repeated run has digests of the kind that the first one has, whichever was first."""
    code, out, err = said[mode + order]
    assert code == 0, err
    assert out.startswith("IDENTICAL: all "), out


@pytest.mark.parametrize("name", ["sketch", "sketch, device first", "no float64 products"])
def test_sketches_of_a_host_and_a_device(said, name):
    """Equal bits come out as equal, though sketches are sums in another order; a device without
    float64 matrix products has sketches as good."""
    code, out, err = said[name]
    assert code == 0, err
    assert out.startswith("IDENTICAL: all "), out


def test_no_copy_is_waited_for(said):
    """The buffer's places are page-locked for a runtime that knows it by its first byte alone."""
    assert said["unpinned"] == 0


def test_the_model_waits_for_no_copy(said):
    """However much is recorded: what waits is the writer's thread."""
    few, many = said["waits"]
    assert many == few


def test_the_machine(said):
    """``env`` names the device."""
    code, out, _ = said["env"]
    assert code == 0
    assert "npu: Ascend910 (simulated) x 2" in out
