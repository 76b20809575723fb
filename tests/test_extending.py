"""docs/extending.md: the example is built as it stands there, and works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import divergence.analyses
from divergence.comparison import analysis
from divergence.comparison.api import compare
from divergence.layout import Line
from divergence.recording.api import capture
from divergence.report.summary import report_lines

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A reference, a faulty candidate, and a healthy one."""
    folder = tmp_path_factory.mktemp("runs")
    a = capture(llama, out=folder / "a", prompts=["Snow fell"], max_new_tokens=1, probe=False)
    b = capture(like=a, out=folder / "b", plants=["model.layers.1:out=noise:0.5"], probe=False)
    return a, b, capture(like=a, out=folder / "c", probe=False)


@pytest.fixture
def cosine(tmp_path, monkeypatch):
    """The analysis of the page, in a folder beside the package's own."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"^`divergence/analyses/(\S+)`:\n\n```python\n(.*?)^```", text, re.M | re.S)
    for name, code in files:
        path = tmp_path / "analyses" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    taken = "the page's example exists now: give the one in docs/extending.md another name"
    assert "cosine" not in analysis.ANALYSES, taken
    paths = [str(tmp_path / "analyses"), *divergence.analyses.__path__]
    monkeypatch.setattr(divergence.analyses, "__path__", paths)
    monkeypatch.setattr(analysis, "ANALYSES", (*analysis.ANALYSES, "cosine"))
    yield [name for name, _ in files]
    for name in [name for name in sys.modules if name.startswith("divergence.analyses.cosine")]:
        del sys.modules[name]


def test_the_example_of_the_page_is_an_analysis(cosine, runs):
    """Three files and its name: evidence and JSON have what it found, healthy runs nothing."""
    assert cosine == ["cosine/__init__.py", "cosine/find.py", "cosine/sentences.py"]
    a, b, same = runs
    report = compare(a, b)
    (said,) = [f.text for f in report.verdict.evidence if f.text.startswith("cosine below 0.99")]
    assert any(f.claim == "stands_out" and f.evidence[0].text == said for f in report.findings)
    assert said in "\n".join(line.text for line in report_lines(report) if isinstance(line, Line))
    healthy = compare(a, same)
    assert not any("cosine" in fact.text for fact in healthy.verdict.evidence)


def test_a_hint_does_not_change_the_verdict(cosine, runs, monkeypatch):
    """With and without the analysis kind, onset and confidence are the same."""
    a, b, _ = runs
    with_it = compare(a, b).verdict
    monkeypatch.setattr(analysis, "ANALYSES", analysis.ANALYSES[:-1])
    without = compare(a, b).verdict
    for name in ("kind", "summary", "onset", "confidence", "side", "checks"):
        assert getattr(with_it, name) == getattr(without, name)
