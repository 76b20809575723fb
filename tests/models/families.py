"""Tiny models of further decoder families, for the engines that know each by its own code."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from divergence.experiments import tiny
from divergence.experiments.tiny import Architecture, Checkpoint, Shape, grouped_dimensions
from tests.models import weights
from tests.models.tiny import ARCHITECTURES
from tests.models.tiny import build as build_usual

__all__ = ["FAMILIES", "build"]


def build(family: str, directory: str | Path, **options: Any) -> Path:
    """Write a model folder and return its path; of ``tests.models.tiny`` too."""
    if family in ARCHITECTURES:
        return build_usual(family, directory, **options)
    return tiny.build(directory, architecture=FAMILIES[family], **options)


def _blocks(shape: Shape) -> list[str]:
    return [f"model.layers.{block}" for block in range(shape.num_blocks)]


def _qwen2(at: Checkpoint, shape: Shape) -> None:
    """Biases of q, k and v."""
    weights.llama_like(at, shape, kind="qwen2")
    for path in _blocks(shape):
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = len(at.tensors[f"{path}.self_attn.{name}.weight"])
            at.draw(f"{path}.self_attn.{name}.bias", rows, std=0.3)


def _phi3(at: Checkpoint, shape: Shape) -> None:
    """q, k and v are one matrix, gate and up another, in the checkpoint too."""
    weights.llama_like(at, shape, kind="phi3")
    for path in _blocks(shape):
        for whole, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            found = [at.tensors.pop(f"{path}.{part}.weight") for part in parts]
            at.tensors[f"{path}.{whole}.weight"] = np.concatenate(found)


def _olmo2(at: Checkpoint, shape: Shape) -> None:
    """Norms behind attention and MLP, and over all heads of q and of k."""
    weights.llama_like(at, shape, kind="olmo2")
    for path in _blocks(shape):
        del at.tensors[f"{path}.input_layernorm.weight"]
        at.norm(f"{path}.post_feedforward_layernorm", shape.hidden)
        for name in ("q", "k"):
            rows = len(at.tensors[f"{path}.self_attn.{name}_proj.weight"])
            at.norm(f"{path}.self_attn.{name}_norm", rows)


def _gemma2(shape: Shape) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"] * shape.num_blocks
    return grouped_dimensions(shape) | {
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": 16,
        "layer_types": layers[: shape.num_blocks],
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    }


def _granite(shape: Shape) -> dict[str, Any]:
    return grouped_dimensions(shape) | {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 2 / shape.head_dim,
        "logits_scaling": 2.0,
    }


def _family(kind: str, model_class: str, **more: Any) -> Architecture:
    values = {"model_type": kind, "dimensions": grouped_dimensions, "wrap": "bos"} | more
    values.setdefault("weights", partial(weights.llama_like, kind=kind))
    return Architecture(model_class=model_class, **values)


FAMILIES: dict[str, Architecture] = {
    "gemma2": _family("gemma2", "Gemma2ForCausalLM", dimensions=_gemma2, tied=True),
    "granite": _family("granite", "GraniteForCausalLM", dimensions=_granite),
    "mistral": _family("mistral", "MistralForCausalLM"),
    "olmo2": _family("olmo2", "Olmo2ForCausalLM", weights=_olmo2),
    "phi3": _family("phi3", "Phi3ForCausalLM", weights=_phi3),
    "qwen2": _family("qwen2", "Qwen2ForCausalLM", weights=_qwen2),
}
"""What is not in ``tests.models.tiny``, whose models every test of architectures runs."""
