"""Incremental attention over a paged cache of keys and values: one new token per sequence.

The cache is a pool of blocks (blocks, block size, G, H); a sequence's tokens lie in the blocks that
its row of the block table names, in order, and it sees the first ``context_lens`` of them
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023). What lies beyond in the last block and in other blocks is large here, so that reading
it shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from divergence.ops.suite.definition import (
    Arguments,
    Implementation,
    Operator,
    Plan,
    TensorSource,
    cases_of,
    normal,
    to_tensor,
)
from divergence.ops.suite.operators.attention import attend

Shape = tuple[int, ...]
_BLOCK = 16
_FLASH_PAGE = 256


def _gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """One sequence's keys or values: (G, S, H)."""
    if not 0 < length <= table.numel() * cache.shape[1]:
        raise ValueError(f"{length} tokens in {table.numel()} blocks")
    pages = cache[table[: -(-length // cache.shape[1])].long()]  # (blocks, size, G, H)
    return pages.flatten(0, 1)[:length].transpose(0, 1)


def _run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Gathers each sequence, then scaled_dot_product_attention."""
    results = []
    for number, length in enumerate(context_lens.tolist()):
        key, value = (
            _gathered(cache, block_tables[number], length)[None]
            for cache in (key_cache, value_cache)
        )
        queries = query[number][None, :, None]  # (N, H) → (1, N, 1, H)
        attended = functional.scaled_dot_product_attention(
            queries, key, value, scale=scale, enable_gqa=queries.shape[1] != key.shape[1]
        )
        results.append(attended[0, :, 0])
    return torch.stack(results)


def _truth(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attention of query b over its context_lens[b] first cached tokens; see attention.attend."""
    results = []
    for number, length in enumerate(context_lens.tolist()):
        key, value = (
            _gathered(cache, block_tables[number], length) for cache in (key_cache, value_cache)
        )
        groups, heads = key.shape[0], query.shape[1]
        # (N, H) → (G, N/G, H): the heads that read one key-value head are its queries
        queries = query[number].reshape(groups, heads // groups, -1)
        results.append(attend(queries, key, value, None, scale).reshape(heads, -1))
    return torch.stack(results)


def _inputs(source: TensorSource, shape: Shape) -> Arguments:
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
        "query": source.plain("query", (batch, heads, width), scale=2.0), **caches,
        "block_tables": torch.from_numpy(tables.copy()),
        "context_lens": torch.tensor(lengths, dtype=torch.int32), "scale": width**-0.5,
    }  # fmt: skip


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


def _flash_attn() -> Implementation:
    from flash_attn import flash_attn_with_kvcache

    def call(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
    ) -> Any:
        keys, table = _repaged(key_cache, block_tables)
        values, _ = _repaged(value_cache, block_tables)
        attended = flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=context_lens, block_table=table,
            softmax_scale=scale,
        )  # fmt: skip
        return attended[:, 0]

    return call


def _npu() -> Implementation:
    import torch_npu

    def call(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
    ) -> Any:
        batch, heads, width = query.shape
        blocks, size, groups, _ = key_cache.shape
        operands = (
            query.reshape(batch, 1, heads * width),
            key_cache.reshape(blocks, size, groups * width),
            value_cache.reshape(blocks, size, groups * width),
        )
        paged = {"block_table": block_tables, "block_size": size, "num_heads": heads,
                 "num_key_value_heads": groups, "input_layout": "BSH"}  # fmt: skip
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

    return call


_PLAN: Plan = (
    ("decode", "normal"), ("decode", "outliers"), ("odd", "normal"), ("odd", "outliers"),
    ("odd", "equal"), ("batch", "normal"),
)  # fmt: skip
_SHAPES = {"decode": (1, 8, 2, 9, 64), "odd": (3, 6, 3, 13, 40), "batch": (8, 8, 8, 64, 64)}


OPERATORS = (
    Operator(
        name="paged_attention", run=_run, truth=_truth,
        cases=cases_of(_inputs, shapes=_SHAPES, plan=_PLAN),
        implementations={"flash_attn": _flash_attn, "torch_npu": _npu},
    ),
)  # fmt: skip
