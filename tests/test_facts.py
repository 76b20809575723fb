"""Facts and their sentences: every code that is made has a template, and every template its values.

The modules that measure, judge and decide hold no English of their own: it stands in tables.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from divergence.facts import Fact, fact, filled, names_in, plain, sentence, template_of, worded
from tests.facts_page import PAGE, page
from tests.sources import PACKAGE, trees


def made() -> Iterator[tuple[str, str, set[str] | None]]:
    """(place, code, names of the values) of each ``fact("code", ...)`` in the package; None where
    values come as a whole."""
    for path, tree in trees(r"\bfact\("):
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fact"):
                continue
            place = f"{path}:{node.lineno}"
            names = {keyword.arg for keyword in node.keywords} - {"standout"}
            codes = node.args[0]
            choices = [codes.body, codes.orelse] if isinstance(codes, ast.IfExp) else [codes]
            for code in choices:
                if isinstance(code, ast.Constant):
                    yield place, code.value, None if None in names else names  # type: ignore[misc]


def test_every_fact_has_a_template_and_its_values():
    """A sentence asks for no value that its fact has not."""
    wrong = []
    for place, code, names in made():
        try:
            # what a section in brackets asks for may be missing
            asked = names_in(re.sub(r"\[\[.*?\]\]", "", template_of(code)))
        except KeyError:
            wrong.append(f"{place}: {code} has no template")
            continue
        if names is not None and asked - names:
            wrong.append(f"{place}: {code} lacks {sorted(asked - names)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("{n:count token}", {"n": 1}, "1 token"),
        ("{n:count token}", {"n": 2000}, "2,000 tokens"),
        ("{ratio:figure} ×", {"ratio": 28.84}, "28.8 ×"),
        ("by {side:letter}", {"side": "candidate"}, "by B"),
        ("a[[, token {at}]]", {"at": None}, "a"),
        ("a[[, token {at}]]", {"at": 0}, "a, token 0"),
        ("{flag:yes=on|no=off}", {"flag": False}, "off"),
        ("{step:none=the prefill|*=step {step}}", {"step": 3}, "step 3"),
        ("{step:none=the prefill|*=step {step}}", {"step": None}, "the prefill"),
        ("{names:names 2}", {"names": ["a", "b", "c"]}, "a, b and 1 more"),
        ("{name}", {"name": "{evil} [[x]]"}, "{evil} [[x]]"),
        ("{item}!", {"item": Fact(code="plain", values={"text": "inner"})}, "inner!"),
    ],
)
def test_the_language_of_templates(template, values, text):
    """Formats, sections, choices; what a value holds is never read as a template."""
    assert filled(template, values) == text


def test_facts_are_equal_by_what_they_tell():
    """A fact with its sentence is the same fact."""
    item = fact("by", by="candidate", both=False)
    assert worded(item) == item
    assert worded(item).text == sentence(item) == ", by B"
    assert item != fact("by", by="reference", both=False)


DECIDES = (
    "analyses",
    "comparison",
    "experiments",
    "gate",
    "fleet",
    "domains/collectives",
    "domains/doctor",
    "domains/logprobs",
    "domains/quantization",
    "domains/scores",
    "domains/suite",
    "domains/training",
)
"""Packages whose modules measure, judge or decide."""
SHOWS = re.compile(
    r"(?:show|sections|command|__init__|figures|sentences|rows|capturing|api|reading|options|formats/.*|endpoints/.*"
    r"|advice|definition|operators|tiny|recording/.*)\.py$"
)
"""Modules that show, read files of people, print commands, record, write operators or a model."""
PROSE = re.compile(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}")


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The English literals of a module that are neither docstrings nor raised."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            allowed.add(id(node.value))
        called = getattr(node, "func", None)  # an error, or a warning
        name = getattr(called, "id", getattr(called, "attr", ""))
        if isinstance(node, ast.Raise) or name.endswith("Error") or name == "warn":
            allowed |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in allowed:
            continue
        if isinstance(node.value, str) and PROSE.search(node.value):
            yield node.lineno, node.value


LEFT = 8
"""Literals of three words and more that are left: texts that models are given, the name of a check,
and what stands in recorded reasons. They may only become fewer."""


def test_what_decides_holds_no_english():
    """English stands in tables of sentences, in errors and docstrings."""
    files = [
        path
        for package in DECIDES
        for path in sorted((PACKAGE / package).rglob("*.py"))
        if not SHOWS.search(path.as_posix())
    ]
    found = {path: list(prose_of(path)) for path in files}
    lines = [f"{path}:{line}: {text}" for path, texts in found.items() for line, text in texts]
    assert len(lines) <= LEFT, f"{len(lines)}\n" + "\n".join(lines)


def test_plain_words_come_from_elsewhere():
    """``plain`` is for words of libraries and files, not a way round the tables."""
    assert sentence(plain("a file's words")) == "a file's words"


@pytest.mark.whole
def test_the_page_of_facts_is_that_of_the_tables():
    """docs/facts.md lists every table; ``python tests/facts_page.py`` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page()
