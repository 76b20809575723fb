"""--whole: all tokens once more in one forward, each block on the free pass's recorded rows."""

import json

import pytest
import torch

from divergence import capture, compare

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Snow"]
HEALTHY = ("identical", "within_floor")
CAUSAL = ("gpt2", "llama", "mamba", "qwen3-moe")


@pytest.fixture
def made(tiny_model, tmp_path):
    """``made(architecture, **options)`` → (the run, the warnings)."""

    def make(architecture, *, num_blocks=2, **options):
        notes = []
        options = {"prompts": PROMPTS, "max_new_tokens": 4, "whole": True} | options
        if "like" in options:
            model = None
            del options["prompts"], options["max_new_tokens"]
        else:
            model = str(tiny_model(architecture, dtype="float32", num_blocks=num_blocks))
        run = capture(
            model,
            out=tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            progress=lambda event, done, total, text: event == "note" and notes.append(text),
            **options,
        )
        return run, notes

    return make


def whole_records(run):
    return [record for record in run.records if record.pass_ == "whole"]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("architecture", CAUSAL)
def test_the_whole_pass_holds_the_rows_of_decoded_tokens(architecture, batch, made):
    """Step 0 alone, positions of what was fed to decoding, pads counted; logits as well."""
    run, notes = made(architecture, batch=batch)
    assert notes == []
    assert run.manifest.plan.passes == ["free", "whole"]
    assert run.manifest.plan.anchored_to is None
    records = whole_records(run)
    assert {record.step for record in records} == {0}
    for group in run.manifest.tokens.groups:
        first = run.manifest.tokens.samples[group[0]]
        start = first.num_left_pad + len(first.prompt_ids)
        blocks = [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]
        for site in [*(f"{block}:out" for block in blocks), ".:out", "lm_head:out"]:
            record = run.find(("whole", group[0], 0, site))
            assert record.shape[:2] == (len(group), 3), site
            assert record.positions == (start, start + 1, start + 2)


def test_blocks_get_what_the_free_pass_recorded(made):
    """What was put in place is no news of this pass: only outputs of blocks are recorded."""
    run, _ = made("llama")
    sites = {record.site for record in whole_records(run)}
    assert "model.layers.1:out" in sites
    assert not any(site.startswith("model.layers.1:in") for site in sites)
    assert "model.norm:in" not in sites and "lm_head:in" not in sites


def test_the_whole_pass_changes_nothing_else(made):
    """The free pass is the same with and without it, bit for bit."""
    (one, _), (two, _) = made("llama"), made("llama", whole=False)
    assert compare(one, two).verdict.kind == "identical"
    assert compare(two, one).coverage.unmatched == []


@pytest.mark.slow
def test_a_repeated_run_makes_its_own(made):
    """With --like the whole pass is anchored to the new run's free pass, after the anchored one."""
    run, _ = made("llama", whole=False)
    again, notes = made("llama", like=run)
    assert notes == []
    assert again.manifest.plan.passes == ["free", "anchored", "whole"]
    assert again.manifest.plan.anchored_to == run.manifest.id
    assert compare(again).verdict.kind in HEALTHY
    assert compare(run, again).verdict.kind == "identical"


def test_repeats_and_the_whole_pass_go_together(made):
    """--repeat counts the free pass alone."""
    run, _ = made("llama", repeat=2)
    assert run.manifest.repeatability.num_different == 0
    assert run.manifest.repeatability.num_compared == sum(r.pass_ == "free" for r in run.records)
    assert whole_records(run)


def test_a_planted_input_is_not_planted_twice(made):
    """The rows put in place have the fault already; elsewhere it is planted again."""
    run, _ = made("llama", plants=["model.layers.1:in=scale:1.5", "model.layers.0.mlp:out=scale:2"])
    assert compare(run).verdict.kind in HEALTHY


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 1}, "with --max-new-tokens 1 there is no decode step"),
        ({"positions": "last:2"}, "only the token positions last:2 are recorded"),
        ({"steps": "0,2-3"}, "only the steps 0,2-3 are recorded"),
        ({"sites": ["model.layers.0:*"]}, "the input of model.layers.1 is not recorded"),
        ({"sites": ["model.layers.*:out"]}, "the input of model.layers.0 is not recorded"),
    ],
)
def test_what_cannot_anchor_is_said(options, reason, made):
    """The rest of the run is made; a note says why there is no whole pass and what to change."""
    run, notes = made("llama", **options)
    assert run.manifest.plan.passes == ["free"]
    assert whole_records(run) == []
    assert len(notes) == 1
    assert notes[0].startswith(f"no whole pass: {reason}")


@pytest.mark.parametrize(("architecture", "word"), [("bert", "encoder"), ("t5", "encoder-decoder")])
def test_models_without_a_causal_cache_are_told_apart(architecture, word, made):
    """An encoder makes no decode steps; an encoder-decoder is not supported."""
    run, notes = made(architecture)
    assert run.manifest.plan.passes == ["free"]
    assert len(notes) == 1
    assert word in notes[0]


def test_a_generation_that_ends_at_once_leaves_nothing_to_run(made, tiny_model):
    """The first token is the end: no decode step was made, which is only known afterwards."""

    def end_at_once(model):
        model.generation_config.eos_token_id = list(range(model.config.vocab_size))

    run, notes = made("llama", prepare=end_at_once)
    assert run.manifest.plan.passes == ["free"]
    assert [len(sample.generated_ids) for sample in run.manifest.tokens.samples] == [1, 1]
    assert notes == ["no whole pass: no decode step was made, so there is nothing to hold to it"]


@pytest.mark.slow
def test_groups_of_different_lengths(made, tmp_path):
    """A prompt that ends early has its own, shorter whole forward."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"input_ids": [77]}) + '\n{"input_ids": [9, 8, 7]}')
    first, _ = made("llama", prompts=[], prompts_file=prompts, max_new_tokens=5)
    stop = first.manifest.tokens.samples[0].generated_ids[2]

    def end_there(model):
        model.generation_config.eos_token_id = stop

    run, _ = made("llama", prompts=[], prompts_file=prompts, max_new_tokens=5, prepare=end_there)
    for number, sample in enumerate(run.manifest.tokens.samples):
        record = run.find(("whole", number, 0, "model.layers.0:out"))
        assert record.shape[1] == len(sample.generated_ids) - 1
    assert compare(run).verdict.kind in HEALTHY


@pytest.mark.slow
def test_a_dry_run_counts_it(llama, dry_run):
    """Like the decode steps; and it says what stands in the way."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    words = llama, *prompts, "--truth", "no", "--max-new-tokens"
    plain, plan = dry_run(*words, 4), dry_run(*words, 4, "--whole")
    assert plan["passes"] == ["free", "whole"]
    decoded = sum(row["bytes"] - row["bytes_prefill"] for row in plain["rows"])
    assert plan["total_bytes"] == plain["total_bytes"] + decoded
    plan = dry_run(*words, 1, "--whole")
    assert plan["passes"] == ["free"]
    assert any("no whole pass" in note for note in plan["notes"])


def test_the_rows_are_those_of_a_plain_forward(made, llama):
    """With nothing wrong, an own forward over all tokens has the same rows up to rounding."""
    from transformers import AutoModelForCausalLM

    run, _ = made("llama", prompts=PROMPTS[:1], num_blocks=2)
    sample = run.manifest.tokens.samples[0]
    model = AutoModelForCausalLM.from_pretrained(
        run.manifest.model.source, attn_implementation="eager"
    )
    ids = torch.tensor([sample.prompt_ids + sample.generated_ids[:-1]])
    with torch.no_grad():
        logits = model(ids).logits[:, -3:]
    found = run.read(run.find(("whole", 0, 0, ".:out")))
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
