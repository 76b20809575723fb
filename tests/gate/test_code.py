"""`check` and the code: what no version, kernel or setting explains is no pass."""

import pytest
from typer.testing import CliRunner

from divergence import RecordOptions, capture, check
from divergence.cli.main import app
from tests import by_hand

PROMPTS = ["Four walls hold a roof, and a roof holds the rain away from what is dry."]


@pytest.fixture
def golden(shared_run):
    """As docs recommend one: a sketch, without an anchored pass."""
    options = {"prompts": PROMPTS, "max_new_tokens": 2, "store": "sketch", "probe": False}
    return shared_run(model={"dtype": "bfloat16"}, **options)


def scaled(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.002


def softer(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon *= 2


def doubled(model):
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: forward(x) * 1.0


@pytest.mark.parametrize(
    ("prepare", "named"), [(scaled, "scaling"), (softer, "variance_epsilon"), (doubled, "LlamaMLP")]
)
def test_other_constants_or_code_fail_and_are_named(prepare, named, golden, tmp_path):
    """A fault too small for a sketch to see is a change of the model that nothing explains: the
    refusal says what differs, not how many classes there are."""
    new = capture(
        like=golden,
        out=tmp_path / "new",
        prepare=prepare,
        recording=RecordOptions(anchor=False),
        probe=False,
    )
    failure = next(item for item in check(golden, new).failures if item.rule == "preflight")
    assert named in failure.text
    assert "classes of module" not in failure.text
    done = CliRunner().invoke(app, ["check", str(golden.path), str(new.path)])
    assert done.exit_code == 1
    assert named in done.stdout


def test_a_policy_may_warn_of_other_code_instead(golden, tmp_path):
    """What differs is said beside the result then."""
    new = capture(
        like=golden,
        out=tmp_path / "new",
        prepare=scaled,
        recording=RecordOptions(anchor=False),
        probe=False,
    )
    policy = by_hand.policy(preflight={"allow": ["*"], "code": "warn"})
    result = check(golden, new, policy=policy)
    assert not [item for item in result.failures if item.rule == "preflight"]
    assert any(note.startswith("WARNING") and "scaling" in note for note in result.notes)


def test_another_kernel_of_attention_explains_other_code(golden, tmp_path):
    """What another setting brings along is no fault of the code."""
    new = capture(
        like=golden,
        out=tmp_path / "new",
        attn_implementation="sdpa",
        prepare=scaled,
        recording=RecordOptions(anchor=False),
        probe=False,
    )
    assert not [item for item in check(golden, new).failures if item.rule == "preflight"]


def test_what_a_golden_cannot_see_stands_beside_passed(golden, tmp_path):
    """An equal-looking run passes with the size of what would have been missed."""
    new = capture(
        like=golden,
        out=tmp_path / "new",
        attn_implementation="sdpa",
        recording=RecordOptions(anchor=False),
        probe=False,
    )
    shown = CliRunner().invoke(app, ["check", str(golden.path), str(new.path)]).stdout
    assert shown.startswith("PASSED")
    assert shown.count("not seen    errors below ") == 1
