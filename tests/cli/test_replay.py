"""`divergence replay` and `divergence repro`, as they are typed."""

import json

import pytest

import divergence
from divergence import RecordOptions, capture

BLOCK = "model.layers.1"
SITE = f"{BLOCK}.mlp.down_proj/aten.mm:out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama):
    """``a`` holds a block's operators with their weights, ``bare`` without, ``blocks`` none."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"prompts": ["A bridge is built twice."], "max_new_tokens": 2}
    capture(
        str(llama),
        out=folder / "a",
        sites=[f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True),
        **options,
    )
    capture(str(llama), out=folder / "bare", sites=[f"ops@{BLOCK}"], **options)
    capture(str(llama), out=folder / "blocks", **options)
    return folder


@pytest.mark.slow
def test_replay_compare_and_inspect(invoke, runs):
    """One run, its replay and its truth: identical here, and every command says so."""
    code, out, err = invoke("replay", runs / "a", "-o", "a2", "--device", "cpu", "--label", "here")
    assert code == 0
    assert err.startswith(f"from {runs / 'a'}: ") and err.count("\n") == 1
    assert out.startswith("replayed a2:")
    assert f"divergence compare {runs / 'a'} a2" in out
    code, out, _ = invoke("replay", runs / "a", "-o", "truth", "--truth", "-q")
    assert (code, out) == (0, "truth\n")
    code, out, _ = invoke("compare", runs / "a", "a2", "--truth", "truth")
    assert code == 0
    assert "identical" in out.splitlines()[0].lower()
    code, out, _ = invoke("inspect", "a2")
    assert "replays" in out and "the free pass of" in out


def test_replay_as_json(invoke, runs):
    """The manifest of what was made, with the command that made it."""
    code, out, _ = invoke(
        "replay", runs / "a", "-o", "a2", "--device", "cpu", "--site", SITE, "--json"
    )
    manifest = json.loads(out)["manifest"]
    assert code == 0
    assert manifest["plan"]["replayed_pass"] == "free"
    assert manifest["plan"]["sites"] == [SITE]
    assert manifest["sizes"]["num_records"] == 2
    assert manifest["command"].startswith("divergence replay")


def test_what_was_left_out_is_shown(invoke, runs, llama):
    """On stderr while it runs, and by inspect afterwards; --model supplies the weights."""
    code, out, err = invoke("replay", runs / "bare", "-o", "a2", "--device", "cpu")
    assert code == 0
    assert "were not run again: its weight was not stored (capture --weights, or --model" in err
    assert "left out" in out
    _, out, _ = invoke("inspect", "a2")
    assert "left out" in out and "its weight was not stored" in out
    code, _, err = invoke("replay", runs / "bare", "-o", "a3", "--device", "cpu", "--model", llama)
    assert code == 0
    assert err.startswith("from ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "{runs}/a"), "no directory to write to"),
        (("replay", "{runs}/blocks", "-o", "x"), "capture --like"),
        (("replay", "{runs}/a", "-o", "x", "--site", "nothing:out"), "no operator at nothing:out"),
        (("replay", "{runs}/a", "-o", "x", "--pass", "whole"), "no operators of a pass 'whole'"),
        (("replay", "{runs}/a", "-o", "x", "--device", "cuda:99"), "device cuda is not there"),
        (("replay", "{runs}/nothing", "-o", "x"), "does not exist"),
        (("replay", "{runs}/bare", "-o", "x", "--site", "*down_proj*"), "none of the"),
        (("replay", "{runs}/bare", "-o", "x", "--model", "nowhere/at/all/"), "nowhere/at/all"),
        (("repro", "{runs}/a", "-o", "x"), "no operator is named"),
        (("repro", "{runs}/a", "--site", SITE), "no directory to write to"),
        (("repro", "{runs}/a", "-o", "x", "--site", f"{BLOCK}.mlp:out"), "is a module"),
        (("repro", "{runs}/a", "-o", "x", "--site", f"{BLOCK}/aten.mm:out"), "did you mean"),
        (("repro", "{runs}/blocks", "-o", "x", "--site", SITE), "capture --like"),
        (("repro", "{runs}/bare", "-o", "x", "--site", SITE), "its weight was not stored"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-1:]) if isinstance(value, tuple) else "",
)
def test_bad_input(invoke, runs, monkeypatch, arguments, said):
    """Exit code 2, what is wrong and what to try, and no traceback."""
    monkeypatch.setattr("logging.raiseExceptions", False)
    code, out, err = invoke(*(str(word).replace("{runs}", str(runs)) for word in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert "try:" in err
    assert "Traceback" not in err and "fault in divergence" not in err


def test_repro(invoke, runs, tmp_path):
    """The folder, the finding and the command that runs it; --json says the same."""
    code, out, err = invoke("repro", runs / "a", "--site", SITE, "-o", "bug")
    assert (code, err) == (0, "")
    assert "written bug" in out and "python bug/repro.py" in out
    assert (tmp_path / "bug" / "report.md").is_file()
    code, out, _ = invoke("repro", runs / "a", "--site", SITE, "-o", "bug", "--force", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["operator"] == "aten.mm.default"
    assert answer["path"] == "bug"
    assert set(answer["from_truth"]["out"]) == {
        "max_abs",
        "rel_l2",
        "max_ulp",
        "num_different",
        "numel",
    }


def test_the_api_has_them(runs, tmp_path):
    """divergence.replay and divergence.repro are the commands' twins."""
    again = divergence.replay(runs / "a", out=tmp_path / "a2", device="cpu", sites=[SITE])
    assert {record.site for record in again.records} == {SITE}
    made = divergence.repro(runs / "a", site=SITE, out=tmp_path / "bug", against=again)
    assert made.against["out"].num_different == 0
