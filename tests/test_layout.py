"""Numbers for people, at their edges."""

import math

import pytest

from divergence.layout import bar, cut
from divergence.words import count, decimal, fixed, size, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (None, "-"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (0.0031, "3.1e-03"),
    ],
)
def test_decimal(value, text):
    """Two digits, and names for what is no number."""
    assert decimal(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 ×"),
        (1.25, "1.2 ×"),
        (99.96, "100 ×"),
        (650, "650 ×"),
        (2e5, "2.0e+05 ×"),
        (1e-4, "<0.1 ×"),
        (6.9e306, ">1e+09 ×"),
        (math.inf, "inf"),
        (math.nan, "-"),
    ],
)
def test_times(value, text):
    """A ratio keeps one form per size."""
    assert times(value) == text


def test_bar_is_logarithmic():
    """Each decade is as long as the next; nan and inf fill the bar."""
    assert [len(bar(10.0**n, (-1, 3))) for n in range(-2, 5)] == [0, 0, 2, 5, 8, 10, 10]
    assert len(bar(math.nan, (-1, 3))) == len(bar(math.inf, (-1, 3))) == 10
    assert bar(0.0, (-1, 3)) == bar(None, (-1, 3)) == ""


def test_size_count_and_cut():
    """Binary units, thousands apart, and the end of a path kept."""
    assert [size(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [count(1, "site"), count(1200, "site")] == ["1 site", "1,200 sites"]
    assert cut("abcdef", 4) == "…def"
    assert fixed(None) == "-" and fixed(math.nan) == "nan" and fixed(0.0625) == "0.062"
