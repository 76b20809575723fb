"""Rotary position embedding, in the two layouts that checkpoints come in.

Pairs of features are turned by an angle that grows with the position (Su et al., "RoFormer",
2021). Which features form a pair is a convention: half-split pairs i with i + D/2 (GPT-NeoX,
Llama in transformers), interleaved pairs 2i with 2i + 1 (the paper, GPT-J, Meta's Llama). The
same weights under the other convention give fluent nonsense, so each layout is an operator.

cos and sin are inputs (T, D/2): rational points of the circle, ((1 - t²), 2t) / (1 + t²), which
come out of exact arithmetic alike on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from divergence.ops.suite.definition import (
    PLAN,
    Arguments,
    Implementation,
    Operator,
    TensorSource,
    cases_of,
    normal,
    stored,
    to_tensor,
)

Shape = tuple[int, ...]


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)  # (..., D) → two of (..., D/2)
    return first, second


def _rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' apply_rotary_pos_emb: x · cos + rotate_half(x) · sin, tables doubled."""
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def turn(x: Tensor) -> Tensor:
        first, second = _halves(x)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn(query), turn(key)


def _rope_interleaved(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    return turn(query), turn(key)


def _truth_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) → (a cos θ - b sin θ, b cos θ + a sin θ) for a = x_i, b = x_(i + D/2)."""

    def turn(x: Tensor) -> Tensor:
        a, b = _halves(x)
        return torch.cat([stored(a * cos) - stored(b * sin), stored(b * cos) + stored(a * sin)], -1)

    return turn(query), turn(key)


def _truth_rope_interleaved(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for a = x_(2i), b = x_(2i + 1)."""

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        pair = [stored(a * cos) - stored(b * sin), stored(b * cos) + stored(a * sin)]
        return torch.stack(pair, -1).flatten(-2)

    return turn(query), turn(key)


def _inputs(source: TensorSource, shape: Shape) -> Arguments:
    batch, heads, kv_heads, tokens, width = shape
    t = normal("angle", (tokens, width // 2))
    whole = 1.0 + t * t
    return {
        "query": source.main("query", (batch, heads, tokens, width)),
        "key": source.main("key", (batch, kv_heads, tokens, width)),
        "cos": to_tensor((1.0 - t * t) / whole, source.dtype),
        "sin": to_tensor(2.0 * t / whole, source.dtype),
    }


def _npu(interleaved: bool) -> Callable[[], Implementation]:
    def find() -> Implementation:
        import torch_npu

        def call(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            repeat = (lambda x: x.repeat_interleave(2, -1)) if interleaved else (
                lambda x: torch.cat([x, x], -1)
            )  # fmt: skip
            tables = [repeat(table)[None, None].contiguous() for table in (cos, sin)]
            mode = "interleave" if interleaved else "half"
            return tuple(
                torch_npu.npu_rotary_mul(x.contiguous(), *tables, rotary_mode=mode)
                for x in (query, key)
            )

        return call

    return find


_SHAPES = {"decode": (1, 8, 2, 1, 64), "odd": (1, 3, 1, 7, 38), "prefill": (1, 4, 2, 48, 64)}
_PLAN = [entry for entry in PLAN if entry != ("odd", "equal")]  # adds nothing here

OPERATORS = (
    Operator(
        name="rope", run=_rope, truth=_truth_rope,
        cases=cases_of(_inputs, shapes=_SHAPES, plan=_PLAN),
        implementations={"torch_npu": _npu(False)},
    ),
    Operator(
        name="rope_interleaved", run=_rope_interleaved,
        truth=_truth_rope_interleaved, cases=cases_of(_inputs, shapes=_SHAPES, plan=_PLAN),
        implementations={"torch_npu": _npu(True)},
    ),
)  # fmt: skip
