"""Tiny random models of real architectures, for tests and benchmarks.

They are made as the demo's Llama is (divergence/experiments/tiny.py): each is lively, and has
the same bytes on every machine.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from divergence.errors import UsageError
from divergence.experiments import tiny
from divergence.experiments.tiny import (
    LLAMA,
    MAX_POSITIONS,
    PAD,
    Architecture,
    Shape,
    grouped_dimensions,
)
from divergence.run.site import near_names
from tests.models import weights

__all__ = ["ARCHITECTURES", "build"]

_ALWAYS_TIED = frozenset({"bert", "t5"})
_NEVER_TIED = frozenset({"remote-code"})


def build(architecture: str, directory: str | Path, **options: Any) -> Path:
    """Write a model folder and return its path.

    ``options`` are those of ``divergence.experiments.tiny.build``. An encoder-decoder has
    ``num_blocks`` in each half.
    """
    if architecture not in _KNOWN:
        near = near_names(architecture, ARCHITECTURES) or ARCHITECTURES
        raise UsageError(f"no tiny model {architecture!r}", hint=f"use {', '.join(near)}")
    tied = options.get("tied")
    if architecture in (_ALWAYS_TIED if tied is False else _NEVER_TIED if tied else ()):
        raise UsageError(
            f"embeddings of {architecture} are {'never' if tied else 'always'} tied",
            hint="leave tied as None",
        )
    directory = tiny.build(directory, architecture=_KNOWN[architecture], **options)
    generation = directory / "generation_config.json"
    if architecture == "bert":
        generation.unlink()
    elif architecture == "t5":
        content = json.loads(generation.read_text()) | {"decoder_start_token_id": PAD}
        generation.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    elif architecture == "remote-code":
        source = Path(__file__).with_name("remote_code.py").read_text(encoding="utf-8")
        (directory / "modeling_tiny.py").write_text(source, encoding="utf-8")
    return directory


# --- sizes, as each architecture's config.json calls them ---------------------------------------


def _common(shape: Shape) -> dict[str, Any]:
    sizes = grouped_dimensions(shape)
    return {key: sizes[key] for key in sizes if key not in ("num_key_value_heads", "head_dim")}


def _gemma3(shape: Shape) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"] * shape.num_blocks
    return grouped_dimensions(shape) | {
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": 16,
        "layer_types": layers[: shape.num_blocks],
    }


def _mixtral(shape: Shape) -> dict[str, Any]:
    return grouped_dimensions(shape) | {
        "num_local_experts": weights.NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": shape.hidden,
    }


def _qwen3_moe(shape: Shape) -> dict[str, Any]:
    return grouped_dimensions(shape) | {
        "num_experts": weights.NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.hidden,
        "norm_topk_prob": True,
    }


def _gpt2(shape: Shape) -> dict[str, Any]:
    return {
        "n_embd": shape.hidden,
        "n_layer": shape.num_blocks,
        "n_head": shape.num_heads,
        "n_inner": shape.mlp,
        "n_positions": MAX_POSITIONS,
    }


def _mamba(shape: Shape) -> dict[str, Any]:
    return {"hidden_size": shape.hidden, "num_hidden_layers": shape.num_blocks, "state_size": 16}


def _mamba2(shape: Shape) -> dict[str, Any]:
    return _mamba(shape) | {
        "head_dim": 16,
        "num_heads": 2 * shape.hidden // 16,
        "n_groups": 2,
        "chunk_size": 16,
    }


def _t5(shape: Shape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden,
        "d_kv": shape.head_dim,
        "d_ff": shape.mlp,
        "num_layers": shape.num_blocks,
        "num_decoder_layers": shape.num_blocks,
        "num_heads": shape.num_heads,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": PAD,
    }


def _remote(shape: Shape) -> dict[str, Any]:
    classes = {
        "AutoConfig": "modeling_tiny.TinyRemoteConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyRemoteForCausalLM",
    }
    return _common(shape) | {"auto_map": classes}


# --- the models ---------------------------------------------------------------------------------


def _decoder(kind: str, model_class: str, dimensions: Any = None, **more: Any) -> Architecture:
    """A model of Llama's design."""
    fill = partial(weights.llama_like, kind=kind)
    return _own(kind.replace("-", "_"), model_class, dimensions or grouped_dimensions, fill, **more)


def _own(kind: str, model_class: str, dimensions: Any, fill: Any, **more: Any) -> Architecture:
    values = {"model_type": kind, "dimensions": dimensions, "weights": fill} | more
    return Architecture(model_class=model_class, **values)


_MAMBA, _MAMBA2 = (partial(weights.mamba, version=version) for version in (1, 2))
_GEMMA3 = {"model_type": "gemma3_text", "wrap": "bos", "tied": True}
_KNOWN: dict[str, Architecture] = {
    "bert": _own("bert", "BertForMaskedLM", _common, weights.bert, wrap="both", tied=True),
    "gemma3": _decoder("gemma3", "Gemma3ForCausalLM", _gemma3, **_GEMMA3),
    "gpt2": _own("gpt2", "GPT2LMHeadModel", _gpt2, weights.gpt2, tied=True),
    "llama": LLAMA,
    "mamba": _own("mamba", "MambaForCausalLM", _mamba, _MAMBA, tied=True),
    "mamba2": _own("mamba2", "Mamba2ForCausalLM", _mamba2, _MAMBA2, tied=True),
    "mixtral": _decoder("mixtral", "MixtralForCausalLM", _mixtral, wrap="bos"),
    "qwen3": _decoder("qwen3", "Qwen3ForCausalLM", tied=True),
    "qwen3-moe": _decoder("qwen3-moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "remote-code": _own(
        "tiny_remote", "TinyRemoteForCausalLM", _remote, weights.remote, wrap="bos"
    ),
    "t5": _own("t5", "T5ForConditionalGeneration", _t5, weights.t5, wrap="eos", tied=True),
}
ARCHITECTURES: tuple[str, ...] = tuple(_KNOWN)
"""What ``build`` knows."""
