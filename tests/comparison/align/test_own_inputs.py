"""Runs of a model's own inputs, of which no manifest tells the tokens."""

import pytest
import torch
import transformers

from divergence import capture, compare


@pytest.mark.parametrize("first", [9, 14, 19])
def test_the_token_of_a_models_own_inputs_is_told(tmp_path, tiny_model, first):
    """Inputs that are given as tensors hold the tokens: the row of the fault is one of them."""
    ids = torch.arange(5, 29)[None]
    for name in ("a", "b"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama")).float()
        if name == "b":
            part = model.model.layers[1].mlp
            healthy = part.forward

            def wrong(x, healthy=healthy):
                out = healthy(x).clone()
                out[:, first] *= 3
                return out

            part.forward = wrong
        inputs = [{"input_ids": ids, "use_cache": False}]
        capture(model.eval(), inputs=inputs, out=tmp_path / name)
    onset = compare(tmp_path / "a", tmp_path / "b").verdict.onset
    assert (onset.sample, onset.position) == (0, first)
