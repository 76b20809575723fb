"""In which dtypes a step is made, and what is said of it."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy

import divergence
from divergence.analyses.precision.audit import audit_runs
from divergence.domains.training.recording.optimizer import precision_of
from divergence.errors import UsageError
from divergence.run.manifest import Training

IDS = [[5, 9, 11, 7, 3, 8], [6, 2, 9, 13, 4], [9, 9, 1, 7, 12, 3, 8]]


@pytest.fixture
def step(tiny_model, tmp_path):
    def make(name, *, like=None, dtype="bfloat16", **options):
        how = {"train": True, "prompts": IDS, "probe": False} if like is None else {"like": like}
        source = str(tiny_model("llama", dtype=dtype)) if like is None else None
        return divergence.capture(source, out=tmp_path / name, **(how | options))

    return make


def tensors(run, pattern):
    return {r.site: run.read(r) for r in run.records if r.pass_ == "free" and pattern in r.site}


@pytest.mark.slow
def test_what_a_step_does_is_read_from_its_tensors(step):
    """The dtypes of each part are those that were seen, not those that were asked for."""
    plain = step("a", optimizer="adamw").manifest.training.precision
    assert (plain.parameters, plain.gradients, plain.reduction) == ("bfloat16", "bfloat16", None)
    assert (plain.main_weights, plain.moments, plain.buffers) == ("bfloat16", "bfloat16", "float32")
    assert 0 < plain.num_unmoved < plain.num_stepped
    wide = step(
        "b",
        optimizer="adamw",
        main_weights=True,
        accumulate_dtype="float32",
        reduce_dtype="bfloat16",
        moments_dtype="bfloat16",
        buffer_dtype="bfloat16",
    ).manifest.training.precision
    assert (wide.parameters, wide.gradients, wide.reduction) == ("bfloat16", "float32", "bfloat16")
    assert (wide.main_weights, wide.moments, wide.buffers) == ("float32", "bfloat16", "bfloat16")
    assert wide.num_unmoved < plain.num_unmoved
    assert step("c").manifest.training.precision.main_weights is None


@pytest.mark.slow
def test_sums_in_float32_are_those_of_the_micro_batches(step):
    """Each micro-batch's gradient is bfloat16, their sum is not."""
    alone = []
    for number, ids in enumerate(IDS):
        one = step(f"one{number}", prompts=[ids])
        share = (len(ids) - 1) / sum(len(ids) - 1 for ids in IDS)
        alone.append((one, share))
    both = step("sum", accumulate_dtype="float32")
    site = "lm_head#backward:out.weight"
    total = tensors(both, site)[site]
    assert total.dtype == torch.float32
    expected = sum(tensors(run, site)[site].float() * share for run, share in alone)
    assert torch.linalg.vector_norm(total - expected) < 4e-3 * torch.linalg.vector_norm(expected)


def test_main_weights_take_a_step_that_bfloat16_does_not(step, tiny_model):
    """As an optimizer of float32 parameters with the same gradients."""
    run = step("a", optimizer="adamw", main_weights=True, learning_rate=1e-5)
    site = "model.layers.0.mlp.up_proj#optimizer:out.weight"
    gradient = tensors(run, "up_proj#optimizer:in.weight")[site.replace("out", "in")]
    value = tensors(run, site)[site]
    assert value.dtype == gradient.dtype == torch.float32
    weights = load_file(tiny_model("llama", dtype="bfloat16") / "model.safetensors")
    old = weights["model.layers.0.mlp.up_proj.weight"]
    parameter = torch.nn.Parameter(old.float())
    parameter.grad = gradient.clone()
    torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.01).step()
    assert torch.equal(parameter.detach(), value)
    assert float((value.bfloat16() == old).float().mean()) > 0.5  # which bfloat16 would have lost
    moments = tensors(run, site)
    assert {name.rpartition(".")[2] for name in moments} == {"weight", "exp_avg", "exp_avg_sq"}
    assert torch.allclose(moments[f"{site}.exp_avg"], 0.1 * gradient, rtol=1e-5)


@pytest.mark.whole
@pytest.mark.slow
def test_a_policy_is_options(step, tmp_path):
    """A framework's file gives the options of a step, and is recorded with them."""
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
        )
    )
    run = step("a", optimizer="adamw", precision_policy=str(path), loss_scale=8.0)
    training = run.manifest.training
    assert (training.reduce_dtype, training.accumulate_dtype) == ("bfloat16", "bfloat16")
    assert (training.main_weights, training.clip_grad_norm, training.loss_scale) == (True, 0.5, 8.0)
    assert training.precision_policy.startswith("DeepSpeed: bf16.enabled")
    again = step("b", like=run).manifest.training
    assert again == training
    wide = "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)"
    other = step("c", like=run, precision_policy=wide, moments_dtype="bf16").manifest.training
    assert other.moments_dtype == "bfloat16"
    assert (other.reduce_dtype, other.accumulate_dtype) == ("float32", "float32")


@pytest.mark.parametrize("other", [{"batch": True}, {"attn_implementation": "sdpa"}])
def test_a_healthy_pair_is_within_rounding(other, step, tmp_path):
    """Sums and sends in bfloat16 on both sides are no difference, whatever is recorded in."""
    how = (
        {"reduce_dtype": "bfloat16", "accumulate_dtype": "float32"}
        if "batch" not in other
        else {"accumulate_dtype": "bfloat16"}
    )
    a = step("a", dtype="float32", optimizer="adamw", **how)
    b = step("b", like=a, **other)
    truth = divergence.truth(a, out=tmp_path / "t")
    assert divergence.compare(a, b, truth=truth).verdict.kind in ("within_floor", "identical")


@pytest.mark.slow
def test_main_weights_and_their_truth(step, tmp_path):
    """A step with float32 copies has a truth in float64."""
    a = step("a", optimizer="adamw", main_weights=True, accumulate_dtype="float32")
    b = step("b", like=a, attn_implementation="sdpa")
    truth = divergence.truth(a, out=tmp_path / "t")
    assert divergence.compare(a, b, truth=truth).verdict.kind == "within_floor"
    assert truth.manifest.training.precision.parameters == "float64"


@pytest.mark.slow
def test_a_reduction_in_fewer_bits_is_named_with_its_cost(step, tmp_path):
    """As what B does, with how far it is off."""
    a = step("a", dtype="float32", reduce_dtype="float32")
    b = step("b", like=a, reduce_dtype="bfloat16")
    truth = divergence.truth(a, out=tmp_path / "t")
    verdict = divergence.compare(a, b, truth=truth).verdict
    assert verdict.side == "candidate"
    first = next(one.text for one in verdict.evidence if "reduces gradients" in one.text)
    assert first.startswith("B reduces gradients among ranks in bfloat16, A in float32")
    assert "off the truth by A" in first


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_what_is_below_practice_is_named(optimizer, step):
    """Sums of gradients in bfloat16, and weights without float32 copies."""
    audit = audit_runs(step("a", optimizer=optimizer))
    said = [finding.text for finding in audit.findings]
    assert said[0].startswith("the run adds up micro-batches' gradients in bfloat16; expected")
    assert any("without float32 copies" in text for text in said) == (optimizer is not None)
    assert not audit_runs(step("b", dtype="float32", optimizer=optimizer)).findings


@pytest.mark.slow
def test_two_runs_alike_are_named_together(step):
    """What one of them alone does is named by its side."""
    a = step("a", optimizer="adamw")
    audit = audit_runs(a, step("b", like=a))
    assert {finding.text.partition(" ")[0] for finding in audit.findings} == {"both"}
    other = step("c", like=a, main_weights=True)
    (lost,) = [f.text for f in audit_runs(a, other).findings if f.part == "main weights"]
    assert lost.startswith("A steps the bfloat16 weights themselves, without float32 copies (B has")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"main_weights": True}, "--main-weights needs --optimizer-step"),
        ({"accumulate_dtype": "float8_e4m3fn"}, "float8_e4m3fn: one of float32, bfloat16, float16"),
        ({"train": None, "precision_policy": "x"}, "--precision-policy needs --train"),
    ],
)
def test_refused(options, words, step):
    """Options that contradict one another are refused."""
    with pytest.raises(UsageError, match=words):
        step("a", **options)


def test_the_policy_of_a_model_that_fsdp_divides_is_read_from_it():
    """What FSDP computes and sends in stands in the model, whoever divided it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = torch.nn.Linear(2, 2)
    model._get_fsdp_state = lambda: SimpleNamespace(_mp_policy=policy)
    known = precision_of(model, Training(train=True), [("", "weight", model.weight)], None)
    assert (known.parameters, known.reduction) == ("bfloat16", "float32")
    plain = precision_of(torch.nn.Linear(2, 2), Training(train=True), [], None)
    assert (plain.parameters, plain.reduction, plain.gradients) == ("float32", None, None)
