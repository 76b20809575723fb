"""Recorded inputs are complete: a replay on the same machine gives every recorded bit."""

from collections import Counter

import pytest
import torch

from divergence import RecordOptions, Run, capture, replay
from divergence import truth as make_truth
from divergence.errors import UsageError

BLOCK = "model.layers.1"
OPTIONS = {"prompts": ["A bridge is built twice: once on paper."], "max_new_tokens": 2}


def same_bits(run: Run, again: Run) -> None:
    """Every operator of the run was run again, and gave the same bits."""
    wanted = {r.coordinates[1:]: r.xxh3 for r in run.records if "/" in r.site and ":out" in r.site}
    found = {r.coordinates[1:]: r.xxh3 for r in again.records}
    assert wanted and found == wanted
    assert not again.manifest.plan.skipped_operators


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_gives_the_recorded_bits(tiny_model, tmp_path, dtype, attention):
    """In prefill (many rows) and decode (one row, another kernel), whatever the layout."""
    run = capture(
        str(tiny_model("llama", dtype=dtype)),
        out=tmp_path / "run",
        sites=[f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True),
        attn_implementation=attention,
        **OPTIONS,
    )
    same_bits(run, replay(run, out=tmp_path / "again", device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_the_truth_is_what_the_operators_round(tiny_model, tmp_path, architecture, attention):
    """Every float32 result lies within a few roundings of the same operator in float64, and every
    index and mask is the same: no definition in float64 is of another operator."""
    run = capture(
        str(tiny_model(architecture, dtype="float32")),
        out=tmp_path / "run",
        sites=["ops@*"],
        recording=RecordOptions(weights=True),
        attn_implementation=attention,
        **OPTIONS,
    )
    truth = replay(run, out=tmp_path / "truth", truth=True)
    assert not truth.manifest.plan.skipped_operators
    for record in truth.records:
        own = run.find(("free", record.sample, record.step, record.site))
        found, right = run.read(own), truth.read(record)
        if not found.is_floating_point():
            assert torch.equal(found, right), record.site
            continue
        finite = torch.isfinite(right)
        error = (found.double() - right)[finite].norm()
        # statistics of a norm may cancel; a mean of 64 numbers of both signs is far below them
        terms = 64 if "norm" in record.site else 8
        assert error <= terms * 2**-24 * right[finite].norm(), record.site


@pytest.mark.slow
def test_experts_that_transformers_runs_itself(tiny_model, tmp_path):
    """Its own operator for grouped products is found again, in float64 too."""
    run = capture(
        str(tiny_model("mixtral", dtype="bfloat16")),
        out=tmp_path / "run",
        sites=[f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True),
        **OPTIONS,
    )
    same_bits(run, replay(run, out=tmp_path / "again", device="cpu"))
    truth = replay(run, out=tmp_path / "truth", truth=True)
    assert len(truth.records) == sum("/" in r.site and ":out" in r.site for r in run.records)


def test_an_anchored_pass_is_replayed_first(tiny_model, tmp_path):
    """It holds the operators of a repeat; another pass is taken on request, if it is there."""
    run = capture(str(tiny_model("llama")), out=tmp_path / "run", sites=["blocks"], **OPTIONS)
    like = capture(
        like=run,
        out=tmp_path / "like",
        sites=[f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True),
    )
    again = replay(like, out=tmp_path / "again", device="cpu")
    assert again.manifest.plan.replayed_pass == "anchored"
    same_bits(like, again)
    with pytest.raises(UsageError, match="holds no operators of a pass 'escalated'"):
        replay(like, out=tmp_path / "other", replayed_pass="escalated")


@pytest.fixture(scope="module")
def without_weights(tmp_path_factory, tiny_model) -> Run:
    return capture(
        str(tiny_model("llama", dtype="bfloat16")),
        out=tmp_path_factory.mktemp("no") / "run",
        sites=[f"ops@{BLOCK}"],
        **OPTIONS,
    )


def test_weights_that_were_not_stored_are_counted(without_weights, tmp_path):
    """What needs none is run; the rest is left out by reason, and some of it named."""
    notes = []
    again = replay(
        without_weights,
        out=tmp_path / "again",
        device="cpu",
        progress=lambda event, done, total, detail: event == "note" and notes.append(detail),
    )
    products = Counter(r.call.operator for r in without_weights.records if r.call is not None)
    ((reason, number),) = again.manifest.plan.skipped_operators.items()
    assert reason == "its weight was not stored (capture --weights, or --model PATH)"
    assert number == sum(
        any(operand.weight for operand in r.call.operands)
        for r in without_weights.records
        if r.call is not None
    )
    assert number < sum(products.values())
    (note,) = notes
    assert f"{number} operator calls were not run again" in note
    assert f"{BLOCK}.input_layernorm.weight" in note


def test_weights_come_from_the_model(without_weights, tiny_model, tmp_path):
    """By name and digest: the same bits as in the capture, from the files alone."""
    again = replay(
        without_weights,
        out=tmp_path / "again",
        device="cpu",
        model=tiny_model("llama", dtype="bfloat16"),
    )
    same_bits(without_weights, again)


def test_other_weights_of_that_name_are_not_used(without_weights, tiny_model, tmp_path):
    """Another model's do not stand in for the recorded ones."""
    again = replay(
        without_weights,
        out=tmp_path / "again",
        device="cpu",
        model=tiny_model("llama", dtype="bfloat16", seed=1),
    )
    assert set(again.manifest.plan.skipped_operators) == {"--model has another weight of that name"}


def test_fused_experts_are_taken_from_the_loaded_model(tiny_model, tmp_path):
    """Their parameter is no tensor of the checkpoint: it is made on loading."""
    model = tiny_model("mixtral", dtype="bfloat16")
    run = capture(str(model), out=tmp_path / "run", sites=[f"ops@{BLOCK}"], **OPTIONS)
    same_bits(run, replay(run, out=tmp_path / "again", device="cpu", model=model))


@pytest.mark.slow
def test_the_escalated_pass_gives_the_recorded_bits(tiny_model, tmp_path):
    """Its weights are widened again as that pass widened them; a truth is not replayed at all."""
    a = capture(str(tiny_model("llama", dtype="bfloat16")), out=tmp_path / "a", **OPTIONS)
    options = {"sites": [f"ops@{BLOCK}"], "weights": True, "escalate": True, "anchor": False}
    run = capture(like=a, out=tmp_path / "run", **options)
    with pytest.raises(UsageError, match="only those of the escalated pass") as caught:
        replay(run, out=tmp_path / "none")
    assert caught.value.hint.endswith("--pass escalated")
    again = replay(run, out=tmp_path / "again", device="cpu", replayed_pass="escalated")
    same_bits(run, again)
    truth = make_truth(a, out=tmp_path / "truth", sites=[f"ops@{BLOCK}"])
    with pytest.raises(UsageError, match="was computed in float64 itself"):
        replay(truth, out=tmp_path / "none")
