"""Of several processes the first speaks; another only where the trouble is its own."""

import io
import sys

import pytest

from divergence.cli import main, streams
from divergence.errors import FaultError, UsageError
from divergence.gate import policy


@pytest.fixture
def as_rank(monkeypatch):
    """``as_rank(n)`` makes this process rank n of two that waits for nobody; returns what goes
    to its own stderr in the end."""

    def become(rank: int) -> io.StringIO:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(streams, "PATIENCE_S", 0.0)
        own = io.StringIO()
        monkeypatch.setattr(sys, "__stderr__", own)
        return own

    return become


def run(monkeypatch, *args) -> int:
    monkeypatch.setattr(sys, "argv", ["divergence", *args])
    with pytest.raises(SystemExit) as ended:
        main.run()
    return ended.value.code


def test_others_print_no_answers(as_rank, monkeypatch, capsys):
    """stdout is rank 0's alone."""
    own = as_rank(1)
    assert run(monkeypatch, "--version") == 0
    assert (capsys.readouterr(), own.getvalue()) == (("", ""), "")
    as_rank(0)
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("divergence ")


@pytest.mark.slow
def test_errors_are_held_back_until_rank_0_had_its_say(as_rank, monkeypatch, capsys):
    """A wrong option is wrong for all; who is still there after the wait was wrong alone."""
    own = as_rank(1)
    assert run(monkeypatch, "compare", "--no-such-option") == 2
    assert capsys.readouterr() == ("", "")
    assert own.getvalue().startswith("rank 1: ")
    assert "No such option" in own.getvalue()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("odd"), 2, "rank 1: error: odd"),
        (FaultError("broken"), 3, "rank 1: error: broken"),
        (TypeError("worse"), 3, "rank 1: fault in divergence: TypeError: worse"),
    ],
)
def test_faults_are_said_by_who_has_them(as_rank, monkeypatch, error, code, said):
    """With the rank's number, once."""

    def fail(_):
        raise error

    own = as_rank(1)
    monkeypatch.setattr(policy, "load_policy", fail)
    assert run(monkeypatch, "compare", "a", "b") == code
    assert own.getvalue().startswith(said)
    assert own.getvalue().count("rank 1") == 1


def test_nobody_waits_after_ctrl_c(as_rank, monkeypatch, capsys):
    """It is said once, by rank 0, and all end at once."""

    def stop(_):
        raise KeyboardInterrupt

    own = as_rank(1)
    monkeypatch.setattr(streams, "PATIENCE_S", 1000.0)
    monkeypatch.setattr(policy, "load_policy", stop)
    assert run(monkeypatch, "compare", "a", "b") == 130
    assert (capsys.readouterr(), own.getvalue()) == (("", ""), "")
    as_rank(0)
    assert run(monkeypatch, "compare", "a", "b") == 130
    assert "interrupted" in capsys.readouterr().err
