"""`divergence scores`: one screen, its other forms, exit codes."""

import csv
import io
import json
import re

import pytest

from tests.domains.scores.conftest import FIXTURES

A, B = FIXTURES / "evalscope" / "a", FIXTURES / "evalscope" / "b"


@pytest.fixture
def tables(tmp_path):
    """Two thousand documents: a healthy side, a faulty one, one of four tasks."""

    def write(name, lost, tasks=1):
        rows = [
            {"id": n, "score": float(n % 2 and not n < 2 * lost), "task": f"t{n % tasks}"}
            for n in range(2000)
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_one_screen(invoke, tables):
    """The verdict first, with both scores; then what it rests on."""
    code, out, _ = invoke("scores", tables("a", 0), tables("b", 100))
    lines = out.splitlines()
    assert code == 0 and len(lines) < 25
    assert lines[0] == (
        "WORSE: t0 score 0.5000 -> 0.4500: worse beyond chance, by more than 3% of A's score "
        "(±0.015)"
    )
    assert "exact McNemar" in out and "100 lost, 0 gained" in out and "--capture MODEL" in out


@pytest.mark.slow
def test_the_gates_exit_codes(invoke, tables):
    """0 met, 1 not, 2 nothing compared; without a gate the verdict is no exit code."""
    a, healthy, faulty = tables("a", 0), tables("h", 1), tables("f", 100)
    assert invoke("scores", a, healthy, "--band", "3%", "-q")[0] == 0
    code, out, _ = invoke("scores", a, faulty, "--band", "3%", "-q")
    assert code == 1
    assert re.match(
        r"policy      failed: .* is \w+, which the policy does not allow$", out.splitlines()[1]
    )
    assert invoke("scores", a, faulty, "-q")[0] == 0
    assert invoke("scores", a, healthy, "--band", "0.01%", "-q")[0] == 1  # undecided
    other = tables("o", 0, tasks=2)
    other.write_text(other.read_text().replace('"t', '"other'))
    assert invoke("scores", a, other, "--band", "3%", "-q")[0] == 2
    code, _, err = invoke("scores", a, a)
    assert code == 2 and "the same results" in err
    code, _, err = invoke("scores", a, healthy, "--band", "lots")
    assert code == 2 and "is no band" in err
    code, _, err = invoke("scores", a, a.parent / "missing")
    assert code == 2 and "no such file" in err


def test_a_policy_file(invoke, tables, tmp_path):
    """Its table scores: verdicts, band, how much must be paired."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[scores]\nband = "0.01%"\nverdicts = ["equal", "undecided"]\n')
    assert invoke("scores", tables("a", 0), tables("b", 1), "--policy", policy, "-q")[0] == 0


def test_many_tasks_are_a_table(invoke, tables):
    """One row each; in full those that are not equal."""
    code, out, _ = invoke("scores", tables("a", 0, 8), tables("b", 100, 8))
    assert code == 0 and "t3 score" in out and len(out.splitlines()) < 60
    assert out.startswith("WORSE: 8 scores: ")


def test_the_other_forms(invoke, tables, tmp_path):
    """JSON is versioned and whole, CSV has a row a score, Markdown obeys nothing."""
    code, out, _ = invoke("scores", A, B, "--json")
    found = json.loads(out)
    assert code == 0 and found["schema_version"] == 1
    task = found["candidates"][0]["tasks"][0]
    assert task["verdict"] == "undecided" and task["bands"][0]["relative"] is True
    _, out, _ = invoke("scores", A, B, "--csv", "-")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["metric"], row["verdict"], row["num_lost"]) == ("accuracy", "undecided", "3")
    assert row["band_3pct_equal"] == "False"
    invoke("scores", A, B, "--csv", tmp_path / "t.csv", "-q")
    assert (tmp_path / "t.csv").read_text() == out
    _, out, _ = invoke("scores", A, B, "--markdown")
    assert "| --- |" in out and re.search("`[^`|]*general_mcq[^`|]*`", out)
    code, _, err = invoke("scores", A, B, "--markdown", "--json")
    assert code == 2 and "stdout" in err


def test_the_page(invoke, tmp_path):
    """One file that loads nothing, with the answer in it."""
    page = tmp_path / "scores.html"
    assert invoke("scores", A, B, "--html", page, "-q")[0] == 0
    text = page.read_text()
    assert "undecided within 3%" in text and "<script src" not in text and "95% interval" in text
    assert "divergence scores" in text.replace("</b>", "")


def test_names_from_files_are_data(invoke, tmp_path):
    """A task's name neither colours nor breaks a line."""
    for name in "ab":
        row = {"id": 1, "score": 1, "task": "\x1b[31mred\n<b>"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    code, out, _ = invoke("scores", "a.jsonl", "b.jsonl", "-v")
    assert code == 0 and "\x1b" not in out and "\\x1b[31mred\\x0a<b>" in out
    assert invoke("scores", "a.jsonl", "b.jsonl", "--html", "p.html", "-q")[0] == 0
    assert "<b>" not in (tmp_path / "p.html").read_text().replace("<b>divergence", "")
