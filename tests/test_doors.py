"""Tests go through public doors, so that walls can move: which modules they open besides, and why.

Public are `divergence.__all__`, the command line, `divergence.numerics`, what an error is, and what
docs/extending.md lists for domains. A domain's tests may open that domain.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
DOORS = ("cli.main", "numerics", "domains.public")

INSIDE = {
    "rules on numbers that are made by hand: no model is off by just so much": """
        analyses.code.find analyses.operators.find analyses.operators.measure
        analyses.operators.operands analyses.precision.audit analyses.tokens.find
        comparison.calls comparison.experts comparison.measure.pairs experiments.explain
        experiments.localization.repetition experiments.sensitivity fleet.many""",
    "what is printed, of answers that no two runs give": """
        report.bundle""",
    "arithmetic and plans that are held against an oracle, without a run": """
        cli.demo experiments.tiny ops.reproducer recording.plant recording.ranks""",
    "where a test puts a fault of the machine, or counts what is done": """
        cli.streams comparison.measure.processes experiments.diff experiments.localization.machine
        experiments.selfcheck recording.engines.many_steps recording.passes run.remote
        run.target""",
}
"""By reason: modules that tests open. They may only get fewer."""


def listed() -> set[str]:
    """Modules of the core that docs/extending.md lists."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text.partition("### What it may import")[2].partition("\n#")[0]
    whole, _, parts = section.partition("and of others these names:")
    named = re.findall(r"^- `([\w.]+)`:", parts, re.MULTILINE)
    return {*re.findall(r"`([\w.]+)`[,;]", whole), *named}


def opened() -> Iterator[tuple[str, Path]]:
    """(module, file) of every import of the package."""
    for file in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("divergence"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.startswith("divergence.")]
            for name in names:
                while name and not _is_module(name):
                    name = name.rpartition(".")[0]
                if name.startswith("divergence."):
                    yield name.removeprefix("divergence."), file


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_each_opens_with_a_sentence():
    """It states the behaviour."""
    mute = [
        f"{file.name}::{node.name}"
        for file in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not ast.get_docstring(node)
    ]
    assert mute == []


@pytest.mark.whole
def test_what_tests_open_has_a_reason():
    """Each module that is no public door stands in the list, and nothing else does."""
    public, inside = listed(), {name for names in INSIDE.values() for name in names.split()}
    used = set()
    for name, file in opened():
        room = ".".join(file.relative_to(TESTS).parts[:2])
        own = room.startswith("domains.") and name.startswith(room)
        if name not in public and not name.startswith(DOORS) and not own:
            used.add(name)
    assert used == inside
