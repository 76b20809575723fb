"""Faults that mean the same in every engine: wrong weights, or one wrong number of a module.

Wrong weights are those of a wrong checkpoint; an ONNX graph gets them as its constants. It is what
an engine does that splits, packs or converts them wrongly. The others are set on the modules of
transformers or vLLM, or on the nodes of a graph: a norm's epsilon, the slope of the activation,
the frequencies of the rotary table.

Strength 1 is the whole fault, less is a smaller one of the same kind. Families of Llama alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.onnx_graphs import node_of

__all__ = ["FAULTS", "MODULES", "WEIGHTS", "faulty_checkpoint", "faulty_graph", "plant"]


# ── weights: (matrix or vector in float64, number of heads) → the wrong one ─────────────────────


def _columns(weight: torch.Tensor, _: int) -> torch.Tensor:
    """The first eighth of the columns 5% too large: a block with a wrong scale."""
    wrong = weight.clone()
    wrong[:, : weight.shape[1] // 8] *= 1.05
    return wrong


def _head(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The middle head's columns are zero."""
    wrong = weight.clone()
    wrong.view(weight.shape[0], num_heads, -1)[:, num_heads // 2] = 0
    return wrong


def _scale(weight: torch.Tensor, _: int) -> torch.Tensor:
    """A scale that was not applied."""
    return torch.ones_like(weight)


def _row(weight: torch.Tensor, _: int) -> torch.Tensor:
    """The middle row is its neighbour."""
    wrong, middle = weight.clone(), len(weight) // 2
    wrong[middle] = weight[middle + 1]
    return wrong


def _tile(weight: torch.Tensor, _: int) -> torch.Tensor:
    """A tile of 16 × 16 is transposed."""
    wrong = weight.clone()
    wrong[:16, :16] = weight[:16, :16].T
    return wrong


def _int8(weight: torch.Tensor, _: int) -> torch.Tensor:
    """Rounded to 8 bits, one scale for all."""
    step = weight.abs().amax() / 127
    return (weight / step).round() * step


def _larger(weight: torch.Tensor, _: int) -> torch.Tensor:
    """5% too large: of queries, a wrong scale of attention."""
    return weight * 1.05


WEIGHTS: dict[str, tuple[tuple[str, ...], Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "columns": (("mlp.down_proj.weight",), _columns),
    "head": (("self_attn.o_proj.weight",), _head),
    "scale": (("input_layernorm.weight",), _scale),
    "row": (("mlp.down_proj.weight",), _row),
    "tile": (("mlp.gate_proj.weight",), _tile),
    "int8": (("self_attn.v_proj.weight",), _int8),
    "queries": (("self_attn.q_norm.weight", "self_attn.q_proj.weight"), _larger),
}
"""By name: the parameter (the first that the model has), and what becomes of it."""
MODULES = ("epsilon", "activation", "rotary")
FAULTS = (*WEIGHTS, *MODULES)


def faulty_checkpoint(source: Path, out: Path, name: str, block: int, strength: float) -> Path:
    """The checkpoint with wrong weights, in ``out``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    state = load_file(source / "model.safetensors")
    parameter, wrong = _wrong(source, state, name, block, strength)
    save_file(state | {parameter: wrong}, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _wrong(
    source: Path, state: dict[str, torch.Tensor], name: str, block: int, strength: float
) -> tuple[str, torch.Tensor]:
    endings, change = WEIGHTS[name]
    names = (f"model.layers.{block}.{ending}" for ending in endings)
    parameter = next(one for one in names if one in state)
    num_heads = json.loads((source / "config.json").read_text())["num_attention_heads"]
    right = state[parameter].double()
    wrong = right + strength * (change(right, num_heads) - right)
    return parameter, wrong.to(state[parameter].dtype)


# ── modules ─────────────────────────────────────────────────────────────────────────────────────


def _epsilon(strength: float) -> float:
    return 1e-2 * strength


def _slope(strength: float) -> float:
    return 1 + 0.05 * strength


def _stretch(strength: float) -> float:
    return 1 + 0.02 * strength


def plant(model: nn.Module, name: str, block: int, *, strength: float) -> None:
    """A fault of ``MODULES``, in a loaded model of transformers or vLLM."""
    inner: Any = model
    layer = inner.model.layers[block]
    if name == "epsilon":
        layer.post_attention_layernorm.variance_epsilon += _epsilon(strength)
    elif name == "activation":
        slope, act = _slope(strength), layer.mlp.act_fn
        fused = hasattr(layer.mlp, "gate_up_proj")  # vLLM's takes gate and up in one tensor

        def forward(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1) if fused else (x, None)
            out = gate * torch.sigmoid(gate * slope)
            return out if up is None else out * up

        act.forward = forward
    elif hasattr(inner.model, "rotary_emb"):
        inner.model.rotary_emb.inv_freq.mul_(_stretch(strength))
    else:  # vLLM's table, shared by all blocks: (positions, cosines and sines)
        table = layer.self_attn.rotary_emb.cos_sin_cache
        cos, sin = table.double().chunk(2, dim=-1)
        frequencies = torch.atan2(sin[1], cos[1])
        angles = torch.arange(len(table))[:, None] * frequencies * _stretch(strength)
        table.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1))


# ── graphs ──────────────────────────────────────────────────────────────────────────────────────


def faulty_graph(
    file: Path, source: Path, out: Path, name: str, block: int, strength: float
) -> Path:
    """``file`` with the fault, in ``out``; ``source`` is the checkpoint that it was made from."""
    import onnx
    from onnx import helper, numpy_helper
    from safetensors.torch import load_file

    shutil.copytree(file.parent, out)
    model = onnx.load(file)
    constants = {one.name: one for one in model.graph.initializer}
    layer = f"model.layers.{block}"
    if name in WEIGHTS:
        state = load_file(source / "model.safetensors")
        parameter, wrong = _wrong(source, state, name, block, strength)
        _replace_constant(model, state[parameter], wrong)
    elif name == "epsilon":
        node = node_of(model, f"{layer}.post_attention_layernorm", "Add")
        own = next(one for one in node.input if one in constants)
        value = numpy_helper.to_array(constants[own])
        model.graph.initializer.append(
            numpy_helper.from_array((value + _epsilon(strength)).astype(value.dtype), "faulty")
        )
        node.input[list(node.input).index(own)] = "faulty"
    elif name == "activation":
        node = node_of(model, f"{layer}.mlp.act_fn", "Sigmoid")
        dtype = next(iter(constants[n] for n in constants if n.endswith("weight"))).data_type
        slope = helper.make_tensor("slope", dtype, [], [_slope(strength)])
        model.graph.initializer.append(slope)
        steeper = helper.make_node("Mul", [node.input[0], "slope"], ["steeper"], name="steeper")
        steeper.metadata_props.extend(node.metadata_props)
        place = list(model.graph.node).index(node)
        node.input[0] = "steeper"
        model.graph.node.insert(place, steeper)
    else:
        table = next(one for one in model.graph.initializer if "inv_freq" in one.name)
        value = numpy_helper.to_array(table)
        table.raw_data = (value * _stretch(strength)).astype(value.dtype).tobytes()
    onnx.save(model, out / file.name)
    return out / file.name


def _replace_constant(model: Any, right: torch.Tensor, wrong: torch.Tensor) -> None:
    """Of the constants that one which holds ``right``, as it is or transposed."""
    found = 0
    for one in model.graph.initializer:
        if math.prod(one.dims) != right.numel():
            continue
        for turned in (False, True) if right.ndim == 2 else (False,):
            if one.raw_data == _bytes(right.T if turned else right):
                one.raw_data = _bytes(wrong.T if turned else wrong)
                found += 1
                break
    assert found == 1, f"{found} constants hold the parameter"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
