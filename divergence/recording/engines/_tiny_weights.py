"""Weights of the tiny models, in the names and shapes of the Hub.

*Lively.* Each matrix is scaled by what flows through it, so that something happens in every block:

    residual stream   unit rms at the embedding; each sublayer adds rms ``update`` to it, so the
                      relative update falls from about 1 to 0.3 with depth, as in trained models
    attention scores  std 2 before the softmax: peaked, not one-hot
    logits            std 3: the gap top1 - top2 is about 3 / sqrt(2 ln V), near 0.8, often a tie
    norm weights      1 ± 0.25, so that leaving one out is seen
    sink              where the tokenizer puts <|bos|> first and embeddings are not tied, that token
                      carries two massive channels, 15 to 20 times the norm of the others

Tied embeddings start smaller (their std serves the logits) and the updates are twice as large as
they, so the first block overwrites most of them; else each token would predict itself.

*Reproducible.* All noise is the sum of four 16-bit pieces of PCG64's raw output, whose stream NumPy
guarantees: near-normal (excess kurtosis -0.3), exact integers, no exp or log, so no bit depends on
libm, the instruction set or torch's generators. One multiplication, one addition and one rounding
to the dtype follow, each correctly rounded by IEEE 754. A weight depends on the seed, its name and
its shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file

from divergence.recording.engines import _tiny_tokenizer as text

__all__ = [
    "MAX_POSITIONS",
    "NUM_EXPERTS",
    "SIZES",
    "WEIGHTS",
    "Checkpoint",
    "Dtype",
    "Shape",
    "Size",
]

Dtype = Literal["bfloat16", "float16", "float32"]
Size = Literal["test", "demo"]

_LOGIT_STD = 3.0
_SCORE_STD = 2.0
_NORM_STD = 0.25
_SINK = 20.0
"""Norm of the sink token over the norm that the others reach at the last block."""
_ATTENDED_RMS = 0.55
"""Rms of a softmax average of unit values at that score std: measured, 0.43-0.75."""
_SWIGLU_RMS = 0.60
"""sqrt(E[silu(g)^2] E[u^2]) for unit normals."""
_GELU_RMS = 0.65
"""sqrt(E[gelu(g)^2]) for a unit normal."""
_SCAN_RMS = 1.5
"""Rms of what Mamba's scan and gate leave: measured, 1.4-1.8. Mamba 2 normalises it to 1."""
_RELU2_RMS = 1.22
"""sqrt(E[relu(g)^4]) = sqrt(3/2)."""
MAX_POSITIONS = 512
NUM_EXPERTS = 4
"""Two of them per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a checkpoint is built from. ``update``: rms that a sublayer adds, see the module."""

    num_blocks: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def mlp(self) -> int:
        return 3 * self.hidden

    @property
    def head_std(self) -> float:
        """Of a row of the output matrix: a normed state times it has std ``_LOGIT_STD``."""
        return _LOGIT_STD / math.sqrt(self.hidden)


SIZES: dict[str, Shape] = {
    "test": Shape(num_blocks=3, hidden=64, num_heads=4, num_kv_heads=2, vocab=512),
    "demo": Shape(num_blocks=12, hidden=256, num_heads=8, num_kv_heads=4, vocab=2048),
}


class Checkpoint:
    """Tensors by name, drawn one by one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tensors: dict[str, np.ndarray] = {}

    def draw(self, name: str, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        """Near-normal float64 noise, stored and returned."""
        generator = np.random.PCG64([self.seed, *name.encode()])
        raw = generator.random_raw(math.prod(shape)).astype("<u8", copy=False)
        total = raw.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
        # The sum of four uniforms on 0..65535: mean 131070, variance 65536^2 / 3 up to 2^-32.
        noise = (total - 131070) * (std * math.sqrt(3) / 65536) + mean
        return self.tensors.setdefault(name, noise.reshape(shape))

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """(out, in): unit inputs give outputs of std ``gain``."""
        self.draw(name + ".weight", rows, columns, std=gain / math.sqrt(columns))

    def dense(
        self, name: str, rows: int, columns: int, *, gain: float = 1.0, transposed: bool = False
    ) -> None:
        """The same with a bias, as BERT and GPT-2 have it; GPT-2 stores (in, out)."""
        shape = (columns, rows) if transposed else (rows, columns)
        self.draw(name + ".weight", *shape, std=gain / math.sqrt(columns))
        self.draw(name + ".bias", rows, std=0.1 * gain)

    def norm(self, name: str, size: int, *, mean: float = 1.0, shift: float = 0.0) -> None:
        """Weights about ``mean``; ``shift`` where the model adds a constant to what is stored."""
        self.draw(name + ".weight", size, std=_NORM_STD * mean, mean=mean - shift)

    def layer_norm(self, name: str, size: int) -> None:
        self.norm(name, size)
        self.draw(name + ".bias", size, std=0.1)

    def head(self, name: str, shape: Shape) -> None:
        """Output rows. Special tokens are kept small, so that greedy text does not stop at once."""
        rows = self.draw(name + ".weight", shape.vocab, shape.hidden, std=shape.head_std)
        rows[: text.NUM_SPECIAL] *= 0.25

    def save(self, path: Path, dtype: Dtype) -> None:
        tensors = {
            # float64 -> float32 -> dtype: two roundings, the same ones everywhere.
            name: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, dtype))
            for name, value in self.tensors.items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def _embedding(at: Checkpoint, name: str, shape: Shape, *, head: str, updates: int) -> float:
    """Input and output embeddings; returns the rms that each of ``updates`` sublayers is to add."""
    if shape.tied:
        at.head(name, shape)
        return 2.0 * shape.head_std
    update = 0.7
    rows = at.draw(name + ".weight", shape.vocab, shape.hidden, std=1.0)
    final_norm = math.sqrt(shape.hidden * (1 + updates * update**2))
    channels = (shape.hidden // 5, shape.hidden // 2)
    rows[text.BOS, channels] = np.array([1.0, -1.0]) * _SINK * final_norm / math.sqrt(2)
    at.head(head, shape)
    return update


def _swiglu(at: Checkpoint, path: str, shape: Shape, *, size: int, out: float, names: str) -> None:
    gate, up, down = (f"{path}.{name}" for name in names.split())
    at.linear(gate, size, shape.hidden)
    at.linear(up, size, shape.hidden)
    at.linear(down, shape.hidden, size, gain=out / _SWIGLU_RMS)


def _experts(at: Checkpoint, path: str, shape: Shape, *, out: float, names: str) -> None:
    """Two experts per token, weights summing to 1: the result is a mean of two, hence sqrt(2)."""
    at.linear(f"{path}.gate", NUM_EXPERTS, shape.hidden, gain=1.5)
    for expert in range(NUM_EXPERTS):
        where = f"{path}.experts.{expert}"
        _swiglu(at, where, shape, size=shape.hidden, out=out * math.sqrt(2), names=names)


def _llama_like(at: Checkpoint, shape: Shape, *, kind: str) -> None:
    """Llama, Qwen3, Gemma 3, Mixtral and Qwen3-MoE: pre-norm, rotary, grouped heads."""
    gemma = kind == "gemma3"
    qk_norm = kind in ("qwen3", "qwen3-moe", "gemma3")
    score_gain = math.sqrt(_SCORE_STD)
    update = _embedding(
        at, "model.embed_tokens", shape, head="lm_head", updates=2 * shape.num_blocks
    )
    if gemma:
        update *= math.sqrt(shape.hidden)  # Gemma scales embeddings by this
    shift = 1.0 if gemma else 0.0  # Gemma stores weight - 1
    q, kv = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    for block in range(shape.num_blocks):
        path = f"model.layers.{block}"
        at.norm(f"{path}.input_layernorm", shape.hidden, shift=shift)
        at.linear(f"{path}.self_attn.q_proj", q, shape.hidden, gain=score_gain)
        at.linear(f"{path}.self_attn.k_proj", kv, shape.hidden, gain=score_gain)
        at.linear(f"{path}.self_attn.v_proj", kv, shape.hidden)
        at.linear(f"{path}.self_attn.o_proj", shape.hidden, q, gain=update / _ATTENDED_RMS)
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                where = f"{path}.self_attn.{name}"
                at.norm(where, shape.head_dim, mean=score_gain, shift=shift)
        if gemma:
            at.norm(f"{path}.post_attention_layernorm", shape.hidden, mean=update, shift=1.0)
            at.norm(f"{path}.pre_feedforward_layernorm", shape.hidden, shift=1.0)
            at.norm(f"{path}.post_feedforward_layernorm", shape.hidden, mean=update, shift=1.0)
        else:
            at.norm(f"{path}.post_attention_layernorm", shape.hidden)
        names = "gate_proj up_proj down_proj"
        if kind == "mixtral":
            _experts(at, f"{path}.block_sparse_moe", shape, out=update, names="w1 w3 w2")
        elif kind == "qwen3-moe":
            _experts(at, f"{path}.mlp", shape, out=update, names=names)
        else:
            _swiglu(at, f"{path}.mlp", shape, size=shape.mlp, out=update, names=names)
    at.norm("model.norm", shape.hidden, shift=shift)


def _gpt2(at: Checkpoint, shape: Shape) -> None:
    hidden = shape.hidden
    updates = 2 * shape.num_blocks
    update = _embedding(at, "transformer.wte", shape, head="lm_head", updates=updates)
    at.draw("transformer.wpe.weight", MAX_POSITIONS, hidden, std=update / 4)
    for block in range(shape.num_blocks):
        path = f"transformer.h.{block}"
        at.layer_norm(f"{path}.ln_1", hidden)
        at.dense(f"{path}.attn.c_attn", 3 * hidden, hidden, gain=2**0.5, transposed=True)
        # Values share c_attn's gain of sqrt(2).
        gain = update / _ATTENDED_RMS / 2**0.5
        at.dense(f"{path}.attn.c_proj", hidden, hidden, gain=gain, transposed=True)
        at.layer_norm(f"{path}.ln_2", hidden)
        at.dense(f"{path}.mlp.c_fc", shape.mlp, hidden, transposed=True)
        gain = update / _GELU_RMS
        at.dense(f"{path}.mlp.c_proj", hidden, shape.mlp, gain=gain, transposed=True)
    at.layer_norm("transformer.ln_f", hidden)


def _mamba(at: Checkpoint, shape: Shape, *, version: Literal[1, 2]) -> None:
    hidden, inner, state = shape.hidden, 2 * shape.hidden, 16
    update = _embedding(at, "backbone.embeddings", shape, head="lm_head", updates=shape.num_blocks)
    update *= 2**0.5  # one sublayer per block instead of two
    rank = math.ceil(hidden / 16)
    heads, groups = inner // 16, 2
    for block in range(shape.num_blocks):
        path = f"backbone.layers.{block}"
        mixer = f"{path}.mixer"
        at.norm(f"{path}.norm", hidden)
        convolved = inner if version == 1 else inner + 2 * groups * state
        at.draw(f"{mixer}.conv1d.weight", convolved, 1, 4, std=0.7)
        at.draw(f"{mixer}.conv1d.bias", convolved, std=0.2)
        decays = (inner, state) if version == 1 else (heads,)
        # Decay rates exp(A_log) of about 0.5 to 12, steps softplus(bias) of about 0.01 to 0.5.
        at.draw(f"{mixer}.A_log", *decays, std=0.8, mean=1.0)
        at.draw(f"{mixer}.D", decays[0], std=0.25, mean=1.0)
        if version == 1:
            at.linear(f"{mixer}.in_proj", 2 * inner, hidden, gain=1.5)
            at.linear(f"{mixer}.x_proj", rank + 2 * state, inner, gain=0.7)
            at.linear(f"{mixer}.dt_proj", inner, rank, gain=0.25)
            at.draw(f"{mixer}.dt_proj.bias", inner, std=0.7, mean=-2.5)
            at.linear(f"{mixer}.out_proj", hidden, inner, gain=update / _SCAN_RMS)
        else:
            at.linear(f"{mixer}.in_proj", inner + convolved + heads, hidden, gain=1.5)
            at.draw(f"{mixer}.dt_bias", heads, std=1.0, mean=-2.5)
            at.norm(f"{mixer}.norm", inner)
            at.linear(f"{mixer}.out_proj", hidden, inner, gain=update)
    at.norm("backbone.norm_f", hidden)


def _bert(at: Checkpoint, shape: Shape) -> None:
    """Post-norm: the stream has unit rms at each sublayer, which adds 0.7."""
    hidden, update = shape.hidden, 0.7
    at.head("bert.embeddings.word_embeddings", shape)
    at.draw("bert.embeddings.position_embeddings.weight", MAX_POSITIONS, hidden, std=0.1)
    at.draw("bert.embeddings.token_type_embeddings.weight", 2, hidden, std=0.1)
    at.layer_norm("bert.embeddings.LayerNorm", hidden)
    for block in range(shape.num_blocks):
        path = f"bert.encoder.layer.{block}"
        for name, gain in (("query", 2**0.5), ("key", 2**0.5), ("value", 1.0)):
            at.dense(f"{path}.attention.self.{name}", hidden, hidden, gain=gain)
        at.dense(f"{path}.attention.output.dense", hidden, hidden, gain=update / _ATTENDED_RMS)
        at.layer_norm(f"{path}.attention.output.LayerNorm", hidden)
        at.dense(f"{path}.intermediate.dense", shape.mlp, hidden)
        at.dense(f"{path}.output.dense", hidden, shape.mlp, gain=update / _GELU_RMS)
        at.layer_norm(f"{path}.output.LayerNorm", hidden)
    at.dense("cls.predictions.transform.dense", hidden, hidden)
    at.layer_norm("cls.predictions.transform.LayerNorm", hidden)
    at.draw("cls.predictions.bias", shape.vocab, std=0.1)


def _t5(at: Checkpoint, shape: Shape) -> None:
    """T5 divides the decoder's output by sqrt(hidden) and does not scale attention scores."""
    hidden = shape.hidden
    rows = at.draw("shared.weight", shape.vocab, hidden, std=_LOGIT_STD)
    rows[: text.NUM_SPECIAL] *= 0.25
    score_gain = math.sqrt(_SCORE_STD / math.sqrt(shape.head_dim))
    for stack, update in (("encoder", 1.0 * _LOGIT_STD), ("decoder", 2.0 * _LOGIT_STD)):
        attentions = (
            ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
        )
        for block in range(shape.num_blocks):
            path = f"{stack}.block.{block}.layer"
            for index, attention in enumerate(attentions):
                at.norm(f"{path}.{index}.layer_norm", hidden)
                where = f"{path}.{index}.{attention}"
                at.linear(f"{where}.q", hidden, hidden, gain=score_gain)
                at.linear(f"{where}.k", hidden, hidden, gain=score_gain)
                at.linear(f"{where}.v", hidden, hidden)
                at.linear(f"{where}.o", hidden, hidden, gain=update / _ATTENDED_RMS)
            if block == 0:
                name = f"{path}.0.SelfAttention.relative_attention_bias.weight"
                at.draw(name, 32, shape.num_heads, std=1.0)
            last = f"{path}.{len(attentions)}"
            at.norm(f"{last}.layer_norm", hidden)
            where = f"{last}.DenseReluDense"
            _swiglu(at, where, shape, size=shape.mlp, out=update, names="wi_0 wi_1 wo")
        at.norm(f"{stack}.final_layer_norm", hidden)


def _remote(at: Checkpoint, shape: Shape) -> None:
    """See _tiny_remote.py: all heads have their own keys, attention and MLP run in parallel."""
    hidden = shape.hidden
    update = _embedding(at, "words", shape, head="unembed", updates=2 * shape.num_blocks)
    at.draw("places.weight", MAX_POSITIONS, hidden, std=0.3)
    for block in range(shape.num_blocks):
        path = f"bricks.{block}"
        at.draw(f"{path}.scale.gain", hidden, std=_NORM_STD, mean=1.0)
        at.linear(f"{path}.mixer.qkv", 3 * hidden, hidden, gain=2**0.5)
        at.linear(f"{path}.mixer.proj", hidden, hidden, gain=update / _ATTENDED_RMS / 2**0.5)
        at.linear(f"{path}.widen", shape.mlp, hidden)
        at.linear(f"{path}.narrow", hidden, shape.mlp, gain=update / _RELU2_RMS)
    at.draw("scale.gain", hidden, std=_NORM_STD, mean=1.0)


WEIGHTS: dict[str, Callable[[Checkpoint, Shape], None]] = {
    "bert": _bert,
    "gemma3": partial(_llama_like, kind="gemma3"),
    "gpt2": _gpt2,
    "llama": partial(_llama_like, kind="llama"),
    "mamba": partial(_mamba, version=1),
    "mamba2": partial(_mamba, version=2),
    "mixtral": partial(_llama_like, kind="mixtral"),
    "qwen3": partial(_llama_like, kind="qwen3"),
    "qwen3-moe": partial(_llama_like, kind="qwen3-moe"),
    "remote-code": _remote,
    "t5": _t5,
}
"""Fills a checkpoint, by architecture."""
