"""Rates by nccl-tests' formulas."""

import pytest

from divergence.domains.collectives.capturing import bus_factor


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_gather", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_factors_are_those_of_nccl_tests(collective, factor):
    """doc/PERFORMANCE.md, for eight ranks."""
    assert bus_factor(collective, 8) == factor
