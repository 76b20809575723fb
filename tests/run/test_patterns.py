"""Patterns of sites, and what names of any length and number cost."""

import pytest

from divergence.errors import UsageError
from divergence.run.site import MAX_PATTERNS, compile_patterns, near_names
from tests.counting import lines_of_python


def test_a_glob_is_as_much_work_a_letter_on_a_longer_text():
    """Each star takes the first match of what follows it, once and for all."""
    counts = []
    for size in (500, 2000):
        with lines_of_python() as lines:
            assert not compile_patterns(["*a*a*a*a*a*b"])("a" * size + ":out")
        counts.append(lines.count)
    assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 5000, "[z-a]"])
def test_what_is_no_regular_expression_is_refused(pattern):
    """With the pattern's own error, not Python's."""
    with pytest.raises(UsageError, match="is not a regular expression"):
        compile_patterns([f"re:{pattern}"])


def test_no_regular_expression_is_tried_on_a_name_of_any_length():
    """A run's names may be of any length, and a search takes its square."""
    matches = compile_patterns([r"re:.*mlp.*:out"])
    assert matches("model.layers.0.mlp:out") and not matches("model.layers.0.mlp:in")
    with pytest.raises(UsageError, match="letters, too many for re:"):
        matches("a" * 5000 + ":out")


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
