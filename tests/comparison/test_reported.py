"""What people's models showed, each as small as it shows, through ``capture`` and ``compare``:
healthy pairs that were alarmed, and a fault beside blocks that agree bit for bit."""

import random

import pytest
import torch
import transformers

from divergence import capture

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
def run_of(tmp_path_factory):
    """``run_of(config, change, **options)``: a run of a model with random weights, changed so; the
    same arguments give the same run."""
    made = {}

    def make(config=LLAMA, change=None, **options):
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "dtype": "float32"} | options
        key = str(config), change, str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("reported")
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            if change is not None:
                change(model)
            model.save_pretrained(folder / "model")
            made[key] = capture(str(folder / "model"), out=folder / "a", probe=False, **options)
        return made[key]

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
def test_operators_of_sharp_attention_raise_no_alarm(seed, run_of, answer):
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
    a = run_of(LLAMA, sharp, max_new_tokens=2, sites=sites, truth="full")
    report = answer(a, another_order)
    assert is_healthy(report)
    assert report.operators.judged == "truth"
    assert {row.verdict for row in report.operators.results} == {"fine"}


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["auto", "no"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_massive_channels_raise_no_alarm(dtype, truth, run_of, answer):
    """A channel that carries the energy of its rows in some blocks, as trained models have."""

    def massive(made):
        with torch.no_grad():
            for number in (1, 3):
                mlp = made.model.layers[number].mlp
                mlp.down_proj.weight[17] *= 300

    a = run_of(LLAMA, massive, dtype=dtype, truth=truth)
    assert is_healthy(answer(a, another_order, attn_implementation="sdpa"))


@pytest.mark.slow
def test_a_twentieth_of_a_block_beside_massive_channels_is_found(run_of, answer):
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

    a = run_of(LLAMA, massive, max_new_tokens=1, dtype="bfloat16", truth="full")
    assert is_healthy(answer(a, another_order))
    verdict = answer(a, more).verdict
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


@pytest.mark.slow
def test_a_model_with_its_own_position_bias_raises_no_alarm(run_of, answer):
    """CPM-Ant in float32: buckets of positions, and prompts of its own before the text."""
    a = run_of(CPM_ANT)
    assert is_healthy(answer(a, another_order))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_a_truth_the_end_of_a_long_tail_of_tokens_is_no_answer(seed, run_of, answer):
    """In its first block a few tokens' attention is sharp, and a fault of attention looks alike."""

    def drawn(made):
        torch.manual_seed(seed)
        made.load_state_dict(transformers.AutoModelForCausalLM.from_config(CPM_ANT).state_dict())

    a = run_of(CPM_ANT, drawn, truth="no")
    verdict = answer(a, another_order).verdict
    assert verdict.kind in ("within_floor", "undetermined")
    if verdict.kind == "undetermined":
        assert (verdict.confidence, verdict.side) == ("low", None)
        assert "others lead up to it" in verdict.summary
        assert any(command.startswith("divergence truth") for command in verdict.next)


@pytest.mark.slow
def test_a_state_of_single_numbers_raises_no_alarm(run_of, answer):
    """RWKV without a truth: a number of its state may be as small as any, and its error is not."""
    config = transformers.RwkvConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, context_length=256
    )
    prompts = [[(13 * n + 7 * k) % 200 + 3 for k in range(c)] for n, c in enumerate((24, 37, 12))]
    a = run_of(config, prompts=prompts, truth="no")
    assert is_healthy(answer(a, another_order))


def sharp(made):
    """Scores of 64 times the size: which of two keys a token sees, their last bits decide."""
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8


@pytest.fixture
def sharp_run(run_of):
    prompts = [[(13 * n + 7 * k) % 400 + 3 for k in range(c)] for n, c in enumerate((24, 40, 60))]
    return run_of(LLAMA, sharp, prompts=prompts, truth="full")


@pytest.mark.slow
def test_tokens_of_sharp_attention_accuse_nobody(sharp_run, answer):
    """Single tokens are off by ten floors, some on one side alone."""
    assert is_healthy(answer(sharp_run, another_order))


@pytest.mark.slow
def test_a_bad_token_beside_sharp_attention_is_found(sharp_run, answer):
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

    verdict = answer(sharp_run, prepare).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate"), verdict.summary
    assert verdict.onset.block == "model.layers.2"
    assert "prompt 1" in verdict.summary
    assert "at token 11" in verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["auto", "no"])
def test_a_block_that_alone_differs_is_named_for_sure(truth, run_of, answer):
    """Beside blocks that agree bit for bit a few floors are no rounding."""
    a = run_of(truth=truth)

    def prepare(made):
        mlp = made.model.layers[2].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) * (1 + 2e-5)

    verdict = answer(a, prepare).verdict
    assert (verdict.kind, verdict.confidence) == ("localized", "high")
    assert verdict.onset.block == "model.layers.2"
    assert verdict.side in ("candidate", None if truth == "no" else "candidate")


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["full", "no"])
def test_a_race_is_said_with_the_calls_that_it_hits_and_how_many(truth, run_of, answer):
    """One product reads a quarter of its input before it is there, in some calls and not in others:
    no prompt and no step of them is off as a whole."""
    a = run_of(prompts=[*PROMPTS, *PROMPTS[::-1]], max_new_tokens=7, truth=truth)
    hit = []

    def race(made):
        dice, linear = random.Random(3), made.model.layers[2].mlp.down_proj

        def forward(x):
            late = dice.random() < 0.25
            hit.append(late)
            kept = x if not late else torch.cat((x[..., 64:], torch.zeros_like(x[..., :64])), -1)
            return torch.nn.functional.linear(kept, linear.weight)

        linear.forward = forward

    report = answer(a, race)
    anchored = iter(hit[len(hit) // 2 :])
    calls = [(prompt, step) for prompt in range(4) for step in range(7) if next(anchored)]
    decode = [call for call in calls if call[1]]
    verdict = report.verdict
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
def test_a_bad_token_of_every_prompt_is_in_the_first_line(blocks, truth, run_of, answer):
    """It has the same number in all of them: what is special is the place, not the prompt."""
    a = run_of(max_new_tokens=2, truth=truth)
    verdict = answer(a, bad_token(5, 1.0003, blocks)).verdict
    assert verdict.kind == ("systematic" if len(blocks) > 1 else "localized")
    assert ", at token 5" in verdict.summary


@pytest.mark.slow
def test_the_first_of_blocks_that_are_off_alike_is_not_named_alone(run_of, answer):
    """Without a truth, one of five passes its limit, and the others are not far from it."""
    a = run_of(dtype="bfloat16", truth="no")

    def prepare(made):
        for number, block in enumerate(made.model.layers):
            factor = 0.96 if number else 0.94
            block.mlp.forward = lambda x, own=block.mlp.forward, factor=factor: own(x) * factor

    verdict = answer(a, prepare).verdict
    assert verdict.kind == "systematic", verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.02, 1.025, 1.08])
def test_one_step_that_holds_all_that_differs_is_told(factor, run_of, answer):
    """Where all else is equal bit for bit, three floors of one token are a fault."""
    a = run_of(max_new_tokens=6, dtype="bfloat16", truth="no")

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

    verdict = answer(a, prepare).verdict
    assert verdict.kind == ("within_floor" if factor == 1.02 else "systematic"), verdict.summary
    assert "in decode step 3" in verdict.summary
    assert verdict.confidence == ("high" if factor == 1.08 else "medium")
