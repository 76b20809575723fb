"""Norms of rows: the last axis summed, the leading axes flattened."""

from __future__ import annotations

import torch

__all__ = ["row_norms"]

_CHUNK_ELEMENTS = 1 << 16


def row_norms(a: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
    """‖a_t‖, or ‖a_t - base_t‖, for each row t; float64, shape (rows,). A 0-d tensor is one row.

    Non-finite elements count as 0. Accumulated in float64, chunk by chunk.
    """
    features = a.shape[-1] if a.ndim else 1
    rows = a.reshape(-1, features) if features else a.reshape(0, 1)
    other = None if base is None else base.reshape(-1, features)
    norms = torch.zeros(rows.shape[0], dtype=torch.float64)
    step = max(1, _CHUNK_ELEMENTS // max(features, 1))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].to(torch.float64)
        if other is not None:
            block = block - other[start : start + step].to(torch.float64)
        block = block.nan_to_num(0.0, 0.0, 0.0)
        norms[start : start + step] = torch.linalg.vector_norm(block, dim=-1)
    return norms
