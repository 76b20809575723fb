"""A batch against single prompts: the same tokens in other shapes, held together row by row."""

import json
import shlex
import shutil

import pytest
import torch

from divergence import BatchOptions, RecordOptions, capture, compare, localize
from divergence import truth as make_truth
from divergence.cli.main import app
from divergence.errors import UsageError

LENGTHS = (9, 14, 5, 1, 12, 7, 14, 3)
BLOCK = "model.layers.1"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Eight prompts of 1 to 14 tokens."""
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [
        [(7 * i * i + 3 * i + n * 11) % 500 + 6 for i in range(length)]
        for n, length in enumerate(LENGTHS)
    ]
    file.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in rows))
    return file


@pytest.fixture
def single(prompts, shared_run, shared_truth):
    """``single("llama", "bfloat16")`` → (the run of single prompts, its truth)."""

    def make(architecture, dtype):
        batching = BatchOptions(prompts_file=prompts)
        model = {"dtype": dtype}
        a = shared_run(architecture, model=model, batching=batching, max_new_tokens=3)
        return a, shared_truth(a)

    return make


def anchored(report):
    return [site for site in report.sites if site.pass_ == "anchored"]


HEALTHY = [
    ("llama", "float32"),
    ("gpt2", "bfloat16"),
    ("bert", "float32"),
    ("qwen3-moe", "bfloat16"),
]
MORE = [
    (arch, dtype)
    for arch in "bert gemma3 gpt2 llama mamba mamba2 mixtral qwen3 qwen3-moe t5".split()
    for dtype in ("float32", "bfloat16", "float16")
    if (arch, dtype) not in HEALTHY
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*HEALTHY, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_a_batch_raises_no_alarm(architecture, dtype, single, tmp_path):
    """Eight prompts one by one against the same in one padded batch: rounding, in every prompt and
    step, with everything compared that has rows of tokens."""
    a, truth = single(architecture, dtype)
    b = capture(like=a, out=tmp_path / "b", batching=BatchOptions(batch=True))
    assert b.manifest.tokens.groups == [list(range(8))]
    report = compare(a, b, truth=truth)
    assert report.verdict.kind in ("within_floor", "identical"), report.verdict
    blocks = [s for s in anchored(report) if s.role == "block" and s.site.endswith(":out")]
    steps = 1 if architecture == "bert" else 3
    assert {(s.sample, s.step) for s in blocks} == {(n, i) for n in range(8) for i in range(steps)}
    ports = {site.site.rpartition(":")[2] for site in report.coverage.unmatched}
    # T5's biases are (1 or B, N, T, T): they have no row of tokens for each prompt
    assert architecture == "t5" or not ports, ports
    assert all("bias" in port or port in ("out.1", "out.2") for port in ports), ports


@pytest.mark.slow
def test_a_batch_is_repeated_one_by_one(single, prompts, tiny_model, tmp_path, answer):
    """The other way round: what ran in a batch runs singly, each prompt with its rows of it."""
    model = str(tiny_model("llama", dtype="bfloat16"))
    a = capture(
        model,
        out=tmp_path / "a",
        batching=BatchOptions(prompts_file=prompts, batch=True),
        max_new_tokens=3,
    )
    truth = make_truth(a, out=tmp_path / "truth")

    def broken(model):
        model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, out: out * 1.3 if out.shape[0] == 1 else out
        )

    good = answer(a, truth=truth, batching=BatchOptions(batch=False))
    assert good.verdict.kind in ("within_floor", "identical") and good.verdict.side == "neither"
    verdict = answer(a, broken, truth=truth, batching=BatchOptions(batch=False)).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")


def test_prompts_of_one_length_share_their_tables(tmp_path, answer, shared_run):
    """Without pads a batch has one rotary table, which every single prompt's is held against."""
    ids = [[(7 * i * i + n * 11) % 500 + 6 for i in range(6)] for n in range(3)]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": one}) for one in ids))
    a = shared_run(
        model={"dtype": "float32"}, batching=BatchOptions(prompts_file=file), max_new_tokens=2
    )
    report = answer(a, batching=BatchOptions(batch=True))
    assert report.verdict.kind == "within_floor"
    assert report.coverage.unmatched == []
    tables = [s for s in report.sites if s.site == "model.rotary_emb:out"]
    assert {(s.sample, s.step) for s in tables} == {(n, step) for n in range(3) for step in (0, 1)}


def only_in_batches(model):
    """Wrong where more than one prompt comes."""
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, out: out * 1.2 if out.shape[0] > 1 else out
    )


def seen_pads(model):
    """The mask of one block lets tokens see the pads before them."""

    def change(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is None or mask.shape[0] == 1:
            return None
        rows, columns = mask.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)
        seen = torch.zeros_like(mask).masked_fill(later, torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": seen}

    model.model.layers[1].self_attn.register_forward_pre_hook(change, with_kwargs=True)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [only_in_batches, seen_pads])
def test_what_a_batch_alone_does_wrong_is_found_where_it_is(fault, dtype, single, tmp_path, answer):
    """A module that is wrong for more than one prompt, a mask that lets pads in: the block and the
    side that batched, though the same code is right for single prompts."""
    a, truth = single("llama", dtype)
    healthy = answer(a, fault)
    assert healthy.verdict.kind == "identical"
    b = capture(like=a, out=tmp_path / "b", batching=BatchOptions(batch=True), prepare=fault)
    report = compare(a, b, truth=truth)
    verdict = report.verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.confidence == "high"
    shape = next(line for line in report.preflight if line.check == "batch shape")
    assert (shape.reference, shape.candidate) == ("8 × batch 1", "1 × batch 8")
    assert compare(a, b).verdict.onset.block == BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "site"), [("gpt2", "transformer.wpe"), ("llama", "model.rotary_emb")]
)
def test_positions_that_count_the_pads_are_found(architecture, site, single, answer):
    """Position ids that are not shifted by the pads: the table of positions, not the blocks behind
    it, which get the recorded rows."""
    a, truth = single(architecture, "float32")

    def unshifted(model):
        def change(module, args, kwargs):
            ids = kwargs.get("position_ids")
            if ids is None or kwargs.get("attention_mask") is None:
                return None
            length = kwargs["attention_mask"].shape[-1]
            plain = torch.arange(length)[-ids.shape[-1] :].expand_as(ids)
            return args, {**kwargs, "position_ids": plain}

        model.register_forward_pre_hook(change, with_kwargs=True)

    verdict = answer(a, unshifted, truth=truth, batching=BatchOptions(batch=True)).verdict
    assert verdict.kind == "localized", verdict
    assert verdict.onset.site.startswith(site), verdict
    assert verdict.side in ("candidate", None)  # a hook is other code: the truth cannot tell whose


@pytest.mark.slow
def test_a_prompt_that_ended_has_no_partner_and_that_is_said(prompts, tiny_model, tmp_path):
    """One prompt ends after a token, its batch goes on: what it is fed then is padding, compared
    with nothing, and the others are judged in every step."""
    folder = shutil.copytree(tiny_model("llama", dtype="float32"), tmp_path / "model")
    first = capture(
        str(folder),
        out=tmp_path / "x",
        batching=BatchOptions(prompts_file=prompts),
        max_new_tokens=4,
    )
    end = first.manifest.tokens.samples[2].generated_ids[1]
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    a = capture(
        str(folder),
        out=tmp_path / "a",
        batching=BatchOptions(prompts_file=prompts),
        max_new_tokens=4,
    )
    lengths = [len(s.generated_ids) for s in a.manifest.tokens.samples]
    assert lengths[2] == 2 and max(lengths) == 4

    b = capture(like=a, out=tmp_path / "b", batching=BatchOptions(batch=True))
    samples = b.manifest.tokens.samples
    assert {len(s.generated_ids) for s in samples} == {4}
    assert [len(s.chosen_ids) for s in samples] == lengths
    report = compare(a, b)
    assert report.verdict.kind == "within_floor"
    reasons = {s.reason for s in report.coverage.unmatched if s.sample == 2}
    assert reasons == {"in A prompt 2 ended after 2 tokens"}
    done = {(s.sample, s.step) for s in anchored(report)}
    assert {step for number, step in done if number == 2} == {0, 1}
    assert all((n, step) in done for n, count in enumerate(lengths) for step in range(count))
    ids = next(line for line in report.preflight if line.check == "generated ids")
    assert ids.status == "same" and "ended" in ids.detail


@pytest.mark.slow
def test_the_advised_command_repeats_the_batch(single, prompts, tiny_model, tmp_path, capsys):
    """Single prompts against a batch, both captured freely: what is advised runs the batch again,
    so that a fault of the batch does not vanish as identical."""
    a, _ = single("llama", "float32")
    model = str(tiny_model("llama", dtype="float32"))
    b = capture(
        model,
        out=tmp_path / "b",
        batching=BatchOptions(prompts_file=prompts, batch=True),
        max_new_tokens=3,
    )
    report = compare(a, b)
    commands = [c.partition("   #")[0] for c in report.verdict.next]
    assert shlex.split(commands[0])[-1] == "--batch"
    for command in commands:
        with pytest.raises(SystemExit) as caught:
            app(shlex.split(command)[1:], prog_name="divergence")
        out, err = capsys.readouterr()
        assert caught.value.code == 0, err
    assert out.startswith("OK")
    assert "batch shape 8 × batch 1 / 1 × batch 8" in out


@pytest.mark.slow
def test_float32_sees_below_the_floor_of_a_batch(single, answer):
    """The escalated pass of a batch is held against the truth of single prompts, row by row."""
    a, truth = single("llama", "bfloat16")

    def slightly(model):
        model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, out: out * 1.002 if out.shape[0] > 1 else out
        )

    verdict = answer(
        a,
        slightly,
        truth=truth,
        batching=BatchOptions(batch=True),
        recording=RecordOptions(escalate=True),
    ).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.onset.pass_ == "escalated"


@pytest.mark.slow
def test_localize_goes_to_the_modules_of_a_batch_and_says_why_no_further(single, tmp_path):
    """Operators of other batches are no pairs: the descent runs the batch again and ends at
    modules."""
    a, truth = single("llama", "float32")
    b = capture(
        like=a, out=tmp_path / "b", batching=BatchOptions(batch=True), prepare=only_in_batches
    )
    found = localize(
        a, b, out=tmp_path / "down", truth=truth, here="both", prepare_candidate=only_in_batches
    )
    assert found.levels[-1].site.startswith(f"{BLOCK}.mlp")
    assert "other batches" in found.stopped


@pytest.mark.slow
def test_batch_and_no_batch_exclude_each_other(single, tmp_path, capsys):
    """--no-batch belongs to --like, and is no companion of --batch; prompts are the run's."""
    for words, said in (
        (["capture", "m", "-o", "x", "--no-batch"], "--no-batch needs --like"),
        (["capture", "--like", "a", "-o", "x", "--no-batch", "--batch"], "cannot be combined"),
    ):
        with pytest.raises(SystemExit) as caught:
            app(words, prog_name="divergence")
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UsageError, match="repeats the recorded tokens"):
        capture(
            like=single("llama", "float32")[0],
            out=tmp_path / "x",
            batching=BatchOptions(batch=True),
            prompts=["x"],
        )
