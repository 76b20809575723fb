"""The ends: between blocks, before and behind the head, integers, sampling, the free run."""

from dataclasses import replace

import msgspec
import pytest
import torch

import divergence.recording.engines.sessions as capture_api
from divergence import RecordOptions, Run, capture, check, compare
from divergence import truth as make_truth
from divergence.comparison.align import logits_row
from divergence.comparison.api import measure_runs, report_on
from divergence.comparison.preflight import preflight
from divergence.facts import worded
from divergence.numerics.arrays import wide

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Snow fell"]


@pytest.fixture
def run(shared_run):
    """``run(architecture, **capture options)`` → a run; equal arguments, one run."""

    def make(architecture="llama", **options):
        options = {"prompts": PROMPTS, "max_new_tokens": 2} | options
        return shared_run(architecture, model={"num_blocks": 4}, **options)

    return make


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """``changed(run, change, **options)`` → the run again with a model whose code is another:
    ``change(model)`` is called before any hook of the recorder is there, which sees the result."""
    count = 0

    def make(like, change, **options):
        nonlocal count
        count += 1
        load = capture_api.load_model

        def loaded(*args, **kwargs):
            found = load(*args, **kwargs)
            change(found.module)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(capture_api, "load_model", loaded)
            return capture(like=like, out=tmp_path / f"run-{count}", **options)

    return make


def noise(tensor, size):
    shape = tuple(tensor.shape)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return tensor + (size * tensor.float().pow(2).mean().sqrt() * made).to(tensor.dtype)


def before(path, change):
    """The first tensor argument of a module is changed by whoever calls it."""

    def hook(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: change(kwargs[name])}

    return lambda model: model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)


def given(path, name, change):
    """An argument that a module is given by name is changed on its way."""

    def hook(module, args, kwargs):
        value = kwargs.get(name)
        return None if value is None else (args, kwargs | {name: change(value)})

    def hooked(model):
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    return hooked


def said(report):
    return " | ".join(fact.text for fact in report.verdict.evidence)


# --- between modules ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "path", "source"),
    [
        ("llama", "model.layers.2", "model.layers.1:out"),
        ("llama", "model.layers.0", "model.embed_tokens:out"),
        ("llama", "model.norm", "model.layers.3:out"),
        ("llama", "lm_head", "model.norm:out"),
        ("gpt2", "transformer.ln_f", "transformer.h.3:out"),
        ("gpt2", "lm_head", "transformer.ln_f:out"),
        ("t5", "encoder.final_layer_norm", "encoder.block.3:out"),
        ("t5", "decoder.block.2", "decoder.block.1:out"),
        ("t5", "decoder.final_layer_norm", "decoder.block.3:out"),
        ("mamba", "backbone.norm_f", "backbone.layers.3:out"),
        ("bert", "cls", "bert.encoder.layer.3:out"),
        ("gemma3", "model.norm", "model.layers.3:out"),
    ],
)
def test_a_change_between_modules_is_localized(architecture, path, source, run, changed):
    """Anchored inputs hide it in every block; what the one side changes on its way is measured."""
    good = run(architecture)
    bad = changed(good, before(path, lambda x: noise(x, 0.1)))
    assert "anchored" in bad.manifest.plan.passes
    result = check(good, bad)
    verdict = result.report.verdict
    assert not result.passed
    assert (verdict.kind, verdict.confidence, verdict.side) == ("localized", "high", None)
    assert verdict.onset.site == f"{path}:in"
    assert f"between {source} and {path}:in" in verdict.summary
    assert "B changes it by" in said(result.report)
    back = compare(bad, good).verdict
    assert back.onset.site == f"{path}:in"


@pytest.mark.parametrize("site", ["model.norm:in", "lm_head:in", "model.layers.2:in"])
@pytest.mark.parametrize("anchor", [True, False])
def test_noise_that_drowns_the_logits_never_passes(site, anchor, run, tmp_path):
    """Ten times the tensor's own size: found with an anchored pass and without one."""
    good = run()
    bad = capture(
        like=good,
        out=tmp_path / "bad",
        recording=RecordOptions(anchor=anchor),
        plants=[f"{site}=noise:10"],
    )
    result = check(good, bad)
    assert not result.passed
    verdict = result.report.verdict
    assert verdict.kind == "localized"
    if not anchor:
        assert verdict.onset.site == site
    assert not any(flip.judgement == "tie" for flip in result.report.tokens.differences)


def test_two_percent_between_blocks(run, changed):
    """Below the floor of what blocks make, and more than casts do."""
    good = run()
    verdict = compare(good, changed(good, before("model.layers.2", lambda x: x * 1.02))).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.2:in")


@pytest.mark.slow
def test_a_cast_between_blocks_is_no_fault(run, changed):
    """One side rounds the stream to another 16-bit format on its way: a note, no verdict."""
    good = run()
    report = compare(good, changed(good, before("model.norm", lambda x: x.half().bfloat16())))
    assert report.verdict.kind in ("identical", "within_floor")
    last_bit_cut = before("model.norm", lambda x: (x.view(torch.int16) & ~1).view(x.dtype))
    report = compare(good, changed(good, last_bit_cut))
    assert report.verdict.kind == "within_floor", report.verdict
    assert any("model.norm:in B changes" in note for note in report.notes)


def test_tables_changed_on_their_way_to_a_block(run, changed):
    """What comes in beside the stream is a seam of its own."""
    good = run()
    first = given("model.layers.1", "position_embeddings", lambda x: (noise(x[0], 0.2), x[1]))
    verdict = compare(good, changed(good, first)).verdict
    assert verdict.kind == "localized"
    assert verdict.onset.site == "model.layers.1:in.position_embeddings.0"
    assert "model.rotary_emb:out" in verdict.summary


@pytest.mark.slow
def test_a_bias_changed_on_its_way_to_a_block(run, changed):
    """T5 makes its position bias in the first block, and the others are given it."""
    good = run("t5")

    def change(model):
        def hook(module, args, kwargs):
            place = next(n for n, x in enumerate(args) if n and torch.is_tensor(x) and x.ndim == 4)
            return (*args[:place], noise(args[place], 0.5), *args[place + 1 :]), kwargs

        model.encoder.block[2].register_forward_pre_hook(hook, with_kwargs=True)

    verdict = compare(good, changed(good, change)).verdict
    assert verdict.kind == "localized"
    assert verdict.onset.site == "encoder.block.2:in.position_bias"


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sketch", "stats"])
def test_noise_before_the_norm_where_no_bytes_are_kept(store, run, tmp_path):
    """What was estimated grows beyond what came in; of statistics alone nothing passes either."""
    good = run(store=store)
    bad = capture(
        like=good,
        out=tmp_path / "bad",
        recording=RecordOptions(anchor=False),
        plants=["model.norm:in=noise:1"],
    )
    result = check(good, bad)
    assert not result.passed
    if store == "sketch":
        assert result.report.verdict.onset.site == "model.norm:in", result.report.verdict


def test_a_block_that_is_passed_by(run, changed):
    """One side gives a block the output of an earlier one: other wiring, no number is off."""
    good = run()

    def change(model):
        kept = []
        model.model.layers[0].register_forward_hook(lambda m, a, out: kept.append(out) and None)
        model.model.layers[2].register_forward_pre_hook(
            lambda m, args, kwargs: ((kept[-1], *args[1:]), kwargs), with_kwargs=True
        )

    verdict = compare(good, changed(good, change)).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.2:in")


def test_something_between_all_blocks_is_systematic(run, changed):
    """A loop that adds something after each block is not one block's fault."""
    good = run()

    def change(model):
        for layer in model.model.layers[1:]:
            layer.register_forward_pre_hook(
                lambda m, args, kwargs: ((noise(args[0], 0.05), *args[1:]), kwargs),
                with_kwargs=True,
            )

    verdict = compare(good, changed(good, change)).verdict
    assert verdict.kind == "systematic"
    assert "at 3 of 4 places" in verdict.summary


@pytest.mark.parametrize(
    "change",
    [
        lambda out: noise(out, 0.1),
        lambda out: torch.tanh(out / 3) * 3,
        lambda out: out * 0.5,
    ],
    ids=["noise", "softcapping", "a scale"],
)
def test_logits_changed_behind_the_head(change, run, changed):
    """Softcapping, a scale, noise: between the head and what the model returns."""
    good = run()

    def patched(model):
        def hook(module, args, output):
            output.logits = change(output.logits)
            return output

        model.register_forward_hook(hook)

    bad = changed(good, patched)
    result = check(good, bad)
    assert not result.passed
    assert result.report.verdict.onset.site == ".:out", result.report.verdict


@pytest.mark.slow
def test_a_fault_in_the_head_or_the_embedding_is_made_there(run, changed):
    """Where a module itself is off, it is named, not what lies beside it."""
    good = run()
    for path in ("lm_head", "model.norm", "model.embed_tokens"):
        bad = changed(
            good,
            lambda model, path=path: model.get_submodule(path).register_forward_hook(
                lambda m, args, out: noise(out, 0.1)
            ),
        )
        verdict = compare(good, bad).verdict
        assert (verdict.kind, verdict.onset.site) == ("localized", f"{path}:out")


@pytest.mark.slow
def test_a_truth_tells_who_changes_it(run, changed, tmp_path):
    """The truth hands the stream on as the reference does, or as the candidate does."""
    good = run()
    bad = changed(good, before("model.norm", lambda x: noise(x, 0.1)))
    truth = make_truth(good, out=tmp_path / "truth")
    assert compare(good, bad, truth=truth).verdict.side == "candidate"
    assert compare(bad, good, truth=truth).verdict.side == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5", "gemma3", "qwen3-moe"])
def test_healthy_ends_are_quiet(architecture, run, answer):
    """Another attention kernel changes nothing between modules; no note, no evidence."""
    good = run(architecture)
    report = answer(good, attn_implementation="sdpa")
    assert report.verdict.kind == "within_floor", report.verdict
    assert not any("between" in note for note in report.notes)


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_a_token_that_is_not_its_logits_largest(both, run, tmp_path):
    """A choice follows from its own logits exactly; where it does not, sampling is at fault."""
    good = run()
    bad = Run.open(capture(like=good, out=tmp_path / "bad").path)
    sample = bad.manifest.tokens.samples[1]
    sample.chosen_ids[1] = (sample.chosen_ids[1] + 1) % 512
    verdict = compare(bad if both else good, bad).verdict
    assert (verdict.kind, verdict.confidence) == ("localized", "high")
    assert verdict.side == ("both" if both else "candidate")
    assert (verdict.onset.sample, verdict.onset.step) == (1, 1)
    assert "sampling, not the model" in verdict.summary


@pytest.mark.parametrize(("gap", "is_fault"), [(0.0, False), (2**-7, True)])
def test_equal_logits_may_be_chosen_either_way(run, monkeypatch, gap, is_fault):
    """Ties are ties at exact equality."""
    good, other = Run.open(run().path), Run.open(run().path)
    sample = good.manifest.tokens.samples[0]
    second = (sample.chosen_ids[0] + 1) % 512
    other.manifest.tokens.samples[0].chosen_ids[0] = second

    def row_of(run, sample, step):
        row = logits_row(run, sample, step)
        if (sample, step) == (0, 0):
            row = wide(row).copy()
            row[second] = row.max() - gap * abs(row.max())
        return row

    monkeypatch.setattr("divergence.analyses.ends.find.logits_row", row_of)
    verdict = compare(good, other).verdict
    assert ("sampling, not the model" in verdict.summary) == is_fault


# --- integers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_positions_off_by_one(run, changed):
    """Position numbers do not round: they are the verdict, not the tables that follow."""
    good = run(sites=["modules"])
    later = given("model.rotary_emb", "position_ids", lambda ids: ids + 1)
    verdict = compare(good, changed(good, later)).verdict
    assert (verdict.kind, verdict.side) == ("localized", None)
    assert verdict.onset.site == "model.rotary_emb:in.position_ids"
    assert "integers do not round" in verdict.summary


@pytest.mark.slow
def test_a_mask_of_all_true(run, changed, tmp_path):
    """A mask that lets everything be seen is found itself, with the numbers it differs at."""
    good = run(sites=["modules"], batch=True, attn_implementation="sdpa")

    bad = changed(good, given("model.layers.1", "attention_mask", torch.ones_like))
    verdict = compare(good, bad).verdict
    assert verdict.kind == "localized"
    assert verdict.onset.site == "model.layers.1:in.attention_mask"
    truth = make_truth(good, out=tmp_path / "truth")
    assert compare(good, bad, truth=truth).verdict.side == "candidate"


@pytest.mark.slow
def test_masks_of_padding_may_differ(run, changed):
    """What a row of padding looks at is nobody's business."""
    good = run(sites=["modules"], batch=True, attn_implementation="sdpa")

    def turned(mask):
        if mask.shape[-2] > 1:
            mask = mask.clone()
            mask[1, :, 0] = ~mask[1, :, 0]
        return mask

    assert good.manifest.tokens.samples[1].num_left_pad > 0
    assert compare(
        good, changed(good, given("model.layers.1", "attention_mask", turned))
    ).verdict.kind in ("identical", "within_floor")


@pytest.mark.slow
def test_experts_that_do_not_follow_from_their_scores(run, changed):
    """A router that sends tokens elsewhere than its own scores say is wrong on that side."""
    good = run("qwen3-moe", sites=["modules"])

    def change(model):
        model.model.layers[1].mlp.gate.register_forward_hook(
            lambda m, args, out: (*out[:2], (out[2] + 1) % out[0].shape[-1])
        )

    verdict = compare(good, changed(good, change)).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate")
    assert verdict.onset.site == "model.layers.1.mlp.gate:out.2"
    assert "its own scores" in verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3-moe"])
def test_experts_that_rounding_chooses_are_no_fault(architecture, batch, run, answer):
    """Healthy routers flip: their choices follow from their scores on both sides. Padding goes to
    any expert."""
    good = run(architecture, sites=["modules"], batch=batch)
    report = answer(good, attn_implementation="sdpa")
    assert report.verdict.kind == "within_floor", report.verdict


# --- the free run ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_one_late_step_does_in_the_free_run_alone(run, changed):
    """The anchored pass is healthy, the prefill is, one decode step of one prompt is not."""
    good = run(max_new_tokens=3)
    calls = []

    def change(model):
        def hook(module, args, output):
            calls.append(1)
            # the free pass comes first: three forwards of the first prompt, three of the second
            return noise(output, 2.0) if len(calls) == 6 else output

        model.model.layers[1].mlp.register_forward_hook(hook)

    result = check(good, changed(good, change))
    verdict = result.report.verdict
    assert not result.passed
    assert verdict.kind == "drift"
    assert any("prompt 1, step 2" in fact.text for fact in verdict.evidence)
    onset = verdict.onset  # all before it is equal, and so is it where it is given equal inputs
    assert (onset.site, onset.sample, onset.step) == ("model.layers.1:out", 1, 2)
    assert "the free runs part at model.layers.1:out, prompt 1, step 2" in verdict.summary


@pytest.fixture
def reported():
    """``reported(a, b, change, **changes)``: the report where each measured site is
    ``change(site)``, which may be None."""

    def report(a, b, change, **changes):
        measured = measure_runs(a, b, preflight(a, b))
        sites = [site for site in map(change, measured.sites) if site is not None]
        return worded(report_on(replace(measured, sites=sites, **changes)))

    return report


@pytest.mark.parametrize("routed", [False, True])
def test_drift_behind_the_blocks(run, reported, routed):
    """The logits are held against what the blocks and what follows them may make together; where
    experts are chosen one token may have met any of them."""
    off = (".:out", 1, 2)

    def change(site):
        if site.pass_ != "free":
            return None
        far = (site.site, site.sample, site.step) == off
        return msgspec.structs.replace(
            site, floor=1e-3, identical=False, token_rel_l2_median=0.5 if far else 1e-3
        )

    a = run(max_new_tokens=3)
    modules = (
        frozenset({f"model.layers.{number}" for number in range(4)}) if routed else frozenset()
    )
    report = reported(a, a, change, routed=modules, experts=routed)
    drifts = [finding for finding in report.findings if finding.claim == "drift"]
    if routed:
        assert not drifts
        return
    (drift,) = drifts
    assert "at .:out" in " ".join(fact.text for fact in drift.headline)
    assert "prompt 1, step 2" in " ".join(fact.text for fact in drift.evidence)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("all", "within_floor"),
        ("no anchored prefill", "drift"),
        ("a block beyond it in the free run", "drift"),
    ],
)
def test_what_the_model_makes_of_rounding_is_no_fault(run, reported, tmp_path, what, kind):
    """A free run ends far off, though every block was given equal inputs in every forward and only
    rounds: the model enlarges it, which is said. Where a forward was not seen so, or one block is
    off in the free run, it is a drift."""
    good = run(max_new_tokens=3)
    other = capture(like=good, out=tmp_path / "b", attn_implementation="sdpa")
    last = ("free", "model.layers.3:out", 1, 2)

    def change(site):
        if what == "no anchored prefill" and (site.pass_, site.step) == ("anchored", 0):
            return None
        if (site.pass_, site.site, site.sample, site.step) != last:
            return site
        off = what == "a block beyond it in the free run"
        ratio = 500.0 if off else site.ratio
        return msgspec.structs.replace(site, token_rel_l2_median=0.5, ratio=ratio)

    report = reported(good, other, change)
    assert "drift" in [finding.kind for finding in report.findings]
    assert report.verdict.kind == kind
    codes = [item.code for item in report.verdict.evidence]
    assert ("enlarged" in codes) is (kind == "within_floor")
    if kind == "within_floor":
        assert report.verdict.confidence == "medium"
