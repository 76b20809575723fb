"""`divergence localize` on the command line."""

import json

import pytest


@pytest.mark.slow
def test_answers_and_refuses(invoke, tiny_model, tmp_path):
    """A page, the answer alone, JSON; without a directory, or for no run, exit code 2."""
    model = tiny_model("llama")
    plant = "model.layers.1.mlp.act_fn:out=scale:1.05"
    assert invoke("capture", model, "-o", "a", "--max-new-tokens", 1, "--dtype", "float32")[0] == 0
    assert invoke("capture", "--like", "a", "-o", "b", "--plant", plant)[0] == 0
    code, out, _ = invoke("localize", "a", "b", "-o", "work", "-q")
    assert code == 0
    assert out.startswith("LOCALIZED: the error comes into model.layers.1.mlp/aten.mul")
    code, out, _ = invoke("localize", "a", "b", "-o", "work", "--json")
    assert json.loads(out)["side"] == "candidate"
    code, _, err = invoke("localize", "a", "b")
    assert code == 2
    assert "-o DIR" in err
    code, _, err = invoke("localize", "a", "missing", "-o", "work")
    assert code == 2
    assert "does not exist" in err
    assert invoke("capture", model, "-o", "other", "--max-new-tokens", 1, "--prompt", "two")[0] == 0
    code, out, _ = invoke("localize", "a", "other", "-o", "nothing")
    assert code == 2
    assert out.startswith("STOPPED: the runs are not the same experiment")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    code, _, err = invoke("localize", "a", "b", "-o", "mine")
    assert code == 2
    assert "mine holds other files (notes.txt)" in err
    assert sorted(entry.name for entry in (tmp_path / "mine").iterdir()) == ["notes.txt"]
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_machine_that_does_not_repeat_the_candidate_ends_in_2(invoke, tiny_model, monkeypatch):
    """The first line says what differs and which command is to be run there; nothing is named."""
    import transformers.models.llama.modeling_llama as modeling

    healthy = modeling.LlamaMLP.forward
    model = tiny_model("llama")
    assert invoke("capture", model, "-o", "a", "--max-new-tokens", 1, "--dtype", "float32")[0] == 0
    assert invoke("truth", "a", "-o", "truth", "--max-new-tokens", 1)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(modeling.LlamaMLP, "forward", lambda self, x: healthy(self, x) * 1.1)
        assert invoke("capture", "--like", "a", "-o", "b", "--label", "cluster C")[0] == 0
    code, out, _ = invoke("localize", "a", "b", "--truth", "truth", "-o", "work", "-q")
    assert code == 2
    assert out.startswith("STOPPED: this is not B's machine (cluster C): its blocks do ")
    assert "run there:\n  divergence capture --like a -o work/candidate-operators" in out
    assert "side" not in out
