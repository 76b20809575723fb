"""Tiny random models of real architectures, for the demo, the tests and the docs.

``build`` writes a complete Hugging Face folder (config, safetensors weights, tokenizer, chat
template) that ``AutoModel*`` and ``AutoTokenizer`` load offline. It writes the Hub's own names and
shapes, without importing transformers: the same folder serves every release of it.

The default initialisation of transformers (std 0.02) gives a model in which nothing happens: blocks
add next to nothing, attention is uniform, logits are flat, and a fault planted in it is found or
missed for the wrong reasons. _tiny_weights.py tells how these models are scaled instead, and why
the same seed gives the same bytes on every machine.

It refuses to be a benchmark of quality: the models know nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from divergence.errors import RunExistsError, UsageError
from divergence.recording.engines import _tiny_tokenizer as text
from divergence.recording.engines._tiny_weights import (
    MAX_POSITIONS,
    NUM_EXPERTS,
    SIZES,
    WEIGHTS,
    Checkpoint,
    Dtype,
    Shape,
    Size,
)
from divergence.run.schema.site import near_names

__all__ = ["ARCHITECTURES", "build"]

ARCHITECTURES: tuple[str, ...] = tuple(sorted(WEIGHTS))
"""What ``build`` knows."""

_CLASSES = {
    "bert": "BertForMaskedLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "remote-code": "TinyRemoteForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3-moe": "qwen3_moe", "remote-code": "tiny_remote"}
_TIED = frozenset({"bert", "gemma3", "gpt2", "mamba", "mamba2", "qwen3", "t5"})
_ALWAYS_TIED = frozenset({"bert", "t5"})
_NEVER_TIED = frozenset({"remote-code"})
_WRAP: dict[str, Literal["bos", "eos", "both"]] = {
    "bert": "both",
    "gemma3": "bos",
    "llama": "bos",
    "mixtral": "bos",
    "remote-code": "bos",
    "t5": "eos",
}
"""Special tokens that the tokenizer puts around a text; the others put none."""


def build(
    architecture: str,
    directory: str | Path,
    *,
    size: Size = "test",
    seed: int = 0,
    dtype: Dtype = "bfloat16",
    num_blocks: int | None = None,
    hidden: int | None = None,
    tied: bool | None = None,
    chat_template: bool = True,
) -> Path:
    """Write a model folder and return its path; ``directory`` must be empty or absent.

    ``size``: "test" (3 blocks, hidden 64, vocabulary 512) or "demo" (12 blocks, hidden 256,
    vocabulary 2048); ``num_blocks`` and ``hidden`` replace its values. ``tied``: whether the output
    matrix is the input embedding; None takes what the architecture's own checkpoints do. An
    encoder-decoder has ``num_blocks`` in each half.
    """
    directory = Path(directory)
    shape = _choose(architecture, size, num_blocks, hidden, tied)
    if dtype not in get_args(Dtype):
        raise UsageError(
            f"a tiny model cannot have dtype {dtype!r}", hint=f"use {', '.join(get_args(Dtype))}"
        )
    if seed < 0:
        raise UsageError(f"a seed cannot be negative, got {seed}", hint="use 0 or more")
    if directory.is_dir() and any(directory.iterdir()):
        raise RunExistsError(
            "the folder for the model is not empty",
            where=str(directory),
            hint="name a new folder, or remove this one",
        )
    directory.mkdir(parents=True, exist_ok=True)

    checkpoint = Checkpoint(seed)
    WEIGHTS[architecture](checkpoint, shape)
    checkpoint.save(directory / "model.safetensors", dtype)
    text.write_tokenizer(
        directory,
        vocab_size=shape.vocab,
        wrap=_WRAP.get(architecture, "none"),
        chat_template=chat_template,
    )
    tokens = {"pad_token_id": text.PAD, "bos_token_id": text.BOS, "eos_token_id": text.EOS}
    if architecture == "t5":
        tokens["decoder_start_token_id"] = text.PAD
    config = {
        "architectures": [_CLASSES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "torch_dtype": dtype,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        **tokens,
        **_dimensions(architecture, shape),
    }
    _write_json(directory / "config.json", config)
    if architecture != "bert":
        _write_json(directory / "generation_config.json", {"do_sample": False, **tokens})
    if architecture == "remote-code":
        source = Path(__file__).with_name("_tiny_remote.py").read_text(encoding="utf-8")
        (directory / "modeling_tiny.py").write_text(source, encoding="utf-8")
    return directory


def _choose(
    architecture: str, size: str, num_blocks: int | None, hidden: int | None, tied: bool | None
) -> Shape:
    if architecture not in WEIGHTS:
        near = near_names(architecture, ARCHITECTURES) or ARCHITECTURES
        raise UsageError(f"no tiny model {architecture!r}", hint=f"use {', '.join(near)}")
    if size not in SIZES:
        raise UsageError(f"no size {size!r}", hint=f"use {', '.join(SIZES)}")
    shape = SIZES[size]
    if num_blocks is not None:
        shape = replace(shape, num_blocks=num_blocks)
    if hidden is not None:
        shape = replace(shape, hidden=hidden)
    # Even head dims for rotary embeddings; Mamba's heads of 16 divide what this divides.
    unit = 2 * shape.num_heads
    if shape.num_blocks < 1 or shape.hidden < unit or shape.hidden % unit:
        raise UsageError(
            f"{shape.num_blocks} blocks of hidden size {shape.hidden} make no model",
            hint=f"use at least 1 block and a hidden size divisible by {unit}",
        )
    if tied is None:
        tied = architecture in _TIED
    if (architecture in _ALWAYS_TIED and not tied) or (architecture in _NEVER_TIED and tied):
        raise UsageError(
            f"embeddings of {architecture} are {'never' if tied else 'always'} tied",
            hint="leave tied as None",
        )
    return replace(shape, tied=tied)


def _dimensions(architecture: str, shape: Shape) -> dict[str, Any]:
    """The part of config.json that states sizes, in each architecture's own words."""
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_blocks,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": MAX_POSITIONS,
    }
    grouped = {"num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    match architecture:
        case "llama" | "qwen3":
            return common | grouped
        case "gemma3":
            layers = ["sliding_attention", "full_attention"] * shape.num_blocks
            return (
                common
                | grouped
                | {
                    "query_pre_attn_scalar": shape.head_dim,
                    "sliding_window": 16,
                    "layer_types": layers[: shape.num_blocks],
                }
            )
        case "mixtral":
            experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
            return common | grouped | experts | {"intermediate_size": shape.hidden}
        case "qwen3-moe":
            return (
                common
                | grouped
                | {
                    "num_experts": NUM_EXPERTS,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": shape.hidden,
                    "norm_topk_prob": True,
                }
            )
        case "gpt2":
            return {
                "n_embd": shape.hidden,
                "n_layer": shape.num_blocks,
                "n_head": shape.num_heads,
                "n_inner": shape.mlp,
                "n_positions": MAX_POSITIONS,
            }
        case "mamba":
            return {
                "hidden_size": shape.hidden,
                "num_hidden_layers": shape.num_blocks,
                "state_size": 16,
            }
        case "mamba2":
            return {
                "hidden_size": shape.hidden,
                "num_hidden_layers": shape.num_blocks,
                "state_size": 16,
                "head_dim": 16,
                "num_heads": 2 * shape.hidden // 16,
                "n_groups": 2,
                "chunk_size": 16,
            }
        case "t5":
            return {
                "d_model": shape.hidden,
                "d_kv": shape.head_dim,
                "d_ff": shape.mlp,
                "num_layers": shape.num_blocks,
                "num_decoder_layers": shape.num_blocks,
                "num_heads": shape.num_heads,
                "feed_forward_proj": "gated-gelu",
            }
        case "remote-code":
            name = "modeling_tiny"
            classes = {
                "AutoConfig": f"{name}.TinyRemoteConfig",
                "AutoModelForCausalLM": f"{name}.TinyRemoteForCausalLM",
            }
            return common | {"auto_map": classes}
        case _:
            return common


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
