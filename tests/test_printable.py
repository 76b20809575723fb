"""Text of a run prints as one line of plain characters, and stays readable."""

import json
import sys
import unicodedata

import pytest

from divergence.errors import UsageError
from divergence.words import both_ends, printable, printable_json, printable_lines


@pytest.mark.parametrize("text", ["plain", "naïve", "数字\u3000字", "a\u00a0b", "‖a−b‖ → 🙂", ""])
def test_words_are_untouched(text):
    """Of any language, with its spaces."""
    assert printable(text) == text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\nb", "a\\x0ab"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\tb\r", "a\\x09b\\x0d"),
        ("\x85", "\\x85"),
        ("\u202eabc", "\\u202eabc"),
        ("\u2028", "\\u2028"),
        ("\udcff", "\\udcff"),
        ("\0", "\\x00"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_moves_the_cursor_or_forges_a_line_is_written_out(text, shown):
    """By its number; a second time changes nothing."""
    assert printable(text) == shown == printable(shown)


def test_no_character_of_control_or_format_is_left():
    """All of Unicode; of the places without a character, which are nine of ten, some."""
    empty = ("Cn", "Co")
    everything = "".join(
        char
        for number, char in enumerate(map(chr, range(sys.maxunicode + 1)))
        if number % 97 == 0 or unicodedata.category(char) not in empty
    )
    left = {unicodedata.category(char) for char in printable(everything)}
    assert left.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
    assert "\n" not in printable(everything)


def test_json_keeps_its_meaning_and_its_lines():
    """What does not print stands as an escape of JSON."""
    value = {"a\u202e": "x\x7f\u2028\U000e0041"}
    text = json.dumps(value, ensure_ascii=False, indent=2)
    assert json.loads(printable_json(text)) == value
    assert printable_json(text).count("\n") == 2
    assert all(char.isprintable() or char == "\n" for char in printable_json(text))


@pytest.mark.parametrize("most", [1, 2, 5, 40])
def test_a_long_text_keeps_both_ends(most):
    """At most so many characters, also of what is written out."""
    assert len(both_ends("\u202e" * 300 + "end", most)) == most
    assert both_ends("abcdefghij", 5) == "ab…ij"
    assert both_ends("short", 40) == "short"


def test_lines_that_the_tool_made_stay_lines():
    """Their ends are no characters of data."""
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"


def test_an_error_quotes_a_run_on_the_line_where_it_stands():
    """Message, place and hint; a hint of several lines is given as such."""
    error = UsageError("no\nsite", where="a\x1b[2J", hint=("one\ntwo", "three"))
    assert str(error) == "no\\x0asite\n  where: a\\x1b[2J\n  try:   one\\x0atwo\n         three"
    error.hint = "x\nerror: forged"
    assert len(str(error).splitlines()) == 3
