"""Gradients that are zero on one side, in exact arithmetic, or in the truth."""

import contextlib

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import divergence
from divergence.analyses.blocks.sections import prompt_usage
from divergence.domains.training.recording import optimizer
from divergence.report.summary import verdict_lines

PROMPTS = [[5, 9, 31, 7, 12, 40], [8, 3, 22, 9]]


@contextlib.contextmanager
def lost(name: str):
    """The gradient of one parameter is never added up."""
    reduce = optimizer.Stepping.reduce

    def wrong(self, named):
        held = reduce(self, named)
        for path, leaf, parameter in held:
            if f"{path}.{leaf}" == name:
                parameter.grad = torch.zeros_like(parameter.grad)
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer.Stepping, "reduce", wrong)
        yield


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("llama", num_blocks=3))


@pytest.fixture
def step(tmp_path):
    def make(name, model=None, **options):
        if model is not None:
            options |= {"train": True, "prompts": PROMPTS}
        return divergence.capture(model, out=tmp_path / name, probe=False, **options)

    return make


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_one_that_the_reference_lacks_is_named(name, model, step, tmp_path):
    """A gradient that A never adds up is the onset, and A is wrong by the truth."""
    with lost(name):
        a = step("a", model)
    b, truth = step("b", like=a), divergence.truth(a, out=tmp_path / "truth")
    path, _, leaf = name.rpartition(".")
    assert not prompt_usage(divergence.compare(a, b))[0][0] > 1  # a sum over prompts is of none
    for judge in (None, truth):
        report = divergence.compare(a, b, truth=judge)
        verdict = report.verdict
        assert verdict.kind == "localized", verdict.summary
        assert any("backward, all prompts" in str(line) for line in verdict_lines(report))
        assert verdict.onset.site == f"{path}#backward:out.{leaf}"
        assert verdict.side == (None if judge is None else "reference")


@pytest.mark.slow
def test_what_cancels_in_exact_arithmetic_is_rounding(step, tmp_path):
    """Keys without rotary positions: what adds the same to all scores changes no softmax, so the
    gradient of their bias is zero, and each side's is its own rounding."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=32,
        init_std=0.2,
        word_embed_proj_dim=32,
        dropout=0.0,
    )
    folder = tmp_path / "opt"
    OPTForCausalLM(config).save_pretrained(folder)
    a = step("a", str(folder), attn_implementation="eager")
    b, truth = (
        step("b", like=a, attn_implementation="sdpa"),
        divergence.truth(a, out=tmp_path / "t"),
    )
    report = divergence.compare(a, b, truth=truth)
    biases = [one for one in report.sites if one.site.endswith("k_proj#backward:out.bias")]
    assert max(one.rel_l2 for one in biases) > 0.1
    # on some processors one side's kernels are coarser in all blocks, and no side is told
    assert report.verdict.kind == "within_floor" and report.verdict.side in ("neither", None)
    assert divergence.compare(a, b).verdict.kind == "within_floor"
    with lost("model.decoder.layers.1.self_attn.q_proj.bias"):  # whose terms do not
        bad = step("bad", like=a)
    assert "layers.1.self_attn.q_proj" in divergence.compare(a, bad).verdict.summary


@pytest.mark.slow
def test_rows_that_are_zero_in_the_truth_have_an_answer(model, step, tmp_path, monkeypatch):
    """Decay as a part of the gradient moves the embeddings of tokens that are not there."""
    how = {"optimizer": "adamw", "weight_decay": 0.1}
    a = step("a", model, **how)
    truth = divergence.truth(a, out=tmp_path / "truth")
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.Adam)
    verdict = divergence.compare(a, step("b", like=a), truth=truth).verdict
    assert verdict.kind == "systematic" and verdict.side == "candidate"
    assert verdict.onset.phase == "optimizer"
