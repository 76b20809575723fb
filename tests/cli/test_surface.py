"""The surface is frozen and documented."""

import importlib.util
import json
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("surface", Path(__file__).with_name("surface.py"))
surface = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(surface)

UPDATE = "if this change is meant: python tests/cli/surface.py, and a line in CHANGELOG.md"


def test_surface_is_frozen():
    """Commands, options, defaults and panels are those of surface.json, here and of each domain."""
    for path, commands in surface.frozen().items():
        assert path.exists(), f"there is no {path}: {UPDATE}"
        assert commands == json.loads(path.read_text()), UPDATE


def test_options_mean_what_they_mean_in_transformers():
    """The names that the ecosystem knows are there."""
    names = {
        name for row in surface.describe(surface.commands()["capture"]) for name in row["names"]
    }
    assert {
        "--attn-implementation",
        "--device",
        "--device-map",
        "--dtype",
        "--max-new-tokens",
        "--revision",
        "--trust-remote-code",
    } <= names


@pytest.mark.parametrize("name", [name for name in surface.commands() if name])
def test_every_answer_has_json_quiet_and_verbose(name):
    """Every command that answers has --json, -q, -v, help for each option, and examples."""
    command = surface.commands()[name]
    rows = surface.describe(command)
    names = {option for row in rows for option in row["names"]}
    # demo and view show, they do not answer
    assert {"-q", "-v"} | ({"--json"} if name not in ("demo", "view") else set()) <= names
    assert all(row["help"] and row["help"].endswith(".") for row in rows)
    assert "Examples:" in command.epilog
    assert f"divergence {name}" in command.epilog


@pytest.mark.slow
def test_the_list_of_commands_says_what_each_says_of_itself():
    """`--help` imports no command, so the first lines are written down a second time."""
    from divergence.cli.main import commands

    for name, command in commands().items():
        assert surface.commands()[name].help.splitlines()[0] == command.line


def test_no_help_text_loses_its_brackets(invoke):
    """Help is read as Rich markup, where [a word] would vanish."""
    for name, command in surface.commands().items():
        texts = [command.help, command.epilog, *(row["help"] for row in surface.describe(command))]
        assert not any("[" in (text or "") for text in texts), name


@pytest.mark.whole
def test_capture_shows_first_what_every_capture_needs():
    """What few set stands behind, and a repeated run begins with --like."""
    rows = surface.describe(surface.commands()["capture"])
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    assert panels[-7:] == [
        "Repeating a run",
        "What is recorded",
        "Other forms of the same forwards",
        "A suite in place of a model",
        "A server in place of a model",
        "Training",
        "Output",
    ]
    repeating = [row["names"] for row in rows if row["panel"] == "Repeating a run"]
    assert repeating[:2] == [["--like"], ["--model"]]
