"""A suite of cases that a package brings: run, repeated, planned, judged, without a word of it in
the core."""

import importlib.metadata
import json
import sys

import pytest

from divergence import Report, capture, compare, domain, truth
from divergence.errors import UsageError

PACKAGE = """
import msgspec

from divergence.domain import Claim, Domain, AnalysisPackage, Suite

DOMAIN = Domain(
    name="squares",
    suites=(Suite("squares", "squares.cases", "of small numbers", takes=("--impl",)),),
    analyses={"squares": AnalysisPackage("squares", whole=True)},
    parts={"squares": "squares.compare:Squares"},
    claims={"squares": Claim(20, measured=False, alone=True)},
    sentences={"squares": "squares.compare"},
)


def applies(a, b):
    return a.manifest.model.source == b.manifest.model.source == "suite:squares"
"""

CASES = """
import torch

from divergence.recording.cases import pairs_of
from divergence.recording.new_run import PlannedSite
from divergence.run.manifest import Plan
from divergence.run.reader import Run

NO_TRUTH = "squares of whole numbers are exact"
NUMBERS = {f"square.{number}": number for number in (2, 3, 11)}


def _wanted(request):
    numbers = request.chosen(NUMBERS)
    if not numbers:
        raise request.nothing_chosen("square.2, square.3 or square.11")
    return numbers


def plan(name, request):
    numbers = _wanted(request)
    return [PlannedSite.of_case(f"square.{n}", "square", (1,), "float32", 4) for n in numbers]


def capture(name, request):
    power = 3 if pairs_of(request.options.impl) else 2
    numbers = _wanted(request)
    with request.recording(
        Plan(passes=["free"], sites=request.patterns), device="cpu", source=f"suite:{name}",
        kind="squares",
    ) as cases:
        for number in numbers:
            cases.put(f"square.{number}:out", torch.tensor([float(number**power)]))
        cases.done(request.progress, num_written=cases.order, what="number")
    return Run.open(request.out)
"""

COMPARE = """
import msgspec

from divergence.comparison.analysis import report_of
from divergence.comparison.result import Coverage, Finding, ReportPart
from divergence.facts import Fact, fact

SENTENCES = {"differ": "{num} squares differ"}


class Squares(ReportPart, msgspec.Struct, frozen=True, kw_only=True):
    num: int
    why: Fact | None = None


def report_on(a, b, *, truth, floor, layers, progress):
    num = sum(x.xxh3 != y.xxh3 for x, y in zip(a.records, b.records))
    why = fact("squares.differ", num=num)
    finding = Finding(claim="squares", kind="localized" if num else "identical", headline=[why])
    part = Squares(num=num, why=why)
    return report_of(a, b, finding, Coverage(num_compared=len(a.records)), [], squares=part)
"""


@pytest.fixture
def squares(tmp_path, monkeypatch):
    """The package, installed."""
    folder = tmp_path / "squares"
    folder.mkdir()
    texts = {"__init__": PACKAGE, "cases": CASES, "compare": COMPARE, "sections": ""}
    texts["sections"] = "def sections(report, *, every=False, background=None):\n    return []\n"
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = importlib.metadata.EntryPoint("squares", "squares", domain.FOLDER)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == domain.FOLDER else []
    )
    domain.domains.cache_clear()
    yield tmp_path
    domain.domains.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "squares"]:
        del sys.modules[name]


def test_a_suite_of_a_package_is_run_repeated_and_judged(squares):
    """Its part stands in the report, and in the JSON beside the core's own fields."""
    a = capture("suite:squares", out=squares / "a", sites=["square.2", "square.3"], probe=False)
    assert [record.site for record in a.records] == ["square.2:out", "square.3:out"]
    assert a.manifest.model.task == "operators"
    capture(like=a, out=squares / "b", sites=["square.2", "square.3"], probe=False)
    report = compare(a, squares / "b")
    assert (report.verdict.kind, report.squares.num) == ("identical", 0)
    stored = json.loads(report.to_json())
    assert stored["squares"]["why"]["text"] == "0 squares differ"
    (squares / "report.json").write_text(report.to_json())
    assert Report.load(squares / "report.json").squares == report.squares
    assert report.verdict.summary in report.html()
    with pytest.raises(AttributeError):
        _ = report.cubes


def test_what_it_takes_is_told(squares, dry_run, llama):
    """By what is installed: no list of the core names it."""
    plan = dry_run("suite:squares", "--sites", "*11")
    assert [row["site"] for row in plan["rows"]] == ["square.11"]
    assert "matches no case" in dry_run("suite:squares", "--sites", "square.4")
    with pytest.raises(UsageError, match="--dtype means nothing to suite:squares"):
        capture("suite:squares", out=squares / "a", dtype="float16")
    with pytest.raises(UsageError, match="--plant means nothing to suite:squares"):
        capture("suite:squares", out=squares / "a", plants=["a=b@1"])
    with pytest.raises(UsageError) as caught:
        capture("suite:cubes", out=squares / "a")
    assert "suite:squares (of small numbers)" in caught.value.hint
    run = capture("suite:squares", out=squares / "a", probe=False)
    with pytest.raises(UsageError, match="needs no truth: squares of whole numbers are exact"):
        truth(run, out=squares / "t")
    with pytest.raises(UsageError, match="needs no model"):
        capture(llama, like=run, out=squares / "b")


def test_a_package_that_fails_takes_no_comparison_away(squares, llama):
    """It is left out, and said; runs of models are compared as ever."""
    (squares / "squares" / "__init__.py").write_text(
        PACKAGE + '\n\ndef applies(a, b):\n    raise RuntimeError("no such table")\n'
    )
    options = {"prompts": ["Snow fell"], "max_new_tokens": 1, "probe": False}
    a = capture(llama, out=squares / "a", **options)
    capture(like=a, out=squares / "b", probe=False)
    with pytest.warns(UserWarning, match="squares is left out: no such table"):
        assert compare(a, squares / "b").verdict.kind == "identical"
