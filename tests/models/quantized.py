"""Quantised checkpoints made from tiny ones: compressed-tensors' files, written by hand.

The format is config.json's ``quantization_config`` beside integer weights and their scales; none of
it needs the library, so a test that does not run the model runs everywhere.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["SCHEMES", "build", "build_float8_blocks", "config_of"]

_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 16}

SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    # format, weights, activations
    "w8a8": ("int-quantized", _CHANNEL, _TOKEN),
    "w8a8-asymmetric": ("int-quantized", _CHANNEL, _TOKEN | {"symmetric": False}),
    "w8a8-static": ("int-quantized", _CHANNEL, _STATIC),
    "w8a16": ("pack-quantized", _CHANNEL, None),
    "w4a16": ("pack-quantized", _GROUP, None),
    "fp8": ("float-quantized", _CHANNEL | {"type": "float"}, _TOKEN | {"type": "float"}),
}


def config_of(
    scheme: str, *, ignore: tuple[str, ...] = ("lm_head",), experts: bool = False
) -> dict[str, Any]:
    """``quantization_config`` of a config.json. ``experts``: they are in W4A16, the only codes that
    transformers reads of experts."""
    groups = {"group_0": _group(scheme, "Linear")}
    if experts:
        groups["group_1"] = _group("w4a16", "re:.*experts.*")
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if experts else SCHEMES[scheme][0],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


def _group(scheme: str, target: str) -> dict[str, Any]:
    form, weights, activations = SCHEMES[scheme]
    told = {"targets": [target], "weights": weights, "input_activations": activations}
    return told | {"format": form}


def build(
    source: Path,
    folder: Path,
    scheme: str,
    *,
    ignore: tuple[str, ...] = ("lm_head",),
    keys: bool = False,
) -> Path:
    """The model of ``source`` with the weights of its Linear modules quantised, in ``folder``.

    Scales are in the dtype of the weights. ``ignore``: module paths that stay as they are; routers
    and embeddings are never quantised. ``keys``: a cache holds keys and values in float8, with one
    scale for a layer's keys and one for its values.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "bert":
        ignore = ("cls.predictions.decoder",)  # the embedding
    loaded = load_file(source / "model.safetensors")
    experts = any(".experts." in name for name in loaded)
    config["quantization_config"] = config_of(scheme, ignore=ignore, experts=experts)
    if keys:
        config["quantization_config"]["kv_cache_scheme"] = _STATIC | {"type": "float"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in loaded.items():
        path, _, last = name.rpartition(".")
        if last != "weight" or path in ignore or not path.endswith(_QUANTISED):
            tensors[name] = tensor
            continue
        form, weights, activations = SCHEMES["w4a16" if ".experts." in name else scheme]
        tensors |= {f"{path}.{key}": value for key, value in _weight(tensor, form, weights).items()}
        if activations is not None and not activations["dynamic"]:
            tensors[f"{path}.input_scale"] = torch.tensor([4 / 127.5], dtype=tensor.dtype)
        if keys and path.endswith((".k_proj", ".v_proj")):
            attention, letter = path[: -len(".k_proj")], path[-len("k_proj")]
            scale = torch.tensor([4 / 448], dtype=tensor.dtype)
            tensors[f"{attention}.{letter}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_float8_blocks(source: Path, folder: Path, size: int = 32) -> Path:
    """The model with weights in float8 and a scale for each square of ``size``, as DeepSeek's."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    blocks = {"weight_block_size": [size, size], "activation_scheme": "dynamic"}
    config["quantization_config"] = {"quant_method": "fp8", **blocks}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            squares = tensor.float().unflatten(0, (-1, size)).unflatten(2, (-1, size))
            scale = squares.abs().amax((1, 3)) / 448
            codes = squares / scale[:, None, :, None]
            tensors[name] = codes.reshape(tensor.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_QUANTISED = ("_proj", "dense", "query", "key", "value")


def _weight(weight: torch.Tensor, form: str, scheme: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Its codes and scales: codes are x / scale to the nearest integer, ties to even."""
    size = scheme.get("group_size", weight.shape[1])
    grouped = weight.double().unflatten(1, (-1, size))
    top = 448.0 if scheme["type"] == "float" else (2 ** scheme["num_bits"] - 1) / 2
    scale = (grouped.abs().amax(2, keepdim=True) / top).to(weight.dtype)
    real = (grouped / scale.double()).flatten(1)
    if scheme["type"] == "float":
        codes = real.clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale.squeeze(2)}
    half = 2 ** (scheme["num_bits"] - 1)
    codes = real.round().clamp(-half, half - 1).to(torch.int8)
    if form == "pack-quantized":
        return {
            "weight_packed": _packed(codes, scheme["num_bits"]),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scale.squeeze(2),
        }
    return {"weight": codes, "weight_scale": scale.squeeze(2)}


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(M, K) → (M, K · bits / 32) int32: the first code lowest, as code + 2^(bits-1)."""
    per_word = 32 // bits
    words = (codes.to(torch.int64) + 2 ** (bits - 1)).unflatten(1, (-1, per_word))
    shifts = torch.arange(per_word) * bits
    return (words << shifts).sum(2).to(torch.int32)
