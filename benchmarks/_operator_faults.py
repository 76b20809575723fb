"""Faults of one operator, planted as a machine or a port of the code would have them.

A wrong *kernel* is one operator that gives a wrong result: a dispatch mode around the model's
forward, below whatever records, replaces the result of one call of one operator in one module.
The recorder sees one call with a wrong result, and nothing of how it was made wrong.

A fault of *code* gives an operator the wrong thing to work on (another epsilon, another view,
another mask), and is planted in the code. There the first operator that computes something
else is the one to be named. It is stated here for each fault (``expected``), before anything was
measured:

    norm-eps         the addition of eps to the mean; layer_norm, which gets it as an argument
    attention-scale  the multiplication of the scores; fused attention, which gets it
    mask-short       the addition of the mask to the scores; fused attention, which gets it
    rope-pairing     the negation of one half: it is the first that gets the odd numbers in
                     place of the second half
    kv-heads         the copy of the repeated keys, the first whose heads come in another order
    gate-up          the activation: the first that gets up in place of gate

``strength`` blends (0: the healthy result, 1: the fault), but for mantissa, where it is
the number of bits cleared, and faults of code that have no half. Blended kernels round once
more, like a kernel that is off by so much.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks._fault_patches import is_other_kernel
from benchmarks._hidden import hidden

__all__ = ["FAULTS", "ROLES", "OperatorFault", "plant", "site_of"]

ROLES: MappingProxyType[str, str] = MappingProxyType(
    {
        "query": r"(self_attn\.q_proj/aten\.mm|attn\.c_attn/aten\.addmm)",
        "out": r"(self_attn\.o_proj/aten\.mm|attn\.c_proj/aten\.addmm)",
        "up": r"mlp\.(up_proj/aten\.mm|c_fc/aten\.addmm|experts/aten\._grouped_mm)",
        "down": r"mlp\.(down_proj/aten\.mm|c_proj/aten\.addmm|experts/aten\._grouped_mm#2)",
        "router": r"mlp\.gate/aten\.mm",
        "scores": r"(self_attn|attn)/aten\.bmm",
        "mix": r"(self_attn|attn)/aten\.bmm#2",
        "softmax": r"(self_attn|attn)/aten\._softmax",
        "attention": r"(self_attn|attn)/aten\._scaled_dot_product_\w+",
        "scaled": r"(self_attn/aten\.mul#5|attn/aten\.mul)",
        "masked": r"(self_attn/aten\.add#3|attn/aten\.add)",
        "first-statistics": r"(input_layernorm/aten\.mean|ln_1/aten\.native_layer_norm)",
        "statistics": r"(post_attention_layernorm/aten\.mean|ln_2/aten\.native_layer_norm)",
        "eps": r"(post_attention_layernorm/aten\.add|ln_2/aten\.native_layer_norm)",
        "rsqrt": r"post_attention_layernorm/aten\.rsqrt",
        "activation": r"mlp\.(experts\.)?(act_fn/aten\.(silu|gelu)|act/aten\.tanh)",
        "gated": r"mlp\.(experts\.)?act_fn/aten\.(silu|gelu)",
        "keys": r"(self_attn/aten\.cat#3|attn/aten\.cat)",
        "rotated": r"self_attn/aten\.add",
        "half": r"self_attn/aten\.neg",
        "repeated": r"self_attn/aten\.clone",
        "residual": r"/aten\.add",
        "topk": r"mlp\.gate/aten\.topk",
    }
)
"""Parts of a block, by the end of their operator's site; not every architecture has each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFault:
    """``roles``: where it is planted (kernels) or expected (code), each a placement of its own.
    ``whole``: it has no half. ``decode``: nothing is wrong in the prefill. ``ties``: it needs two
    experts with equal rows in the router."""

    name: str
    text: str
    kind: str
    roles: tuple[str, ...]
    whole: bool = False
    decode: bool = False
    ties: bool = False


_ROWS = (
    ("mantissa", "operands truncated", "kernel", ("query", "down", "router", "scores")),
    ("partial-sums", "partial sums in bf16", "kernel", ("up", "down")),
    ("weight-tile", "transposed weight tile", "kernel", ("out", "down")),
    ("zero-tile", "a tile of the result is zero", "kernel", ("query", "up")),
    ("zero-head", "one head is zero", "kernel", ("mix", "attention")),
    ("wrong-row", "one token's row is its neighbour's", "kernel", ("out",)),
    ("wrong-column", "one column is its neighbour's", "kernel", ("residual", "rotated")),
    ("statistics-bf16", "norm statistics in bf16", "kernel", ("first-statistics", "statistics")),
    ("rsqrt-fast", "rsqrt by the bit trick and one step", "kernel", ("rsqrt",)),
    ("softmax-bf16", "softmax in bf16", "kernel", ("softmax", "attention")),
    ("softmax-sum", "softmax's sum lacks the last term", "kernel", ("softmax",)),
    ("activation-fast", "rational tanh in the activation", "kernel", ("activation",)),
    ("scores-scale", "fused attention scales 5% too much", "kernel", ("attention",)),
    ("kv-stale", "stale row in the appended keys", "kernel", ("keys",)),
    ("overflow", "one infinity", "kernel", ("down",)),
    ("topk-ties", "ties in the other order", "kernel", ("topk",)),
    ("norm-eps", "wrong norm epsilon", "code", ("eps",)),
    ("attention-scale", "attention scale 5% off", "code", ("scaled|attention",)),
    ("mask-short", "token does not see itself", "code", ("masked|attention",)),
    ("rope-pairing", "neighbours rotated, not halves", "code", ("half",)),
    ("kv-heads", "tiled kv-head mapping", "code", ("repeated",)),
    ("gate-up", "gate and up swapped", "code", ("gated",)),
)
_WHOLE = ("overflow", "topk-ties", "mask-short", "rope-pairing", "kv-heads", "gate-up")
FAULTS: MappingProxyType[str, OperatorFault] = MappingProxyType(
    {
        name: OperatorFault(
            name=name,
            text=text,
            kind=kind,
            roles=roles,
            whole=name in _WHOLE,
            decode=name == "kv-stale",
            ties=name == "topk-ties",
        )
        for name, text, kind, roles in _ROWS
    }
)


def site_of(role: str, block: str, paths: list[str]) -> str | None:
    """The operator of that role among ``paths``; of ``one|other`` the first there is."""
    for name in role.split("|"):
        ending = ROLES[name]
        found = re.compile(re.escape(block) + (r"" if ending[0] == "/" else r"\.") + ending)
        for path in paths:
            if found.fullmatch(path):
                return path
    return None


def plant(model: nn.Module, name: str, site: str, *, strength: float = 1.0) -> None:
    """Make the operator ``site`` (or the code before it) faulty, in place."""
    module, _, operator = site.partition("/")
    if FAULTS[name].kind == "code":
        _CODE[name](model, module, strength)
        return
    operator, _, number = operator.partition("#")
    mode = _WrongKernel(
        model, module, operator, int(number or 1), functools.partial(_KERNELS[name], strength)
    )
    healthy = model.forward

    @hidden(healthy)
    def forward(*args: Any, **kwargs: Any) -> Any:
        mode.calls = 0
        with mode:
            return healthy(*args, **kwargs)

    model.forward = forward


class _WrongKernel(TorchDispatchMode):
    """The ``number``-th call of ``operator`` directly in ``module`` gives what ``wrong`` makes."""

    def __init__(
        self, model: nn.Module, module: str, operator: str, number: int, wrong: Callable[..., Any]
    ) -> None:
        super().__init__()
        self._target, self._operator, self._number, self._wrong = module, operator, number, wrong
        self._stack: list[str] = []
        self.calls = 0
        for name, part in model.named_modules():
            part.register_forward_pre_hook(lambda *_, n=name: self._stack.append(n))
            part.register_forward_hook(self._left)

    def _left(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        healthy = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if not self._stack or self._stack[-1] != self._target or name != self._operator:
            return healthy
        if is_other_kernel(*args):
            return healthy
        self.calls += 1
        if self.calls != self._number:
            return healthy
        return self._wrong(func, args, kwargs or {}, healthy)


# ── kernels: (strength, operator, its arguments, its healthy result) → the wrong result ─────────

_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "_grouped_mm": (0, 1)}


def _mixed(healthy: torch.Tensor, faulty: torch.Tensor, strength: float) -> torch.Tensor:
    if strength != 1:
        start = healthy.double()
        faulty = start + strength * (faulty.double() - start)
    return faulty.to(healthy.dtype)


def _factors(func: Any, args: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _FACTORS[func.overloadpacket.__name__]
    return args[first], args[second]


def _with_factors(func: Any, args: tuple, kwargs: dict, *new: torch.Tensor) -> torch.Tensor:
    args = list(args)
    for place, tensor in zip(_FACTORS[func.overloadpacket.__name__], new, strict=True):
        args[place] = tensor
    return func(*args, **kwargs)


def _mantissa(cleared: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """Both factors lose their last ``cleared`` mantissa bits (truncated)."""
    cut = [_truncated(factor, round(cleared)) for factor in _factors(func, args)]
    return _with_factors(func, args, kwargs, *cut)


def _truncated(tensor: torch.Tensor, cleared: int) -> torch.Tensor:
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    return (tensor.view(integer) & -(1 << cleared)).view(tensor.dtype)


def _partial_sums(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """K in chunks of 16: exact within one, the running sum rounded to bfloat16."""
    x, w = _factors(func, args)
    total = 0.0
    for start in range(0, x.shape[-1], 16):
        part, weight = x[..., start : start + 16].clone(), w[..., start : start + 16, :].clone()
        if func.overloadpacket.__name__ == "_grouped_mm":
            product = _with_factors(func, args, kwargs, part, weight).float()
        else:
            product = part.float() @ weight.float()
        total = (product + total).to(torch.bfloat16).float()
    if func.overloadpacket.__name__ == "addmm":
        total = total + args[0].float()
    return _mixed(healthy, total, s)


def _weight_tile(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """A square tile of the weight, half its shorter side and at most 32, is read transposed."""
    x, w = _factors(func, args)
    side = min(32, *(size // 2 for size in w.shape[-2:]))
    wrong = w.clone(memory_format=torch.preserve_format)
    wrong[..., :side, :side] = w[..., :side, :side].transpose(-1, -2)
    return _mixed(healthy, _with_factors(func, args, kwargs, x, wrong), s)


def _zero_tile(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """16 columns of the first 16 rows were never written."""
    wrong = healthy.clone()
    wrong[:16, 16:32] = 0
    return _mixed(healthy, wrong, s)


def _zero_head(s: float, func: Any, args: tuple, kwargs: dict, healthy: Any) -> Any:
    """One head of what attention gives: axis 0 of a batched product, axis 1 of a fused one."""
    first = healthy[0] if isinstance(healthy, tuple) else healthy
    wrong = first.clone()
    wrong[(slice(None), 1) if first.ndim == 4 else 1] = 0
    wrong = _mixed(first, wrong, s)
    return (wrong, *healthy[1:]) if isinstance(healthy, tuple) else wrong


def _wrong_row(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    if len(healthy) < 2:
        return healthy
    wrong = healthy.clone()
    wrong[-1] = healthy[-2]
    return _mixed(healthy, wrong, s)


def _wrong_column(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    wrong = healthy.clone()
    wrong[..., 5] = healthy[..., 6]
    return _mixed(healthy, wrong, s)


def _statistics(s: float, func: Any, args: tuple, kwargs: dict, healthy: Any) -> Any:
    """The mean of squares, or a layer norm's mean, variance and its root, rounded to bfloat16."""
    if not isinstance(healthy, tuple):
        return _mixed(healthy, healthy.to(torch.bfloat16), s)
    x, _, weight, bias, eps = args
    mean = x.float().mean(-1, keepdim=True).to(torch.bfloat16).float()
    variance = (x.float() - mean).square().mean(-1, keepdim=True).to(torch.bfloat16).float()
    rstd = (variance + eps).rsqrt().to(torch.bfloat16).float()
    wrong = (x.float() - mean) * rstd * weight.float() + bias.float()
    return (_mixed(healthy[0], wrong, s), *healthy[1:])


def _rsqrt_fast(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """0x5f3759df - (x >> 1) and one Newton step: off by up to 1.8e-3."""
    x = args[0].float()
    y = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32)
    return _mixed(healthy, y * (1.5 - 0.5 * x * y * y), s)


def _softmax_bf16(s: float, func: Any, args: tuple, kwargs: dict, healthy: Any) -> Any:
    """Scores, exponentials, their sum and the quotient, each rounded to bfloat16."""

    def low(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16).float()

    def softmax(scores: torch.Tensor) -> torch.Tensor:
        powers = low(low(scores.float() - scores.float().amax(-1, keepdim=True)).exp())
        return low(powers / low(powers.sum(-1, keepdim=True)))

    if not isinstance(healthy, tuple):
        return _mixed(healthy, softmax(args[0]), s)
    wrong = softmax(_scores(args, kwargs)) @ _for_each_head(args[2], args[0])
    return (_mixed(healthy[0], wrong, s), *healthy[1:])


def _scores(args: tuple, kwargs: dict) -> torch.Tensor:
    """Of a fused attention: (B, N, T, K), masked."""
    query, key = args[0].float(), _for_each_head(args[1], args[0])
    scores = query @ key.transpose(-1, -2) * (kwargs.get("scale") or query.shape[-1] ** -0.5)
    if kwargs.get("attn_mask") is not None:
        return scores + kwargs["attn_mask"].float()
    if (len(args) > 4 and args[4]) or kwargs.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _for_each_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values of grouped heads, repeated for the queries' heads."""
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _softmax_sum(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """The denominator misses the last key (a tail that a vector loop forgot)."""
    wrong = healthy.float() / (1 - healthy.float()[..., -1:]).clamp_min(0.1)
    return _mixed(healthy, wrong, s)


def _activation_fast(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """tanh(t) ≈ t (27 + t²) / (27 + 9 t²), |t| <= 3, off by up to 0.024, wherever there is one."""
    x = args[0].float()

    def tanh(t: torch.Tensor) -> torch.Tensor:
        t = t.clamp(-3, 3)
        return t * (27 + t**2) / (27 + 9 * t**2)

    name = func.overloadpacket.__name__
    if name == "tanh":
        wrong = tanh(x)
    elif name == "silu":
        wrong = x * (0.5 + 0.5 * tanh(x / 2))
    else:
        wrong = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    return _mixed(healthy, wrong, s)


def _scores_scale(s: float, func: Any, args: tuple, kwargs: dict, healthy: Any) -> Any:
    scale = kwargs.get("scale") or args[0].shape[-1] ** -0.5
    return func(*args, **{**kwargs, "scale": (1 + 0.05 * s) * scale})


def _kv_stale(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    """In decode steps the newest row of the cache but one is still what lies before it."""
    new = args[0][-1].shape[-2]
    if new != 1 or healthy.shape[-2] < 3:
        return healthy
    wrong = healthy.clone()
    wrong[..., -2, :] = healthy[..., -3, :]
    return _mixed(healthy, wrong, s)


def _overflow(s: float, func: Any, args: tuple, kwargs: dict, healthy: torch.Tensor) -> Any:
    wrong = healthy.clone()
    wrong.view(-1)[7] = torch.inf
    return wrong


def _topk_ties(s: float, func: Any, args: tuple, kwargs: dict, healthy: Any) -> Any:
    """Of equal values the other one first; else as it should be."""
    scores, count = args[0], args[1]
    last = scores.shape[-1] - 1
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    if torch.equal(chosen, healthy[1]):
        chosen = last - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        chosen = chosen[..., :count]
    return scores.gather(-1, chosen), chosen.contiguous()


_KERNELS: dict[str, Callable[..., Any]] = {
    "activation-fast": _activation_fast,
    "kv-stale": _kv_stale,
    "mantissa": _mantissa,
    "overflow": _overflow,
    "partial-sums": _partial_sums,
    "rsqrt-fast": _rsqrt_fast,
    "scores-scale": _scores_scale,
    "softmax-bf16": _softmax_bf16,
    "softmax-sum": _softmax_sum,
    "statistics-bf16": _statistics,
    "topk-ties": _topk_ties,
    "weight-tile": _weight_tile,
    "wrong-column": _wrong_column,
    "wrong-row": _wrong_row,
    "zero-head": _zero_head,
    "zero-tile": _zero_tile,
}


# ── code: (model, module of the expected operator, strength) ────────────────────────────────────


def _norm_eps(model: nn.Module, path: str, strength: float) -> None:
    """ε = 1e-2 at strength 1."""
    norm = model.get_submodule(path)
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    right = getattr(norm, name)
    setattr(norm, name, right + strength * (1e-2 - right))


def _attention_scale(model: nn.Module, path: str, strength: float) -> None:
    attention = model.get_submodule(path)
    attention.scaling = attention.scaling * (1 + 0.05 * strength)


def _mask_short(model: nn.Module, path: str, strength: float) -> None:
    """A token sees all before it and not itself; the first one keeps itself."""

    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():  # the mask comes from outside: nobody sees it made
            hidden_states = args[0] if args else kwargs["hidden_states"]
            cache = kwargs.get("past_key_values")
            past = 0 if cache is None else int(cache.get_seq_length(module.layer_idx))
            new = hidden_states.shape[1]
            own = torch.arange(past, past + new)[:, None]
            keys = torch.arange(past + new)[None]
            seen = (keys < own) | ((own == 0) & (keys == 0))
            mask = torch.zeros(seen.shape, dtype=hidden_states.dtype)
            mask = mask.masked_fill(~seen, torch.finfo(hidden_states.dtype).min)[None, None]
        return args, {**kwargs, "attention_mask": mask}

    model.get_submodule(path).register_forward_pre_hook(change, with_kwargs=True)


def _patched(module: nn.Module, name: str, wrong: Callable[..., Any]) -> None:
    """A function of the module's Python file is another one while the module runs."""
    file, healthy = sys.modules[type(module).__module__], module.forward

    @hidden(healthy)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(file, name, wrong):
            return healthy(*args, **kwargs)

    module.forward = forward


def _rope_pairing(model: nn.Module, path: str, strength: float) -> None:
    """Neighbouring numbers are taken as a pair (GPT-J) where halves are right (GPT-NeoX)."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((-odd, even), dim=-1).flatten(-2)

    _patched(model.get_submodule(path), "rotate_half", rotate)


def _kv_heads(model: nn.Module, path: str, strength: float) -> None:
    """Query head h reads kv head h mod Nkv (tile) where h // (N / Nkv) (repeat) is right."""

    def repeat(hidden: torch.Tensor, count: int) -> torch.Tensor:
        batch, heads, length, width = hidden.shape
        wide = hidden[:, None].expand(batch, count, heads, length, width)
        return wide.reshape(batch, count * heads, length, width)

    _patched(model.get_submodule(path), "repeat_kv", repeat)


def _gate_up(model: nn.Module, path: str, strength: float) -> None:
    """down(act(up) × gate) for down(act(gate) × up)."""
    mlp = model.get_submodule(path.rpartition(".")[0])
    if hasattr(mlp, "gate_up_proj"):
        healthy, chunk = mlp.forward, torch.Tensor.chunk

        @hidden(healthy)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(
                torch.Tensor, "chunk", lambda t, *a, **k: chunk(t, *a, **k)[::-1]
            ):
                return healthy(*args, **kwargs)

        mlp.forward = forward
        return

    def wrong(x: torch.Tensor) -> torch.Tensor:
        gate = mlp.gate_proj(x)
        return mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * gate)

    mlp.forward = wrong


_CODE: dict[str, Callable[[nn.Module, str, float], None]] = {
    "attention-scale": _attention_scale,
    "gate-up": _gate_up,
    "kv-heads": _kv_heads,
    "mask-short": _mask_short,
    "norm-eps": _norm_eps,
    "rope-pairing": _rope_pairing,
}
