"""A whole kind that is off by one measure is named as a kind, whoever is the first to pass; errors
of several blocks are each named, with their own side."""

from __future__ import annotations

import pytest
import torch
import transformers

from divergence import capture, compare, truth

PROMPTS = [[(13 * n + 7 * k) % 1000 + 3 for k in range(count)] for n, count in enumerate((32, 20))]
LAYERS = [f"model.layers.{number}" for number in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """``pair(dtype, window)``: a run without a truth, and its truth."""
    made = {}

    def make(dtype, window=None, plants=()):
        key = dtype, window, plants
        if key not in made:
            folder = tmp_path_factory.mktemp("kinds")
            torch.manual_seed(0)
            config = transformers.MistralConfig(
                vocab_size=1024,
                hidden_size=128,
                num_hidden_layers=6,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=256,
                initializer_range=0.08,
                sliding_window=window,
            )
            transformers.MistralForCausalLM(config).save_pretrained(folder / "model")
            a = capture(
                str(folder / "model"),
                out=folder / "a",
                prompts=PROMPTS,
                max_new_tokens=4,
                dtype=dtype,
                probe=False,
                truth="no",
                plants=list(plants),
            )
            made[key] = a, truth(a, out=folder / "truth")
        return made[key]

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
def test_a_kind_that_is_off_alike_is_named_as_one(fault, dtype, window, with_truth, pair, tmp_path):
    """The first to pass its limit is not named alone."""
    a, true = pair(dtype, window)
    b = capture(like=a, out=tmp_path / "b", prepare=fault, probe=False)
    verdict = compare(a, b, truth=true if with_truth else None).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate" if with_truth else None)
    assert verdict.summary.startswith("every MistralDecoderLayer differs by more than rounding")


@pytest.mark.parametrize("with_truth", [False, True])
def test_one_bad_block_among_coarse_ones_is_named_alone(with_truth, pair, tmp_path):
    """A block that is off by far more than its siblings, which only are coarse, is no kind."""

    def coarse_and_one(model):
        sums_in_bfloat16(model)
        own = model.model.layers[3].mlp.forward
        model.model.layers[3].mlp.forward = lambda x: own(x) * 1.5

    a, true = pair("bfloat16")
    b = capture(like=a, out=tmp_path / "b", prepare=coarse_and_one, probe=False)
    verdict = compare(a, b, truth=true if with_truth else None).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", LAYERS[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [(0, 2, 4), (1, 2), (0, 3, 5)])
def test_half_of_the_blocks_are_each_named(blocks, dtype, pair, tmp_path):
    """Where no more than half of a kind is wrong, the first is the onset, and all are named."""
    a, true = pair(dtype)
    plants = [f"{LAYERS[number]}:out=scale:1.08" for number in blocks]
    b = capture(like=a, out=tmp_path / "b", plants=plants, probe=False)
    verdict = compare(a, b, truth=true).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate")
    names = [LAYERS[number] for number in blocks]
    assert verdict.onset.block == names[0]
    others = f"{'another' if len(names) == 2 else 'others'} in {', '.join(names[1:])}"
    assert verdict.summary == f"the error is made at {names[0]}:out, by B; {others}"


@pytest.mark.parametrize(("on_a", "on_b"), [(1, 3), (3, 1), (0, 5)])
def test_each_place_has_its_own_side(on_a, on_b, pair, tmp_path):
    """A is wrong in one block and B in another: the onset's side is named, and the other beside."""
    a, true = pair("float32", plants=(f"{LAYERS[on_a]}:out=scale:1.08",))
    plants = [f"{LAYERS[on_b]}:out=scale:1.08"]
    b = capture(like=a, out=tmp_path / "b", plants=plants, probe=False)
    verdict = compare(a, b, truth=true).verdict
    first, second = sorted(((on_a, "A"), (on_b, "B")))
    assert verdict.onset.block == LAYERS[first[0]]
    assert verdict.side == {"A": "reference", "B": "candidate"}[first[1]]
    assert verdict.summary == (
        f"the error is made at {LAYERS[first[0]]}:out, by {first[1]}; "
        f"another in {LAYERS[second[0]]}, by {second[1]}"
    )


def test_most_of_one_type_of_layer_are_a_kind(tmp_path):
    """Every sliding layer of a model that alternates them with full ones, and none of the others:
    a setting of theirs, not the first of them."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        intermediate_size=128,
        initializer_range=0.08,
        sliding_window=12,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    a = capture(
        str(tmp_path / "model"),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="float32",
        probe=False,
        truth="no",
    )

    def prepare(model):
        model.config.sliding_window += 1

    b = capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)
    verdict = compare(a, b).verdict
    assert verdict.kind == "systematic"
    assert "every Gemma2DecoderLayer of type sliding_attention differs" in verdict.headline[0].text


def test_numbers_that_the_modules_hold_stand_beside_what_is_off(tmp_path):
    """In the first line: the models differ where the error is made."""
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        initializer_range=0.08,
        residual_multiplier=0.5,
    )
    model = transformers.GraniteForCausalLM(config)
    for name, factor in (("a", 0.5), ("b", 1.0)):
        model.config.residual_multiplier = factor
        model.save_pretrained(tmp_path / f"model-{name}")
    a = capture(
        str(tmp_path / "model-a"),
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=3,
        dtype="float32",
        probe=False,
        truth="no",
    )
    b = capture(str(tmp_path / "model-b"), like=a, out=tmp_path / "b", probe=False)
    verdict = compare(a, b).verdict
    assert verdict.kind == "systematic"
    assert "hold other numbers there (GraniteDecoderLayer.residual_multiplier 0.5 / 1.0)" in (
        verdict.summary
    )
