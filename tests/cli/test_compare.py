"""compare and check on the command line: what they print and how they end."""

import csv
import io
import json
import sys

import pytest

import divergence
from divergence.comparison.result import Coverage


@pytest.fixture
def answering(replace_api):
    """Makes compare() return a given report; returns its calls."""

    def answer(report):
        calls = []

        def compare(*args, **options):
            calls.append((args, options))
            options["progress"]("note", 0, None, "a warning [x]")
            return report

        replace_api("comparison", compare=compare)
        return calls

    return answer


KINDS = {
    "identical": 0,
    "within_floor": 0,
    "systematic": 1,
    "localized": 1,
    "drift": 1,
    "nonfinite": 1,
    "incomparable": 2,
    "undetermined": 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_exit_code_is_asked_for(invoke, answering, reports, kind):
    """Without --exit-code an answer is an answer; with it 1 is divergence and 2 is no answer."""
    answering(reports.make_report(verdict=reports.make_verdict(kind)))
    assert invoke("compare", "a", "b", "--exit-code")[0] == KINDS[kind]
    assert invoke("compare", "a", "b")[0] == (2 if kind == "incomparable" else 0)


def test_one_run_is_compared_with_itself(invoke, answering, reports):
    """Without B there is no candidate, and no name map of the settings either."""
    calls = answering(reports.make_report())
    assert invoke("compare", "a")[0] == 0
    (reference, candidate), options = calls[0]
    assert (str(reference), candidate, options.get("name_map")) == ("a", None, None)


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(invoke, answering, reports):
    """The report is all of stdout; a warning is on stderr, without progress bars."""
    answering(reports.make_long_report())
    code, out, err = invoke("compare", "a", "b")
    assert code == 0
    assert out.startswith("DIVERGED: ")
    assert err == "warning: a warning [x]\n"


def test_options_reach_the_api(invoke, answering, reports, tmp_path):
    """The command is its API twin: the same names with the same meaning."""
    calls = answering(reports.make_report())
    invoke("compare", "a", "b", "--force", "--map", "m.toml")
    (args, options) = calls[0]
    assert [str(arg) for arg in args] == ["a", "b"]
    assert options["force"] is True
    assert str(options["name_map"]) == "m.toml"


def test_json_is_all_of_stdout(invoke, answering, reports):
    """--json prints one document that strict parsers read."""
    answering(reports.make_nonfinite_report())
    code, out, _ = invoke("compare", "a", "b", "--json")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["verdict"]["kind"] == "nonfinite"


def test_csv_beside_or_instead_of_the_report(invoke, answering, reports, tmp_path):
    """--csv FILE adds a file; --csv - is stdout; both with --json on stdout is refused."""
    answering(reports.make_report())
    file = tmp_path / "sites.csv"
    assert "OK" in invoke("compare", "a", "b", "--csv", file)[1]
    assert len(file.read_text().splitlines()) == 1 + 4
    code, out, _ = invoke("compare", "a", "b", "--csv", "-")
    assert (code, len(list(csv.DictReader(io.StringIO(out))))) == (0, 4)
    assert invoke("compare", "a", "b", "--csv", "-", "--json")[0] == 2
    assert invoke("compare", "a", "b", "--csv", tmp_path / "no" / "such.csv")[0] == 2


def test_quiet_is_the_verdict_alone(invoke, answering, reports):
    """-q prints the verdict, the onset and little else."""
    answering(reports.make_long_report())
    _, out, _ = invoke("compare", "a", "b", "-q")
    assert out.splitlines()[0].startswith("DIVERGED")
    assert len(out.splitlines()) <= 4


def test_all_shows_every_site(invoke, answering, reports):
    """--all elides nothing."""
    answering(reports.make_long_report())
    assert "healthy rows" in invoke("compare", "a", "b", "-v")[1]
    assert "healthy rows" not in invoke("compare", "a", "b", "--all")[1]


def test_check_passes_fails_and_abstains(invoke, answering, reports):
    """0: the policy is met; 1: it is not; 2: nothing was compared or could be."""
    answering(reports.make_report())
    code, out, _ = invoke("check", "golden", "new")
    assert (code, out.splitlines()[0]) == (0, "PASSED: policy ci is met")
    code, out, _ = invoke("check", "golden", "new", "--policy", "strict")
    assert code == 1
    assert out.startswith("FAILED: ")

    answering(reports.make_long_report())
    assert invoke("check", "golden", "new")[0] == 1

    empty = Coverage(num_compared=0, num_only_reference=9, num_only_candidate=0, num_skipped=0)
    answering(reports.make_report(coverage=empty, sites=[]))
    code, out, err = invoke("check", "golden", "new")
    assert code == 2
    assert "compared    0 tensors; 9 only in A" in out
    assert "nothing was compared" in err

    verdict = reports.make_verdict("incomparable", summary="other weights")
    answering(reports.make_report(verdict=verdict))
    assert invoke("check", "golden", "new")[0] == 2


def test_check_json(invoke, answering, reports):
    """--json holds the failures and the report, and the exit code stays."""
    answering(reports.make_long_report())
    code, out, _ = invoke("check", "golden", "new", "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["passed"] is False
    assert answer["policy"]["name"] == "ci"
    assert answer["report"]["verdict"]["kind"] == "localized"


def test_check_quiet_names_the_rules(invoke, answering, reports):
    """-q prints the outcome and each rule that is not met."""
    answering(reports.make_long_report())
    _, out, _ = invoke("check", "golden", "new", "-q")
    assert [line.split(":")[0].strip() for line in out.splitlines()] == [
        "FAILED",
        "verdicts",
        "min_coverage",
        "preflight",
    ]


def test_unknown_policies_are_wrong_usage(invoke, answering, reports):
    """A policy that does not exist is found before anything is compared."""
    calls = answering(reports.make_report())
    code, _, err = invoke("check", "golden", "new", "--policy", "stritc")
    assert (code, calls) == (2, [])
    assert "did you mean strict?" in err


def test_the_policy_can_be_a_setting(invoke, answering, reports, tmp_path, monkeypatch):
    """File, variable, flag: each is stronger than the one before."""
    answering(reports.make_report())
    (tmp_path / "divergence.toml").write_text('[check]\npolicy = "strict"\n')
    assert invoke("check", "golden", "new")[0] == 1
    monkeypatch.setenv("DIVERGENCE_CHECK_POLICY", "ci")
    assert invoke("check", "golden", "new")[0] == 0
    assert invoke("check", "golden", "new", "--policy", "strict")[0] == 1


@pytest.fixture
def matching(monkeypatch, reports, answer_of):
    """``matching(*kinds)`` makes compare_many() return rows of these verdicts (None: unreadable);
    returns its calls."""

    def answer(*kinds):
        rows = [
            {"path": "b", "problem": "gone"}
            if kind is None
            else {
                "path": "b",
                "run": reports.make_run("b"),
                "verdict": kind,
                "report": reports.make_report(),
                "problem": "other weights" if kind == "incomparable" else None,
            }
            for kind in kinds
        ]
        matrix = answer_of(
            "compare_many",
            tool_version="0",
            reference=reports.make_run("a"),
            rows=rows,
            agreement="so so",
            groups=[{"runs": ["a"]}],
        )
        calls = []

        def compare_many(*args, **options):
            calls.append((args, options))
            return matrix

        module = sys.modules[divergence.compare_many.__module__]
        monkeypatch.setattr(module, "compare_many", compare_many)
        return calls

    return answer


@pytest.mark.parametrize(
    ("kinds", "plain", "asked"),
    [
        (("identical", "within_floor"), 0, 0),
        (("identical", "localized"), 0, 1),
        (("identical", "undetermined"), 0, 2),
        (("identical", None), 2, 2),
        (("identical", "incomparable"), 2, 2),
        ((None, "drift"), 2, 1),  # what was found stands
    ],
)
def test_exit_codes_of_many_runs(invoke, matching, kinds, plain, asked):
    """2 says that a row is missing; with --exit-code a divergence comes first."""
    matching(*kinds)
    assert invoke("compare", "a", "b", "c")[0] == plain
    assert invoke("compare", "a", "b", "c", "--exit-code")[0] == asked


def test_many_runs_reach_the_api(invoke, matching):
    """The first is the reference; the options are those of two runs, and reports are only kept
    where they are printed."""
    calls = matching("identical")
    invoke("compare", "a", "b", "c", "--truth", "t", "--force", "--reports", "r")
    (args, options) = calls[0]
    assert (str(args[0]), list(map(str, args[1]))) == ("a", ["b", "c"])
    assert (str(options["truth"]), options["force"], str(options["reports"])) == ("t", True, "r")
    assert options["keep_reports"] is False
    invoke("compare", "a", "b", "c", "-v")
    assert calls[1][1]["keep_reports"] is True


def test_many_runs_as_text_and_json(invoke, matching):
    """The matrix; -q its head; -v each pair's page behind it; --json one document."""
    matching("within_floor", "within_floor")
    whole, quiet, verbose = (
        invoke("compare", "a", "b", "c", *o)[1] for o in ((), ("-q",), ("-v",))
    )
    assert whole.startswith(quiet)
    assert len(whole) > len(quiet)
    assert verbose.startswith(whole)
    assert verbose.count("OK: ") == 2
    answer = json.loads(invoke("compare", "a", "b", "c", "--json")[1])
    assert [row["verdict"] for row in answer["rows"]] == ["within_floor"] * 2


def test_what_is_of_two_runs_alone_is_refused(invoke, matching):
    """--csv and --explain-token with three runs, --reports with two."""
    calls = matching("identical")
    for option in (("--csv", "f"), ("--explain-token",)):
        code, _, err = invoke("compare", "a", "b", "c", *option)
        assert code == 2
        assert option[0] in err
    assert invoke("compare", "a", "b", "--reports", "r")[0] == 2
    assert calls == []
