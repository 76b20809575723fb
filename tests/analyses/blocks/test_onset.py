"""Confidence is computed from checks, so evidence that agrees never lowers it."""

from __future__ import annotations

import itertools

import pytest

from divergence.analyses.blocks import onset
from divergence.analyses.blocks.onset import checks_of
from divergence.analyses.blocks.units import Family, Unit
from divergence.comparison.decide import RANK, check, confidence_of
from divergence.comparison.results import Check
from divergence.facts import sentence


@pytest.mark.parametrize("names", [*itertools.product(("anchored", "clear", "truth"), repeat=2)])
def test_meeting_a_check_never_lowers_confidence(names):
    """For every pair of checks in every state: met is at least as good as anything else."""
    for states in itertools.product(("met", "failed", "not_made"), repeat=2):
        checks = [Check(name=n, state=s) for n, s in zip(names, states, strict=True)]
        better = [Check(name=names[0], state="met"), checks[1]]
        assert RANK[confidence_of(better)] >= RANK[confidence_of(checks)]


def test_high_needs_every_check_and_free_runs_alone_are_low():
    """The three words."""
    met = check("anchored", True, "")
    assert confidence_of([met, check("clear", True, "")]) == "high"
    assert confidence_of([met, check("truth", False, "no truth", made=False)]) == "medium"
    assert confidence_of([check("anchored", False, "free runs"), met]) == "low"


def test_a_truth_that_agrees_does_not_lower_the_confidence_of_a_fault():
    """Far over the limit of the difference, just over that of the truth: high, as without one."""
    from divergence.analyses.blocks.units import Blame, Unit

    unit = Unit("h.3:out", "anchored", "prefill", ("block",), between=5.0)
    assert confidence_of(checks_of(unit, [unit])) == "high"
    unit.blame = Blame("candidate", "typical", 3.0, 1.0, 2.5, None)
    assert unit.blame.limit_usage < 2
    assert confidence_of(checks_of(unit, [unit])) == "high"
    unit.blame = Blame("both", "both", 7.0, 1.0, 6.0, None)
    assert confidence_of(checks_of(unit, [unit])) == "medium"


@pytest.mark.parametrize("usage", [0.0, 0.8, 3.0])
def test_what_is_beyond_its_limit_is_so_by_more_than_it(usage):
    """A truth may use less of its limits than the two sides' difference does of its own."""
    kind = ("block", "", "out", "Block", "prefill")
    members = [
        Unit(
            f"layers.{number}:out",
            "anchored",
            "prefill",
            kind,
            limit_usage=usage,
            between=2.0 + number,
            why="typical",
        )
        for number in range(5)
    ]
    evidence = onset._family_evidence(Family("Block", members, 5))
    assert sentence(evidence) == "5 of 5 Block are beyond their limit, the least by 2.0 ×"
