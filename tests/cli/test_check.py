"""`divergence check` in CI: what it writes beside the terminal."""

import json
from xml.etree import ElementTree

import pytest


@pytest.fixture
def answering(replace_api):
    """Makes `compare` answer with a given report."""

    def answer(report) -> None:
        replace_api("comparison", compare=lambda *_, **__: report)

    return answer


def test_one_check_writes_all_files(invoke, answering, reports, tmp_path, monkeypatch):
    """JUnit, GitLab's list, annotations and a summary that is appended to; the exit code stays."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    options = ("--junit", "junit.xml", "--codequality", "quality.json", "--github")
    answering(reports.make_report())
    code, out, _ = invoke("check", "golden", "new", *options)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("::stop-commands::") and lines[1] == "PASSED: policy ci is met"
    assert lines[-2] == f"::{lines[0].removeprefix('::stop-commands::')}::"
    assert lines[-1] == "::notice title=divergence check::PASSED: policy ci is met"
    assert json.loads((tmp_path / "quality.json").read_text()) == []

    answering(reports.make_long_report())
    code, out, _ = invoke("check", "golden", "new", "-q", *options)
    assert code == 1
    assert out.count("::error title=") == 3
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == "3"
    assert len(json.loads((tmp_path / "quality.json").read_text())) == 3
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("### divergence check: ") == 2


def test_what_cannot_be_checked_is_an_error_in_the_files(invoke, tmp_path, monkeypatch):
    """A golden that is not there: exit 2, an error in the files, and none of it on stderr where
    the runner would obey it."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, err = invoke("check", "gone", "new", "--junit", "junit.xml", "--github")
    assert (code, err) == (2, "")
    assert out.splitlines()[0].startswith("::error title=divergence check%3A comparison::")
    assert "\nerror: " in out
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"
    code, _, err = invoke("check", "gone", "new", "--junit", "other.xml")
    assert (code, err.startswith("error: ")) == (2, True)
    assert (tmp_path / "other.xml").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--github"], "GITHUB_STEP_SUMMARY is not set"),
        (["--github", "--json"], "--json needs for itself"),
        (["--junit", "j.xml", "--bless"], "--bless checks nothing"),
    ],
)
def test_what_does_not_go_together(invoke, monkeypatch, options, told):
    """Found before anything is compared."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, _, err = invoke("check", "golden", "new", *options)
    assert code == 2 and told in err


def test_a_file_that_cannot_be_written_is_named(invoke, answering, reports):
    """Exit 2, since the CI server would see nothing."""
    answering(reports.make_report())
    code, _, err = invoke("check", "golden", "new", "--junit", "no/folder/j.xml")
    assert code == 2 and "cannot write the JUnit file" in err and "no/folder/j.xml" in err
