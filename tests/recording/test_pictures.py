"""Models that read pictures or sound beside text: their text is run, and what rests is said."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from divergence import Run, capture, compare, truth
from divergence.errors import ModelError

TEXT = dict(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
)
TOWER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A tower for pictures before a Llama."""
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_index=5,
    )
    folder = tmp_path_factory.mktemp("llava") / "model"
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_prompts_of_text_run_the_text_of_a_model_with_pictures(llava, tmp_path):
    """With its anchored passes and its own truth; the tower that nothing ran is named."""
    a = capture(llava, out=tmp_path / "a", prompts=[[1, 7, 8, 9]], max_new_tokens=2, truth="full")
    assert a.manifest.plan.truth.stopped_by is None
    b = capture(like=a, out=tmp_path / "b")
    assert "anchored" in b.manifest.plan.passes
    report = compare(a, b)
    assert report.verdict.kind == "identical"
    assert [each.name for each in report.not_exercised] == [
        "model.vision_tower",
        "model.multi_modal_projector",
    ]
    assert Run.open(truth(a, out=tmp_path / "t").path).manifest.complete


def test_a_fault_in_its_text_is_found(llava, tmp_path):
    """As in any other model."""
    prompts = [[1, 7, 8, 9] * 4]
    a = capture(llava, out=tmp_path / "a", prompts=prompts, max_new_tokens=2, truth="full")

    def wrong(model):
        block = model.model.language_model.layers[1]
        block.register_forward_hook(lambda module, args, output: output * 1.01)

    verdict = compare(a, capture(like=a, out=tmp_path / "b", prepare=wrong)).verdict
    assert (verdict.side, verdict.onset.site) == (
        "candidate",
        "model.language_model.layers.1:out",
    )


@pytest.mark.parametrize(
    ("name", "config", "reads"),
    [
        ("ViTForImageClassification", hf.ViTConfig(**TOWER), "pixel_values"),
        (
            "WhisperForConditionalGeneration",
            hf.WhisperConfig(
                vocab_size=128,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_mel_bins=8,
                max_source_positions=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
            "input_features",
        ),
    ],
)
def test_a_model_of_pictures_or_sound_alone_says_so(tmp_path, name, config, reads):
    """Its files are whole; what its processor makes of a file runs it."""
    getattr(hf, name)(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=f"reads {reads}, and prompts hold text") as error:
        capture(tmp_path / "m", out=tmp_path / "a", prompts=[[1, 2]])
    assert "inputs=" in str(error.value.hint)
