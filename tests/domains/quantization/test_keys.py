"""Keys and values that a cache holds as codes: judged as codes, and put in place as codes."""

import functools

import pytest
import torch

from benchmarks.quantizers import PROMPTS
from divergence import BatchOptions, LoadOptions, capture, truth
from divergence.domains.quantization import model as cache
from divergence.run.site import HEAD_CODES
from tests.models import quantized

PATH = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """``runs(dtype)`` → a run with float8 keys and values, and its truth."""
    pytest.importorskip("compressed_tensors")

    @functools.cache
    def make(dtype):
        folder = tmp_path_factory.mktemp(dtype)
        source = tiny_model("llama", dtype=dtype)
        model = quantized.build(source, folder / "model", "w8a8", keys=True)
        a = capture(model, out=folder / "a", prompts=PROMPTS, max_new_tokens=8, probe=False)
        return a, truth(a, out=folder / "truth")

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_healthy_pair_passes(runs, dtype, answer):
    """Rounding flips codes of keys between 16 bits and the truth: what they lead to is no fault."""
    a, exact = runs(dtype)
    verdict = answer(a, truth=exact, attn_implementation="sdpa").verdict
    assert verdict.kind in ("within_floor", "identical")
    assert verdict.side == "neither"


@pytest.mark.slow
def test_their_codes_are_recorded_with_all_heads_of_a_token_in_a_row(runs):
    """Keys and values have one row a token, in codes and in the truth."""
    a, exact = runs("float32")
    for letter in "kv":
        site = f"{PATH}:{HEAD_CODES[letter]}"
        own, right = a.find(("free", 0, 0, site)), exact.find(("anchored", 0, 0, site))
        assert (own.dtype, right.dtype) == ("float8_e4m3fn", "float64")
        assert tuple(own.shape) == tuple(right.shape) == (1, own.shape[1], 32)


@pytest.mark.slow
def test_a_wrong_quantiser_of_keys_is_named_with_its_side(runs, monkeypatch, answer):
    """A cast that cuts off, for the keys of one layer."""
    from compressed_tensors.modeling import kvcache

    a, exact = runs("float32")
    own, wrong = kvcache.forward_quantize, []

    def forward_quantize(module, value, base_name, args):
        if base_name != "k" or module is not wrong[-1]:
            return own(module, value, base_name, args)
        steps = value / module.k_scale
        nearest = steps.to(torch.float8_e4m3fn).float()
        below = (nearest.abs() * (1 - 1 / 15)).to(torch.float8_e4m3fn).float() * nearest.sign()
        return torch.where(nearest.abs() > steps.abs(), below, nearest) * module.k_scale

    def prepare(model):
        wrong.append(model.get_submodule(PATH))

    monkeypatch.setattr(kvcache, "forward_quantize", forward_quantize)
    verdict = answer(a, prepare, truth=exact).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset.site == f"{PATH}:{HEAD_CODES['k']}"
    assert f"the codes of the keys of {PATH} are wrong, by B" in verdict.summary


def test_the_attention_that_caches_is_no_quantised_matrix(runs):
    """The note tells keys and values apart from what matrices take in."""
    a, _ = runs("float32")
    note = a.manifest.model.quantization
    assert note.name == "W8A8 + KV8"
    assert [scheme.num_modules for scheme in note.schemes] == [21]
    assert note.kept == ["lm_head"]


@pytest.fixture(scope="module")
def halves(tiny_model, tmp_path_factory):
    """A run of an encoder-decoder under ``kv8``, prompts in one batch, and its truth."""
    folder = tmp_path_factory.mktemp("t5")
    a = capture(
        tiny_model("t5", dtype="float32"),
        out=folder / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        batching=BatchOptions(batch=True),
        probe=False,
        engine="quantize",
        loading=LoadOptions(engine_options={"scheme": "kv8"}),
    )
    return a, truth(a, out=folder / "truth")


@pytest.mark.slow
def test_self_and_cross_attention_of_a_layer_are_told_apart(halves, answer):
    """Both fill a cache under one number; the encoder's keys are quantised once, in the prefill."""
    a, exact = halves
    steps = {
        name: {r.step for r in a.records if r.site == f"{SECOND}.{name}:{HEAD_CODES['k']}"}
        for name in ("layer.0.SelfAttention", "layer.1.EncDecAttention")
    }
    assert steps == {"layer.0.SelfAttention": {0, 1, 2}, "layer.1.EncDecAttention": {0}}
    verdict = answer(a, truth=exact, attn_implementation="sdpa").verdict
    assert (verdict.kind, verdict.side) == ("within_floor", "neither")


SECOND = "decoder.block.1"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer.0.SelfAttention", "layer.1.EncDecAttention"])
def test_a_wrong_quantiser_of_one_of_them_is_named(halves, name, monkeypatch, answer):
    """A cast that cuts off, where this attention fills the cache."""
    a, exact = halves
    own, wrong, inside = cache.codes_of, f"{SECOND}.{name}", [False]

    def codes_of(x, quantizer, scale, zero=None):
        if not inside[0]:
            return own(x, quantizer, scale, zero)
        return (x / torch.where(scale == 0, 1.0, scale)).trunc().to(torch.int8)

    def prepare(model):
        module = model.get_submodule(wrong)
        module.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        module.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    monkeypatch.setattr(cache, "codes_of", codes_of)
    verdict = answer(a, prepare, truth=exact).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset.site == f"{wrong}:{HEAD_CODES['k']}"
