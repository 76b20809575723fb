"""Exit code 1 is a verdict, and nothing else: whatever runs out, breaks or stops a command."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from divergence.errors import ExhaustedError, ModelError, check_process, exhausted
from tests.sources import trees

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")


def ended(program: str, *words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The command line in a process of its own, after ``program``."""
    code = f"import sys\n{program}\nfrom divergence.__main__ import run\nrun()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_one_place_gives_the_exit_code_of_a_verdict():
    """No other line ends a process with 1; ranks, whose parent says how they ended, do."""
    places = []
    for path, tree in trees("[eE]xit"):
        for node in ast.walk(tree):
            called = getattr(node, "func", None)
            name = getattr(called, "attr", getattr(called, "id", ""))
            ends = name in ("Exit", "exit", "_exit", "SystemExit")
            # typer's Exit is made by those who know their code; 1 is Diverged's alone
            if ends and any(isinstance(a, ast.Constant) and a.value == 1 for a in node.args):
                places.append(path)
    assert places == []
    text = (ROOT / "divergence/cli/answers.py").read_text(encoding="utf-8")
    assert text.count("super().__init__(1)") == 1


@pytest.mark.parametrize("megabytes", [40, 100, 400, 700, 1500])
def test_a_command_without_memory_ends_with_3(megabytes, tmp_path):
    """Also where a library ends the process itself (OpenBLAS), or where telling takes memory."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes << 20},) * 2)"
    done = ended(limit, "compare", tmp_path / "a", tmp_path / "b")
    # 2: enough for a comparison of what is not there; 130: OpenBLAS sends itself Ctrl-C
    assert done.returncode in (2, 3, 130, -signal.SIGABRT), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError()",
        "SystemError('x')",
        "RecursionError('x')",
        "GeneratorExit()",
        "SystemExit(1)",
        "BaseException('x')",
        "ImportError('libcudart.so: not there')",
        "RuntimeError('[enforce fail at alloc_cpu.cpp:117] no')",
    ],
)
@pytest.mark.parametrize("where", ["divergence.cli.main", "divergence.cli.compare"])
def test_an_error_at_any_import_is_no_verdict(error, where):
    """Of the command line itself, and of a command's module."""
    program = f"""
import importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == {where!r}:
            raise {error}
sys.meta_path.insert(0, Finder())"""
    done = ended(program, "compare", "a", "b")
    assert done.returncode in (2, 3) and "Traceback" not in done.stderr, done.stderr
    if "alloc" in error or "Memory" in error:
        assert done.returncode == 3 and "memory ran out" in done.stderr


def test_a_library_that_ends_the_process_gives_no_verdict():
    """C's exit(1), as OpenBLAS and OpenMP call it."""
    program = """
import divergence.cli.compare, ctypes
divergence.cli.compare.settings = lambda name: ctypes.CDLL(None).exit(1)"""
    done = ended(program, "compare", "a", "b")
    assert done.returncode == 3, done.stderr


@pytest.mark.slow
def test_an_error_while_an_error_is_told_and_at_the_end():
    """Neither is a verdict, nor is an answer that cannot be written at the very end (120)."""
    done = ended(
        "import divergence.cli.main as m\ndef broken(*a, **k): raise MemoryError\nm._say = broken",
        "compare",
        "no-run",
        "b",
    )
    assert (done.returncode, "memory ran out" in done.stderr) == (3, True)
    program = "import atexit\natexit.register(lambda: 1 / 0)"
    assert ended(program, "--version").returncode == 0
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "divergence", "--version"], cwd=ROOT, stdout=full, check=False
        )
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_signal_ends_a_command_as_shells_expect(name, count):
    """128 and its number, once or three times in a row, also while it is being told."""
    number = getattr(signal, name)
    program = f"""
import os, signal
import divergence.cli.compare, divergence.cli.main as main
def stop(*_, **more):
    global left
    if left:
        left -= 1
        os.kill(os.getpid(), {number})
left, say = {count}, main._say
def interrupted(*words, **more):
    stop()
    say(*words, **more)
main._say = interrupted
divergence.cli.compare.settings = stop"""
    done = ended(program, "compare", "a", "b")
    assert done.returncode in (128 + number, -number), done.stderr
    assert "Traceback" not in done.stderr


def test_what_memory_that_ran_out_looks_like():
    """Libraries say it in their own ways, and others make errors of those."""
    text = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
    for error in (
        MemoryError(),
        RuntimeError(text),
        RuntimeError("CUDA out of memory"),
        type("OutOfMemoryError", (RuntimeError,), {})("x"),
        OSError(12, "Cannot allocate memory"),
    ):
        assert isinstance(exhausted(error), ExhaustedError)
        try:
            raise ModelError("the model cannot be loaded", hint="a smaller --dtype") from error
        except ModelError as made:
            assert exhausted(made).hint == "a smaller --dtype"
    assert exhausted(RuntimeError("shapes differ")) is None
    assert exhausted(ImportError("x.so: cannot allocate memory in static TLS block")) is None


def test_a_process_that_was_killed_is_no_refusal_of_its_input():
    """The OOM killer leaves no word: the sentence says what most often did it."""
    with pytest.raises(ExhaustedError, match="killed by signal 9") as caught:
        check_process(-9, "capture")
    assert caught.value.exit_code == 3 and "memory" in caught.value.hint
    with pytest.raises(KeyboardInterrupt):
        check_process(130, "capture")
    check_process(2, "capture")
