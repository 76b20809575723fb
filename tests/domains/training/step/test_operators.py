"""Operators of a training step: whose they are, and that recording them changes nothing."""

import pytest
import torch

import divergence
from divergence import TrainOptions
from divergence.errors import UsageError
from divergence.run.site import BACKWARD, operator_of

IDS = [[5, 9, 33, 21, 77, 100, 43, 12], [45, 99, 33, 21, 17]]
BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "qwen3-moe": "model.layers.1"}


@pytest.fixture
def step(shared_run):
    """``step("llama", sites=[...])`` → a run with float32 weights; the same arguments, the same."""

    def make(architecture, **options):
        model = {"dtype": "float32", "num_blocks": 2}
        training = TrainOptions(train=True)
        return shared_run(
            architecture, model=model, training=training, prompts=IDS, probe=False, **options
        )

    return make


def calls(run, sample=0):
    return {
        record.site.rpartition(":")[0]: record.call
        for record in run.records
        if record.call is not None and record.sample == sample and record.pass_ == "free"
    }


def operators(run):
    return {path: call for path, call in calls(run).items() if BACKWARD in path}


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3-moe"))],
)
def test_recording_operators_changes_no_bit(architecture, step):
    """All other tensors of the step stay as they were."""
    block = BLOCKS[architecture]
    plain, with_operators = (
        step(architecture, sites=sites) for sites in (["blocks"], ["blocks", f"ops@{block}"])
    )
    assert len(operators(with_operators)) > 25
    for record in plain.records:
        assert with_operators.find(record.coordinates).xxh3 == record.xxh3, record.site


def test_each_operator_stands_in_the_module_whose_forward_made_it(step):
    """With its operands' origins, the forward's operator and its source line."""
    run = step("llama", sites=["blocks", "ops@model.layers.1"])
    found = operators(run)
    block = "model.layers.1"
    weight = found[f"{block}.mlp.down_proj{BACKWARD}/aten.mm"]
    assert [one.origin for one in weight.operands] == [
        f"{block}{BACKWARD}:in",
        f"{block}.mlp/aten.mul:out",
    ]
    handed_on = found[f"{block}.mlp.down_proj{BACKWARD}/aten.mm#2"]
    assert handed_on.operands[1].weight == f"{block}.mlp.down_proj.weight"
    softmax = found[f"{block}.self_attn{BACKWARD}/aten._softmax_backward_data"]
    assert softmax.backward_of == "aten._softmax"
    assert softmax.source.startswith("modeling_llama.py:")
    added = found[f"{block}.mlp.gate_proj{BACKWARD}/aten.add"]  # two modules read one tensor
    assert (added.backward_of, added.source) == (None, None)
    assert [operator_of(one.site) for one in added.operands] == ["aten.mm", "aten.mm"]
    assert {path.partition("#")[0].startswith(block) for path in found} == {True}


def test_what_leaves_the_last_operator_leaves_the_block(step):
    """Its result is the block's gradient, bit for bit."""
    run = step("llama", sites=["blocks", "ops@model.layers.1"])
    last = list(operators(run))[-1]
    left = run.find(("free", 0, 0, f"model.layers.1{BACKWARD}:out"))
    assert run.find(("free", 0, 0, f"{last}:out")).xxh3 == left.xxh3


def test_the_weights_gradients_add_up_to_that_of_the_step(step):
    """Those of single prompts, bit for bit."""
    run = step("llama", sites=["blocks", "ops@model.layers.1"])
    path = f"model.layers.1.mlp.up_proj{BACKWARD}"
    each = [run.read(run.find(("free", sample, 0, f"{path}/aten.mm:out"))) for sample in (0, 1)]
    whole = run.read(run.find(("free", 0, 0, f"{path}:out.weight")))
    torch.testing.assert_close(sum(each), whole, rtol=0, atol=0)


def test_a_forward_that_runs_again_is_recorded_once(step):
    """Checkpointing shows the same operators and the same bits."""
    sites = ["blocks", "ops@model.layers.1"]
    plain = step("llama", sites=sites)
    again = step("llama", sites=sites, gradient_checkpointing=True)
    assert list(calls(again)) == list(calls(plain))
    origins = [
        [[one.origin for one in call.operands] for call in operators(run).values()]
        for run in (plain, again)
    ]
    assert origins[0] == origins[1]
    for record in plain.records:
        assert again.find(record.coordinates).xxh3 == record.xxh3, record.site


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.sin()


def test_a_function_of_the_models_own_is_named_with_its_line(tiny_model, tmp_path):
    """A backward of the model's own code is named by its class."""

    def prepare(model):
        module = model.get_submodule("model.layers.1.mlp")
        module.register_forward_hook(lambda _module, _args, output: Doubled.apply(output))

    run = divergence.capture(
        str(tiny_model("llama", dtype="float32", num_blocks=2)),
        out=tmp_path / "run",
        training=TrainOptions(train=True),
        prompts=IDS,
        probe=False,
        sites=["blocks", "ops@model.layers.1"],
        prepare=prepare,
    )
    call = operators(run)[f"model.layers.1.mlp{BACKWARD}/aten.sin"]
    assert call.backward_of == "Doubled"
    assert call.source.startswith("test_operators.py:")
    assert call.source.endswith("in backward")


def test_the_loss_is_a_module_too(step):
    """Its operators, and the head's, are recorded where asked for."""
    run = step("llama", sites=["blocks", "ops@loss", "ops@lm_head"])
    found = operators(run)
    assert f"loss{BACKWARD}/aten._log_softmax_backward_data" in found
    assert f"lm_head{BACKWARD}/aten.mm" in found


@pytest.mark.slow
def test_operators_of_a_backward_run_again_give_the_recorded_bits(step, tmp_path):
    """A replay is identical, and within the floor of its truth."""
    run = step("llama", sites=["blocks", "ops@model.layers.1"], weights=True)
    again = divergence.replay(run, out=tmp_path / "again")
    replayed = [record for record in again.records if BACKWARD in record.site and record.call]
    assert len(replayed) > 100
    assert divergence.compare(run, again).verdict.kind == "identical"
    right = divergence.replay(run, out=tmp_path / "right", truth=True)
    report = divergence.compare(right, again)
    assert report.verdict.kind == "within_floor", report.verdict.summary


@pytest.mark.slow
def test_a_truth_holds_the_same_operators(step, tmp_path):
    """In float64, with the same operands."""
    run = step("llama", sites=["blocks", "ops@model.layers.1"])
    right = divergence.truth(run, out=tmp_path / "truth")
    paths = {r.site for r in right.records if r.call is not None and r.pass_ == "anchored"}
    assert {f"{path}:out" for path in calls(run)} <= paths
    name = f"model.layers.1.mlp.up_proj{BACKWARD}/aten.mm#2:out"
    call = right.find(("anchored", 0, 0, name)).call
    assert call.operands[1].weight == "model.layers.1.mlp.up_proj.weight"


def test_what_keeps_no_bytes_is_refused(llama, tmp_path):
    """Operators take stored bytes."""
    with pytest.raises(UsageError, match="keeps not all bytes"):
        divergence.capture(
            str(llama),
            out=tmp_path / "run",
            prompts=IDS,
            training=TrainOptions(train=True),
            probe=False,
            sites=["ops@model.layers.1"],
            store="sketch",
        )
