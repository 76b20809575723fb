"""Machines in software: sums whose order and arithmetic are known."""

import random
from collections.abc import Callable

import pytest
import torch

from divergence.domains.probe.additions import Arithmetic, Summing, replay
from divergence.numerics.trees import Tree


@pytest.fixture(scope="session")
def random_tree() -> Callable[..., Tree]:
    """``random_tree(seed, num_leaves, fused=False)``: any shape, leaves in any order."""

    def make(seed: int, num_leaves: int, *, fused: bool = False) -> Tree:
        source = random.Random(seed)
        row, nodes = list(range(num_leaves)), []
        source.shuffle(row)
        while len(row) > 1:
            wide = min(len(row), source.choice([2, 2, 3, 5]) if fused else 2)
            # at the front for chains, anywhere for bushes
            start = 0 if source.random() < 0.4 else source.randrange(len(row) - wide + 1)
            nodes.append(tuple(row[start : start + wide]))
            row[start : start + wide] = [num_leaves + len(nodes) - 1]
        return Tree.of(num_leaves, nodes)

    return make


@pytest.fixture(scope="session")
def machine() -> Callable[..., Summing]:
    """``machine(tree, dtype, arithmetic)``: an operator that adds in the order of ``tree``.

    ``other``: the tree of the last columns, four of them.
    """

    def make(
        tree: Tree,
        dtype: torch.dtype = torch.float32,
        arithmetic: Arithmetic | None = None,
        *,
        products: bool = True,
        rows: int = 2,
        columns: int = 16,
        other: Tree | None = None,
    ) -> Summing:
        how = arithmetic or Arithmetic()

        def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
            made = replay(operator, tree, how, leaves, partner)
            if other is not None:
                made[:, -4:] = replay(operator, other, how, leaves[-4:], partner)
            return made

        operator = Summing(
            name="machine",
            shape=f"n={tree.num_leaves}",
            dtype=dtype,
            terms=tree.num_leaves,
            rows=rows if products else 1,
            columns=columns,
            products=products,
            call=call,
        )
        return operator

    return make
