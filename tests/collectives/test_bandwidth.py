"""Rates by nccl-tests' formulas."""

from __future__ import annotations

import pytest

from divergence.collectives.bandwidth import bus_factor, parse_link_rate
from divergence.errors import UsageError


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 2 * 7 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7 / 8),
        ("all_to_all", 7 / 8), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0),
    ],
)  # fmt: skip
def test_factors_are_those_of_nccl_tests(collective, factor):
    """doc/PERFORMANCE.md, for eight ranks."""
    assert bus_factor(collective, 8) == factor


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400Gb/s", 50e9), ("50GB/s", 50e9), ("900 GB/s", 900e9), ("100Mbps", 12.5e6)],
)
def test_rates_are_read(text, rate):
    """Bits and bytes, decimal."""
    assert parse_link_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "0GB/s", "3", "-1GB/s", "1.2.3Gb/s"])
def test_other_words_are_refused(text):
    """With an example."""
    with pytest.raises(UsageError, match="is no rate"):
        parse_link_rate(text)
