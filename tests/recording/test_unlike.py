"""Before anything runs, a capture says what shows that it is not the recorded run's model."""

import json
import shutil

import pytest

from divergence import capture, truth
from tests.digests import without_digests


@pytest.fixture
def base(shared_run):
    return shared_run(dtype="float32", max_new_tokens=1, probe=False)


def said(model, like, out):
    texts = []
    capture(model, like=like, out=out, probe=False, progress=lambda *args: texts.append(args[3]))
    return [text for text in texts if "recorded run" in text]


def test_the_same_model_says_nothing(base, llama, tmp_path):
    """There is nothing to warn of."""
    assert not said(llama, base, tmp_path / "b")


def test_fewer_blocks(base, tiny_model, tmp_path):
    """Another depth, and other weights, are said before the capture."""
    blocks, weights = said(tiny_model("llama", num_blocks=2), base, tmp_path / "b")

    assert blocks == "this model has 2 blocks, and that of the recorded run 3"
    assert weights.startswith("these are not the weights of the recorded run")


def test_a_run_that_was_cut_off_is_named_before_it_is_repeated(base, llama, tmp_path):
    """Else a truth of it looks whole, and half of the steps are judged without one."""
    shutil.copytree(base.path, tmp_path / "a")
    without_digests(tmp_path / "a")
    file = tmp_path / "a" / "manifest.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(told | {"complete": False}), encoding="utf-8")
    texts = []
    truth(tmp_path / "a", out=tmp_path / "t", progress=lambda *args: texts.append(args[3]))
    assert any("INCOMPLETE: what it lacks is not repeated" in text for text in texts)
