"""Patterns of sites are matched in time that grows with pattern and text, and as ``re`` does."""

from __future__ import annotations

import random
import re

import pytest

from divergence.errors import UsageError
from divergence.run.linear import fullmatcher
from divergence.run.site import MAX_PATTERNS, compile_patterns, near_names
from tests.counting import lines_of_python

ATOMS = r"""a b . \d [ab] [^a] \w (a|b) (?:ab)? a* (a+)+ b{2,3} .* (?=a) (?!b) (?=.*b) (?<=a) (?<!b)
^ $ \b \B \. (a|) a*? (?=.*(?!a)b) ((?!bb).)* [a-c1] [\d.] x|y \A \Z""".split()


def test_what_matches_is_what_re_matches():
    """Random patterns on random texts."""
    random_ = random.Random(0)
    for _ in range(2000):
        pattern = "".join(random_.choice(ATOMS) for _ in range(random_.randint(1, 6)))
        flags = random_.choice(["", "", "(?i)", "(?s)"])
        try:
            wanted = re.compile(flags + pattern)
        except re.error:
            continue
        found = fullmatcher(flags + pattern)
        for _ in range(4):
            text = "".join(random_.choice("abA1.\n") for _ in range(random_.randint(1, 8)))
            assert found(text) == bool(wanted.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+b", "re:(a|a)*b", "re:(.*)*(.*)*(.*)*b", "re:((?=.*c).)*b", "*a*a*a*a*a*b"]
)
def test_a_longer_text_is_as_much_work_a_letter(pattern):
    """Python's own matcher would try every division of the text."""
    counts = []
    for size in (500, 2000):
        with lines_of_python() as lines:
            assert not compile_patterns([pattern])("a" * size + ":out")
        counts.append(lines.count)
    assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(a)?(?(1)b|c)", "(?>a)b", "a++", "(?i:a)", "(?m)a", "a{99999999999}", "(" * 5000,
     "(a{1000}){1000}", "[z-a]"],
)  # fmt: skip
def test_what_no_automaton_has_is_refused(pattern):
    """With the pattern's own error, not Python's."""
    with pytest.raises(UsageError, match="is not a regular expression"):
        compile_patterns([f"re:{pattern}"])


def test_patterns_are_counted_and_names_are_not():
    """Each pattern is tried on each site."""
    names = [f"model.layers.{number}:out" for number in range(3 * MAX_PATTERNS)]
    matches = compile_patterns(names)
    assert matches(names[-1]) and not matches("model.layers:out")
    with pytest.raises(UsageError, match="patterns of sites"):
        compile_patterns([f"model.{number}.*" for number in range(MAX_PATTERNS + 1)])


def test_suggestions_for_names_of_any_length_and_number():
    """Likeness is quadratic in the length of a name."""
    with lines_of_python(20_000):
        assert near_names("a" * 100_000, ["b" * 100_000] * 9) == []
        near = near_names("model.layer", ["model.layers", *["a" * 100_000] * 1000])
    assert near == ["model.layers"]
