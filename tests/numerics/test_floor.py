"""How far rounding moves a row, by the model of it."""

import pytest

from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_grow_with_their_length_and_in_a_block_with_its_widest(dtype):
    """Four products of four times the width in a block, and one of the width itself outside."""

    def sums(in_block):
        short, long = (
            floor_weights(format_named(dtype), num_features=n, in_block=in_block)[1] ** 2
            for n in (64, 4096)
        )
        return long - short

    assert sums(True) == pytest.approx(16 * sums(False))
