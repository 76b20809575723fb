"""A command that is killed at any change it makes on disk: what lies there then, and the next try.

The kill comes at the n-th time that a file is opened for writing, renamed or removed, or a folder
is made: Python's audit events tell of each before it happens.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from divergence import Run, capture
from divergence.cli.main import app
from divergence.errors import DivergenceError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

ROOT = Path(__file__).parents[1]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Server:
    """A small process that runs commands in forks of itself: a fork of the test's own process would
    need memory for all that other tests left mapped there."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.test_kills"],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def invoke(self, folder: Path, words: list[str], *, kill_at: int = 0) -> tuple[int, str]:
        """(exit status, stderr) of a command, which is killed at its n-th change below
        ``folder``."""
        print(json.dumps([str(folder), words, kill_at]), file=self._process.stdin, flush=True)
        status = json.loads(self._process.stdout.readline())
        return status, (folder.parent / "stderr").read_text()

    def close(self) -> None:
        self._process.communicate(timeout=60)


def serve() -> None:
    """Runs the commands that stdin tells, each in a fork, and tells their exit statuses."""
    # What is imported here every fork has.
    import transformers.models.llama.modeling_llama  # noqa: F401

    for line in sys.stdin:
        folder, words, kill_at = json.loads(line)
        child = os.fork()
        if not child:
            run(app, Path(folder), words, kill_at)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(app: Callable[..., None], folder: Path, words: list[str], kill_at: int) -> NoReturn:
    code = 99
    try:
        os.chdir(folder)
        count = 0

        def on_event(event: str, arguments: tuple) -> None:
            nonlocal count
            if event == "open":
                path, _, flags = arguments
                if not (isinstance(flags, int) and flags & WRITES):
                    return
            elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
                path = arguments[0]
            else:
                return
            if isinstance(path, str | os.PathLike) and str(folder) in os.path.abspath(path):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        with open(folder.parent / "stderr", "w") as err, contextlib.redirect_stderr(err):
            sys.addaudithook(on_event)
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    app(words, prog_name="divergence")
                except SystemExit as ended:
                    code = ended.code or 0
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Commands in processes of their own."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory, llama):
    """A folder with a model and a run, twice."""
    folder = tmp_path_factory.mktemp("kills")
    capture(str(llama), out=folder / "a", prompts=["hi"], max_new_tokens=2, probe=False)
    shutil.copytree(folder / "a", folder / "old")
    shutil.copytree(llama, folder / "model")
    rollout = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "response_mask": [1, 1],
        "rollout_log_probs": [-1.0, -2.0],
    }
    (folder / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    return folder


def state(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


COMMANDS = {
    "capture": ("capture model -o out --prompt hi --max-new-tokens 2 -q", "out"),
    "truth": ("truth a -o out -q", "out"),
    "import": ("import rollouts.jsonl -o out -q", "out"),
    "pack": ("pack a -o out.tar -q", "out.tar"),
    "unpack": ("unpack a -o out -q", "out"),
    "bless": ("check out a --bless -q", "out"),
    "bundle": ("bundle a old -o out.zip -q", "out.zip"),
    "page": ("compare a old --html out.html -q", "out.html"),
}
QUICK = ("bless", True, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "there", "every"),
    [
        pytest.param(*QUICK, id="every third moment"),
        *(
            pytest.param(
                name,
                there,
                1,
                id=f"{name}-{'replacing' if there else 'new'}",
                marks=[pytest.mark.slow, *([pytest.mark.whole] if name == "import" else [])],
            )
            for name in COMMANDS
            for there in (False, True)
        ),
    ],
)
def test_a_kill_at_any_moment_leaves_what_can_be_read(
    name, there, every, sources, server, tmp_path
):
    """The output is absent, whole, or an incomplete run that says so; the rest of the folder is
    as it was; the same command says what to do, and works with --force."""
    line, out = COMMANDS[name]
    words, options = line.split(), ["--force"]
    if name in ("bless", "page"):
        options = []
    folder = tmp_path / "work"
    shutil.copytree(sources, folder)
    others = state(folder)
    if there:
        assert server.invoke(folder, words)[0] == 0
        words = words + options
    moments = 0
    before = state(folder)
    for moment in range(1, 200, every):
        status, _ = server.invoke(folder, words, kill_at=moment)
        if status != -signal.SIGKILL:
            assert status == 0
            break
        moments += 1
        after = state(folder)
        assert {path: after.get(path) for path in others} == others, moment
        place = folder / out
        if place.exists() and name not in ("page", "bundle"):
            check_run(place, moment)
        elif there and name in ("pack", "bless", "bundle", "page"):
            assert place.exists(), moment
        status, err = server.invoke(folder, words)
        if status != 0:
            assert status == 2 and "--force" in err, (moment, err)
            status, err = server.invoke(folder, [*words, *options])
        assert status == 0, (moment, err)
        reset(folder, before)
    assert moments * every > 2


def check_run(place: Path, moment: int) -> None:
    try:
        with contextlib.closing(Run.open(place)) as run:
            assert run.verify() == [], moment
    except DivergenceError as error:
        assert error.exit_code == 2 and error.hint, (moment, error)


def reset(folder: Path, before: dict[str, bytes]) -> None:
    shutil.rmtree(folder)
    for name, content in before.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    serve()
