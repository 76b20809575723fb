"""What a device lacks: the tool goes another way, or says what it was and what to try."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(on_device):
    return on_device("lacking")


@pytest.mark.parametrize(
    "name",
    [
        "no pinned",
        "no streams",
        "no float64",
        "no float64 products",
        "missing for sketches",
        "fallback",
    ],
)
def test_a_capture_is_whole_all_the_same(said, name):
    """Bytes are a host's; sketches differ by no more than what they can tell."""
    (code, _, err), compared = said[name]
    assert code == 0, err
    assert compared[1].startswith("IDENTICAL: all 42"), compared
    (code, _, err), compared = said[f"{name}, sketch"]
    assert code == 0, err
    assert compared[1].startswith(("IDENTICAL", "OK")), compared


def test_a_missing_operator_is_named(said):
    """The model needs it: exit 2, with its name."""
    (code, _, err), _ = said["missing"]
    assert code == 2
    assert "an operator that npu:0 lacks" in err
    assert "silu" in err


def test_an_operator_that_sketches_need_goes_to_the_host(said):
    """No fault of the model: the tensors are reduced on the host, which is said."""
    (_, _, err), compared = said["missing for sketches, sketch"]
    assert "copied to the host and reduced there" in err
    assert compared[1].startswith("IDENTICAL")  # they are a host's own sketches


def test_a_silent_fallback_is_heard(said):
    """The vendor warns once a process; each run says it, and the comparison on which side."""
    for name in ("fallback", "fallback, sketch"):
        (_, out, _), compared = said[name]
        assert "aten::silu ran on the CPU: the device has none" in out
        assert "operators on the CPU: none / aten::silu" in compared[1]


@pytest.mark.parametrize("name", ["no_float64", "no_float64_products"])
def test_a_truth_needs_float64(said, name):
    """Exit 2, and the hint says that the host can."""
    code, _, err = said[f"truth, {name}"]
    assert code == 2
    assert "npu cannot compute in float64" in err
    assert "DT_DOUBLE" in err
    assert "leave out --device" in err


def test_a_truth_of_the_device(said):
    """Where it has float64, it is the host's."""
    assert said["truth"][1].startswith("IDENTICAL"), said["truth"]


def test_measuring_needs_sums_of_float64_alone(said):
    """Products are not asked for."""
    assert said["measured, no_float64"][0] == 2
    assert "cannot measure on npu" in said["measured, no_float64"][2]
    assert said["measured, no_float64_products"][0] == 0


@pytest.mark.parametrize("name", ["model", "forward"])
def test_out_of_memory(said, name):
    """Exit 3, with what to try."""
    (code, _, err), _ = said[f"memory for the {name}"]
    assert code == 3
    assert "out of memory" in err
    assert "try:" in err
