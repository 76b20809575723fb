"""The tiny random models of the reports: real architectures, lively weights, fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

__all__ = ["MODELS", "NUM_BLOCKS", "PAIRED_VOCABULARY", "make"]

NUM_BLOCKS = 4
PAIRED_VOCABULARY = 1000
"""Random prompts hold ids below this one; a case has those above it for itself."""

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PARTS = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}


def _of(model_type: str, **more: Any) -> Callable[[], Any]:
    return lambda: transformers.AutoConfig.for_model(model_type, **{**_COMMON, **more})


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _of("llama", rms_norm_eps=1e-5),
    "llama-theta": _of("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    "llama-scaled": _of("llama", rope_parameters=_LLAMA3, max_position_embeddings=512),
    "llama-tied": _of("llama", tie_word_embeddings=True),
    "qwen3": _of("qwen3", head_dim=32, rms_norm_eps=1e-5),
    "mistral": _of("mistral", sliding_window=4),
    "qwen2": _of(
        "qwen2",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "gemma2": _of("gemma2", **_PARTS),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=1024,
        n_embd=128,
        n_layer=NUM_BLOCKS,
        n_head=4,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        intermediate_size=256,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=NUM_BLOCKS,
        state_size=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}
MODELS: tuple[str, ...] = tuple(_CONFIGS)


def make(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the model. Biases and the weights of norms are random as well: a bias of zeros or a
    norm of ones would hide what is done to it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name]())
    for parameter, value in model.named_parameters():
        if parameter.endswith("bias") and "mixer" not in parameter:
            value.data.normal_(0, 0.1)
        elif "norm" in parameter and value.ndim == 1:
            value.data.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    return folder
