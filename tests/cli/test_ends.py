"""Faults at the ends, as a user meets them: exit codes and what is said where."""

import pytest


@pytest.fixture
def golden(shared_run):
    return shared_run(prompts=["Snow fell"], max_new_tokens=2, probe=False)


@pytest.mark.parametrize(
    "fault",
    [
        ["--no-anchor", "--plant", "model.norm:in=noise:1.0"],
        ["--no-anchor", "--plant", "lm_head:in=noise:10"],
        ["--plant", "model.norm:in=noise:10"],
    ],
)
def test_check_fails_on_a_fault_behind_the_blocks(fault, golden, invoke, tmp_path):
    """The default policy of CI takes no such run, however the new run was captured."""
    code, _, _ = invoke("capture", "--like", golden.path, "-o", "new", "-q", *fault)
    assert code == 0
    code, out, _ = invoke("check", golden.path, "new")
    assert code == 1
    assert "localized" in out.lower()


def test_a_run_of_nan_is_said_and_refused(golden, invoke, tmp_path):
    """capture warns on stderr; check fails; --bless refuses until it is told."""
    plant = "model.layers.0:out=nan"
    code, out, err = invoke("capture", "--like", golden.path, "-o", "nan", "--plant", plant)
    assert code == 0
    assert "no usable run" in err
    assert "no usable run" not in out
    code, out, _ = invoke("compare", "nan", "nan")
    assert out.startswith("NAN OR INF")
    assert "on both sides" in out
    assert invoke("check", golden.path, "nan")[0] == 1
    code, _, err = invoke("check", "stored", "nan", "--bless")
    assert code == 2
    assert "planted" in err
