"""What no output depends on is told and is no fault; what only looks like it is still found."""

import functools
import sys

import pytest
import torch

from divergence import capture, compare

PROMPTS = [
    "A bridge is built twice: once on paper, where every beam is exact, and once in steel.",
    "Rounding is no error of the machine",
    "Hello there",
]


@pytest.fixture
def runs(shared_run):
    """``runs(family, dtype)`` → a run with its own truth."""

    def make(family="llama", dtype="float32", prompts=PROMPTS):
        options = {"prompts": prompts, "max_new_tokens": 4, "dtype": dtype, "probe": False}
        return shared_run(family, truth="full", store="full", **options)

    return make


def report_of(a, tmp_path, prepare, **options):
    b = capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False, **options)
    return compare(a, b)


def with_logits(change):
    """The output matrix's result goes through ``change``."""

    def prepare(model):
        head = model.lm_head
        head.register_forward_hook(lambda module, args, out: change(out))

    return prepare


def moved(by):
    """Positions go through ``by``."""

    def prepare(model):
        forward = model.model.rotary_emb.forward
        own = functools.wraps(forward)(lambda x, position_ids: forward(x, by(position_ids)))
        model.model.rotary_emb.forward = own

    return prepare


def a_bias_of_one_size(logits):
    return logits + 3.0


LOGITS = {
    "log-probabilities": lambda logits: logits.float().log_softmax(-1).to(logits.dtype),
    "the largest taken off": lambda logits: logits - logits.amax(-1, keepdim=True),
    "one bias": a_bias_of_one_size,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOGITS)
def test_a_constant_of_each_row_of_logits_is_no_fault(runs, tmp_path, name, dtype):
    """Whatever the constant is, it is told with its size, and no side is wrong."""
    report = report_of(runs(dtype=dtype), tmp_path, with_logits(LOGITS[name]))
    assert (report.verdict.kind, report.verdict.side) == ("within_floor", "neither")
    assert "one constant a row" in report.verdict.summary
    assert not any(site.flagged for site in report.sites)
    there = next(s for s in report.sites if s.site == "lm_head:out" and s.pass_ == "anchored")
    assert there.rel_l2 > 1e-3 and there.limit_usage < 1
    # named the other way round, by a truth that is B's
    verdict = compare(report.candidate.path, report.reference.path).verdict
    assert verdict.kind == "within_floor" and verdict.side in ("neither", None)
    assert "one constant a row" in verdict.summary


@pytest.mark.slow
def test_a_constant_is_no_fault_in_a_batch(runs, tmp_path):
    """The candidate runs in one forward the prompts that the reference ran one by one."""
    verdict = report_of(runs(), tmp_path, with_logits(a_bias_of_one_size), batch=True).verdict
    assert (verdict.kind, verdict.side) == ("within_floor", "neither"), verdict


@pytest.mark.slow
def test_a_constant_behind_the_head_is_no_fault(runs, tmp_path):
    """Also where the code between the head and what the model returns adds it."""

    def prepare(model):
        forward = model.forward

        @functools.wraps(forward)
        def centred(*args, **kwargs):
            out = forward(*args, **kwargs)
            out.logits = out.logits - out.logits.mean(-1, keepdim=True)
            return out

        model.forward = centred

    report = report_of(runs(), tmp_path, prepare)
    assert report.verdict.kind == "within_floor", report.verdict
    assert "one constant a row" in report.verdict.summary


@pytest.mark.slow
def test_a_constant_of_each_row_of_scores_is_no_fault(tiny_model, tmp_path):
    """An attention that shifts its scores, where its operators were recorded."""
    softmax = torch.nn.functional.softmax
    a = capture(
        tiny_model("llama"),
        out=tmp_path / "a",
        prompts=PROMPTS[:1],
        max_new_tokens=2,
        dtype="float32",
        probe=False,
        attn_implementation="eager",
        sites=["blocks", "ops@model.layers.1"],
        truth="full",
    )

    def prepare(model):
        attention = model.model.layers[1].self_attn
        forward = attention.forward

        @functools.wraps(forward)
        def shifted(*args, **kwargs):
            torch.nn.functional.softmax = lambda x, *more, **how: softmax(
                x + 0.3713 + x[..., :1], *more, **how
            )
            try:
                return forward(*args, **kwargs)
            finally:
                torch.nn.functional.softmax = softmax

        attention.forward = shifted

    verdict = report_of(a, tmp_path, prepare).verdict
    assert verdict.kind == "within_floor" and verdict.side in ("neither", None)


def one_logit_more(logits):
    logits = logits + 3.0
    logits[..., 77] += 0.05
    return logits


def of_another_size(logits):
    return logits * 1.01 + 3.0


def of_the_last_token(logits):
    changed = logits + 3.0
    changed[..., ::2] -= 0.01
    return changed


FAULTS = {
    "one token's": one_logit_more,
    "the temperature": of_another_size,
    "every second token's": of_the_last_token,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_constant_hides_no_fault_beside_it(runs, tmp_path, name):
    """What is left without the constant is beyond rounding, so the head is at fault."""
    report = report_of(runs(), tmp_path, with_logits(FAULTS[name]))
    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site == "lm_head:out"


@pytest.mark.slow
def test_a_constant_that_rounding_eats_the_logits_by_is_a_fault(runs, tmp_path):
    """At 1000 bfloat16 has steps of 4: the probabilities are no longer the same."""
    report = report_of(runs(dtype="bfloat16"), tmp_path, with_logits(lambda x: x + 1000.0))
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.site == "lm_head:out"


@pytest.mark.slow
def test_a_constant_before_a_cap_is_a_fault(tmp_path):
    """tanh(z + c) is no tanh(z) with a constant: the head's shift moves the probabilities."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        final_logit_softcapping=5.0,
        initializer_range=0.2,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    prompts = [list(range(3, 20)), [77, 300, 12]]
    a = capture(
        tmp_path / "model",
        out=tmp_path / "a",
        prompts=prompts,
        dtype="float32",
        probe=False,
        truth="full",
        store="full",
    )
    report = report_of(a, tmp_path, with_logits(a_bias_of_one_size))
    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site == "lm_head:out"
    assert "one constant a row" not in report.verdict.summary


@pytest.mark.slow
def test_a_constant_beside_a_fault_in_a_block_does_not_hide_the_block(runs, tmp_path):
    """The block is named, and the constant is told beside it."""

    def prepare(model):
        with_logits(a_bias_of_one_size)(model)
        model.model.layers[1].register_forward_hook(
            lambda module, args, out: (out[0] if isinstance(out, tuple) else out) * 1.001
        )

    report = report_of(runs(), tmp_path, prepare)
    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site == "model.layers.1:out"
    assert "logits_shifted" in [item.code for item in report.verdict.evidence]
    assert not any(site.flagged for site in report.sites if site.site == "lm_head:out")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by", [5, 1000, 0.5])
def test_positions_that_begin_elsewhere_are_no_fault(runs, tmp_path, by, dtype):
    """Attention sees differences of positions alone, whatever they begin at."""
    report = report_of(runs(dtype=dtype), tmp_path, moved(lambda positions: positions + by))
    assert report.verdict.kind == "within_floor" and report.verdict.side in ("neither", None)
    assert "cancels between queries and keys" in report.verdict.summary
    if by != 0.5 and dtype == "float32":
        assert f"(positions {by}, {by}, {by} further on)" in report.verdict.summary
    table = next(s for s in report.sites if s.site == "model.rotary_emb:out")
    assert table.rel_l2 > 0.01 and not table.identical and not table.flagged


def from_the_fifth_on(positions):
    return positions + 3 * (positions >= 5)


def in_decode_alone(positions):
    return positions + 3 * (positions.shape[-1] == 1)


def faster(positions):
    return positions * 1.001 + 5


MOVED = {"from the fifth on": from_the_fifth_on, "decode": in_decode_alone, "faster": faster}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MOVED)
def test_positions_that_move_against_each_other_are_a_fault(runs, tmp_path, name, dtype):
    """One token's angle against another's counts, in a prompt and its decode steps."""
    report = report_of(runs(dtype=dtype), tmp_path, moved(MOVED[name]))
    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site.startswith("model.rotary_emb:out")


def test_a_table_that_is_turned_and_larger_is_a_fault(runs, tmp_path):
    """The factor of the tables is that of the scores."""

    def prepare(model):
        moved(lambda positions: positions + 5)(model)
        model.model.rotary_emb.attention_scaling = 1.01

    report = report_of(runs(), tmp_path, prepare)
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.site.startswith("model.rotary_emb:out")


@pytest.mark.slow
def test_tables_that_queries_and_keys_do_not_share_are_a_fault(runs, tmp_path):
    """Where the keys keep theirs, nothing cancels: the free runs part."""

    def prepare(model):
        moved(lambda positions: positions + 5)(model)
        own = sys.modules[type(model).__module__]
        rotate = own.apply_rotary_pos_emb

        def apart(q, k, cos, sin, *args, **kwargs):
            q, _ = rotate(q, k, cos, sin, *args, **kwargs)
            back = torch.full_like(cos[..., :1], 5.0) * model.model.rotary_emb.inv_freq
            back = torch.cat((back, back), -1)
            k_cos = cos * back.cos() + sin * back.sin()
            k_sin = sin * back.cos() - cos * back.sin()
            return q, rotate(q, k, k_cos.to(k.dtype), k_sin.to(k.dtype), *args, **kwargs)[1]

        for layer in model.model.layers:
            forward = layer.self_attn.forward

            @functools.wraps(forward)
            def wrapped(*args, forward=forward, **kwargs):
                own.apply_rotary_pos_emb = apart
                try:
                    return forward(*args, **kwargs)
                finally:
                    own.apply_rotary_pos_emb = rotate

            layer.self_attn.forward = wrapped

    report = report_of(runs(), tmp_path, prepare)
    assert report.verdict.kind in ("localized", "systematic")
    assert report.verdict.side == "candidate"


def turned(model, factor=1.0, keys=True, every=True):
    """Signs of channels that rotate together, of the queries and the keys, and a factor."""
    for layer in model.model.layers[: None if every else 1]:
        attention = layer.self_attn
        half = torch.tensor([1.0, -1.0]).repeat(attention.head_dim // 4)
        signs = torch.cat((half, half))

        def change(module, args, out, signs=signs, factor=1.0):
            return out * signs.repeat(out.shape[-1] // len(signs)).to(out.dtype) * factor

        attention.q_proj.register_forward_hook(functools.partial(change, factor=factor))
        if keys:
            attention.k_proj.register_forward_hook(functools.partial(change, factor=1 / factor))


def reordered(model, back=True):
    """Neurons of every MLP in another order, and the next matrix's columns with them."""
    for layer in model.model.layers:
        mlp, rng = layer.mlp, torch.Generator().manual_seed(0)
        order = torch.randperm(mlp.up_proj.out_features, generator=rng)
        for part in (mlp.up_proj, mlp.gate_proj):
            part.register_forward_hook(lambda module, args, out, order=order: out[..., order])
        if back:
            own, inverse = mlp.down_proj.forward, order.argsort()
            mlp.down_proj.forward = lambda x, own=own, inverse=inverse: own(x[..., inverse])


def folded(model, back=True):
    """What enters the MLP's last matrix is half as large, which that makes up for."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0.5)
        if back:
            own = mlp.down_proj.forward
            mlp.down_proj.forward = lambda x, own=own: own(x * 2)


TAKEN_BACK = {
    "signs of queries and keys": turned,
    "a factor of the queries taken off the keys": functools.partial(turned, factor=8.0),
    "one block's signs": functools.partial(turned, every=False),
    "neurons in another order": reordered,
    "half of what a matrix doubles": folded,
}
NOT_TAKEN_BACK = {
    "signs of queries": functools.partial(turned, keys=False),
    "neurons in another order": functools.partial(reordered, back=False),
    "half": functools.partial(folded, back=False),
    "a small factor": lambda model: [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: out * 1.02)
        for layer in model.model.layers
    ],
}


@pytest.fixture
def inner(shared_run):
    """``inner(dtype)`` → a run that holds what is inside the blocks."""

    def make(dtype):
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "dtype": dtype, "probe": False}
        return shared_run(truth="full", store="full", sites="modules", **options)

    return make


BOTH_DTYPES = ("neurons in another order", "a small factor")


def with_dtypes(names):
    return [(name, "float32") for name in names] + [
        (name, "bfloat16") for name in names if name in BOTH_DTYPES
    ]


@pytest.mark.parametrize(("name", "dtype"), with_dtypes(TAKEN_BACK))
def test_channels_that_the_next_module_takes_back_are_no_fault(inner, tmp_path, name, dtype):
    """Signs, an order, a factor: inside the block much differs, and behind it nothing does."""
    report = report_of(inner(dtype), tmp_path, TAKEN_BACK[name])
    assert report.verdict.kind == "within_floor" and report.verdict.side in ("neither", None)
    assert "takes it back" in report.verdict.summary
    assert not any(site.flagged for site in report.sites)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(NOT_TAKEN_BACK))
def test_channels_that_nothing_takes_back_are_a_fault(inner, tmp_path, name, dtype):
    """The same changes, where the next module computes with them."""
    report = report_of(inner(dtype), tmp_path, NOT_TAKEN_BACK[name])
    assert report.verdict.kind in ("localized", "systematic")
    assert report.verdict.side == "candidate"
