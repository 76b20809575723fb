"""Runs that are narrowed, batched or partly anchored: judged rightly, or said to be less."""

import json
import shutil

import pytest
import torch

from divergence import BatchOptions, RecordOptions, capture, compare
from divergence.errors import RunFormatError

LONG = "One two three four five six seven eight nine ten eleven."


FLOAT32 = {"dtype": "float32"}


@pytest.fixture
def llama(tiny_model):
    return str(tiny_model("llama", **FLOAT32))


@pytest.fixture
def short(shared_run):
    """A run of one token, which nobody writes into."""
    return shared_run(model=FLOAT32, max_new_tokens=1)


def test_steps_that_no_anchor_reached_are_judged_and_named(llama, answer, tmp_path):
    """With a gap in the recorded steps the cache is no longer anchored; later steps are judged
    from the free run, and the report says so."""
    options = {"prompts": [LONG], "recording": RecordOptions(steps="0,2"), "max_new_tokens": 4}
    a = capture(llama, out=tmp_path / "a", **options)
    healthy = answer(a, attn_implementation="sdpa")
    assert healthy.verdict.kind == "within_floor"
    assert healthy.verdict.confidence == "low"
    assert any("step 2" in fact.text for fact in healthy.verdict.evidence)


@pytest.mark.slow
def test_a_reference_of_zeros_is_the_onset(llama, answer, tmp_path):
    """Where only the candidate has numbers at all, that site is blamed and not the next one."""
    site = "model.layers.1.self_attn.o_proj:out"
    options = {"sites": ["modules"], "max_new_tokens": 1, "plants": [f"{site}=zero"]}
    report = answer(capture(llama, out=tmp_path / "a", **options))
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.site == site
    assert report.to_json()


@pytest.mark.slow
def test_weights_kept_in_float32_are_the_same_weights(shared_run, answer):
    """transformers keeps some of T5 in float32 when it loads float16: no other weights."""
    report = answer(shared_run("t5", model=FLOAT32, max_new_tokens=2), dtype="float16")
    line = next(line for line in report.preflight if line.check == "weights")
    assert (line.status, report.verdict.kind) == ("same", "within_floor")


def test_pads_of_narrowed_batches_are_masked(llama, answer, tmp_path):
    """--positions counts from the padded start; pads are still no tokens."""
    options = {"prompts": [LONG, "Short."], "positions": "0-3", "max_new_tokens": 1}
    a = capture(llama, out=tmp_path / "a", batching=BatchOptions(batch=True), **options)
    report = answer(a, attn_implementation="sdpa")
    assert report.verdict.kind in ("identical", "within_floor")
    masked = [site.num_masked for site in report.sites if site.site == "model.layers.0:out"]
    assert all(masked)


def test_narrowed_batches_and_single_prompts_do_not_mix_positions(llama, tmp_path):
    """Token 0 of a padded row is no token 0 of the prompt: skipped, and said why."""
    options = {"prompts": [LONG, "Short."], "positions": "0-3", "max_new_tokens": 1}
    a = capture(llama, out=tmp_path / "a", **options)
    b = capture(llama, out=tmp_path / "b", batching=BatchOptions(batch=True), **options)
    report = compare(a, b)
    assert report.verdict.kind in ("identical", "within_floor")
    assert any("token positions differ" in item.reason for item in report.coverage.unmatched)


def test_a_run_of_some_blocks_cannot_anchor(llama, tmp_path):
    """Every block's input is needed; what is missing is named."""
    notes = []
    a = capture(llama, out=tmp_path / "a", sites=["model.layers.1"], max_new_tokens=1)

    def progress(event, done, total, detail):
        if event == "note":
            notes.append(detail)

    b = capture(like=a, out=tmp_path / "b", progress=progress)
    assert b.manifest.plan.passes == ["free"]
    assert "model.layers.0" in notes[0]


def test_printed_commands_repeat_what_makes_the_candidate_special(llama, short, tmp_path):
    """A candidate of another dtype, attention and fault is captured like that again."""
    options = {"attn_implementation": "sdpa", "plants": ["model.layers.1:out=scale:1.5"]}
    b = capture(llama, out=tmp_path / "b", max_new_tokens=1, **options)
    command = compare(short, b).verdict.next[0]
    assert "--attn-implementation sdpa" in command
    assert "--plant model.layers.1:out=scale:1.5" in command


@pytest.mark.slow
def test_choices_end_where_a_sample_ends(tiny_model, shared_run, answer, tmp_path):
    """In a batch a finished sample is fed padding: those are no choices to agree on."""
    model, options = tiny_model("llama", **FLOAT32), {"batching": BatchOptions(batch=True)}
    options |= {"prompts": [LONG, "Short."], "max_new_tokens": 6}
    first = shared_run(model=FLOAT32, **options)
    ends = [sample.generated_ids[0] for sample in first.manifest.tokens.samples]
    if ends[0] == ends[1]:
        pytest.skip("both samples begin alike")
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((copy / name).read_text())
        settings["eos_token_id"] = ends[1]
        (copy / name).write_text(json.dumps(settings))
    run = capture(str(copy), out=tmp_path / "b", **options)
    one, two = run.manifest.tokens.samples
    assert len(two.chosen_ids) == 1
    assert len(one.generated_ids) == len(two.generated_ids)
    assert answer(run).verdict.kind == "identical"


def test_precision_switches_are_as_before(llama, tmp_path):
    """Also those that a general switch answers for while it is set."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no general switch")
    names = ("matmul", "conv", "rnn")
    before = [getattr(torch.backends.mkldnn, name).fp32_precision for name in names]
    run = capture(llama, out=tmp_path / "a", max_new_tokens=1)
    assert [getattr(torch.backends.mkldnn, name).fp32_precision for name in names] == before
    found = {switch.name: switch.found for switch in run.manifest.settings.switches}
    assert found["torch.backends.mkldnn.matmul.fp32_precision"] == str(before[0]).lower()


@pytest.mark.parametrize(
    "plant",
    [
        "model.embed_tokens:out=noise:0.02",
        "model.norm:out=scale:1.02",
        "lm_head:out=scale:1.02",
        "lm_head:out=noise:0.02",
    ],
)
def test_trunk_faults_stand_out_where_the_blocks_agree(plant, shared_run, answer):
    """A site without siblings is held to what the blocks show of the two sides' kernels."""
    a = shared_run(model={"dtype": "bfloat16"}, prompts=[LONG], max_new_tokens=2)
    report = answer(a, plants=[plant])
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.site == plant.partition("=")[0]


def test_a_forced_comparison_says_so_first(short, tiny_model, tmp_path):
    """Other weights explain everything: no confident diagnosis beside them."""
    notes = []

    def progress(event, done, total, detail):
        if event == "note":
            notes.append(detail)

    other = tiny_model("llama", dtype="float32", seed=1)
    b = capture(str(other), like=short, out=tmp_path / "b", progress=progress)
    assert "not the weights of the recorded run" in notes[0]
    assert compare(short, b).verdict.kind == "incomparable"
    verdict = compare(short, b, force=True).verdict
    assert verdict.confidence == "low"
    assert "by force: other weights" in verdict.summary


def test_damaged_bytes_are_not_equal_by_their_records(short, tmp_path):
    """Two runs with the same recorded checksums, one with a flipped byte: an error, no pass."""
    shutil.copytree(short.path, tmp_path / "b")
    assert all(site.identical for site in compare(short.path, tmp_path / "b").sites)
    (shard,) = (tmp_path / "b" / "tensors").iterdir()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(RunFormatError, match="wrong checksum"):
        compare(short.path, tmp_path / "b")


def test_within_floor_names_no_side(short, answer):
    """A fault under the floor looks like rounding, so neither run is declared right."""
    verdict = answer(short, attn_implementation="sdpa").verdict
    assert (verdict.kind, verdict.side) == ("within_floor", None)
