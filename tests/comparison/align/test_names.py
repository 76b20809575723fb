"""Prefixes are found in time that grows with the sites, and as they always were."""

from __future__ import annotations

import time

import pytest

from divergence.comparison.align.names import find_prefix

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
    assert find_prefix(BLOCKS, BLOCKS) is None
    assert find_prefix(BLOCKS, []) is None
    assert find_prefix(BLOCKS, ["other.thing:out"]) is None


def test_as_many_prefixes_as_sites_take_no_longer():
    """Every site of both under one of its own: each pair of prefixes was tried on each site."""
    ours = [f"a{number}.x{number % 7}.y.z:out" for number in range(20_000)]
    theirs = [f"b{number}.x{number % 7}.y.z:out" for number in range(20_000)]
    start = time.perf_counter()
    find_prefix(ours, theirs)
    assert time.perf_counter() - start < 3
