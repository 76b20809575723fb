"""An operator's error that hangs on one number, as of massive activations, counts as one number."""

from __future__ import annotations

import pytest
import torch
import transformers

from divergence import capture, compare, truth

BLOCK = "model.layers.1"
PROMPTS = [[(13 * n + 7 * k) % 500 + 3 for k in range(count)] for n, count in enumerate((32, 60))]
MASSIVE = 7


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """``pair(seed, massive)``: a run with the operators of a block, in whose MLP one channel is so
    much larger, and its truth."""
    made = {}

    def make(seed, massive=3000.0):
        key = seed, massive
        if key not in made:
            folder = tmp_path_factory.mktemp("massive")
            torch.manual_seed(seed)
            config = transformers.LlamaConfig(
                vocab_size=512,
                hidden_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=256,
                initializer_range=0.08,
            )
            model = transformers.LlamaForCausalLM(config)
            with torch.no_grad():
                mlp = model.get_submodule(BLOCK).mlp
                mlp.up_proj.weight[MASSIVE] *= massive
                mlp.down_proj.weight[:, MASSIVE] /= massive
            model.save_pretrained(folder / "model")
            a = capture(
                str(folder / "model"),
                out=folder / "a",
                prompts=PROMPTS,
                max_new_tokens=3,
                dtype="float32",
                sites=["blocks", f"ops@{BLOCK}"],
                probe=False,
                truth="no",
            )
            made[key] = a, truth(a, out=folder / "truth")
        return made[key]

    return make


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
def test_a_fault_beside_a_large_channel_is_found(change, pair, tmp_path):
    """What is far beyond the other side's largest error, or is many numbers, is no chance."""
    a, true = pair(0)
    b = capture(
        like=a, out=tmp_path / "b", prepare=lambda model: another_order(model, change), probe=False
    )
    operators = compare(a, b, truth=true).operators
    assert operators is not None and operators.onset is not None
    # what changes the result has no partner: the product of it and the gate is the first that has
    assert operators.onset == f"{BLOCK}.mlp/aten.mul"
    assert operators.side == "candidate"
