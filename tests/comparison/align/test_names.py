"""Prefixes are found in time that grows with the sites, and as they always were."""

import pytest

from divergence.comparison.align import find_prefix
from tests.counting import lines_of_python

BLOCKS = [f"layers.{number}.mlp:out" for number in range(8)] + ["norm:out", "embed_tokens:out"]


@pytest.mark.parametrize(
    "one, two",
    [("", "model."), ("model.", ""), ("model.", "model.language_model."), ("a.b.c.", "d.")],
)
def test_a_prefix_is_found(one, two):
    """Of a wrapper on either side, whatever else it holds."""
    ours = [one + site for site in BLOCKS] + ["lm_head:out"]
    theirs = [two + site for site in BLOCKS] + ["lm_head:out", "visual.blocks.0:out"]
    assert find_prefix(ours, theirs) == (one, two)


def test_equal_names_need_no_prefix():
    """No prefix is found where names are equal, or have nothing in common."""
    assert find_prefix(BLOCKS, BLOCKS) is None
    assert find_prefix(BLOCKS, []) is None
    assert find_prefix(BLOCKS, ["other.thing:out"]) is None


def test_as_many_prefixes_as_sites_are_as_much_work_a_site():
    """Every site of both under one of its own: each pair of prefixes was tried on each site."""
    counts = []
    for size in (500, 2000):
        ours = [f"a{number}.x{number % 7}.y.z:out" for number in range(size)]
        theirs = [f"b{number}.x{number % 7}.y.z:out" for number in range(size)]
        with lines_of_python() as lines:
            find_prefix(ours, theirs)
        counts.append(lines.count)
    assert counts[1] < 5 * counts[0]
