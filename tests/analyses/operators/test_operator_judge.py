"""Which operator, and whose: W by hand, rows, columns, heads, ties, and what goes in."""

import itertools
import math

import pytest
import torch

from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.facts import worded
from divergence.run.manifest import digest_tensor

PASSES = ("anchored", "anchored")
X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(1, 4, 40, 16, generator=torch.Generator().manual_seed(1))
W = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 8


@pytest.fixture
def judged(toy):
    """``judged(f, g, inputs, right=h)``: f is the reference's code, g the candidate's; without h
    there is no truth."""

    def judge(f, g, inputs, *, right=None, weights=None, other_weights=None, steps=1):
        a = toy(f, inputs, weights=weights, steps=steps)
        b = toy(g, inputs, weights=other_weights or weights, steps=steps)
        truth = None
        if right is not None:
            wide = {name: value.double() for name, value in (weights or {}).items()}
            inputs = [t.double() if t.is_floating_point() else t for t in inputs]
            truth = toy(right, inputs, weights=wide, steps=steps, compute_dtype="float64")
        return worded(rate_operators(measure_operators(a, b, PASSES, truth=truth), notes={}))

    return judge


def named(result, ending):
    return next(r for r in result.results if r.site.endswith(ending))


def times(factor):
    """By a table as large as x: another scalar would be told as such."""
    tables = {t: torch.full((40, 64), factor, dtype=t) for t in (torch.float32, torch.float64)}
    return lambda x: x * tables[x.dtype]


@pytest.mark.parametrize(
    ("a", "b", "w", "side"),
    [
        (1e-3, 4e-3, 4.0, "candidate"),
        (4e-3, 1e-3, 0.25, "reference"),
        (1e-3, 2e-3, 2.0, None),  # PyTorch's own check lets pass what is three times as far
        (0.0, 0.0, 1.0, None),
    ],
)
def test_w_by_hand(judged, a, b, w, side):
    """One side is a off, the other b: W = b / a, and beyond 3 one of them is to blame."""
    result = judged(times(1 + a), times(1 + b), [X], right=times(1.0))
    found = named(result, "aten.mul")
    assert found.w == pytest.approx(w, rel=1e-3)
    assert result.side == side
    assert result.onset == (None if side is None else "./aten.mul")


def test_noise_below_the_operators_floor_gives_no_ratio(judged):
    """Off by nothing and by 2^-25: the floor in quadrature on both sides, W near 1."""
    result = judged(times(1.0), times(1 + 2.0**-25), [X], right=times(1.0))
    assert result.onset is None
    assert named(result, "aten.mul").w < 1.1


def test_the_first_wrong_one_is_named_not_what_inherits_it(judged):
    """Everything after it is as wrong; it alone is fed by what is right."""

    def chain(wrong):
        def forward(x):
            x = x.sin()
            x = x * (1 + wrong)
            return ((x + 1) @ W.to(x.dtype)).tanh()

        return forward

    result = judged(chain(1e-6), chain(1e-3), [X], right=chain(0.0))
    assert (result.onset, result.side) == ("./aten.mul", "candidate")
    assert named(result, "aten.tanh").verdict == "candidate"


def test_what_only_doubles_an_error_is_not_blamed(judged):
    """2.4 times as far is no fault, its cube is; it was made before the cube all the same."""

    def cube(wrong):
        factor = 1 + wrong * (X > 1.0) + 1e-6
        return lambda x: (x * factor).pow(3)

    result = judged(cube(0.0), cube(4e-6), [X], right=lambda x: (x * 1.0).pow(3))
    assert named(result, "aten.pow").limit_usage > 1
    assert result.onset == "./aten.mul"
    assert result.side == "candidate"


@pytest.mark.parametrize(
    ("shape", "usual", "one", "all_rows", "why"),
    [
        ((40, 1), 1e-4, 1e-2, 1e-4, "row"),  # a single token, which no median sees
        ((40, 1), 1e-4, 2e-2, 1e-2, "typical"),  # all are as far off, one a little more
        ((64,), 1e-5, 1e-3, 1e-5, "column"),  # a single channel
    ],
)
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_one_row_or_one_column(judged, shape, usual, one, all_rows, why, side):
    """One side is off by ``all_rows``, and in one row or column by ``one``: it is told of that one
    where it stands out of the others."""

    def wrong(x):
        error = torch.full(shape, all_rows, dtype=x.dtype)
        error[7] = one
        return x * (1 + error)

    sides = times(1 + usual), wrong
    result = judged(*sides[:: 1 if side == "candidate" else -1], [X], right=times(1.0))
    found = named(result, "aten.mul")
    assert (result.onset, result.side, found.why) == ("./aten.mul", side, why)
    if (why, side) == ("row", "candidate"):
        assert found.peak == pytest.approx(100, rel=0.01)


def test_one_head(judged):
    """One of four: a quarter of the rows, each seven times as far; no row alone is out."""

    def off(head):
        factor = torch.full(HEADS.shape, 1 + 1e-4)
        factor[0, 1] = 1 + head
        return lambda x: x * factor

    result = judged(off(1e-4), off(7e-4), [HEADS], right=lambda x: x * torch.ones(HEADS.shape))
    found = named(result, "aten.mul")
    assert (result.onset, result.side, found.why) == ("./aten.mul", "candidate", "slice")
    assert found.w == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_nan_on_one_side(judged, side):
    """It is that side's, however few there are."""

    def bad(x):
        y = x * 1.0
        y.view(-1)[5] = math.nan
        return y + 1

    codes = [lambda x: x * 1.0 + 1, bad]
    result = judged(*(codes if side == "candidate" else codes[::-1]), [X], right=codes[0])
    assert result.side == side
    assert named(result, result.onset.rpartition("/")[2]).why == "nonfinite"


def test_exact_ties_in_another_order_are_named(toy):
    """Values equal, indices not: rounding explains nothing."""
    scores = torch.rand(20, 6, generator=torch.Generator().manual_seed(3))
    scores[4] = torch.tensor([0.9, 0.1, 0.9, 0.2, 0.3, 0.4])
    a, b, truth = (toy(lambda x: x.topk(2).indices + 0, [s]) for s in (scores, scores, scores))
    site = next(s for s in b._tensors if s[1].endswith("topk:out.1"))
    swapped = b._tensors[site].clone()
    swapped[4] = swapped[4].flip(0)
    replace(b, site, swapped)
    result = rate_operators(measure_operators(a, b, PASSES, truth=truth), notes={})
    found = named(result, "aten.topk")
    assert (result.onset, result.side, found.why) == ("./aten.topk", "candidate", "codes")
    assert found.codes == pytest.approx(2 / 40)


def test_choices_a_rounding_apart_may_differ(toy):
    """The values chosen between are as near as the inputs of both sides."""
    scores = torch.rand(20, 6, generator=torch.Generator().manual_seed(3))
    scores[4] = torch.tensor([0.9, 0.5, 0.5 + 6e-8, 0.2, 0.3, 0.4])
    other = scores.clone()
    other[4, 1] += 12e-8
    a, b = (toy(lambda x: (x * 1).topk(2).indices + 0, [s]) for s in (scores, other))
    truth = toy(lambda x: (x * 1).topk(2).indices + 0, [scores.double()])
    result = rate_operators(measure_operators(a, b, PASSES, truth=truth), notes={})
    assert named(result, "aten.topk").codes > 0
    assert result.onset is None


def replace(run, key, tensor):
    """Another value in place of a recorded one."""
    run._tensors[key] = tensor
    for index, record in enumerate(run.records):
        if (record.step, record.site) == key:
            changes = {"xxh3": digest_tensor(tensor)}
            run.records[index] = type(record)(
                **{f: getattr(record, f) for f in record.__struct_fields__} | changes
            )


def rotate(pairs):
    """Half a rotation's other half: of halves, or of neighbours."""

    def forward(x):
        x = x * 1.0
        half = x.shape[-1] // 2
        return -(x[..., half:] if pairs == "halves" else x[..., 1::2])

    return forward


def test_a_wrong_view_is_named_where_it_is_used(judged):
    """Same operator, same origin, another view: the report tells both."""
    result = judged(rotate("halves"), rotate("neighbours"), [HEADS], right=rotate("halves"))
    assert (result.onset, result.side) == ("./aten.neg", "candidate")
    (item,) = named(result, "aten.neg").other_inputs
    assert item.viewed
    assert item.reference == "./aten.mul via slice(3, 8, end)"
    assert item.candidate == "./aten.mul via slice(3, 1, end, 2)"
    assert item.difference > 1


def test_the_same_view_by_words_with_other_strides(judged):
    """Repeating heads as a tile or one by one: the words are alike, the strides tell."""

    def repeat(axis):
        def forward(x):
            x = (x * 1.0).reshape(2, 40, 32)
            return x.unsqueeze(axis).expand(2, 2, 40, 32).clone()

        return forward

    result = judged(repeat(1), repeat(0), [HEADS], right=repeat(1))
    (item,) = named(result, "aten.clone").other_inputs
    assert result.onset == "./aten.clone"
    assert item.viewed
    assert "strides" in item.reference
    assert item.reference != item.candidate


def test_another_result_taken_is_told(judged):
    """Gate and up swapped: each is right, and handed to the wrong place."""

    def mlp(first, second):
        def forward(x):
            parts = {"gate": x.sin(), "up": x.cos()}
            return parts[first].sigmoid() * parts[second]

        return forward

    result = judged(mlp("gate", "up"), mlp("up", "gate"), [X], right=mlp("gate", "up"))
    assert result.onset == "./aten.sigmoid"
    (item,) = named(result, "aten.sigmoid").other_inputs
    assert (item.reference, item.candidate) == ("./aten.sin", "./aten.cos")
    assert not item.viewed


def test_another_weight_is_told(judged):
    """The same matrix product with a weight of other bytes."""
    result = judged(
        lambda x, weight: x @ weight,
        lambda x, weight: x @ weight,
        [X],
        right=lambda x, weight: x @ weight,
        weights={"weight": W},
        other_weights={"weight": W * 1.01},
    )
    (item,) = named(result, "aten.mm").other_inputs
    assert (result.onset, result.side, item.argument) == ("./aten.mm", "candidate", "mat2")
    assert item.difference == pytest.approx(0.01, rel=1e-3)


def test_healthy_layouts_are_not_told(judged):
    """A copy for one kernel, a view for the other: the values say that nothing is different."""

    def copied(x):
        return (x * 2).T.contiguous() + 1

    def viewed(x):
        return (x * 2).T + 1

    result = judged(copied, viewed, [X], right=viewed)
    assert result.onset is None
    assert all(r.other_inputs == [] for r in result.results)


def test_a_fault_of_decode_steps_is_found_there(toy):
    """Nothing is wrong in the prefill; the operator is named all the same."""
    a, b = (toy(times(1.0), [X], steps=3) for _ in "ab")
    truth = toy(times(1.0), [X.double()], steps=3, compute_dtype="float64")
    for step in (1, 2):
        key = (step, "./aten.mul:out")
        replace(b, key, b._tensors[key] * 1.01)
    result = rate_operators(measure_operators(a, b, PASSES, truth=truth), notes={})
    assert (result.onset, result.side) == ("./aten.mul", "candidate")
    assert [r.phase for r in result.results if r.limit_usage > 1] == ["decode"]


def test_without_a_truth_no_side_is_named(judged):
    """The difference grows at the product; whose it is, nobody can tell."""
    result = judged(lambda x: (x + 1) * 1.0, lambda x: (x + 1) * 1.001, [X])
    assert (result.onset, result.side, result.judged) == ("./aten.mul", None, "difference")


def test_softmax_turns_absolute_differences_into_relative_ones(judged):
    """Scores of magnitude 20 that differ by 1e-4 of themselves: their exponentials by 2e-3."""
    scores = 20 * torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(5))
    other = scores * (
        1 + 1e-4 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(6))
    )

    def attend(factor):
        return lambda x: (x * factor).softmax(-1)

    result = judged(attend(scores / scores), attend(other / scores), [scores])
    softmax = named(result, "aten._softmax")
    assert softmax.difference > 8 * named(result, "aten.mul").difference
    assert softmax.verdict == "fine"


def test_few_numbers_may_differ_widely(toy):
    """One row of two numbers, one side right by luck, is nothing; forty rows so are."""

    def run(rows, error, dtype=torch.float32, **options):
        weights = {"weight": torch.full((40, 2), 1 + error, dtype=dtype)}
        inputs = [X[:rows, :2].to(dtype)]
        return toy(lambda x, weight: x * weight[:rows], inputs, weights=weights, **options)

    for rows, onset in ((1, None), (40, "./aten.mul")):
        a, b = run(rows, 1e-3), run(rows, 1e-5)
        truth = run(rows, 0.0, torch.float64, compute_dtype="float64")
        result = rate_operators(measure_operators(a, b, PASSES, truth=truth), notes={})
        assert result.onset == onset


def test_what_the_truth_does_not_call_is_not_judged(judged):
    """A copy of both sides that float64 code does without: no side can be nearer to the truth, and
    what feeds it feeds what comes after it."""

    def copied(wrong):
        factor = 1 + wrong * torch.ones(40, 1)
        return lambda x: (x * factor).T.contiguous().T + 1

    result = judged(copied(1e-7), copied(1e-3), [X], right=lambda x: (x * 1.0) + 1)
    assert named(result, "aten.clone").verdict == "unjudged"
    assert (result.onset, result.side) == ("./aten.mul", "candidate")


def test_a_row_that_is_masked_but_for_few_numbers_is_not_looked_at_alone(judged):
    """The first token sees itself alone: one score, which one side may have right by luck."""
    scores = torch.randn(40, 40, generator=torch.Generator().manual_seed(7))
    mask = torch.zeros(40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    lucky = torch.full((40, 40), 1 + 1e-4)
    unlucky = lucky.clone()
    unlucky[0, 0] = 1 + 3e-3

    def masked(factor):
        return lambda x: x * factor + mask

    result = judged(masked(lucky), masked(unlucky), [scores], right=masked(torch.ones(40, 40)))
    assert named(result, "aten.add").verdict == "fine"
    assert result.onset is None or result.onset.endswith("mul")


ROWS = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)) * torch.tensor(
    [1e-3] + [1.0] * 63
)
MASK = torch.zeros(40, 64)
MASK[:30, 1:] = torch.finfo(
    torch.float32
).min  # what is left of these rows is their small number alone


def masked(noise):
    factor = 1 + noise
    return lambda x: (x * factor + MASK).tanh()


def test_a_mask_that_takes_the_large_numbers_of_a_row_out_is_no_fault(judged):
    """What differs by 4e-7 of a row differs by 1,000 times as much of the small number that is
    left of it; the absolute difference has not grown."""
    noise = 4e-7 * torch.randn(40, 64, generator=torch.Generator().manual_seed(4))
    result = judged(masked(0 * noise), masked(noise / ROWS.abs().clamp_min(1e-6)), [ROWS])
    assert named(result, "aten.mul").verdict == "fine"
    assert result.onset is None


def test_a_wrong_addition_is_found_without_a_truth(judged):
    """A residual that is added with another bias, next to healthy noise of what came in."""
    noise = 4e-7 * torch.randn(40, 64, generator=torch.Generator().manual_seed(4))

    def adds(bias):
        table = torch.full((40, 64), bias)
        return lambda x: (x * (1 + (noise if bias else 0 * noise))) + (table + 1.0)

    result = judged(adds(0.0), adds(1e-3), [X])
    assert result.onset == "./aten.add"


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 2}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_forwards_without_a_finite_row_beside_finite_ones_are_judged(judged, bad, value):
    """A result that is nan or inf in some forwards alone is the side's that has it; the others
    have columns, which these lack."""

    def product(faulty):
        forwards = itertools.count()
        return lambda x: x.sin() * (value if next(forwards) in bad and faulty else 1.5)

    result = judged(product(False), product(True), [X], right=product(False), steps=3)
    assert result.onset == "./aten.mul" and result.side == "candidate"
