"""Gradients of several ranks added up as a collective does: in which dtype, in which order.

Each micro-batch stands for a rank. In a *ring* a tensor of n ranks is cut into n chunks; chunk c
starts at rank c + 1 and goes around, each rank adding its own, so that every chunk is added up in
another order (n - 1 additions deep). In a *tree* neighbours are added pair by pair (log2 n deep).
Every partial sum is rounded to the dtype in which it is sent.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69, 2009 (ring); Thakur, Rabenseifner and Gropp, Int. J. High Perform.
Comput. Appl. 19, 2005 (recursive halving and doubling).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ORDERS", "reduced"]

ORDERS = ("ring", "tree")


def reduced(parts: Sequence[torch.Tensor], *, dtype: torch.dtype, order: str) -> torch.Tensor:
    """The sum of tensors of one shape, one a rank, in ``dtype``; of that shape, in the dtype of the
    first."""
    given = [part.to(dtype).flatten() for part in parts]
    if order == "tree":
        while len(given) > 1:
            pairs = [a + b for a, b in zip(given[::2], given[1::2], strict=False)]
            given = pairs + given[len(given) - len(given) % 2 :]
        total = given[0]
    else:
        count, chunks = len(given), []
        sliced = [tensor.tensor_split(count) for tensor in given]
        for chunk in range(count):
            around = [sliced[(chunk + 1 + step) % count][chunk] for step in range(count)]
            partial = around[0]
            for term in around[1:]:
                partial = partial + term
            chunks.append(partial)
        total = torch.cat(chunks)
    return total.view(parts[0].shape).to(parts[0].dtype)
