"""Blocks with experts: one expert of many, tokens that rounding sends elsewhere, choices that no
rounding explains."""

import functools
import itertools
from functools import partial

import pytest
import torch
import transformers

from divergence import BatchOptions, RecordOptions, Run, capture, compare
from divergence import truth as make_truth
from divergence.analyses.blocks.sections import prompt_usage
from divergence.comparison.experts import Flips, explained_choices, free_routes_differ
from divergence.numerics.arrays import as_array
from divergence.run.site import module_of
from tests.models import tiny, weights

BLOCK = "model.layers.2"
EXPERT = 5
CHOICE = ".experts:in.top_k_index"


def token_ids(number, length):
    return [(7 * i * i + 3 * i + number * 11) % 500 + 6 for i in range(length)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """``recorded("mixtral", 8, "bfloat16")`` → (a run of four blocks with 8 experts each, its
    truth), two prompts of 40 and 60 tokens, each token sent to two experts."""

    @functools.cache
    def make(architecture, num_experts, dtype):
        folder = tmp_path_factory.mktemp("moe")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "NUM_EXPERTS", num_experts)
            model = tiny.build(architecture, folder / "model", dtype=dtype, num_blocks=4)
        prompts = [token_ids(n, length) for n, length in enumerate((40, 60))]
        a = capture(str(model), out=folder / "a", prompts=prompts, max_new_tokens=3)
        return a, make_truth(a, out=folder / "truth")

    return make


def without(module, forward, field, value, *args):
    """What the router makes with another value of one of its fields, which is put back."""
    before = getattr(module, field)
    setattr(module, field, value)
    try:
        return forward(*args)
    finally:
        setattr(module, field, before)


def with_product(module, forward, product, *args):
    """What the router makes with another product of its input and its matrix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", product)
        return forward(*args)


def deepseek(folder, dtype="float32", **options):
    """A run of a small DeepSeek with a trained bias in its routers."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        initializer_range=0.08,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    model.save_pretrained(folder / "model")
    return capture(
        str(folder / "model"),
        out=folder / "a",
        prompts=[token_ids(n, 24) for n in range(2)],
        max_new_tokens=2,
        dtype=dtype,
        probe=False,
        **options,
    )


@pytest.fixture(scope="module")
def deepseek_in(tmp_path_factory):
    """``deepseek_in(dtype)``: such a run, which carries no truth, and its truth."""

    @functools.cache
    def make(dtype):
        folder = tmp_path_factory.mktemp("deepseek")
        a = deepseek(folder, dtype, truth="no")
        return a, make_truth(a, out=folder / "truth")

    return make


def deepseek_with(folder, field, value):
    """Such a run, one whose routers have ``field`` = ``value``, and the first's truth."""
    a = deepseek(folder)

    def prepare(loaded):
        for name, module in loaded.named_modules():
            if name.endswith(".mlp.gate"):
                module.forward = partial(without, module, module.forward, field, value)

    b = capture(like=a, out=folder / "b", prepare=prepare, probe=False)
    return a, b, make_truth(a, out=folder / "truth")


def one_expert(change):
    """``change`` is done to the output weights of one expert of one block, while it computes."""

    def prepare(model):
        experts = model.model.layers[2].mlp.experts
        bad = experts.down_proj.detach().clone()
        change(bad[EXPERT])
        wrong = torch.nn.Parameter(bad, requires_grad=False)
        original = experts.forward

        @functools.wraps(original)
        def forward(*args, **kwargs):
            good = experts._parameters["down_proj"]
            experts._parameters["down_proj"] = wrong
            try:
                return original(*args, **kwargs)
            finally:
                experts._parameters["down_proj"] = good

        experts.forward = forward

    return prepare


def scaled(weight):
    weight.mul_(1.3)


def zeroed(weight):
    weight.zero_()


def in_int8(weight):
    scale = weight.abs().amax(-1, keepdim=True) / 127
    weight.copy_((weight / scale).round() * scale)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [8, 32])
@pytest.mark.parametrize("change", [scaled, zeroed, in_int8])
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("qwen3-moe", "bfloat16"),
        ("mixtral", "float32"),
        ("qwen3-moe", "float32"),
        ("mixtral", "bfloat16"),
        ("mixtral", "float16"),
    ],
)
def test_one_expert_of_many_is_found_and_named(
    architecture, dtype, change, num_experts, recorded, tmp_path
):
    """Few tokens visit it, one perhaps: the block, the side, and the expert that they share. int8
    weights are below a 16-bit floor: there the float32 pass tells."""
    a, truth = recorded(architecture, num_experts, dtype)
    deep = change is in_int8 and dtype != "float32"
    b = capture(
        like=a,
        out=tmp_path / "b",
        prepare=one_expert(change),
        recording=RecordOptions(escalate=deep),
    )
    verdict = compare(a, b, truth=truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.onset.pass_ in ("anchored", "escalated" if deep else "anchored")
    assert any(f"to expert {EXPERT};" in one.text for one in verdict.evidence), verdict.evidence
    if not deep:
        assert compare(a, b).verdict.onset.block == BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*itertools.product(("qwen3-moe", "mixtral"), ("bfloat16", "float16", "float32"))],
)
def test_tokens_that_rounding_sends_elsewhere_are_left_out_and_counted(
    architecture, dtype, recorded, answer
):
    """Another attention kernel flips close choices of 32 experts: no alarm, no single token of a
    block excused without being counted, and how close the choices were."""
    a, truth = recorded(architecture, 32, dtype)
    report = answer(a, truth=truth, attn_implementation="sdpa")
    assert report.verdict.kind == "within_floor", report.verdict
    outs = [
        site
        for site in report.sites
        if site.pass_ == "anchored" and site.role == "block" and site.site.endswith(":out")
    ]
    assert all(site.num_rerouted is not None for site in outs)
    moved = sum(site.num_rerouted for site in outs)
    notes = [note for note in report.notes if "other experts" in note]
    assert bool(moved) == bool(notes)
    if notes:
        assert notes[0].startswith(f"{moved} of ") and "rounding" in notes[0]
    if architecture == "qwen3-moe" and dtype == "bfloat16":
        assert moved and "router logits lay within" in notes[0]
    assert max(site.ratio_max for site in outs if site.ratio_max is not None) < 6


@pytest.mark.slow
def test_a_choice_that_its_logits_do_not_explain_convicts(recorded, answer):
    """A router that ranks one token's experts wrongly: its logits are right, the choice is not, and
    the token is not taken for one that rounding sent elsewhere."""
    a, truth = recorded("qwen3-moe", 8, "bfloat16")

    def prepare(model):
        def change(module, args, out):
            logits, scores, chosen = out
            if len(logits) > 30:
                chosen = chosen.clone()
                chosen[30, 1] = logits[30].argsort()[0]
            return logits, scores, chosen

        model.model.layers[2].mlp.gate.register_forward_hook(change)

    verdict = answer(a, prepare, truth=truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.onset.position == 30


@pytest.mark.slow
def test_a_router_that_is_off_is_found_at_the_router(recorded, answer):
    """Other logits send tokens elsewhere: the router is named, not the tokens excused."""
    a, truth = recorded("qwen3-moe", 8, "bfloat16")

    def prepare(model):
        gate = model.model.layers[2].mlp.gate
        gate.register_forward_pre_hook(lambda module, args: (args[0].roll(1, -1),))

    verdict = answer(a, prepare, truth=truth).verdict
    assert verdict.kind == "localized"
    assert (verdict.onset.site, verdict.side) == (f"{BLOCK}.mlp.gate:out", "candidate")


@pytest.mark.slow
def test_a_router_that_gets_wrong_values_is_not_said_to_make_them(recorded, answer):
    """Attention is off, and the router behind it is the first place that was recorded."""
    a, truth = recorded("qwen3-moe", 8, "bfloat16")

    def prepare(model):
        attention = model.model.layers[2].self_attn
        attention.o_proj.register_forward_hook(lambda module, args, out: out.roll(1, -1))

    report = answer(a, prepare, truth=truth)
    assert report.verdict.onset.site == f"{BLOCK}.mlp.gate:out"
    assert f"gate:out or before it in {BLOCK}, by B" in report.verdict.summary
    assert "localize" in report.verdict.next[0]  # which goes into the block


@pytest.mark.slow
def test_the_prompt_of_one_bad_token_is_beyond_its_limit(recorded, answer):
    """One token off in the second prompt puts that prompt alone beyond its limit."""
    a, truth = recorded("qwen3-moe", 8, "float32")

    def prepare(model):
        def one_token(module, args, out):
            out[:, 45:46] *= 1.05  # the second prompt's

        model.model.layers[2].self_attn.o_proj.register_forward_hook(one_token)

    report = answer(a, prepare, truth=truth)
    assert report.verdict.onset.sample == 1
    usage = {sample: used for used, sample, *_ in prompt_usage(report)}
    assert usage[1] > 1 > usage[0]


@pytest.mark.slow
def test_where_the_choice_is_not_known_one_token_says_nothing(recorded, tmp_path):
    """Runs that did not record it: a single token's error in such a block may be another expert."""
    a, truth = recorded("qwen3-moe", 32, "bfloat16")
    b = capture(like=a, out=tmp_path / "b", prepare=one_expert(scaled))

    def without(run):
        return Run(run.path, run.manifest, [r for r in run.records if CHOICE not in r.site])

    assert compare(a, b, truth=truth).verdict.kind == "localized"
    for runs in ((without(a), b, truth), (a, without(b), truth), (a, b, without(truth))):
        report = compare(runs[0], runs[1], truth=runs[2])
        outs = [s for s in report.sites if s.site == f"{BLOCK}:out" and s.pass_ == "anchored"]
        if runs[2] is truth:
            assert {s.num_rerouted for s in outs} == {None}
            assert report.verdict.kind == "within_floor"


@pytest.mark.slow
def test_a_batch_has_each_prompts_choices(recorded, answer):
    """One expert that is wrong in batches alone: named, with the prompts' own tokens."""
    a, truth = recorded("mixtral", 8, "bfloat16")

    def prepare(model):
        one_expert(scaled)(model)
        experts = model.model.layers[2].mlp.experts
        broken, plain = experts.forward, type(experts).forward

        @functools.wraps(broken)
        def forward(hidden, *args):
            many = len(hidden) not in (40, 60, 1)
            return broken(hidden, *args) if many else plain(experts, hidden, *args)

        experts.forward = forward

    single = answer(a, prepare, truth=truth)
    assert single.verdict.kind == "identical"
    verdict = answer(a, prepare, truth=truth, batching=BatchOptions(batch=True)).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert any(f"to expert {EXPERT};" in one.text for one in verdict.evidence), verdict.evidence


@pytest.mark.slow
def test_the_choice_is_recorded_with_blocks(recorded):
    """Beside each block's output: the router's logits and the chosen experts, token by token, in
    the free and the anchored pass; no other module inside a block."""
    a, truth = recorded("qwen3-moe", 8, "bfloat16")
    for run, pass_ in ((a, "free"), (truth, "free"), (truth, "anchored")):
        logits = run.find((pass_, 1, 0, f"{BLOCK}.mlp.gate:out"))
        chosen = run.find((pass_, 1, 0, f"{BLOCK}.mlp{CHOICE}"))
        assert (logits.shape, chosen.shape) == ((1, 60, 8), (1, 60, 2))
    assert a.manifest.plan.sites == ["blocks"]
    notes = a.manifest.plan.modules
    inner = {record.site for record in a.records if notes[module_of(record.site)].role == "inner"}
    assert inner == {
        f"model.layers.{n}.mlp{port}" for n in range(4) for port in (".gate:out", CHOICE)
    }


def choices(alike, rows, logits, usual=tuple):
    """``explained_choices``, of tensors."""
    rows, logits = ([as_array(side) for side in sides] for sides in (rows, logits))
    return explained_choices(as_array(alike), rows, logits, usual)


def explained(leads, gap, *, num_experts=4):
    """``explained_choices`` of tokens with these leads, all chosen for alike, and of one that the
    candidate sent to the experts 2 and 3 against its logits, by ``gap``."""
    values = torch.zeros(len(leads) + 1, num_experts)
    values[:, :2] = torch.tensor([*leads, gap])[:, None]
    one = torch.tensor([[0, 1]]).repeat(len(values), 1)
    two = one.clone()
    two[-1] = torch.tensor([2, 3])
    alike = torch.ones(len(values), dtype=torch.bool)
    alike[-1] = False
    return bool(choices(alike, (one, two), (values, values))[0][-1])


def test_what_else_decides_is_not_taken_for_a_fault():
    """A lead that was overruled is beyond rounding only where ten smaller ones were not: a decode
    step of one token, or a router with a bias, blames nobody."""
    assert not explained([0.1] * 10, 0.5)
    assert explained([0.1] * 9, 0.5)  # too few to know
    assert explained([], 0.5)
    assert explained([0.9] * 20, 0.5)  # none was closer
    assert explained([*[0.1] * 20, -0.2], 0.5)  # the logits do not decide there either
    assert explained([0.1] * 20, 0.0)  # a tie


def wrong_choice(change, *, decode_alone=False, block=2):
    """``change(logits, experts)`` → other experts, for the router of one block."""

    def prepare(model):
        router = model.model.layers[block].mlp.gate
        original = router.forward

        @functools.wraps(original)
        def forward(hidden):
            logits, weights, experts = original(hidden)
            if len(experts) == 1 or not decode_alone:
                experts = change(logits, experts)
            return logits, weights, experts

        router.forward = forward

    return prepare


def third_for_second(logits, experts):
    return logits.topk(3, -1).indices[:, [0, 2]]


def first_twice(logits, experts):
    return experts[:, :1].expand_as(experts).contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("change", [third_for_second, first_twice])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_router_that_chooses_wrongly_for_every_token_is_found(change, dtype, recorded, tmp_path):
    """No token is left that both sides chose for alike: that the other side follows its logits
    everywhere tells as much."""
    a, truth = recorded("mixtral", 8, dtype)
    b = capture(like=a, out=tmp_path / "b", prepare=wrong_choice(change))
    assert compare(a, b).verdict.onset.block == BLOCK
    verdict = compare(a, b, truth=truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_router_that_chooses_wrongly_in_steps_of_one_token_is_found(dtype, recorded, tmp_path):
    """One token tells nothing by itself: that the other side follows its logits is seen from all
    tokens that its router chose for, those of the prompt above all."""
    a, truth = recorded("mixtral", 8, dtype)
    prepare = wrong_choice(third_for_second, decode_alone=True)
    b = capture(like=a, out=tmp_path / "b", prepare=prepare)
    for reference, candidate, side in ((a, b, "candidate"), (b, a, None)):
        with_truth = truth if side else None
        verdict = compare(reference, candidate, truth=with_truth).verdict
        assert (verdict.kind, verdict.side) == ("localized", side)
        assert (verdict.onset.block, verdict.onset.step) == (BLOCK, 1)


@pytest.mark.slow
def test_what_all_blocks_do_in_every_step_is_not_said_of_one_step_alone(recorded, answer):
    """Beside its siblings, which are as wrong, most steps show nothing: they are held to the limit
    of their kind."""
    a, truth = recorded("qwen3-moe", 8, "float32")

    def prepare(model):
        for block in range(4):
            wrong_choice(third_for_second, decode_alone=True, block=block)(model)

    report = answer(a, prepare, truth=truth)
    verdict = report.verdict
    assert (verdict.kind, verdict.side, verdict.onset.step) == ("systematic", "candidate", 1)
    assert "alone" not in verdict.summary
    steps = [site for site in report.sites if site.step and site.site == "model.layers.1:out"]
    usages = [site.usage for site in steps if site.pass_ == "anchored" and not site.num_rerouted]
    assert len(usages) >= 3
    assert min(usages) > 1


def with_bias(logits, experts):
    bias = torch.arange(logits.shape[-1]) % 3
    return (logits + bias).topk(2, -1).indices


def third_with_bias(logits, experts):
    bias = torch.arange(logits.shape[-1]) % 3
    return (logits + bias).topk(3, -1).indices[:, [0, 2] if len(logits) == 1 else [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("decode_alone", [True, False])
def test_a_router_with_a_bias_that_chooses_otherwise_is_the_onset(
    decode_alone, recorded, tmp_path, answer
):
    """Where not the logits decide, but a bias beside them, few tokens lie near a tie all the same:
    more that went elsewhere are the router's, in four steps of one token as in all of a prompt."""
    healthy, _ = recorded("mixtral", 8, "float32")
    a = capture(like=healthy, out=tmp_path / "a", prepare=wrong_choice(with_bias))
    other = third_with_bias if decode_alone else lambda logits, experts: experts
    verdict = answer(a, wrong_choice(other)).verdict
    assert verdict.kind == "localized"
    assert verdict.onset.site == f"{BLOCK}.mlp.gate:out"
    assert verdict.onset.step == (1 if decode_alone else 0)
    assert "to other experts than " in verdict.summary


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_group", 1), ("topk_group", 2), ("e_score_correction_bias", torch.zeros(8))],
)
def test_a_router_without_its_groups_or_its_bias_is_the_onset(field, value, tmp_path):
    """DeepSeek chooses among the experts of the best groups, with a bias: forgetting either sends
    tokens far from any tie elsewhere, in every block. That a side follows its logits says nothing
    of it; the truth names it."""
    a, b, truth = deepseek_with(tmp_path, field, value)
    assert compare(a, b, force=True).verdict.side is None
    verdict = compare(a, b, truth=truth).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
    assert verdict.onset.site == "model.layers.1.mlp.gate:out"
    assert "3 of 3 routers" in verdict.summary


def in_bfloat16(x, weight):
    return x.bfloat16() @ weight.bfloat16().T


def in_8_bits(x, weight):
    """Partial sums of 16 terms are stored in 8 bits."""
    total = torch.zeros(*x.shape[:-1], len(weight))
    for terms in torch.arange(x.shape[-1]).split(16):
        total += x[..., terms].float() @ weight[:, terms].float().T
        total = total.to(torch.float8_e4m3fn).float()
    return total.to(x.dtype)


PRODUCTS = {
    "bfloat16": in_bfloat16,
    "bfloat16, stored in float32": lambda x, weight: in_bfloat16(x, weight).to(x.dtype),
    "8 bits": in_8_bits,
}


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("dtype", "chosen"), [("bfloat16", 3), ("bfloat16", 1), ("float32", 3)])
def test_a_router_in_a_coarser_dtype_is_the_onset(product, dtype, chosen, deepseek_in, tmp_path):
    """DeepSeek computes its routers in float32 whatever the model's dtype. In bfloat16 they are
    within the rounding of what comes in, and other tokens are near a tie all the same."""
    a, true = deepseek_in(dtype)

    def prepare(model):
        for layer in model.model.layers[1 : 1 + chosen]:
            gate = layer.mlp.gate
            gate.forward = partial(with_product, gate, gate.forward, PRODUCTS[product])

    b = capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)
    for truth in (None, true):
        verdict = compare(a, b, truth=truth).verdict
        assert verdict.kind == ("systematic" if chosen == 3 else "localized")
        assert verdict.onset.site == "model.layers.1.mlp.gate:out"
        assert verdict.side == (None if truth is None else "candidate")


@pytest.mark.slow
def test_a_router_that_both_sides_compute_alike_is_none(deepseek_in, answer):
    """Other kernels of attention move the logits, which are float32's on both sides."""
    a, true = deepseek_in("bfloat16")
    assert answer(a, truth=true, attn_implementation="eager").verdict.kind in (
        "within_floor",
        "identical",
    )


@pytest.mark.slow
def test_where_most_tokens_went_elsewhere_nothing_is_said_to_be_right(recorded, tmp_path):
    """A block of which most tokens were not compared is no answer, whatever the others say."""
    healthy, _ = recorded("mixtral", 8, "float32")
    a = capture(like=healthy, out=tmp_path / "a", prepare=wrong_choice(with_bias))
    b = capture(like=a, out=tmp_path / "b", prepare=wrong_choice(third_with_bias))

    def without(run):  # no router's logits: nobody knows its margin
        return Run(run.path, run.manifest, [r for r in run.records if ".gate:" not in r.site])

    verdict = compare(without(a), without(b)).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("undetermined", None, "low")
    assert f"4 of 4 tokens of {BLOCK} (decode) went to other experts" in verdict.summary


def test_tokens_near_a_tie_of_a_router_with_a_bias_are_left_out():
    """As many flips as lie within the logits' own difference of a tie are rounding; the same token
    behind the same beginning counts once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 8, generator=generator)
    bias = torch.randn(8, generator=generator)
    for size, is_rounding in ((0.02, True), (1e-6, False)):
        other = logits + size * torch.randn(400, 8, generator=generator)
        chosen = [(values + bias).topk(2, -1).indices for values in (logits, other)]
        if not is_rounding:
            chosen[1][:6] = logits[:6].topk(2, -1, largest=False).indices
        flips = Flips.of([side.numpy() for side in chosen], (logits.numpy(), other.numpy()))
        assert len(flips.places) >= 4
        assert flips.beyond_chance(100) != is_rounding
        repeated = Flips.together([flips] * 50)
        assert len(repeated.places) == len(flips.places)


def test_what_lies_within_two_roundings_of_the_recorded_logits_is_a_tie():
    """A kernel that adds up the logits in float32 decides before they are rounded to 16 bits."""
    logits = torch.zeros(40, 4)
    logits[:, :2] = torch.linspace(1e-4, 4, 40)[:, None]
    logits[-1] = torch.tensor([2.0, 2.0, 1.995, 1.995])
    mine = torch.tensor([[0, 1]]).repeat(40, 1)
    other = mine.clone()
    other[-1] = torch.tensor([2, 3])
    alike = torch.arange(40) < 39
    usual = torch.linspace(0, 1, 4000, dtype=torch.float64)
    for dtype, is_explained in ((torch.bfloat16, True), (torch.float32, False)):
        rounded = logits.to(dtype)
        told = choices(alike, (mine, other), (rounded, rounded), lambda: [usual.numpy(), None])
        assert bool(told[0][-1]) == is_explained


def test_an_expert_chosen_twice_is_no_rounding():
    """But where the model does so for tokens chosen for alike."""
    values = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(2, 1)
    usual = torch.tensor([[0, 1], [0, 1]])
    twice = torch.tensor([[0, 1], [0, 0]])
    alike = torch.tensor([True, False])
    assert not choices(alike, (usual, twice), (values, values))[0][1]
    habit = torch.tensor([[0, 0], [0, 1]])
    assert choices(alike, (habit, torch.tensor([[0, 0], [1, 1]])), (values, values))[0][1]


@pytest.mark.slow
def test_free_runs_whose_tokens_went_elsewhere_are_known(recorded, tmp_path):
    """By the prompt, from the step on at which they did; a prompt that is not there is not
    known."""
    a, truth = recorded("qwen3-moe", 32, "bfloat16")
    assert not free_routes_differ([a, a], 0, 2)
    assert free_routes_differ([a, truth], 0, 0)  # 32 experts, 16 bits: some tie is decided apart
    other = capture(
        like=a, out=tmp_path / "b", sites=["model.layers.2"], recording=RecordOptions(anchor=False)
    )
    assert free_routes_differ([a, other], 0, 0)
