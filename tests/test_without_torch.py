"""A machine without torch and transformers: runs are compared all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without_torch(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``divergence`` with these words."""
    code = f"sys.argv = {['divergence', *words]}\nfrom divergence.__main__ import run\nrun()"
    return without_torch(code, cwd)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model) -> Path:
    """A folder with runs of a dense model and of one with experts, in pairs, and two truths."""
    from divergence import capture

    folder = tmp_path_factory.mktemp("runs")
    fault = {"llama": "model.layers.1.mlp:out=scale:1.5", "mixtral": "model.layers.1:out=scale:1.5"}
    for name in ("llama", "mixtral"):
        a = capture(
            str(tiny_model(name)),
            out=folder / f"{name}-a",
            prompts=["Snow fell", "A bridge is"],
            max_new_tokens=2,
            device="cpu",
            dtype="bfloat16",
            probe=False,
        )
        for other, more in (("b", {}), ("wrong", {"plants": [fault[name]]})):
            capture(
                like=a,
                out=folder / f"{name}-{other}",
                device="cpu",
                probe=False,
                attn_implementation="sdpa",
                **more,
            )
    capture(
        like=folder / "llama-a", out=folder / "float32", device="cpu", dtype="float32", probe=False
    )
    return folder


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_two_runs_get_the_answer_that_they_get_with_torch(name, runs):
    """Of healthy runs and of a planted fault, all of the report: with the truth that runs carry."""
    from divergence import compare

    for other in ("b", "wrong"):
        pair = str(runs / f"{name}-a"), str(runs / f"{name}-{other}")
        done = command("compare", *pair, "--json", cwd=runs)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == json.loads(compare(*pair).to_json())


def test_two_dtypes_are_compared(runs):
    """What is rounded to the narrower format is rounded without torch, too."""
    from divergence import compare

    pair = str(runs / "llama-a"), str(runs / "float32")
    done = command("compare", *pair, "--json", cwd=runs)
    assert json.loads(done.stdout) == json.loads(compare(*pair).to_json())


def test_check_inspect_and_several_runs(runs):
    """The commands of a CI runner and of a laptop."""
    for words, code, told in (
        (["check", "llama-a", "llama-b"], 0, "PASS"),
        (["check", "llama-a", "llama-wrong"], 1, "FAIL"),
        (["inspect", "llama-a"], 0, "84 records"),
        (["inspect", "llama-a", "--site", "model.layers.0:out"], 0, "free"),
        (["compare", "llama-a", "llama-b", "llama-wrong"], 0, "llama-wrong"),
        (["compare", "llama-a", "llama-b", "--html", "page.html"], 0, "page.html"),
    ):
        done = command(*words, cwd=runs)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert told in done.stdout, words


@pytest.mark.parametrize("words", [["capture", "model", "-o", "c"], ["truth", "a", "-o", "t"]])
def test_what_runs_a_model_says_what_is_missing(words, tmp_path):
    """Exit code 2, with the command that installs it."""
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "torch" in done.stderr and "pip install torch" in done.stderr


def test_the_package_is_imported_and_its_names_say_what_is_missing(tmp_path):
    """What needs no torch is there, and the rest says what it needs."""
    code = (
        "import divergence\n"
        "assert divergence.compare and divergence.Run and divergence.check\n"
        "try:\n    divergence.capture\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = without_torch(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("UsageError") and "pip install torch" in done.stdout
