"""A whole kind that is off by one measure is named as a kind, whoever is the first to pass; errors
of several blocks are each named, with their own side."""

import pytest
import torch

from divergence import capture, compare

PROMPTS = [[(13 * n + 7 * k) % 1000 + 3 for k in range(count)] for n, count in enumerate((32, 20))]
LAYERS = [f"model.layers.{number}" for number in range(6)]


OPTIONS = {"prompts": PROMPTS, "probe": False, "truth": "no"}


@pytest.fixture
def pair(drawn_model, shared_run, shared_truth):
    """``pair(dtype, window)``: a run without a truth, and its truth."""

    def make(dtype, window=None, plants=()):
        model = drawn_model("Mistral", vocab_size=1024, sliding_window=window)
        a = shared_run(model, max_new_tokens=4, dtype=dtype, plants=list(plants), **OPTIONS)
        return a, shared_truth(a)

    return make


def in_fp8(values):
    scale = values.abs().amax() / 448
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def fp8_weights(model):
    for layer in model.model.layers:
        for linear in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
            linear.forward = lambda x, own=linear: x @ in_fp8(own.weight).T


def fp8_cache(model):
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.forward = lambda x, own=linear: in_fp8(x @ own.weight.T)


def wider_window(model):
    model.config.sliding_window += 1
    for layer in model.model.layers:
        layer.self_attn.sliding_window = model.config.sliding_window


def sums_in_bfloat16(model):
    for layer in model.model.layers:
        linear = layer.mlp.down_proj

        def forward(x, own=linear):
            total = torch.zeros(*x.shape[:-1], own.weight.shape[0], dtype=torch.bfloat16)
            for place in range(x.shape[-1]):
                total = total + (x[..., place, None] * own.weight[:, place]).bfloat16()
            return total.to(x.dtype)

        linear.forward = forward


@pytest.mark.parametrize(
    ("fault", "dtype", "window", "with_truth"),
    [
        (fp8_weights, "bfloat16", None, False),  # 4.8 to 9.4 floors, two of six beyond 6
        (fp8_weights, "bfloat16", None, True),
        (fp8_cache, "bfloat16", None, True),  # W from 1.5 to 5, one of six stands out
        (fp8_cache, "float32", None, False),
        (wider_window, "bfloat16", 16, False),
        (wider_window, "bfloat16", 28, True),  # some tokens of one prompt
        (wider_window, "float32", 28, False),
        (sums_in_bfloat16, "float32", None, True),
    ],
)
def test_a_kind_that_is_off_alike_is_named_as_one(fault, dtype, window, with_truth, pair, answer):
    """The first to pass its limit is not named alone."""
    a, true = pair(dtype, window)
    verdict = answer(a, fault, truth=true if with_truth else None).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate" if with_truth else None)
    assert verdict.summary.startswith("every MistralDecoderLayer differs by more than rounding")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "at", "with_truth"),
    [(range(6), "@sample=1", False), (range(6), "@sample=1", True), ((0, 2, 3, 5), "", False)],
    ids=["prompt", "truth", "blocks"],
)
def test_no_rounding_excuses_what_differs_beside_equal_bits(blocks, at, with_truth, pair, answer):
    """In the other prompt, or in the other blocks, equal inputs give equal bits: no other kernel
    ran, and the first block is off by more than the others without being alone."""
    a, true = pair("bfloat16")
    sizes = {number: 1.01 if number else 1.06 for number in blocks}
    plants = [f"{LAYERS[number]}:out=scale:{size}{at}" for number, size in sizes.items()]
    verdict = answer(a, truth=true if with_truth else None, plants=plants).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate" if with_truth else None)
    assert verdict.summary.startswith("every" if len(blocks) == 6 else "4 of 6")


@pytest.mark.slow
def test_what_is_within_a_floor_beside_equal_bits_is_off(pair, answer):
    """In the same forwards of two other blocks equal inputs give equal bits, so not even half a
    floor is rounding."""
    a, true = pair("bfloat16")
    shares = {0: 0.02, 2: 0.003, 3: 0.003, 4: 0.003}
    plants = [f"{LAYERS[number]}:out=noise:{share}" for number, share in shares.items()]
    verdict = answer(a, truth=true, plants=plants).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
    assert verdict.summary.startswith("4 of 6 MistralDecoderLayer differ")


def scaled_mlps(*numbers):
    def fault(model):
        sums_in_bfloat16(model)
        for number in numbers:
            mlp = model.model.layers[number].mlp
            mlp.forward = lambda x, own=mlp.forward: own(x) * 1.5

    return fault


@pytest.mark.slow
@pytest.mark.parametrize("with_truth", [False, True])
def test_one_bad_block_among_coarse_ones_is_named_alone(with_truth, pair, answer):
    """A block that is off by far more than its siblings, which only are coarse, is no kind."""
    a, true = pair("bfloat16")
    verdict = answer(a, scaled_mlps(3), truth=true if with_truth else None).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", LAYERS[3])


@pytest.mark.slow
def test_two_bad_blocks_among_coarse_ones_may_be_all(pair, answer):
    """Where the others lean to the same side, as far less of the same fault would make them, it is
    not certain that the two alone are off."""
    a, true = pair("bfloat16")
    verdict = answer(a, scaled_mlps(0, 3), truth=true).verdict
    assert (verdict.kind, verdict.confidence) == ("localized", "medium")
    (lacking,) = [check.lacking for check in verdict.checks if check.name == "alone"]
    assert (lacking.code, lacking["side"]) == ("may_be_in_all", "candidate")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [(0, 2, 4), (1, 2), (0, 3, 5)])
def test_half_of_the_blocks_are_each_named(blocks, dtype, pair, answer):
    """Where no more than half of a kind is wrong, the first is the onset, and all are named."""
    a, true = pair(dtype)
    plants = [f"{LAYERS[number]}:out=scale:1.08" for number in blocks]
    verdict = answer(a, truth=true, plants=plants).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate")
    names = [LAYERS[number] for number in blocks]
    assert verdict.onset.block == names[0]
    others = f"{'another' if len(names) == 2 else 'others'} in {', '.join(names[1:])}"
    assert verdict.summary == f"the error is made at {names[0]}:out, by B; {others}"


@pytest.mark.slow
@pytest.mark.parametrize(("on_a", "on_b"), [(1, 3), (3, 1), (0, 5)])
def test_each_place_has_its_own_side(on_a, on_b, pair, answer):
    """A is wrong in one block and B in another: the onset's side is named, and the other beside."""
    a, true = pair("float32", plants=(f"{LAYERS[on_a]}:out=scale:1.08",))
    plants = [f"{LAYERS[on_b]}:out=scale:1.08"]
    verdict = answer(a, truth=true, plants=plants).verdict
    first, second = sorted(((on_a, "A"), (on_b, "B")))
    assert verdict.onset.block == LAYERS[first[0]]
    assert verdict.side == {"A": "reference", "B": "candidate"}[first[1]]
    assert verdict.summary == (
        f"the error is made at {LAYERS[first[0]]}:out, by {first[1]}; "
        f"another in {LAYERS[second[0]]}, by {second[1]}"
    )


@pytest.mark.slow
def test_each_phase_of_one_block_has_its_own_side(pair, answer):
    """A is wrong in a block's decode step, B in its prefill: both are told."""
    a, true = pair("float32", plants=(f"{LAYERS[2]}:out=scale:1.08@step=2",))
    plants = [f"{LAYERS[2]}:out=scale:1.08@step=0"]
    verdict = answer(a, truth=true, plants=plants).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate")
    assert verdict.summary == (
        f"the error is made at {LAYERS[2]}:out, by B; another in {LAYERS[2]}, by A"
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(2,), range(6)])
@pytest.mark.parametrize("first", ["A", "B"])
def test_each_prompt_of_one_block_has_its_own_side(blocks, first, drawn_model, shared_run, answer):
    """A is wrong in one prompt, B in another: neither is blamed for the other's."""
    model = drawn_model("Mistral", vocab_size=1024, sliding_window=None)
    faults = [
        [f"{LAYERS[number]}:out=scale:1.08@sample={sample}" for number in blocks]
        for sample in ((0, 1) if first == "A" else (1, 0))
    ]
    options = OPTIONS | {"truth": "full", "max_new_tokens": 2}
    a = shared_run(model, dtype="bfloat16", plants=faults[0], **options)
    verdict = answer(a, plants=faults[1]).verdict
    other = "B" if first == "A" else "A"
    assert verdict.side == {"A": "reference", "B": "candidate"}[first]
    assert verdict.onset.sample == 0 and "in prompt 0 alone (of 2)" in verdict.summary
    names = "model.layers.2" if len(blocks) == 1 else "model.layers.0, "
    assert f"in {names}" in verdict.summary and verdict.summary.endswith(f", by {other}")


@pytest.mark.slow
def test_a_prompt_of_which_a_few_tokens_are_off_is_not_left_out(pair, answer):
    """A wider window reaches 16 tokens of one prompt and 4 of 20 of the other: both are off."""
    a, true = pair("float32", 16)
    summary = answer(a, wider_window, truth=true).verdict.summary
    assert "every MistralDecoderLayer" in summary and ", from token 16 on" in summary
    assert "prompt" not in summary


@pytest.mark.slow
@pytest.mark.parametrize("with_truth", [False, True])
def test_what_is_within_its_limits_is_not_equal(with_truth, pair, answer):
    """In one decode step both prompts are off, one by a hundredth of the other, which a truth alone
    sees; all else is equal bit for bit."""
    a, true = pair("float32")
    at, sizes = f"{LAYERS[2]}:out=scale", ("1.0001", "1.000001")
    plants = [f"{at}:{size}@step=2,sample={number}" for number, size in enumerate(sizes)]
    verdict = answer(a, truth=true if with_truth else None, plants=plants).verdict
    scope = "in decode step 2 alone (of 3)" if with_truth else "seen in decode step 2 (of 3)"
    assert scope in verdict.summary
    assert with_truth == verdict.summary.endswith(scope)  # no one token of two prompts


@pytest.mark.slow
def test_most_of_one_type_of_layer_are_a_kind(drawn_model, shared_run, answer):
    """Every sliding layer of a model that alternates them with full ones, and none of the others:
    a setting of theirs, not the first of them."""
    sizes = {"vocab_size": 1024, "hidden_size": 64, "head_dim": 16, "sliding_window": 12}
    a = shared_run(drawn_model("Gemma2", **sizes), max_new_tokens=3, dtype="float32", **OPTIONS)

    def prepare(model):
        model.config.sliding_window += 1

    verdict = answer(a, prepare).verdict
    assert verdict.kind == "systematic"
    assert "every Gemma2DecoderLayer of type sliding_attention differs" in verdict.headline[0].text


def test_numbers_that_the_modules_hold_stand_beside_what_is_off(drawn_model, shared_run, tmp_path):
    """In the first line: the models differ where the error is made."""
    sizes = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 4}
    one, two = (drawn_model("Granite", **sizes, residual_multiplier=x) for x in (0.5, 1.0))
    a = shared_run(one, max_new_tokens=3, dtype="float32", **OPTIONS)
    verdict = compare(a, capture(str(two), like=a, out=tmp_path / "b", probe=False)).verdict
    assert verdict.kind == "systematic"
    assert "hold other numbers there (GraniteDecoderLayer.residual_multiplier 0.5 / 1.0)" in (
        verdict.summary
    )
