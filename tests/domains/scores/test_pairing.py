"""Pairs are one document asked alike; everything else is counted, and is in no number."""

import numpy as np
import pytest

from divergence.domains.scores.joining import pair, preflight
from divergence.domains.scores.rows import ScoreRow, Series, SeriesName
from divergence.facts import plain, worded


def series(*rows: ScoreRow, **settings: str) -> Series:
    return Series(SeriesName("t", "", "acc"), "file", settings, rows=list(rows))


def row(name, score, **fields):
    return ScoreRow(document=name, score=score, **fields)


def test_documents_meet_by_identity_in_any_order():
    """Another order is told, and changes nothing."""
    a = series(row("x", 1.0), row("y", 0.0), row("z", 1.0))
    b = series(row("z", 0.0), row("x", 1.0), row("y", 0.0))
    found = pair(a, b)
    assert (found.candidate - found.reference).tolist() == [0.0, 0.0, -1.0]
    assert found.binary and not found.same_order
    lines = {line.check: line for line in preflight(a, b, found)}
    assert lines["order"].status == "differs" and lines["documents"].status == "same"


def test_what_is_in_no_pair_is_counted():
    """Missing, without a score, asked in other words, another right answer."""
    a = series(
        row("x", 1.0),
        row("only", 1.0),
        row("nan", 1.0),
        row("p", 1.0, prompt="1"),
        row("t", 1.0, target="1"),
    )
    b = series(
        row("x", 1.0),
        row("new", 1.0),
        row("nan", None, why=plain("the score is nan")),
        row("p", 1.0, prompt="2"),
        row("t", 1.0, target="2"),
    )
    held = pair(a, b).pairing
    assert (held.num_paired, held.num_reference, held.num_candidate) == (1, 5, 5)
    assert (held.num_reference_only, held.num_candidate_only) == (1, 1)
    assert (held.num_other_prompt, held.num_other_target, held.num_unscored) == (1, 1, 1)
    assert held.whys == {"the score is nan": 1} and held.num_left_out == 5
    assert pair(a, b, force=True).pairing.num_paired == 3


def test_what_both_sides_lack_is_counted_once():
    """Contradicting itself on one side, without a score on the other: one document."""
    a = series(row("x", 1.0), row("y", 1.0), row("y", 0.0), row("z", None))
    b = series(row("x", 1.0), row("y", None), row("z", None))
    held = pair(a, b).pairing
    assert (held.num_conflicting, held.num_unscored, held.num_left_out) == (1, 1, 2)


@pytest.mark.parametrize(("most", "is_told"), [(50.0, True), (-50.0, False)])
def test_percent_is_no_number_below_zero(most, is_told):
    """Shares up to 1 against percent; a log-likelihood of -50 is no percent."""
    a = series(*(row(str(n), 1.0) for n in range(20)))
    b = series(*(row(str(n), most if n == 3 else 1.0) for n in range(20)))
    assert ("units" in {line.check for line in preflight(a, b, pair(a, b))}) == is_told


def test_duplicates():
    """A row twice is used once; rows that contradict one another are not used."""
    a = series(row("x", 1.0), row("x", 1.0), row("y", 1.0), row("y", 0.0), row("z", 0.0))
    b = series(row("x", 1.0), row("y", 1.0), row("z", 0.0))
    found = pair(a, b)
    assert found.pairing.num_paired == 2
    assert (found.pairing.num_duplicates, found.pairing.num_conflicting) == (1, 1)
    assert found.pairing.num_candidate_only == 0
    lines = {line.check: line for line in preflight(a, b, found)}
    assert (
        worded(lines["duplicates"]).detail
        == "1 rows repeat a document; 1 documents have two scores"
    )


def test_repeats_are_a_mean_and_no_documents():
    """Four answers to each of two questions are two documents."""
    answers = [
        row(name, score, repeat=n) for name in "xy" for n, score in enumerate((1.0, 1.0, 0.0, 0.0))
    ]
    found = pair(series(*answers), series(row("x", 1.0), row("y", 0.0)))
    assert found.pairing.num_paired == 2 and found.pairing.repeats == (4.0, 1.0)
    assert found.reference.tolist() == [0.5, 0.5] and not found.binary and not found.single


def test_clusters():
    """Documents without a cluster are their own; one a document is none."""
    names = ["g", "g", None, "h"]
    rows = [row(str(n), 1.0, cluster=name) for n, name in enumerate(names)]
    found = pair(series(*rows), series(*rows))
    assert found.clusters.tolist() == [0, 0, 1, 2] and found.pairing.num_clusters == 3
    alone = [row(str(n), 1.0, cluster=str(n)) for n in range(3)]
    assert pair(series(*alone), series(*alone)).clusters is None
    assert np.array_equal(pair(series(), series()).reference, [])


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ("ggh", "xxy", None),
        ("ggh", "xyy", "blocking"),
        ("ghi", "xxx", "blocking"),
        ("ggh", "", None),
        ("gg-", "-xx", None),
    ],
)
def test_clusters_must_be_the_same_on_both_sides(a, b, status):
    """By what belongs together: names may differ, and one side may tell none."""
    sides = [
        series(*(row(str(n), 1.0, cluster=names[n : n + 1].strip("-") or None) for n in range(3)))
        for names in (a, b)
    ]
    lines = {line.check: line.status for line in preflight(*sides, pair(*sides))}
    assert lines.get("clusters") == status


def test_lower_and_higher_is_no_one_direction():
    """Two series that are better in opposite directions are not compared."""
    a, b = series(row("x", 1.0)), series(row("x", 1.0))
    b.higher_is_better = False
    lines = {line.check: line for line in preflight(a, b, pair(a, b))}
    assert lines["direction"].status == "blocking"
    assert (lines["direction"].reference, lines["direction"].candidate) == (
        "higher is better",
        "lower is better",
    )


@pytest.mark.parametrize(
    ("scale", "noise", "is_told"),
    [(100, 0.02, True), (0.01, 0.0, True), (10, 0.0, True), (10, 0.02, False), (2, 0.0, False)],
)
def test_other_units_are_told_by_documents(scale, noise, is_told):
    """Small shares, scores below 0 and one absurd score: what most documents show counts."""
    values = [0.15 - 0.01 * n for n in range(30)]
    a = series(*(row(str(n), one) for n, one in enumerate(values)))
    other = [scale * one * (1 + noise * (n % 3)) for n, one in enumerate(values)]
    b = series(*(row(str(n), one if n else 3e4) for n, one in enumerate(other)))
    assert ("units" in {line.check for line in preflight(a, b, pair(a, b))}) == is_told


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ({"few-shot": "5"}, {"few-shot": "0"}, "blocking"),
        ({"few-shot": "5"}, {}, "unknown"),
        ({"few-shot": "5"}, {"few-shot": "5"}, "same"),
    ],
)
def test_settings_must_be_the_same(a, b, status):
    """Where both sides tell them."""
    one, other = series(row("x", 1.0), **a), series(row("x", 1.0), **b)
    lines = {line.check: line.status for line in preflight(one, other, pair(one, other))}
    assert lines["few-shot"] == status
