"""The pipelines in docs/ci.md can be pasted: they are YAML, and their commands exist."""

import re
import shlex
from pathlib import Path

import yaml
from typer.main import get_command

PAGE = Path(__file__).parents[3] / "docs" / "ci.md"


def test_the_pipelines_are_sound():
    """Each command with options that it has."""
    from divergence.cli.main import app

    github, gitlab = map(
        yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    )
    lines = [step["run"] for step in github["jobs"]["check"]["steps"] if "run" in step]
    lines += gitlab["divergence"]["script"]
    commands = [line[line.index("divergence ") :] for line in lines if "divergence " in line]
    assert len(commands) == 6
    group = get_command(app)
    for line in commands:
        _, name, *words = shlex.split(line)
        group.commands[name].load().make_context(name, words)
