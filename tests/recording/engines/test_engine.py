"""Which engine runs a model: named, given its options, recorded, and taken by --like."""

import importlib.metadata
import re
import sys
import types
from typing import ClassVar

import pytest
import transformers
from msgspec.structs import replace

from divergence import LoadOptions, RecordOptions, capture, compare, truth
from divergence.errors import RunFormatError, UsageError
from divergence.recording.engines.engine import EngineOptions, engine_named, options_for
from divergence.recording.engines.sessions import (
    TorchSession,
    TransformersEngine,
    loaded_by_transformers,
)

WISHES = {"prompts": ["one two"], "max_new_tokens": 2, "probe": False}


class HalvingOptions(EngineOptions, frozen=True, kw_only=True):
    rounds: int = 1
    note: str = "x"


class HalvingSession(TorchSession):
    name = "halving"
    lacks: ClassVar = {"operators": "it has none", "escalate": "narrow", "plants": "it is honest"}

    def version(self):
        return "1.2"


class HalvingEngine:
    """Someone's engine: halves the last block's output projection."""

    name = "halving"
    Options = HalvingOptions

    def load(self, loading, options):
        import torch

        loaded = loaded_by_transformers(loading)
        with torch.no_grad():
            for _ in range(options.rounds):
                loaded.module.model.layers[-1].mlp.down_proj.weight.mul_(0.5)
        return HalvingSession(loaded, {"rounds": options.rounds})


@pytest.fixture
def installed(monkeypatch):
    """The engine, as an installed package would bring it."""
    module = types.ModuleType("halving_package")
    module.HalvingEngine = HalvingEngine
    monkeypatch.setitem(sys.modules, "halving_package", module)
    point = importlib.metadata.EntryPoint(
        "halving", "halving_package:HalvingEngine", "divergence.engines"
    )
    broken = importlib.metadata.EntryPoint("broken", "no_such:Engine", "divergence.engines")
    real = importlib.metadata.entry_points

    def entry_points(**wanted):
        return [point, broken] if wanted.get("group") == "divergence.engines" else real(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("llama", num_blocks=3, hidden=16, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return capture(folder, out=tmp_path_factory.mktemp("plain") / "run", **WISHES)


def test_transformers_is_an_engine_like_any_other(plain):
    """It is named with its version, and found by its name."""
    note = plain.manifest.engine
    assert (note.name, note.version) == ("transformers", transformers.__version__)
    assert isinstance(engine_named("transformers"), TransformersEngine)


def test_an_installed_engine_runs_and_is_compared(installed, folder, plain, tmp_path):
    """With its options, name and version in the run."""
    run = capture(
        folder,
        out=tmp_path / "run",
        engine="halving",
        loading=LoadOptions(engine_options=["rounds=2"]),
        **WISHES,
    )
    assert run.manifest.engine.name == "halving"
    assert run.manifest.engine.version == "1.2"
    assert run.manifest.engine.options == {"rounds": 2}
    report = compare(plain, run)
    (line,) = [line for line in report.preflight if line.check == "engine"]
    assert (line.reference, line.candidate) == ("transformers", "halving (1.2)")
    assert report.verdict.kind == "incomparable"  # other weights


def test_what_is_said_of_one_engine_in_two_runs_is_what_differs(folder, plain, tmp_path):
    """A fact that one run alone tells of its engine is shown."""
    run = capture(folder, out=tmp_path / "run", **WISHES)
    note = replace(run.manifest.engine, facts={"prefix caching": "on"})
    run.manifest = replace(run.manifest, engine=note)
    (line,) = [line for line in compare(plain, run).preflight if line.check == "engine"]
    assert line.status == "differs"
    assert line.candidate == "transformers, prefix caching on"


@pytest.mark.slow
def test_a_run_names_no_package_to_import(installed, folder, tmp_path):
    """--like takes an engine that comes with divergence; another one the user names."""
    run = capture(folder, out=tmp_path / "a", engine="halving", **WISHES)
    with pytest.raises(UsageError, match="halving: there is no such engine that comes with"):
        capture(like=run, out=tmp_path / "b", probe=False)
    again = capture(like=run, out=tmp_path / "c", engine="halving", probe=False)
    assert again.manifest.engine.options == {"rounds": 1}
    assert truth(run, out=tmp_path / "t").manifest.engine.name == "transformers"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sites": "ops@model.layers.0"}, "operators .*halving has none of it, it has none"),
        ({"plants": ["model.layers.0:out=scale:2"]}, "--plant.*it is honest"),
    ],
)
def test_what_an_engine_lacks_is_refused(installed, folder, tmp_path, options, match):
    """Each option that it cannot follow."""
    with pytest.raises(UsageError, match=match):
        capture(folder, out=tmp_path / "run", engine="halving", **WISHES, **options)


def test_a_pass_that_an_engine_lacks_is_left_out(installed, folder, tmp_path):
    """And a note says why."""
    said = []
    a = capture(folder, out=tmp_path / "a", dtype="bfloat16", **WISHES)
    b = capture(
        like=a,
        out=tmp_path / "b",
        engine="halving",
        recording=RecordOptions(escalate=True),
        probe=False,
        progress=lambda event, done, total, detail: event == "note" and said.append(detail),
    )
    assert b.manifest.plan.passes == ["free", "anchored"]
    assert "no escalated pass: narrow" in said


@pytest.mark.parametrize(
    ("name", "match", "hint"),
    [
        ("transformer", "there is no such engine", "did you mean transformers"),
        ("zzz", "there is no such engine", "one of transformers, compile, .*halving"),
        ("broken", "no_such:Engine cannot be imported", "importing it"),
    ],
)
def test_an_unknown_engine(installed, name, match, hint):
    """It is refused with those that are there."""
    with pytest.raises(UsageError, match=match) as caught:
        engine_named(name)
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"round": "2"}, "no such option"),
        ({"rounds": "two"}, "Expected `int`"),
        ({"rounds": None}, "Expected `int`"),
    ],
)
def test_options_are_typed(given, match):
    """A value of the wrong kind is refused."""
    with pytest.raises(UsageError, match=match):
        options_for(HalvingEngine(), given)


def test_an_option_without_a_value(folder, tmp_path):
    """It is not KEY=VALUE."""
    with pytest.raises(UsageError, match="'rounds' is not KEY=VALUE"):
        capture(
            folder, out=tmp_path / "run", loading=LoadOptions(engine_options=["rounds"]), **WISHES
        )


@pytest.mark.slow
def test_an_option_beside_recorded_ones(installed, folder, tmp_path):
    """--like keeps the options that the command does not name."""
    run = capture(
        folder,
        out=tmp_path / "a",
        engine="compile",
        loading=LoadOptions(engine_options={"backend": "eager", "dynamic": True}),
        **WISHES,
    )
    again = capture(
        like=run,
        out=tmp_path / "b",
        loading=LoadOptions(engine_options=["dynamic=false"]),
        probe=False,
    )
    options = again.manifest.engine.options
    assert (options["backend"], options["dynamic"]) == ("eager", False)
    assert [one.name for one in again.manifest.overrides] == ["engine_options"]


def test_a_run_names_no_file_for_an_engine(installed, folder, tmp_path):
    """A stranger's run chooses no file of this machine."""
    run = capture(
        folder,
        out=tmp_path / "a",
        engine="halving",
        loading=LoadOptions(engine_options=["note=x"]),
        **WISHES,
    )
    engine = replace(run.manifest.engine, options={"note": "/etc/passwd"})
    run.manifest = replace(run.manifest, engine=engine)
    with pytest.raises(RunFormatError, match="'/etc/passwd', which may be a file"):
        capture(like=run, out=tmp_path / "b", engine="halving", probe=False)
    again = capture(
        like=run,
        out=tmp_path / "c",
        engine="halving",
        loading=LoadOptions(engine_options=["note=y"]),
        probe=False,
    )
    assert again.manifest.engine.name == "halving"
