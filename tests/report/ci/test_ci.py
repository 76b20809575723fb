"""The answer of `check` as CI servers read it: JUnit, GitHub, GitLab."""

import copy
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest

from divergence.facts import Fact

HOSTILE = (
    "]]><x>&\"' \x00\x1b[31m\ud800\ufffe\u202e\r\n::error::| `#1` @you ##[error]<script>a</script>"
    " [a](https://b.c) 100%:,"
)


@pytest.fixture(scope="module")
def failing(reports, checked):
    """An answer with failures of rules, of a tolerance, and known differences of each kind."""
    known = {"sites": "model.layers.30*", "max": {"rel_l2": 1e-9}, "reason": "a ticket"}
    return checked(
        reports.make_long_report(),
        tokens={"min_equal": 1.0, "min_equal_count": 1},
        tolerance=[{"sites": "model.layers.*:out", "rel_l2": 1e-2}, {"sites": "gone", "ratio": 3}],
        known=[known, {**known, "sites": "lm_head*"}],
    )


@pytest.fixture(scope="module")
def hostile(reports, checked):
    """Names and texts of a run that mean harm, wherever one may stand."""
    sites = [reports.make_site(f"{HOSTILE}{number}:out", order=number) for number in range(80)]
    verdict = reports.make_verdict(
        "localized", summary=HOSTILE, evidence=[Fact(text=HOSTILE * 500)] * 200
    )
    runs = {
        name: reports.make_run(HOSTILE, id=name, model=HOSTILE, label=HOSTILE)
        for name in ("reference", "candidate")
    }
    tolerance = [{"sites": f"re:{number}:out$", "rel_l2": 0.0} for number in range(200)]
    report = reports.make_report(verdict=verdict, sites=sites, **runs)
    return checked(report, name=HOSTILE, tolerance=tolerance)


@pytest.fixture(scope="module")
def written():
    """By the answer's identity: the answer, which lives as long, and what was written of it."""
    return {}


@pytest.fixture
def ci(printed, invoke, tmp_path, monkeypatch, written):
    """``ci(result)``: what one check writes for CI servers; ``ci(None)``: of a golden that is not
    there."""

    def write(result):
        if id(result) not in written:
            written[id(result)] = result, write_anew(result)
        return written[id(result)][1]

    def write_anew(result):
        files = [tmp_path / name for name in ("junit.xml", "quality.json", "summary.md")]
        for file in files:
            file.unlink(missing_ok=True)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(files[2]))
        options = ["--junit", files[0], "--codequality", files[1], "--github"]
        if result is None:
            out = invoke("check", "gone", "new", *options)[1]
        else:
            out = printed(result, *options)
        xml, quality, summary = (file.read_text(encoding="utf-8") for file in files)
        notes = [line for line in out.splitlines() if re.match("::(error|notice) title=", line)]
        (suite,) = ElementTree.fromstring(xml.encode())
        return SimpleNamespace(
            xml=xml, suite=suite, issues=json.loads(quality), summary=summary, notes=notes, out=out
        )

    return write


def states(suite) -> dict[str, str]:
    """By rule: passed, or what else."""
    return {
        case.get("name"): next((child.tag for child in case), "passed")
        for case in suite.findall("testcase")
    }


# --- the cases ---------------------------------------------------------------------------------


def test_each_rule_and_known_difference_is_a_case(failing, ci):
    """In the policy's order, whatever failed, so that a name stays from build to build."""
    suite = ci(failing).suite
    assert states(suite) == {
        "verdicts": "failure",
        "min_coverage": "failure",
        "preflight": "failure",
        "tokens.min_equal": "failure",
        "tokens.min_equal_count": "passed",
        "tolerance[0]": "failure",
        "tolerance[1]": "failure",
        "known[0]": "failure",
        "known[1]": "skipped",
    }
    assert "FAILED: 7 of 9 rules of policy given are not met" in suite.find("system-out").text


@pytest.mark.parametrize("name", ["ci", "strict"])
def test_cases_fail_where_the_policy_does(reports, checked, ci, name):
    """A file never says green where the exit code does not, nor the other way round."""
    for make in (reports.make_report, reports.make_long_report, reports.make_nonfinite_report):
        result = checked(make(), name)
        suite = ci(result).suite
        assert result.passed == (suite.get("failures") == "0")
        rules = {
            one.rule if one.tolerance is None else f"tolerance[{one.tolerance}]"
            for one in result.failures
        }
        assert rules == {rule for rule, state in states(suite).items() if state == "failure"}


def test_a_failure_has_its_evidence(failing, ci):
    """What the verdict rests on stands with it, and the command that goes deeper."""
    text = ci(failing).suite.find("testcase/failure").text
    assert "- one site is beyond its floor" in text
    assert "next: divergence capture --like a" in text


def test_what_stopped_is_one_case(ci):
    """Runs that cannot be checked are an error, with what to try."""
    stopped = ci(None)
    assert states(stopped.suite) == {"comparison": "error"}
    message = stopped.suite.find(".//error").get("message")
    assert "gone" in "".join(stopped.suite.itertext()) and message in stopped.out
    assert stopped.issues[0]["severity"] == "critical"
    assert stopped.notes[0].startswith("::error title=divergence check%3A comparison::")
    assert "**STOPPED**" in stopped.summary


# --- JUnit -------------------------------------------------------------------------------------


def check_junit(suite: ElementTree.Element) -> ElementTree.Element:
    """The rules of Jenkins' junit-10.xsd that concern what is written."""
    assert suite.tag == "testsuite" and suite.get("name")
    cases = suite.findall("testcase")
    assert [child.tag for child in suite] == ["testcase"] * len(cases) + ["system-out"]
    for tag, name in {"failure": "failures", "error": "errors", "skipped": "skipped"}.items():
        assert int(suite.get(name)) == len(suite.findall(f"testcase/{tag}"))
    assert int(suite.get("tests")) == len(cases)
    for case in cases:
        assert case.get("name") and case.get("classname") and float(case.get("time")) == 0
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"])
        assert all(child.get("message") for child in case)
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    return suite


@pytest.mark.slow
def test_junit_follows_its_schema(failing, hostile, reports, checked, ci):
    """Of an answer that fails, one that passes and one that means harm."""
    suite = check_junit(ci(failing).suite)
    assert suite.find("system-out").text.startswith("a / b: FAILED: 7 of 9")
    assert "DIVERGED: " in suite.find("system-out").text
    assert check_junit(ci(checked(reports.make_report())).suite).get("failures") == "0"
    written = "".join(check_junit(ci(hostile).suite).itertext())
    assert r"\x00\x1b[31m\ud800\ufffe\u202e\x0d\x0a::error::" in written


@pytest.mark.slow
def test_a_parser_of_ci_servers_reads_the_file(failing, hostile, ci):
    """junitparser sees the same cases and texts."""
    junitparser = pytest.importorskip("junitparser")
    for result in (failing, hostile):
        made = ci(result)
        (suite,) = junitparser.JUnitXml.fromstring(made.xml.encode())
        assert suite.failures == int(made.suite.get("failures")) > 0
        failed = [case.name for case in suite if case.is_failure]
        assert failed == [name for name, state in states(made.suite).items() if state == "failure"]


# --- GitHub ------------------------------------------------------------------------------------


def test_annotations_are_escaped_by_the_runners_rules(failing, hostile, ci):
    """One line each, ten at most, %, line ends and the property's own signs escaped."""
    (first, *_) = ci(failing).notes
    assert first.startswith(
        "::error title=divergence check%3A verdicts::DIVERGED (localized); allowed: "
        "IDENTICAL (identical), OK (within_floor). Known differences do not excuse it"
    )
    lines = ci(hostile).notes
    assert len(lines) == 10
    assert lines[-1] == "::error title=divergence check::193 more rules are not met"
    for text in lines:
        assert re.fullmatch(r"::error title=([^:,\r\n]*)::([^\r\n]*)", text), text
        assert not re.search(r"%(?!25|0A|0D|3A|2C)", text)
        assert text.isprintable() and len(text) < 10_000


@pytest.mark.slow
def test_the_runner_obeys_nothing_of_a_report(hostile, ci):
    """The fence cannot be guessed, so no name can end it."""
    fences = set()
    for result in (hostile, copy.copy(hostile)):
        begin, *_, end = re.findall(
            r"^::(?:stop-commands::)?([0-9a-f]{32})(?:::)?$", ci(result).out, re.M
        )
        assert begin == end
        fences.add(begin)
    assert len(fences) == 2


def test_a_summary_is_small_and_shows_names_as_they_are(failing, hostile, ci):
    """Tables of rules, and the first screen as a block of code, outside which there is no tag, link
    or mention of a run; far below 1 MiB. Rendered as GitHub does it has no element that a name
    brought in."""
    from markdown_it import MarkdownIt

    text = ci(failing).summary
    assert text.startswith("### divergence check: FAILED\n")
    assert "| `tolerance[0]` | **FAIL** | `rel_l2 is " in text
    assert "DIVERGED: " in text.partition("```")[2]
    evil = ci(hostile).summary
    assert len(evil.encode()) < 400_000
    before, screen, after = re.split(r"^`{3,}$", evil, flags=re.M)  # and no other line ends it
    assert "<script" in screen and "\x1b" not in screen and "\u202e" not in screen
    assert not re.search("[\x1b\u202e]", before + after)
    assert all(line.count("|") == 4 for line in evil.splitlines() if line.startswith("|"))
    for summary in (text, evil):
        html = MarkdownIt("gfm-like", {"linkify": False}).render(summary)
        outside = re.sub("(?s)<code>.*?</code>", "", html)
        assert not re.search("script|@you|://|\\[a\\]|`", outside)
        assert html.count("<tr>") > 1 and "<th>" in html
        assert len(re.findall("<h[1-6]>", html)) == len(re.findall("^#+ ", summary, re.M))
        assert not re.search("<(script|img|a|iframe|svg)[ >]", html)


# --- GitLab ------------------------------------------------------------------------------------


def test_codequality_has_what_gitlab_asks_for(failing, hostile, ci):
    """Each issue has its five keys, a severity of the list and a fingerprint of its own."""
    keys = {"description", "check_name", "fingerprint", "severity", "location"}
    for result in (failing, hostile):
        issues = ci(result).issues
        assert 0 < len(issues) <= 1000
        assert len({issue["fingerprint"] for issue in issues}) == len(issues)
        for issue in issues:
            assert set(issue) == keys
            assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
            assert issue["location"]["lines"] == {"begin": 1}
            assert issue["description"].isprintable()


def test_a_verdict_weighs_more_than_a_number_and_a_setting_less(failing, ci):
    """Severities are those that GitLab sorts by."""
    weights = {"critical": 2, "major": 1, "minor": 0}
    found = {one["check_name"]: weights[one["severity"]] for one in ci(failing).issues}
    ordered = sorted(found, key=found.get)
    assert ordered[0].endswith("preflight") and ordered[-1].endswith("verdicts")
    assert list(found.values()).count(2) == list(found.values()).count(0) == 1


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
def test_a_place_is_named_from_the_repository(reports, checked, ci, golden, path):
    """A golden elsewhere is named without its folders."""
    report = msgspec.structs.replace(reports.make_long_report(), reference=reports.make_run(golden))
    assert {issue["location"]["path"] for issue in ci(checked(report)).issues} == {path}


def test_fingerprints_stay_from_run_to_run(reports, checked, ci):
    """The same rule at the same site is the same issue, whatever its numbers."""
    reports_ = [
        reports.make_report(sites=[reports.make_site("a:out", rel_l2=rel_l2)])
        for rel_l2 in (0.1, 0.2)
    ]
    first, second = (
        [issue["fingerprint"] for issue in ci(checked(one, tolerance=[{"rel_l2": 1e-9}])).issues]
        for one in reports_
    )
    assert first == second != []
