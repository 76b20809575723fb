"""benchmarks/same_answers.py: what is a difference, and what its table of questions holds."""

import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it, and its scripts import each other as scripts do.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _questions
import same_answers

from divergence.cli.main import commands


def answer(stdout="", *, code=0, stderr="", **files):
    return {"code": code, "stdout": stdout, "stderr": stderr, "files": files}


def differs(old, new):
    return same_answers.difference(*map(same_answers.values_of, (old, new)))


@pytest.mark.parametrize(
    "old, new",
    [
        (answer('{"a": 1.0}'), answer('{"a": 1.0000000000001}')),
        (answer('{"seconds": 1}'), answer('{"seconds": 2}')),
        (answer("made in 1.2 s in out-0/run"), answer("made in 31 s in out-1/run")),
        (
            answer('{"id": "' + "a" * 32 + '"}', stderr="a" * 32),
            answer('{"id": "' + "b" * 32 + '"}', stderr="b" * 32),
        ),
        (
            answer(**{"page.html": "<p class=x>A <b>is</b> wrong</p><script>1</script>"}),
            answer(**{"page.html": "<div>A is <i>wrong</i></div>"}),
        ),
    ],
)
def test_no_difference(old, new):
    """Rounding, time, drawn ids, the folder and the markup make none."""
    assert differs(old, new) == []


@pytest.mark.parametrize(
    "old, new",
    [
        (answer(code=1), answer(code=2)),
        (answer('{"a": 1.0}'), answer('{"a": 1.00001}')),
        (answer('{"a": 1}'), answer('{"a": true}')),
        (answer('{"a": [1, 2]}'), answer('{"a": [2, 1]}')),
        (answer('{"a": []}'), answer("{}")),
        (answer("a  b"), answer("a b")),
        (answer(stderr="error: no"), answer(stderr="error: none")),
        (answer(**{"a.csv": "x,y\n"}), answer(**{"a.csv": "x\n"})),
        (answer(**{"a.csv": ""}), answer()),
        (
            answer(**{"page.html": "<tr><td>1</td><td>2</td></tr>"}),
            answer(**{"page.html": "<tr><td>1</td></tr>"}),
        ),
        (
            answer(**{"run/records.jsonl": '{"a": 1}\n{"a": 2}\n'}),
            answer(**{"run/records.jsonl": '{"a": 1}\n'}),
        ),
    ],
)
def test_a_difference(old, new):
    """An exit code, a number, an order, a column, a space or a file that differs is shown."""
    assert differs(old, new)


def test_added_keys(monkeypatch):
    """Keys of JSON that are listed may be added, and never lost."""
    old, new = answer('{"a": [1]}'), answer('{"a": [1], "facts": [{"code": "x"}]}')
    assert differs(old, new)
    monkeypatch.setattr(same_answers, "ADDED_KEYS", frozenset({"facts"}))
    assert differs(old, new) == []
    assert differs(new, old)


def test_the_table():
    """Every command is asked, by faces that there are, of inputs that can be made in an order."""
    words = {question.split()[0] for question, _ in _questions.QUESTIONS}
    assert set(commands()) <= words
    assert {face for _, faces in _questions.QUESTIONS for face in faces.split()} == set(
        _questions.FACES
    )
    questions = [question for question, _ in _questions.QUESTIONS]
    assert len(set(questions)) == len(questions)
    made = [name for level in same_answers.order(list(_questions.INPUTS)) for name in level]
    assert sorted(made) == sorted(_questions.INPUTS)
