"""capture --train: options that make no step are refused, with what to type instead."""

import pytest

pytestmark = pytest.mark.whole


def test_one_process_has_no_stage_of_zero(invoke, llama, tmp_path):
    """--zero without ranks is refused, with the option that gives some."""
    code, _, err = invoke("capture", llama, "--train", "--zero", "2", "-o", tmp_path / "run")
    assert code == 2
    assert "--zero 2 has no ranks to divide over" in err and "--mesh fsdp" in err


def test_labels_that_fit_no_step(invoke, llama, tmp_path):
    """Each is said before a run is begun, with code 2."""
    labels, out = tmp_path / "labels.jsonl", tmp_path / "run"
    command = ["capture", llama, "--prompt", "a b c", "--labels", labels, "-o", out]
    labels.write_text('{"completion_from": 1}\n{"completion_from": 1}\n')
    for words, said in (([], "--labels needs --train"), (["--train"], "labels for 2 prompts")):
        code, _, err = invoke(*command, *words)
        assert code == 2 and said in err
    for text, said in (("[1]", "and 1 labels"), ("[", "line 1"), ('{"completion_from": 99}', "99")):
        labels.write_text(text)
        code, _, err = invoke(*command, "--train")
        assert code == 2 and said in err, err
    labels.unlink()
    code, _, err = invoke(*command, "--train")
    assert code == 2 and "cannot be read" in err
    assert not out.exists()
