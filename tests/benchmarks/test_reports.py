"""The museum of public reports: its cases are whole, and its grades are strict."""

import re
from typing import get_args

import pytest

from benchmarks._reports import CLASSES, Answer, Case, grades_of, overall
from benchmarks._reports_models import MODELS
from benchmarks.reports import CASES, Result, page
from divergence.comparison.result import VerdictKind


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_says_where_it_comes_from_and_what_is_right(case):
    """Its report can be looked up, and its expectations can be met."""
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+(, ([\w.-]+/[\w.-]+)?#\d+)*", case.report)
    assert case.letter in CLASSES and case.model in MODELS and case.cause
    assert {*case.kinds, *case.alone} <= {*get_args(VerdictKind)}
    for pattern in (case.place, case.unit, *case.words):
        re.compile(pattern if isinstance(pattern, str) else pattern[1])
    assert case.place or not {"localized", "systematic", "nonfinite"} & {*case.kinds} or case.runs


FAULT = Case(
    name="fault",
    report="a/b#1",
    letter="K",
    cause="",
    place=r"layers\.2\b",
    unit="prompt 1",
    words=("window", ("its width", r"of \d")),
)
QUIET = Case(
    name="quiet", report="a/b#1", letter="R", cause="", kinds=("within_floor",), side="neither"
)
RIGHT = {
    "kind": "localized",
    "place": "model.layers.2:out",
    "unit": "prompt 1, step 0",
    "side": "candidate",
    "text": "a window of 5",
}


@pytest.mark.parametrize(
    ("case", "said", "grade"),
    [
        (FAULT, {}, "right"),
        (FAULT, {"text": ""}, "vague"),
        (FAULT, {"side": None}, "abstains"),
        (FAULT, {"side": "reference"}, "wrong"),
        (FAULT, {"place": "model.layers.20:out"}, "wrong"),
        (FAULT, {"unit": "prompt 0, step 0"}, "wrong"),
        (FAULT, {"kind": "drift"}, "vague"),
        (FAULT, {"kind": "undetermined"}, "abstains"),
        (FAULT, {"kind": "within_floor"}, "wrong"),
        (FAULT, {"kind": "refused"}, "abstains"),
        (FAULT, {"kind": "crashed"}, "wrong"),
        (QUIET, {"kind": "within_floor"}, "right"),
        (QUIET, {}, "wrong"),
        (QUIET, {"kind": "drift", "place": ""}, "wrong"),
        (QUIET, {"kind": "incomparable"}, "abstains"),
    ],
)
def test_an_answer_with_a_truth_is_graded(case, said, grade):
    """Another place, unit or side is wrong, and so is an alarm of what is healthy."""
    answer = Answer(way="truth", **{**RIGHT, **said})
    assert grades_of(case, [answer])["truth"][0] == grade


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        ({}, "right"),
        ({"kind": "stopped", "verdict": "incomparable"}, "abstains"),
        ({"kind": "stopped", "verdict": "within_floor"}, "wrong"),
        ({"kind": "stopped", "verdict": "localized"}, "right"),
        ({"kind": "contradiction"}, "abstains"),
        ({"is_correct_operator": True, "headline": "the error is made at it"}, "wrong"),
        ({"is_correct_operator": True, "headline": "the error comes into it"}, "right"),
    ],
)
def test_an_answer_of_localize_is_graded(said, grade):
    """To call an operator the error that is correct on both sides is wrong."""
    answer = Answer(way="localize", **{**RIGHT, **said})
    assert grades_of(FAULT, [answer])["localize"][0] == grade


def test_one_wrong_answer_makes_a_case_wrong():
    """Else the better one of its last two counts."""
    right, vague, wrong = ("right", ""), ("vague", ""), ("wrong", "")
    assert overall({"alone": wrong, "truth": right, "localize": right}) == "wrong"
    assert overall({"alone": vague, "truth": vague, "localize": right}) == "right"
    assert overall({"alone": right, "truth": vague, "localize": vague}) == "vague"


def test_the_page_has_every_cause_and_each_answer_in_one_cell():
    """What was said is one cell of a table, whatever it holds."""
    answer = {"way": "alone", "kind": "localized", "headline": "a | b\n`c` <d>"}
    lines = page([Result({"name": name, "answers": [answer]}) for name in CASES]).splitlines()
    rows = [line for line in lines if "a / b" in line]
    causes = {f"{case.report}: {case.cause}" for case in CASES.values()}
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows} == causes
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}
