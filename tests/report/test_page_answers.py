"""Pages of many runs, localize, sensitivity, selfcheck: the terminal's answer, tables whole."""

from __future__ import annotations

import base64
import gzip
import json
import re

import pytest

from divergence import Matrix, SelfcheckResult
from divergence.comparison.results import Onset
from divergence.experiments.result import FaultSize, Level, Localization, SelfcheckLine, Sensitivity
from divergence.fleet.result import AgreementGroup, CrossCheck, MatrixRow

BLOCKS = [f"model.layers.{number}" for number in range(5)]
EVIL = "</script><script>window.pwned=1</script>\u202e"


@pytest.fixture
def matrix(reports):
    def make(odd="runs/odd"):
        rows = [
            MatrixRow(
                path=path,
                run=reports.make_run(path),
                verdict=kind,
                summary=f"{path} so",
                confidence="high",
                limit_usage=usage,
                onset=Onset(site=f"{BLOCKS[2]}:out", block=BLOCKS[2], sample=0, step=0, position=3)
                if kind == "localized"
                else None,
            )
            for path, kind, usage in (("runs/b", "within_floor", 0.3), (odd, "localized", 7.4))
        ]
        return Matrix(
            tool_version="0",
            reference=reports.make_run("runs/a"),
            odd=[odd],
            rows=[*rows, MatrixRow(path="runs/gone", problem="it does not exist")],
            groups=[AgreementGroup(runs=["runs/a", "runs/b"])],
            cross_checks=[CrossCheck(reference="runs/b", candidate=odd, verdict="localized")],
            agreement=f"2 of 3 runs agree; {odd} differs from them",
            next=[f"divergence compare runs/a {odd}"],
        )

    return make


@pytest.fixture
def sensitivity(reports):
    sizes = [
        FaultSize(block=block, fault=fault, tried=1.0, by="why", size=size)
        for fault, size in (("scale", 0.003), ("bias", None))
        for block in BLOCKS
    ]
    return Sensitivity(
        tool_version="0",
        reference=reports.make_run("a"),
        candidate=reports.make_run("b"),
        made_here=False,
        truth=None,
        num_floor_runs=0,
        dtype="bfloat16",
        escalated=False,
        verdict=reports.make_verdict("within_floor"),
        num_blocks=5,
        num_prompt_tokens=41,
        num_trials=96,
        blocks=BLOCKS,
        sizes=sizes,
        units={"scale": "the block's output", "bias": "its largest value"},
        phrases={"scale": "a scale error of {size}", "bias": "a bias of {size}"},
        next=["divergence truth a -o a-truth"],
    )


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))


def attached(text: str) -> dict:
    packed = re.search(r'id="attachment">(.*?)</script>', text, re.S).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_many_runs(matrix, tmp_path):
    """Who is odd, a figure in which a run can be chosen, and why one was not compared."""
    text = matrix().to_html(tmp_path / "m.html").read_text(encoding="utf-8")
    for said in (
        ">ODD<",
        "2 of 3 runs agree",
        "divergence compare runs/a runs/odd",
        "it does not exist",
        "Among themselves",
        'class="odd"',
    ):
        assert said in text
    data = data_of(text)
    assert data["noun"] == "Run"
    assert data["figures"]["usage"]["says"][1] == (
        "runs/odd: DIVERGED, 740% of a limit, not like most of the others"
    )
    assert ["onset", f"{BLOCKS[2]}:out"] in data["blocks"]["runs/odd"]["facts"]
    assert attached(text)["odd"] == ["runs/odd"]
    assert "download-csv" not in text[: text.index("<script>")]


def test_names_of_runs_inject_nothing(matrix):
    text = matrix(EVIL).html()
    assert text.count("<script") == matrix().html().count("<script")
    assert "\u202e" not in text


def test_sensitivity(sensitivity):
    """Its sentences, a table of blocks and faults, and a figure a fault where there are blocks."""
    text = sensitivity.html()
    assert "In bfloat16 you would see a scale error of 0.30% in any block" in text
    assert "you would not see a bias of up to 100% in model.layers.0" in text
    assert text.count("<figure") == 2
    assert "not to 100%" in text
    assert "divergence truth a -o a-truth" in text
    assert attached(text)["num_trials"] == 96


def test_localize_with_its_report(reports, tmp_path):
    """The descent stands before the report of the last comparison, whose data is in the page."""
    found = Localization(
        reference="a",
        candidate="b",
        out="o",
        report=reports.make_long_report(),
        levels=[Level(level="block", verdict="localized", site=f"{BLOCKS[2]}:out", why="because")],
        stopped="the model is not here",
        commands=["divergence localize a b -o o"],
    )
    text = found.html()
    assert text.index(">STOPPED<") < text.index("The descent") < text.index('id="blocks"')
    assert "because" in text
    assert attached(text)["verdict"]["kind"] == found.report.verdict.kind


def test_localize_that_compared_nothing():
    text = Localization(reference="a", candidate="b", out="o", stopped="there is no model").html()
    assert ">STOPPED<" in text
    assert "there is no model" in text.casefold()
    assert attached(text)["out"] == "o"


def test_selfcheck():
    """A row a way of running, and the command that looks closer at the one that diverged."""
    lines = [
        SelfcheckLine(
            name="again",
            changed="nothing",
            against="base",
            same_bits=True,
            status="identical",
            verdict="identical",
        ),
        SelfcheckLine(
            name="batch",
            changed="all prompts in one",
            against="base",
            same_bits=False,
            status="diverged",
            verdict="localized",
            block=BLOCKS[1],
            summary="off",
            next=["divergence compare base batch"],
        ),
    ]
    text = SelfcheckResult(
        tool_version="0",
        model="m",
        dtype="bfloat16",
        device="cpu",
        attention="eager",
        num_threads=2,
        num_prompts=4,
        num_prompt_tokens=40,
        max_new_tokens=3,
        truth=False,
        lines=lines,
    ).html()
    assert f"batch (from {BLOCKS[1]} on) diverged" in text
    assert "divergence compare base batch" in text
    assert "bit-identical" in text
