"""How each fault of faults.py is computed, and how it is put into a module.

A patch takes the part of a block that the fault needs and the strength of the blend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks._hidden import hidden

__all__ = ["PATCHES", "fast_silu", "tanh_gelu"]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _mix(healthy: torch.Tensor, faulty: torch.Tensor, strength: float) -> torch.Tensor:
    """The blend, in the healthy tensor's dtype. ``faulty`` may be wider: it is rounded here."""
    if strength != 1:
        start = _wide(healthy)
        faulty = start + strength * (_wide(faulty) - start)
    return faulty.to(healthy.dtype)


OF_RUNS_DTYPE = False
"""Are faults those of kernels of the run's own dtype? Then a truth in float64, which takes other
kernels, has none of them. Machines of the benchmarks say so."""


def is_other_kernel(*operands: Any) -> bool:
    """Is it the float64 pass that calls, and the fault not in it?"""
    return OF_RUNS_DTYPE and any(
        isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in operands
    )


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()


def _replace(module: nn.Module, wrong: Callable[..., Any]) -> None:
    """``wrong(healthy, *args, **kwargs)`` in place of ``module.forward``; its signature stays."""
    healthy = module.forward

    @hidden(healthy)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_other_kernel(*args, *kwargs.values()):
            return healthy(*args, **kwargs)
        return wrong(healthy, *args, **kwargs)

    module.forward = forward


def _after(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], strength: float
) -> None:
    """A fault of what comes out: ``change`` gets it widened."""

    def wrong(healthy: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = healthy(*args, **kwargs)
        return _mix(out, change(_wide(out)), strength)

    _replace(module, wrong)


def _instead(module: nn.Module, faulty: Callable[..., torch.Tensor], strength: float) -> None:
    """Another kernel: ``faulty(healthy, *args)``, whose result has the healthy dtype."""

    def wrong(healthy: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = faulty(healthy, *args, **kwargs)
        return out if strength == 1 else _mix(healthy(*args, **kwargs), out, strength)

    _replace(module, wrong)


class _Intercept(TorchFunctionMode):
    """Hands the result of every torch function to ``change(function, result)``."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._change(func, func(*args, **(kwargs or {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of an attention kernel. query (B, N, T, H), key and value (B, Nkv, K, H)."""

    kernel: Callable[..., tuple[torch.Tensor, Any]]
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    rest: dict[str, Any]

    def run(self) -> tuple[torch.Tensor, Any]:
        """Heads (B, T, N, H) and attention weights or None."""
        operands = (self.module, self.query, self.key, self.value, self.mask)
        return self.kernel(*operands, scaling=self.scaling, **self.rest)


def _attend(
    attention: nn.Module,
    faulty: Callable[[_Call], tuple[torch.Tensor, Any]],
    strength: float,
) -> None:
    """Another attention kernel, eager or sdpa. It sees keys and values as the cache returns them;
    what it makes of them does not go back into the cache."""
    table = type(sys.modules[type(attention).__module__].ALL_ATTENTION_FUNCTIONS)

    def wrong(healthy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        real = table.get_interface  # read now: another fault of this module may be around

        def get_interface(self: Any, *names: Any) -> Callable[..., Any]:
            kernel = real(self, *names)

            def attend(module, query, key, value, attention_mask=None, *, scaling=None, **rest):
                call = _Call(
                    kernel=kernel,
                    module=module,
                    query=query,
                    key=key,
                    value=value,
                    mask=attention_mask,
                    scaling=scaling,
                    rest=rest,
                )
                heads, weights = faulty(call)
                if strength != 1:
                    heads = _mix(call.run()[0], heads, strength)
                return heads, weights

            return attend

        with mock.patch.object(table, "get_interface", get_interface):
            return healthy(*args, **kwargs)

    _replace(attention, wrong)


# ── output of the MLP or mixer ──────────────────────────────────────────────────────────────────


def _scale(branch: nn.Module, strength: float) -> None:
    """out × 1.05."""
    _after(branch, lambda out: out * 1.05, strength)


def _bias(branch: nn.Module, strength: float) -> None:
    """out + 0.1 rms(out), the same for every element."""
    _after(branch, lambda out: out + 0.1 * _rms(out), strength)


def _noise(branch: nn.Module, strength: float) -> None:
    """out + 0.1 rms(out) × N(0, 1), seeded by the number of calls since the last one of several
    tokens (the prefill): a repeated run is the same run."""
    calls = 0

    def change(out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls = calls + 1 if out.shape[-2] == 1 else 0
        generator = torch.Generator().manual_seed(calls)
        # Drawn in float64 always: each dtype has a stream of its own.
        noise = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return out + 0.1 * _rms(out) * noise.to(dtype=out.dtype).to(out.device)

    _after(branch, change, strength)


def _channel(branch: nn.Module, strength: float) -> None:
    """The middle channel holds the next one's value, as from a wrong address."""

    def change(out: torch.Tensor) -> torch.Tensor:
        middle = out.shape[-1] // 2
        wrong = out.clone()
        wrong[..., middle] = out[..., middle + 1]
        return wrong

    _after(branch, change, strength)


# ── attention ───────────────────────────────────────────────────────────────────────────────────


def _zero_head(attention: nn.Module, strength: float) -> None:
    """The middle head's slice of what enters the output projection is zero."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        heads, weights = call.run()
        heads = heads.clone()
        heads[:, :, heads.shape[2] // 2] = 0
        return heads, weights

    _attend(attention, faulty, strength)


def _attention_scale(attention: nn.Module, strength: float) -> None:
    """softmax(1.05 × scale × QKᵀ)."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        scaling = call.scaling or call.query.shape[-1] ** -0.5
        return replace(call, scaling=1.05 * scaling).run()

    _attend(attention, faulty, strength)


def _mask_short(attention: nn.Module, strength: float) -> None:
    """``<`` for ``<=``: a token sees all before it and not itself, in prefill and decode. One that
    sees only itself (the first) keeps itself: its softmax would be 0/0."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        visible, newest, index = _visible(call)
        fewer = visible & (index != newest)
        return _masked(call, torch.where(fewer.any(-1, keepdim=True), fewer, visible)).run()

    _attend(attention, faulty, strength)


def _mask_long(attention: nn.Module, strength: float) -> None:
    """A diagonal one too far right: a token also sees the next one, where there is one. Nothing
    differs in decode steps, nor at the last token of the block's output."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        if call.query.shape[-2] == 1:
            return call.run()  # a mask that hides nothing would still be another kernel
        visible, newest, index = _visible(call)
        return _masked(call, visible | (index == newest + 1)).run()

    _attend(attention, faulty, strength)


def _visible(call: _Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each query sees (…, T, K), the newest key of that (…, T, 1), and key numbers (K,)."""
    num_queries, num_keys = call.query.shape[-2], call.key.shape[-2]
    device = call.query.device
    if call.mask is None:  # sdpa's is_causal, or one query that sees all
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        visible = visible.tril(num_keys - num_queries)
    elif call.mask.dtype == torch.bool:
        visible = call.mask
    else:
        # Additive: hidden is finfo.min of some dtype, perhaps widened since; float16's is -65504.
        visible = call.mask > -3e4
    index = torch.arange(num_keys, device=device)
    return visible, torch.where(visible, index, -1).amax(-1, keepdim=True), index


def _masked(call: _Call, visible: torch.Tensor) -> _Call:
    """Additive in the query's dtype: the one form that eager and sdpa both take."""
    dtype = call.query.dtype
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask = mask.masked_fill(~visible, torch.finfo(dtype).min)
    return replace(call, mask=mask if mask.ndim == 4 else mask[None, None])


def _kv_heads(attention: nn.Module, strength: float) -> None:
    """Query head h reads kv head h mod Nkv (tile) where h // (N / Nkv) (repeat) is right."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        # The kernel repeats, so the query heads are dealt out as it would have to read them.
        num_kv_heads = call.key.shape[1]
        heads = torch.arange(call.query.shape[1], device=call.query.device)
        dealt = heads.view(-1, num_kv_heads).T.reshape(-1)
        out, weights = replace(call, query=call.query[:, dealt]).run()
        return out[:, :, dealt.argsort()], weights

    _attend(attention, faulty, strength)


def _kv_fp8(attention: nn.Module, strength: float) -> None:
    """Attention sees keys and values rounded to float8_e4m3fn, unscaled, in prefill and decode."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        return replace(call, key=_through_fp8(call.key), value=_through_fp8(call.value)).run()

    _attend(attention, faulty, strength)


def _through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Nearest float8_e4m3fn, ties to even, saturating at 448; no cast, so in any dtype."""
    wide = _wide(tensor).clamp(-448, 448)
    # 2^(e-1) <= |x| < 2^e; 3 bits after the leading one; subnormals below 2^-6.
    exponent = torch.frexp(wide).exponent.clamp(-5, 9)
    steps = [2.0 ** (number - 4) for number in range(-5, 10)]  # exact, as pow() need not be
    step = torch.tensor(steps, dtype=wide.dtype, device=wide.device)[(exponent + 5).long()]
    return ((wide / step).round() * step).to(tensor.dtype)


def _kv_stale(attention: nn.Module, strength: float) -> None:
    """At decode steps the newest cached entry (the last token but this one) is still what the
    entry before it holds: a slot was not written in time."""

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        num_keys = call.key.shape[-2]
        if call.query.shape[-2] != 1 or num_keys < 3:
            return call.run()
        read = torch.arange(num_keys, device=call.key.device)
        read[-2] = num_keys - 3
        return replace(call, key=call.key[..., read, :], value=call.value[..., read, :]).run()

    _attend(attention, faulty, strength)


def _rope_base(target: tuple[nn.Module, torch.Tensor, float], strength: float) -> None:
    """This block's tables are of base 10,000 (of 500,000 where that is right). Rotation is linear
    in the tables, so blended tables are blended queries and keys; cached keys have the fault."""
    attention, inverse, factor = target

    def wrong(healthy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        positions = kwargs.get("position_ids")
        if positions is None:
            cache = kwargs.get("past_key_values")
            start = int(cache.get_seq_length(attention.layer_idx)) if cache is not None else 0
            positions = torch.arange(start, start + cos.shape[-2], device=cos.device)[None]
        num_pairs = inverse.numel()
        # From one entry to the next it is base^(-1/pairs), also where all of them are scaled.
        right = float(inverse[0] / inverse[1]) ** num_pairs
        ratio = (5e5 if right < 3e4 else 1e4) / right
        powers = [ratio ** (-pair / num_pairs) for pair in range(num_pairs)]
        frequencies = inverse.float().to(cos.device) * torch.tensor(powers, device=cos.device)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)  # (B, T, H)
        tables = ((cos, angles.cos()), (sin, angles.sin()))
        mixed = tuple(_mix(table, faulty * factor, strength) for table, faulty in tables)
        return healthy(*args, **{**kwargs, "position_embeddings": mixed})

    _replace(attention, wrong)


def _rope_shift(target: tuple[nn.Module, torch.Tensor, float], strength: float) -> None:
    """Queries are rotated as if one position later, keys as they should be: each distance is one
    too long. (Both shifted alike would cancel: attention sees differences of positions.)"""
    attention, inverse, _ = target

    def faulty(call: _Call) -> tuple[torch.Tensor, Any]:
        angles = inverse.float().to(call.query.device)
        cos, sin = angles.cos(), angles.sin()
        left, right, rest = _wide(call.query).tensor_split((len(angles), 2 * len(angles)), dim=-1)
        turned = (left * cos - right * sin, right * cos + left * sin, rest)
        return replace(call, query=torch.cat(turned, dim=-1).to(call.query.dtype)).run()

    _attend(attention, faulty, strength)


# ── MLP ─────────────────────────────────────────────────────────────────────────────────────────


def fast_silu(x: torch.Tensor) -> torch.Tensor:
    """x × sigmoid(x) with tanh(t) ≈ t (27 + t²) / (27 + 9 t²), |t| <= 3: a known fast tanh, which
    is off by up to 0.024."""
    half = (x / 2).clamp(-3, 3)
    return x * (0.5 + 0.5 * half * (27 + half**2) / (27 + 9 * half**2))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """The usual approximation of gelu, off by up to 5e-4."""
    return F.gelu(x, approximate="tanh")


def _activation(target: tuple[nn.Module, Callable], strength: float) -> None:
    """tanh gelu for exact gelu and the reverse; ``fast_silu`` for silu."""
    module, other = target
    _instead(module, lambda _, x: other(_wide(x)).to(x.dtype), strength)


def _gate_up(mlp: nn.Module, strength: float) -> None:
    """down(act(up) × gate) for down(act(gate) × up), in experts too."""
    if hasattr(mlp, "gate_up_proj"):

        def faulty(healthy: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            with _Intercept(lambda func, out: out[::-1] if func is torch.Tensor.chunk else out):
                return healthy(*args, **kwargs)

        _instead(mlp, faulty, strength)
        return

    def wrong(_: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        product = mlp.act_fn(up) * gate
        if strength != 1:
            # forward, not a call: hooks see one activation.
            product = _mix(mlp.act_fn.forward(gate) * up, product, strength)
        return mlp.down_proj(product)

    _replace(mlp, wrong)


def _router(router: nn.Module, strength: float) -> None:
    """Logits rounded to bfloat16; in a 16-bit model, to float8_e4m3fn (saturating)."""

    def change(func: Any, out: Any) -> Any:
        if func is not F.linear:
            return out
        if out.element_size() == 2:
            return _mix(out, out.clamp(-448, 448).to(torch.float8_e4m3fn), strength)
        return _mix(out, out.to(torch.bfloat16), strength)

    def wrong(healthy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Intercept(change):
            return healthy(*args, **kwargs)

    _replace(router, wrong)


# ── norms ───────────────────────────────────────────────────────────────────────────────────────


def _norm_eps(norm: nn.Module, strength: float) -> None:
    """ε = 1e-2, or 100 times the right one if that is more: off by about ε / (2 mean square)."""
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"

    def faulty(healthy: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        with mock.patch.object(norm, name, max(1e-2, 100 * getattr(norm, name))):
            return healthy(*args)

    _instead(norm, faulty, strength)


def _norm_bf16(norm: nn.Module, strength: float) -> None:
    """Every intermediate rounded to bfloat16: squares, mean, rsqrt, products."""

    def change(_: Any, out: Any) -> Any:
        floating = isinstance(out, torch.Tensor) and out.is_floating_point()
        return out.to(torch.bfloat16).to(out.dtype) if floating else out

    def faulty(healthy: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with _Intercept(change):
            if not isinstance(norm, nn.LayerNorm):
                return healthy(x)
            # One fused operator: taken apart, to have intermediates.
            centred = _wide(x) - _wide(x).mean(-1, keepdim=True)
            scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
            return (scaled * norm.weight + (0 if norm.bias is None else norm.bias)).to(x.dtype)

    _instead(norm, faulty, strength)


# ── projections ─────────────────────────────────────────────────────────────────────────────────


def _matrix(linear: nn.Module) -> torch.Tensor:
    """(out, in); Conv1D stores it the other way round."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight.T


def _weight_tile(linear: nn.Module, strength: float) -> None:
    """A square tile in the corner, half the shorter side and at most 64, is read transposed."""

    def faulty(_: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        weight = _matrix(linear).clone()
        side = min(64, min(weight.shape) // 2)
        weight[:side, :side] = _matrix(linear)[:side, :side].T
        return F.linear(x, weight, linear.bias)

    _instead(linear, faulty, strength)


def _weight_int8(linear: nn.Module, strength: float) -> None:
    """Weights on a grid of absmax / 127 per output channel, symmetric, round to even."""

    def faulty(_: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        weight = _wide(_matrix(linear))
        step = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
        weight = ((weight / step).round() * step).to(linear.weight.dtype)
        return F.linear(x, weight, linear.bias)

    _instead(linear, faulty, strength)


def _partial_sums(linear: nn.Module, strength: float) -> None:
    """The K axis in chunks of 16: exact within one, the running sum rounded to bfloat16."""

    def faulty(_: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        total = None
        chunks = zip(x.split(16, dim=-1), _matrix(linear).split(16, dim=-1), strict=True)
        for part, weight in chunks:
            product = F.linear(_wide(part), _wide(weight))
            total = (product if total is None else total + product).to(torch.bfloat16)
            total = total.to(product.dtype)
        if linear.bias is not None:
            total = total + _wide(linear.bias)
        return total.to(x.dtype)

    _instead(linear, faulty, strength)


def _mantissa(linear: nn.Module, strength: float) -> None:
    """Inputs and weights lose their last mantissa bits (truncated): 7 stay in float32, as if
    bfloat16 had been fed to the matrix unit, and 4 in the 16-bit formats; float64 keeps all. A
    widened input (its dtype is not the weight's) is not truncated: such an operator is exact."""

    def faulty(healthy: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in _MANTISSA or x.dtype != linear.weight.dtype:
            return healthy(x)
        return F.linear(_truncated(x), _truncated(_matrix(linear)), linear.bias)

    _instead(linear, faulty, strength)


_MANTISSA = {
    torch.float32: (torch.int32, 23 - 7),
    torch.float16: (torch.int16, 10 - 4),
    torch.bfloat16: (torch.int16, 7 - 4),
}
"""The integer of the same width, and how many of the last bits are cleared."""


def _truncated(tensor: torch.Tensor) -> torch.Tensor:
    integer, bits = _MANTISSA[tensor.dtype]
    return (tensor.view(integer) & -(1 << bits)).view(tensor.dtype)


PATCHES: dict[str, Callable[[Any, float], None]] = {
    "activation": _activation,
    "attention-scale": _attention_scale,
    "bias": _bias,
    "channel": _channel,
    "gate-up": _gate_up,
    "kv-fp8": _kv_fp8,
    "kv-heads": _kv_heads,
    "kv-stale": _kv_stale,
    "mantissa": _mantissa,
    "mask-long": _mask_long,
    "mask-short": _mask_short,
    "noise": _noise,
    "norm-bf16": _norm_bf16,
    "norm-eps": _norm_eps,
    "partial-sums": _partial_sums,
    "rope-base": _rope_base,
    "rope-shift": _rope_shift,
    "router-low": _router,
    "scale": _scale,
    "weight-int8": _weight_int8,
    "weight-tile": _weight_tile,
    "zero-head": _zero_head,
}
"""By fault: puts it into the part that it needs."""
