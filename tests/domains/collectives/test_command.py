"""suite:collectives on the command line: what is wrong is said first, and the exit code agrees."""

import json

import pytest


@pytest.mark.slow
def test_capture_and_compare(invoke, tmp_path):
    """Exit code 1 for a faulty rank, 0 for a right one; the second run is not needed."""
    out = str(tmp_path / "c")
    words = [
        "capture",
        "suite:collectives",
        "-o",
        out,
        "--ranks",
        "2",
        "--no-probe",
        "--sites",
        "all_gather.float32.odd.*",
    ]
    code, said, _ = invoke(*words)
    assert code == 0
    assert "does every rank hold what it should?" in said
    code, said, _ = invoke("compare", out, "--exit-code")
    assert code == 0
    assert said.startswith("OK: all 3 cases hold on 2 ranks (gloo)")
    invoke(*words, "--force", "--plant", "all_gather=swap@1")
    code, said, _ = invoke("compare", out, "--exit-code")
    assert code == 1
    assert said.startswith("DIVERGED: rank 1: all_gather of float32, odd (258 elements), random:")
    code, said, _ = invoke("compare", out, "--json")
    assert json.loads(said)["collectives"]["sides"][0]["faults"][0]["ranks"] == [1]


def test_without_ranks_the_line_to_type_is_said(invoke):
    """torchrun's, and the one for this machine alone."""
    code, _, said = invoke("capture", "suite:collectives", "-o", "c")
    assert code == 2
    assert "torchrun --nproc-per-node N -m divergence capture suite:collectives -o RUN" in said
    assert "--ranks N" in said


def test_a_dry_run_lists_the_cases(invoke):
    """With the sizes of so many ranks."""
    code, said, _ = invoke(
        "capture", "suite:collectives", "--ranks", "4", "--dry-run", "--sites", "all_gather.*"
    )
    assert code == 0
    assert "all_gather.float32.odd.random" in said
    assert "516 B" in said  # 129 8-bit floats of each rank
