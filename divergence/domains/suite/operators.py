"""The operators of the suite, by family: what runs, the definition in float64, the arguments of
each case, and what vendors have in place of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from divergence.domains.suite.definition import (
    PLAN,
    Arguments,
    Operator,
    OperatorCase,
    TensorSource,
    Unavailable,
    cases_of,
    stored,
)
from divergence.numerics.drawn import integers, normal, to_tensor
from divergence.numerics.formats import format_named

Shape = tuple[int, ...]

# Matrix products: linear layers as GEMM and GEMV, with and without bias, plain and batched.


_PRODUCT_SHAPES = {
    "decode": (1, 1024, 256),
    "odd": (7, 129, 65),
    "prefill": (64, 512, 256),
    "large_k": (3, 16384, 32),
}
_PRODUCT_PLAN = {**PLAN, "large_k": "normal cancelling"}


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """z_ij = Σ_k x_ik y_kj, over leading axes one by one."""
    return torch.matmul(x, y)


def _gemv(matrix: Tensor, vector: Tensor) -> Tensor:
    """y_i = Σ_k A_ik x_k."""
    return torch.mv(matrix, vector)


def _linear(source: TensorSource, shape: Shape) -> Arguments:
    m, k, n = shape
    weight = source.paired("weight", (n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"x": source.main("x", (m, k)), "weight": weight}


def _linear_bias(source: TensorSource, shape: Shape) -> Arguments:
    return {**_linear(source, shape), "bias": source.plain("bias", shape[-1:], scale=0.125)}


def _transposed(source: TensorSource, shape: Shape) -> Arguments:
    """y is the transposed view of a stored (N, K) matrix, as in x @ W.T."""
    linear = _linear(source, shape)
    return {"x": linear["x"], "y": linear["weight"].T}


def _batched(source: TensorSource, shape: Shape) -> Arguments:
    b, m, k, n = shape
    y = source.paired("batch", (b, n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"x": source.main("x", (b, m, k)), "y": y.transpose(1, 2).contiguous()}


def _vector(source: TensorSource, shape: Shape) -> Arguments:
    n, k = shape
    x = source.main("x", (k,))
    weight = source.paired("weight", (n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"matrix": weight, "vector": x}


PRODUCTS = (
    Operator(  # weight (N, K) as torch.nn.Linear keeps it
        "linear",
        _run_linear,
        lambda x, weight: x @ weight.T,
        cases_of(_linear, _PRODUCT_SHAPES, _PRODUCT_PLAN),
    ),
    Operator(
        "linear_bias",
        _run_linear,
        lambda x, weight, bias: x @ weight.T + bias,
        cases_of(_linear_bias, _PRODUCT_SHAPES),
    ),
    Operator("matmul", _matmul, _matmul, cases_of(_transposed, _PRODUCT_SHAPES, _PRODUCT_PLAN)),
    Operator(
        "batched_matmul",
        _matmul,
        _matmul,
        cases_of(
            _batched,
            {"decode": (4, 1, 128, 64), "odd": (3, 7, 129, 33), "prefill": (4, 48, 64, 48)},
        ),
    ),
    Operator(
        "gemv",
        _gemv,
        _gemv,
        cases_of(
            _vector,
            {"odd": (65, 129), "large_k": (32, 16384)},
            {
                "odd": "normal outliers subnormals cancelling equal",
                "large_k": "normal cancelling",
            },
        ),
    ),
)

# Normalisation over the last axis: RMSNorm, RMSNorm after a residual addition, LayerNorm.
#
# x may be stored in 16 bits; statistics belong in float32. The normalised value may be rounded to
# the dtype of x before it is multiplied by the weight, as Hugging Face's models do.


_EPS = 1e-6


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm_llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute as LlamaRMSNorm in transformers: statistics in float32, the weight multiplied in x's
    dtype. Source: transformers/models/llama/modeling_llama.py."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _truth_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / √(mean(x²) + ε) · w (Zhang and Sennrich, "Root Mean Square Layer Normalization",
    NeurIPS 2019; ε inside the root as in Llama)."""
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return stored(x * scale) * weight


def _truth_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h = x + r; y = h / √(mean(h²) + ε) · w; returns y and h. h may be rounded before the norm:
    fused kernels differ in that."""
    total = x + residual
    return _truth_rms_norm(stored(total), weight, eps), total


def _truth_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = (x - μ) / √(σ² + ε) · w + b, with σ² = mean((x - μ)²) (Ba, Kiros and Hinton, "Layer
    Normalization", 2016)."""
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return stored(centred * scale) * weight + bias


def _norm(source: TensorSource, shape: Shape) -> Arguments:
    weight = source.plain("norm", shape[-1:], scale=0.125, mean=1.0)
    return {"x": source.main("x", shape), "weight": weight, "eps": _EPS}


def _add_norm(source: TensorSource, shape: Shape) -> Arguments:
    residual = source.main("residual", shape, scale=2.0)
    return {"residual": residual, **_norm(source, shape)}


def _layer(source: TensorSource, shape: Shape) -> Arguments:
    bias = source.plain("bias", shape[-1:], scale=0.125)
    return {**_norm(source, shape), "bias": bias, "eps": 1e-5}


def _npu(name: str) -> Any:
    """A function of Ascend's package for torch."""
    import torch_npu

    return getattr(torch_npu, f"npu_{name}")


def _npu_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    normed, _, total = _npu("add_rms_norm")(x, residual, weight, eps)
    return normed, total


def _vllm_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Any:
    from vllm import _custom_ops

    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, eps)
    return out


def _vllm_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    from vllm import _custom_ops

    out, total = x.clone(), residual.clone()  # both are overwritten
    _custom_ops.fused_add_rms_norm(out, total, weight, eps)
    return out, total


def _liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


NORMS = (
    Operator(
        "rms_norm",
        _rms_norm,
        _truth_rms_norm,
        cases_of(_norm),
        implementations={
            "llama": _rms_norm_llama,
            "torch_npu": lambda x, weight, eps: _npu("rms_norm")(x, weight, eps)[0],
            "vllm": _vllm_rms_norm,
            "triton": _liger_rms_norm,
        },
    ),
    Operator(
        "add_rms_norm",
        _add_rms_norm,
        _truth_add_rms_norm,
        cases_of(_add_norm),
        implementations={"torch_npu": _npu_add_rms_norm, "vllm": _vllm_add_rms_norm},
    ),
    Operator(
        "layer_norm",
        lambda x, weight, bias, eps: functional.layer_norm(x, x.shape[-1:], weight, bias, eps),
        _truth_layer_norm,
        cases_of(_layer),
    ),
)

# Rotary position embedding, in the two layouts that checkpoints come in.
#
# Pairs of features are turned by an angle that grows with the position (Su et al., "RoFormer",
# 2021). Which features form a pair is a convention: half-split pairs i with i + D/2 (GPT-NeoX,
# Llama in transformers), interleaved pairs 2i with 2i + 1 (the paper, GPT-J, Meta's Llama). The
# same weights under the other convention give fluent nonsense, so each layout is an operator.
#
# cos and sin are inputs (T, D/2): rational points of the circle, ((1 - t²), 2t) / (1 + t²), which
# come out of exact arithmetic alike on every machine.


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do as transformers' apply_rotary_pos_emb: x · cos + rotate_half(x) · sin, tables doubled."""
    first, second = x.chunk(2, dim=-1)  # (..., D) → two of (..., D/2)
    turned = torch.cat([-second, first], -1)
    return x * torch.cat([cos, cos], -1) + turned * torch.cat([sin, sin], -1)


def _rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def _truth_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) → (a cos θ - b sin θ, b cos θ + a sin θ) for a = x_i, b = x_(i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([stored(a * cos) - stored(b * sin), stored(b * cos) + stored(a * sin)], -1)


def _truth_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for a = x_(2i), b = x_(2i + 1)."""
    a, b = x[..., 0::2], x[..., 1::2]
    pair = [stored(a * cos) - stored(b * sin), stored(b * cos) + stored(a * sin)]
    return torch.stack(pair, -1).flatten(-2)


def _both(turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    return lambda query, key, cos, sin: (turn(query, cos, sin), turn(key, cos, sin))


def _rotary_inputs(source: TensorSource, shape: Shape) -> Arguments:
    batch, heads, kv_heads, tokens, width = shape
    t = normal("angle", (tokens, width // 2))
    whole = 1.0 + t * t
    return {
        "query": source.main("query", (batch, heads, tokens, width)),
        "key": source.main("key", (batch, kv_heads, tokens, width)),
        "cos": to_tensor((1.0 - t * t) / whole, source.dtype),
        "sin": to_tensor(2.0 * t / whole, source.dtype),
    }


def _npu_rotary(mode: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """``mode``: ``half`` or ``interleave``."""
    tables = []
    for table in (cos, sin):
        wide = table.repeat_interleave(2, -1) if mode == "interleave" else table.repeat(1, 2)
        tables.append(wide[None, None].contiguous())
    return tuple(
        _npu("rotary_mul")(x.contiguous(), *tables, rotary_mode=mode) for x in (query, key)
    )


_ROTARY_SHAPES = {"decode": (1, 8, 2, 1, 64), "odd": (1, 3, 1, 7, 38), "prefill": (1, 4, 2, 48, 64)}
_ROTARY_PLAN = {**PLAN, "odd": "normal outliers subnormals cancelling"}  # equal adds nothing
_rotary_cases = cases_of(_rotary_inputs, _ROTARY_SHAPES, _ROTARY_PLAN)

ROTARY = (
    Operator(
        "rope",
        _both(_rope),
        _both(_truth_rope),
        _rotary_cases,
        implementations={"torch_npu": partial(_npu_rotary, "half")},
    ),
    Operator(
        "rope_interleaved",
        _both(_rope_interleaved),
        _both(_truth_rope_interleaved),
        _rotary_cases,
        implementations={"torch_npu": partial(_npu_rotary, "interleave")},
    ),
)

# Softmax, and attention over whole sequences with grouped heads and masks.
#
# Axes: B batch, N heads, G key-value heads, T queries, S keys, H head dim. Query head n reads
# key-value head n // (N / G). Masks are boolean, True where a key is seen; a query that sees no key
# gives 0, as torch's scaled_dot_product_attention does since 2.5.


def _truth_softmax(x: Tensor) -> Tensor:
    """p_i = exp(x_i - m) / Σ_j exp(x_j - m), m = max x."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _truth_log_softmax(x: Tensor) -> Tensor:
    """x_i - m - log Σ_j exp(x_j - m)."""
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def _logits(source: TensorSource, shape: Shape) -> Arguments:
    """Four times a normal value: what attention scores and router logits of trained models
    reach."""
    return {"x": source.main("x", shape, scale=1.0 if source.values == "subnormals" else 4.0)}


_WINDOW = 5


def _run_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """The kernel that torch chooses."""
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _run_eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Do as transformers' eager attention: scores in the tensors' dtype, softmax in float32."""
    key, value = _spread(key, query.shape[1]), _spread(value, query.shape[1])
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    seen = _seen(mask, causal, scores)
    if seen is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).nan_to_num(0.0).to(query.dtype)
    return torch.matmul(weights, value)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scale: float,
    *,
    scores_stored: bool = False,
) -> Tensor:
    """P = softmax(s Q Kᵀ) over the keys that are seen, P V (Vaswani et al., "Attention Is All You
    Need", 2017). P may be stored in the tensors' dtype, as fused kernels do before the second
    product; eager attention stores the scores as well."""
    scores = query @ key.transpose(-1, -2)  # (..., T, H), (..., S, H) → (..., T, S)
    scores = stored(stored(scores) * scale) if scores_stored else scores * scale
    if seen is not None:
        scores = torch.where(seen, scores, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest.isfinite(), largest, 0.0))
    total = weights.sum(-1, keepdim=True)
    return stored(weights / torch.where(total == 0.0, 1.0, total)) @ value


def _truth_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    *,
    scores_stored: bool = False,
) -> Tensor:
    heads, queries = query.shape[1], query.shape[2]
    seen = _seen(mask, causal, query.new_zeros(queries, key.shape[2]))
    key, value = _spread(key, heads), _spread(value, heads)
    return attend(query, key, value, seen, scale, scores_stored=scores_stored)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Each key-value head once for every query head that reads it: (B, G, S, H) → (B, N, S, H)."""
    batch, groups, length, width = x.shape
    wide = x[:, :, None].expand(batch, groups, heads // groups, length, width)
    return wide.reshape(batch, heads, length, width)


def _seen(mask: Tensor | None, causal: bool, scores: Tensor) -> Tensor | None:
    if not causal:
        return mask
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()


def _attention_inputs(source: TensorSource, shape: Shape, kind: str = "") -> Arguments:
    """``kind``: ``causal``, or that of ``_mask``."""
    batch, heads, groups, queries, keys, width = shape
    inner, outer = source.values in ("outliers", "equal"), source.values
    where = (batch, groups, keys, width)
    return {
        "query": source.plain("query", (batch, heads, queries, width), scale=2.0),
        "key": source.main("key", where) if inner else source.plain("key", where),
        "value": source.main("value", where, axis=-2)
        if outer != "normal" or source.strided
        else source.plain("value", where),
        "mask": _mask(kind, shape) if kind in _MASKS else None,
        "causal": kind == "causal",
        "scale": width**-0.5,
    }


_MASKS = ("padding", "all_masked", "window")


def _mask(kind: str, shape: Shape) -> Tensor:
    """(B, 1, T, S), True where query t sees key s. ``padding``: the last sample's first keys are
    none; ``all_masked``: its first two queries see nothing; ``window``: the last five keys up to
    the query's own place at the end."""
    batch, _, _, queries, keys, _ = shape
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if kind == "padding":
        seen[-1, :, :, : keys // 3] = False
    elif kind == "all_masked":
        seen[-1, :, :2] = False
    else:
        place = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        seen &= (place >= 0) & (place < _WINDOW)
    return seen


_ATTENTION_SHAPES = {
    "decode": (1, 8, 2, 1, 130, 64),
    "odd": (2, 3, 3, 7, 19, 40),
    "grouped": (2, 6, 2, 9, 33, 32),
    "square": (1, 3, 3, 33, 33, 40),
    "prefill": (1, 4, 2, 48, 48, 64),
}
_ATTENTION_PLAN = {
    **{shape: PLAN[shape] for shape in ("decode", "odd", "odd.strided")},
    "grouped": "normal",
    "prefill": PLAN["prefill"],
}


def _attention_cases() -> Iterator[OperatorCase]:
    shapes = _ATTENTION_SHAPES
    yield from cases_of(_attention_inputs, shapes, _ATTENTION_PLAN)()
    square = {"square": "normal", "prefill": "normal"}
    odd = {"odd": "normal", "grouped": "normal"}
    for kind, plan in (("causal", square), *((mask, odd) for mask in _MASKS)):
        yield from cases_of(partial(_attention_inputs, kind=kind), shapes, plan, suffix=kind)()


def _run_backend(name: str, **operands: Any) -> Tensor:
    """scaled_dot_product_attention with one backend alone; what it cannot do, it refuses."""
    with sdpa_kernel([getattr(SDPBackend, name)]):
        return _run_sdpa(**operands)


def _flash_attn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Any:
    from flash_attn import flash_attn_func

    if mask is not None:
        raise Unavailable("flash_attn takes no mask")
    # (B, N, T, H) → (B, T, N, H) and back
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal).transpose(1, 2)


ATTENTION = (
    Operator("softmax", lambda x: torch.softmax(x, -1), _truth_softmax, cases_of(_logits)),
    Operator(
        "log_softmax", lambda x: torch.log_softmax(x, -1), _truth_log_softmax, cases_of(_logits)
    ),
    Operator(
        "attention",
        _run_sdpa,
        _truth_attention,
        _attention_cases,
        implementations={
            "sdpa_flash": partial(_run_backend, "FLASH_ATTENTION"),
            "sdpa_math": partial(_run_backend, "MATH"),
            "sdpa_efficient": partial(_run_backend, "EFFICIENT_ATTENTION"),
            "sdpa_cudnn": partial(_run_backend, "CUDNN_ATTENTION"),
            "flash_attn": _flash_attn,
        },
    ),
    *(
        Operator(name, run, partial(_truth_attention, scores_stored=True), _attention_cases)
        for name, run in (
            ("attention_math", partial(_run_backend, "MATH")),  # torch's formula, step by step
            ("attention_eager", _run_eager),
        )
    ),
)

# Incremental attention over a paged cache of keys and values: one new token per sequence.
#
# The cache is a pool of blocks (blocks, block size, G, H); a sequence's tokens lie in the blocks
# that its row of the block table names, in order, and it sees the first ``context_lens`` of them
# (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
# SOSP 2023). What lies beyond in the last block and in other blocks is large here, so that reading
# it shows.


_BLOCK = 16
_FLASH_PAGE = 256


def _gathered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each sequence's query (N, H), and its keys and values (G, S, H)."""
    size = key_cache.shape[1]
    for row, table, length in zip(query, block_tables, context_lens.tolist(), strict=True):
        if not 0 < length <= table.numel() * size:
            raise ValueError(f"{length} tokens in {table.numel()} blocks")
        pages = table[: -(-length // size)].long()
        key, value = (
            cache[pages].flatten(0, 1)[:length].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        yield row, key, value


def _run_paged(*, scale: float, **paged: Tensor) -> Tensor:
    """Gathers each sequence, then scaled_dot_product_attention."""
    results = []
    for query, key, value in _gathered(**paged):
        attended = functional.scaled_dot_product_attention(
            query[None, :, None],  # (N, H) → (1, N, 1, H)
            key[None],
            value[None],
            scale=scale,
            enable_gqa=len(query) != len(key),
        )
        results.append(attended[0, :, 0])
    return torch.stack(results)


def _truth_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attention of query b over its context_lens[b] first cached tokens; see attend."""
    results = []
    for row, key, value in _gathered(query, key_cache, value_cache, block_tables, context_lens):
        # (N, H) → (G, N/G, H): the heads that read one key-value head are its queries
        queries = row.reshape(len(key), -1, row.shape[-1])
        results.append(attend(queries, key, value, None, scale).reshape(row.shape[0], -1))
    return torch.stack(results)


def _paged_inputs(source: TensorSource, shape: Shape) -> Arguments:
    batch, heads, groups, blocks, width = shape
    lengths = [
        (37 * number + 21) % (2 * _BLOCK * blocks // batch - 1) + 1 for number in range(batch)
    ]
    lengths = [min(length, _BLOCK * (blocks // batch)) for length in lengths]
    order = np.argsort(normal("block order", (blocks,)), kind="stable").astype(np.int32)
    tables = order[: batch * (blocks // batch)].reshape(batch, blocks // batch)
    used = np.zeros((blocks, _BLOCK), dtype=bool)
    for table, length in zip(tables, lengths, strict=True):
        for place in range(length):
            used[table[place // _BLOCK], place % _BLOCK] = True
    where = (blocks, _BLOCK, groups, width)
    caches = {}
    for name in ("key", "value"):
        inner = name == "value" or source.values in ("outliers", "equal")
        cache = source.main(name, where) if inner else source.plain(name, where)
        beyond = to_tensor(300.0 + normal(f"{name} beyond", where), source.dtype)
        seen = torch.from_numpy(used)[:, :, None, None]
        caches[f"{name}_cache"] = torch.where(seen, cache, beyond)
    return {
        "query": source.plain("query", (batch, heads, width), scale=2.0),
        **caches,
        "block_tables": torch.from_numpy(tables.copy()),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": width**-0.5,
    }


def _repaged(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """The same tokens in pages of 256, the only ones that flash_attn takes, last page first; and
    the table of those. What fills a page up is large, too."""
    batch = tables.shape[0]
    tokens = cache[tables.long()].flatten(1, 2)  # (B, blocks x size, G, H)
    pages = -(-tokens.shape[1] // _FLASH_PAGE)
    wide = tokens.new_full((batch, pages * _FLASH_PAGE, *tokens.shape[2:]), 300.0)
    wide[:, : tokens.shape[1]] = tokens
    flat = wide.reshape(batch * pages, _FLASH_PAGE, *tokens.shape[2:]).flip(0).contiguous()
    table = torch.arange(batch * pages - 1, -1, -1, dtype=tables.dtype, device=tables.device)
    return flat, table.reshape(batch, pages)


def _flash_attn_paged(*, scale: float, **paged: Tensor) -> Any:
    from flash_attn import flash_attn_with_kvcache

    keys, table = _repaged(paged["key_cache"], paged["block_tables"])
    values, _ = _repaged(paged["value_cache"], paged["block_tables"])
    attended = flash_attn_with_kvcache(
        paged["query"][:, None],
        keys,
        values,
        cache_seqlens=paged["context_lens"],
        block_table=table,
        softmax_scale=scale,
    )
    return attended[:, 0]


def _npu_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Any:
    import torch_npu

    batch, heads, width = query.shape
    blocks, size, groups, _ = key_cache.shape
    operands = (
        query.reshape(batch, 1, heads * width),
        key_cache.reshape(blocks, size, groups * width),
        value_cache.reshape(blocks, size, groups * width),
    )
    paged = {
        "block_table": block_tables,
        "block_size": size,
        "num_heads": heads,
        "num_key_value_heads": groups,
        "input_layout": "BSH",
    }
    lengths = context_lens.tolist()
    if hasattr(torch_npu, "npu_fused_infer_attention_score"):  # the only one on newer devices
        attended, *_ = torch_npu.npu_fused_infer_attention_score(
            *operands, actual_seq_lengths_kv=lengths, scale=scale, **paged
        )
    else:
        attended = torch_npu.npu_incre_flash_attention(
            *operands, actual_seq_lengths=lengths, scale_value=scale, **paged
        )
    return attended.reshape(batch, heads, width)


_PAGED_PLAN = {"decode": "normal outliers", "odd": "normal outliers equal", "batch": "normal"}
_PAGED_SHAPES = {"decode": (1, 8, 2, 9, 64), "odd": (3, 6, 3, 13, 40), "batch": (8, 8, 8, 64, 64)}


PAGED = (
    Operator(
        "paged_attention",
        _run_paged,
        _truth_paged,
        cases_of(_paged_inputs, _PAGED_SHAPES, _PAGED_PLAN),
        implementations={"flash_attn": _flash_attn_paged, "torch_npu": _npu_paged},
    ),
)

# Activations: GELU in both forms, SiLU, and SwiGLU, the gated product of feed-forward blocks.


def _truth_gelu(x: Tensor) -> Tensor:
    """x/2 (1 + erf(x/√2)) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016)."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _truth_gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), the paper's approximation: another function,
    up to 5e-4 away."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _truth_silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def _one(source: TensorSource, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape)}


def _gate_and_up(source: TensorSource, shape: Shape) -> Arguments:
    return {"gate": source.main("x", shape), "up": source.plain("up", shape)}


def _vllm_swiglu(gate: Tensor, up: Tensor) -> Any:
    import vllm._custom_ops  # noqa: F401 - registers torch.ops._C

    out = torch.empty_like(up)
    torch.ops._C.silu_and_mul(out, torch.cat([gate, up], -1))
    return out


def _liger_swiglu(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate.contiguous(), up)


ACTIVATIONS = (
    Operator("gelu", lambda x: functional.gelu(x), _truth_gelu, cases_of(_one)),
    Operator(
        "gelu_tanh",
        lambda x: functional.gelu(x, approximate="tanh"),
        _truth_gelu_tanh,
        cases_of(_one),
    ),
    Operator("silu", lambda x: functional.silu(x), _truth_silu, cases_of(_one)),
    Operator(  # Shazeer, "GLU Variants Improve Transformer", 2020; silu(g) may be stored
        "swiglu",
        lambda gate, up: functional.silu(gate) * up,
        lambda gate, up: stored(_truth_silu(gate)) * up,
        cases_of(_gate_and_up),
        implementations={
            "torch_npu": lambda gate, up: _npu("swiglu")(torch.cat([gate, up], -1), dim=-1),
            "vllm": _vllm_swiglu,
            "triton": _liger_swiglu,
        },
    ),
)

# Choices, rows of a table, sums: what picks from an axis, or adds along it.
#
# Choices are top-k, the gating of a mixture of experts, argmax. Where scores are equal, the
# definition takes the lowest index first. torch.argmax documents that; torch.topk documents no
# order, so there a choice among exact ties is shown and is no fault.
#
# Embedding is exact, so any difference is a fault. Sums are accumulated in float32, stored in the
# dtype of x.


_K = 4


def _run_moe_gating(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute as Mixtral's and Qwen's routers in transformers: softmax in float32, then top-k."""
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def _truth_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest, in descending order; of equal ones the lowest index first."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def _truth_moe_gating(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """p = softmax(logits); the k largest p, divided by their sum, and which they are."""
    weights, experts = _truth_topk(_truth_softmax(logits), k)
    return weights / weights.sum(-1, keepdim=True), experts


def _truth_argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest value."""
    largest = x == x.amax(-1, keepdim=True)
    places = torch.arange(x.shape[-1]).expand(x.shape)
    return torch.where(largest, places, x.shape[-1]).amin(-1)


def _npu_moe_gating(logits: Tensor, k: int) -> Any:
    weights, experts, _ = _npu("moe_gating_top_k_softmax")(logits, None, k)
    return weights / weights.sum(-1, keepdim=True), experts.long()


_CHOICE_PLAN = {
    "decode": "normal",
    "odd": "normal outliers ties equal",
    "odd.strided": "normal",
    "prefill": "normal ties",
}
_EXPERTS = {"decode": (1, 128), "odd": (7, 60), "prefill": (64, 128)}
_VOCABULARY = {"decode": (1, 16384), "odd": (7, 129), "prefill": (16, 4096)}


def _rows(source: TensorSource, shape: Shape) -> Arguments:
    tokens, rows, width = shape
    return {
        "ids": torch.from_numpy(integers("ids", (tokens,), 0, rows)),
        "weight": source.main("x", (rows, width)),
    }


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _cumsum(x: Tensor) -> Tensor:
    """y_j = Σ_(i <= j) x_i."""
    return x.cumsum(-1)


_SUM_SHAPES = {"odd": (7, 129), "prefill": (64, 512), "long": (4, 32768)}
_SUM_PLAN = {
    "odd": "normal outliers subnormals cancelling equal",
    "odd.strided": "normal",
    "prefill": "normal",
    "long": "normal cancelling equal",
}
_sum_cases = cases_of(_one, _SUM_SHAPES, _SUM_PLAN)

REDUCTIONS = (
    Operator(
        "topk",
        lambda x, k: torch.topk(x, k, dim=-1),
        _truth_topk,
        cases_of(
            lambda source, shape: {"x": source.main("x", shape), "k": _K},
            _VOCABULARY,
            _CHOICE_PLAN,
        ),
        scores=lambda x, k: x,
    ),
    Operator(
        "moe_gating",
        _run_moe_gating,
        _truth_moe_gating,
        cases_of(
            lambda source, shape: {"logits": source.main("x", shape), "k": _K},
            _EXPERTS,
            _CHOICE_PLAN,
        ),
        scores=lambda logits, k: _truth_softmax(logits),
        implementations={"torch_npu": _npu_moe_gating},
    ),
    Operator(
        "argmax",
        lambda x: torch.argmax(x, -1),
        _truth_argmax,
        cases_of(_one, _VOCABULARY, _CHOICE_PLAN),
    ),
    Operator(
        "embedding",
        lambda ids, weight: functional.embedding(ids, weight),
        lambda ids, weight: weight[ids],
        cases_of(
            _rows,
            {"decode": (1, 64, 512), "odd": (7, 33, 129), "prefill": (64, 64, 512)},
            {
                "decode": "normal",
                "odd": "normal subnormals",
                "odd.strided": "normal",
                "prefill": "outliers",
            },
        ),
    ),
    Operator("sum", _sum, _sum, _sum_cases),
    Operator("mean", lambda x: x.mean(-1), lambda x: _sum(x) / x.shape[-1], _sum_cases),
    Operator("cumsum", _cumsum, _cumsum, _sum_cases),
)

# Quantisation to int8 and to 8-bit floats, and the linear layer on int8 codes.
#
# Codes are round(·) to the nearest integer, half-way cases to the even one, as torch.round and
# IEEE 754's default do; a result outside -128 to 127 is the nearer end.
#
# 8-bit floats: e4m3fn has no infinity and ends at 448, e5m2 ends at 57344 (Micikevicius et al.,
# "FP8 Formats for Deep Learning", 2022; OCP 8-bit floating point specification 1.0). Beyond the
# end the specification allows two conversions, saturating or not (nan in e4m3fn, infinity in e5m2),
# and torch's ``.to`` has changed between versions, so the plain cast leaves it open there (nan in
# the truth: not judged); the saturating cast clamps first and is judged everywhere.


_LOW, _HIGH = -128, 127


def _truth_quantize(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """y = round(x · scale + offset), to int8 (the formula of Ascend's quantize operator). scale
    and offset hold one number, or one for each channel of the last axis."""
    return torch.round(x * scale + offset).clamp(_LOW, _HIGH).to(torch.int8)


def _truth_dynamic_quant(x: Tensor, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    """scale = rowmax(|x|) / 127, y = round(x / scale), with x · smooth for x where there are smooth
    scales (the formula of Ascend's DynamicQuant). A row of zeros has scale 0 and codes 0."""
    wide = x if smooth is None else x * smooth
    scale = wide.abs().amax(-1) / _HIGH
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)[..., None])
    return codes.clamp(_LOW, _HIGH).to(torch.int8), scale


def _run_w8a8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: str
) -> Tensor:
    if x.device.type == "npu":  # torch's own int8 product runs on the CPU there
        there: Tensor = _npu_quant_matmul(x, weight, x_scale, weight_scale, out_dtype)
        return there
    product = _int_product(x, weight.T).float()
    return (product * x_scale[:, None] * weight_scale).to(getattr(torch, out_dtype))


def _int_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of int8 codes in int32, exactly. Accelerators want at least 17 rows and even sides."""
    if x.device.type == "cpu":
        return x.int() @ y.int()
    rows, columns = x.shape[0], y.shape[1]
    wide = x.new_zeros(max(32, -(-rows // 8) * 8), -(-x.shape[1] // 8) * 8)
    wide[:rows, : x.shape[1]] = x
    other = y.new_zeros(-(-columns // 8) * 8, wide.shape[1])  # columns first: cuBLAS wants it so
    other[:columns, : y.shape[0]] = y.T
    return torch._int_mm(wide, other.T)[:rows, :columns]


def _truth_w8a8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: str
) -> Tensor:
    """y_mn = s_m t_n Σ_k x_mk w_nk: int8 codes, exactly summed, one scale for each token and one
    for each output channel."""
    return (x.double() @ weight.double().T) * x_scale[:, None] * weight_scale


_Cast = Callable[[Tensor], Tensor]


def _to_grid(x: Tensor, name: str) -> Tensor:
    """Float64 rounded to the 8-bit format, to nearest even, the range taken as endless."""
    form = format_named(name)
    _, exponent = torch.frexp(x)
    least = round(math.log2(form.smallest_subnormal))
    power = (exponent.double() - 1 - form.mantissa_bits).clamp_min(least)
    step = torch.exp2(power)
    return torch.round(x / step) * step


def _cast(name: str, *, saturating: bool) -> tuple[_Cast, _Cast]:
    """(run, truth) of a cast to the 8-bit format: to the nearest code, ties to even; beyond the
    largest one that code where it is ``saturating``, else open (nan in the truth)."""
    form, dtype = format_named(name), getattr(torch, name)

    def run(x: Tensor) -> Tensor:
        return (x.clamp(-form.max, form.max) if saturating else x).to(dtype)

    def truth(x: Tensor) -> Tensor:
        rounded = _to_grid(x, name)
        if saturating:
            return rounded.clamp(-form.max, form.max).to(dtype)
        return torch.where(rounded.abs() > form.max, math.nan, rounded).to(dtype)

    return run, truth


def _per_tensor(source: TensorSource, shape: Shape) -> Arguments:
    x = source.main("x", shape)
    ties = source.values == "ties"  # x · 2 + 1 is half-way between integers in half of the places
    scale, offset = (2.0, 1.0) if ties else (37.0, -3.0)
    one = torch.ones(1, dtype=x.dtype)
    return {"x": x, "scale": one * scale, "offset": one * offset}


def _per_channel(source: TensorSource, shape: Shape) -> Arguments:
    scale = source.plain("scale", shape[-1:], scale=4.0, mean=32.0)
    offset = source.plain("offset", shape[-1:], scale=8.0)
    return {"x": source.main("x", shape), "scale": scale, "offset": offset}


def _quantize_cases() -> Iterator[OperatorCase]:
    plan = {
        "decode": "normal",
        "odd": "normal outliers subnormals ties equal",
        "odd.strided": "normal",
        "prefill": "normal",
    }
    yield from cases_of(_per_tensor, plan=plan, suffix="per_tensor")()
    few = {"decode": "normal", "odd": "normal outliers", "prefill": "normal"}
    yield from cases_of(_per_channel, plan=few, suffix="per_channel")()


def _dynamic(source: TensorSource, shape: Shape, kind: str = "") -> Arguments:
    x, smooth = source.main("x", shape), None
    if kind == "smooth":
        smooth = source.plain("smooth", shape[-1:], scale=0.125, mean=1.0)
    elif kind == "zero_row":
        x[2] = 0.0
    return {"x": x, "smooth": smooth}


def _dynamic_cases() -> Iterator[OperatorCase]:
    yield from cases_of(_dynamic, plan={**PLAN, "odd": "normal outliers equal"})()
    for kind in ("smooth", "zero_row"):
        yield from cases_of(partial(_dynamic, kind=kind), plan={"odd": "normal"}, suffix=kind)()


def _w8a8_inputs(source: TensorSource, shape: Shape) -> Arguments:
    m, k, n = shape
    codes = {
        "x": torch.from_numpy(integers("codes", (m, k), -127, 128)).to(torch.int8),
        "weight": torch.from_numpy(integers("weight codes", (n, k), -127, 128)).to(torch.int8),
    }
    scales = {
        name: to_tensor(integers(name, (size,), 1, 1 << 16) / 2.0**24, "float32")
        for name, size in (("x_scale", m), ("weight_scale", n))
    }
    return {**codes, **scales, "out_dtype": source.dtype}


def _cast_inputs(source: TensorSource, shape: Shape) -> Arguments:
    """Subnormals here are those of the 8-bit formats."""
    if source.values == "subnormals":
        return {"x": source.plain("x", shape, scale=2.0**-9)}
    return {"x": source.main("x", shape, scale=8.0)}


_CAST_PLAN = {
    "decode": "normal",
    "odd": "normal outliers subnormals ties",
    "odd.strided": "normal",
    "prefill": "normal",
}


def _casts() -> Iterator[Operator]:
    for short in ("e4m3fn", "e5m2"):
        for kind in ("", "_saturating"):
            run, truth = _cast(f"float8_{short}", saturating=bool(kind))
            name, cases = f"cast_{short}{kind}", cases_of(_cast_inputs, plan=_CAST_PLAN)
            yield Operator(name, run, truth, cases)


def _npu_quant_matmul(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: str
) -> Any:
    dtype = getattr(torch, out_dtype)
    return _npu("quant_matmul")(
        x, weight.T, weight_scale, pertoken_scale=x_scale, output_dtype=dtype
    )


QUANTIZATION = (
    Operator(
        "quantize",
        lambda x, scale, offset: _truth_quantize(x.float(), scale.float(), offset.float()),
        _truth_quantize,
        _quantize_cases,
        implementations={
            "torch_npu": lambda x, scale, offset: _npu("quantize")(
                x, scale, offset, torch.qint8, -1, False
            )
        },
    ),
    Operator(
        "dynamic_quant",
        lambda x, smooth: _truth_dynamic_quant(
            x.float(), None if smooth is None else smooth.float()
        ),
        _truth_dynamic_quant,
        _dynamic_cases,
        implementations={
            "torch_npu": lambda x, smooth: _npu("dynamic_quant")(x, smooth_scales=smooth)
        },
    ),
    Operator(
        "w8a8_linear",
        _run_w8a8,
        _truth_w8a8,
        cases_of(_w8a8_inputs, _PRODUCT_SHAPES, dict.fromkeys(_PRODUCT_SHAPES, "normal")),
        implementations={"torch_npu": _npu_quant_matmul},
    ),
    *_casts(),
)


OPERATORS: dict[str, Operator] = {
    operator.full_name: operator
    for operator in (
        *(*PRODUCTS, *NORMS, *ROTARY, *ATTENTION, *PAGED),
        *(*ACTIVATIONS, *REDUCTIONS, *QUANTIZATION),
    )
}
"""By full name, in the order in which a suite runs them."""
