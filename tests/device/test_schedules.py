"""Whatever runs late, a device's run has a host's bits; without one of the cares it has not."""

import pytest

pytestmark = pytest.mark.slow
SCHEDULES = ("none", "copies", "kernels", "both")


@pytest.fixture(scope="module")
def said(on_device):
    return on_device("schedules")


@pytest.fixture(scope="module")
def mutants(on_device):
    return on_device("mutants")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "form", ["modules", "batch", "whole", "repeated", "planted", "two devices", "anchored"]
)
def test_every_bit_arrives(said, form, schedule):
    """On npu:0, npu:1 and both, in each form of a capture."""
    code, out, err = said[f"{form}, {schedule}"]
    assert code == 0, err
    assert out.startswith("IDENTICAL: all "), out


def test_a_plant_on_the_device(said):
    """It is the fault that a host's plant is (above), and found where it was planted."""
    code, out, err = said["found"]
    assert code == 0, err
    assert "model.layers.1" in out.partition("\n")[0], out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_repeats_itself(said, schedule):
    """No repeat has other bits."""
    assert said[f"differences, {schedule}"] == 0


@pytest.mark.parametrize("name", ["no wait_stream", "no event", "no clone"])
def test_copies_without_care_are_caught(mutants, name):
    """With each of the three left out, at least one schedule gives wrong data: the device bites."""
    found = {schedule: mutants[f"{name}, {schedule}"] for schedule in SCHEDULES}
    assert any(verdict != "IDENTICAL" for verdict in found.values()), found
    assert found["none"] == "IDENTICAL"


def test_copies_with_all_care_are_right(mutants):
    """The same captures, with nothing left out."""
    assert {mutants[f"none, {schedule}"] for schedule in SCHEDULES} == {"IDENTICAL"}
