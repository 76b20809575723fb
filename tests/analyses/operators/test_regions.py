"""Where the sides compute one thing by other operators: one step, judged as one."""

import pytest
import torch
from torch.nn import functional as F

from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.facts import worded

PASSES = ("anchored", "anchored")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = random(24, 128)
W = random(128, 64, seed=1) / 11
BIAS = random(64, seed=2)
HEADS = [random(1, 4, 24, 16, seed=n) for n in (3, 4, 5)]
RESIDUAL = random(24, 64, seed=6)


@pytest.fixture
def judged(toy):
    """``judged(f, g, inputs, weights)``: f the reference's and the truth's code, g the other's."""

    def judge(f, g, inputs, *, weights=None, dtype=torch.float32, truth=True, right=None):
        def cast(tensors, to):
            return [t.to(to) if t.is_floating_point() else t for t in tensors]

        weights = weights or {}
        runs = []
        for code, to, wide in ((f, dtype, None), (g, dtype, None), (right or f, dtype, "float64")):
            own = dict(zip(weights, cast(weights.values(), to), strict=True))
            values = cast(inputs, to)
            if wide:
                own = {name: value.double() for name, value in own.items()}
                values = cast(values, torch.float64)
            runs.append(toy(code, values, weights=own, compute_dtype=wide))
        a, b, r = runs
        measured = measure_operators(a, b, PASSES, truth=r if truth else None)
        return worded(rate_operators(measured, notes={}))

    return judge


def one_product(x, w):
    return (x @ w).tanh()


def in_parts(num, *, kept=None):
    """The product in ``num`` parts along K, added one after the other."""

    def forward(x, w):
        parts = zip(x.chunk(num, -1), w.chunk(num, 0), strict=True)
        total = None
        for part, weight in parts:
            product = part @ weight if kept is None else part.to(kept) @ weight.to(kept)
            total = product if total is None else total + product
        return total.to(x.dtype).tanh()

    return forward


def region_of(result):
    (found,) = [r for r in result.results if r.region is not None]
    return found


def test_one_product_against_eight_parts_is_one_step(judged):
    """No product is compared with a part of another; the sums are compared where they are equal."""
    result = judged(one_product, in_parts(8), [X], weights={"w": W})
    found = region_of(result)
    assert found.region.text == "8 products and 7 additions in place of one product"
    assert (found.site, found.candidate_site) == ("./aten.mm", "./aten.add#7")
    assert result.onset is None
    assert result.unmatched == []


def test_a_wrong_part_convicts_the_region(judged):
    """One part of eight is 2% off: the region is the onset, by the candidate, not a product."""

    def wrong(x, w):
        parts = list(zip(x.chunk(8, -1), w.chunk(8, 0), strict=True))
        total = parts[0][0] @ parts[0][1]
        for number, (part, weight) in enumerate(parts[1:]):
            product = part @ weight
            total = total + (product * 1.02 if number == 3 else product)
        return total.tanh()

    result = judged(one_product, wrong, [X], weights={"w": W})
    assert (result.onset, result.side) == ("./aten.mm", "candidate")
    assert "8 products" in region_of(result).region.text


def test_the_reference_may_be_the_one_in_parts(judged):
    """The text tells whose operators stand in whose place."""
    result = judged(in_parts(4), one_product, [X], weights={"w": W})
    assert region_of(result).region.text == "one product in place of 4 products and 3 additions"
    assert result.onset is None


def test_a_region_only_inherits_what_comes_in(judged):
    """What feeds both is wrong on one side: that is named, and not the region behind it."""

    def healthy(x, w):
        return one_product(x.sin() * TABLE[x.dtype], w)

    def wrong(x, w):
        return in_parts(8)(x.sin() * (TABLE[x.dtype] * 1.01), w)

    result = judged(healthy, wrong, [X], weights={"w": W})
    assert result.side == "candidate"
    assert result.onset == "./aten.mul"


TABLE = {t: torch.ones(X.shape, dtype=t) for t in (torch.float32, torch.float64, torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_kept_in_16_bits_are_three_times_an_ideal_product(judged, dtype):
    """Sixteen parts, each stored: found though both errors hold what came in."""

    def forward(product):
        return lambda x, w: product((x * 1.1).sin() * x.cos(), w)

    result = judged(forward(one_product), forward(in_parts(16)), [X], weights={"w": W}, dtype=dtype)
    found = region_of(result)
    assert 2.3 < found.region.candidate_times < 4
    assert found.region.reference_times == pytest.approx(1.0, abs=0.05)
    assert (result.onset, result.side, found.why) == ("./aten.mm", "candidate", "roundings")
    swapped = judged(
        forward(in_parts(16)), forward(one_product), [X], weights={"w": W}, dtype=dtype
    )
    assert swapped.side == "reference"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_kept_in_float32_are_an_ideal_product(judged, dtype):
    """The same sixteen parts, added up in float32 and stored once: nothing."""
    result = judged(
        one_product, in_parts(16, kept=torch.float32), [X], weights={"w": W}, dtype=dtype
    )
    assert result.onset is None
    assert region_of(result).region.candidate_times == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_added_afterwards_is_no_fault(judged, dtype):
    """addmm against mm and add: one rounding more."""

    def fused(x, w, bias):
        return torch.addmm(bias, x, w).tanh()

    def apart(x, w, bias):
        return (x @ w + bias).tanh()

    result = judged(fused, apart, [X], weights={"w": W, "bias": BIAS}, dtype=dtype)
    found = region_of(result)
    assert found.region.text == "one product and one addition in place of one product with bias"
    assert result.onset is None


def eager(q, k, v):
    return ((q @ k.transpose(-1, -2) * 16**-0.5).softmax(-1) @ v).tanh()


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_attention_is_one_step(judged, dtype):
    """Two products, a scale and a softmax against one kernel; correct ones pass."""
    result = judged(eager, fused, HEADS, dtype=dtype)
    found = region_of(result)
    assert found.region.text.startswith("one fused attention in place of 2 products")
    assert "softmax" in found.region.text
    assert result.onset is None


def test_a_wrong_fused_attention_convicts_the_step(judged):
    """Its scale is 5% off: the step is named, and what is in whose place."""

    def wrong(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1.05 * 16**-0.5).tanh()

    result = judged(eager, wrong, HEADS)
    assert result.onset == region_of(result).site
    assert result.side == "candidate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_norm_is_one_step(judged, dtype):
    """Square, mean, root and products against one kernel, statistics in float32 on both."""

    def apart(x):
        wide = x.float() if x.dtype != torch.float64 else x
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype).tanh()

    def kernel(x):
        return torch.native_layer_norm(x, [128], None, None, 1e-6)[0].tanh()

    centred = X - X.mean(-1, keepdim=True)
    result = judged(apart, kernel, [centred], dtype=dtype)
    assert "fused norm" in region_of(result).region.text
    assert result.onset is None


def test_projections_in_one_product_are_compared_where_they_are_used(judged):
    """Three products against one whose result is cut in three: by what the next calls are given."""

    def apart(x, q, k, v):
        return (x @ q).sin() + (x @ k).cos() * (x @ v).tanh()

    def together(x, q, k, v):
        q, k, v = (x @ torch.cat([q, k, v], 1)).chunk(3, -1)
        return q.sin() + k.cos() * v.tanh()

    weights = {"q": W, "k": W.flip(0), "v": W.flip(1)}
    result = judged(apart, together, [X], weights=weights)
    steps = [r for r in result.results if r.region is not None]
    assert [r.region.argument for r in steps] == ["self"] * 3
    assert {r.region.consumer for r in steps} == {"./aten.sin", "./aten.cos", "./aten.tanh"}
    assert all(r.w is not None and r.verdict == "fine" for r in steps)
    assert result.onset is None

    def wrong(x, q, k, v):
        return together(x, q, 1.01 * k, v)

    result = judged(apart, wrong, [X], weights=weights)
    assert (result.onset, result.side) == ("./aten.mm#2", "candidate")


def test_a_sum_is_not_taken_for_a_part_of_another(judged):
    """In one module: the addition of the residual has a partner, the partial sums have none."""

    def one(x, residual, w):
        return x @ w + residual

    def parts(x, residual, w):
        total = None
        for part, weight in zip(x.chunk(8, -1), w.chunk(8, 0), strict=True):
            product = part @ weight
            total = product if total is None else total + product
        return total + residual

    result = judged(one, parts, [X, RESIDUAL], weights={"w": W})
    pairs = {r.site: r.candidate_site for r in result.results}
    assert pairs == {"./aten.mm": "./aten.add#7", "./aten.add": "./aten.add#8"}
    assert result.onset is None


def test_a_product_of_high_parts_is_not_the_product(judged):
    """x = high + low, two products of the very shapes of the one: the sum is what is compared."""

    def split(x, w):
        high = x.to(torch.bfloat16).to(x.dtype)
        return (high @ w + (x - high) @ w).tanh()

    result = judged(one_product, split, [X], weights={"w": W})
    assert region_of(result).candidate_site == "./aten.add"
    assert result.onset is None


def test_what_has_nothing_in_common_is_said_not_paired(judged):
    """Both sides compute something besides whose value the other does not hold: no pair."""

    def one(x):
        x.sin().sum()
        return x.tanh()

    def two(x):
        x.exp().cumsum(-1)
        return x.tanh()

    result = judged(one, two, [X])
    assert [r.site for r in result.results] == ["./aten.tanh"]
    (note,) = result.notes
    assert note.startswith("could not be compared: ")
    assert "aten.sin" in note
    assert "aten.exp" in note


def test_sums_in_place_from_zeros_are_a_region_of_products(judged):
    """acc = zeros; acc += part: the zeros are no step, and the sums are still too coarse."""

    def collected(x, w):
        total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
        for part, weight in zip(x.chunk(16, -1), w.chunk(16, 0), strict=True):
            total += part @ weight
        return total.tanh()

    result = judged(one_product, collected, [X], weights={"w": W}, dtype=torch.bfloat16)
    found = region_of(result)
    assert found.region.text == "16 products and 16 additions in place of one product"
    assert found.region.candidate_times > 2.3
    assert (result.onset, result.side) == ("./aten.mm", "candidate")


def test_a_result_written_in_parts_keeps_what_follows_comparable(judged):
    """Two products, each written into half of one buffer: what reads it has its partner."""

    def halves(x, w):
        out = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype)
        out[:, :32] = x @ w[:, :32]
        out[:, 32:] = x @ w[:, 32:]
        return out.tanh()

    result = judged(one_product, halves, [X], weights={"w": W})
    assert ("./aten.tanh", "./aten.tanh") in {(r.site, r.candidate_site) for r in result.results}
    assert result.onset is None


def test_products_of_other_things_are_no_pair(judged):
    """Same operator, same shapes, in one module: nothing that they are given is the same."""

    def one(x):
        return (x.sin() * x.cos()).exp() + x

    def two(x):
        y = x.tanh() * x.sigmoid() + 3 * x.erf()
        return y.exp() + x

    result = judged(one, two, [X])
    pairs = {(r.site, r.candidate_site) for r in result.results}
    assert ("./aten.mul", "./aten.mul") not in pairs


@pytest.mark.parametrize("early", [True, False])
def test_a_cast_at_another_place_is_no_fault(judged, early):
    """A norm multiplied by its weight before or after the cast to bfloat16, on either side."""

    def norm(x, w, *, after):
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        if after:
            return (w * wide.to(x.dtype)).tanh()
        return (wide * (w.float() if w.dtype != torch.float64 else w)).to(x.dtype).tanh()

    weights = {"w": 1 + 0.1 * random(128, seed=8)}
    result = judged(
        lambda x, w: norm(x, w, after=early),
        lambda x, w: norm(x, w, after=not early),
        [X],
        weights=weights,
        dtype=torch.bfloat16,
    )
    assert result.onset is None
    assert all(r.reference_dtype == r.candidate_dtype for r in result.results)
