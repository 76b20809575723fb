"""Comparing suites: planted wrong operators are named with their side, healthy machines are not."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from divergence import CaseOptions, Run, capture, compare
from divergence import truth as make_truth
from divergence.domains.suite.compare import Truths, between, excess, score_of_side
from divergence.errors import IncomparableError, UsageError

_spec = importlib.util.spec_from_file_location(
    "suite_faulty_compare", Path(__file__).parents[3] / "benchmarks" / "_wrong_operators.py"
)
faulty = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faulty)

PLANTED = [(name, fault) for name, faults in faulty.FAULTS.items() for fault in faults]


@pytest.fixture(scope="module")
def planted_suite(tmp_path_factory) -> tuple[Run, Run]:
    """The quick cases, and the long sums, of the operators that get faults."""
    folder = tmp_path_factory.mktemp("planted")
    sites = [f"{name}.{dtype}.*" for name in faulty.FAULTS for dtype in ("float32", "bfloat16")]
    sites = [site.replace(".*", f".{place}*") for site in sites for place in ("odd", "grouped")]
    sites += ["sum.bfloat16.long.*", "rms_norm.bfloat16.prefill.normal"]
    run = capture("suite:llm", out=folder / "a", sites=sites)
    return run, make_truth(run, out=folder / "truth")


@pytest.mark.parametrize(("name", "fault"), PLANTED, ids=[fault.__name__ for _, fault in PLANTED])
def test_planted_faults_are_named(name, fault, planted_suite, tmp_path):
    """A wrong operator on the candidate's side is named with that side, whichever is given first,
    and the right side is called right."""
    run, truth = planted_suite
    wrong = capture(
        like=run, out=tmp_path / "b", cases=CaseOptions(impl={name: fault}), sites=[f"{name}.*"]
    )
    report = compare(run, wrong, truth=truth)
    assert report.verdict.kind in ("localized", "nonfinite")
    assert report.verdict.side == "candidate"
    (operator,) = report.suite.operators
    assert (operator.operator, operator.status, operator.side) == (
        f"suite.{name}",
        "wrong",
        "candidate",
    )
    assert name in report.verdict.summary
    assert report.verdict.onset.site.startswith(f"{name}.")
    turned = compare(wrong, run, truth=truth)
    assert turned.verdict.side == "reference"


def test_statistics_in_bfloat16_show_in_bfloat16(planted_suite, answer):
    """Though each element's error is that of one more rounding, the rows' scale gives it away."""
    run, truth = planted_suite
    (case,) = answer(
        run,
        truth=truth,
        sites=["rms_norm.bfloat16.prefill.normal"],
        cases=CaseOptions(impl={"rms_norm": faulty.rms_norm_statistics_bf16}),
    ).suite.cases
    assert (case.status, case.side) == ("wrong", "candidate")
    assert case.candidate.score < 4
    assert case.candidate.gain > 6 > 3 * case.reference.gain


def test_both_sides_wrong(planted_suite, tmp_path):
    """Two machines with the same fault are identical, and both are said to be wrong; with
    different ones both are."""
    run, truth = planted_suite
    options = {"like": run, "sites": ["linear.*"]}
    one = capture(
        **options, out=tmp_path / "b", cases=CaseOptions(impl={"linear": faulty.linear_tf32})
    )
    two = capture(
        **options, out=tmp_path / "c", cases=CaseOptions(impl={"linear": faulty.linear_tf32})
    )
    three = capture(
        **options, out=tmp_path / "d", cases=CaseOptions(impl={"linear": faulty.linear_wrong_tile})
    )
    same = compare(one, two, truth=truth).verdict
    assert same.kind == "identical"
    assert "linear beyond what rounding explains on both" in same.summary
    other = compare(one, three, truth=truth).verdict
    assert (other.kind, other.side) == ("localized", "both")


def test_tie_orders_are_shown_and_no_fault(tmp_path):
    """torch.topk documents no order of equal values, so two orders are two right answers: the
    side that does not take the first is named. argmax does document one."""
    sites = ["topk.float32.*"]
    first = capture(
        "suite:llm",
        out=tmp_path / "a",
        sites=sites,
        cases=CaseOptions(impl={"topk": faulty.topk_first}),
    )
    last = capture(
        like=first, out=tmp_path / "b", cases=CaseOptions(impl={"topk": faulty.topk_last})
    )
    truth = make_truth(first, out=tmp_path / "t")
    report = compare(first, last, truth=truth)
    assert report.verdict.kind == "within_floor"
    (operator,) = report.suite.operators
    assert (operator.status, operator.side) == ("ties", "candidate")
    assert "exactly equal" in report.verdict.evidence[0].text
    assert report.verdict.side is None


def test_without_a_truth_it_abstains(planted_suite, answer):
    """How far apart is said, and which command tells more; nobody is blamed."""
    run, _ = planted_suite
    report = answer(run, sites=["linear.*"], cases=CaseOptions(impl={"linear": faulty.linear_tf32}))
    assert (report.verdict.kind, report.verdict.side) == ("undetermined", None)
    assert any("divergence truth" in command for command in report.verdict.next)
    assert not report.suite.judged
    assert report.suite.operators[0].worst.ulp_max > 1000


def test_truths_of_other_runs_are_refused(planted_suite, llama, tmp_path):
    """A truth of other inputs, a run that is no truth, a floor, and nothing in common."""
    run, truth = planted_suite
    other = capture("suite:llm", out=tmp_path / "o", sites=["silu.float16.odd.normal"])
    with pytest.raises(UsageError, match="is no truth"):
        compare(run, run, truth=other)
    with pytest.raises(UsageError, match="truth of other inputs"):
        compare(other, other, truth=truth)
    with pytest.raises(UsageError, match="--floor"):
        compare(run, run, floor=[run])
    with pytest.raises(IncomparableError, match="no case in common"):
        compare(run, other)
    model = capture(llama, out=tmp_path / "m", max_new_tokens=1, prompts=["x"])
    assert compare(run, model).verdict.kind == "incomparable"


def test_fresh_runs_of_two_machines_compare(planted_suite, tmp_path):
    """Both machines may draw the inputs themselves: they are the same bytes."""
    run, truth = planted_suite
    fresh = capture("suite:llm", out=tmp_path / "f", sites=["silu.*", "linear.float32.odd.*"])
    report = compare(run, fresh, truth=truth)
    assert report.verdict.kind == "identical"
    assert report.verdict.confidence == "medium"  # not all cases have a partner
    assert report.coverage.num_compared > 0


MACHINES = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*MACHINES, {"OMP_NUM_THREADS": "2"}], ids=str)
def test_healthy_machines_are_not_blamed(settings, quick_llm, tmp_path):
    """Other instruction sets, libraries and thread counts differ, and none is called wrong."""
    run, truth = quick_llm
    program = "import sys; from divergence import capture; capture(like=sys.argv[1], out='b')"
    subprocess.run(
        [sys.executable, "-c", program, str(run.path)],
        cwd=tmp_path,
        check=True,
        env={**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    report = compare(run, Run.open(tmp_path / "b"), truth=truth)
    assert report.verdict.kind in ("identical", "within_floor")
    assert not [item for item in report.suite.operators if item.status == "wrong"]


@pytest.fixture(scope="module")
def quick_llm(tmp_path_factory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("llm")
    run = capture("suite:llm", out=folder / "a")
    return run, make_truth(run, out=folder / "truth")


def truths(value, floor=None, gain=None, scores=None) -> Truths:
    as_tensor = [None if one is None else torch.tensor(one) for one in (floor, gain, scores)]
    return Truths(torch.tensor(value, dtype=torch.float64), *as_tensor)


def test_a_score_of_one_is_one_rounding():
    """Values 2^-9 off where bfloat16 has steps of 2^-7: a quarter of a step over 1/√12 of one."""
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    side = score_of_side(x, truths([[1 + 2.0**-9] * 4], floor=[[0.0] * 4]), subnormal=False)
    assert side.score == pytest.approx(12**0.5 / 4)
    assert side.ulp_max == 0.0
    wider = score_of_side(x, truths([[1 + 2.0**-9] * 4], floor=[[2.0**-7] * 4]), subnormal=False)
    assert wider.score == pytest.approx(0.25 / (1 + 1 / 12) ** 0.5)


def test_exact_results_must_be_exact():
    """Where nothing rounds, one ulp is beyond any limit."""
    truth = truths([[1.0, 0.0]], floor=[[0.0, 0.0]])
    right = score_of_side(torch.tensor([[1.0, 0.0]]), truth, subnormal=False)
    wrong = score_of_side(torch.tensor([[1.0 + 2.0**-23, 0.0]]), truth, subnormal=False)
    assert excess(right, expected_off=None, count=2) == 0.0
    assert excess(wrong, expected_off=None, count=2) > 1.0


def test_nan_is_beyond_every_limit_and_overflow_is_not():
    """A nan where the truth is finite is a fault; an infinity where it is beyond float16 is not."""
    truth = truths([[1.0, 1e6]], floor=[[1e-3, 1.0]])
    over = score_of_side(
        torch.tensor([[1.0, torch.inf]], dtype=torch.float16), truth, subnormal=False
    )
    assert over.num_nonfinite == 0
    bad = score_of_side(
        torch.tensor([[torch.nan, torch.inf]], dtype=torch.float16), truth, subnormal=False
    )
    assert bad.num_nonfinite == 1
    assert excess(bad, expected_off=None, count=2) > 1.0


def test_flushed_subnormals_are_counted_apart():
    """Zeros for subnormals leave the score of the rest alone, in cases of subnormals only."""
    truth = truths([[1e-40, 1.0]], floor=[[0.0, 1e-7]])
    x = torch.tensor([[0.0, 1.0]])
    side = score_of_side(x, truth, subnormal=True)
    assert (side.num_flushed, side.score) == (1, 0.0)
    assert score_of_side(x, truth, subnormal=False).score > 4


def test_codes_are_counted():
    """One code off by one and one by three, of ten; none is expected."""
    right = torch.arange(10, dtype=torch.int8)
    x = right.clone()
    x[2] += 1
    x[5] -= 3
    truth = Truths(right, torch.zeros(10), None, None)
    side = score_of_side(x, truth, subnormal=False)
    assert (side.off_by_one, side.off_by_more) == (0.1, 0.1)
    assert excess(side, expected_off=0.0, count=10) == float("inf")
    few = score_of_side(torch.where(right == 2, right + 1, right), truth, subnormal=False)
    assert excess(few, expected_off=0.0, count=10) == pytest.approx(1 / 3)
    assert between(x, right) == (0.2, None, None)


def test_open_codes_are_not_judged():
    """Where the truth leaves the conversion open, either answer is right."""
    right = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    for value in (448.0, torch.nan):
        x = torch.tensor([1.0, value]).to(torch.float8_e4m3fn)
        side = score_of_side(x, Truths(right, torch.zeros(2), None, None), subnormal=False)
        assert (side.off_by_one, side.off_by_more, side.num_nonfinite) == (0.0, 0.0, 0)


def test_indices_are_ties_near_ties_or_wrong():
    """Scores 3, 3, 2.9999, 1 with a floor of 1e-4: the second is a tie of the first, the third is
    near, the fourth wrong; the same index twice is wrong, and so is one that does not exist."""
    scores = torch.tensor([[3.0, 3.0, 2.9999, 1.0]], dtype=torch.float64)
    truth = Truths(torch.tensor([[0]]), torch.full((1, 4), 1e-4), None, scores)

    def rows(*indices: int) -> tuple:
        side = score_of_side(torch.tensor([indices]), truth, subnormal=False)
        return side.rows_tied, side.rows_near, side.rows_wrong

    assert rows(0) == (0.0, 0.0, 0.0)
    assert rows(1) == (1.0, 0.0, 0.0)
    assert rows(2) == (0.0, 1.0, 0.0)
    assert rows(3) == (0.0, 0.0, 1.0)
    assert rows(7) == (0.0, 0.0, 1.0)
    truth = replace(truth, value=torch.tensor([[0, 1]]))
    assert rows(1, 1) == (0.0, 0.0, 1.0)
    truth = replace(truth, scores=None)
    assert rows(1, 0) == (0.0, 0.0, 1.0)
