"""The two-sample test of texts: its level, what it sees, and the power that it states."""

import itertools

import numpy as np
import pytest

from divergence.numerics.statistics import two_sample


def _answers(generator, num, length, spread=3, base=0):
    """Like a model: one of a few tokens at each place."""
    return base + generator.integers(0, spread, (num, length))


def _pairs(seed, *, num_prompts=12, num=6, share=0.0):
    """``share``: of the second side's answers, how many are answers to something else."""
    generator = np.random.default_rng(seed)
    found = []
    for prompt in range(num_prompts):
        one, two = (_answers(generator, num, 30, base=10 * prompt) for _ in range(2))
        away = generator.random(num) < share
        two[away] = _answers(generator, int(away.sum()), 30, base=10_000)
        found.append((one, two))
    return found


def test_the_statistic_is_that_of_the_formula():
    """Gretton et al., eq. 3, by hand: means over other answers of one side, less twice across."""
    (one, two), *_ = _pairs(3, num_prompts=1, num=4)

    def kernel(x, y):
        return np.mean([a == b for a, b in zip(x, y, strict=True)])

    def within(side):
        return np.mean([kernel(x, y) for x, y in itertools.permutations(side, 2)])

    across = np.mean([kernel(x, y) for x in one for y in two])
    expected = within(one) + within(two) - 2 * across
    assert two_sample([(one, two)]).mmd == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_its_level_holds():
    """Of 200 pairs of one source about one in a hundred gives p <= 1%."""
    found = [two_sample(_pairs(seed, num_prompts=4)).p_value for seed in range(200)]
    assert sum(p <= 0.01 for p in found) <= 7  # more: one in 1,000
    assert np.mean(np.array(found) <= 0.5) == pytest.approx(0.5, abs=0.12)


@pytest.mark.slow
def test_the_stated_share_is_seen():
    """At the smallest share four of five draws are seen, at a quarter of it few."""
    share = two_sample(_pairs(1)).smallest_share
    assert 0 < share < 1
    seen = [two_sample(_pairs(seed, share=share)).p_value <= 0.01 for seed in range(30)]
    unseen = [two_sample(_pairs(seed, share=share / 4)).p_value <= 0.01 for seed in range(30)]
    assert np.mean(seen) >= 0.6 and np.mean(unseen) < np.mean(seen)


def test_few_answers_have_no_p_value():
    """Too few prompts give none, and one answer is an error."""
    found = two_sample(_pairs(1, num_prompts=1, num=3))
    assert (found.p_value, found.smallest_share) == (None, None)
    with pytest.raises(ValueError, match="two answers"):
        two_sample([(np.zeros((1, 4)), np.zeros((3, 4)))])
