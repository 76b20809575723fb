"""An operator's error that hangs on one number, as of massive activations, counts as one number."""

import functools

import pytest
import torch

from divergence import capture, compare

BLOCK = "model.layers.1"
PROMPTS = [[(13 * n + 7 * k) % 500 + 3 for k in range(count)] for n, count in enumerate((32, 60))]
MASSIVE = 7


@pytest.fixture
def pair(drawn_model, shared_run, shared_truth):
    """``pair(seed, massive)``: a run with the operators of a block, in whose MLP one channel is so
    much larger, and its truth."""

    def make(seed, massive=3000.0):
        model = drawn_model("Llama", LARGER[massive], seed, num_hidden_layers=3)
        options = {"sites": ["blocks", f"ops@{BLOCK}"], "prompts": PROMPTS, "max_new_tokens": 3}
        a = shared_run(model, dtype="float32", probe=False, truth="no", **options)
        return a, shared_truth(a)

    return make


def larger(model, massive):
    mlp = model.get_submodule(BLOCK).mlp
    mlp.up_proj.weight[MASSIVE] *= massive
    mlp.down_proj.weight[:, MASSIVE] /= massive


LARGER = {size: functools.partial(larger, massive=size) for size in (3e3, 3e6)}


def another_order(model, change=lambda y: y):
    """Sums are added in another order, as other kernels do."""
    for name, linear in model.get_submodule(BLOCK).named_modules():
        if isinstance(linear, torch.nn.Linear):
            made = torch.Generator().manual_seed(3)
            order = torch.randperm(linear.weight.shape[1], generator=made)
            edit = change if name.endswith("up_proj") else lambda y: y

            def forward(x, own=linear, order=order, edit=edit):
                return edit(torch.nn.functional.linear(x[..., order], own.weight[:, order]))

            linear.forward = forward


@pytest.mark.parametrize("massive", [3000.0, 3e6])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_of_one_large_channel_is_one_number(seed, massive, pair, tmp_path):
    """Where the same row of both sides hangs on one number's rounding, a ratio of ten is chance."""
    a, true = pair(seed, massive)
    b = capture(like=a, out=tmp_path / "b", prepare=another_order, probe=False)
    for known in (true, None):
        report = compare(a, b, truth=known)
        assert report.operators is not None and report.operators.onset is None
        side = None if known is None else "neither"
        assert (report.verdict.kind, report.verdict.side) == ("within_floor", side)


def bad_token(y):
    """All of one token."""
    if y.shape[-2] > 20:
        y[..., 5, :] *= 1 + 1e-3
    return y


def bad_number(y):
    """One number of one token, the large one."""
    if y.shape[-2] > 20:
        y[..., 5, MASSIVE] += 1e-3 * y[..., MASSIVE].norm()
    return y


def bad_channel(y):
    """The large channel of all tokens."""
    y[..., MASSIVE] *= 1 + 1e-5
    return y


def small_channel(y):
    """Another channel, of all tokens: the large one hides it in the row's error."""
    y[..., 11] *= 1.5
    return y


@pytest.mark.parametrize("change", [bad_token, bad_number, bad_channel, small_channel])
def test_a_fault_beside_a_large_channel_is_found(change, pair, answer):
    """What is far beyond the other side's largest error, or is many numbers, is no chance."""
    a, true = pair(0)
    operators = answer(a, lambda model: another_order(model, change), truth=true).operators
    assert operators is not None and operators.onset is not None
    # what changes the result has no partner: the product of it and the gate is the first that has
    assert operators.onset == f"{BLOCK}.mlp/aten.mul"
    assert operators.side == "candidate"
