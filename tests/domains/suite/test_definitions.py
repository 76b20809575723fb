"""Each definition in float64 against numbers worked out by hand, and against torch in float64."""

import inspect
import math

import pytest
import torch
from torch.nn import functional

from divergence.domains.suite.capturing import OPERATORS, cases_in, find
from divergence.domains.suite.definition import outputs_of, widened
from divergence.ops.bounds import Checking


def define(operator: str, **arguments):
    """The definition's results, lists taken for float64 tensors."""
    values = {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    results = outputs_of(find(f"suite.{operator}").truth(**values))
    return results[0] if len(results) == 1 else results


def close(found: torch.Tensor, expected, *, by: float = 1e-15) -> bool:
    expected = torch.tensor(expected, dtype=torch.float64)
    return found.shape == expected.shape and bool(
        ((found.double() - expected).abs() <= by * expected.abs().clamp_min(1)).all()
    )


def test_linear():
    """[1 2] times the rows [3 4], [5 6] is [11 17]; the bias adds."""
    assert close(define("linear", x=[[1.0, 2.0]], weight=[[3.0, 4.0], [5.0, 6.0]]), [[11.0, 17.0]])
    found = define("linear_bias", x=[[1.0, 2.0]], weight=[[3.0, 4.0], [5.0, 6.0]], bias=[0.5, -1.0])
    assert close(found, [[11.5, 16.0]])


def test_products():
    """Rows times columns; batch by batch; matrix times vector."""
    y = [[1.0, 0.0], [2.0, 1.0]]
    assert close(define("matmul", x=[[1.0, 2.0], [3.0, 4.0]], y=y), [[5.0, 2.0], [11.0, 4.0]])
    batched = define("batched_matmul", x=[[[2.0]], [[3.0]]], y=[[[5.0]], [[7.0]]])
    assert close(batched, [[[10.0]], [[21.0]]])
    assert close(define("gemv", matrix=[[1.0, 2.0], [3.0, 4.0]], vector=[1.0, -1.0]), [-1.0, -1.0])


def test_rms_norm():
    """The mean square of (1, 7) is 25; with ε = 11 the root is 6."""
    found = define("rms_norm", x=[[1.0, 7.0]], weight=[2.0, 1.0], eps=11.0)
    assert close(found, [[1 / 3, 7 / 6]])


def test_add_rms_norm():
    """(1, 3) + (0, 4) = (1, 7), which is returned beside its norm."""
    normed, total = define(
        "add_rms_norm", x=[[1.0, 3.0]], residual=[[0.0, 4.0]], weight=[2.0, 1.0], eps=11.0
    )
    assert close(normed, [[1 / 3, 7 / 6]])
    assert close(total, [[1.0, 7.0]])


def test_layer_norm():
    """(2, 4, 12) has mean 6 and variance (16 + 4 + 36)/3; with ε = 49/3 the root is √35."""
    found = define(
        "layer_norm", x=[[2.0, 4.0, 12.0]], weight=[1.0, 2.0, 1.0], bias=[0.0, 0.0, 1.0], eps=49 / 3
    )
    root = math.sqrt(35)
    assert close(found, [[-4 / root, -4 / root, 6 / root + 1]])


def test_rope_turns_halves():
    """A quarter turn takes (a, b) to (-b, a), where b lies D/2 behind a; sin θ = 3/5 as drawn."""
    tables = {"cos": [[0.0, 0.8]], "sin": [[1.0, 0.6]]}
    query = [[[[1.0, 5.0, 2.0, 10.0]]]]  # pairs (1, 2) and (5, 10)
    found, key = define("rope", query=query, key=[[[[0.0, 1.0, 0.0, 0.0]]]], **tables)
    assert close(found, [[[[-2.0, -2.0, 1.0, 11.0]]]])
    assert close(key, [[[[0.0, 0.8, 0.0, 0.6]]]])


def test_rope_turns_neighbours():
    """The same turns, of the pairs (1, 5) and (2, 10)."""
    tables = {"cos": [[0.0, 0.8]], "sin": [[1.0, 0.6]]}
    query = [[[[1.0, 5.0, 2.0, 10.0]]]]
    found, _ = define("rope_interleaved", query=query, key=query, **tables)
    assert close(found, [[[[-5.0, 1.0, -4.4, 9.2]]]])


def test_softmax():
    """exp(0) : exp(ln 3) = 1 : 3, also a thousand above; the logarithm of that."""
    x = [[1000.0, 1000.0 + math.log(3)]]
    assert close(define("softmax", x=x), [[0.25, 0.75]], by=1e-12)
    assert close(define("log_softmax", x=x), [[math.log(0.25), math.log(0.75)]], by=1e-12)


ONE_HEAD = {
    "query": [[[[math.log(3.0)]]]],
    "key": [[[[1.0], [0.0]]]],
    "value": [[[[4.0], [8.0]]]],
    "mask": None,
    "causal": False,
    "scale": 1.0,
}


@pytest.mark.parametrize("operator", ["attention", "attention_math", "attention_eager"])
def test_attention(operator):
    """Weights 3/4 and 1/4 of 4 and 8 give 5; causal, one query sees the first key alone."""
    assert close(define(operator, **ONE_HEAD), [[[[5.0]]]])
    assert close(define(operator, **{**ONE_HEAD, "causal": True}), [[[[4.0]]]])


def test_attention_masks():
    """A masked key has no weight; where all are masked the result is 0."""
    second = torch.tensor([[[[False, True]]]])
    assert close(define("attention", **{**ONE_HEAD, "mask": second}), [[[[8.0]]]])
    none = torch.zeros(1, 1, 1, 2, dtype=torch.bool)
    assert close(define("attention", **{**ONE_HEAD, "mask": none}), [[[[0.0]]]])


def test_attention_of_grouped_heads():
    """Of four query heads the first two read the first key-value head."""
    found = define(
        "attention",
        query=[[[[0.0]]] * 4],
        key=[[[[0.0]], [[0.0]]]],
        value=[[[[1.0]], [[2.0]]]],
        mask=None,
        causal=False,
        scale=1.0,
    )
    assert close(found, [[[[1.0]], [[1.0]], [[2.0]], [[2.0]]]])


def test_masks_of_attention():
    """Queries stand at the end: a window is the last five keys, none behind; of the last sample
    the first third of keys is padding, or its first two queries see nothing."""
    masks = {}
    for case in find("suite.attention").cases():
        kind = next((kind for kind in ("window", "padding", "all_masked") if kind in case.name), "")
        if kind and case.name.startswith("float32.odd"):
            masks[kind] = case.make()["mask"][:, 0].tolist()
    every = [[True] * 19] * 7
    assert masks == {
        "window": [[[0 <= t + 12 - s < 5 for s in range(19)] for t in range(7)]] * 2,
        "padding": [every, [[False] * 6 + [True] * 13] * 7],
        "all_masked": [every, [[False] * 19] * 2 + [[True] * 19] * 5],
    }


def test_paged_attention():
    """A sequence of three tokens in blocks 2 and 0 of two places: equal weights of 1, 2 and 6."""
    cache = torch.tensor([[6.0, 900.0], [900.0, 900.0], [1.0, 2.0]], dtype=torch.float64)
    cache = cache[:, :, None, None]  # (blocks, block size, G, H)
    found = define(
        "paged_attention",
        query=[[[0.0], [0.0]]],
        key_cache=cache,
        value_cache=cache,
        block_tables=torch.tensor([[2, 0]], dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        scale=1.0,
    )
    assert close(found, [[[3.0], [3.0]]])


def test_activations():
    """GELU(1) = Φ(1), from the tables 0.841344746; its tanh form 0.841191991; SiLU(ln 3) is
    3/4 ln 3; times 2 gated."""
    assert close(define("gelu", x=[1.0, 0.0]), [0.8413447460685429, 0.0])
    assert close(define("gelu_tanh", x=[1.0]), [0.8411919906082768])
    third = math.log(3)
    assert close(define("silu", x=[third]), [0.75 * third])
    assert close(define("swiglu", gate=[third], up=[2.0]), [1.5 * third])


def test_choices_take_the_first_of_equals():
    """(1, 3, 3, 2): top-2 are places 1 and 2, argmax is 1; expert weights 3/4 and 1/4."""
    values, indices = define("topk", x=[[1.0, 3.0, 3.0, 2.0]], k=2)
    assert close(values, [[3.0, 3.0]])
    assert indices.tolist() == [[1, 2]]
    assert define("argmax", x=[[1.0, 3.0, 3.0, 2.0]]).tolist() == [1]
    weights, experts = define("moe_gating", logits=[[0.0, math.log(3), -50.0]], k=2)
    assert close(weights, [[0.75, 0.25]])
    assert experts.tolist() == [[1, 0]]
    assert define("moe_gating", logits=[[2.0] * 5], k=3)[1].tolist() == [[0, 1, 2]]


def test_embedding_and_sums():
    """Rows 2 and 0 of a table; 1 + 2 - 4 and its way there."""
    weight = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    found = define("embedding", ids=torch.tensor([2, 0]), weight=weight)
    assert close(found, [[5.0, 6.0], [1.0, 2.0]])
    x = [[1.0, 2.0, -4.0]]
    assert close(define("sum", x=x), [-1.0])
    assert close(define("mean", x=x), [-1 / 3])
    assert close(define("cumsum", x=x), [[1.0, 3.0, -1.0]])


def test_quantize():
    """0.25 · 2 + 0 is half-way: to the even 0; 0.75 · 2 to 2; beyond the ends to the ends."""
    found = define("quantize", x=[[0.25, 0.75, -0.25, 70.0, -70.0]], scale=[2.0], offset=[0.0])
    assert found.dtype == torch.int8
    assert found.tolist() == [[0, 2, 0, 127, -128]]
    channels = define("quantize", x=[[1.0, 1.0]], scale=[3.0, -3.0], offset=[1.0, 0.0])
    assert channels.tolist() == [[4, -3]]


def test_dynamic_quant():
    """A row's largest becomes 127, its half 63.5, the even 64; a row of zeros stays."""
    codes, scale = define("dynamic_quant", x=[[-254.0, 127.0, 3.0], [0.0, 0.0, 0.0]], smooth=None)
    assert codes.tolist() == [[-127, 64, 2], [0, 0, 0]]
    assert close(scale, [2.0, 0.0])
    codes, scale = define("dynamic_quant", x=[[127.0, 10.0]], smooth=[1.0, 12.7])
    assert codes.tolist() == [[127, 127]]
    assert close(scale, [1.0])


def test_w8a8_linear():
    """(1·3 + 2·4) · 2 · 0.5 = 11, and a second channel with scale 0.25."""
    found = define(
        "w8a8_linear",
        x=torch.tensor([[1, 2]], dtype=torch.int8),
        weight=torch.tensor([[3, 4], [-128, 127]], dtype=torch.int8),
        x_scale=[2.0],
        weight_scale=[0.5, 0.25],
        out_dtype="float32",
    )
    assert close(found, [[11.0, 63.0]])


def test_casts_to_8_bits():
    """e4m3fn has steps of 1/8 at 1: half-way goes to the even; it ends at 448, e5m2 at 57344."""
    x = [1.0 + 1 / 16, 1.0 + 3 / 16, -(2.0**-10), 3 * 2.0**-10, 448.0, 463.9, 500.0]
    found = define("cast_e4m3fn_saturating", x=x).double()
    assert found.tolist() == [1.0, 1.25, 0.0, 2 * 2.0**-9, 448.0, 448.0, 448.0]
    open_ended = define("cast_e4m3fn", x=[448.0, 463.9, 465.0]).double()
    assert open_ended[:2].tolist() == [448.0, 448.0]
    assert open_ended[2].isnan()
    assert define("cast_e5m2_saturating", x=[1.125, 1.375, 1e6]).double().tolist() == [
        1.0,
        1.5,
        57344.0,
    ]
    assert define("cast_e5m2", x=[1e6]).double().isnan().all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_casts_of_every_half_precision_value(name):
    """All 65536 float16 values: the definition is torch's own rounding, where it is finite."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    dtype = getattr(torch, f"float8_{name}")
    inside = x.double().abs() <= torch.finfo(dtype).max
    found = find(f"suite.cast_{name}").truth(x[inside].double())
    assert torch.equal(found.float(), x[inside].to(dtype).float())


ORACLES = {
    "linear": functional.linear,
    "linear_bias": functional.linear,
    "matmul": torch.matmul,
    "batched_matmul": torch.bmm,
    "gemv": torch.mv,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "rms_norm": lambda x, w, eps: functional.rms_norm(x, x.shape[-1:], w, eps),
    "layer_norm": lambda x, w, b, eps: functional.layer_norm(x, x.shape[-1:], w, b, eps),
    "embedding": functional.embedding,
    "attention": lambda q, k, v, mask, causal, scale: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    ),
}


def names_of(operator) -> dict[str, None]:
    """The arguments that the truth names, in order."""
    parameters = inspect.signature(operator.truth).parameters.values()
    return dict.fromkeys(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


@pytest.mark.parametrize("name", list(ORACLES))
def test_definitions_agree_with_torch_in_float64(name):
    """On the suite's own float32 inputs, widened, within a few float64 roundings."""
    operator = OPERATORS[f"suite.{name}"]
    seen = 0
    for one, case in cases_in("quick"):
        if one is not operator or not case.name.startswith("float32"):
            continue
        if "subnormals" in case.name and name in ("gelu", "gelu_tanh"):
            continue  # torch flushes what is subnormal in float32 there, also in float64
        wide = widened(case.make())
        truth = operator.truth(**wide)
        right = ORACLES[name](*(wide[argument] for argument in names_of(operator)))
        scale = right.abs().amax().clamp_min(1e-300)
        assert float((truth - right).abs().amax() / scale) < 1e-12, case.name
        seen += 1
    assert seen >= 3


def test_every_operator_runs_what_it_defines():
    """run and truth give the same number of results, of the same shapes, for every quick case."""
    for operator, case in cases_in("quick"):
        arguments = case.make()
        assert set(arguments) == set(names_of(operator)), (
            "what may be repeated is told by the truth"
        )
        found = outputs_of(operator.run(**arguments))
        right = outputs_of(operator.truth(**widened(arguments)))
        assert [x.shape for x in found] == [x.shape for x in right], case.name
        for one, other in zip(found, right, strict=True):
            floats = one.is_floating_point() and one.dtype.itemsize > 1
            assert other.dtype == (torch.float64 if floats else one.dtype), case.name


def test_every_suite_keeps_its_bits():
    """Being watched changes nothing."""
    done = set()
    for operator, case in cases_in("quick"):
        if operator.full_name in done:
            continue
        done.add(operator.full_name)
        arguments = case.make()
        with torch.no_grad():
            plain = operator.run(**arguments)
            with Checking():
                watched = operator.run(**arguments)
        for one, two in zip(outputs_of(plain), outputs_of(watched), strict=True):
            assert one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8))
