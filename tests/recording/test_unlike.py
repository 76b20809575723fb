"""Before anything runs, a capture says what shows that it is not the recorded run's model."""

from __future__ import annotations

import pytest

from divergence.recording.api import capture


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "a"
    return capture(tiny_model("llama"), out=out, dtype="float32", max_new_tokens=1, probe=False)


def said(model, like, out):
    texts = []
    capture(model, like=like, out=out, probe=False, progress=lambda *args: texts.append(args[3]))
    return [text for text in texts if "recorded run" in text]


def test_the_same_model_says_nothing(base, llama, tmp_path):
    assert not said(llama, base, tmp_path / "b")


def test_fewer_blocks(base, tiny_model, tmp_path):
    blocks, weights = said(tiny_model("llama", num_blocks=2), base, tmp_path / "b")

    assert blocks == "this model has 2 blocks, and that of the recorded run 3"
    assert weights.startswith("these are not the weights of the recorded run")
