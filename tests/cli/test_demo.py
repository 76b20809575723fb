"""The demo on a model of the user's own: the steps run, and the planted fault is found."""

import json
import shutil
import subprocess

import pytest
import typer

from divergence.cli import demo
from divergence.cli.main import app


@pytest.fixture
def in_process(monkeypatch, own_truths):
    """The demo's commands run in this process, on one set of kernels: seconds instead of a minute.

    The commands that ran."""
    ran = []

    def run(plan, arguments, variables, title):
        ran.append((arguments, variables))
        with pytest.raises(SystemExit) as ended:
            app(
                [*arguments, "--quiet", *(["--no-probe"] if arguments[0] == "capture" else [])],
                prog_name="divergence",
            )
        assert ended.value.code in (0, None), arguments

    monkeypatch.setattr(demo, "_run", run)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "module"),
    [("gpt2", "transformer.h.1.mlp.c_proj"), ("remote-code", "bricks.1.narrow")],
)
def test_a_fault_is_planted_and_found_in_a_model_of_ones_own(
    architecture, module, invoke, in_process, tiny_model, tmp_path
):
    """Block, side, operator and proof, whatever its modules are called."""
    model = tiny_model(architecture)
    trusted = ["--trust-remote-code"] if architecture == "remote-code" else []
    code, out, err = invoke("demo", "--model", model, "--workdir", tmp_path / "w", *trusted, "-q")
    assert code == 0, err
    block = module.removesuffix(".mlp.c_proj").removesuffix(".narrow")
    assert f"DIVERGED: the error is made at {block}:out, by B" in out
    assert f"from operators that only B calls: {module}/aten" in " ".join(out.split())
    assert "proven      yes" in out
    assert [arguments[0] for arguments, _ in in_process] == ["capture", "capture", "capture"]
    assert [bool(variables) for _, variables in in_process] == [False, True, True]
    assert all("--trust-remote-code" in arguments for arguments, _ in in_process) == bool(trusted)


@pytest.mark.slow
def test_a_fault_below_rounding_is_not_named_and_a_larger_one_is_planted(
    invoke, in_process, llama, tmp_path, monkeypatch
):
    """Nothing may be said of what the dtype rounds away; the demo goes on with more."""
    monkeypatch.setattr(demo, "FACTORS", (1.01, 1.5))
    monkeypatch.setattr(demo, "_localize", lambda *_, **__: None)
    monkeypatch.setattr(demo, "_check_operator", lambda *_: None)
    code, out, err = invoke("demo", "--model", llama, "--workdir", tmp_path / "w", "-q")
    assert code == 0, err
    assert "smaller than what this dtype rounds away" in out
    plants = [arguments[-1] for arguments, _ in in_process if "--plant" in arguments]
    assert [plant.rpartition(":")[2] for plant in plants] == ["1.01", "1.50"]
    assert "DIVERGED: the error is made at model.layers.1:out" in out


def test_a_model_without_a_tokenizer_gets_token_ids(invoke, llama, tmp_path, monkeypatch):
    """There is nothing to make tokens of a text."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama / name, bare)
    ran = []

    def stop(plan, arguments, variables, title):
        ran.append(arguments)
        raise typer.Exit(0)

    monkeypatch.setattr(demo, "_run", stop)
    assert invoke("demo", "--model", bare, "--workdir", tmp_path / "w", "-q")[0] == 0
    first = ran[0]
    with open(first[first.index("--prompts") + 1], encoding="utf-8") as file:
        assert len(json.loads(file.readline())["input_ids"]) == 16
    assert "--chat" not in first


@pytest.mark.parametrize("what", ["absent", "a file", "an empty folder"])
def test_a_path_that_holds_no_model_is_said_before_anything_runs(
    what, invoke, in_process, tmp_path
):
    """Exit code 2, what is wrong, what to try."""
    path = tmp_path / "model"
    if what == "a file":
        path.write_text("no model")
    elif what == "an empty folder":
        path.mkdir()
    code, out, err = invoke("demo", "--model", path, "--workdir", tmp_path / "w")
    assert code == 2
    assert out == ""
    assert str(path) in err
    assert "try:" in err
    assert in_process == []
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_a_capture_that_fails_ends_the_demo_with_its_exit_code(
    invoke, llama, tmp_path, monkeypatch
):
    """The capture has said what is wrong; of a model of one's own that is no fault of the tool."""
    failed = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    code, _, err = invoke("demo", "--model", llama, "--workdir", tmp_path / "own")
    assert code == 2
    assert "report" not in err
    code, _, err = invoke("demo", "--workdir", tmp_path / "built-in")
    assert code == 3
    assert "exit code 2" in err
