"""The two sums of the device digest in one compiled pass; definitions: numerics.summaries.fold."""

from __future__ import annotations

import numpy as np

from divergence.numerics.compiled.numbers import jit

__all__ = ["chunk_sums"]


@jit
def _add_products(words: np.ndarray, multipliers: np.ndarray, sums: np.ndarray) -> None:
    """Adds to ``sums`` (chunks, 2), modulo 2^64. ``words``: int32, the same for both sums."""
    size = multipliers.shape[1]
    for chunk in range(sums.shape[0]):
        start = chunk * size
        one, two = np.int64(0), np.int64(0)
        for i in range(min(size, len(words) - start)):
            word = np.int64(words[start + i])
            one += multipliers[0, i] * word
            two += multipliers[1, i] * word
        sums[chunk, 0] += one
        sums[chunk, 1] += two


def chunk_sums(words: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Both sums of each chunk of ``words`` (int32), int64 (chunks, 2). ``multipliers``: int64
    (2, words in a chunk)."""
    sums = np.zeros((-(-len(words) // multipliers.shape[1]), 2), dtype=np.int64)
    _add_products(words, multipliers, sums)
    return sums
