"""Each side is made again on the kind of device that it ran on, here and in printed commands."""

import msgspec
import pytest

from divergence import Run, capture
from divergence.comparison.advice import Advice
from divergence.experiments.localization.machine import Goal, Maker
from divergence.run.command import command

GOAL = Goal(sites=["blocks"])


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("devices")
    return capture(str(llama), out=folder / "a", sites=["blocks"], max_new_tokens=1)


def on(run: Run, device_type: str) -> Run:
    """The run as if made there."""
    manifest = run.manifest
    there = msgspec.structs.replace(manifest.environment, device_type=device_type)
    return Run(run.path, msgspec.structs.replace(manifest, environment=there), run.records)


def maker(a: Run, b: Run, folder, device: str = "auto", here: str = "auto") -> Maker:
    return Maker(
        a,
        b,
        folder / "work",
        model=None,
        device=device,
        here=here,
        force=False,
        trust_remote_code=False,
        prepare={},
        again=command("localize"),
        progress=lambda *_: None,
    )


@pytest.mark.parametrize("device", ["auto", "npu", "npu:1"])
def test_a_reference_of_the_cpu_is_not_made_on_the_accelerator(run, tmp_path, device):
    """Each side runs on its own kind of device, whatever was chosen for the other."""
    made = maker(run, on(run, "npu"), tmp_path, device=device)

    assert made._device_of("reference") == "cpu"
    assert made._device_of("candidate") == ("npu" if device == "auto" else device)
    assert made.operators("reference", GOAL) is not None  # this host's CPU is here
    assert made.operators("candidate", GOAL) is None  # no such device is here
    assert "--device npu" in made.commands[0].text


def test_the_command_for_another_machine_names_the_device(run, tmp_path):
    """That of the side that it is for."""
    made = maker(run, on(run, "npu"), tmp_path, here="none")

    made.operators("reference", GOAL)
    made.operators("candidate", GOAL)

    assert "--device cpu" in made.commands[0].text and "--device npu" in made.commands[1].text


def test_a_device_that_this_tool_does_not_know_is_not_asked_for(run, tmp_path):
    """No word of a run becomes an option."""
    made = maker(run, on(run, "tpu; touch pwned"), tmp_path, device="cpu", here="none")
    made.operators("candidate", GOAL)
    assert "--device" not in made.commands[0].text and made._device_of("candidate") == "cpu"


def test_compare_prints_the_devices_where_they_differ(run):
    """And only there."""
    alike = Advice(run, run, None)
    assert "--device" not in " ".join(item.text for item in alike.into_block("model.layers.1"))
    other = Advice(run, on(run, "npu"), None).into_block("model.layers.1")
    assert [("--device cpu" in one.text, "--device npu" in one.text) for one in other[1:3]] == [
        (True, False),
        (False, True),
    ]
