"""Kernels of a backward: their definitions are what autograd computes, and what they are given is
checked before they see it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from divergence.ops.allowed import BACKWARD_NAMES, Unsafe, check_operator
from divergence.ops.bounds import check_bounds
from divergence.ops.replay import _DEFINITIONS

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def defined(operator, **bound):
    return _DEFINITIONS[str(operator)](bound, ())


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name):
    """The definition of its backward is autograd's."""
    x, g = random(3, 7).requires_grad_(), random(3, 7) + 1
    y = getattr(torch, name)(x, -1)
    (right,) = torch.autograd.grad(y, x, g)
    operator = getattr(aten, f"_{name}_backward_data").default
    found = defined(operator, grad_output=g, output=y.detach(), dim=-1)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention(causal, masked):
    """The definition of its backward is autograd's, with masks and without."""
    if causal and masked:
        return
    q, k, v = (random(2, 3, 5, 8).roll(n, 0).requires_grad_() for n in range(3))
    mask = random(2, 1, 5, 5) if masked else None
    g = random(2, 3, 5, 8) - 1
    right = torch.autograd.grad(
        scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal), (q, k, v), g
    )
    given = {"query": q.detach(), "key": k.detach(), "value": v.detach()}
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        *given.values(), 0.0, causal, attn_mask=mask
    )
    bound = given | {
        "grad_out": g,
        "out": out,
        "logsumexp": sums,
        "dropout_p": 0.0,
        "is_causal": causal,
        "attn_mask": mask,
    }
    check_bounds(ATTENTION, bound)
    for one, two in zip(defined(ATTENTION, **bound), right, strict=True):
        torch.testing.assert_close(one, two)


def test_dropout_has_no_definition():
    """Random numbers cannot be run again."""
    with pytest.raises(NotImplementedError, match="dropout"):
        defined(ATTENTION, grad_out=None, query=None, key=None, value=None, dropout_p=0.1)


@pytest.mark.parametrize("name", sorted(BACKWARD_NAMES))
def test_they_are_run(name):
    """Backward operators with a definition are allowed."""
    packet = getattr(aten, name, None)
    if packet is not None:  # of this torch
        check_operator(packet.default)


def test_others_are_not_run_unasked():
    """An operator nobody has looked at is not called."""
    with pytest.raises(Unsafe):
        check_operator(aten._cudnn_rnn_backward.default)


GOOD = {
    "_softmax_backward_data": {
        "grad_output": (2, 3),
        "output": (2, 3),
        "dim": -1,
        "input_dtype": torch.float32,
    },
    "native_layer_norm_backward": {
        "grad_out": (2, 3),
        "input": (2, 3),
        "normalized_shape": [3],
        "mean": (2, 1),
        "rstd": (2, 1),
        "weight": (3,),
        "bias": (3,),
        "output_mask": [True, True, True],
    },
    "embedding_dense_backward": {
        "grad_output": (2, 3),
        "indices": [0, 4],
        "num_weights": 5,
        "padding_idx": -1,
        "scale_grad_by_freq": False,
    },
    "nll_loss_backward": {
        "grad_output": (2,),
        "self": (2, 4),
        "target": [-100, 3],
        "weight": None,
        "reduction": 0,
        "ignore_index": -100,
        "total_weight": (),
    },
}


def laid(bound):
    """Tensors of these shapes; lists of numbers as indices."""
    return {
        name: torch.zeros(value)
        if isinstance(value, tuple)
        else torch.tensor(value)
        if name in ("indices", "target")
        else value
        for name, value in bound.items()
    }


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_is_run(name):
    """Operands within their bounds are accepted, and the operator runs."""
    operator = getattr(aten, name).default
    check_bounds(operator, laid(GOOD[name]))
    operator(**laid(GOOD[name]))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("_softmax_backward_data", {"output": (2, 2)}),
        ("_softmax_backward_data", {"dim": 2}),
        ("native_layer_norm_backward", {"mean": (1, 1)}),
        ("native_layer_norm_backward", {"weight": (2,)}),
        ("native_layer_norm_backward", {"normalized_shape": [2]}),
        ("native_layer_norm_backward", {"grad_out": (1, 3)}),
        ("embedding_dense_backward", {"indices": [0, 5]}),
        ("embedding_dense_backward", {"indices": [-1, 0]}),
        ("embedding_dense_backward", {"indices": [0, 1, 2]}),
        ("nll_loss_backward", {"target": [0, 4]}),
        ("nll_loss_backward", {"target": [0]}),
    ],
)
def test_what_leads_out_of_its_operands_is_refused(name, bad):
    """Sizes that would read other memory are refused."""
    with pytest.raises(Unsafe, match="cannot be given this"):
        check_bounds(getattr(aten, name).default, laid(GOOD[name] | bad))
