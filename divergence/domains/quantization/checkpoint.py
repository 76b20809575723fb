"""A model's quantisation: its configuration, and the modules that are really there.

compressed-tensors leaves the scheme of each module on it, torchao a tensor class in place of the
weight; of what else transformers loads (GPTQ, AWQ, FP8 in blocks, GGUF, bitsandbytes) the
configuration tells scheme and bits, and a module's class that it holds codes. Where the codes
were widened when the weights were loaded, as transformers does with GGUF and FP8 blocks on a
CPU, no module holds any, and the note says so: such a run is one of plain floating-point
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from divergence.recording.code import quantized_by
from divergence.run.manifest import QuantizationNote, QuantizedNumbers, QuantizedScheme
from divergence.run.site import escape_path, starred

_GRANULARITIES = {
    "tensor": "tensor",
    "channel": "channel",
    "token": "token",
    "group": "group",
    "block": "block",
    "tensor_group": "group",
    "attn_head": "head",
}


_Numbers = tuple[QuantizedNumbers | None, QuantizedNumbers | None]
"""Of weights and activations; neither where only the configuration may know."""


def identity(model: nn.Module, config: Any = None) -> dict[str, QuantizationNote | None]:
    """Fields of the manifest's model. ``config``: what the checkpoint says of quantisation."""
    return {"quantization": quantization_of(model, config)}


def quantization_of(model: nn.Module, config: Any = None) -> QuantizationNote | None:
    """None for a model without a quantisation config and without quantised modules. ``config``:
    that of the checkpoint."""
    own = getattr(getattr(model, "config", None), "quantization_config", None)
    config = _plain(own if own is not None else config)
    schemes: dict[_Numbers, list[str]] = {}
    kept: list[str] = []
    for path, module in model.named_modules():
        # of compressed-tensors' attentions what is quantised are keys and values
        if hasattr(module, "kv_cache") or type(module).__name__ == "QuantizedKVCache":
            continue
        numbers = _module_numbers(module)
        if any(numbers) or quantized_by(module):
            schemes.setdefault(numbers, []).append(path)
        elif _has_matrix(module):
            kept.append(path)
    if config is None and not schemes:
        return None
    dequantized = not schemes
    config = config or {}
    if not any(any(numbers) for numbers in schemes):
        schemes = {_config_numbers(config): [path for paths in schemes.values() for path in paths]}
    return QuantizationNote(
        method=str(config.get("quant_method") or "unknown"),
        format=config.get("format"),
        schemes=[
            QuantizedScheme(
                weights=weights,
                activations=activations,
                modules=_places(paths),
                num_modules=len(paths),
            )
            for (weights, activations), paths in schemes.items()
            if weights or activations
        ],
        kv_cache=_numbers(config.get("kv_cache_scheme")),
        kept=[] if dequantized else _places(kept),
        dequantized=dequantized,
    )


def _plain(config: Any) -> dict[str, Any] | None:
    """Return the value as config.json has it."""
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    method = values.get("quant_method")
    return {**values, "quant_method": getattr(method, "value", method)}


def _places(paths: Iterable[str]) -> list[str]:
    return sorted({starred(escape_path(path)) for path in paths})


def _has_matrix(module: nn.Module) -> bool:
    """Has it weights that schemes are for? Embeddings are looked up, not multiplied."""
    if isinstance(module, nn.Embedding):
        return False
    return any(
        weight is not None and weight.ndim >= 2 and weight.is_floating_point()
        for weight in module._parameters.values()
    )


def _module_numbers(module: nn.Module) -> _Numbers:
    """Return what compressed-tensors or torchao left on a module."""
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is not None:
        values = scheme if isinstance(scheme, Mapping) else scheme.model_dump()
        return _numbers(values.get("weights")), _numbers(values.get("input_activations"))
    weight = module._parameters.get("weight")
    codes = None if weight is None else getattr(weight, "qdata", None)
    return (None, None) if codes is None else _torchao_numbers(weight, codes)


def _numbers(args: Any) -> QuantizedNumbers | None:
    """compressed-tensors' arguments of weights, activations or the KV cache."""
    if args is None:
        return None
    values = args if isinstance(args, Mapping) else args.model_dump()
    per = _word(values.get("strategy"))
    return QuantizedNumbers(
        kind="float" if _word(values.get("type")) == "float" else "int",
        bits=int(values.get("num_bits", 8)),
        per=cast(Any, _GRANULARITIES.get(per, "group" if values.get("group_size") else "tensor")),
        group_size=values.get("group_size"),
        symmetric=bool(values.get("symmetric", True)),
        dynamic=values.get("dynamic") not in (False, None),
    )


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _torchao_numbers(weight: Any, codes: Any) -> _Numbers:
    """``qdata``, ``block_size`` and what is to be done with activations, of its tensor classes."""
    float8 = codes.is_floating_point()
    rows, *_, size = (*weight.block_size, weight.shape[-1])[:2]
    target = str(getattr(weight, "target_dtype", ""))
    bits = int(target[-1]) if target[-1:].isdecimal() and "int" in target else 8
    zero = getattr(weight, "zero_point", None)
    per = "tensor" if rows == weight.shape[0] > 1 else "channel"
    if size != weight.shape[-1]:
        per = "block" if rows > 1 else "group"
    weights = QuantizedNumbers(
        kind="float" if float8 else "int",
        bits=bits,
        per=cast(Any, per),
        group_size=size if per == "group" else None,
        symmetric=zero is None or not bool(zero.any()),
    )
    asked = getattr(weight, "act_quant_kwargs", None)
    named = getattr(weight, "activation_quantization", None)
    activations = None
    if asked is not None or named is not None:
        text = f"{asked} {named}".lower()
        activations = QuantizedNumbers(
            kind="float" if "float8" in text else "int",
            bits=8,
            per="tensor" if "pertensor" in text or "per_tensor" in text else "token",
            symmetric="asym" not in text,
            dynamic=getattr(weight, "act_quant_scale", None) is None,
        )
    return weights, activations


def _config_numbers(config: Mapping[str, Any]) -> _Numbers:
    """Return what a configuration says where no module does; neither where it is not understood."""
    method, numbers = config.get("quant_method"), QuantizedNumbers
    if method == "compressed-tensors":
        groups = list((config.get("config_groups") or {}).values())
        if len(groups) == 1:
            return _numbers(groups[0].get("weights")), _numbers(groups[0].get("input_activations"))
    if method in ("gptq", "awq"):
        size, bits = int(config.get("group_size") or -1), int(config.get("bits", 4))
        symmetric = bool(config.get("sym", not config.get("zero_point", False)))
        if size > 0:
            weights = numbers(
                kind="int", bits=bits, per="group", group_size=size, symmetric=symmetric
            )
        else:
            weights = numbers(kind="int", bits=bits, per="channel", symmetric=symmetric)
        return weights, None
    if method == "fp8":
        dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
        if blocks := config.get("weight_block_size"):
            activations = numbers(
                kind="float", bits=8, per="group", group_size=blocks[-1], dynamic=dynamic
            )
            return numbers(kind="float", bits=8, per="block"), activations
        weights = numbers(kind="float", bits=8, per="tensor")
        return weights, numbers(kind="float", bits=8, per="tensor", dynamic=dynamic)
    if method == "bitsandbytes":
        if config.get("load_in_4bit") or config.get("_load_in_4bit"):
            return numbers(kind="float", bits=4, per="group", group_size=64), None
        return numbers(kind="int", bits=8, per="channel"), None
    return None, None
