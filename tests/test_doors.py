"""Tests go through public doors, so that walls can move: which modules they open besides, and why.

Public are `divergence.__all__`, the command line, `divergence.numerics`, errors, the protocol of
domains, and the names that docs/extending.md lists for them. Everything else counts, also where a
test of a domain opens a module of that domain, or another name of a listed module.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
DOORS = ("cli.main", "numerics", "errors", "domain", "domains.public")

INSIDE = {
    "rules on numbers that are made by hand: no model is off by just so much": """
        analyses.blocks.sections analyses.code.find analyses.operators.find
        analyses.operators.measure analyses.operators.operands analyses.precision.audit
        analyses.tokens.find comparison.align comparison.arithmetic comparison.calls
        comparison.decide comparison.experts comparison.judge comparison.measure.pairs
        comparison.measure.rating comparison.measure.truth comparison.preflight
        domains.collectives.orders domains.probe.find domains.scores.joining
        domains.scores.judging domains.scores.rows domains.suite.compare domains.training.plan
        experiments.explain experiments.localization.repetition experiments.sensitivity
        fleet.many""",
    "what is printed, of answers that no two runs give": """
        comparison.advice domains.suite.result domains.view.app report.bundle
        report.localization report.text""",
    "arithmetic and plans that are held against an oracle, without a run": """
        cli.demo domains.collectives.capturing domains.collectives.cases domains.probe.additions
        domains.probe.quick domains.quantization.coding domains.quantization.model
        domains.quantization.quantize domains.quantization.scheme domains.scores.statistics
        domains.suite.capturing domains.suite.definition domains.training.recording.optimizer
        experiments.tiny ops.allowed ops.bounds ops.replay ops.reproducer recording.plant
        recording.ranks""",
    "words and files of other tools, one by one": """
        cli.signature domains.quantization.checkpoint domains.scores.formats
        domains.scores.formats.reading domains.training.policies
        domains.training.recording.options domains.vllm.engine recording.code
        recording.engines.identity recording.prompts""",
    "where a test puts a fault of the machine, or counts what is done": """
        cli.streams comparison.measure.processes domains.logprobs.endpoints.capture
        domains.logprobs.endpoints.client domains.scores.formats.lm_eval
        domains.training.recording.step experiments.diff experiments.localization.machine
        experiments.selftest recording.engines.many_steps recording.keeper recording.machine
        recording.passes recording.processes recording.widening run.remote run.storage
        run.target""",
}
"""By reason: modules that tests open. They may only get fewer; the aim is 40."""


def listed() -> dict[str, set[str]]:
    """Module of the core → the names of it that docs/extending.md lists; none: all of it."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text.partition("### What it may import")[2].partition("\n#")[0]
    whole, _, parts = section.partition("and of others these names:")
    rows = re.findall(r"^- `([\w.]+)`: (.*(?:\n  .*)*)", parts, re.MULTILINE)
    named = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    return named | {module: set() for module in re.findall(r"`([\w.]+)`[,;]", whole)}


@functools.cache
def read() -> tuple[list[tuple[str, str]], list[str]]:
    """(what tests take of the package, tests without a sentence), of one parsing of each file."""
    taken, mute = [], []
    for file in sorted(TESTS.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        taken += opened(nodes)
        mute += [
            f"{file.name}::{node.name}"
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if file.name.startswith("test_") and not ast.get_docstring(node)
        ]
    return taken, mute


def opened(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """(module of the package, name) of what a test takes."""
    modules = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("divergence"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("divergence.")
                if _is_module(inner):
                    modules[alias.asname or alias.name] = inner
                    yield inner, ""
                else:
                    yield inner.rpartition(".")[0], alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("divergence."):
                    yield alias.name.removeprefix("divergence."), ""
    for node in nodes if modules else ():
        owner = node.value if isinstance(node, ast.Attribute) else None
        if getattr(owner, "id", None) in modules and not node.attr.startswith("__"):
            yield modules[owner.id], node.attr


def _is_module(name: str) -> bool:
    path = ROOT.joinpath("divergence", *name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_each_opens_with_a_sentence():
    """It states the behaviour."""
    assert read()[1] == []


def is_public(module: str, name: str, page: dict[str, set[str]]) -> bool:
    """``name`` is "" where the module is imported as a whole: then what is taken of it tells."""
    if not module or any(module == door or module.startswith(f"{door}.") for door in DOORS):
        return True
    if module not in page:
        return False
    return (name in (page[module] or {name}) and not name.startswith("_")) or not name


@pytest.mark.whole
def test_what_tests_open_has_a_reason():
    """Each module that is no public door stands in the list, and nothing else does."""
    page, inside = listed(), {name for names in INSIDE.values() for name in names.split()}
    used = {module for module, name in read()[0] if not is_public(module, name, page)}
    assert used == inside
