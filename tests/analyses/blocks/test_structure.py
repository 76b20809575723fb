"""What is plain of the difference at an onset is named; rounding alone has no structure."""

import pytest
import torch

from divergence import capture

BLOCK = "model.layers.1"
PROMPTS = [
    "A bridge is built twice: once on paper, where every beam is exact, and once in steel.",
    "Hello there",
]


@pytest.fixture
def runs(shared_run):
    """``runs(family, **options)`` → a run that holds what is inside the blocks."""

    def make(family="llama", **given):
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "dtype": "float32", "probe": False}
        options |= {"truth": "full", "store": "full", "sites": "modules"}
        return shared_run(family, model={"num_blocks": 5}, **options | given)

    return make


def hooked(name, change):
    def prepare(model):
        model.get_submodule(name).register_forward_hook(lambda module, args, out: change(out))

    return prepare


def into(name, change):
    def prepare(model):
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: change(*args))

    return prepare


def one_head(out):
    out = out.clone()
    out[..., 16:32] *= 1.3
    return out


def one_channel(out):
    out = out.clone()
    out[..., 5] += 0.1
    return out


def at(number, out):
    out = out.clone()
    out[..., number] += 0.3
    return out


def one_id(out):
    """The rows of one token that is not in all places: those that are equal to the second."""
    same = (out == out[:, 1:2]).all(-1, keepdim=True)
    return out if out.shape[1] < 8 else torch.where(same, out * 1.3, out)


def second_half(out):
    out = out.clone()
    out[..., out.shape[-1] // 2 :] *= 1.1
    return out


def every_second_block(model):
    for layer in model.model.layers[1::2]:
        layer.mlp.register_forward_hook(lambda module, args, out: out * 1.1)


def one_token(out):
    """The last one of the longer prompt, in a prefill."""
    if out.shape[1] < 8:
        return out
    out = out.clone()
    out[:, -1] *= 1.3
    return out


def bias(times):
    def prepare(model):
        module = model.transformer.h[1].mlp.c_proj
        module.register_forward_hook(lambda module, args, out: out + times * module.bias)

    return prepare


def faster(model):
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids * 1.001)


def from_the_eighth_on(out):
    later = torch.arange(out.shape[1])[:, None] >= 7
    return out * (1 + 0.1 * later) if out.shape[1] > 8 else out


def any_vector(out):
    return out + torch.linspace(-0.1, 0.1, out.shape[-1])


DOWN = f"{BLOCK}.mlp.down_proj"
BIAS = "transformer.h.1.mlp.c_proj.bias"
PREPARED = {
    "a factor": hooked(f"{BLOCK}.mlp.up_proj", lambda out: out * 0.5),
    "a bias twice": bias(1.0),
    "a bias left out": bias(-1.0),
    "half a bias": bias(-0.5),
    "any vector": hooked(DOWN, any_vector),
    "a constant a row": hooked(DOWN, lambda out: out + out[..., :1]),
    "a head": hooked(f"{BLOCK}.self_attn.q_proj", one_head),
    "a channel": hooked(DOWN, one_channel),
    "a row of the embedding": hooked("model.embed_tokens", one_id),
    "a row of the vocabulary": hooked("lm_head", lambda out: at(77, out)),
    "a shard of the vocabulary": hooked("lm_head", second_half),
    "growing": faster,
    "beginning": hooked(f"{BLOCK}.self_attn.o_proj", from_the_eighth_on),
    "one token": hooked(DOWN, one_token),
    "every second block": every_second_block,
}
TOLD = {
    "a factor": ("factor", {"factor": 0.5, "update": False}),
    "a bias twice": ("vector", {"parameter": BIAS, "times": 1.0, "cause": "twice"}),
    "a bias left out": ("vector", {"parameter": BIAS, "times": -1.0, "cause": "left_out"}),
    "half a bias": ("vector", {"parameter": BIAS, "times": -0.5, "cause": None}),
    "any vector": ("vector", {"parameter": None}),
    "a constant a row": ("row_constants", {}),
    "a head": ("head", {"number": 1}),
    "a channel": ("channel", {"number": 5}),
    "a row of the embedding": ("vocabulary_row", {"share": 1.0}),
    "a row of the vocabulary": ("vocabulary_row", {"number": 77}),
    "a shard of the vocabulary": ("shard", {"vocabulary": True, "num": 2}),
    "growing": ("growing", {"token": None}),
    "beginning": ("beginning", {"token": 7}),
    "one token": ("one_token", {"sample": 0}),
    "every second block": ("layer_type", {"type": "odd"}),
}
CODES = {f"blocks.{code}" for code, _ in TOLD.values()}


@pytest.mark.parametrize("name", TOLD)
def test_the_structure_of_a_difference_is_named_at_its_onset(runs, answer, printed, name):
    """With the numbers that tell the cause."""
    code, values = TOLD[name]
    code = f"blocks.{code}"
    report = answer(runs("gpt2" if "bias" in name else "llama"), PREPARED[name])
    named = {item.code: item for item in report.verdict.evidence}
    assert code in named, report.verdict.evidence
    if code != "blocks.layer_type":
        begins = " ".join(named[code].text.split()[:3])
        assert begins in " ".join(printed(report).split())  # the first screen
    for key, value in values.items():
        expected = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
        assert named[code][key] == expected


@pytest.mark.parametrize("massive", [1.0, 300.0])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_alone_has_no_structure(answer, tmp_path, tiny_model, massive, seed):
    """However large: where it is largest, in a massive channel, is no structure of a cause."""

    def changed(size):
        def change(out):
            make = torch.Generator().manual_seed(seed + out.shape[1])
            out = out.clone()
            out[..., 7] *= massive
            return out * (1 + size * torch.randn(out.shape, generator=make))

        return hooked(DOWN, change)

    options = {"prompts": PROMPTS, "max_new_tokens": 2, "dtype": "float32", "probe": False}
    model = tiny_model("llama", num_blocks=5)
    a = capture(model, out=tmp_path / "a", prepare=changed(0.0), **options)
    verdict = answer(a, changed(0.1)).verdict
    assert verdict.kind == "localized" and verdict.onset.block == BLOCK
    assert not CODES & {item.code for item in verdict.evidence}


@pytest.mark.slow
def test_a_healthy_pair_is_not_looked_at(runs, answer):
    """No structure is told of runs that differ by rounding alone."""
    a = runs(dtype="bfloat16")

    def prepare(model):
        hooked(DOWN, lambda out: out + out.abs() * 2**-8)(model)

    verdict = answer(a, prepare).verdict
    assert verdict.kind == "within_floor", verdict
    assert not CODES & {item.code for item in verdict.evidence}


@pytest.mark.slow
def test_where_an_error_of_the_prefill_begins_is_asked_of_the_prefill(runs, answer):
    """However many decode steps pass behind it."""
    a = runs(prompts=[list(range(3, 23))], max_new_tokens=6, truth="no", sites="blocks")
    headline = answer(a, PREPARED["beginning"]).verdict.headline
    assert [item["onward"] for item in headline if item.code == "scope"] == [7]


@pytest.mark.slow
def test_what_half_of_the_tokens_are_off_by_is_no_tail_of_rounding(runs, answer):
    """The others are equal bit for bit, so the least of the wrong ones leads up to none, however
    evenly their errors grow, as where documents in one row see each other."""
    a = runs(prompts=[list(range(3, 17))], max_new_tokens=1, truth="no", sites="blocks")
    sizes = torch.cat((torch.zeros(7), 7e-6 * 1.25 ** torch.arange(7)))[:, None]
    verdict = answer(a, hooked(f"{BLOCK}.self_attn.o_proj", lambda out: out * (1 + sizes))).verdict
    assert (verdict.kind, verdict.confidence) == ("localized", "high")
    assert verdict.summary.startswith(f"the error is made at {BLOCK}:out")


@pytest.mark.slow
def test_the_one_block_that_rounds_otherwise_is_named(runs, answer):
    """Where all others are equal bit for bit, however small its difference is."""
    a = runs(sites="blocks")

    def nudge(out):
        bits = out.contiguous().view(torch.int32).clone()
        bits[:, 5:6] += 4  # no decode step has one
        return bits.view(torch.float32)

    prepare = hooked(DOWN, nudge)
    verdict = answer(a, prepare).verdict
    assert (verdict.kind, verdict.side) == ("within_floor", "neither")
    assert f"all of it in {BLOCK}: the other blocks are equal" in verdict.summary
