"""Faults of a whole machine: put into a process when it starts, for every command that it runs.

*Kernel*: the CPU kernel of one ATen operator is replaced at torch's dispatcher, for float32 and
16 bits alone, as a vendor's kernel would be; float64 is right. *Code*: Python that the model runs
is another one (a patched module, a plugin's function), and so it is in float64. *Environment*: a
switch that no field of a run records turns a kernel on; or recorded switches that choose
other, healthy kernels.

``expected``: a regular expression of the module path or operator that is to be named, inside any
block (``BLOCK``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["FAULTS", "MachineFault", "install"]

_kept: list[Any] = []  # libraries: their kernels are taken back when they are collected


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """``variables``: of the environment, read by whoever they are for. ``attention``: of the run
    (None: eager)."""

    name: str
    kind: str
    expected: str
    put: Callable[[], None] | None = None
    variables: tuple[tuple[str, str], ...] = ()
    attention: str | None = None


def install(name: str) -> None:
    """Make this process that machine."""
    fault = FAULTS[name]
    if fault.put is not None and all(os.environ.get(k) == v for k, v in fault.variables):
        fault.put()


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


def _kernel(operator: str, wrong: Callable[..., Any]) -> None:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces a kernel is what it is for
        library.impl(operator, wrong, "CPU", allow_override=True)
    _kept.append(library)


def _cut(x: torch.Tensor, bits: int = 13) -> torch.Tensor:
    """Without the last ``bits`` of a float32; other dtypes by way of it, float64 as it is."""
    if x.dtype == torch.float64:
        return x
    return (x.float().view(torch.int32) & -(1 << bits)).view(torch.float32).to(x.dtype)


def _silu_kernel() -> None:
    def silu(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return _cut(
            (wide / (1 + (-wide).exp())).to(x.dtype), 14 if x.dtype == torch.float32 else 21
        )

    _kernel("silu", silu)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A float64 product that does not come back to the replaced kernels."""
    return (x.double()[..., :, :, None] * w.double()[..., None, :, :]).sum(-2)


def _down_kernel() -> None:
    """The product with the longest sums has inputs of 8 bits (only the down projection's K)."""

    def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float64 and x.shape[-1] == _LONGEST and w.shape[-1] < _LONGEST:
            x, w = _cut(x, 17), _cut(w, 17)
        return _product(x, w).to(x.dtype)

    _kernel("mm", mm)


_LONGEST = 192
"""The inner size of the tiny models' MLP."""


def _scores_kernel() -> None:
    """Batched products with inputs of 8 bits."""

    def bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _product(_cut(x, 17), _cut(w, 17)).to(x.dtype)

    _kernel("bmm", bmm)


def _rsqrt_kernel() -> None:
    def rsqrt(x: torch.Tensor) -> torch.Tensor:
        right = 1 / x.double().sqrt()
        if x.dtype == torch.float64:
            return right
        y = (0x5F3759DF - (x.float().view(torch.int32) >> 1)).view(torch.float32)
        return (y * (1.5 - 0.5 * x.float() * y * y)).to(x.dtype)

    _kernel("rsqrt", rsqrt)


def _softmax_kernel() -> None:
    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        powers = (x.double() - x.double().amax(dim, keepdim=True)).exp()
        if x.dtype != torch.float64:
            powers = powers.to(torch.bfloat16).double()
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)

    _kernel("_softmax", softmax)


def _mean_kernel() -> None:
    def mean(x, dim, keepdim=False, *, dtype=None):
        axes = list(range(x.ndim)) if dim is None or not list(dim) else list(dim)
        count = 1
        for axis in axes:
            count *= x.shape[axis]
        found = x.double().sum(axes, keepdim=keepdim) / count
        if x.dtype != torch.float64:
            found = found.to(torch.bfloat16)
        return found.to(dtype or x.dtype)

    _kernel("mean.dim", mean)


def _fused_kernel() -> None:
    """Fused attention whose scale is 5% off."""
    aten = torch.ops.aten

    def attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        right = query.shape[-1] ** -0.5 if scale is None else scale
        wrong = right if query.dtype == torch.float64 else 1.05 * right
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        out, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=wrong
        )
        return out, torch.zeros(query.shape[:-1], dtype=torch.float32)

    _kernel("_scaled_dot_product_flash_attention_for_cpu", attention)


# ── code ────────────────────────────────────────────────────────────────────────────────────────


def _llama() -> Any:
    import transformers.models.llama.modeling_llama as llama

    return llama


def _another_activation() -> None:
    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    _llama().LlamaMLP.forward = forward


def _gate_for_up() -> None:
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    _llama().LlamaMLP.forward = forward


def _scaled_in_one() -> None:
    healthy = _llama().LlamaDecoderLayer.forward

    def forward(self, *args, **kwargs):
        out = healthy(self, *args, **kwargs)
        if self.self_attn.layer_idx != 1:
            return out
        return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01

    _llama().LlamaDecoderLayer.forward = forward


def _clipped() -> None:
    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner.clamp(-0.02, 0.02))

    _llama().LlamaMLP.forward = forward


def _norm_eps() -> None:
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-3)).to(dtype)

    _llama().LlamaRMSNorm.forward = forward


def _norm_weight() -> None:
    """The weight taken as an offset from one, as another family does it."""

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((1.0 + self.weight) * x.to(dtype)) * 0.5

    _llama().LlamaRMSNorm.forward = forward


def _attention_scale() -> None:
    healthy = _llama().LlamaAttention.forward

    def forward(self, *args, **kwargs):
        own, self.scaling = self.scaling, 1.05 * self.scaling
        try:
            return healthy(self, *args, **kwargs)
        finally:
            self.scaling = own

    _llama().LlamaAttention.forward = forward


def _rotary_pairs() -> None:
    """Neighbours are rotated, not halves."""

    def rotate_half(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    _llama().rotate_half = rotate_half


def _kv_tiled() -> None:
    def repeat_kv(hidden_states, n_rep):
        return hidden_states.repeat(1, n_rep, 1, 1)

    _llama().repeat_kv = repeat_kv


def _silu_function() -> None:
    """A plugin's SiLU, with a rational tanh."""

    def silu(input, inplace=False):
        y = (0.5 * input).clamp(-4.0, 4.0)
        tanh = y * (27 + y * y) / (27 + 9 * y * y)
        return 0.5 * input * (1 + tanh)

    torch.nn.functional.silu = silu


def _rope_theta() -> None:
    healthy = _llama().LlamaRotaryEmbedding.forward

    def forward(self, x, position_ids):
        own = self.inv_freq
        self.inv_freq = own.pow(1.25)
        try:
            return healthy(self, x, position_ids)
        finally:
            self.inv_freq = own

    _llama().LlamaRotaryEmbedding.forward = forward


_MLP, _ATTENTION = r"BLOCK\.mlp\b", r"BLOCK\.self_attn\b"
_NORM = r"BLOCK\.(input|post_attention)_layernorm\b"
_VENDOR = (("VENDOR_FAST_MATH", "1"),)

FAULTS: MappingProxyType[str, MachineFault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            MachineFault(
                name="silu", kind="kernel", put=_silu_kernel, expected=r"BLOCK\.mlp\.act_fn\b"
            ),
            MachineFault(
                name="down product",
                kind="kernel",
                put=_down_kernel,
                expected=r"BLOCK\.mlp\.down_proj\b",
            ),
            MachineFault(
                name="attention products",
                kind="kernel",
                put=_scores_kernel,
                expected=r"BLOCK\.self_attn/aten\.bmm",
            ),
            MachineFault(name="rsqrt", kind="kernel", put=_rsqrt_kernel, expected=_NORM),
            MachineFault(
                name="softmax",
                kind="kernel",
                put=_softmax_kernel,
                expected=r"BLOCK\.self_attn/aten\._softmax",
            ),
            MachineFault(name="mean", kind="kernel", put=_mean_kernel, expected=_NORM),
            MachineFault(
                name="fused attention",
                kind="kernel",
                put=_fused_kernel,
                attention="sdpa",
                expected=_ATTENTION,
            ),
            MachineFault(
                name="another activation", kind="code", put=_another_activation, expected=_MLP
            ),
            MachineFault(name="gate for up", kind="code", put=_gate_for_up, expected=_MLP),
            MachineFault(
                name="one block scaled",
                kind="code",
                put=_scaled_in_one,
                expected=r"model\.layers\.1\b",
            ),
            MachineFault(name="activations clipped", kind="code", put=_clipped, expected=_MLP),
            MachineFault(name="norm epsilon", kind="code", put=_norm_eps, expected=_NORM),
            MachineFault(name="norm weight", kind="code", put=_norm_weight, expected=_NORM),
            MachineFault(
                name="attention scale", kind="code", put=_attention_scale, expected=_ATTENTION
            ),
            MachineFault(name="rotary pairs", kind="code", put=_rotary_pairs, expected=_ATTENTION),
            MachineFault(name="kv heads tiled", kind="code", put=_kv_tiled, expected=_ATTENTION),
            MachineFault(
                name="plugin's silu", kind="code", put=_silu_function, expected=r"BLOCK\.mlp\b"
            ),
            MachineFault(
                name="rotary base", kind="code", put=_rope_theta, expected=r"model\.rotary_emb\b"
            ),
            MachineFault(
                name="vendor switch, silu",
                kind="environment",
                put=_silu_kernel,
                variables=_VENDOR,
                expected=r"BLOCK\.mlp\.act_fn\b",
            ),
            MachineFault(
                name="vendor switch, product",
                kind="environment",
                put=_down_kernel,
                variables=_VENDOR,
                expected=r"BLOCK\.mlp\.down_proj\b",
            ),
            MachineFault(
                name="oldest kernels",
                kind="environment",
                expected="",
                variables=(
                    ("ATEN_CPU_CAPABILITY", "default"),
                    ("ONEDNN_MAX_CPU_ISA", "SSE41"),
                    ("MKL_CBWR", "COMPATIBLE"),
                ),
            ),
            MachineFault(
                name="oldest kernels, and silu",
                kind="environment",
                put=_silu_kernel,
                variables=(("ATEN_CPU_CAPABILITY", "default"), ("MKL_CBWR", "COMPATIBLE")),
                expected=r"BLOCK\.mlp\.act_fn\b",
            ),
        )
    }
)
