"""sensitivity on the command line: what it asks for, what it prints, how it ends."""

import json

import pytest


@pytest.fixture
def pair(invoke, tiny_model):
    """Runs a and b of a tiny float32 model, on different attention kernels."""
    model = tiny_model("llama", dtype="float32", num_blocks=4)
    assert invoke("capture", model, "-o", "a", "--max-new-tokens", "1", "-q")[0] == 0
    like = ("capture", "--like", "a", "-o", "b", "--attn-implementation", "sdpa", "-q")
    assert invoke(*like)[0] == 0


@pytest.mark.slow
def test_answers(invoke, pair):
    """-q is the sentences alone; without it the table and the commands follow; --json is all."""
    ask = ("sensitivity", "a", "--candidate", "b", "--faults", "scale", "--blocks", "0,last")
    code, out, err = invoke(*ask, "-q")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert " ".join(out.split()).startswith("in float32 you would see a scale error of ")
    code, long, _ = invoke(*ask)
    assert code == 0
    assert " ".join(long.split()).startswith(out.strip())
    assert "\n  divergence sensitivity a --candidate b --truth a-truth\n" in long
    code, text, _ = invoke(*ask, "--json")
    answer = json.loads(text)
    assert (code, answer["schema_version"]) == (0, 1)
    assert [one["block"] for one in answer["sizes"]] == ["model.layers.0", "model.layers.3"]


@pytest.mark.slow
def test_thresholds_come_from_a_policy(invoke, pair, tmp_path):
    """Limits ten times as wide see only larger faults."""
    (tmp_path / "wide.toml").write_text(
        "[thresholds]\ntypical = 60.0\nratio_spread = 2.0\ntoken = 120.0\n"
    )
    ask = ("sensitivity", "a", "--candidate", "b", "--faults", "noise", "--blocks", "0", "--json")
    sizes = [
        json.loads(invoke(*ask, *more)[1])["sizes"][0]["size"]
        for more in ((), ("--policy", "wide.toml"))
    ]
    assert sizes[1] > 3 * sizes[0]


def test_refusals_end_in_two(invoke, pair):
    """Words that mean nothing, and a pair that is faulty already, with its verdict."""
    code, out, err = invoke("sensitivity", "a", "--candidate", "b", "--blocks", "99")
    assert (code, out) == (2, "")
    assert "no block '99'" in err
    plant = "model.layers.1:out=scale:1.5"
    assert invoke("capture", "--like", "a", "-o", "bad", "--plant", plant, "-q")[0] == 0
    code, out, err = invoke("sensitivity", "a", "--candidate", "bad")
    assert (code, out) == (2, "")
    assert "localized: the error is made at model.layers.1:out" in err
