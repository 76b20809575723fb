"""Names, and cuts, of the programs that store one architecture in ways of their own.

Each program's names are read as those of transformers' Llama, which most architectures share:
Megatron's of two ages, Meta's, Mixtral's. Experts that one side keeps in one tensor are taken apart
where the other side stores each by itself. GGUF files say their architecture: of some, llama.cpp
wants the rows of queries and keys of each head as pairs, and norms with 1 added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import torch

from divergence.domains.weights.checkpoint import Stored, StoredWeights


@dataclass(frozen=True, slots=True)
class _Program:
    """``known_by``: what a name of it holds; ``names``: what each part of it becomes."""

    name: str
    known_by: str
    names: tuple[tuple[str, str], ...]


_MEGATRON = (
    (r"^(module\.|model\.)*(language_model\.)?", ""),
    (r"^(encoder|transformer|decoder)\.layers\.(\d+)\.", r"model.layers.\2."),
    (r"^(encoder|decoder|transformer)\.(final_layernorm|final_norm)\.", "model.norm."),
    (r"^embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"^output_layer\.", "lm_head."),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".post_attention_layernorm."),
    (r"\.(pre_mlp_layernorm|post_attention_norm)\.", ".post_attention_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.(self_)?attention\.(linear_qkv|query_key_value)\.", ".self_attn.qkv_proj."),
    (r"\.(self_)?attention\.(linear_proj|dense)\.", ".self_attn.o_proj."),
    (r"\.(self_)?attention\.([qk])_layernorm\.", r".self_attn.\2_norm."),
    (r"\.mlp\.router\.", ".mlp.gate."),
    (r"\.experts\.local_experts\.", ".experts."),
    (r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.\2.\1.weight"),
    (r"\.(linear_fc1|dense_h_to_4h)\.", ".gate_up_proj."),
    (r"\.(linear_fc2|dense_4h_to_h)\.", ".down_proj."),
)
_EXPERTS = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
)
_META = (
    (r"^layers\.", "model.layers."),
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
)
_PROGRAMS = (
    _Program("Megatron", r"\.linear_(qkv|fc1)\.|\.dense_h_to_4h\..*\.layers\.", _MEGATRON),
    _Program("Megatron", r"^(model\.|module\.)*language_model\.(encoder|transformer)\.", _MEGATRON),
    _Program("Mixtral", r"\.block_sparse_moe\.", _EXPERTS),
    _Program("Meta", r"^layers\.\d+\.(attention\.wq|feed_forward\.w1)\.", _META),
)
_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)$")
IN_GROUPS = re.compile(r"\.(linear_qkv|query_key_value)\.")
"""Layers whose program keeps queries, keys and values together, group by group."""


def renamed(weights: StoredWeights) -> tuple[StoredWeights, dict[str, str], str | None]:
    """The checkpoint by transformers' names, these names' own → the file's, and whose names it has;
    None where they are no program's of its own."""
    for program in _PROGRAMS:
        if not any(re.search(program.known_by, name) for name in weights.tensors):
            continue
        tensors, own = {}, {}
        for name, stored in weights.tensors.items():
            new = name
            for pattern, part in program.names:
                new = re.sub(pattern, part, new)
            tensors[new], own[new] = stored, name
        if len(tensors) == len(weights.tensors):
            return replace(weights, tensors=tensors), own, program.name
    return weights, {}, None


def split_experts(weights: StoredWeights, other: StoredWeights) -> StoredWeights:
    """Gives each expert its own matrix, where the other side has them so."""
    if not any(re.search(r"\.experts\.\d+\.", name) for name in other.tensors):
        return weights
    tensors: dict[str, Stored] = {}
    for name, stored in weights.tensors.items():
        match = _STACKED.match(name)
        if match is None or len(stored.shape) != 3:
            tensors[name] = stored
            continue
        for number in range(stored.shape[0]):
            part = replace(stored, shape=stored.shape[1:], read=partial(_row, stored, number))
            tensors[f"{match[1]}.{number}.{match[2]}.weight"] = part
    return replace(weights, tensors=tensors)


def _row(stored: Stored, number: int) -> torch.Tensor:
    return stored.read()[number] if stored.row is None else stored.row(number)


_PAIRS = frozenset(
    "arcee arctic baichuan deci deepseek granite granitemoe internlm2 llama minicpm olmo smollm3 "
    "xverse".split()
)
_ONE_MORE = frozenset("gemma gemma2 gemma3 nemotron qwen3next".split())
"""Architectures as llama.cpp's convert_hf_to_gguf.py stores them: rows of queries and keys in pairs
(``permute``), and norms with 1 added."""


def wanted_of(program: str | None, name: str) -> str | None:
    """How this parameter is stored by that program: ``pairs``, ``shifted``, or as it is."""
    kind = (program or "").removeprefix("llama.cpp's ")
    if re.search(r"\.[qk]_proj\.|\.attn_[qk]\.", name) and (kind in _PAIRS or kind == "Meta"):
        return "pairs"
    is_norm = name.endswith("norm.weight") and "linear_attn" not in name
    return "shifted" if is_norm and kind in _ONE_MORE else None
