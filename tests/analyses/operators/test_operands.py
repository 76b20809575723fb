"""Scalars and constants are operands: what two calls were given beside tensors."""

import math

import msgspec
import pytest
import torch
from torch.nn import functional as F

from divergence.analyses.operators import operands
from divergence.analyses.operators.find import finding_of
from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.comparison.decide import decide
from divergence.comparison.result import Finding, OtherOperand
from divergence.facts import plain, sentence, worded
from divergence.run.record import Call, Operand, other_scalars

PASSES = ("anchored", "anchored")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = random(40, 128)
HEADS = [random(1, 4, 24, 64, seed=n) for n in (3, 4, 5)]


class _NoAdvice:
    def operator(self, *args):
        return []

    def operator_input(self, *args):
        return []


@pytest.fixture
def judged(toy):
    def judge(f, g, inputs, *, dtype=torch.float32, truth=True):
        values = [t.to(dtype) for t in inputs]
        a, b = toy(f, values), toy(g, values)
        right = toy(f, [t.double() for t in inputs], compute_dtype="float64") if truth else None
        return worded(rate_operators(measure_operators(a, b, PASSES, truth=right), notes={}))

    return judge


def headline(result):
    quiet = Finding(claim="within_rounding", kind="within_floor", headline=[plain("quiet")])
    return worded(decide([quiet, finding_of(result, _NoAdvice())]).verdict)


def attention(scale):
    def forward(q, k, v):
        return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v

    return forward


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_scale_is_the_headline(judged, dtype, truth):
    """The call with another scalar is the onset, and both values are said."""
    result = judged(attention(0.125), attention(0.13125), HEADS, dtype=dtype, truth=truth)
    assert result.onset == "./aten.mul"
    (item,) = next(r for r in result.results if r.site == "./aten.mul").other_operands
    assert (item.argument, item.reference, item.candidate) == ("other", "0.125", "0.13125")
    assert item.difference == pytest.approx(0.05)
    verdict = headline(result)
    assert verdict.summary == "./aten.mul is called with other=0.13125 (A 0.125)"
    assert (verdict.kind, verdict.confidence) == ("localized", "high")


def test_a_number_that_changes_less_than_rounding_is_told_all_the_same(judged):
    """Another epsilon in bfloat16: seen by no error, and differs for sure."""

    def norm(eps):
        return lambda x: x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

    result = judged(norm(1e-5), norm(1e-6), [X], dtype=torch.bfloat16)
    verdict = headline(result)
    assert verdict.summary == "./aten.add is called with other=1e-06 (A 1e-05)"
    assert verdict.confidence == "medium"
    assert any("within rounding" in item.text for item in verdict.evidence)


def test_keyword_arguments_count_and_so_do_their_defaults(judged):
    """alpha left out is alpha = 1; a fused kernel's scale is named like any other."""
    result = judged(
        lambda x: torch.add(x, x.sin()), lambda x: torch.add(x, x.sin(), alpha=1.01), [X]
    )
    assert "alpha=1.01 (A 1)" in headline(result).summary

    def fused(scale):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale)

    assert "scale=0.13125" in headline(judged(fused(0.125), fused(0.13125), HEADS)).summary


def test_two_ways_of_writing_one_number_are_the_same(judged):
    """64 ** -0.5 and 1 / sqrt(64), 96 ** -0.5 and 1 / sqrt(96): a last bit of a Python float."""
    for size in (64, 80, 96):
        result = judged(attention(size**-0.5), attention(1 / math.sqrt(size)), HEADS)
        assert result.onset is None
        assert all(r.other_operands == [] for r in result.results)


def test_a_constant_made_outside_is_compared_by_value(judged):
    """A scale as a tensor of no axes; its last bit may differ, more may not."""

    def scaled(value):
        scale = torch.tensor(value)
        return lambda x: x * scale.to(x.device)

    result = judged(scaled(0.125), scaled(0.126), [X], dtype=torch.bfloat16)
    assert "other=0.126000002 (A 0.125)" in headline(result).summary
    (item,) = result.results[0].other_operands
    assert item.kind == "constant"
    assert judged(scaled(0.125), scaled(0.125 + 2**-27), [X]).onset is None


def test_another_mask_is_told(judged):
    """Booleans and masks of zeros and minus infinity must be equal."""
    seen = torch.ones(40, 40).tril().bool()

    def masked(mask):
        return lambda x: (x @ x.T).masked_fill(mask, -1e30).softmax(-1)

    result = judged(masked(~seen), masked(~seen.tril(-1)), [X])
    assert "mask=820 of 1600 set (A 780 of 1600 set)" in headline(result).summary

    def added(mask):
        table = torch.zeros(40, 40).masked_fill(~mask, -torch.inf)
        return lambda x: ((x @ x.T) + table).softmax(-1)

    result = judged(added(seen), added(seen.tril(1)), [X])
    assert result.onset is None  # the same mask
    other = seen.clone()
    other[3, 5] = True
    assert "masked" in headline(judged(added(seen), added(other), [X])).summary


def test_what_an_operator_writes_to_is_no_constant(judged):
    """Memory that nothing was written to before holds anything."""

    def put(fill):
        memory = torch.full((4,), fill)

        def forward(x):
            memory.fill_(fill)  # as it would be found
            return x * memory.copy_(torch.arange(4)).sum()

        return forward

    result = judged(put(7), put(7), [X])
    assert result.onset is None
    found = {
        r.site: [one.argument for one in r.other_operands]
        for r in judged(put(7), put(8), [X]).results
    }
    assert found["./aten.fill_"] == ["value"]
    assert found["./aten.copy_"] == []


def test_where_a_wrong_kernel_comes_first_it_is_the_onset(judged):
    """The scalar behind it is told at its own operator."""
    table = {t: torch.full((40, 128), 1.001, dtype=t) for t in (torch.float32, torch.float64)}

    def code(wrong, scale):
        def forward(x):
            x = x.sin()
            x = x * (table[x.dtype] if wrong else table[x.dtype] / 1.001)
            return (x * scale).tanh()

        return forward

    result = judged(code(False, 2.0), code(True, 3.0), [X])
    assert result.onset == "./aten.mul"
    later = next(r for r in result.results if r.site == "./aten.mul#2")
    assert later.other_operands[0].candidate == "3.0"


def call(operator="aten.mul.Tensor", **arguments):
    return Call(operator=operator, arguments=arguments)


def test_scalars_by_hand():
    """Dims and flags are no numbers; where memory lies is no operand; tensors are none either."""
    dims = other_scalars(
        call("aten.sum.dim_IntList", dim=[0]), call("aten.sum.dim_IntList", dim=[1])
    )
    assert [(item.argument, item.is_number) for item in dims] == [("dim", False)]
    there = other_scalars(
        call("aten._to_copy.default", dtype={"dtype": "float32"}, device={"device": "cpu"}),
        call("aten._to_copy.default", dtype={"dtype": "bfloat16"}, device={"device": "cuda"}),
    )
    assert [item.argument for item in there] == ["dtype"]
    assert other_scalars(call(other={"tensor": 1}), call(other={"tensor": 1})) == []
    assert other_scalars(call(other=1), call(other=1.0)) == []
    assert other_scalars(call(other={"float": "inf"}), call(other={"float": "inf"})) == []
    assert other_scalars(call(other={"float": "inf"}), call(other=1.0))[0].is_number
    assert other_scalars(call(), call("aten.add.Tensor", other=2)) == []


def test_the_json_holds_them(judged):
    """Typed data, like the rest of the report."""
    result = judged(attention(0.125), attention(0.25), HEADS)
    built = msgspec.to_builtins(result)
    found = next(r for r in built["results"] if r["site"] == "./aten.mul")
    assert found["other_operands"][0]["kind"] == "scalar"
    assert found["why"] == "operands"


def test_axes_and_masks_said_in_two_ways_are_the_same():
    """The last axis by either number; -inf and finfo.min where a mask is filled."""
    x = Operand(site="m/aten.mul:out", shape=(2, 3, 4), dtype="float32")

    def summed(dim):
        return Call(
            operator="aten.sum.dim_IntList",
            operands=(x,),
            arguments={"self": {"tensor": 0}, "dim": dim},
        )

    assert other_scalars(summed([-1]), summed([2])) == []
    assert other_scalars(summed([-1]), summed([1])) != []
    fill = "aten.masked_fill.Scalar"
    lowest = call(fill, value=-3.4028234663852886e38)
    assert other_scalars(call(fill, value={"float": "-inf"}), lowest) == []
    assert other_scalars(call(fill, value=0.0), lowest)[0].is_number


def test_a_number_taken_from_a_tensor_may_be_rounded(judged):
    """A scale that is a result itself (amax.item()) is told, and no fact: rounding moves it."""
    noise = 1 + 1e-6 * random(40, 128, seed=9)

    def scaled(off):
        def forward(x):
            y = x * (noise.to(x.dtype) if off else torch.ones_like(noise).to(x.dtype))
            return y * float(y.abs().max())

        return forward

    result = judged(scaled(False), scaled(True), [X])
    assert all(not one.is_value for r in result.results for one in r.other_operands)
    assert next(r for r in result.results if r.site == "./aten.mul#2").why != "operands"


def test_a_small_buffer_is_a_constant(toy):
    """Of another machine's making, by its digest and its value."""
    buffers = [{"scale": torch.tensor([value])} for value in (0.125, 0.126)]
    runs = [toy(lambda x, scale: x * scale, [X], weights=one) for one in buffers]
    result = worded(rate_operators(measure_operators(*runs, PASSES), notes={}))
    (item,) = result.results[0].other_operands
    assert (item.kind, item.reference, item.candidate) == ("constant", "[0.125]", "[0.126000002]")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(4, 8), "32 zeros"),
        (
            torch.zeros(4, 8).masked_fill(torch.ones(4, 8).triu(1) > 0, -torch.inf),
            "22 of 32 masked",
        ),
        (torch.zeros(4, 8, dtype=torch.bool), "0 of 32 set"),
        (torch.full((4, 8), 2.0), "32 values of norm 11.3137"),
    ],
)
def test_a_tensor_in_a_few_words(values, said):
    """A tensor of zeros masks nothing, and need be no mask."""
    assert sentence(operands._value(values)) == said


@pytest.mark.parametrize(
    ("side", "said"), [("candidate", "eps=2 (A 1)"), ("reference", "eps=1 (B 2)")]
)
def test_a_sides_own_argument_comes_first(side, said):
    """With the other side's behind it."""
    values = {"reference_value": plain("1"), "candidate_value": plain("2")}
    item = OtherOperand(argument="eps", kind="scalar", **values)
    assert operands.operands_text([item], side) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("factor", "difference"), [(math.sqrt(128) * 1.02, 0.02), (11.0, 0.028), (math.sqrt(128), None)]
)
def test_a_number_in_a_tensors_place_is_compared_with_it(toy, dtype, factor, difference):
    """A scale that is a buffer on one side and a number in the code on the other: another one is
    told with both values, one that is the same but for rounding to the buffer's dtype is none."""
    scale = {"scale": torch.tensor(math.sqrt(128), dtype=dtype)}
    a = toy(lambda x, scale: (x + 1) * scale, [X.to(dtype)], weights=scale)
    b = toy(lambda x, scale: (x + 1) * factor, [X.to(dtype)], weights=scale)
    result = rate_operators(measure_operators(a, b, PASSES), notes={})
    items = [item for row in result.results for item in row.other_operands]
    assert [item.argument for item in items] == (["other"] if difference else [])
    if difference:
        assert items[0].difference == pytest.approx(difference, rel=0.25)
        assert "aten.mul is called with other=" in headline(result).summary


@pytest.mark.parametrize("widened", ["candidate", "reference"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda number: lambda x: x * number, "other=1.5 (A 1.25)"),
        (lambda number: lambda x: x + number, "other=1.5 (A 1.25)"),
        (lambda number: lambda x: x.pow(number), "exponent=1.5 (A 1.25)"),
    ],
)
def test_another_number_beside_a_cast_is_told(judged, make, told, widened):
    """One side casts before and after: the operator in between is the same, with another number."""

    def cast(inner):
        return lambda x: inner(x.abs().float()).to(x.dtype).tanh()

    def plain(inner):
        return lambda x: inner(x.abs()).tanh()

    ways = (plain, cast) if widened == "candidate" else (cast, plain)
    result = judged(
        ways[0](make(1.25)), ways[1](make(1.5)), [X.abs() + 1], dtype=torch.bfloat16, truth=False
    )
    assert told in headline(result).summary
    same = judged(
        ways[0](make(1.25)), ways[1](make(1.25)), [X.abs() + 1], dtype=torch.bfloat16, truth=False
    )
    assert same.onset is None
