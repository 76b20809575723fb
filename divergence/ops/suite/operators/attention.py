"""Softmax, and attention over whole sequences with grouped heads and masks.

Axes: B batch, N heads, G key-value heads, T queries, S keys, H head dim. Query head n reads
key-value head n // (N / G). Masks are boolean, True where a key is seen; a query that sees no key
gives 0, as torch's scaled_dot_product_attention does since 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from divergence.ops.suite.definition import (
    Arguments,
    Implementation,
    Operator,
    OperatorCase,
    Plan,
    TensorSource,
    Unavailable,
    cases_of,
    stored,
)

Shape = tuple[int, ...]


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
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _run_math(**operands: Any) -> Tensor:
    """torch's own formula, in elementary operators."""
    attended: Tensor = _backend("MATH")()(**operands)
    return attended


def _run_eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """As eager attention in transformers: scores in the tensors' dtype, softmax in float32."""
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


def _truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    *,
    scores_stored: bool = False,
) -> Tensor:
    """See attend."""
    heads, queries = query.shape[1], query.shape[2]
    seen = _seen(mask, causal, query.new_zeros(queries, key.shape[2]))
    key, value = _spread(key, heads), _spread(value, heads)
    return attend(query, key, value, seen, scale, scores_stored=scores_stored)


_truth_eager = partial(_truth, scores_stored=True)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Each key-value head once for every query head that reads it: (B, G, S, H) → (B, N, S, H)."""
    batch, groups, length, width = x.shape
    if groups == heads:
        return x
    wide = x[:, :, None].expand(batch, groups, heads // groups, length, width)
    return wide.reshape(batch, heads, length, width)


def _seen(mask: Tensor | None, causal: bool, scores: Tensor) -> Tensor | None:
    if not causal:
        return mask
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()


def _tensors(source: TensorSource, shape: Shape) -> Arguments:
    batch, heads, groups, queries, keys, width = shape
    inner, outer = source.values in ("outliers", "equal"), source.values
    where = (batch, groups, keys, width)
    return {
        "query": source.plain("query", (batch, heads, queries, width), scale=2.0),
        "key": source.main("key", where) if inner else source.plain("key", where),
        "value": source.main("value", where, axis=-2) if outer != "normal" or source.strided
        else source.plain("value", where),
        "mask": None, "causal": False, "scale": width**-0.5,
    }  # fmt: skip


def _causal(source: TensorSource, shape: Shape) -> Arguments:
    return {**_tensors(source, shape), "causal": True}


def _masked(kind: str) -> Callable[[TensorSource, Shape], Arguments]:
    def build(source: TensorSource, shape: Shape) -> Arguments:
        return {**_tensors(source, shape), "mask": torch.from_numpy(mask_of(kind, shape))}

    return build


def mask_of(kind: str, shape: Shape) -> np.ndarray:
    """(B, 1, T, S), True where query t sees key s. ``padding``: the last sample's first keys are
    none; ``all_masked``: its first two queries see nothing; ``window``: the last five keys up to
    the query's own place at the end."""
    batch, _, _, queries, keys, _ = shape
    seen = np.ones((batch, 1, queries, keys), dtype=bool)
    if kind == "padding":
        seen[-1, :, :, : keys // 3] = False
    elif kind == "all_masked":
        seen[-1, :, :2] = False
    elif kind == "window":
        place = np.arange(queries)[:, None] + keys - queries - np.arange(keys)[None]
        seen &= (place >= 0) & (place < _WINDOW)
    return seen


_SHAPES = {
    "decode": (1, 8, 2, 1, 130, 64), "odd": (2, 3, 3, 7, 19, 40), "grouped": (2, 6, 2, 9, 33, 32),
    "square": (1, 3, 3, 33, 33, 40), "prefill": (1, 4, 2, 48, 48, 64),
}  # fmt: skip
_FULL: Plan = (
    ("decode", "normal"), ("decode", "outliers"), ("odd", "normal"), ("odd", "outliers"),
    ("odd", "subnormals"), ("odd", "cancelling"), ("odd", "equal"), ("odd.strided", "normal"),
    ("grouped", "normal"), ("prefill", "normal"), ("prefill", "outliers"),
)  # fmt: skip


def _cases() -> Iterator[OperatorCase]:
    yield from cases_of(_tensors, shapes=_SHAPES, plan=_FULL)()
    square: Plan = (("square", "normal"), ("prefill", "normal"))
    yield from cases_of(_causal, shapes=_SHAPES, plan=square, suffix="causal")()
    odd: Plan = (("odd", "normal"), ("grouped", "normal"))
    for kind in ("padding", "all_masked", "window"):
        yield from cases_of(_masked(kind), shapes=_SHAPES, plan=odd, suffix=kind)()


def _backend(name: str) -> Callable[[], Implementation]:
    """scaled_dot_product_attention with one backend alone; what it cannot do, it refuses."""

    def find() -> Implementation:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, name, None)
        if backend is None:
            raise Unavailable(f"torch {torch.__version__} has no {name.lower()}")

        def call(**operands: Any) -> Tensor:
            with sdpa_kernel([backend]):
                return _run_sdpa(**operands)

        return call

    return find


def _flash_attn() -> Implementation:
    from flash_attn import flash_attn_func

    def call(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Any:
        if mask is not None:
            raise Unavailable("flash_attn takes no mask")
        # (B, N, T, H) → (B, T, N, H) and back
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal).transpose(1, 2)

    return call


OPERATORS = (
    Operator(
        name="softmax", run=lambda x: torch.softmax(x, -1), truth=_truth_softmax,
        cases=cases_of(_logits),
    ),
    Operator(
        name="log_softmax", run=lambda x: torch.log_softmax(x, -1), truth=_truth_log_softmax,
        cases=cases_of(_logits),
    ),
    Operator(
        name="attention", run=_run_sdpa, truth=_truth, cases=_cases,
        implementations={
            "sdpa_flash": _backend("FLASH_ATTENTION"), "sdpa_math": _backend("MATH"),
            "sdpa_efficient": _backend("EFFICIENT_ATTENTION"),
            "sdpa_cudnn": _backend("CUDNN_ATTENTION"), "flash_attn": _flash_attn,
        },
    ),
    Operator(
        name="attention_math", run=_run_math, truth=_truth_eager,
        cases=_cases,
    ),
    Operator(
        name="attention_eager", run=_run_eager, truth=_truth_eager,
        cases=_cases,
    ),
)  # fmt: skip
