"""A model on a device without float64 gets its truth on the CPU, operator by operator."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(on_device):
    return on_device("truths")


@pytest.mark.parametrize("lacking", ["no_float64", "no_float64_products"])
@pytest.mark.parametrize("name", ["bert", "gemma3", "gpt2", "llama", "qwen3", "t5"])
def test_it_is_that_of_the_host(made, name, lacking):
    """The model stays on the device: bit for bit the truth is a host's, and says where it was
    made."""
    out, err, device, same = made[name][lacking]
    assert device == "cpu", err
    assert "in float64 on cpu" in out
    assert same


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mixtral", "qwen3-moe"])
def test_no_kernel_of_the_device_is_needed(made, name):
    """States and experts are widened there too, to a few roundings of float64."""
    assert made["forwards"][name] < 1e-14


def test_what_is_written_there_is_moved_back(made):
    """A tensor of the model keeps its place and its dtype; what is made anew is on the CPU."""
    written = made["written"]
    assert written["state"] == ["npu", [0, pytest.approx(1 / 3), pytest.approx(1 / 3), 0]]
    assert written["counter"] == ["npu", [2, 2, 2, 2]]
    assert written["elsewhere"] == ["cpu"] * 4
    assert written["third"] == 1 / 3
    assert written["rounded"] == 1  # integers lose nothing
    assert written["sliced"]
