"""Weights of the tiny models that only tests and benchmarks use: see tiny.py."""

import math
from typing import Literal

from divergence.experiments.tiny import (
    ATTENDED_RMS,
    LOGIT_STD,
    MAX_POSITIONS,
    NORM_STD,
    NUM_SPECIAL,
    SCORE_STD,
    Checkpoint,
    Shape,
    embedding,
    swiglu,
)

NUM_EXPERTS = 4
"""Two of them per token."""
_GELU_RMS = 0.65
"""sqrt(E[gelu(g)^2]) for a unit normal."""
_SCAN_RMS = 1.5
"""Rms of what Mamba's scan and gate leave: measured, 1.4-1.8. Mamba 2 normalises it to 1."""
_RELU2_RMS = 1.22
"""sqrt(E[relu(g)^4]) = sqrt(3/2)."""


def _dense(
    at: Checkpoint,
    name: str,
    rows: int,
    columns: int,
    *,
    gain: float = 1.0,
    transposed: bool = False,
) -> None:
    """A linear layer with a bias, as BERT and GPT-2 have it; GPT-2 stores (in, out)."""
    shape = (columns, rows) if transposed else (rows, columns)
    at.draw(name + ".weight", *shape, std=gain / math.sqrt(columns))
    at.draw(name + ".bias", rows, std=0.1 * gain)


def _layer_norm(at: Checkpoint, name: str, size: int) -> None:
    at.norm(name, size)
    at.draw(name + ".bias", size, std=0.1)


def _experts(at: Checkpoint, path: str, shape: Shape, *, out: float, names: str) -> None:
    """Two experts per token, weights summing to 1: the result is a mean of two, hence sqrt(2)."""
    at.linear(f"{path}.gate", NUM_EXPERTS, shape.hidden, gain=1.5)
    for expert in range(NUM_EXPERTS):
        where = f"{path}.experts.{expert}"
        swiglu(at, where, shape, size=shape.hidden, out=out * math.sqrt(2), names=names)


def llama_like(at: Checkpoint, shape: Shape, *, kind: str) -> None:
    """Llama and what differs little from it: pre-norm, rotary, grouped heads."""
    gemma = kind in ("gemma2", "gemma3")
    qk_norm = kind in ("qwen3", "qwen3-moe", "gemma3")
    score_gain = math.sqrt(SCORE_STD)
    update = embedding(
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
        at.linear(f"{path}.self_attn.o_proj", shape.hidden, q, gain=update / ATTENDED_RMS)
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
            swiglu(at, f"{path}.mlp", shape, size=shape.mlp, out=update, names=names)
    at.norm("model.norm", shape.hidden, shift=shift)


def gpt2(at: Checkpoint, shape: Shape) -> None:
    hidden = shape.hidden
    updates = 2 * shape.num_blocks
    update = embedding(at, "transformer.wte", shape, head="lm_head", updates=updates)
    at.draw("transformer.wpe.weight", MAX_POSITIONS, hidden, std=update / 4)
    for block in range(shape.num_blocks):
        path = f"transformer.h.{block}"
        _layer_norm(at, f"{path}.ln_1", hidden)
        _dense(at, f"{path}.attn.c_attn", 3 * hidden, hidden, gain=2**0.5, transposed=True)
        # Values share c_attn's gain of sqrt(2).
        gain = update / ATTENDED_RMS / 2**0.5
        _dense(at, f"{path}.attn.c_proj", hidden, hidden, gain=gain, transposed=True)
        _layer_norm(at, f"{path}.ln_2", hidden)
        _dense(at, f"{path}.mlp.c_fc", shape.mlp, hidden, transposed=True)
        gain = update / _GELU_RMS
        _dense(at, f"{path}.mlp.c_proj", hidden, shape.mlp, gain=gain, transposed=True)
    _layer_norm(at, "transformer.ln_f", hidden)


def mamba(at: Checkpoint, shape: Shape, *, version: Literal[1, 2]) -> None:
    hidden, inner, state = shape.hidden, 2 * shape.hidden, 16
    update = embedding(at, "backbone.embeddings", shape, head="lm_head", updates=shape.num_blocks)
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


def bert(at: Checkpoint, shape: Shape) -> None:
    """Post-norm: the stream has unit rms at each sublayer, which adds 0.7."""
    hidden, update = shape.hidden, 0.7
    at.head("bert.embeddings.word_embeddings", shape)
    at.draw("bert.embeddings.position_embeddings.weight", MAX_POSITIONS, hidden, std=0.1)
    at.draw("bert.embeddings.token_type_embeddings.weight", 2, hidden, std=0.1)
    _layer_norm(at, "bert.embeddings.LayerNorm", hidden)
    for block in range(shape.num_blocks):
        path = f"bert.encoder.layer.{block}"
        for name, gain in (("query", 2**0.5), ("key", 2**0.5), ("value", 1.0)):
            _dense(at, f"{path}.attention.self.{name}", hidden, hidden, gain=gain)
        _dense(at, f"{path}.attention.output.dense", hidden, hidden, gain=update / ATTENDED_RMS)
        _layer_norm(at, f"{path}.attention.output.LayerNorm", hidden)
        _dense(at, f"{path}.intermediate.dense", shape.mlp, hidden)
        _dense(at, f"{path}.output.dense", hidden, shape.mlp, gain=update / _GELU_RMS)
        _layer_norm(at, f"{path}.output.LayerNorm", hidden)
    _dense(at, "cls.predictions.transform.dense", hidden, hidden)
    _layer_norm(at, "cls.predictions.transform.LayerNorm", hidden)
    at.draw("cls.predictions.bias", shape.vocab, std=0.1)


def t5(at: Checkpoint, shape: Shape) -> None:
    """T5 divides the decoder's output by sqrt(hidden) and does not scale attention scores."""
    hidden = shape.hidden
    rows = at.draw("shared.weight", shape.vocab, hidden, std=LOGIT_STD)
    rows[:NUM_SPECIAL] *= 0.25
    score_gain = math.sqrt(SCORE_STD / math.sqrt(shape.head_dim))
    for stack, update in (("encoder", 1.0 * LOGIT_STD), ("decoder", 2.0 * LOGIT_STD)):
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
                at.linear(f"{where}.o", hidden, hidden, gain=update / ATTENDED_RMS)
            if block == 0:
                name = f"{path}.0.SelfAttention.relative_attention_bias.weight"
                at.draw(name, 32, shape.num_heads, std=1.0)
            last = f"{path}.{len(attentions)}"
            at.norm(f"{last}.layer_norm", hidden)
            where = f"{last}.DenseReluDense"
            swiglu(at, where, shape, size=shape.mlp, out=update, names="wi_0 wi_1 wo")
        at.norm(f"{stack}.final_layer_norm", hidden)


def remote(at: Checkpoint, shape: Shape) -> None:
    """See remote_code.py: all heads have their own keys, attention and MLP run in parallel."""
    hidden = shape.hidden
    update = embedding(at, "words", shape, head="unembed", updates=2 * shape.num_blocks)
    at.draw("places.weight", MAX_POSITIONS, hidden, std=0.3)
    for block in range(shape.num_blocks):
        path = f"bricks.{block}"
        at.draw(f"{path}.scale.gain", hidden, std=NORM_STD, mean=1.0)
        at.linear(f"{path}.mixer.qkv", 3 * hidden, hidden, gain=2**0.5)
        at.linear(f"{path}.mixer.proj", hidden, hidden, gain=update / ATTENDED_RMS / 2**0.5)
        at.linear(f"{path}.widen", shape.mlp, hidden)
        at.linear(f"{path}.narrow", hidden, shape.mlp, gain=update / _RELU2_RMS)
    at.draw("scale.gain", hidden, std=NORM_STD, mean=1.0)
