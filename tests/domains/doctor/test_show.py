"""How a checkup is printed: in a terminal, as Markdown, as JSON, and with which exit code."""

import html
import json
import re

import pytest
from markdown_it import MarkdownIt
from msgspec.structs import replace

import divergence

NASTY = "x|y `rm` <b>@all</b> #1 [a](javascript:1) ![i](http://e.com) **b** _c_ \\| $m$ :tada:"


@pytest.fixture(scope="module")
def checkup(pairs):
    return divergence.doctor(*pairs("prefill"))


def nasty(checkup, text):
    """With text of a run's own choosing wherever there is any."""
    return replace(
        checkup,
        reference=replace(checkup.reference, path=text, model=text, device=text, dtype=text),
        points=[replace(one, evidence=text) for one in checkup.points],
        ladder=[replace(one, evidence=text, next=text) for one in checkup.ladder],
        verdict=replace(checkup.verdict, summary=text),
        notes=[text],
    )


def test_the_answer_is_short(pairs, invoke):
    """The verdict first, what fails of the points and rungs, and what to run; with -v all eight
    points and seven rungs."""
    runs = pairs("prefill")
    lines = invoke("doctor", *runs)[1].splitlines()
    assert lines[0].startswith("DIVERGED: the error is made at model.layers.1:out")
    assert len(lines) <= 18
    assert "points  7 of 8 conditions of a fair comparison pass" in lines
    assert [line.split()[:2] for line in lines if line.startswith("  FAIL")] == [
        ["FAIL", "8"],
        ["FAIL", "prefill:"],
    ]
    lines = invoke("doctor", *runs, "-v")[1].splitlines()
    numbered = [line for line in lines if re.match(r"  (pass|FAIL|\?)\s+\d ", line)]
    assert len(numbered) == 8
    assert all(len(line) <= 80 for line in numbered[:7])
    assert "ladder  of causes: stops at prefill, which explains the rest" in lines
    assert any(line.startswith("  FAIL  prefill") for line in lines)
    assert any(re.fullmatch(r"  - +decode: +explained by prefill", line) for line in lines)
    assert len(invoke("doctor", *runs, "-q")[1].splitlines()) == 2  # the verdict, and what fails


@pytest.mark.parametrize("text", [NASTY, "a\nb", "\x1b[31m", "www.evil.com", "é 汉字 \u202e"])
def test_markdown_obeys_no_name(checkup, text):
    """Whatever a run is called, the tables keep their rows and columns, and show it as it is."""
    plain, shown = (one.to_markdown().splitlines() for one in (checkup, nasty(checkup, text)))
    assert len(plain) == len(shown)
    for one, two in zip(plain, shown, strict=True):
        assert one.count("|") == two.count("|")
    page = MarkdownIt("gfm-like", {"linkify": False}).render("\n".join(shown))
    bodies = re.findall(r"<code>(.*?)</code>", page)
    assert len(bodies) > 16
    assert not re.search(r"[<&`*_|@#$!]|://|www", re.sub("<code>.*?</code>|<[/a-z0-9]+>", "", page))
    if text.isprintable():
        assert text in map(html.unescape, bodies)


def test_markdown_ends_with_who_made_it(checkup):
    """So that a reader can make it again."""
    text = checkup.to_markdown()
    assert "`divergence doctor`" in text
    assert "| FAIL | prefill: | `the error is made at model.layers.1:out" in text
    assert "`A" not in text.splitlines()[0]


@pytest.mark.parametrize(
    ("pair", "asked", "code"),
    [
        ("same", ["--exit-code"], 0),
        ("prefill", [], 0),
        ("prefill", ["--exit-code"], 1),
        ("ids", [], 0),
        ("ids", ["--exit-code"], 2),
        ("apart", [], 0),
        ("apart", ["--exit-code"], 2),
    ],
)
def test_exit_codes(pair, asked, code, pairs, invoke):
    """0 is done, whatever was found; asked for, they are compare's."""
    assert invoke("doctor", *pairs(pair), *asked)[0] == code


@pytest.mark.slow
def test_forms(pairs, invoke):
    """Text, JSON and Markdown; two of them at once are refused."""
    runs = pairs("prefill")
    assert "FAIL  prefill" in invoke("doctor", *runs)[1]
    assert "why" in invoke("doctor", *runs, "-v")[1]
    answer = json.loads(invoke("doctor", *runs, "--json")[1])
    assert (answer["schema_version"], answer["explained_by"]) == (1, "prefill")
    assert invoke("doctor", *runs, "--markdown")[1].startswith("**DIVERGED**")
    assert invoke("doctor", *runs, "--markdown", "--json")[0] == 2
    assert invoke("doctor", runs[0], runs[0].parent)[0] == 2
