"""Prompts that a machine cannot run, and files of more prompts than anyone runs."""

import pytest

from divergence import BatchOptions, capture
from divergence.errors import ModelError, PromptError
from divergence.recording import prompts as labels


def test_attention_that_memory_does_not_bear(llama, tmp_path, monkeypatch):
    """An error before the forward, in place of a process that the system ends."""
    monkeypatch.setattr("divergence.recording.engines.engine.free_bytes", lambda device: 1 << 20)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="GiB for the attention of a block") as caught:
        capture(llama, prompts=["word " * 300], out="run", probe=False)
    assert "sdpa" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_file_of_many_prompts(name, llama, tmp_path, monkeypatch):
    """Lines are counted as they are read."""
    monkeypatch.setattr(labels, "MAX_PROMPTS", 10)
    path = tmp_path / name
    path.write_text(("word" if name == "p.txt" else '{"text": "word"}') + "\n\n")
    for _ in range(4):
        path.write_text(path.read_text() * 2)
    with pytest.raises(PromptError, match="more than 10") as caught:
        capture(llama, batching=BatchOptions(prompts_file=path), out=tmp_path / "run", probe=False)
    assert caught.value.where == str(path)
