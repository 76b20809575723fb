"""capture(): prompts, tasks, settings, repeats, and what is left behind when it is stopped."""

import json

import pytest
import torch

from divergence import BatchOptions, RecordOptions, Run, capture, compare
from divergence.errors import ModelError, PromptError, RunExistsError, UsageError
from divergence.recording.machine import deterministic_settings
from divergence.recording.plant import Plant

PROMPTS = ["The harbour was quiet in the early morning.", "Where does a river begin?", "Snow"]


# --- tasks and prompts -------------------------------------------------------------------------


def test_an_encoder_runs_once(captured):
    """A masked language model has one forward, no generated tokens and logits of every token."""
    run = captured("bert")
    assert run.manifest.model.task == "encoder"
    assert run.manifest.plan.logits_site is None
    assert {record.step for record in run.records} == {0}
    sample = run.manifest.tokens.samples[0]
    assert (sample.generated_ids, sample.chosen_ids) == ([], [])
    assert run.find(("free", 0, 0, ".:out")).shape[:2] == (1, len(sample.prompt_ids))


def test_an_encoder_decoder_encodes_once_and_decodes(captured):
    """The encoder's blocks are seen in the first forward only, the decoder's in all of them."""
    run = captured("t5")
    assert run.manifest.model.task == "encoder-decoder"
    assert run.manifest.tokens.samples[0].decoder_prompt_ids == [0]
    steps = {}
    for record in run.records:
        steps.setdefault(record.site.partition(".")[0], set()).add(record.step)
    assert steps["encoder"] == {0}
    assert steps["decoder"] == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_chat_goes_through_the_template(captured, replay):
    """--chat wraps the prompt in the template; messages in a file always are."""
    run = captured("llama", capture_options={"prompts": ["hi"], "chat": True})
    sample = run.manifest.tokens.samples[0]
    assert sample.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert sample.prompt_ids[0] == 4
    plain = captured("llama", capture_options={"prompts": ["hi"]})
    assert len(sample.prompt_ids) > len(plain.manifest.tokens.samples[0].prompt_ids)
    assert compare(run, replay(run)).verdict.kind == "identical"


def test_messages_need_a_template(tiny_model, tmp_path):
    """A chat for a model without a template is refused, naming the prompt."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(PromptError, match="no chat template"):
        capture(
            str(tiny_model("llama", chat_template=False)),
            out=tmp_path / "run",
            batching=BatchOptions(prompts_file=prompts),
        )


@pytest.mark.slow
def test_token_ids_are_taken_as_they_are(captured, replay, tmp_path):
    """input_ids in a prompts file are neither tokenised nor wrapped."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input_ids": [9]}\n{"input_ids": [30, 31, 32]}')
    run = captured("llama", capture_options={"prompts": [], "prompts_file": str(prompts)})
    assert [s.prompt_ids for s in run.manifest.tokens.samples] == [[9], [30, 31, 32]]
    assert compare(run, replay(run)).verdict.kind == "identical"


def test_token_ids_beyond_the_vocabulary_are_refused(llama, tmp_path):
    """Ids of another tokenizer are named before anything runs."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input_ids": [9, 99999]}')
    with pytest.raises(ModelError, match="99999 is outside"):
        capture(str(llama), out=tmp_path / "run", batching=BatchOptions(prompts_file=prompts))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_a_batch_is_compared_with_single_prompts(architecture, captured, tmp_path):
    """Batches are split into their samples and pads are cut off; what differs is rounding."""
    single = captured(architecture, capture_options={"prompts": PROMPTS, "max_new_tokens": 2})
    batch = captured(
        architecture, capture_options={"prompts": PROMPTS, "max_new_tokens": 2, "batch": True}
    )
    assert [len(group) for group in single.manifest.tokens.groups] == [1, 1, 1]
    assert batch.manifest.tokens.groups == [[0, 1, 2]]
    report = compare(single, batch)
    assert report.verdict.kind in ("identical", "within_floor"), report.verdict
    found = {(s.sample, s.step) for s in report.sites if s.site.endswith("0:out")}
    steps = 1 if architecture == "bert" else 2
    assert found == {(sample, step) for sample in range(3) for step in range(steps)}
    for site in report.sites:
        if site.step == 0 and ".0:out" in site.site:
            length = len(single.manifest.tokens.samples[site.sample].prompt_ids)
            assert site.shape[:2] == (1, length)
    assert report.coverage.num_compared > 0.9 * len(single.records)


@pytest.mark.slow
def test_a_padded_batch_repeats_itself(captured, replay):
    """Pads travel with the run."""
    run = captured("llama", capture_options={"prompts": PROMPTS, "batch": True})
    pads = [s.num_left_pad for s in run.manifest.tokens.samples]
    assert min(pads) == 0 < max(pads)
    assert compare(run, replay(run)).verdict.kind == "identical"


def test_no_new_tokens_is_one_forward(captured, replay):
    """With --max-new-tokens 0 the prompt runs once and no token is chosen."""
    run = captured("llama", capture_options={"max_new_tokens": 0})
    assert {record.step for record in run.records} == {0}
    report = compare(run, replay(run))
    assert report.verdict.kind == "identical"
    assert report.tokens is None


# --- repeating ---------------------------------------------------------------------------------


def test_overrides_are_noted(captured, replay):
    """What --like is told to change is recorded, and the comparison says so."""
    run = captured("llama")
    other = replay(run, dtype="bfloat16", attn_implementation="sdpa")
    assert {(o.name, o.reference, o.used) for o in other.manifest.overrides} == {
        ("dtype", "float32", "bfloat16"),
        ("attn_implementation", "eager", "sdpa"),
    }
    assert any("dtype bfloat16 instead of float32" in note for note in compare(run, other).notes)


def test_tokens_are_forced_even_where_the_choice_differs(captured, replay):
    """The repeated run is fed the recorded tokens and remembers what it would have chosen."""
    run = captured("llama")
    other = replay(run, plants=["lm_head:out=roll:1", "lm_head:out=scale:-1"])
    one, two = run.manifest.tokens.samples[0], other.manifest.tokens.samples[0]
    assert two.generated_ids == one.generated_ids
    assert two.chosen_ids != one.chosen_ids
    assert other.manifest.tokens.forced_by == run.manifest.id


def test_a_machine_that_repeats_itself_is_known_to(captured):
    """--repeat 3 runs the free pass three times and compares every tensor twice."""
    run = captured("llama", capture_options={"repeat": 3})
    found = run.manifest.repeatability
    assert (found.num_runs, found.num_different) == (3, 0)
    assert found.num_compared == 2 * len(run.records)


def test_a_machine_that_does_not_is_found_out(llama, tmp_path, monkeypatch):
    """A module that is random from run to run is named in the run and in the comparison."""
    monkeypatch.setattr(Plant, "apply", lambda self, x, forward: x + 1e-3 * torch.randn_like(x))
    options = {"prompts": PROMPTS[:1], "max_new_tokens": 1}
    noisy = capture(
        str(llama),
        out=tmp_path / "noisy",
        recording=RecordOptions(repeat=2),
        plants=["model.norm:out=scale:1"],
        **options,
    )
    found = noisy.manifest.repeatability
    assert found.num_different > 0
    assert found.first_difference.startswith("model.norm:out")
    # the one prompt's first forward differs: what follows may inherit it
    assert (found.num_forwards, found.begins) == (1, {"model.norm:out": 1})
    calm = capture(str(llama), out=tmp_path / "calm", **options)
    report = compare(calm, noisy)
    line = next(line for line in report.preflight if line.check == "repeatability")
    assert line.status == "differs"
    assert "it begins in 1 of 1 forwards: model.norm:out" in line.detail


def test_a_run_without_block_inputs_cannot_anchor(captured, replay):
    """It is said, and the free pass is made all the same."""
    notes = []

    def progress(event, done, total, detail):
        if event == "note":
            notes.append(detail)

    run = captured("llama", capture_options={"sites": ["lm_head:out"]})
    other = replay(run, progress=progress)
    assert other.manifest.plan.passes == ["free"]
    assert "it holds no input of model.layers.0" in notes[0]
    assert compare(run, other).verdict.kind == "identical"


def test_a_regular_expression_is_repeated_by_what_it_selected(captured, replay):
    """The sites of the run that is repeated, and its pattern in the manifest."""
    pattern = r"re:model\.layers\.\d\.mlp\.(up|down)_proj:out"
    run = captured("llama", capture_options={"sites": ["blocks", pattern]})
    again = replay(run)
    assert "model.layers.1.mlp.up_proj:out" in run.sites()
    assert again.sites() == run.sites()
    assert again.manifest.plan.sites == ["blocks", pattern]
    assert not again.manifest.overrides


def test_anchoring_can_be_left_out(captured, replay):
    """anchor=False records the free pass alone."""
    other = replay(captured("llama"), anchor=False)
    assert other.manifest.plan.passes == ["free"]
    assert other.manifest.plan.anchored_to is None
    assert {record.pass_ for record in other.records} == {"free"}


def test_prompts_cannot_be_given_to_a_repeat(captured, tmp_path):
    """The tokens are the recorded ones or it is no repeat."""
    with pytest.raises(UsageError, match="repeats the recorded tokens"):
        capture(like=captured("llama"), out=tmp_path / "run", prompts=["x"])


# --- settings ----------------------------------------------------------------------------------


def settings() -> dict[str, object]:
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul": torch.backends.mkldnn.matmul.fp32_precision,
        "rng": torch.get_rng_state().sum().item(),
    }


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_switches_are_restored(error):
    """Everything set for a capture is as before afterwards, also after an error."""
    torch.manual_seed(123)
    before = settings()
    try:
        with deterministic_settings("cpu", seed=5) as state:
            assert torch.are_deterministic_algorithms_enabled()
            assert settings() != before
            if error is not None:
                raise error
    except RuntimeError:
        pass
    assert settings() == before
    assert {s.status for s in state.switches} <= {"accepted", "refused", "absent"}
    assert any(s.name == "torch.use_deterministic_algorithms" for s in state.switches)


def test_capture_restores_switches(captured, replay):
    """A capture in somebody's program leaves no setting behind."""
    run = captured("llama")
    torch.manual_seed(7)
    before = settings()
    replay(run)
    assert settings() == before


def test_without_determinism_switches_are_only_looked_at():
    """Only the seeds are set; what the machine has is recorded."""
    with deterministic_settings("cpu", seed=5, enabled=False) as state:
        assert not torch.are_deterministic_algorithms_enabled()
    assert {switch.asked for switch in state.switches} == {"-"}


# --- being stopped -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt(), "interrupted"), (OSError("no more"), "no more")]
)
def test_a_stopped_capture_leaves_a_readable_run(error, told, llama, tmp_path):
    """What was seen before is there, marked incomplete with the reason, and can be compared."""

    def stop(event, done, total, detail):
        if (event, done) == ("free", 2):
            raise error

    options = {"prompts": PROMPTS[:1], "max_new_tokens": 6}
    with pytest.raises(type(error)):
        capture(str(llama), out=tmp_path / "part", progress=stop, **options)
    part = Run.open(tmp_path / "part")
    assert not part.manifest.complete
    assert told in part.manifest.stopped_by
    assert {record.step for record in part.records} == {0, 1}
    assert part.verify() == []
    whole = capture(str(llama), out=tmp_path / "whole", **options)
    report = compare(whole, part)
    assert report.verdict.kind == "identical"
    assert report.coverage.num_only_reference > 0
    assert report.verdict.confidence != "high"
    assert not report.candidate.complete


def test_a_run_is_not_overwritten(llama, tmp_path):
    """Not without force, and a directory of something else never."""
    options = {"prompts": PROMPTS[:1], "max_new_tokens": 1}
    run = capture(str(llama), out=tmp_path / "run", **options)
    with pytest.raises(RunExistsError, match="exists already"):
        capture(str(llama), out=tmp_path / "run", **options)
    with pytest.raises(RunExistsError, match="to be repeated"):
        capture(like=run, out=tmp_path / "run", force=True)
    assert capture(str(llama), out=tmp_path / "run", force=True, **options).manifest.complete
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("x")
    with pytest.raises(RunExistsError):
        capture(str(llama), out=tmp_path / "thesis", force=True, **options)


@pytest.mark.slow
def test_each_forward_is_told_as_it_ends(llama, tmp_path):
    """By its step, which is 0 for the prefill, of how many there are to be."""
    seen = []

    def progress(event, done, total, detail):
        if event == "free":
            seen.append((done, total, detail))

    capture(str(llama), out=tmp_path / "a", prompts=["x"], max_new_tokens=3, progress=progress)
    assert seen[1:] == [(1, 3, "step 0"), (2, 3, "step 1"), (3, 3, "step 2")]
