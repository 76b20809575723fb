"""summarize_many gives what summarize gives, one by one."""

import pytest
import torch

from divergence.numerics.summary import summarize, summarize_many
from divergence.run.captured import piece_of

FIELDS = ("min", "max", "mean", "rms", "absmax")
COUNTS = ("num_nan", "num_posinf", "num_neginf", "num_zero")


def _tensors():
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(1, 1, 64, generator=generator) for _ in range(40)]
    odd = [plain[0].clone() for _ in range(6)]
    odd[0][..., 3] = float("nan")
    odd[1][..., 5] = float("inf")
    odd[2].fill_(1e30)
    odd[3].fill_(1e-40)
    odd[4].zero_()
    odd[5].fill_(float("nan"))
    mixed = [*plain, *odd]
    return [
        *mixed,
        *(t.to(torch.bfloat16) for t in mixed),
        *(t.double() * 1e250 for t in mixed),
        torch.arange(10),
        torch.empty(0),
        torch.tensor(3.5),
        torch.randn(200, 300, generator=generator),
    ]


def test_many_equal_each(kernel):
    """Stacked or not, every field agrees to 1e-6 and every count exactly, in order."""
    tensors = _tensors()
    pieces = [piece_of(tensor) for tensor in tensors]
    found = summarize_many([(piece.dtype, piece.data) for piece in pieces], kernel=kernel)
    for many, tensor in zip(found, tensors, strict=True):
        one = summarize(tensor)
        for name in FIELDS:
            if getattr(one, name) is None:
                assert getattr(many, name) is None
            else:
                scale = 1e-6 * (one.rms or 0.0)
                assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=scale)
        assert [getattr(many, n) for n in COUNTS] == [getattr(one, n) for n in COUNTS]


def test_nothing_gives_nothing():
    """No tensors, no summaries."""
    assert summarize_many([]) == []
