"""What is wrong in every block is said to be so, with the forwards, tokens and channels that are
off, and no first block, prompt or step is named for it alone."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

PROMPTS = [
    [(13 * n + 7 * k) % 500 + 3 for k in range(count)] for n, count in enumerate((20, 33, 12, 27))
]
EVERY = range(6)


@pytest.fixture
def reference(drawn_model, shared_run):
    """``reference(dtype, change, **options)``: A, of a model that was changed so."""

    def make(dtype, change=None, **given):
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "truth": "full", "probe": False}
        return shared_run(drawn_model("Llama", change), dtype=dtype, **options | given)

    return make


def in_mlp(change, blocks=EVERY):
    """``prepare``: the MLPs of these blocks give ``change(output)``."""

    def prepare(model):
        for number in blocks:
            mlp = model.model.layers[number].mlp
            mlp.forward = lambda x, own=mlp.forward: change(own(x))

    return prepare


def at_tokens(tokens, factor):
    def change(output):
        output = output.clone()
        if output.shape[1] > 1:
            output[:, tokens] *= factor
        return output

    return change


def in_prompt(length, factor):
    return lambda output: output * factor if output.shape[1] == length else output


def in_channel(factor):
    def change(output):
        output = output.clone()
        output[..., 9] *= factor
        return output

    return change


def is_of_all_blocks(report, side):
    verdict = report.verdict
    assert (verdict.kind, verdict.side) == ("systematic", side), verdict
    assert verdict.summary.startswith("every LlamaDecoderLayer differs by more than rounding")
    assert "alone" not in verdict.summary
    return True


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
def test_one_bad_token_of_every_prompt_is_not_one_prompts(batch, reference, answer):
    """Whoever is the farthest: each prompt's own token is judged."""
    a = reference("float32", batch=batch)
    report = answer(a, in_mlp(at_tokens([-1], 1 + 1e-4)))
    assert is_of_all_blocks(report, "candidate")
    # of a batch the results hold the position of the farthest prompt's token alone
    assert ("at the last token of each prompt" in report.verdict.summary) == (not batch)
    used = {}
    for site in report.sites:
        if site.site == "model.layers.0:out" and site.pass_ == "anchored" and site.step == 0:
            rows = site.prompts or [site]
            used |= {row.sample: row.usage for row in rows}
    assert len(used) == len(PROMPTS)
    assert min(used.values()) > 1


@pytest.mark.parametrize(
    ("dtype", "tokens", "factor"),
    [("float32", [-1], 1 + 1e-4), ("bfloat16", list(range(10)), 2.0), ("float16", [5], 1.5)],
)
def test_bad_tokens_in_every_block_are_found_without_a_truth(
    dtype, tokens, factor, reference, answer
):
    """Siblings with the same fault do not excuse it."""
    a = reference(dtype, truth="no", prompts=[PROMPTS[1] + PROMPTS[2]], max_new_tokens=1)
    assert is_of_all_blocks(answer(a, in_mlp(at_tokens(tokens, factor))), None)


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["full", "no"])
def test_the_first_line_names_the_token(truth, reference, answer):
    """The last token of prompt 1 in every block, and no other."""
    a = reference("float32", truth=truth)

    def change(output):
        return at_tokens([-1], 1 + 3e-4)(output) if output.shape[1] == 33 else output

    verdict = answer(a, in_mlp(change)).verdict
    assert verdict.kind == "systematic"
    assert verdict.summary.endswith("(of 4), at token 32: what is special there?")


@pytest.mark.parametrize(
    ("tokens", "said"), [([-1], "(of 4), at token 32: what"), ([4, 9, -1], "not one layer")]
)
def test_a_token_just_beyond_its_limit_is_named_if_no_other_is_off(tokens, said, reference, answer):
    """Where it holds most of its prompt's difference, and less than a structure does."""
    a = reference("bfloat16")

    def change(output):
        return at_tokens(tokens, 1.2)(output) if output.shape[1] == 33 else output

    report = answer(a, in_mlp(change), attn_implementation="sdpa")
    assert is_of_all_blocks(report, "candidate")
    assert said in report.verdict.summary, report.verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "change", "blocks", "said"),
    [
        ("float32", at_tokens([4], 1 + 1e-5), [4], "at model.layers.4:out, at token 4"),
        ("float16", at_tokens([9], 1 + 1e-2), [2], "at model.layers.2:out, at token 9"),
        ("bfloat16", in_prompt(33, 1.03), EVERY, "first at model.layers.0:out, in prompt 1 alone"),
    ],
)
def test_what_alone_is_not_equal_bit_for_bit_is_no_rounding(
    dtype, change, blocks, said, reference, answer
):
    """The same kernels ran elsewhere: three floors are a fault, and not the twelve, or six, that a
    single token or a forward of kernels that round otherwise may be off by."""
    a = reference(dtype, truth="no")
    report = answer(a, in_mlp(change, blocks))
    off = [site for site in report.sites if site.pass_ == "anchored" and not site.identical]
    assert 3 < max(site.ratio_max for site in off) < 12
    assert max(site.ratio for site in off) < 6
    assert said in report.verdict.summary


@pytest.mark.slow
def test_the_worst_token_of_a_prompt_that_ran_other_kernels_is_no_fault(reference, answer):
    """All tokens of one prompt differ by rounding, as where long prompts run a kernel of their own:
    it may round one of them worse, however equal the other prompts are."""

    def of_another_kernel(output):
        if output.shape[1] != 33:
            return output
        sign = torch.sin(37.0 * torch.arange(output.numel()).reshape(output.shape)).sign()
        output = output * (1 + 1e-6 * sign)
        output[:, 9] *= 1 + 1e-5
        return output

    report = answer(reference("float32", truth="no"), in_mlp(of_another_kernel, [3]))
    off = [site for site in report.sites if site.pass_ == "anchored" and not site.identical]
    assert {site.sample for site in off} == {1}
    assert 3 < max(site.ratio_max for site in off) < 12
    assert report.verdict.kind == "within_floor", report.verdict.summary


@pytest.mark.slow
def test_a_prompt_is_not_off_alone_where_others_differ_there(reference, answer):
    """One block's token of every prompt is off, of one prompt most; all else is equal bit for
    bit."""

    def change(output):
        output = output.clone()
        if output.shape[1] > 1:
            output[:, 4] *= 1 + (2e-5 if output.shape[1] == 33 else 2e-6)
        return output

    verdict = answer(reference("float32", truth="no"), in_mlp(change, [4])).verdict
    assert verdict.summary == "the error is made at model.layers.4:out, at token 4"


@pytest.mark.slow
def test_a_bad_token_beside_a_massive_activation_is_no_equally_good_answer(reference, answer):
    """Its error hangs on one number, which convicts no side; the sides differ by far more than
    rounding makes."""

    def massive(model):
        for number in (0, 3):
            model.model.layers[number].mlp.down_proj.weight[[5, 40]] *= 400

    a = reference("bfloat16", massive)
    verdict = answer(a, in_mlp(at_tokens([9], 1.8))).verdict
    assert (verdict.kind, verdict.side) == ("systematic", None)
    assert "at token 9" in verdict.summary
    assert any(item.code == "blocks.too_few" for item in verdict.evidence)


@pytest.mark.slow
def test_the_farthest_of_a_family_that_is_off_is_not_named_alone(reference, answer):
    """Without a truth: one block beyond its limit, and the others by more than correct kernels
    are."""
    a = reference("bfloat16", truth="no")

    def prepare(model):
        for number, size in enumerate((0.11, 0.07, 0.05, 0.05, 0.06, 0.05)):
            in_mlp(lambda y, size=size: y * (1 + size * torch.sin(37.0 * y)), [number])(model)

    report = answer(a, prepare)
    assert report.verdict.kind == "systematic"
    assert report.verdict.onset.site == "model.layers.0:out"


@pytest.mark.parametrize(("dtype", "roundings"), [("float32", 16), ("bfloat16", 6)])
def test_one_small_factor_of_all_blocks_is_not_one_blocks(dtype, roundings, reference, answer):
    """B is twice as far from the truth in all blocks; in one the scale error alone is beyond."""
    factor = 1 + roundings * torch.finfo(getattr(torch, dtype)).eps / 2
    report = answer(reference(dtype), in_mlp(lambda output: output * factor))
    verdict = report.verdict
    if verdict.kind == "within_floor":
        assert "B's arithmetic is" in verdict.summary
        assert verdict.side is None
    else:
        assert is_of_all_blocks(report, "candidate")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.5), ("float16", 1.05)])
def test_one_channel_of_all_blocks_is_named(dtype, factor, reference, answer):
    """It is no coarser arithmetic: the channel is in the evidence."""
    report = answer(reference(dtype), in_mlp(in_channel(factor)))
    assert is_of_all_blocks(report, "candidate")
    assert any("in channel 9" in item.text for item in report.verdict.evidence)


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["full", "no"])
def test_a_bad_cache_entry_is_every_blocks(truth, reference, answer, monkeypatch):
    """The farthest block is beyond its limit by itself; the others are as wrong by W, or without a
    truth off by what nothing that is recorded explains."""
    a = reference("bfloat16", prompts=PROMPTS[:3], max_new_tokens=6, truth=truth)
    own = DynamicLayer.update

    def update(self, keys, values, *rest, **options):
        all_keys, all_values = own(self, keys, values, *rest, **options)
        if keys.shape[2] == 1:
            all_keys = all_keys.clone()
            all_keys[:, :, 5] = 0
        return all_keys, all_values

    monkeypatch.setattr(DynamicLayer, "update", update)
    report = answer(a)
    assert is_of_all_blocks(report, "candidate" if truth == "full" else None)
    assert "kept between steps" in report.verdict.summary


@pytest.mark.slow
def test_blocks_that_float32_alone_shows_are_each_named(reference, answer):
    """Below the floor of the runs' dtype, too."""
    a = reference("bfloat16", escalate=True)
    report = answer(a, in_mlp(lambda output: output * 1.0005, (0, 2, 4)), escalate=True)
    verdict = report.verdict
    assert verdict.onset is not None and verdict.onset.block == "model.layers.0"
    assert "others in model.layers.2, model.layers.4" in verdict.summary


@pytest.mark.slow
def test_coarse_inputs_of_all_forwards_are_no_fault_of_decoding(reference, answer):
    """The prefill is as coarse as the decode steps, just within its limit."""
    a = reference("float32")

    def prepare(model):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):

                def coarse(x, own=module.forward):
                    bits = x.contiguous().view(torch.int32)
                    return own(((bits + 16) >> 5 << 5).view(torch.float32))

                module.forward = coarse

    report = answer(a, prepare)
    assert "kept between steps" not in report.verdict.summary
    assert "B" in report.verdict.summary or report.verdict.side == "candidate"


@pytest.mark.slow
def test_a_fault_of_the_free_run_alone_is_no_enlarged_rounding(reference, answer):
    """The blocks are equal bit for bit where inputs are, and there is nothing to enlarge."""
    a = reference("bfloat16")
    calls = dict.fromkeys(EVERY, 0)

    def prepare(model):
        for number in EVERY:
            mlp = model.model.layers[number].mlp

            def forward(x, own=mlp.forward, number=number):
                calls[number] += 1
                return own(x) * (1.05 if calls[number] <= 3 * len(PROMPTS) else 1.0)

            mlp.forward = forward

    verdict = answer(a, prepare).verdict
    assert (verdict.kind, verdict.confidence) == ("drift", "low"), verdict.summary
