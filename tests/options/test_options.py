"""One list of options: what knows an option knows it from its declaration."""

import inspect
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
import torch
import typer
from typer.testing import CliRunner

import divergence
from divergence import (
    BatchOptions,
    LoadOptions,
    Run,
    capture,
    check,
    compare,
    compare_many,
    localize,
    replay,
    repro,
    selfcheck,
    selftest,
    sensitivity,
    truth,
)
from divergence.cli.signature import typer_command
from divergence.config import load_settings
from divergence.errors import RenamedWarning, UsageError
from divergence.options.commands import (
    GROUPS,
    VERBOSE,
    CaptureOptions,
    CheckOptions,
    CompareOptions,
    LocalizeOptions,
    MainOptions,
    ReplayOptions,
    ReproOptions,
    SelfcheckOptions,
    SelftestOptions,
    SensitivityOptions,
    TruthOptions,
)
from divergence.options.option import command_options, fields_of, kinds_of, option, recorded_in
from divergence.run.manifest import Manifest
from divergence.words import Progress

KINDS = [
    CaptureOptions,
    TruthOptions,
    CompareOptions,
    CheckOptions,
    ReplayOptions,
    LocalizeOptions,
    ReproOptions,
    SelfcheckOptions,
    SelftestOptions,
    SensitivityOptions,
]


@dataclass(frozen=True, kw_only=True)
class Mine(CaptureOptions):
    """The options of capture and made-up ones: a line each, and nothing else anywhere."""

    colour: str | None = option(
        "--colour NAME", "A colour.", setting=True, recorded="settings.colour"
    )
    shapes: Sequence[str] = option("--shape NAME", "A shape.", setting=True, default=())
    tidy: bool = option("--no-tidy", "Leave it as it is.", setting=True, default=True)


@pytest.fixture
def given(capsys):
    """``given("--colour", "red")`` → the options that such a command line gives."""
    seen: list[dict[str, Any]] = []

    def command(*, options: Annotated[dict[str, Any], Mine], verbose: bool = VERBOSE) -> None:
        """A command."""
        seen.append(options)

    app = typer.Typer()
    app.command()(typer_command(command))

    def call(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return seen[-1] if seen else {"help": result.output}

    return call


def test_a_new_option_is_a_parameter_of_the_command(given):
    """With its words and its help."""
    assert "--colour" in given("--help")["help"]
    assert given("--colour", "red", "--shape", "a", "--shape", "b", "--no-tidy", "--seed", "0") == {
        "colour": "red",
        "shapes": ["a", "b"],
        "tidy": False,
        "seed": 0,
    }
    assert given() == {}


def test_a_command_without_verbose_is_refused_with_what_it_needs():
    """Errors of each command print their traceback with -v."""

    def command(*, name: str = option("NAME", "A name.")) -> None:
        """A command."""

    with pytest.raises(TypeError, match=r"command has no -v: it needs `output: Output` or"):
        typer_command(command)


def test_a_new_option_is_a_setting(tmp_path):
    """In the file and as a variable, under its long name and in its type."""
    (tmp_path / "divergence.toml").write_text('[capture]\ncolour = "red"\ntidy = false\n')
    settings = load_settings(
        {"DIVERGENCE_CAPTURE_COLOUR": "blue", "DIVERGENCE_CAPTURE_SHAPE": "a, b"},
        folder=tmp_path,
        sections={"capture": Mine},
    )
    assert settings == {"capture": {"colour": "blue", "shapes": ("a", "b"), "tidy": False}}


def test_a_new_option_is_in_printed_commands_and_in_the_manifest():
    """As it would be typed; and where it says that the manifest holds it."""
    values = {"shapes": ["a"], "tidy": False, "colour": "red", "batch": True, "weights": False}
    words = {"shape": ["a"], "no_tidy": True, "colour": "red", "batch": True}
    assert command_options(Mine, values) == words
    assert recorded_in(Mine(colour="red", seed=3), "settings", Mine).items() >= {
        ("colour", "red"),
        ("seed", 3),
    }


@pytest.mark.parametrize(
    ("function", "kind", "own"),
    [
        (
            capture,
            MainOptions,
            f"model out inputs like force command progress prepare more {' '.join(GROUPS)}",
        ),
        (truth, TruthOptions, "run out force command progress"),
        (replay, ReplayOptions, "run out force command progress"),
        (compare, CompareOptions, "reference candidate thresholds progress"),
        (
            compare_many,
            CompareOptions,
            "reference candidates thresholds reports keep_reports progress",
        ),
        (check, CheckOptions, "golden new progress"),
        (
            localize,
            LocalizeOptions,
            "reference candidate out prepare_reference prepare_candidate progress",
        ),
        (sensitivity, SensitivityOptions, "run thresholds progress"),
        (selfcheck, SelfcheckOptions, "model revision progress"),
        (selftest, SelftestOptions, "progress"),
        (repro, ReproOptions, "run site out called progress"),
    ],
)
def test_the_python_api_has_the_same_options(function, kind, own):
    """Names and defaults are the struct's, and no type is narrower. They are written down twice,
    since type checkers and help() read a written signature alone."""
    signature = inspect.signature(function)
    names = {"Run": Run, "torch": torch, "Progress": Progress, "Prepare": Any}
    hints = typing.get_type_hints(function, localns=names)
    fields = {field.name: field for field in fields_of(kind)}
    hint = f"{function.__name__} takes, by name, what {kind.__name__} declares"
    assert set(signature.parameters) - set(own.split()) == set(fields), hint
    for name, field in fields.items():
        assert signature.parameters[name].default == field.default, name
        kinds = kinds_of(hints[name])
        taken = {Sequence if get_origin(one) is Sequence else one for one in kinds}
        wanted = Sequence if get_origin(field.text_type) is list else field.text_type
        assert Any in kinds or wanted in taken, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_written_in_one_way(kind):
    """No two options of a command have a name in common."""
    names = [name for field in fields_of(kind) for one in field.options for name in one.names]
    assert len(names) == len(set(names))
    assert all(field.options for field in fields_of(kind))


def test_what_is_recorded_has_its_place_in_the_manifest():
    """The format of files is written down by itself; an option names a key that is there."""
    places = [field.option.recorded for field in fields_of(CaptureOptions)]
    hints = typing.get_type_hints(Manifest)
    for place in filter(None, places):
        part, _, key = place.partition(".")
        (kind,) = kinds_of(hints[part])
        assert key in kind.__struct_fields__, place


def test_options_that_run_foreign_code_are_no_settings():
    """A file in the working directory chooses no code."""
    for name in ("trust_remote_code", "impl", "plants"):
        (field,) = [field for field in fields_of(CaptureOptions) if field.name == name]
        assert not field.option.setting


def test_capture_takes_what_few_set_in_groups():
    """At most 25 names, and every option of the command is one of them or in one of them."""
    parameters = inspect.signature(capture).parameters
    assert len(parameters.keys() - {"more"}) <= 25
    hints = {name: parameters[name].annotation for name in GROUPS}
    assert hints == {name: f"{kind.__name__} | None" for name, kind in GROUPS.items()}
    assert all(getattr(divergence, kind.__name__) is kind for kind in GROUPS.values())
    names = [field.name for kind in (MainOptions, *GROUPS.values()) for field in fields_of(kind)]
    assert sorted(names) == sorted(field.name for field in fields_of(CaptureOptions))


@pytest.fixture
def made(monkeypatch):
    """What ``capture`` hands on to where runs are made, by name."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "divergence.recording.api.make_run", lambda model, **values: calls.append(values)
    )
    return calls


def test_groups_and_what_they_were_are_the_same(made):
    """A name of earlier versions says in one line where it is now, and works."""
    groups = {
        "batching": BatchOptions(batch=True, pad_left=2),
        "loading": LoadOptions(revision="main"),
    }
    capture("m", out="a", **groups)
    with pytest.warns(RenamedWarning) as told:
        capture("m", out="a", batch=True, pad_left=2, revision="main")
    assert [str(warning.message) for warning in told] == [
        "capture(batch=..., pad_left=..., revision=...) is now written "
        "batching=BatchOptions(batch=..., pad_left=...), loading=LoadOptions(revision=...)"
    ]
    assert told[0].filename == __file__
    in_groups, alone = made
    assert {name: in_groups[name] for name in alone} == alone
    assert alone["batch"] is True and alone["revision"] == "main"


def test_the_command_that_the_manifest_names_is_a_keyword(made):
    """It is handed on as it is, without a word on names of earlier versions."""
    capture("m", out="a", command="my-tool run")
    assert [values["command"] for values in made] == ["my-tool run"]


def test_a_name_that_there_is_none_of_is_refused(made):
    """With the nearest one, wherever that belongs."""
    for wrong, near in (("batchs", "batch"), ("promts", "prompts"), ("bathing", "batching")):
        with pytest.raises(TypeError, match=f"no parameter '{wrong}'; did you mean {near}"):
            capture("m", out="a", **{wrong: True})
    with pytest.raises(TypeError, match=r"no parameter 'zzzzzz'$"):
        capture("m", out="a", zzzzzz=1)
    assert not made


def test_a_group_of_another_kind_is_refused(made):
    """Both are named."""
    with pytest.raises(UsageError, match=r"batching=.*LoadOptions, not BatchOptions"):
        capture("m", out="a", batching=LoadOptions(revision="main"))
    with pytest.raises(UsageError, match="dict, not MachineOptions"):
        capture("m", out="a", machine={"threads": 2})
    assert not made


def test_the_tutorial_lists_the_groups():
    """Each with its fields, as they stand; of a training step those are a page of their own."""
    text = (Path(divergence.__file__).parents[1] / "docs" / "tutorial.md").read_text(
        encoding="utf-8"
    )
    for name, kind in GROUPS.items():
        row = next(row for row in text.splitlines() if f"`{name}={kind.__name__}(...)`" in row)
        listed = re.findall("`([a-z_]+)`", row)
        fields = [field.name for field in fields_of(kind)]
        assert set(listed) <= set(fields) if name == "training" else set(listed) == set(fields)
