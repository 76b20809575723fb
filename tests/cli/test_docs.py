"""docs/commands.md has every option, and the beginning of what --help says of it."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("surface", Path(__file__).with_name("surface.py"))
surface = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(surface)

pytestmark = pytest.mark.whole


def test_docs_are_up_to_date():
    """The page is the one that the commands' own help makes."""
    stored = surface.DOCS.read_text(encoding="utf-8")
    assert stored == surface.docs_text(), "run: python tests/cli/surface.py"


@pytest.mark.parametrize("name", [name for name in surface.commands() if name])
def test_every_option_of_help_is_in_the_docs(name, invoke):
    """Read from the printed help, so that what a user sees is what is documented."""
    code, out, _ = invoke(name, "--help")
    assert code == 0
    section = surface.DOCS.read_text().split(f"## divergence {name}\n")[1].split("\n## ")[0]
    options = set(re.findall(r"^│ (--[a-z][a-z-]+)", out, re.M)) - {"--help"}
    assert options
    assert {option for option in options if option not in section} == set()


def test_every_example_parses(invoke, monkeypatch, tmp_path):
    """The first word of each example is a command, and its options exist."""
    commands = surface.commands()
    texts = "\n".join(command.epilog or "" for command in commands.values())
    lines = map(str.strip, texts.splitlines())
    examples = [line.split("  #")[0] for line in lines if line.startswith("divergence ")]
    assert len(examples) > 60
    for example in examples:
        words = shlex.split(re.split(r" [|>]+ ", example)[0])
        assert words[0] == "divergence"
        command = commands[words[1]]
        names = {name for row in surface.describe(command) for name in row["names"]}
        assert {word for word in words[2:] if word.startswith("-")} <= names, example
