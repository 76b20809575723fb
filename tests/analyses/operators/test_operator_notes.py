"""What a report says of operators that it does not compare, or does not judge."""

import pytest

from divergence import capture, compare
from divergence import truth as make_truth

BLOCK = "model.layers.1"


@pytest.fixture
def run(shared_run):
    """A run with one block's operators, in bfloat16."""
    options = {"prompts": ["one two three"], "max_new_tokens": 2, "dtype": "bfloat16"}
    return shared_run(sites=["blocks", f"ops@{BLOCK}"], **options)


@pytest.mark.slow
@pytest.mark.parametrize("with_truth", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_two_dtypes_are_shown_but_not_judged(run, tmp_path, dtype, with_truth):
    """The coarser side is farther from the truth by right; no operator is blamed for it."""
    other = capture(like=run, out=tmp_path / "b", dtype=dtype)
    truth = make_truth(run, out=tmp_path / "t") if with_truth else None
    report = compare(run, other, truth=truth)
    assert report.verdict.kind == "within_floor"
    assert report.operators.onset is None
    assert {result.verdict for result in report.operators.results} == {"unjudged"}
    assert any("two dtypes" in note for note in report.notes)


def test_operators_of_one_run_alone_are_no_silent_pass(run, answer):
    """The report says that they were not compared."""
    report = answer(run, sites=["blocks"])
    assert report.operators is None
    assert any(note.endswith("B none") and "not compared" in note for note in report.notes)
