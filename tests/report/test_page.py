"""The page of a report: what it holds, what it lets in, and how large it becomes."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.comparison.result import (
    AuditResult,
    AuditRow,
    OperatorResult,
    OperatorsResult,
    TokensResult,
)
from divergence.run.manifest import SampleTokens, Tokens
from divergence.run.writer import RunWriter
from divergence.words import printable, printable_lines
from tests import by_hand

VOID = {"meta", "input", "br", "link", "img", "col", "wbr"}


class Page(HTMLParser):
    """Elements, texts and identifiers of a page; that every element is closed by its own end."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.raw: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == [], self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("script", "style"):
            key = self.tags[-1][1].get("id") or self._open[-1]
            self.raw[key] = self.raw.get(key, "") + data
        else:
            self.text += data

    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]

    def data(self) -> dict:
        return json.loads(self.raw["data"])

    def report(self) -> dict:
        return json.loads(gzip.decompress(base64.b64decode(self.raw["attachment"])))


def made(report) -> Page:
    return Page(report.html())


def test_the_verdict_is_the_terminals(reports, printed):
    """The first screen says what `compare --quiet` says, in the same words."""
    report = reports.make_long_report()
    text = made(report).text
    for line in printed(report, "-q").splitlines():
        for part in re.split(r"  +|: |: ?$", line):
            assert part[:1].upper() + part[1:] in text or part in text, part


def test_commands_are_there_in_full(reports):
    """Each of them, with a button; and why."""
    report = reports.make_long_report()
    remarked = "divergence compare a b   # anywhere"
    verdict = msgspec.structs.replace(report.verdict, next=[*report.verdict.next, remarked])
    found = made(msgspec.structs.replace(report, verdict=verdict))
    for command in verdict.next:
        assert command in found.text
    assert [tag for tag, its in found.tags if its.get("class") == "copy"] == ["button"] * 3
    assert report.verdict.evidence[0].text in found.text


def test_the_policy_allows_this_page_alone(reports):
    """Its own style and script by digest; no address, no handler, no style in an element."""
    found = made(reports.make_long_report())
    policy = next(
        its["content"]
        for tag, its in found.tags
        if tag == "meta" and its.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    for tag, attributes in found.tags:
        assert not {"style", "src", "srcset", "action", "ping"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert (attributes.get("href") or "#").startswith("#"), attributes
    assert not re.search(
        r"innerHTML|insertAdjacent|document\.write|eval\(|Function\(", found.raw["script"]
    )


def test_sections_are_those_that_apply(reports):
    """Each analysis shows its part where it has something to say, and nothing where it has not."""
    plain = made(reports.make_report())
    assert {"verdict", "blocks", "tokens", "settings", "coverage", "download"} <= set(plain.ids())
    assert not {"operators", "precision", "ranks", "suite", "logits"} & set(plain.ids())
    result = OperatorResult(
        site="model.layers.1/aten.mm#0",
        candidate_site="model.layers.1/aten.mm#0",
        match="exact",
        operator="aten.mm",
        candidate_operator="aten.mm",
        block="model.layers.1",
        phase="prefill",
        order=1,
        shape=(4, 4),
        reference_dtype="bfloat16",
        candidate_dtype="bfloat16",
        w=9.0,
        limit_usage=3.0,
        verdict="candidate",
    )
    operators = OperatorsResult(
        frame="block", judged="truth", num_matched=1, onset=result.site, results=[result]
    )
    row = AuditRow(
        part="softmax",
        reference=["float32"],
        candidate=["bfloat16"],
        expected=["float32"],
        differs=True,
    )
    audit = AuditResult(rows=[row])
    report = msgspec.structs.replace(reports.make_long_report(), operators=operators, audit=audit)
    full = made(report)
    assert {"operators", "precision", "logits"} <= set(full.ids())
    assert "aten.mm#0" in full.text and "softmax" in full.text
    tables = full.data()["blocks"]["model.layers.1"]["tables"]
    assert [table["caption"] for table in tables] == [
        "Modules, the worst forward of each",
        "Operators",
    ]


def test_equal_bits_are_no_error(reports):
    """Where nothing differs there is no largest error to list."""
    sites = [
        reports.make_site(
            f"model.layers.{n}:out",
            block=f"model.layers.{n}",
            order=n,
            identical=True,
            rel_l2=0.0,
            ratio=0.0,
        )
        for n in range(3)
    ]
    verdict = reports.make_verdict("identical", summary="all bits are equal")
    found = made(reports.make_report(sites=sites, verdict=verdict))
    assert "There is none: all bits are equal." in found.text
    assert "largest" not in found.text.partition("Settings")[0].replace("The largest:", "")


@pytest.mark.parametrize("forced", [True, False])
def test_both_sides_choices(reports, tmp_path, forced):
    """One line while B continued A's text; else up to the difference, then two texts."""
    runs = {}
    for side, ids in (("reference", [1, 2, 3, 4, 5]), ("candidate", [1, 2, 9, 4, 6])):
        texts = {str(number): f"[{number}]" for number in range(20)}
        sample = SampleTokens(text="a prompt", prompt_ids=[1], chosen_ids=ids)
        tokens = Tokens(samples=[sample], groups=[[0]], texts=texts)
        number = f"{len(runs):032x}"
        with RunWriter(tmp_path / side, by_hand.manifest(id=number, tokens=tokens)):
            runs[side] = reports.make_run(str(tmp_path / side), id=number)
    tokens = TokensResult(num_tokens=4, num_equal=3, forced=forced)
    text = made(reports.make_report(tokens=tokens, **runs)).text
    if forced:
        assert "[1][2]differs: A [3], B [9][4]differs: A [5], B [6]" in text
    else:
        assert "[1][2]differs: A [3], B [9]A went on[4][5]B went on[4][6]" in text
    assert "a prompt" in text


def test_identifiers_are_of_one_element_each(reports):
    """And every link within the page leads to one."""
    found = made(reports.make_long_report())
    assert len(set(found.ids())) == len(found.ids())
    links = [its["href"][1:] for tag, its in found.tags if tag == "a"]
    assert len(links) > 4 and set(links) <= set(found.ids())


def test_pictures_have_a_text(reports):
    """Each figure says in words what it shows; what a script draws from is there for each."""
    found = made(reports.make_long_report())
    pictures = [its for _, its in found.tags if its.get("role") == "img"]
    assert len(pictures) >= 3
    assert all(len(its["aria-label"]) > 40 for its in pictures)
    assert any("model.layers.30" in its["aria-label"] for its in pictures)
    figures = {its["data-figure"] for _, its in found.tags if "data-figure" in its}
    assert figures == set(found.data()["figures"])


def test_the_report_is_inside(reports):
    """What is downloaded is what `compare --json` prints; equal reports make equal pages."""
    report = reports.make_long_report()
    assert made(report).report() == json.loads(report.to_json())
    assert report.html() == report.html()


def test_numbers_that_are_none_break_nothing(reports):
    """nan and inf stand on the page, and its data is JSON all the same."""
    found = made(reports.make_nonfinite_report())
    assert "nan" in found.text
    assert json.loads(found.raw["data"], parse_constant=pytest.fail)["figures"]


@pytest.mark.slow
@given(st.text())
@settings(max_examples=20)
def test_any_text_comes_back_as_text(reports, text):
    """Whatever is said is said in full: no element, no reference, no end comes out of it."""
    run = reports.make_run("a", label=text)
    found = made(reports.make_report(reference=run, notes=[f"note: {text}"]))
    assert " ".join(printable_lines(text).split()) in " ".join(found.text.split())
    plain = made(reports.make_report(notes=["note: x"]))
    assert [tag for tag, _ in found.tags if tag not in SHAPING] == [
        tag for tag, _ in plain.tags if tag not in SHAPING
    ]


def test_a_long_name_opens(reports):
    """A name of 10 kB is shortened, and stands whole behind it; a marked row has a word for it."""
    long = "m." * 5000
    site = reports.make_site(f"{long}:out", flagged=True, limit_usage=2.0)
    found = made(reports.make_report(sites=[site]))
    assert f"{long}:out" in found.text
    assert "details" in [tag for tag, _ in found.tags]
    assert "beyond its limit" in found.text


HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"><svg onload='window.pwned=1'>",
    "' onmouseover='window.pwned=1' x='",
    "<!--<script>",
    "]]>",
    "\u202egpj.exe",
    "\x1b[31mred\x1b]0;title\x07",
    "line\u2028end\u2029",
    "&lt;b&gt;&#x27;",
    "__proto__",
    "javascript:window.pwned=1",
    "{{7*7}}${7*7}",
    "\udcff\ufffe\x00",
    "m." * 5000,
)


def hostile_report(reports, evil: str):
    """A report in which every name is ``evil``."""
    report = reports.make_long_report(num_blocks=4, onset=2)

    def renamed(value):
        if isinstance(value, str) and value not in KEPT:
            return value.replace("model.layers", evil) if "model.layers" in value else evil
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, msgspec.Struct):
            return type(value)(**{n: renamed(getattr(value, n)) for n in value.__struct_fields__})
        return value

    return renamed(report)


KEPT = {
    "free",
    "anchored",
    "localized",
    "high",
    "candidate",
    "reference",
    "both",
    "block",
    "inner",
    "fault",
    "after",
    "floor",
    "bfloat16",
    "blocking",
    "differs",
    "same",
    "exact",
}


SHAPING = ("details", "summary", "span", "p", "text")
"""Elements that a longer name has more of."""


@pytest.mark.parametrize("evil", HOSTILE, ids=range(len(HOSTILE)))
def test_names_inject_nothing(reports, evil):
    """The same elements as with harmless names, and the name as it prints."""
    harmless = made(hostile_report(reports, "harmless"))
    found = made(hostile_report(reports, evil))
    structure = [tag for tag, _ in found.tags if tag not in SHAPING]
    wanted = [tag for tag, _ in harmless.tags if tag not in SHAPING]
    if len(evil) < 100:
        assert structure == wanted
    assert printable(evil)[:60] in found.text
    for text in (found.text, found.raw["data"], found.raw["attachment"]):
        assert "<script" not in text.replace("\\u003cscript", "") or text is found.text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "num_prompts"), [(12, 3), pytest.param(64, 8, marks=pytest.mark.slow)]
)
def test_large_reports_make_small_pages(reports, num_steps, num_prompts):
    """100 blocks × 64 steps × 8 prompts: under 1 MB, and the page says what it left out."""
    report = reports.make_large_report(100, num_steps, num_prompts)
    text = report.html()
    assert len(text.encode()) < 1_000_000
    found = Page(text)
    assert {"map-steps", "map-prompts"} <= set(found.data()["figures"])
    assert f"of {len(report.sites):,} results" in found.text
    kept = found.report()["sites"]
    assert any(site["flagged"] for site in kept)


def test_what_is_attached_is_bounded(reports):
    """The worst results are kept, in their order."""
    report = reports.make_large_report(num_blocks=20, num_steps=20, num_prompts=4)
    found = made(report)
    assert len(base64.b64decode(found.raw["attachment"])) <= 300_000 * 1.05
    sites = found.report()["sites"]
    assert len(sites) <= len(report.sites)
    assert sum(site["flagged"] for site in sites) == sum(site.flagged for site in report.sites)
