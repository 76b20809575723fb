"""Flips at near ties, and flips whose margin moved."""

import numpy as np
import pytest
from msgspec.structs import replace

from divergence.domains.scores.joining import causes_of, flips_of, pair, shift_of
from divergence.domains.scores.judging import adjusted, measured
from divergence.domains.scores.rows import DEFAULT_BANDS, ScoreRow, Series, SeriesName
from divergence.facts import sentence, worded


def side(choices, scores):
    rows = [
        ScoreRow(document=str(n), score=score, choices=tuple(one), answer=str(np.argmax(one)))
        for n, (one, score) in enumerate(zip(choices, scores, strict=True))
    ]
    return Series(SeriesName("t", "", "acc"), "file", rows=rows)


def test_the_shift_of_a_margin():
    """Between A's choice and B's; where they agree, between A's two likeliest."""
    a, b = (
        ScoreRow("x", 1.0, choices=(-1.0, -1.5, -9.0)),
        ScoreRow("x", 0.0, choices=(-2.0, -1.75, -9.0)),
    )
    assert shift_of(a, b) == pytest.approx(0.75)
    assert shift_of(a, ScoreRow("x", 1.0, choices=(-1.0, -1.25, -9.0))) == pytest.approx(0.25)
    assert shift_of(a, ScoreRow("x", 1.0, choices=(-1.0, -1.25))) is None
    assert shift_of(a, ScoreRow("x", 1.0)) is None


def made(num, *, fault):
    """Margins of 1, moved by a little noise; two documents flip at ties, two by a fault."""
    generator = np.random.default_rng(0)
    a = np.stack([np.full(num, -1.0), np.full(num, -2.0)], axis=1)
    a[:2, 1] = -1.001
    b = a + generator.normal(0, 0.01, a.shape)
    b[:2, 0], b[2:4, 0] = -1.02, (-5.0 if fault else b[2:4, 0])
    b[:2, 1] = -1.0
    right = np.zeros(num)
    return (side(a, (a.argmax(1) == right) * 1.0), side(b, (b.argmax(1) == right) * 1.0))


def test_the_difference_is_shared_out():
    """Both parts add up to the difference of the flipped documents."""
    pairs = pair(*made(400, fault=True))
    causes = causes_of(pairs, ("bfloat16", "bfloat16"))
    assert (causes.num_ties, causes.num_shifts) == (2, 2)
    assert causes.difference_of_ties == causes.difference_of_shifts == pytest.approx(-2 / 400)
    total = causes.difference_of_ties + causes.difference_of_shifts
    assert total == pytest.approx(float((pairs.candidate - pairs.reference).mean()))
    assert {pairs.rows[n][0].document for n in flips_of(pairs)[:2]} == {"2", "3"}


def test_a_fault_everywhere_is_no_rounding():
    """Where every margin moves by nats, the dtype's rounding is the limit, and not the shifts."""
    generator = np.random.default_rng(1)
    a = np.stack([np.full(200, -1.0), np.full(200, -1.8)], axis=1)
    b = a + generator.normal(0, 2.0, a.shape)
    pairs = pair(side(a, np.ones(200)), side(b, (b.argmax(1) == 0) * 1.0))
    causes = causes_of(pairs, ("bfloat16", "bfloat16"))
    assert sentence(causes.source) == "the rounding of bfloat16" and causes.limit < 1
    assert causes.num_shifts > 0.9 * (causes.num_shifts + causes.num_ties)
    assert "for want of a dtype" in sentence(causes_of(pairs, ("bfloat16", None)).source)
    assert causes_of(pairs, ("float32", "float32")).limit < 0.001


@pytest.mark.parametrize(
    ("moved", "dtype", "is_told"),
    [
        (0.26, "float32", True),
        (2.0, "bfloat16", True),
        (1e-5, "float32", False),
        (0.02, "bfloat16", False),
        (0.26, None, False),
    ],
)
@pytest.mark.parametrize("lost", [0, 3])
def test_margins_beyond_rounding_stand_in_the_first_line(moved, dtype, is_told, lost):
    """Whether or not a score flipped: the score may be the same by luck."""
    a = np.stack([np.full(200, -1.0), np.full(200, -9.0)], axis=1)
    b = a + np.array([0.0, moved])
    right = np.arange(200) >= lost
    series = side(a, np.ones(200))
    pairs = pair(series, side(b, right * 1.0))
    task = replace(measured(series, pairs, DEFAULT_BANDS), causes=causes_of(pairs, (dtype, dtype)))
    summary = worded(adjusted([task]))[0].summary
    assert ("margins moved by" in summary) == is_told, summary


def test_nothing_is_said_where_nothing_is_known():
    """Without likelihoods, or without flips."""
    same = made(50, fault=False)[0]
    assert causes_of(pair(same, same), (None, None)) is None
    bare = Series(SeriesName("t", "", "acc"), "f", rows=[ScoreRow("x", 1.0)])
    other = Series(SeriesName("t", "", "acc"), "f", rows=[ScoreRow("x", 0.0)])
    assert causes_of(pair(bare, other), (None, None)) is None
