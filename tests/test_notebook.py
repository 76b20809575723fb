"""docs/tutorial.ipynb: every cell runs, and finds what the text says."""

import ast
import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def cells(kind: str) -> list[dict]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in found["cells"] if cell["cell_type"] == kind]


def run(source: str, names: dict[str, object]) -> object:
    """A cell, in a kernel's way: the value of a last expression is what is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def test_it_is_stored_without_results():
    """Results would be of one machine, and each change of them a change of the file."""
    for number, cell in enumerate(cells("code")):
        assert cell["outputs"] == [] and cell["execution_count"] is None, number
        ast.parse("".join(cell["source"]))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (NOTEBOOK.parent / target).exists(), target


@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path, monkeypatch, capsys):
    """The fault is found in its block, the curve is drawn, and localize names the operator."""
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names: dict[str, object] = {}
    shown = []
    for cell in cells("code"):
        if "pandas" in cell["metadata"].get("tags", ()):
            try:
                import pandas  # noqa: F401
            except ImportError:
                continue  # no dependency of the tests
        shown.append(run("".join(cell["source"]), names))
    _, run_b, report, picture, *_ = shown
    assert "planted faults" in run_b._repr_html_()
    assert report.verdict.onset.block == "model.layers.1" and report.verdict.side == "candidate"
    assert "the error is made" in report._repr_html_()
    assert picture._repr_svg_().startswith("<svg")
    said = capsys.readouterr().out
    assert re.search(r"operator +localized +model\.layers\.1/aten\.add", said), said
    assert "wrong side: candidate" in said
