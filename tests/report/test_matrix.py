"""The matrix of many runs: who is odd comes first, then one row a run, 100 columns wide."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest

from divergence import Matrix
from divergence.comparison.results import Onset
from divergence.fleet.result import AgreementGroup, CrossCheck, MatrixRow
from divergence.layout import MAX_WIDTH, print_lines
from divergence.report.matrix import MAX_ROWS, matrix_document
from divergence.report.text import document_lines, headline_lines

SNAPSHOT = Path(__file__).parent / "snapshots" / "matrix.txt"


def text_of(lines) -> str:
    file = io.StringIO()
    print_lines(lines, file=file)
    return file.getvalue()


@pytest.fixture
def row(reports):
    """``row(path, **changes)``: a healthy run's row."""

    def make(path, **changes):
        values = {
            "path": path,
            "run": reports.make_run(path),
            "verdict": "within_floor",
            "summary": "rounding",
            "confidence": "high",
            "limit_usage": 0.31,
            "logits_rel_l2": 9.1e-3,
            "top1_agreement": 1.0,
            "num_equal": 32,
            "num_tokens": 32,
        }
        return MatrixRow(**values | changes)

    return make


@pytest.fixture
def matrix(row, reports):
    """A fleet of six: one odd machine, one that diverges elsewhere too, one that cannot be read."""
    faulty = row(
        "runs/host-[17]",
        verdict="localized",
        side="candidate",
        limit_usage=7.4,
        logits_rel_l2=0.044,
        top1_agreement=0.9,
        num_equal=30,
        onset=Onset(
            site="model.layers.30.mlp.down_proj:out",
            block="model.layers.30",
            sample=0,
            step=0,
            position=5,
        ),
    )
    gone = MatrixRow(path="runs/gone", problem="runs/gone does not exist\n  try:   a run")
    same = row("runs/same", verdict="identical", limit_usage=0.0, logits_rel_l2=0.0)
    return Matrix(
        tool_version="0.0.0",
        reference=reports.make_run("runs/first"),
        rows=[same, row("runs/b"), faulty, gone, row("runs/c", verdict="undetermined")],
        identical=[["runs/first", "runs/same"]],
        groups=[AgreementGroup(runs=["runs/first", "runs/same", "runs/b"])],
        cross_checks=[
            CrossCheck(reference="runs/b", candidate="runs/c", verdict=None, problem="why\nmore")
        ],
        odd=["runs/host-[17]"],
        agreement="3 of 4 runs agree as far as rounding goes; runs/host-[17] differs from them",
        only_odd=["driver: 12 (the others: 13)"],
        next=["divergence compare runs/first 'runs/host-[17]'"],
    )


def test_snapshot(matrix):
    """All of it. UPDATE_SNAPSHOTS=1 writes it anew."""
    text = text_of(document_lines(matrix_document(matrix)))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(text, encoding="utf-8")
    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_quiet_is_who_is_odd(matrix):
    """The sentence, what is only there and why a run was not compared; no table."""
    said = text_of(headline_lines(matrix_document(matrix, brief=True).headline))
    assert said.startswith("ODD: 3 of 4 runs agree")
    begin, _, problems = said.partition("\nnot compared runs/gone: ")
    whole = text_of(document_lines(matrix_document(matrix)))
    assert whole.startswith(begin)
    assert problems and all(part in whole for part in problems.strip().split("; "))


@pytest.mark.parametrize(
    ("groups", "verdicts", "word"),
    [
        ([["a", "b", "c"]], ["identical", "within_floor"], "AGREE"),
        ([["a", "b"]], ["within_floor", None], "AGREE"),
        ([["a"], ["b"]], ["localized", "drift"], "SPLIT"),
        ([["a"]], ["undetermined", None], "NO ANSWER"),
    ],
)
def test_the_first_word(matrix, row, groups, verdicts, word):
    """Nobody is odd: all agree, no majority, or nobody can tell."""
    matrix = msgspec.structs.replace(
        matrix,
        odd=[],
        groups=[AgreementGroup(runs=runs) for runs in groups],
        rows=[row(name, verdict=kind) for name, kind in zip("bc", verdicts, strict=True)],
    )
    assert str(matrix_document(matrix).headline).startswith(f"{word}: ")


def test_a_long_list_keeps_what_does_not_agree(matrix, row):
    """Hundreds of machines: the odd one is seen, the healthy ones are counted, --all shows them."""
    fleet = [row(f"runs/host-{number}", limit_usage=number / 1000) for number in range(300)]
    matrix = msgspec.structs.replace(matrix, rows=[*fleet, *matrix.rows])
    said = text_of(document_lines(matrix_document(matrix)))
    assert len(said.splitlines()) < MAX_ROWS
    assert "runs/host-[17]" in said
    assert "more that agree, at most 31% of a limit" in said
    assert "host-299 " in text_of(document_lines(matrix_document(matrix, all_runs=True)))


def test_names_give_way_to_numbers(matrix, row, reports):
    """Long paths, labels and sites are cut from the left; no line of the table is wider than it may
    be, and no number is cut."""
    long = "x" * 80
    matrix.rows.append(
        row(
            f"runs/{long}/last",
            run=reports.make_run("y", label=long),
            verdict="localized",
            onset=Onset(site=f"{long}:out", block=None, sample=0, step=0, position=None),
        )
    )
    lines = text_of(document_lines(matrix_document(matrix))).splitlines()
    table = [line for line in lines if line.endswith(("tokens", "/32"))]
    assert len(table) == 6
    assert max(map(len, table)) <= MAX_WIDTH
    assert "x/last  …xxx" in table[-1]
