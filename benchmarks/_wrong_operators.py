"""Wrong implementations of operators, as real kernels get them wrong.

For tests and benchmarks, and to see what a report says:

    divergence capture --like a -o b --impl softmax=benchmarks._wrong_operators:softmax_bf16
"""

from __future__ import annotations

import torch
from torch.nn import functional


def keep_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 with that many fraction bits, the rest cut off, as a tensor core's input stage."""
    return (x.float().view(torch.int32) & -(1 << (23 - bits))).view(torch.float32)


def linear_tf32(x, weight):
    """float32 inputs of 10 bits, as TF32."""
    if x.dtype != torch.float32:
        return functional.linear(x, weight)
    return keep_bits(x, 10) @ keep_bits(weight, 10).T


def linear_partial_sums(x, weight):
    """Partial sums of 32 products each, stored in the tensors' own 16 bits."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)
    for start in range(0, x.shape[1], 32):
        part = slice(start, start + 32)
        total = (total.float() + x[:, part].float() @ weight[:, part].float().T).to(x.dtype)
    return total


def linear_wrong_tile(x, weight):
    """One tile of the result is transposed."""
    y = functional.linear(x, weight)
    size = min(y.shape[0], 4)
    y[:size, :size] = y[:size, :size].T.clone()
    return y


def rms_norm_statistics_bf16(x, weight, eps):
    """Mean square and its root in bfloat16."""
    mean = x.float().pow(2).mean(-1, keepdim=True).bfloat16()
    scale = torch.rsqrt(mean.float() + eps).bfloat16().float()
    return (x.float() * scale * weight.float()).to(x.dtype)


def rms_norm_wrong_eps(x, weight, eps):
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def layer_norm_wrong_eps(x, weight, bias, eps):
    return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def softmax_bf16(x):
    """Exponentials and their sum in bfloat16."""
    weights = torch.exp((x - x.amax(-1, keepdim=True)).bfloat16())
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def attention_scores_bf16(query, key, value, mask, causal, scale):
    """The scores of a float32 attention in bfloat16."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * scale).bfloat16().float()
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0).to(value.dtype) @ value


def attention_wrong_groups(query, key, value, mask, causal, scale):
    """Query head n reads key-value head n mod G."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat(1, repeat, 1, 1), value.repeat(1, repeat, 1, 1)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )


def attention_nan_rows(query, key, value, mask, causal, scale):
    """A row that sees no key is nan."""
    y = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if mask is not None:
        y = torch.where(mask.any(-1, keepdim=True), y, torch.nan)
    return y


def paged_attention_whole_blocks(query, key_cache, value_cache, block_tables, context_lens, scale):
    """Sees the last block to its end."""
    from divergence.domains.suite.operators import PAGED as OPERATORS

    size = key_cache.shape[1]
    lengths = (context_lens + size - 1) // size * size
    return OPERATORS[0].run(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        context_lens=lengths,
        scale=scale,
    )


def rope_other_layout(query, key, cos, sin):
    from divergence.domains.suite.operators import ROTARY as OPERATORS

    return OPERATORS[1].run(query, key, cos, sin)


def gelu_other_form(x):
    return functional.gelu(x, approximate="tanh")


def argmax_last(x):
    """The last of equal ones."""
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


def topk_last(x, k):
    """Of equal ones the last first."""
    values, indices = torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)
    return values[..., :k], x.shape[-1] - 1 - indices[..., :k]


def topk_first(x, k):
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def moe_gating_not_normalised(logits, k):
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, dim=-1)
    return weights.to(logits.dtype), experts


def quantize_truncating(x, scale, offset):
    scaled = x.float() * scale.float() + offset.float()
    return torch.trunc(scaled).clamp(-128, 127).to(torch.int8)


def quantize_half_away(x, scale, offset):
    """Half-way cases away from zero, as round() in C."""
    scaled = x.float() * scale.float() + offset.float()
    rounded = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return rounded.clamp(-128, 127).to(torch.int8)


def quantize_wrapping(x, scale, offset):
    """No saturation."""
    scaled = x.float() * scale.float() + offset.float()
    return torch.round(scaled).clamp(-(2**31) + 128, 2**31 - 256).int().to(torch.int8)


def dynamic_quant_128(x, smooth):
    """Divides by 128."""
    wide = x.float() if smooth is None else x.float() * smooth.float()
    scale = wide.abs().amax(-1) / 128
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)[..., None])
    return codes.clamp(-128, 127).to(torch.int8), scale


def cast_truncating(x):
    """e4m3fn towards zero."""
    cut = keep_bits(x, 3)
    return cut.clamp(-448, 448).to(torch.float8_e4m3fn)


def sum_bf16(x):
    """Accumulated in the tensors' own dtype, in chunks of 64."""
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for start in range(0, x.shape[-1], 64):
        total = (total.float() + x[..., start : start + 64].float().sum(-1)).to(x.dtype)
    return total


FAULTS = {
    "linear": (linear_tf32, linear_partial_sums, linear_wrong_tile),
    "rms_norm": (rms_norm_statistics_bf16, rms_norm_wrong_eps),
    "layer_norm": (layer_norm_wrong_eps,),
    "softmax": (softmax_bf16,),
    "attention": (attention_scores_bf16, attention_wrong_groups, attention_nan_rows),
    "paged_attention": (paged_attention_whole_blocks,),
    "rope": (rope_other_layout,),
    "gelu": (gelu_other_form,),
    "argmax": (argmax_last,),
    "moe_gating": (moe_gating_not_normalised,),
    "quantize": (quantize_truncating, quantize_half_away, quantize_wrapping),
    "dynamic_quant": (dynamic_quant_128,),
    "cast_e4m3fn": (cast_truncating,),
    "sum": (sum_bf16,),
}
