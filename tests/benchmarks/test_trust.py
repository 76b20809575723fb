"""The benchmark of trust judges its answers rightly, and some of its cases hold."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _axis, trained, trust
from benchmarks._trust import Bench, Ran, fails, finds, stays_quiet


def report(kind, *, confidence="high", side=None, block="b.1", sample=0, step=0):
    onset = SimpleNamespace(
        site=f"{block}:out", block=block, sample=sample, step=step, pass_="free"
    )
    verdict = SimpleNamespace(
        kind=kind, confidence=confidence, side=side, onset=onset if block else None
    )
    return SimpleNamespace(verdict=verdict)


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (report("localized"), "right"),
        (report("localized", side="candidate"), "right"),
        (report("localized", side="reference"), "wrong"),
        (report("localized", side="reference", confidence="low"), "abstained"),
        (report("localized", block="b.2"), "wrong"),
        (report("localized", block="b.2", confidence="low"), "abstained"),
        (report("localized", sample=1), "wrong"),
        (report("within_floor", confidence="low", block=None), "wrong"),
        (report("undetermined", confidence="low", block=None), "abstained"),
        (report("drift", confidence="low", block=None), "abstained"),
    ],
)
def test_a_fault_is_found_at_its_place_and_side_or_not_at_all(told, outcome):
    """Only a low confidence or an open verdict counts as an abstention."""
    assert finds(told, block="b.1", side="candidate", sample=0).outcome == outcome


def test_an_alarm_among_healthy_runs_is_wrong():
    """Whatever its confidence."""
    assert stays_quiet(report("within_floor")).outcome == "right"
    assert stays_quiet(report("localized", confidence="low")).outcome == "wrong"


@pytest.mark.parametrize(("code", "outcome"), [(0, "wrong"), (1, "right"), (2, "abstained")])
def test_a_check_that_passes_a_fault_is_wrong(code, outcome):
    """Exit 1 is right, 2 a refusal."""
    assert fails(Ran(code, "", "")).outcome == outcome


def test_every_case_has_a_name_of_its_own_and_a_sentence():
    """--list can tell what each must hold."""
    names = [case.name for case in trust.CASES]
    assert len(names) == len(set(names)) > 100
    assert all(case.run.__doc__ and case.run.__doc__.endswith(".") for case in trust.CASES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "one_step_of_one_prompt",
        "before_head",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in """
                one_head_of_one_prompt nan_in_both_and_fault missing_layer healthy_passes
                one_prompt_of_reference
            """.split()
        ),
    ],
)
def test_cases_that_hold(name, tmp_path):
    """Faults in one prompt, outside the blocks and in the architecture are told."""
    (case,) = [case for case in trust.CASES if case.name == name]
    told = trust.tell(Bench(tmp_path), case)
    assert told.outcome != "wrong", told.said


def test_a_crash_is_wrong(tmp_path):
    """An error that is not the project's own is no abstention."""

    def run(bench):
        raise ZeroDivisionError("no")

    assert trust.tell(Bench(tmp_path), trust.Case("0", "", run)).outcome == "wrong"


def test_the_smallest_size_is_one_that_stays_found():
    """A size that is found by chance below those that are missed does not count."""
    found = _axis.smallest_found(lambda size: size > 0.01 or 0.001 < size < 0.0011)
    assert found is not None and 0.01 < found < 0.0116
    for near in (0.001, 0.01, 0.1, 0.5):
        assert _axis.smallest_found(lambda size: size > 0.01, near=near) == pytest.approx(found)
    assert _axis.smallest_found(lambda size: False) is None


def test_trials_of_the_trained_model_are_planned_alike_each_time():
    """Keys are the same in every sitting, so that those done are not done again."""
    dtypes = ["float32", "bfloat16", "float16"]
    plan = list(trained.planned(dtypes, 20, 0))
    keys = [key for key, *_ in plan]
    assert keys == [key for key, *_ in trained.planned(dtypes, 20, 0)]
    assert len(set(keys)) == len(keys)
    for dtype in dtypes:
        assert sum(key.startswith(f"health {dtype}") for key in keys) == 20
        assert sum(key.startswith(f"fault {dtype}") for key in keys) >= 60
