"""Pads of a batch: correct machines fill their rows as they like, and no operator is blamed."""

import pytest
import torch

from divergence import BatchOptions
from divergence import truth as make_truth
from divergence.analyses.operators.measure import measure_operators, rate_operators
from divergence.analyses.operators.operands import Pads
from divergence.facts import worded

PASSES = ("anchored", "anchored")
PADS = ((0, 8, 0), (5, 3, 0), (0, 7, 1))
B, T, D = len(PADS), 8, 32
EMPTY = torch.tensor([[t < left or t >= left + count for t in range(T)] for left, count, _ in PADS])
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
W = torch.randn(D, D, generator=torch.Generator().manual_seed(1)) / D**0.5


@pytest.fixture
def judged(toy):
    """Both sides run ``forward(x, fill, wrong)``, where ``fill`` is what a side puts into pads."""

    def judge(forward, *, wrong=0.0, pads=PADS):
        a = toy(lambda x: forward(x, 0.5, 0.0), [X], pads=pads)
        b = toy(lambda x: forward(x, 2.0, wrong), [X], pads=pads)
        right = toy(
            lambda x: forward(x, 0.5, 0.0), [X.double()], compute_dtype="float64", pads=pads
        )
        return worded(rate_operators(measure_operators(a, b, PASSES, truth=right), notes={}))

    return judge


TABLES = {
    (value, shape, dtype): torch.full(shape, value, dtype=dtype)
    for value in (0.0, 0.5, 1e-3, 1e-2, 1.0, 2.0)
    for shape in ((B, T, D), (B * T, D), (B, D))
    for dtype in (torch.float32, torch.float64)
}
"""As large as what they are added to: another scalar would be told as such."""


def attended(x, fill):
    """As attention leaves it: the rows of pads are whatever a kernel makes of no key."""
    return torch.where(EMPTY[..., None], TABLES[fill, (B, T, D), x.dtype], x.sin())


def block(x, fill, wrong):
    """In (B, T, D), then (B T, D), then (B, N, T, D / N), and its heads one after another."""
    rows = attended(x, fill).reshape(-1, D) @ W.to(x.dtype)
    rows = rows + TABLES[wrong, (B * T, D), x.dtype]
    heads = rows.view(B, T, 4, D // 4).transpose(1, 2) * 1.5
    return heads.reshape(B * 4, T, D // 4).contiguous().cos() + 1.0


def test_what_stands_in_pads_is_no_error(judged):
    """The sides fill them otherwise, and nothing else differs; without pads that is an error."""
    assert judged(block).onset is None
    assert judged(block, pads=((0, T, 0),) * B).onset is not None


def test_a_fault_in_a_batch_with_pads_is_found(judged):
    """Tokens are judged as ever."""
    result = judged(block, wrong=1e-3)
    assert (result.onset, result.side) == ("./aten.add", "candidate")


def mixed(x, fill, wrong):
    """Sums over tokens and pads alike."""
    return (attended(x, fill).sum(1) + TABLES[wrong, (B, D), x.dtype]) * 2.0


def test_what_pads_are_mixed_into_is_not_judged_and_that_is_said(judged):
    """A sum over all rows differs, and nobody can say whether by more than the pads."""
    result = judged(mixed)
    assert result.onset is None
    assert [r.verdict for r in result.results if r.shape == (B, D)] == ["unjudged"] * 3
    assert any("may hold the batch's pads" in note for note in result.notes)


def test_a_fault_behind_what_is_not_judged_blames_no_operator(judged):
    """Its sum may have made it."""
    assert judged(mixed, wrong=1.0).onset is None


def test_pads_that_are_alike_hide_nothing(judged):
    """Where both sides fill them alike, a sum over all rows is judged."""
    result = judged(lambda x, fill, wrong: mixed(x, 0.5, wrong), wrong=1e-2)
    assert (result.onset, result.side) == ("./aten.add", "candidate")


@pytest.mark.parametrize(
    ("shape", "num_cleared"),
    [
        ((B, T), 6),
        ((B, T, 5), 30),
        ((B * T, 5), 30),
        ((B, 4, T, 5), 120),
        ((4 * B, T, 5), 120),
        ((B, 1, T, T), 25 + 2 * 3 * 5 + 1 + 2 * 7),  # scores: the rows and the columns of pads
        ((B, 5), None),
        ((1, T, 5), None),
        ((2 * B * T, 5), None),
        ((), None),
    ],
)
def test_axes_tell_where_pads_are(toy, shape, num_cleared):
    """By hand: five pads in one prompt, one in another."""
    pads = Pads(toy(torch.sin, [X], pads=PADS).manifest, (0, 0))
    mask = pads.mask(shape)
    assert (None if mask is None else int(mask.expand(shape).sum())) == num_cleared


def test_a_decode_step_has_none(toy):
    """A token a row."""
    pads = Pads(toy(torch.sin, [X], pads=PADS).manifest, (0, 1))
    assert pads.rows is None
    assert pads.cleared((B, D), X[:, 0], X[:, 1], None) is not None


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_a_padded_batch_on_two_attentions_blames_none(tmp_path, architecture, answer, shared_run):
    """sdpa leaves zeros in rows that see no key, products and a softmax a mean; experts sort them
    among the tokens. A planted fault is found all the same."""
    a = shared_run(
        architecture,
        prompts=["one two three four five six", "seven"],
        batching=BatchOptions(batch=True),
        max_new_tokens=2,
        dtype="float32",
        attn_implementation="sdpa",
        sites=["blocks", "ops@model.layers.1"],
    )
    truth = make_truth(a, out=tmp_path / "truth")
    assert answer(a, truth=truth, attn_implementation="eager").operators.onset is None
    where = "model.layers.1.post_attention_layernorm"
    found = answer(
        a, truth=truth, attn_implementation="eager", plants=[f"{where}:out=scale:1.1"]
    ).verdict
    assert found.onset is not None and found.onset.block == "model.layers.1"
