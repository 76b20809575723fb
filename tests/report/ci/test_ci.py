"""The answer of `check` as CI servers read it: JUnit, GitHub, GitLab."""

from __future__ import annotations

import datetime
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from divergence.errors import UsageError
from divergence.facts import Fact
from divergence.gate.check import evaluate
from divergence.gate.policy import Policy, load_policy
from divergence.report.checking import (
    annotation_lines,
    checked_page,
    codequality_json,
    fence,
    junit_xml,
    stopped_page,
    summary_markdown,
)

HOSTILE = (
    "]]><x>&\"' \x00\x1b[31m\ud800\ufffe\u202e\r\n::error::| `#1` @you ##[error]<script>a</script>"
    " [a](https://b.c) 100%:,"
)


def page(report, **tables):
    policy = msgspec.convert(tables, Policy) if tables else load_policy("ci")
    return checked_page(evaluate(report, policy, today=datetime.date(2026, 1, 1)))


@pytest.fixture(scope="module")
def failing(reports):
    """A page with failures of rules, of a tolerance, and known differences of each kind."""
    known = {"sites": "model.layers.30*", "max": {"rel_l2": 1e-9}, "reason": "a ticket"}
    return page(
        reports.make_long_report(),
        tokens={"min_equal": 1.0, "min_equal_count": 1},
        tolerance=[{"sites": "model.layers.*:out", "rel_l2": 1e-2}, {"sites": "gone", "ratio": 3}],
        known=[known, {**known, "sites": "lm_head*"}],
    )


@pytest.fixture(scope="module")
def hostile(reports):
    """Names and texts of a run that mean harm, wherever one may stand."""
    sites = [reports.make_site(f"{HOSTILE}{number}:out", order=number) for number in range(80)]
    verdict = reports.make_verdict(
        "localized", summary=HOSTILE, evidence=[Fact(text=HOSTILE * 500)] * 200
    )
    runs = {
        name: reports.make_run(HOSTILE, model=HOSTILE, label=HOSTILE)
        for name in ("reference", "candidate")
    }
    tolerance = [{"sites": f"re:{number}:out$", "rel_l2": 0.0} for number in range(200)]
    report = reports.make_report(verdict=verdict, sites=sites, **runs)
    return page(report, name=HOSTILE, tolerance=tolerance)


# --- the cases ---------------------------------------------------------------------------------


def test_each_rule_and_known_difference_is_a_case(failing):
    """In the policy's order, whatever failed, so that a name stays from build to build."""
    states = {case.rule: case.status for case in failing.cases}
    assert states == {
        "verdicts": "failed",
        "min_coverage": "failed",
        "preflight": "failed",
        "tokens.min_equal": "failed",
        "tokens.min_equal_count": "passed",
        "tolerance[0]": "failed",
        "tolerance[1]": "failed",
        "known[0]": "failed",
        "known[1]": "skipped",
    }
    assert failing.cases[4].text == "at least 1 of the generated tokens are equal"
    assert failing.headline == "FAILED: 7 of 9 rules of policy given are not met"


@pytest.mark.parametrize("name", ["ci", "strict"])
def test_cases_fail_where_the_policy_does(reports, name):
    """A file never says green where the exit code does not, nor the other way round."""
    for report in (
        reports.make_report(),
        reports.make_long_report(),
        reports.make_nonfinite_report(),
    ):
        result = evaluate(report, load_policy(name))
        assert result.passed == (not checked_page(result).bad)
        failures = [one for case in checked_page(result).cases for one in case.failures]
        assert failures == result.failures


def test_a_failure_has_its_evidence(failing):
    """What the verdict rests on stands with it, and the command that goes deeper."""
    case = failing.cases[0]
    assert "one site is beyond its floor" in case.evidence
    assert case.evidence[-1].startswith("next: divergence capture --like a")


def test_what_stopped_is_one_case():
    """Runs that cannot be checked are an error, with what to try."""
    stopped = stopped_page(UsageError("no such run", where="gone", hint="look"), "golden", "gone")
    (case,) = stopped.bad
    assert (case.rule, case.status, case.evidence) == ("comparison", "stopped", ("gone", "look"))
    assert stopped.headline == "STOPPED: no such run"
    assert ElementTree.fromstring(junit_xml(stopped)).find(".//error").get("message") == case.text
    assert json.loads(codequality_json(stopped))[0]["severity"] == "critical"
    assert annotation_lines(stopped)[0].startswith("::error title=divergence check%3A comparison::")
    assert "**STOPPED**" in summary_markdown(stopped)


# --- JUnit -------------------------------------------------------------------------------------


def check_junit(text: str) -> ElementTree.Element:
    """The rules of Jenkins' junit-10.xsd that concern what is written; returns the suite."""
    root = ElementTree.fromstring(text.encode())
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite" and suite.get("name")
    cases = suite.findall("testcase")
    assert [child.tag for child in suite] == ["testcase"] * len(cases) + ["system-out"]
    counts = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for tag, name in counts.items():
        for holder in (root, suite):
            assert int(holder.get(name)) == len(suite.findall(f"testcase/{tag}"))
    assert int(suite.get("tests")) == len(cases)
    for case in cases:
        assert case.get("name") and case.get("classname") and float(case.get("time")) == 0
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"])
        for child in case:
            assert child.get("message")
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    return suite


def test_junit_follows_its_schema(failing, hostile, reports):
    """Of a page that fails, one that passes and one that means harm."""
    suite = check_junit(junit_xml(failing))
    assert suite.find("system-out").text.startswith("a / b: FAILED: 7 of 9")
    assert "DIVERGED: " in suite.find("system-out").text
    assert "- one site is beyond its floor" in suite.find("testcase/failure").text
    assert check_junit(junit_xml(page(reports.make_report()))).get("failures") == "0"
    written = "".join(check_junit(junit_xml(hostile)).itertext())
    assert r"\x00\x1b[31m\ud800\ufffe\u202e\x0d\x0a::error::" in written


def test_a_parser_of_ci_servers_reads_the_file(failing, hostile):
    """junitparser sees the same cases and texts."""
    junitparser = pytest.importorskip("junitparser")
    for made in (failing, hostile):
        (suite,) = junitparser.JUnitXml.fromstring(junit_xml(made).encode())
        assert (suite.tests, suite.failures) == (len(made.cases), len(made.bad))
        for case, ours in zip(suite, made.cases, strict=True):
            assert case.name == ours.rule
            assert case.is_failure == (ours.status == "failed")
            if case.is_failure:
                assert case.result[0].message == ours.text


# --- GitHub ------------------------------------------------------------------------------------


def test_annotations_are_escaped_by_the_runners_rules(failing, hostile):
    """One line each, ten at most, %, line ends and the property's own signs escaped."""
    assert annotation_lines(failing)[0].startswith(
        "::error title=divergence check%3A verdicts::DIVERGED (localized); the "
        "policy allows IDENTICAL (identical), OK (within_floor). Known differences do not excuse it"
    )
    lines = annotation_lines(hostile)
    assert len(lines) == 10
    assert lines[-1] == "::error title=divergence check::193 more rules are not met"
    for text in lines:
        found = re.fullmatch(r"::error title=([^:,\r\n]*)::([^\r\n]*)", text)
        assert found, text
        assert not re.search(r"%(?!25|0A|0D|3A|2C)", text)
        assert text.isprintable() and len(text) < 10_000


def test_a_policy_that_is_met_is_a_notice(reports):
    """So that a reader sees that something was checked."""
    assert annotation_lines(page(reports.make_report())) == [
        "::notice title=divergence check::PASSED: policy ci is met"
    ]


def test_the_runner_obeys_nothing_of_a_report():
    """The fence cannot be guessed, so no name can end it."""
    begin, end = fence()
    assert begin == f"::stop-commands::{end.strip(':')}" and len(end) == 36
    assert fence() != (begin, end)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=False)
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.tags.add(tag)


def test_a_summary_is_small_and_shows_names_as_they_are(failing, hostile):
    """Tables of rules and the first screen; no tag, link or mention of a run, far below 1 MiB."""
    text = summary_markdown(failing)
    assert text.startswith("### divergence check: FAILED\n")
    assert "| <code>tolerance&#91;0&#93;</code> | **FAIL** | <code>rel&#95;l2 is " in text
    assert "DIVERGED: " in text.partition("<pre>")[2]
    text = summary_markdown(hostile)
    assert len(text.encode()) < 400_000
    parser = _Tags()
    parser.feed(text)
    assert parser.tags == {"code", "pre"}
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 4
    for obeyed in ("<script", "@you", "://", "[a]", "`", "\x1b", "\u202e"):
        assert obeyed not in text


# --- GitLab ------------------------------------------------------------------------------------


def test_codequality_has_what_gitlab_asks_for(failing, hostile, reports):
    """Each issue has its five keys, a severity of the list and a fingerprint of its own."""
    for made in (failing, hostile):
        issues = json.loads(codequality_json(made))
        assert 0 < len(issues) <= 1000
        assert len({issue["fingerprint"] for issue in issues}) == len(issues)
        for issue in issues:
            assert set(issue) == {
                "description",
                "check_name",
                "fingerprint",
                "severity",
                "location",
            }
            assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
            assert issue["location"]["lines"] == {"begin": 1}
            assert issue["description"].isprintable()
    assert json.loads(codequality_json(page(reports.make_report()))) == []


@pytest.mark.parametrize(
    ("golden", "path"),
    [
        ("goldens/llama.zip", "goldens/llama.zip"),
        ("./golden", "golden"),
        ("/home/somebody/golden", "golden"),
        ("../golden", "golden"),
        ("s3://bucket/runs/golden.tar", "golden.tar"),
    ],
)
def test_a_place_is_named_from_the_repository(reports, golden, path):
    """A golden elsewhere is named without its folders."""
    made = page(
        msgspec.structs.replace(reports.make_long_report(), reference=reports.make_run(golden))
    )
    issues = json.loads(codequality_json(made))
    assert {issue["location"]["path"] for issue in issues} == {path}


def test_fingerprints_stay_from_run_to_run(reports):
    """The same rule at the same site is the same issue, whatever its numbers."""

    def fingerprints(rel_l2):
        report = reports.make_report(sites=[reports.make_site("a:out", rel_l2=rel_l2)])
        issues = json.loads(codequality_json(page(report, tolerance=[{"rel_l2": 1e-9}])))
        return [issue["fingerprint"] for issue in issues]

    assert fingerprints(0.1) == fingerprints(0.2) != []


def test_a_summary_renders_as_markdown(failing, hostile):
    """Rendered as GitHub does: a table of rules, code, and no element that a name brought in."""
    from markdown_it import MarkdownIt

    for page in (failing, hostile):
        text = summary_markdown(page)
        html = MarkdownIt("gfm-like", {"linkify": False}).render(text)
        assert html.count("<tr>") > 1 and "<th>" in html
        assert len(re.findall("<h[1-6]>", html)) == len(re.findall("^#+ ", text, re.M))
        assert not re.search("<(script|img|a|iframe|svg)[ >]", html)
