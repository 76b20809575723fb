"""Modules whose names hold what a site uses for something else: none of them vanishes."""

import json

import pytest

from divergence import RecordOptions, Run, capture, check
from divergence.errors import RunFormatError
from divergence.run.site import escape_path, is_operator_site, module_of, split_site, unescape_path
from tests.digests import without_digests

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact."]
NAMES = ["lay/ers", "lay:ers", "lay#2", "lay ers", "100%", "a%2Fb", "line\nbreak", "ünïcode", "层"]


def renamed(new: str):
    """Gives the list of blocks another name, in the model and in its forward."""

    def prepare(model):
        inner = model.model
        blocks = inner._modules.pop("layers")
        inner.add_module(new, blocks)
        kind = type(inner)
        blocks_of = property(lambda self: self._modules[new])
        inner.__class__ = type(kind.__name__, (kind,), {"layers": blocks_of})

    return prepare


@pytest.mark.parametrize("name", [*NAMES, "", "\x7f", "\ud800", "model.layers.3"])
def test_names_are_escaped_and_back(name):
    """What torch calls a module is known again from its path; a path holds no sign of a site."""
    path = escape_path(name)
    assert unescape_path(path) == name
    assert split_site(f"{path}:out") == (path, "out")
    assert module_of(f"{path}#2:in.x") == path
    assert not is_operator_site(f"{path}:out")
    assert module_of(f"{path}/aten.mm#2:out") == path
    assert path == name or "%" in path or path == "."


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_name_are_compared(llama, tmp_path, name):
    """Every record is paired, in the free and in the anchored pass, and a fault is found there."""
    path = f"model.{escape_path(name)}"
    prepare = renamed(name)
    options = {"prompts": PROMPTS, "max_new_tokens": 2}
    golden = capture(str(llama), out=tmp_path / "a", prepare=prepare, **options)
    assert golden.manifest.plan.modules[f"{path}.1"].role == "block"
    new = capture(
        like=golden, out=tmp_path / "b", prepare=prepare, recording=RecordOptions(repeat=1)
    )
    report = check(golden, new).report
    assert (report.verdict.kind, report.verdict.confidence) == ("identical", "high")
    assert {(s.pass_, s.block) for s in report.sites if s.site == f"{path}.1:out"} == {
        ("free", f"{path}.1"),
        ("anchored", f"{path}.1"),
    }
    plants = [f"{path}.1:out=scale:-3.7"]
    wrong = capture(like=golden, out=tmp_path / "c", prepare=prepare, plants=plants)
    result = check(golden, wrong)
    assert not result.passed
    assert result.report.verdict.onset.site == f"{path}.1:out"


@pytest.mark.slow
def test_operators_in_such_modules_are_operators(llama, tmp_path, answer):
    """A slash in the module's name is no operator's, and the operator's still is one."""
    prepare, sites = renamed("lay/ers"), ["blocks", "ops@model.lay%2Fers.1"]
    options = {"prompts": PROMPTS, "max_new_tokens": 1, "sites": sites, "prepare": prepare}
    golden = capture(
        str(llama), out=tmp_path / "a", recording=RecordOptions(weights=True), **options
    )
    report = answer(golden, prepare, recording=RecordOptions(weights=True))
    rows = {row.what: row for row in report.coverage.passes if row.pass_ == "free"}
    assert rows["operators"].num_compared == rows["operators"].num_reference > 0
    assert rows["tensors"].num_elsewhere > 0  # the weights
    assert {row.share for row in report.coverage.passes} == {1.0}
    assert any("%2Fers.1.mlp.down_proj/aten.mm" in r.site for r in report.operators.results)


def as_earlier_versions_wrote(run: Run, name: str) -> Run:
    """The run with its modules' names as they are, on disk, opened."""
    escaped = escape_path(name)
    without_digests(run.path)
    for file in ("manifest.json", "records.jsonl"):
        path = run.path / file
        text = path.read_text()
        assert escaped in text
        path.write_text(text.replace(escaped, json.dumps(name)[1:-1]))
    return Run.open(run.path)


@pytest.mark.parametrize("name", ["lay/ers", "lay#2", "lay ers"])
def test_names_as_they_are_are_refused(llama, tmp_path, name):
    """A site of them may mean two things: an operator, or a module."""
    prepare = renamed(name)
    golden = capture(
        str(llama), out=tmp_path / "a", prompts=PROMPTS, max_new_tokens=1, prepare=prepare
    )
    with pytest.raises(RunFormatError, match="is not written as the sites of runs write it"):
        as_earlier_versions_wrote(golden, name)
