"""Exit codes, errors and start-up: what every command has in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from divergence import __version__
from divergence.cli import main
from divergence.errors import DivergenceError, ModelError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def failing(error: BaseException):
    def compare(*_, **__):
        raise error

    return compare


@pytest.mark.parametrize("command", ["", "capture", "compare", "check", "inspect", "env"])
def test_help_loads_nothing_heavy(command):
    """Neither torch nor transformers nor numpy is needed to say what a command does, nor many
    modules of any kind: --help is there before one has looked up."""
    code = (
        "import sys\n"
        "from divergence.cli.main import app\n"
        "try: app([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 600, len(sys.modules)\n"
    )
    result = python("-c", code, *filter(None, [command]))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_importing_the_package_imports_nothing():
    """`import divergence` is free, and its names are there when asked for: functions, in whatever
    order its packages are imported, as none has the name of one."""
    code = (
        "import sys, divergence\n"
        "assert not {'torch', 'msgspec', 'typer', 'rich'} & set(sys.modules)\n"
        "assert divergence.__all__ == sorted(divergence.__all__)\n"
        "assert set(divergence.__all__) <= set(dir(divergence))\n"
        "assert divergence.__version__\n"
        "import divergence.comparison.result as result\n"
        "assert divergence.Report is result.Report\n"
        "assert callable(divergence.compare) and callable(divergence.capture)\n"
        "try: divergence.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "import inspect\n"
        "from divergence import capture, compare, replay, truth\n"
        "import divergence.recording, divergence.comparison, divergence.run\n"
        "assert all(map(inspect.isfunction, (capture, compare, replay, truth)))\n"
        "assert divergence.compare is compare\n"
        "assert 'candidate' in inspect.signature(compare).parameters\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_version(invoke):
    """--version prints one line to stdout."""
    assert invoke("--version") == (0, f"divergence {__version__}\n", "")


def test_module_and_checkout_run():
    """`python -m divergence` works where nothing is installed."""
    result = python("-m", "divergence", "--version")
    assert (result.returncode, result.stdout) == (0, f"divergence {__version__}\n")


@pytest.mark.parametrize(
    "args", [["nothing"], ["compare"], ["compare", "a", "b", "--nope"], ["env", "--device"]]
)
def test_wrong_usage_exits_2(invoke, args):
    """typer's own errors are wrong usage."""
    code, _out, _err = invoke(*args)
    assert code == 2


def test_no_command_prints_the_help(invoke):
    """0 or 2, as the installed typer has it; never 1."""
    code, out, err = invoke()
    assert code in (0, 2)
    assert "capture" in out + err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (ModelError("no"), 2),
        (DivergenceError("no"), 3),
        (ValueError("no"), 3),
        (OSError(5, "no"), 3),
        (OSError(28, "no"), 2),
        (MemoryError(), 3),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3),
        (SystemError("no"), 3),
        (RecursionError("no"), 3),
        (GeneratorExit(), 3),
        (KeyboardInterrupt(), 130),
        (EOFError(), 130),
    ],
)
def test_errors_have_their_exit_codes(invoke, replace_api, error, code):
    """None of them is 1, and none of them writes to stdout."""
    replace_api("comparison", compare=failing(error))
    found, out, err = invoke("compare", "a", "b")
    assert (found, out) == (code, "")
    assert err


def test_an_error_says_what_where_and_what_to_try(invoke, replace_api):
    """All three parts of an error reach the user, brackets included."""
    error = UsageError("it [red]failed[/red]", where="[here]", hint="try that")
    replace_api("comparison", compare=failing(error))
    _, _, err = invoke("compare", "a", "b")
    assert err == "error: it [red]failed[/red]\n  where: [here]\n  try:   try that\n"


def test_a_fault_is_short_and_verbose_shows_the_traceback(invoke, replace_api):
    """An unexpected exception is one line; -v gives the traceback to report."""
    replace_api("comparison", compare=failing(RuntimeError("odd")))
    code, _, err = invoke("compare", "a", "b")
    assert code == 3
    assert err.startswith("fault in divergence: RuntimeError: odd\n")
    assert "-v" in err and "Traceback" not in err
    code, _, err = invoke("compare", "a", "b", "-v")
    assert code == 3
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("asked", "variable", "lines"),
    [((), "0", 2), ((), "1", 0), (("-q",), "0", 0)],
    ids=["told", "not wanted", "quiet"],
)
def test_long_work_tells_where_it_is(invoke, replace_api, monkeypatch, asked, variable, lines):
    """Where stderr is no terminal each part of long work begins with a plain line."""
    monkeypatch.setattr("divergence.cli.answers._Lines.AFTER_S", -1.0)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", variable)

    def compare(*_, progress, **__):
        for event, done, total, detail in (
            ("read", 0, None, ""),
            ("measure", 1, 4, "model.norm"),
            ("measure", 2, 4, "lm_head"),
        ):
            progress(event, done, total, detail)
        raise UsageError("enough")

    replace_api("comparison", compare=compare)
    _, _, err = invoke("compare", "a", "b", *asked)
    said = [line.rpartition(" (")[0] for line in err.splitlines()[:-1]]
    wanted = ["read", "measure: 1/4, model.norm"][:lines]
    assert [line for line in said if line != "begin"] == wanted


@pytest.mark.slow
def test_garbage_is_collected_once_the_work_has_begun():
    """The start, which leaves nothing to collect, goes without; what comes later does not, to the
    end of the command."""
    program = (
        "import atexit, gc, runpy, sys\n"
        "sys.argv = ['divergence', *sys.argv[1:]]\n"
        "atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 0))\n"
        "runpy.run_module('divergence', run_name='__main__', alter_sys=True)\n"
    )
    run = str(ROOT / "tests" / "fixtures" / "run-v7")
    made = python("-c", program, "compare", run, run, "-q")
    assert made.stdout.splitlines()[-1] == "10000 True", made.stderr


def test_completion_answers():
    """The shell gets the commands that begin with what was typed."""
    result = python(
        "-m",
        "divergence",
        _DIVERGENCE_COMPLETE="complete_bash",
        COMP_WORDS="divergence co",
        COMP_CWORD="1",
    )
    assert result.stdout.split() == ["compare"]


def test_settings_that_mean_nothing_are_told(invoke, replace_api, reports, monkeypatch):
    """A misspelt variable is never silently without effect."""
    replace_api("comparison", compare=lambda *_, **__: reports.make_report())
    monkeypatch.setenv("DIVERGENCE_CHEKC_POLICY", "strict")
    code, _, err = invoke("compare", "a", "b")
    assert code == 0
    assert "DIVERGENCE_CHEKC_POLICY" in err


def test_a_warning_of_our_own_is_one_line():
    """Without the line of source that Python prints; a library's says where it comes from."""
    own = main._warning_text("no such limit", UserWarning, main.__file__, 3)
    assert own == "warning: no such limit\n"
    assert "torch/x.py:3: UserWarning" in main._warning_text("old", UserWarning, "torch/x.py", 3)
