"""Sums of ranks' gradients, in the order and dtype of a collective."""

import pytest
import torch

from divergence.domains.training.recording.optimizer import ORDERS, reduced


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_whole_numbers_are_added_exactly(order, count):
    """In any order, by any number of ranks."""
    parts = [torch.arange(35.0).view(5, 7) * (rank + 1) for rank in range(count)]
    total = reduced(parts, dtype=torch.float32, order=order)
    assert torch.equal(total, sum(parts))


def test_the_order_is_that_of_the_collective():
    """1 + tiny + tiny: the tiny ones count only where they are added to each other first."""
    tiny = 2.0**-24
    parts = [torch.full((3,), one) for one in (1.0, tiny, tiny)]
    ring = reduced(parts, dtype=torch.float32, order="ring")
    # chunk 0 goes 1, 2, 0; chunk 1 goes 2, 0, 1; chunk 2 goes 0, 1, 2
    assert ring.tolist() == [1.0 + 2 * tiny, 1.0, 1.0]
    tree = reduced(parts, dtype=torch.float32, order="tree")  # (0 + 1) + 2
    assert tree.tolist() == [1.0, 1.0, 1.0]


def test_every_partial_sum_is_rounded():
    """To the dtype of the reduction, and handed back in that of the parts."""
    parts = [torch.full((2,), 256.0), torch.ones(2), torch.ones(2)]
    total = reduced(parts, dtype=torch.bfloat16, order="tree")
    assert total.dtype == torch.float32
    assert total.tolist() == [256.0, 256.0]  # 257 has no place in bfloat16
