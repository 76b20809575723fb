"""What `scores` claims of its statistics, by simulation.

    python benchmarks/scores_coverage.py [--replicates 10000]

Scores are drawn, evaluated by the functions that `divergence scores` uses, and counted: how often
the 95% interval holds the true difference, how often each test rejects what is true (its level is
5%), and how often it finds what it is said to find (power 80%). The permutation test draws 9,999
changes of sign for each, and takes most of the quarter of an hour. Documents of one cluster
flip together with probability 0.55, so that two of them are correlated by 0.3. `lost` and `gained`
are what share of the documents flips in each direction; `noted` is how often the answer has a note
that few clusters differ, in one direction.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache

import numpy as np
from scipy import stats

from divergence.domains.scores.statistics import (
    documents_needed,
    equivalence_p,
    interval,
    lopsided,
    mcnemar,
    mean_of,
    padding,
    score_interval,
    sign_test,
    smallest_difference,
)

TOGETHER = 0.3**0.5
_CELLS = 4_000_000
BEYOND = ((1000, 5, 0.01, 0.0), (1000, 10, 0.02, 0.0), (2000, 20, 0.02, 0.0), (4000, 20, 0.02, 0.0))
"""Where large clusters flip as a whole, and a set has one or two such, or none."""


def drawn(
    generator: np.random.Generator, replicates: int, num: int, size: int, lost: float, gained: float
) -> Iterator[np.ndarray]:
    """Sums of clusters of ``size``, (some replicates, clusters), until there are all."""

    def flips(*shape: int) -> np.ndarray:
        chance = generator.random(shape, dtype=np.float32)
        return (chance > 1 - gained).astype(np.int8) - (chance < lost).astype(np.int8)

    step = max(1, _CELLS // num)
    for start in range(0, replicates, step):
        rows = min(step, replicates - start)
        if size == 1:
            yield flips(rows, num).astype(float)
            continue
        shape = rows, num // size, size
        common = generator.random(shape, dtype=np.float32) < TOGETHER
        both = np.where(common, flips(*shape[:2], 1), flips(*shape))
        yield both.sum(-1, dtype=float)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def share(number: int, of: int) -> str:
    return f"{number / of:.1%}"


def shown(sums: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The interval that `divergence scores` gives of binary scores."""
    if sizes.max() > 1:
        return interval(mean_of(sums, sizes, pad=padding(sums, sizes, 1.0)), 0.95)
    return score_interval((sums < 0).sum(-1), (sums > 0).sum(-1), len(sizes), 0.95)


def coverage(generator: np.random.Generator, replicates: int) -> None:
    row("n", "clusters of", "lost", "gained", "interval holds", "plain t", "mean width", "noted")
    row(*["---"] * 8)
    flips = ((0.02, 0.0), (0.05, 0.05), (0.1, 0.05), (0.15, 0.15), (0.25, 0.15), (0.4, 0.3))
    grid = [
        (num, size, *one) for num in (50, 200, 1000, 10_000) for size in (1, 5) for one in flips
    ]
    for num, size, lost, gained in [*grid, *BEYOND]:
        held = plain = noted = 0
        width = 0.0
        for sums in drawn(generator, replicates, num, size, lost, gained):
            sizes = np.full(num // size, float(size))
            low, high = shown(sums, sizes)
            held += int(((low <= gained - lost) & (gained - lost <= high)).sum())
            width += float((high - low).sum())
            low, high = interval(mean_of(sums, sizes), 0.95)
            plain += int(((low <= gained - lost) & (gained - lost <= high)).sum())
            noted += int(lopsided(sums).sum()) if size > 1 else 0
        shares = share(held, replicates), share(plain, replicates)
        row(
            f"{num:,}",
            size,
            f"{lost:.0%}",
            f"{gained:.0%}",
            *shares,
            f"{width / replicates:.4f}",
            share(noted, replicates),
        )


def attainable() -> None:
    """One document of fifty is lost on average. An interval goes by how many are: what it can hold
    is the chance of so many or fewer."""
    print("\n| of 50 documents, 2% lost | chance |")
    print("|---|---|")
    for most in (1, 2, 3):
        row(f"at most {most} lost", f"{stats.binom.cdf(most, 50, 0.02):.1%}")


def errors(generator: np.random.Generator, replicates: int) -> None:
    """How often each test rejects what is true."""
    exact = cache(mcnemar)
    print("\n| test | of what is true | n | clusters of | rejected (level 5%) |")
    print("|---|---|---|---|---|")
    for num in (50, 200, 1000, 10_000):
        wrong = 0
        for sums in drawn(generator, replicates, num, 1, 0.05, 0.05):
            counts = zip((sums < 0).sum(1), (sums > 0).sum(1), strict=True)
            wrong += sum(exact(int(lost), int(gained)) <= 0.05 for lost, gained in counts)
        row("McNemar", "no difference, 10% flip", f"{num:,}", 1, share(wrong, replicates))
    for num, size in ((50, 1), (200, 5)):
        wrong = 0
        for sums in drawn(generator, replicates, num, size, 0.15, 0.15):
            graded = sums * generator.random(sums.shape)
            sizes = np.full(num // size, float(size))
            wrong += sum(sign_test(one, sizes)[0] <= 0.05 for one in graded)
        row("permutation", "no difference, graded", f"{num:,}", size, share(wrong, replicates))
    for num in (50, 200, 1000, 10_000):
        for size in (1, 5):
            band, wrong = 0.03, 0
            for sums in drawn(generator, replicates, num, size, 0.05, 0.02):
                sizes = np.full(num // size, float(size))
                p = equivalence_p(sums, sizes, band * sizes, pad=padding(sums, sizes, 1.0))
                wrong += int((p <= 0.05).sum())
            row("TOST", "off by the band, 3 points", f"{num:,}", size, share(wrong, replicates))


def powers(generator: np.random.Generator, replicates: int) -> None:
    """How often each test finds what it is said to find."""
    print("\n| what is said | n | found (80% said) |")
    print("|---|---|---|")
    for flips, band in ((0.02, 0.0123), (0.1, 0.03), (0.1, 0.01)):
        num = documents_needed(flips**0.5, 1.0, difference=0.0, band=band, num=0)
        assert num is not None
        found = 0
        for sums in drawn(generator, replicates, num, 1, flips / 2, flips / 2):
            sizes = np.ones(num)
            p = equivalence_p(sums, sizes, band * sizes, pad=padding(sums, sizes, 1.0))
            found += int((p <= 0.05).sum())
        said = f"documents needed: {flips:.0%} flip, band {band:g}"
        row(said, f"{num:,}", share(found, replicates))
    for num, size, flips in ((200, 1, 0.2), (1000, 1, 0.1), (1000, 5, 0.1), (10_000, 1, 0.1)):
        spread = (flips * (1 + (size - 1) * 0.3) / num) ** 0.5
        difference = smallest_difference(spread, num / size - 1)
        found = 0
        for sums in drawn(
            generator, replicates, num, size, (flips + difference) / 2, (flips - difference) / 2
        ):
            sizes = np.full(num // size, float(size))
            low, high = shown(sums, sizes)
            found += int(((high < 0) | (low > 0)).sum())
        said = f"smallest difference {difference:.4f}: {flips:.0%} flip, clusters of {size}"
        row(said, f"{num:,}", share(found, replicates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=10_000)
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    coverage(generator, given.replicates)
    attainable()
    errors(generator, given.replicates)
    powers(generator, given.replicates)


if __name__ == "__main__":
    main()
