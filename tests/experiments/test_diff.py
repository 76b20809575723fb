"""diff: one command from the captures to the verdict; what was done is not done again."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from divergence import Run, diff
from divergence.cli.main import app
from divergence.errors import ModelError, RunExistsError, UsageError
from divergence.experiments.diff import _Steps
from tests.digests import without_digests

PROMPTS = ["The bridge was built", "one two three four"]


def in_this_process(steps, words, side, shown):
    """A step without three imports of torch; ``test_any_one_setting`` holds the processes."""
    with pytest.raises(SystemExit) as ended:
        app(words[3:], prog_name="divergence")
    assert words[1:3] == ["-m", "divergence"] and ended.value.code == 0, shown
    return [__file__]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(_Steps, "_process", in_this_process)
    monkeypatch.setattr(_Steps, "start", lambda steps, side: None)


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory):
    """A diff of two attention kernels, and its steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Steps, "_process", in_this_process)
        patched.setattr(_Steps, "start", lambda steps, side: None)
        return _made(llama, tmp_path_factory)


def _made(llama, tmp_path_factory):
    steps = []
    folder = tmp_path_factory.mktemp("diff") / "d"
    result = diff(
        llama,
        out=folder,
        attn_implementation=("eager", "sdpa"),
        dtype="bfloat16",
        prompts=PROMPTS,
        max_new_tokens=2,
        quiet=True,
        on_step=lambda *step: steps.append(step),
    )
    return result, steps


def test_two_settings_are_captured_judged_and_compared(made):
    """With a truth, an anchored and a float32 pass, a report and a page."""
    result, steps = made
    report = result.report
    assert report.verdict.kind in ("identical", "within_floor")
    lacking = [one.name for one in report.verdict.checks if one.state != "met"]
    assert not {"truth", "anchored", "escalated"} & {*lacking}
    assert [step[2] for step in steps] == [False, False]
    assert json.loads((result.folder / "report.json").read_text())["verdict"]
    assert result.page.read_text(encoding="utf-8").startswith("<!doctype html>")
    b = Run.open(result.folder / "b").manifest
    assert (b.model.attn_implementation, b.environment.label) == (
        "sdpa",
        "attn-implementation sdpa",
    )
    assert "escalated" in b.plan.passes
    assert "escalated" in Run.open(result.folder / "a").manifest.plan.passes
    assert result.localize is None


def test_again_nothing_is_done_twice(made, llama):
    """The same diff takes what lies there, and gives the same verdict."""
    first, _ = made
    steps = []
    again = diff(
        llama,
        out=first.folder,
        attn_implementation=("eager", "sdpa"),
        dtype="bfloat16",
        prompts=PROMPTS,
        max_new_tokens=2,
        quiet=True,
        on_step=lambda *step: steps.append(step),
    )
    assert [step[2] for step in steps] == [True, True]
    assert again.report.verdict == first.report.verdict


def test_a_model_at_home_is_known_again(made, llama, monkeypatch):
    """A run tells no name of a home directory; its command is known all the same."""
    first, _ = made
    monkeypatch.setenv("HOME", str(llama.parent))
    for name in ("a", "b"):
        without_digests(first.folder / name)
        file = first.folder / name / "manifest.json"
        file.write_text(file.read_text().replace(f"{llama.parent}/", "~/"))
    done = []
    diff(
        llama,
        out=first.folder,
        attn_implementation=("eager", "sdpa"),
        dtype="bfloat16",
        prompts=PROMPTS,
        max_new_tokens=2,
        quiet=True,
        on_step=lambda *step: done.append(step[2]),
    )
    assert done == [True, True]


def test_the_runs_of_another_diff_are_not_replaced_unasked(made, llama):
    """Another command in the same folder is refused."""
    first, _ = made
    with pytest.raises(RunExistsError, match="was made by another command"):
        diff(llama, out=first.folder, attn_implementation=("eager", "sdpa"), prompts=PROMPTS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "nothing differs"),
        ({"device": "cpu"}, "nothing differs"),
        ({"device": ("cpu", "cuda"), "dtype": ("float32", "bfloat16")}, "2 settings"),
        ({"attn_implementation": ("eager", "spda")}, "unknown attention 'spda'"),
        ({"engine": ("transformers", "compile", "onnx")}, "3 values"),
        ({"env": "NAME"}, "not NAME=VALUE"),
        ({"env": ("A=1", "B=1", "C=1")}, "one variable that differs"),
        ({"env": "A=1", "attn_implementation": ("eager", "sdpa")}, "something else does already"),
        ({"env_a": "A=1", "env_b": "A=1"}, "nothing differs"),
        ({"env_b": "A=1", "attn_implementation": ("eager", "sdpa")}, "2 settings"),
        ({"env_b": "A"}, "not NAME=VALUE"),
        ({"env_b": "A B=1"}, "not NAME=VALUE"),
        ({"env_b": ("A=1", "A=2")}, "A has two values on one side"),
        ({"env_b": "PATH=" + os.environ["PATH"]}, "both have PATH="),
        ({"batch": (0, 2)}, "at least one"),
        ({"python": (sys.executable, "/no/such/venv")}, "neither a virtual environment"),
    ],
)
def test_settings_that_make_no_two_sides_are_refused(tmp_path, settings, said):
    """Before anything is made."""
    with pytest.raises(UsageError, match=said):
        diff("model", out=tmp_path / "d", **settings)
    assert not (tmp_path / "d").exists() or not any((tmp_path / "d").iterdir())


@pytest.mark.slow
def test_each_side_has_variables_of_its_own(llama, tmp_path, monkeypatch):
    """Several of a side; each run has them in its environment and, but for secrets, in its label.
    What one lacks is as in this process."""
    monkeypatch.setenv("Y", "old")
    variables, shown_lines = [], []

    def note(steps, words, side, shown):
        variables.append(side.variables)
        shown_lines.append(shown)
        return in_this_process(steps, words, side, shown)

    monkeypatch.setattr(_Steps, "_process", note)
    monkeypatch.setattr(_Steps, "start", lambda steps, side: None)
    result = diff(
        llama,
        out=tmp_path / "d",
        env_a="X=1",
        env_b=("X=2", "Y=a b", "API_TOKEN=abc"),
        dtype="float32",
        prompts=PROMPTS,
        max_new_tokens=1,
        quiet=True,
    )
    assert variables[:2] == [{"X": "1", "Y": "old"}, {"X": "2", "Y": "a b", "API_TOKEN": "abc"}]
    labels = [Run.open(result.folder / name).manifest.environment.label for name in ("a", "b")]
    assert labels == ["X=1 Y=old", "X=2 Y=a b API_TOKEN=…"]
    assert shown_lines[1].startswith("X=2 Y='a b' API_TOKEN=… divergence capture --like")


@pytest.mark.slow
def test_a_second_diff_takes_the_reference_of_the_first(llama, tmp_path, here, monkeypatch):
    """Where all that it was made of is the same; else it is captured anew, and why is said."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    said = []

    def ran(name, **more):
        """(was A there, the id of A, what was said)"""
        done, said[:] = [], []
        result = diff(
            model,
            out=tmp_path / name,
            attn_implementation=("eager", "sdpa"),
            dtype="float32",
            prompts=PROMPTS,
            max_new_tokens=1,
            quiet=True,
            on_step=lambda *step: done.append(step[2]),
            progress=lambda event, *rest: said.append(rest[-1]) if event == "taken" else None,
            **more,
        )
        told = [text for text in said if text.startswith(str(tmp_path / name / "a"))]
        return done, Run.open(result.folder / "a").manifest.id, "".join(told)

    done, first, told = ran("one")
    assert (done, told) == ([False, False], "")
    done, again, told = ran("two")
    assert done == [True, False] and again == first and "--fresh captures it anew" in told
    assert ran("two")[:2] == ([True, True], first)
    done, other, _ = ran("three", fresh=True)
    assert done == [False, False] and other != first
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    done, other, told = ran("four")
    assert done == [False, False] and other != first and "config.json changed after" in told
    done, again, told = ran("one")
    assert done == [False, False] and again != first and "config.json changed" in told
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert "the environment changed after one" in ran("five")[2]


def test_a_python_without_divergence_is_told_what_to_install_it_from(tmp_path):
    """The command works when it is pasted: this checkout, since no index has the package."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(UsageError, match="has no divergence") as caught:
        diff("model", out=tmp_path / "d", python=(sys.executable, python))
    *command, source = shlex.split(caught.value.hint)
    assert command == [str(python), "-m", "pip", "install"]
    assert (Path(source) / "pyproject.toml").is_file()


def test_two_models_are_captured_by_hand(tmp_path):
    """They are no two settings of one model; the commands are told."""
    with pytest.raises(UsageError, match="two models") as caught:
        diff("one,org/two", out=tmp_path / "d", device="cpu")
    assert caught.value.hint[1] == "divergence capture --like a -o b --model org/two"


@pytest.mark.slow
def test_a_step_that_fails_is_named(tmp_path):
    """By its command."""
    with pytest.raises(UsageError, match="this step failed: divergence capture"):
        diff(tmp_path / "no-model", out=tmp_path / "d", threads=(1, 2), quiet=True)


def test_a_hub_out_of_reach_is_asked_once(tmp_path, monkeypatch, here):
    """Before any process begins: a model that is not here is told at once, and one that is here is
    loaded by processes that do not ask."""
    asked, offline = [], []
    place = tmp_path / "hub" / "models--org--here" / "snapshots" / "1234"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"dtype": "float32"}')
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text("1234")

    class Away:
        def head(self, url, **options):
            asked.append(url)
            raise OSError("no route")

    def stop(steps, words, side, shown):
        offline.append(steps._environment(side)["HF_HUB_OFFLINE"])
        raise UsageError("enough")

    monkeypatch.setattr("huggingface_hub.utils.get_session", Away)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(_Steps, "_process", stop)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ModelError, match="hub cannot be reached") as caught:
        diff("org/none", out=tmp_path / "none", threads=(1, 2))
    assert "no route" in caught.value.where
    assert not offline and not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="enough"):
        diff("org/here", out=tmp_path / "d", threads=(1, 2))
    assert offline == ["1"] and len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"env": "ATEN_CPU_CAPABILITY=default"},
        {"batch": (1, 2)},
        {"threads": (1, 2)},
        {"python": (sys.executable, sys.prefix)},
        {"dtype": ("float32", "bfloat16")},
        {"engine": ("transformers", "compile"), "dtype": "float32"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_any_one_setting(llama, tmp_path, settings):
    """Healthy pairs of every kind of setting."""
    result = diff(
        llama, out=tmp_path / "d", prompts=PROMPTS, max_new_tokens=2, quiet=True, **settings
    )
    assert result.report.verdict.kind in ("identical", "within_floor")
