"""The operator suite from the command line: what is printed where, and how it ends."""

import json

import pytest

SOME = (
    "--sites",
    "rms_norm.float32.odd*",
    "--sites",
    "quantize.*.ties*",
    "--sites",
    "argmax.*odd*",
)


@pytest.mark.slow
def test_the_journey(invoke, tmp_path):
    """capture, capture --like with another implementation, reference, compare: the wrong operator
    is named first, with its side."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef rms_norm(x, weight, eps):\n    return x * weight\n"
    )
    code, out, err = invoke("capture", "suite:quick", "-o", "a", *SOME, "--label", "machine A")
    assert (code, err) == (0, "")
    assert out.startswith("captured a: ")
    assert "suite:quick" in out
    assert "sample 0" not in out
    code, out, _ = invoke("capture", "--like", "a", "-o", "b", "--impl", "rms_norm=mine:rms_norm")
    assert code == 0
    assert "impl: mine:rms_norm instead of torch" in out
    code, out, _ = invoke("truth", "a", "-o", "truth")
    assert code == 0
    assert "computed in float64" in out
    code, out, err = invoke("compare", "a", "b", "--truth", "truth")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("DIVERGED: B computed 1 of 3 operators worse")
    assert "rms_norm" in lines[0]
    assert len(lines) <= 18
    assert "because     rms_norm: B, " in out
    code, out, _ = invoke("compare", "a", "b", "--truth", "truth", "-v")
    lines = out.splitlines()
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("operators")) :]
    assert table[2].split()[:4] == ["!", "rms_norm", "B", "6/6"]
    assert table[3].split() == ["ran", "by", "torch", "/", "mine:rms_norm"]
    assert max(map(len, table[:3])) <= 120
    assert "bit-identical: " in out and "quantize" in out
    code, out, _ = invoke("compare", "a", "b", "--truth", "truth", "--all")
    assert "rms_norm  wrong: B" in " ".join(out.split("\n")).replace("   ", "  ")
    assert invoke("compare", "a", "b", "--truth", "truth", "--exit-code")[0] == 1
    assert invoke("compare", "a", "b", "--exit-code")[0] == 2  # nobody can tell
    code, out, _ = invoke("compare", "a", "a", "--exit-code")
    assert code == 2 and "proves nothing" in out
    assert invoke("inspect", "b", "--verify")[0] == 0
    code, out, _ = invoke("inspect", "truth")
    assert code == 0
    assert "suite:quick" in out


def test_json(invoke):
    """The JSON of a comparison holds every case with its figures."""
    invoke("capture", "suite:quick", "-o", "a", *SOME, "-q")
    code, out, err = invoke("truth", "a", "-o", "truth", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["manifest"]["settings"]["compute_dtype"] == "float64"
    code, out, _ = invoke("compare", "a", "a", "--truth", "truth", "--json")
    report = json.loads(out)
    assert (report["verdict"]["kind"], report["verdict"]["confidence"]) == ("identical", "low")
    cases = report["suite"]["cases"]
    assert {case["kind"] for case in cases} == {"values", "codes", "indices"}
    assert report["suite"]["judged"] is True
    assert report["sites"] == []


def test_a_dry_run(invoke, tmp_path):
    """Lists cases and writes nothing."""
    code, out, _ = invoke("capture", "suite:llm", "--dry-run", "--sites", "rms_norm.float32.odd*")
    assert code == 0
    assert "rms_norm.float32.odd.subnormals" in out
    assert not list(tmp_path.iterdir())


def test_what_is_refused(invoke):
    """Each with exit code 2 and a hint."""
    invoke("capture", "suite:quick", "-o", "a", *SOME, "-q")
    for words, said in (
        (("capture", "suite:nlp", "-o", "b"), "suite:llm"),
        (("capture", "suite:llm", "-o", "b", "--dtype", "float16"), "--dtype means nothing"),
        (("capture", "suite:llm", "-o", "b", "--impl", "torch_npu"), "torch_npu is not here"),
        (("capture", "suite:llm", "-o", "b", "--sites", "nothing"), "matches no case"),
        (("capture", "--like", "a", "-o", "a", "--force"), "is the run to be repeated"),
        (("capture", "--like", "a", "-o", "b", "--no-anchor"), "--no-anchor means nothing"),
        (("capture", "--like", "a", "--model", "x", "-o", "b"), "needs no model"),
        (("truth", "a", "-o", "b", "--device", "mps"), "computed on the CPU"),
        (("compare", "a", "a", "--floor", "a"), "--floor means nothing"),
    ):
        code, out, err = invoke(*words)
        assert (code, out) == (2, ""), words
        assert said in err, words
        assert "try:" in err or "where:" in err, words


def test_settings_of_models_do_not_reach_a_suite(invoke, monkeypatch):
    """A dtype that is set for models in the environment is no reason to refuse a suite."""
    monkeypatch.setenv("DIVERGENCE_CAPTURE_DTYPE", "bfloat16")
    assert invoke("capture", "suite:quick", "-o", "a", *SOME)[0] == 0


def test_check_of_a_suite(invoke):
    """A golden suite is checked like a golden run: the same bits pass."""
    invoke("capture", "suite:quick", "-o", "a", *SOME, "-q")
    invoke("capture", "--like", "a", "-o", "b", "-q")
    code, out, err = invoke("check", "a", "b")
    assert code in (0, 1), err
    assert code == 0, out
