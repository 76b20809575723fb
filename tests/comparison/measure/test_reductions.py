"""One number made of many is held to what its additions lose, and to the terms that cancel."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import divergence
from divergence.numerics.floor import norm_floor

IDS = [[5, 9, 31, 7, 12, 40, 77, 99, 100, 3], [8, 3, 22, 9, 13, 45, 60]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """``model(vocab, steps, scale)`` → a folder: trained on IDS for so many steps."""

    def make(vocab=256, steps=0, scale=1.0):
        torch.manual_seed(0)
        module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab,
                hidden_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=128,
            )
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            for ids in map(torch.tensor, IDS):
                module(input_ids=ids[None], labels=ids[None]).loss.backward()
            optimizer.step()
        with torch.no_grad():
            module.lm_head.weight *= scale
        folder = tmp_path_factory.mktemp("model")
        module.save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.whole
@pytest.mark.parametrize(
    "vocab, steps, scale, options",
    [
        pytest.param(1024, 0, 1.0, {"optimizer": "adamw"}, id="norm"),
        pytest.param(1 << 15, 0, 1.0, {"optimizer": "sgd"}, id="norm-of-two-million"),
        pytest.param(1024, 0, 1.0, {"optimizer": "adamw", "clip_grad_norm": 0.1}, id="clipped"),
        pytest.param(256, 60, 1.0, {"optimizer": "adamw"}, id="small-loss"),
        pytest.param(256, 60, 2.0, {}, id="loss-near-zero"),
        pytest.param(256, 60, 1.0, {"autocast": "bfloat16"}, id="small-loss-autocast"),
    ],
)
def test_a_healthy_step_is_not_far_from_the_truth(
    vocab, steps, scale, options, model, tmp_path, answer
):
    """What both sides lose by adding in float32, or by cancelling, is no fault of both."""
    a = divergence.capture(
        model(vocab, steps, scale),
        out=tmp_path / "a",
        training=divergence.TrainOptions(train=True),
        prompts=IDS,
        probe=False,
        dtype="float32",
        **options,
    )
    truth = divergence.truth(a, out=tmp_path / "t")
    verdict = answer(a, truth=truth).verdict
    assert (verdict.kind, verdict.side) == ("identical", "neither"), verdict.summary


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.02


def scale_backward(path):
    def prepare(module):
        inner = module.get_submodule(path)
        forward = inner.forward
        inner.forward = lambda *args, **named: Scaled.apply(forward(*args, **named))

    return prepare


@pytest.mark.whole
@pytest.mark.parametrize(
    "path, steps, site",
    [
        ("model.layers.1.mlp", 0, "model.layers.1#backward:out"),
        ("model.layers.2.mlp.up_proj", 60, "model.layers.2#backward:out"),
        ("model.norm", 60, "model.norm#backward:out"),
        ("lm_head", 60, "lm_head#backward:out"),
    ],
)
def test_a_backward_that_is_wrong_in_b_alone_is_b_s(path, steps, site, model, tmp_path, answer):
    """The norm of all gradients, which follows from it, takes no side back."""
    a = divergence.capture(
        model(1024, steps),
        out=tmp_path / "a",
        training=divergence.TrainOptions(train=True, optimizer="adamw"),
        prompts=IDS,
        probe=False,
        dtype="float32",
    )
    truth = divergence.truth(a, out=tmp_path / "t")
    verdict = answer(a, scale_backward(path), truth=truth).verdict
    assert (verdict.onset.site, verdict.side) == (site, "candidate"), verdict.summary


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num", [1 << 10, 1 << 16, 1 << 20, 1 << 22])
def test_the_norm_of_many_numbers_is_as_far_off_as_torch_adds(num, dtype):
    """The floor follows the squares that a large sum loses."""
    values = torch.randn(num, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    error = abs(float(torch.nn.utils.get_total_norm([values])) / float(values.double().norm()) - 1)
    stored = torch.finfo(values.dtype).eps / 2
    assert error < 6 * norm_floor(num, lanes=8 if dtype == "float32" else 1) + stored
