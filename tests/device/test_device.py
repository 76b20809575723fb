"""The simulated device: it has the habits of hardware that programs get wrong."""

import signal

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def device(on_device):
    return on_device("device")


def test_the_host_cannot_touch_its_memory(device):
    """Reading a device address ends the process."""
    assert device["touched"] == signal.SIGSEGV


def test_page_locked_memory_is_recognised(device):
    """Whole, in part, and not where it is none."""
    assert device["pinned"] == [True, True, False]


def test_work_is_as_late_as_its_schedule_says(device):
    """Kernels, copies or both have not run before somebody waits, and all have then."""
    for schedule, found in device["late"].items():
        assert found["kernel"] == (schedule in ("none", "copies")), schedule
        assert found["copy"] == found["arrived"] == (schedule in ("none", "kernels")), schedule
        assert found["then"], schedule


def test_memory_is_given_away_in_the_order_of_its_stream(device):
    """A late copy from a dropped tensor finds the next one's values, unless torch was told."""
    assert device["reused"] == {"False": [7.0] * 4, "True": [5.0] * 4}


def test_a_thread_without_a_device_has_no_context(device):
    """As on Ascend; set_device is all that it takes."""
    without, with_device = device["threads"]
    assert "107002" in without
    assert with_device is None


def test_switches(device):
    """Each fault is what its name says, in the vendor's words."""
    found = device["switches"]
    assert found["no_float64"].startswith("TypeError")
    assert "DT_DOUBLE" in found["no_float64_products"]
    assert found["missing"].startswith("NotImplementedError")
    assert found["max_bytes"].startswith("OutOfMemoryError")
    assert "page-locked" in found["no_pinned"]
    assert found["no_streams"].startswith("AttributeError")
    assert found["wrong"] == pytest.approx(1.02)
    assert found["short_products"] == [8.0] * 4
    assert found["pinned_by_base"] == [True, False]


def test_results_have_a_hosts_bits(device):
    """Its kernels are the host's own."""
    assert {name for name, same in device["same"].items() if not same} == set()
