"""What ranks put in: the same bytes everywhere, and what each kind is for."""

import pytest
import torch

from divergence.domains.collectives.cases import draw
from divergence.run.manifest import digest_tensor


@pytest.mark.parametrize(
    ("values", "dtype", "digest"),
    [
        ("random", "float32", "340f7647e07dbf692915ecc7fd9d8520"),
        ("cancelling", "bfloat16", "314ba414673d1af8733e0a2101caaf4e"),
        ("subnormal", "float64", "77ff1f79ca2eae415562e4b86ec1c2da"),
    ],
)
def test_the_bytes_are_the_same_everywhere(values, dtype, digest):
    """Frozen: a machine that draws others would be compared on other inputs."""
    assert digest_tensor(draw(values, dtype, 1037, rank=1, num_ranks=4)) == digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_integers_add_exactly_in_every_order(dtype, num_ranks):
    """Adding one after the other in the dtype gives the sum of float64."""
    terms = [draw("integers", dtype, 300, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    for order in (terms, terms[::-1]):
        total = order[0]
        for one in order[1:]:
            total = total + one
        assert torch.equal(total.double(), torch.stack(terms).double().sum(0))


def test_random_values_fill_the_significand():
    """Their sums are rounded, so that an order of addition shows."""
    a, b, c = (draw("random", "float64", 500, rank=r, num_ranks=3) for r in range(3))
    assert ((a + b) + c != a + (b + c)).float().mean() > 0.1


@pytest.mark.parametrize("num_ranks", [3, 20])
def test_digits_of_rank_coded_sums_name_the_ranks(num_ranks):
    """Also where there are more ranks than bfloat16 has digits."""
    terms = [
        draw("rank_coded", "bfloat16", 9, rank=r, num_ranks=num_ranks) for r in range(num_ranks)
    ]
    total = torch.stack(terms).double().sum(0)
    for element in range(9):
        first = element % -(-num_ranks // 8) * 8  # of as many ranks as there are digits
        ranks = range(first, min(first + 8, num_ranks))
        assert total[element] == 2 ** len(ranks) - 1
        assert [int(terms[r][element]) for r in ranks] == [2**k for k in range(len(ranks))]


def test_cancelling_ranks_lose_leading_digits():
    """The sum is much smaller than its terms."""
    terms = torch.stack([draw("cancelling", "float32", 400, rank=r, num_ranks=4) for r in range(4)])
    assert terms.sum(0).abs().median() < terms.abs().median() / 100


def test_subnormals_are_subnormal():
    """In every dtype, and not zero."""
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        x = draw("subnormal", dtype, 200, rank=0, num_ranks=2)
        assert (x != 0).float().mean() > 0.9
        assert x.abs().max() < torch.finfo(x.dtype).smallest_normal
