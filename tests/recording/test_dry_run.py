"""The place of a known fault is found in the structure of any model."""

import json

import pytest

from divergence.cli.demo import plantable_module
from divergence.errors import ModelError

PLACES = {
    "bert": ("bert.encoder.layer.1", "output.dense"),  # not the norm that makes the output itself
    "gemma3": ("model.layers.1", "post_feedforward_layernorm"),  # it would undo a scale before it
    "gpt2": ("transformer.h.1", "mlp.c_proj"),
    "llama": ("model.layers.1", "mlp.down_proj"),
    "mamba": ("backbone.layers.1", "mixer.out_proj"),
    "mamba2": ("backbone.layers.1", "mixer.out_proj"),
    "qwen3": ("model.layers.1", "mlp.down_proj"),
    "remote-code": ("bricks.1", "narrow"),
    "t5": ("decoder.block.0", "layer.2.DenseReluDense.wo"),
}


@pytest.mark.parametrize("architecture", PLACES)
def test_the_last_writer_of_the_middle_block_is_found(architecture, tiny_model):
    """It is the projection back into the residual stream, or the norm behind it."""
    block, inner = PLACES[architecture]
    model = tiny_model(architecture)
    assert plantable_module(model, trust_remote_code=True) == (block, f"{block}.{inner}")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3-moe"])
def test_of_a_mixture_of_experts_something_is_found_that_all_tokens_pass(architecture, tiny_model):
    """Where the experts lie in one module it is that, otherwise the attention's projection."""
    block, module = plantable_module(tiny_model(architecture))
    assert block == "model.layers.1"
    assert module in (f"{block}.mlp.experts", f"{block}.self_attn.o_proj")


def test_a_forward_that_needs_values_falls_back_to_the_order_of_registration(llama, monkeypatch):
    """Nothing can be planned then, and the last module with weights is taken."""

    def refuse(*_, **__):
        raise ModelError("the shapes cannot be computed without weights")

    monkeypatch.setattr("divergence.recording.dry_run.plan_capture", refuse)
    block, module = plantable_module(llama)
    assert block == "model.layers.1"
    assert module.startswith(f"{block}.")


def test_a_folder_without_a_model_is_refused(tmp_path):
    """With what is wrong about it."""
    with pytest.raises(ModelError, match="does not exist"):
        plantable_module(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        plantable_module(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ModelError, match="cannot load"):
        plantable_module(tmp_path)
