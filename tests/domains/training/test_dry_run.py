"""capture --dry-run --train: the plan of a training step, as it is printed."""

import json

import pytest


@pytest.mark.slow
def test_the_command_prints_it(invoke, llama):
    """Memory, then traffic with its time."""
    code, out, _ = invoke(
        "capture", llama, "--dry-run", "--train", "--mesh", "fsdp=8,tp=2", "--link-rate", "50GB/s"
    )
    assert code == 0
    for text in ("TRAINING STEP: at most", "8Ψ/N", "reduce-scatter", "at 50 GB/s"):
        assert text in out
    answer = invoke("capture", llama, "--dry-run", "--train", "--json")[1]
    assert json.loads(answer)["dry_run"]["training"]["optimizer"] == "adamw"


def test_the_plans_options_need_a_dry_run_of_a_step(invoke, llama):
    """Else they would be dropped without a word."""
    code, _, err = invoke("capture", llama, "--dry-run", "--sequence-length", "2")
    assert code == 2
    assert "--sequence-length is for the plan of a training step" in err


@pytest.mark.slow
def test_a_stage_of_zero_is_planned_and_needs_a_step(invoke, llama):
    """The plan names the stage; without --train it is refused."""
    command = ["capture", llama, "--dry-run", "--mesh", "dp=2", "--zero", "1"]
    code, out, _ = invoke(*command, "--train")
    assert code == 0 and "ZeRO 1" in out
    code, _, err = invoke(*command)
    assert code == 2 and "--zero needs --train" in err
