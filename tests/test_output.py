"""Output files: whole or not at all, never in the place of something else; and who may write."""

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from divergence import capture, output
from divergence.cli.main import app
from divergence.errors import UsageError
from divergence.output import append_output, check_output, write_output
from tests.sources import trees

ROOT = Path(__file__).parents[1]
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="devices, links and modes of POSIX")

WRITERS = {
    "output.py": "it is the place",
    "cli/streams.py": "os.devnull for streams that are closed",
    "domains/logprobs/endpoints/capture.py": "what was gone on with takes the place of the run",
    "experiments/reuse.py": "the run of an earlier diff, linked or copied",
    "layout.py": "os.devnull for a reader that is gone",
    "run/storage.py": "a run's own files",
    "run/target.py": "a run's own files, piece by piece; what is no run is not replaced",
}
"""The other modules that write files, each with why."""
_WRITES = re.compile(
    r"\.write_text\(|\.write_bytes\(|os\.replace\(|\.rename\(|np\.save|torch\.save\(|save_file\(|"
    r"savefig\(|os\.O_WRONLY|shutil\.(copy|move)"
)


@pytest.mark.slow
@pytest.mark.whole
def test_no_other_module_writes_files():
    """A new output goes through divergence/output.py."""
    writers = set()
    for path, tree in trees(rf"{_WRITES.pattern}|\bopen\("):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (
                _WRITES.search(ast.unparse(node.func) + "(") or _opens_to_write(node)
            ):
                writers.add(path)
    assert writers == set(WRITERS)


def _opens_to_write(call: ast.Call) -> bool:
    if ast.unparse(call.func) == "os.open":
        return "O_WRONLY" in ast.unparse(call) or "O_RDWR" in ast.unparse(call)
    modes = [*call.args[1:2], *(key.value for key in call.keywords if key.arg == "mode")]
    return ast.unparse(call.func) == "open" and any(
        isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """An old file stays until the new one is there; what fails leaves nothing behind."""
    path = tmp_path / "page.html"
    path.write_text("old")
    assert write_output("new", path, what="page") == path
    assert path.read_text() == "new"

    def full(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(output.os, "replace", full)
    with pytest.raises(UsageError, match="full") as caught:
        write_output("newer", path, what="page")
    assert "free some space" in caught.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "new"


@POSIX
def test_a_link_is_followed_and_modes_are_kept(tmp_path):
    """A link says where the file is to lie; a script stays executable, a secret stays one."""
    real, link, later = tmp_path / "real", tmp_path / "link", tmp_path / "later"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    later.symlink_to("made")
    write_output("new", link, what="page")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    write_output("new", later, what="page")
    assert later.is_symlink() and (tmp_path / "made").read_text() == "new"


def special(kind: str, folder: Path) -> Path:
    """Something that is no regular file, and takes what is written."""
    path = folder / kind
    if kind == "link":
        path.symlink_to(os.devnull)
    elif os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7 if kind == "full" else 3))
        try:
            path.open("wb").close()
        except PermissionError:
            pytest.skip("no devices on this file system")
    else:
        pytest.skip("only root makes devices")
    return path


COMMANDS = {
    "--html": ("compare", "a", "b", "--html"),
    "--csv": ("compare", "a", "b", "--csv"),
    "--svg": ("compare", "a", "b", "--svg"),
    "check --html": ("check", "a", "b", "--html"),
    "--junit": ("check", "a", "b", "--junit"),
    "--codequality": ("check", "a", "b", "--codequality"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama):
    """Two runs, a and b."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in ("a", "b"):
        like = (
            {"like": folder / "a"}
            if name == "b"
            else {"model": str(llama), "prompts": ["hi"], "max_new_tokens": 2}
        )
        capture(**like, out=folder / name, probe=False)
    return folder


@pytest.fixture
def command(runs, monkeypatch, capsys):
    """``command(words)``: (exit code, stderr) beside the runs."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.chdir(runs)
        with pytest.raises(SystemExit) as caught:
            app([*map(str, words)], prog_name="divergence")
        return caught.value.code, capsys.readouterr().err

    return call


@POSIX
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["null", "link", "full"])
def test_a_device_stays_what_it_is(name, kind, command, tmp_path):
    """It takes what is written; a full one is an error of one sentence."""
    path = special(kind, tmp_path)
    before = os.lstat(path).st_mode
    code, err = command(*COMMANDS[name], path)
    assert (code, "cannot write the" in err) == ((2, True) if kind == "full" else (0, False)), err
    assert os.lstat(path).st_mode == before
    assert os.listdir(tmp_path) == [kind]


@pytest.mark.parametrize("place", ["folder", "nowhere/file", "file/file"])
@pytest.mark.parametrize(
    "words",
    [
        *COMMANDS.values(),
        pytest.param(("scores", "a", "b", "--html"), marks=pytest.mark.whole),
        pytest.param(("scores", "a", "b", "--csv"), marks=pytest.mark.whole),
        ("localize", "a", "b", "-o", "x", "--html"),
        ("sensitivity", "a", "--html"),
        ("selfcheck", "no-model", "--html"),
        ("selftest", "--device", "cpu", "-o"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_is_refused_before_the_work(words, place, command, tmp_path):
    """Exit code 2; nothing is read for it: the runs of these commands are not there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    words = [word if word not in ("a", "b") else "no-run" for word in words]
    code, err = command(*words, tmp_path / place)
    assert code == 2 and err.startswith("error: cannot write the "), err
    with pytest.raises(UsageError, match="cannot write the page"):
        check_output(tmp_path / place, what="page")


@POSIX
def test_what_stdout_goes_to_is_not_taken_away_from_it(tmp_path):
    """`--csv /dev/stdout > file`: what is printed afterwards is in the file too; and a pipe of the
    shell, which has no path of its own, is written to."""
    program = (
        "from divergence.output import write_output\n"
        "print('first'); write_output('table\\n', '/dev/stdout', what='CSV'); print('last')"
    )
    path = tmp_path / "file"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=file, check=True)
    assert path.read_text() == "first\ntable\nlast\n"
    ours, theirs = os.pipe()
    write_output("page", f"/dev/fd/{theirs}", what="page")
    assert os.read(ours, 10) == b"page"


def test_a_file_that_others_write_to_is_added_to(tmp_path):
    """GitHub's summary of a step holds what earlier commands wrote."""
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    append_output("after\n", path, what="summary")
    assert path.read_text() == "before\nafter\n"
    with pytest.raises(UsageError, match="cannot write the summary"):
        append_output("after", tmp_path, what="summary")
