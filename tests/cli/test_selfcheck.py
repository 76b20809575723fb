"""`divergence selfcheck`: the sentence, the table, the exit code."""

import pytest


@pytest.mark.slow
def test_runs_are_kept_and_the_command_line_answers(llama, invoke, tmp_path):
    """With --keep the runs stay, and the answer says which two to compare."""
    code, out, _ = invoke(
        "selfcheck", llama, "--only", "again,attention", "--keep", "runs", "--exit-code"
    )

    assert code == 0 and out.startswith("This machine agrees with itself in 2 ways of running")
    assert "divergence compare runs/base runs/attention" in out
    assert (tmp_path / "runs" / "base" / "manifest.json").is_file()


def test_a_line_that_is_none_is_named(llama, invoke):
    """A misspelt way of running is refused, with the nearest one."""
    code, _, err = invoke("selfcheck", llama, "--only", "cash")

    assert code == 2 and "no line 'cash'" in err and "did you mean cache?" in err
