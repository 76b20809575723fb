"""Where the answer cannot be written or Ctrl-C comes, the exit code is no answer and no fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "divergence"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama) -> Path:
    """``a``, ``b`` equal to it, ``c`` with a fault."""
    from divergence import capture

    folder = tmp_path_factory.mktemp("runs")
    capture(llama, out=folder / "a", max_new_tokens=1)
    capture(like=folder / "a", out=folder / "b")
    capture(like=folder / "a", out=folder / "c", plants=["model.layers.1:out=scale:1.5"])
    return folder


def shell(runs: Path, command: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """One command with its streams redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f"cd {runs}; {' '.join(PYTHON)} {command} {redirected}"],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirected"),
    [
        pytest.param("check a b", ">&-", marks=pytest.mark.slow),
        ("check a b", ">/dev/full"),
        ("inspect a --json", ">/dev/full"),
        ("inspect a", ">&- 2>&-"),
        ("inspect a", ">/dev/full 2>/dev/full"),
        ("check --help", ">/dev/full"),
    ],
)
def test_an_answer_that_has_nowhere_to_go_is_2(runs, command, redirected):
    """Not 1: equal runs have not diverged. Not 3: nothing is wrong with the tool."""
    done = shell(runs, command, redirected)
    assert done.returncode == 2, done.stderr
    assert "2>" in redirected or "cannot write the answer" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirected", "code"),
    [
        pytest.param("check a b", "2>&-", 0, marks=pytest.mark.slow),
        ("check a c", "2>/dev/full", 1),
        ("inspect nothing", "2>&-", 2),
        ("inspect nothing", "2>/dev/full", 2),
        ("inspect a", "<&-", 0),
    ],
)
def test_what_is_for_people_changes_no_exit_code(runs, command, redirected, code):
    """stderr closed or full, stdin closed."""
    done = shell(runs, command, redirected)
    assert (done.returncode, bool(done.stdout)) == (code, code != 2)


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_ctrl_c_while_modules_are_imported_is_130(runs, module):
    """Also where the library that is being imported makes an error of it."""
    program = f"""
import builtins, os, signal, sys
real = builtins.__import__
def interrupted(name, *rest, **more):
    if name == {module!r} or name.startswith({module!r} + "."):
        builtins.__import__ = real
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if {module!r} == "numpy":
                raise ImportError("cannot import numpy") from None
            raise
    return real(name, *rest, **more)
sys.argv = ["divergence", "compare", "a", "b"]
from divergence.__main__ import run
builtins.__import__ = interrupted
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=runs,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted\n"
