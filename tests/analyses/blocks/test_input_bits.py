"""float32 products whose inputs are rounded to a shorter format, as TF32 does, are called that."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from divergence import capture

PROMPTS = [[(13 * n + 7 * k) % 200 + 3 for k in range(count)] for n, count in enumerate((20, 33))]
FORMATS = {10: "10 bits (TF32)", 7: "7 bits (bfloat16)"}


def rounded(values, bits):
    """To so many fraction bits."""
    step = 23 - bits
    patterns = values.contiguous().view(torch.int32)
    return ((patterns + (1 << (step - 1))) >> step << step).view(torch.float32)


def coarse_inputs(bits):
    """``prepare``: all products of matrices round both inputs so."""

    def prepare(model):
        for module in model.modules():
            if type(module).__name__ not in ("Linear", "Conv1D"):
                continue

            def forward(x, own=module):
                weight = own.weight if isinstance(own, torch.nn.Linear) else own.weight.T
                return F.linear(rounded(x, bits), rounded(weight, bits), own.bias)

            module.forward = forward

    return prepare


@pytest.fixture
def run_of(shared_run):
    def make(architecture, truth):
        model = {"num_blocks": 4, "dtype": "float32"}
        options = {"prompts": PROMPTS, "max_new_tokens": 2, "truth": truth, "probe": False}
        return shared_run(architecture, model=model, **options)

    return make


@pytest.mark.parametrize("truth", ["full", "no"])
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_inputs_of_a_shorter_format_are_named(architecture, bits, truth, run_of, answer):
    """Products whose inputs were rounded to fewer bits are said to keep so many, everywhere."""
    a = run_of(architecture, truth)
    verdict = answer(a, coarse_inputs(bits)).verdict

    assert verdict.kind == "systematic"
    assert FORMATS[bits] in verdict.summary


def scaled(model):
    """Every MLP's output is as far off as TF32 makes it, by one factor."""
    for block in model.model.layers:
        block.mlp.forward = lambda x, own=block.mlp.forward: own(x) * 1.001


def normed_otherwise(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3


def turned_otherwise(model):
    model.model.rotary_emb.inv_freq *= 1.001


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [scaled, normed_otherwise, turned_otherwise])
def test_another_fault_of_all_blocks_is_no_format(prepare, run_of, answer):
    """What else all blocks do wrong is not called a format of inputs."""
    a = run_of("llama", "full")

    assert "float32 inputs keep" not in answer(a, prepare).verdict.summary


@pytest.mark.slow
def test_a_fault_of_some_products_is_no_format(answer, tmp_path):
    """All blocks of a decoder are as far off as TF32 makes them, and the encoder's products are
    not: a setting of all products would be seen there, too."""
    torch.manual_seed(0)
    size = {"d_model": 96, "d_kv": 16, "d_ff": 192, "num_layers": 3, "num_heads": 6}
    config = transformers.T5Config(vocab_size=256, decoder_start_token_id=0, **size)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "m")

    def crossed(model):
        for block in model.decoder.block:
            own = block.layer[1].EncDecAttention.o
            own.forward = lambda x, own=own, forward=own.forward: forward(x) * 1.01

    how = {"prompts": PROMPTS, "max_new_tokens": 2, "dtype": "float32", "truth": "no"}
    a = capture(str(tmp_path / "m"), out=tmp_path / "a", probe=False, **how)
    verdict = answer(a, crossed).verdict

    assert verdict.kind == "systematic"
    assert "float32 inputs" not in verdict.summary
