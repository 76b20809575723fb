"""The whole way on a tiny model: capture, repeat, compare, check, bless."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def golden(invoke, llama, tmp_path):
    """A run of the tiny model."""
    code, _, err = invoke("capture", llama, "-o", "golden", "--max-new-tokens", "2", "-q")
    assert code == 0, err
    return tmp_path / "golden"


def test_a_repeated_run_passes_every_policy(invoke, golden):
    """The same machine gives the same bits, and strict accepts them."""
    assert invoke("capture", "--like", "golden", "-o", "new", "-q")[0] == 0
    code, out, _ = invoke("compare", "golden", "new", "--exit-code")
    assert code == 0
    assert out.startswith("IDENTICAL: ")
    assert invoke("check", "golden", "new", "--policy", "strict", "-q")[0] == 0


def test_ci_accepts_other_kernels_and_strict_does_not(invoke, golden):
    """Attention by another kernel rounds otherwise: no fault, but other bits."""
    like = ("capture", "--like", "golden", "-q", "-o", "new")
    assert invoke(*like, "--attn-implementation", "sdpa")[0] == 0
    code, out, _ = invoke("check", "golden", "new")
    assert code == 0, out
    assert "OK" in out
    code, out, _ = invoke("check", "golden", "new", "--policy", "strict", "-q")
    assert code == 1
    assert "verdicts: OK (within_floor); allowed:" in out


def test_ci_fails_on_a_planted_fault_and_names_its_block(invoke, golden):
    """What the golden is for."""
    plant = "model.layers.1.self_attn.o_proj:out=scale:1.5"
    assert invoke("capture", "--like", "golden", "-o", "new", "-q", "--plant", plant)[0] == 0
    code, out, _ = invoke("check", "golden", "new", "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["failures"][0]["rule"] == "verdicts"
    assert answer["report"]["verdict"]["onset"]["block"] == "model.layers.1"
    code, out, _ = invoke("compare", "golden", "new", "--exit-code", "-v")
    assert code == 1
    assert f"PLANTED FAULT: {plant}" in out
    assert any(line.startswith(" >! model.layers.1 ") for line in out.splitlines())
    code, _, err = invoke("check", "golden", "new", "--bless")
    assert code == 2
    assert "planted" in err


@pytest.mark.slow
def test_other_prompts_are_incomparable(invoke, golden, llama):
    """Two experiments are neither a pass nor a divergence."""
    other = ("capture", llama, "-o", "other", "--prompt", "Another text", "-q")
    assert invoke(*other)[0] == 0
    code, out, _ = invoke("compare", "golden", "other", "-v")
    assert code == 2
    assert "BLOCKS  prompt ids" in out
    code, out, err = invoke("check", "golden", "other")
    assert code == 2
    assert "because     prompt ids" in out
    assert err.startswith("error: the prompts differ") and "try:" not in err  # the screen says it
    assert invoke("check", "golden", "other", "--bless")[0] == 0
    # the golden is a copy of it now
    assert invoke("compare", "golden", "other", "--exit-code")[0] == 2
    code, _, err = invoke("check", "golden", "other")
    assert code == 2 and "proves nothing" in err
    assert invoke("capture", "--like", "golden", "-o", "again", "-q")[0] == 0
    assert invoke("check", "golden", "again", "-q")[0] == 0


def test_a_damaged_golden_is_unreadable_and_no_divergence(invoke, golden):
    """A torn file is exit code 2, never 1."""
    assert invoke("capture", "--like", "golden", "-o", "new", "-q")[0] == 0
    shard = next((golden / "tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-8])
    assert invoke("check", "golden", "new")[0] == 2
    assert invoke("inspect", "golden", "--verify")[0] == 2


def test_dry_run_writes_nothing(invoke, llama, tmp_path):
    """The plan names sites and bytes, and the directory stays empty."""
    before = sorted(tmp_path.iterdir())
    code, out, err = invoke("capture", llama, "--dry-run")
    assert code == 0, err
    assert out.startswith("DRY RUN: ")
    assert "lm_head:out" in out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [["--help"], ["compare", "--help"]])
def test_a_closed_pipe_is_no_divergence(words):
    """`divergence ... | head` that has read enough: 1 would be an answer, and 3 our fault."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "divergence", *words], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.close(reading)
    said = process.communicate(timeout=300)[1]
    assert (process.returncode, said) == (2, b"")
