"""The plan of a step, against what the same step really allocates in this process."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from divergence.domains.training.plan import Wanted, plan_training
from divergence.errors import ModelError, UsageError
from divergence.recording.engines.load import Loading, empty_model, load_model

BATCH, TOKENS = 2, 48


def plan_of(model, *, dtype=None, attention="eager", **wanted):
    loaded = empty_model(Loading(str(model), dtype=dtype, attn_implementation=attention))
    return plan_training(loaded, Wanted(batch=BATCH, tokens=TOKENS, **wanted))


def measured_peak(model, *, checkpointing=False, autocast=None):
    """Bytes of one forward and backward beside the parameters, by torch's own profiler."""
    module = load_model(Loading(str(model), dtype="float32")).module.train()
    if checkpointing:
        module.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    low = torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with low:
            loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_activations_are_what_a_real_step_holds(tiny_model, architecture, checkpointing):
    """Within 5%; 15% is what the plan promises."""
    model = tiny_model(architecture)
    plan = plan_of(model, dtype="float32", gradient_checkpointing=checkpointing, dropout=True)
    found = next(one for one in plan.activations if one.checkpointing == checkpointing)
    assert found.peak_bytes == pytest.approx(
        measured_peak(model, checkpointing=checkpointing), rel=0.05
    )


@pytest.mark.slow
def test_autocast_is_counted(llama):
    """Results in 16 bits, and the copies of weights."""
    plan = plan_of(llama, dtype="float32", autocast="bfloat16")
    assert plan.activations[0].peak_bytes == pytest.approx(
        measured_peak(llama, autocast="bfloat16"), rel=0.05
    )


@pytest.mark.slow
def test_checkpointing_and_tensor_parallelism_hold_less(llama):
    """Each for its own reason."""
    one = plan_of(llama)
    two = plan_of(llama, mesh="tp=2")
    without, with_ = one.activations
    assert with_.saved_bytes < without.saved_bytes / 2
    assert two.activations[0].saved_bytes < without.saved_bytes
    assert two.num_parameters == one.num_parameters
    assert two.kept_bytes < one.kept_bytes


@pytest.mark.slow
def test_tensor_parallelism_reduces_twice_each_way_in_a_block(llama):
    """2 + 2 all-reduces of (B, T, hidden), and the head's one in the backward."""
    plan = plan_of(llama, mesh="tp=2", dtype="float32")
    found = {one.of: one.tensor_bytes for one in plan.traffic if one.operation == "all-reduce"}
    each, blocks = BATCH * TOKENS * 64 * 4, 3
    assert found["activations, backward"] == each * (2 * blocks + 1)
    assert found["activations, forward"] in (each * 2 * blocks, each * (2 * blocks + 1))
    assert any("one all-reduce" in note for note in plan.notes)


@pytest.mark.slow
def test_the_meshs_default_stage(llama):
    """3 with fsdp, else 0; N is the axis that divides."""
    assert plan_of(llama, mesh="fsdp=4,tp=2").zero == 3
    assert plan_of(llama, mesh="dp=4").zero == 0
    plan = plan_of(llama, mesh="dp=2,fsdp=4", zero=2)
    assert (plan.zero, plan.num_ranks) == (2, 8)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"mesh": "fsdp"}, "leaves a size open"),
        ({"mesh": "pp=2"}, "schedule"),
        ({"mesh": "xp=2"}, "cannot be understood"),
        ({"zero": 1}, "no ranks to divide over"),
        ({"zero": 7, "mesh": "dp=2"}, "no stage"),
        ({"optimizer": "lion"}, "not known"),
    ],
)
def test_what_makes_no_plan_is_refused(llama, wanted, said):
    """In one sentence."""
    with pytest.raises(UsageError, match=said):
        plan_of(llama, **wanted)


def test_a_division_that_is_not_known_is_refused(tiny_model):
    """Experts under tensor parallelism are not guessed."""
    with pytest.raises(ModelError, match="not known to the plan"):
        plan_of(tiny_model("mixtral"), mesh="tp=2")


@pytest.mark.slow
def test_the_model_is_left_as_it_was(llama):
    """On the meta device, in evaluation."""
    loaded = empty_model(Loading(str(llama)))
    plan_training(loaded, Wanted(batch=1, tokens=8))
    assert not loaded.module.training
    assert {one.device.type for one in loaded.module.parameters()} == {"meta"}


def test_a_forward_that_needs_values_leaves_activations_open(llama, monkeypatch):
    """What is known is said, and why the rest is not."""

    def refuse(*_, **__):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr("divergence.domains.training.plan.run_step", refuse)
    plan = plan_of(llama)
    assert (plan.activations, plan.peak_bytes) == ([], None)
    assert plan.kept_bytes > 0
    assert "data-dependent" in plan.notes[0]


@pytest.mark.slow
def test_a_dry_run_has_the_plan(llama, dry_run, tmp_path):
    """Of the prompts' largest batch, or of the size that was asked."""
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n')
    dry = dry_run(llama, "--prompts", "p.jsonl", "--train", "--mesh", "fsdp=4")
    assert dry["training"]["micro_batch"] == [1, 3]
    assert (dry["training"]["zero"], dry["training"]["num_ranks"]) == (3, 4)
    assert dry["training"]["accumulates"]
    assert dry["total_bytes"] == dry["training"]["dump_bytes"]
    dry = dry_run(llama, "--train", "--micro-batch-size", 8, "--sequence-length", 64)
    assert dry["training"]["micro_batch"] == [8, 64]
    assert dry_run(llama)["training"] is None


@pytest.mark.slow
def test_fused_attention_holds_no_square(llama):
    """Twice the tokens, twice the activations under sdpa; eager keeps tokens × tokens."""
    saved = {}
    for attention in ("sdpa", "eager"):
        for tokens in (128, 256):
            loaded = empty_model(Loading(str(llama), attn_implementation=attention))
            plan = plan_training(loaded, Wanted(batch=1, tokens=tokens))
            saved[attention, tokens] = plan.activations[0].saved_bytes
    assert saved["sdpa", 256] / saved["sdpa", 128] == pytest.approx(2, rel=0.02)
    assert saved["eager", 256] / saved["eager", 128] > 2.3
