"""capture --train: gradients as torch gives them, and both passes of a step compared."""

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import divergence
from divergence import TrainOptions
from divergence.domains.training.recording.optimizer import Stepping
from divergence.domains.training.recording.step import parameters_of
from divergence.errors import PlantError, UsageError
from divergence.run.site import BACKWARD, OPTIMIZER, join_site

IDS = [[5, 9, 33, 21, 77, 100, 43, 12, 6, 91, 18], [45, 99, 33, 21, 17, 20, 43, 112, 66]]
ARCHITECTURES = ["llama", "gpt2", "qwen3-moe"]


@pytest.fixture(scope="module")
def step(shared_run):
    """``step("llama", dtype="bfloat16", autocast=...)`` → a run; the same arguments, the same."""

    def make(architecture, *, like=None, **options):
        fresh = {} if like else {"train": True, "prompts": IDS, "model": {"dtype": "float32"}}
        return shared_run(architecture, like=like, **{"probe": False} | fresh | options)

    return make


@pytest.fixture
def truth(shared_truth):
    return shared_truth


def gradients(folder, dtype=torch.float32):
    """As a plain loop of torch makes them, without hooks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    count = sum(len(ids) - 1 for ids in IDS)
    for ids in IDS:
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
        (loss / count).backward()
    return {
        join_site(path + BACKWARD, f"out.{leaf}"): parameter.grad
        for path, leaf, parameter in parameters_of(model)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sites", ["blocks", "modules"])
def test_hooks_change_no_bit(architecture, sites, step, tiny_model):
    """Recorded gradients are those of a step without hooks."""
    run = step(architecture, sites=sites)
    found = gradients(tiny_model(architecture, dtype="float32"))
    assert len(found) > 10
    for site, gradient in found.items():
        record = run.find(("free", 0, 0, site))
        if gradient is None:
            assert record is None
        else:
            assert torch.equal(run.read(record), gradient), site


def test_the_loss_is_the_mean_over_all_tokens(step, tiny_model):
    """Of all prompts together, as transformers has it."""
    run = step("llama")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama", dtype="float32"), dtype=torch.float32
    )
    sums = []
    for ids in IDS:
        tokens = torch.tensor([ids])
        sums.append(float(model(input_ids=tokens, labels=tokens).loss.detach()) * (len(ids) - 1))
    found = [float(run.read(run.find(("free", n, 0, "loss:out")))) for n in range(2)]
    assert sum(found) == pytest.approx(sum(sums) / sum(len(ids) - 1 for ids in IDS), rel=1e-5)


def test_a_backward_is_recorded_in_its_own_order(step):
    """From the last block to the first, without what does nothing."""
    sites = [r.site for r in step("llama").records if r.sample == 0 and BACKWARD in r.site]
    blocks = [site for site in sites if site.startswith("model.layers") and ":out." not in site]
    assert blocks[:4] == [
        "model.layers.2#backward:in",
        "model.layers.2#backward:out",
        "model.layers.1#backward:in",
        "model.layers.1#backward:out",
    ]
    assert "model.rotary_emb#backward:out" not in sites  # it does nothing with what it is given


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES[1:])],
)
@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "sdpa"},
        {"batch": True},
        {"autocast": "bfloat16"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_healthy_pair_is_within_rounding(architecture, change, step, truth):
    """Other kernels, batches and options of a step raise no alarm."""
    a = step(architecture)
    b = step(architecture, like=a, **change)
    for right in (None, truth(a)):
        report = divergence.compare(a, b, truth=right)
        assert report.verdict.kind == "within_floor", report.verdict.summary
    judged = [site for site in report.sites if site.phase == "backward" and site.limit]
    routed = architecture == "qwen3-moe" and "batch" in change  # other rows for its experts
    assert len(judged) > (5 if routed else 20)


@pytest.mark.slow
def test_one_batch_gets_the_recorded_gradients(step, truth):
    """Of all prompts together: an update is compared as made from the same gradients, though the
    prompts' own rows lie in another batch."""
    a = step("llama", optimizer="adamw")
    b = step("llama", like=a, batch=True, attn_implementation="sdpa")
    site = join_site("lm_head" + OPTIMIZER, "in.weight")
    given = a.read(a.find(("free", 0, 0, site)))
    assert torch.equal(b.read(b.find(("anchored", 0, 0, site))), given)
    assert divergence.compare(a, b, truth=truth(a)).verdict.kind == "within_floor"


@pytest.mark.slow
def test_checkpointing_changes_no_bit(step):
    """And is told as a setting that differs."""
    a = step("llama", optimizer="adamw")
    b = step("llama", like=a, gradient_checkpointing=True)
    report = divergence.compare(a, b)
    assert report.verdict.kind == "identical"
    assert any(line.check == "gradient checkpointing" for line in report.preflight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "site",
    """
        model.layers.1#backward:out lm_head#backward:out model.norm#backward:out
        model.layers.2.self_attn.q_proj#backward:out.weight model.layers.0:out
    """.split(),
)
def test_a_planted_fault_is_named(site, step, truth):
    """At its site, by B, with and without a truth."""
    a = step("llama")
    b = step("llama", like=a, attn_implementation="sdpa", plants=[f"{site}=scale:1.01"])
    verdict = divergence.compare(a, b, truth=truth(a)).verdict
    assert (verdict.kind, verdict.side, verdict.onset.site) == ("localized", "candidate", site)
    assert divergence.compare(a, b).verdict.onset.site == site


@pytest.mark.slow
def test_a_fault_beside_experts_is_seen_from_either_side(step):
    """Which experts were chosen is looked up in each side's own pass."""
    site = "model.layers.1.self_attn.q_proj#backward:out.weight"
    a = step("qwen3-moe")
    b = step("qwen3-moe", like=a, attn_implementation="sdpa", plants=[f"{site}=scale:1.01"])
    for runs in ((a, b), (b, a)):
        verdict = divergence.compare(*runs).verdict
        assert (verdict.kind, verdict.onset and verdict.onset.site) == ("localized", site)


@pytest.mark.slow
@pytest.mark.whole
def test_a_fault_that_does_not_repeat_is_no_rounding(step, monkeypatch):
    """A bucket that is stale in the free pass alone, as a race makes it: the anchored pass is
    right, and the free pass is not explained by it."""
    a = step("llama")
    reduce, calls = Stepping.reduce, []

    def racing(self, named):
        held = reduce(self, named)
        calls.append(self)
        if len(calls) == 1:
            held[-1][-1].grad *= 0.9
        return held

    monkeypatch.setattr(Stepping, "reduce", racing)
    b = step("llama", like=a, attn_implementation="sdpa", seed=1)
    assert len(calls) == 2
    for runs in ((a, b), (b, a)):
        verdict = divergence.compare(*runs).verdict
        assert (verdict.kind, verdict.onset.site) == ("localized", "lm_head#backward:out.weight")
        assert verdict.onset.pass_ == "free" and verdict.summary.endswith("it does not repeat")
        assert verdict.confidence != "high" and verdict.side is None


@pytest.mark.slow
def test_an_optimizers_step(step, truth, tiny_model):
    """The new values are those of torch; clipping is seen in what the optimizer gets."""
    options = {"optimizer": "adamw", "clip_grad_norm": 0.5, "loss_scale": 1024.0}
    a = step("llama", **options)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama", dtype="float32"), dtype=torch.float32
    )
    found = gradients(tiny_model("llama", dtype="float32"))
    norm = torch.stack([one.norm() for one in found.values() if one is not None]).norm()
    told = a.read(a.find(("free", 0, 0, f".{OPTIMIZER}:in.grad_norm")))
    assert float(told) == pytest.approx(float(norm), rel=1e-5)
    for path, leaf, parameter in parameters_of(model):
        parameter.grad = found[join_site(path + BACKWARD, f"out.{leaf}")]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3).step()
    for path, leaf, parameter in parameters_of(model):
        record = a.find(("free", 0, 0, join_site(path + OPTIMIZER, f"out.{leaf}")))
        torch.testing.assert_close(a.read(record), parameter.detach(), atol=2e-5, rtol=0)
    again = step("llama", like=a, attn_implementation="sdpa")
    verdict = divergence.compare(a, again, truth=truth(a)).verdict
    assert verdict.kind == "within_floor", verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("side", ["a", "b"])
def test_another_loss_scale_is_no_fault(side, step):
    """Gradients on their way are of another loss and left out; what parameters get is compared."""
    a = step("llama", optimizer="adamw", **({"loss_scale": 512.0} if side == "a" else {}))
    b = step("llama", like=a, attn_implementation="sdpa", loss_scale=64.0)
    report = divergence.compare(a, b)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    assert [line.status for line in report.preflight if line.check == "loss scale"] == ["differs"]
    compared = {site.site for site in report.sites if "#backward" in site.site}
    assert all("#backward:out." in site for site in compared) and len(compared) > 10


@pytest.mark.slow
def test_gates_that_rounding_opens_are_no_fault(step, tmp_path):
    """In bfloat16 the derivative of ReLU is another one for three gates in a thousand."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "ffn_dim": 192}
    config = OPTConfig(vocab_size=128, word_embed_proj_dim=96, max_position_embeddings=64, **sizes)
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    options = {"prompts": IDS, "train": True, "probe": False, "truth": "full"}
    a = divergence.capture(str(tmp_path / "model"), out=tmp_path / "a", **options)
    b = divergence.capture(like=a, out=tmp_path / "b", attn_implementation="sdpa", probe=False)
    verdict = divergence.compare(a, b).verdict
    assert verdict.kind == "within_floor", verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"learning_rate": 2e-3}, "learning rate"),
        ({"weight_decay": 0.1}, "weight decay"),
        ({"optimizer": "sgd"}, "optimizer"),
    ],
)
def test_another_optimizer_is_seen_and_said(change, line, step):
    """The onset is the optimizer, and the setting that differs is told."""
    a = step("llama", optimizer="adamw")
    report = divergence.compare(a, step("llama", like=a, **change))
    assert report.verdict.onset.phase == "optimizer"
    assert any(one.check == line and one.status == "differs" for one in report.preflight)


@pytest.mark.slow
def test_a_block_that_is_off_before_all_steps_are_is_named_too(step):
    """The optimizer's fault in all parameters does not hide that of one block's backward."""
    a = step("llama", optimizer="adamw")
    plant = "model.layers.1#backward:out=scale:1.1"
    verdict = divergence.compare(
        a, step("llama", like=a, learning_rate=2e-3, plants=[plant])
    ).verdict
    assert verdict.onset.phase == "optimizer"
    assert verdict.summary.endswith("; another in model.layers.1")


@pytest.mark.slow
def test_the_model_is_as_before(step, tiny_model):
    """A step is made of the free pass and of the anchored one, from the same weights."""
    a = step("llama", optimizer="sgd", learning_rate=0.1)
    b = step("llama", like=a)
    assert divergence.compare(a, b).verdict.kind == "identical"


@pytest.mark.slow
def test_settings_are_taken_from_the_recorded_run(step):
    """A repeated step has them all."""
    a = step("llama", optimizer="sgd", learning_rate=0.25, autocast="bfloat16")
    b = step("llama", like=a)
    assert msgspec.structs.asdict(b.manifest.training) == msgspec.structs.asdict(
        a.manifest.training
    )
    assert b.manifest.training.learning_rate == 0.25
    assert b.manifest.plan.passes == ["free", "anchored"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"autocast": "bfloat16", "train": None}, "--autocast needs --train"),
        ({"max_new_tokens": 4}, "--max-new-tokens with --train"),
        ({"optimizer": "lion"}, "no such optimizer"),
        ({"autocast": "float8"}, "bfloat16 or float16"),
        ({"prompts": [[5]]}, "nothing to predict"),
        ({"whole": True}, "--whole"),
    ],
)
def test_refused(options, words, llama, tmp_path):
    """Options that no step can follow are refused before anything is written."""
    given = {"train": True, "prompts": IDS, "probe": False} | options
    with pytest.raises(UsageError, match=words):
        divergence.capture(str(llama), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_fault_in_a_backward_that_is_not_made(llama, tmp_path):
    """A plant in a backward takes a training step."""
    with pytest.raises(PlantError, match="no module"):
        divergence.capture(
            str(llama),
            out=tmp_path / "run",
            prompts=IDS,
            probe=False,
            plants=["model.layers.1#backward:out=scale:2"],
        )


def test_an_encoder_is_refused(tiny_model, tmp_path):
    """A step takes a causal language model."""
    with pytest.raises(UsageError, match="causal language models"):
        divergence.capture(
            str(tiny_model("bert")),
            out=tmp_path / "run",
            prompts=IDS,
            training=TrainOptions(train=True),
        )


@pytest.mark.slow
@pytest.mark.whole
def test_gradients_reduced_as_ranks_would(step, truth):
    """In float32 an order is rounding; in bfloat16 all parameters' gradients are off, by the
    rounding of bfloat16, and nothing that blocks hand on is."""
    a = step("llama")
    tree = step("llama", like=a, reduce_dtype="float32", reduce_order="tree")
    verdict = divergence.compare(a, tree, truth=truth(a)).verdict
    assert verdict.kind in ("within_floor", "identical")
    coarse = step("llama", like=a, reduce_dtype="bfloat16")
    report = divergence.compare(a, coarse, truth=truth(a))
    assert (report.verdict.onset.phase, report.verdict.side) == ("backward", "candidate")
    assert any("not a kernel" in one.text for one in report.verdict.evidence)
    assert any(one.check == "reduce dtype" for one in report.preflight)
    off = [one.rel_l2 for one in report.sites if one.site.endswith("q_proj#backward:out.weight")]
    assert 5e-4 < max(off) < 1e-2


@pytest.mark.slow
@pytest.mark.whole
def test_one_factor_of_all_gradients_is_told(step, truth, monkeypatch):
    """Gradients that are halved everywhere are told by that factor."""
    a = step("llama")
    reduce = Stepping.reduce

    def halved(self, named):
        held = reduce(self, named)
        for *_, holder in held:
            holder.grad = holder.grad / 2
        return held

    monkeypatch.setattr(Stepping, "reduce", halved)
    b = step("llama", like=a, label="halved")
    monkeypatch.undo()
    verdict = divergence.compare(a, b, truth=truth(a)).verdict
    assert verdict.side == "candidate"
    assert any("0.5 × A's" in one.text for one in verdict.evidence)


@pytest.mark.slow
def test_what_a_block_hands_out_and_used_itself_has_no_gradient_from_outside(tmp_path):
    """Attention's weights: cut off and driven from outside, they would count twice."""
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=2, initializer_range=0.2)
    folder = tmp_path / "bloom"
    torch.manual_seed(0)
    BloomForCausalLM(config).save_pretrained(folder)
    step = {"train": True, "probe": False, "prompts": [[5, 9, 31, 7, 12, 40]]}
    a = divergence.capture(str(folder), out=tmp_path / "a", **step)
    b = divergence.capture(like=a, out=tmp_path / "b", probe=False)
    truth = divergence.truth(a, out=tmp_path / "truth")
    assert a.find(("free", 0, 0, "transformer.h.1:out.1")) is not None
    assert a.find(("free", 0, 0, "transformer.h.1#backward:in.1")) is None
    verdict = divergence.compare(a, b, truth=truth).verdict
    assert verdict.kind == "identical" and verdict.side == "neither", verdict.summary
