"""benchmarks/two_machines.py: what counts as wrong, and one fault of each kind played through."""

import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._machine_faults import FAULTS
from benchmarks.two_machines import Play, Step, play


def answer(**values):
    level = {"level": "block", "verdict": "localized", "site": "model.layers.0:out"}
    return {
        "levels": [level],
        "operator": None,
        "side": None,
        "stopped": None,
        "refused": False,
        "commands": [],
        "contradiction": None,
        "doubt": None,
        "causal": None,
        **values,
    }


def operator(site):
    return {"site": site, "candidate_site": site, "fed_by": []}


def outcome(*answers, fault="silu", side="candidate"):
    done = Play(fault=FAULTS[fault], side=side, dtype="float32")
    done.steps = [Step(machine="A", code=0, answer=one) for one in answers]
    return done.outcome[0]


def test_one_wrong_answer_on_the_way_is_wrong():
    """A wrong side, a wrong module or "nothing found" is not made good by a later answer."""
    found = answer(operator=operator("model.layers.0.mlp.act_fn/aten.silu"), side="candidate")
    assert outcome(found) == "right"
    assert outcome({**found, "side": "reference"}, found) == "wrong"
    elsewhere = answer(operator=operator("model.layers.0.mlp/aten.mul"), side="candidate")
    assert outcome(elsewhere, found) == "wrong"
    assert outcome(answer(stopped="no operator of model.layers.0 is beyond its limit")) == "wrong"


def test_a_stated_reason_is_a_refusal():
    """No side with the module right, or what another machine must do first."""
    found = answer(operator=operator("model.layers.0.mlp.act_fn/aten.silu"), doubt="the code")
    assert outcome(found) == "refused"
    assert outcome(answer(refused=True, stopped="this is not B's machine")) == "refused"
    quiet = answer(levels=[{"level": "block", "verdict": "within_floor", "site": None}])
    assert outcome(quiet, fault="oldest kernels") == "right"
    assert outcome(quiet) == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("silu", "candidate", "right"),
        ("down product", "reference", "right"),
        ("vendor switch, silu", "candidate", "right"),
        # "right" where runs record which code was replaced
        ("plugin's silu", "candidate", "refused right"),
        ("norm epsilon", "reference", "refused"),
    ],
)
def test_a_faulty_machine_is_found_as_the_documents_say(llama, tmp_path, name, side, expected):
    """Every command in processes of that machine; no answer on the way is wrong."""
    done = play(FAULTS[name], side, tmp_path / "play", model=llama)
    assert done.outcome[0] in expected.split(), (done.outcome, done.named, done.said)
