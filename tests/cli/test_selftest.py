"""selftest: every path on the CPU, one file; a step that breaks stops nothing."""

import json

import pytest

from divergence import selftest
from divergence.errors import UsageError
from divergence.experiments import selftest as module


@pytest.fixture
def few(monkeypatch):
    """A handful of steps, in one dtype."""
    monkeypatch.setattr(module, "_DTYPES", ("float32",))
    wanted = ("the CPU", "one prompt", "--device-map")
    steps = module._steps

    def chosen(bench, quick):
        return (one for one in steps(bench, quick) if one[0].startswith(wanted))

    monkeypatch.setattr(module, "_steps", chosen)


@pytest.mark.slow
def test_a_cpu_passes_and_the_file_tells_no_place(invoke, tmp_path):
    """All steps of a CPU pass, the file names no folder, and is not replaced unasked."""
    code, out, _ = invoke("selftest", "--device", "cpu", "--quick")

    assert code == 0
    assert " ok, 3 skipped" in out and "failed" not in out
    told = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert told["complete"] and {step["status"] for step in told["steps"]} == {"ok", "skipped"}
    assert str(tmp_path) not in json.dumps(told)
    code, _, err = invoke("selftest", "--device", "cpu", "--quick")
    assert code == 2 and "selftest-cpu.json exists" in err


@pytest.mark.slow
def test_a_step_that_breaks_stops_nothing(few, monkeypatch):
    """A step that raises is told in its first line, and the others are tried."""

    def broken(self):
        raise RuntimeError("the runtime's own words\nand more")

    monkeypatch.setattr(module.Bench, "batch", broken)
    result = selftest("cpu", quick=True)

    assert [step.detail for step in result.failed] == ["RuntimeError: the runtime's own words"]
    assert result.complete and result.steps[-1].status != "failed"


def test_runs_are_kept_on_this_machine():
    """Not at a URL: said before anything is made."""
    with pytest.raises(UsageError, match="is a URL"):
        selftest("cpu", quick=True, keep="s3://bucket/selftest")


@pytest.mark.slow
def test_an_interrupted_one_is_written(few, invoke, tmp_path, monkeypatch):
    """After Ctrl-C the file holds the steps that were made, and says that it is not complete."""

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Bench, "batch", interrupted)
    code, _, _ = invoke("selftest", "--device", "cpu", "--quick")

    assert code == 130
    told = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert not told["complete"] and told["steps"]
