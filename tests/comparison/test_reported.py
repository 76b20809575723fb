"""What people's models showed, each as small as it shows, through ``capture`` and ``compare``:
healthy pairs that were alarmed, and a fault beside blocks that agree bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from divergence import capture, compare

PROMPTS = [[(13 * n + 7 * k) % 400 + 3 for k in range(count)] for n, count in enumerate((24, 40))]
LLAMA = transformers.LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=256,
    initializer_range=0.08,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """``model(config, change)``: a folder with random weights, changed so."""

    def make(config, change=lambda made: None):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config)
        change(made)
        folder = tmp_path_factory.mktemp("reported") / "model"
        made.save_pretrained(folder)
        return str(folder)

    return make


def another_order(model):
    """All products add in another order, as other kernels do."""
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear):
            made = torch.Generator().manual_seed(3)
            order = torch.randperm(linear.weight.shape[1], generator=made)

            def forward(x, own=linear, order=order):
                return torch.nn.functional.linear(x[..., order], own.weight[:, order], own.bias)

            linear.forward = forward


def is_healthy(report):
    verdict = report.verdict
    assert verdict.kind == "within_floor", verdict.summary
    assert not any(site.flagged for site in report.sites)
    return True


@pytest.mark.parametrize("seed", [1, 2])
def test_operators_of_sharp_attention_raise_no_alarm(seed, model, tmp_path):
    """The rounding of one score decides the error of a head's row, and may be small on one side by
    chance."""

    def sharp(made):
        torch.manual_seed(seed)
        made.load_state_dict(transformers.AutoModelForCausalLM.from_config(LLAMA).state_dict())
        with torch.no_grad():
            for layer in made.model.layers:
                layer.self_attn.q_proj.weight *= 8
                layer.self_attn.k_proj.weight *= 8

    sites = ["blocks", "ops@model.layers.1", "ops@model.layers.3"]
    a = capture(
        model(LLAMA, sharp),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=2,
        sites=sites,
        truth="full",
        probe=False,
    )
    b = capture(like=a, out=tmp_path / "b", prepare=another_order, probe=False)
    report = compare(a, b)
    assert is_healthy(report)
    assert report.operators.judged == "truth"
    assert {row.verdict for row in report.operators.results} == {"fine"}


@pytest.mark.parametrize("truth", ["auto", "no"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_massive_channels_raise_no_alarm(dtype, truth, model, tmp_path):
    """A channel that carries the energy of its rows in some blocks, as trained models have."""

    def massive(made):
        with torch.no_grad():
            for number in (1, 3):
                mlp = made.model.layers[number].mlp
                mlp.down_proj.weight[17] *= 300

    a = capture(
        model(LLAMA, massive),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype=dtype,
        truth=truth,
        probe=False,
    )
    b = capture(
        like=a, out=tmp_path / "b", attn_implementation="sdpa", prepare=another_order, probe=False
    )
    assert is_healthy(compare(a, b))


def test_a_twentieth_of_a_block_beside_massive_channels_is_found(model, tmp_path):
    """The massive channels round by as much as the others hold, and are what all is asked of;
    asked in each channel's own unit the fault is plain, and healthy kernels are as healthy."""

    def massive(made):
        with torch.no_grad():
            for number in (1, 2):
                made.model.layers[number].mlp.down_proj.weight[[5, 40]] *= 400

    def more(made):
        another_order(made)
        mlp = made.model.layers[3].mlp
        mlp.forward = lambda x, own=mlp.forward: 1.05 * own(x)

    how = {"prompts": PROMPTS, "max_new_tokens": 1, "dtype": "bfloat16", "probe": False}
    a = capture(model(LLAMA, massive), out=tmp_path / "a", truth="full", **how)
    healthy = capture(like=a, out=tmp_path / "healthy", prepare=another_order, probe=False)
    assert is_healthy(compare(a, healthy))
    wrong = capture(like=a, out=tmp_path / "wrong", prepare=more, probe=False)
    verdict = compare(a, wrong).verdict
    assert verdict.kind == "localized"
    assert (verdict.onset.site, verdict.side) == ("model.layers.3:out", "candidate")


CPM_ANT = transformers.CpmAntConfig(
    vocab_size=512,
    hidden_size=64,
    num_attention_heads=4,
    dim_head=16,
    dim_ff=128,
    num_hidden_layers=4,
    prompt_length=4,
    prompt_types=4,
    segment_types=4,
    position_bias_num_buckets=32,
    position_bias_max_distance=128,
)


def test_a_model_with_its_own_position_bias_raises_no_alarm(model, tmp_path):
    """CPM-Ant in float32: buckets of positions, and prompts of its own before the text."""
    a = capture(
        model(CPM_ANT),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="float32",
        probe=False,
    )
    b = capture(like=a, out=tmp_path / "b", prepare=another_order, probe=False)
    assert is_healthy(compare(a, b))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_a_truth_the_end_of_a_long_tail_of_tokens_is_no_answer(seed, model, tmp_path):
    """In its first block a few tokens' attention is sharp, and a fault of attention looks alike."""

    def drawn(made):
        torch.manual_seed(seed)
        made.load_state_dict(transformers.AutoModelForCausalLM.from_config(CPM_ANT).state_dict())

    a = capture(
        model(CPM_ANT, drawn),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="float32",
        truth="no",
        probe=False,
    )
    b = capture(like=a, out=tmp_path / "b", prepare=another_order, probe=False)
    verdict = compare(a, b).verdict
    assert verdict.kind in ("within_floor", "undetermined")
    if verdict.kind == "undetermined":
        assert (verdict.confidence, verdict.side) == ("low", None)
        assert "other tokens lead up to it" in verdict.summary
        assert any(command.startswith("divergence truth") for command in verdict.next)


def test_a_state_of_single_numbers_raises_no_alarm(model, tmp_path):
    """RWKV without a truth: a number of its state may be as small as any, and its error is not."""
    config = transformers.RwkvConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, context_length=256
    )
    prompts = [[(13 * n + 7 * k) % 200 + 3 for k in range(c)] for n, c in enumerate((24, 37, 12))]
    a = capture(
        model(config),
        out=tmp_path / "a",
        prompts=prompts,
        max_new_tokens=3,
        dtype="float32",
        truth="no",
        probe=False,
    )
    assert is_healthy(
        compare(a, capture(like=a, out=tmp_path / "b", prepare=another_order, probe=False))
    )


def sharp(made):
    """Scores of 64 times the size: which of two keys a token sees, their last bits decide."""
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8


@pytest.fixture(scope="module")
def sharp_run(model, tmp_path_factory):
    prompts = [[(13 * n + 7 * k) % 400 + 3 for k in range(c)] for n, c in enumerate((24, 40, 60))]
    return capture(
        model(LLAMA, sharp),
        out=tmp_path_factory.mktemp("sharp") / "a",
        prompts=prompts,
        max_new_tokens=3,
        dtype="float32",
        truth="full",
        probe=False,
    )


def test_tokens_of_sharp_attention_accuse_nobody(sharp_run, tmp_path):
    """Single tokens are off by ten floors, some on one side alone."""
    b = capture(like=sharp_run, out=tmp_path / "b", prepare=another_order, probe=False)
    assert is_healthy(compare(sharp_run, b))


def test_a_bad_token_beside_sharp_attention_is_found(sharp_run, tmp_path):
    """One that is far beyond what sharp attention makes of any."""

    def prepare(made):
        another_order(made)
        mlp = made.model.layers[2].mlp

        def forward(x, own=mlp.forward):
            y = own(x).clone()
            if y.shape[1] == 40:
                y[:, 11] *= 1 + 1e-3
            return y

        mlp.forward = forward

    report = compare(
        sharp_run, capture(like=sharp_run, out=tmp_path / "b", prepare=prepare, probe=False)
    )
    verdict = report.verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate"), verdict.summary
    assert verdict.onset.block == "model.layers.2"
    assert "prompt 1" in verdict.summary
    assert "at token 11" in verdict.summary


@pytest.mark.parametrize("truth", ["auto", "no"])
def test_a_block_that_alone_differs_is_named_for_sure(truth, model, tmp_path):
    """Beside blocks that agree bit for bit a few floors are no rounding."""
    a = capture(
        model(LLAMA),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="float32",
        truth=truth,
        probe=False,
    )

    def prepare(made):
        mlp = made.model.layers[2].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) * (1 + 2e-5)

    verdict = compare(a, capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)).verdict
    assert (verdict.kind, verdict.confidence) == ("localized", "high")
    assert verdict.onset.block == "model.layers.2"
    assert verdict.side in ("candidate", None if truth == "no" else "candidate")


@pytest.mark.parametrize("truth", ["full", "no"])
def test_a_race_is_said_with_the_calls_that_it_hits_and_how_many(truth, model, tmp_path):
    """One product reads a quarter of its input before it is there, in some calls and not in others:
    no prompt and no step of them is off as a whole."""
    a = capture(
        model(LLAMA),
        out=tmp_path / "a",
        prompts=[*PROMPTS, *PROMPTS[::-1]],
        max_new_tokens=7,
        dtype="float32",
        truth=truth,
        probe=False,
    )
    hit = []

    def race(made):
        dice, linear = random.Random(3), made.model.layers[2].mlp.down_proj

        def forward(x):
            late = dice.random() < 0.25
            hit.append(late)
            kept = x if not late else torch.cat((x[..., 64:], torch.zeros_like(x[..., :64])), -1)
            return torch.nn.functional.linear(kept, linear.weight)

        linear.forward = forward

    b = capture(like=a, out=tmp_path / "b", prepare=race, probe=False)
    anchored = iter(hit[len(hit) // 2 :])
    calls = [(prompt, step) for prompt in range(4) for step in range(7) if next(anchored)]
    decode = [call for call in calls if call[1]]
    verdict = compare(a, b).verdict
    assert verdict.onset.block == "model.layers.2"
    said = verdict.summary.partition("model.layers.2:out")[2]
    assert f"in {len(decode)} of 24 forwards alone (the first: prompt {decode[0][0]}, " in said


def bad_token(position, factor, blocks=range(5)):
    """The output of the MLP of these blocks is off at one token of every prompt."""

    def prepare(made):
        for number in blocks:
            mlp = made.model.layers[number].mlp

            def forward(x, own=mlp.forward):
                y = own(x).clone()
                if y.shape[1] > position:
                    y[:, position] *= factor
                return y

            mlp.forward = forward

    return prepare


@pytest.mark.parametrize(
    ("blocks", "truth"), [(range(5), "full"), (range(5), "no"), ([2], "no")], ids=str
)
def test_a_bad_token_of_every_prompt_is_in_the_first_line(blocks, truth, model, tmp_path):
    """It has the same number in all of them: what is special is the place, not the prompt."""
    a = capture(
        model(LLAMA),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=2,
        dtype="float32",
        truth=truth,
        probe=False,
    )
    b = capture(like=a, out=tmp_path / "b", prepare=bad_token(5, 1.0003, blocks), probe=False)
    verdict = compare(a, b).verdict
    assert verdict.kind == ("systematic" if len(blocks) > 1 else "localized")
    assert ", at token 5" in verdict.summary


def test_the_first_of_blocks_that_are_off_alike_is_not_named_alone(model, tmp_path):
    """Without a truth, one of five passes its limit, and the others are not far from it."""
    a = capture(
        model(LLAMA),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="bfloat16",
        truth="no",
        probe=False,
    )

    def prepare(made):
        for number, block in enumerate(made.model.layers):
            factor = 0.96 if number else 0.94
            block.mlp.forward = lambda x, own=block.mlp.forward, factor=factor: own(x) * factor

    verdict = compare(a, capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)).verdict
    assert verdict.kind == "systematic", verdict.summary


@pytest.mark.parametrize("factor", [1.02, 1.025, 1.08])
def test_one_step_that_holds_all_that_differs_is_told(factor, model, tmp_path):
    """Where all else is equal bit for bit, three floors of one token are a fault."""
    a = capture(
        model(LLAMA),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=6,
        dtype="bfloat16",
        truth="no",
        probe=False,
    )

    def prepare(made):
        steps = {"number": 0}

        def count(module, args, kwargs):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            steps["number"] = 0 if ids.shape[1] > 1 else steps["number"] + 1

        made.register_forward_pre_hook(count, with_kwargs=True)
        for block in made.model.layers:
            block.mlp.forward = lambda x, own=block.mlp.forward: (
                own(x) * (factor if steps["number"] == 3 else 1.0)
            )

    verdict = compare(a, capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)).verdict
    assert verdict.kind == ("within_floor" if factor == 1.02 else "systematic"), verdict.summary
    assert "in decode step 3" in verdict.summary
    assert verdict.confidence == ("high" if factor == 1.08 else "medium")
