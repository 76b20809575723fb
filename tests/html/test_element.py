"""Text becomes HTML in one place, and never markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divergence.document import Table
from divergence.html.parts import command, el, name, plain, prose_block, render
from divergence.html.sections import table
from divergence.words import both_ends, printable_lines


class Reader(HTMLParser):
    """The text of a page, and what elements it has."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.update(attributes)

    def handle_data(self, data):
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text())
def test_any_text_comes_back_as_text(text):
    """Whatever is said is said in full: no element, no reference, no end comes out of it."""
    reader = read(render(el("p", text)))
    assert reader.tags == ["p"]
    assert reader.text == printable_lines(text)


@given(st.text())
def test_any_attribute_comes_back_as_it_is(text):
    """A quote ends no attribute."""
    reader = read(render(el("p", title=text)))
    assert reader.tags == ["p"]
    assert reader.attributes == {"title": printable_lines(text)}


def test_attributes_have_hyphens_and_may_stand_alone():
    """``aria_label`` is aria-label; True has no value; None and False are left out."""
    markup = render(el("p", class_="x", aria_label="y", hidden=True, open_=False, title=None))
    assert markup == '<p class="x" aria-label="y" hidden></p>'
    assert render(el("br")) == "<br>"


def test_what_turns_text_around_is_written_out():
    """Marks of direction, escape codes and line separators are seen, not obeyed."""
    assert render(el("p", "a\u202eb\x1bc\u2028d")) == "<p>a\\u202eb\\x1bc\\u2028d</p>"


@pytest.mark.parametrize("most", [1, 2, 5, 40])
def test_a_long_text_keeps_both_ends(most):
    """At most so many characters, also of what is written out."""
    assert len(both_ends("\u202e" * 300 + "end", most)) == most
    assert both_ends("abcdefghij", 5) == "ab…ij"
    assert both_ends("short", 40) == "short"


def test_a_long_name_opens():
    """A name of 10 kB is shortened, and stands whole behind it."""
    long = "m." * 5000
    node = name(long)
    assert plain(node).endswith(long)
    assert node.tag == "details"
    assert len(plain(node.children[0])) < 100
    assert name("model.layers.3") == "model.layers.3"
    assert plain(prose_block(long)).endswith(long)


def test_a_command_is_whole():
    """What is copied is the command, comment and all."""
    text = "divergence compare a b   # anywhere"
    code = command(text).children[0].children[0]
    assert plain(code) == text


def test_a_table_says_in_words_what_a_colour_says():
    """A row that is marked has a word for it, and each column has a title."""
    content = Table(
        caption="c", columns=("site", "x"), rows=[("a", "1"), ("b", "2")], marks=["", "flagged"]
    )
    reader = read(render(table(content)))
    assert reader.text == "csitexa1bbeyond its limit2"
    assert reader.tags.count("tr") == 3
