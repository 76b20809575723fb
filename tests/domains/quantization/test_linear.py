"""Layers under a scheme, against exact integers and against their own definition."""

import numpy as np
import pytest
import torch
from torch import nn

from divergence.domains.quantization.coding import codes_of, scales_of, values_of
from divergence.domains.quantization.model import QuantizedWeight, exact_product, put_in, take_out
from divergence.domains.quantization.scheme import scheme_named
from divergence.recording.widening import Widening


def drawn(*shape, seed=1, outlier=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= outlier
    return x


@pytest.mark.parametrize("k", [8, 1040, 4096, 33000])
def test_sums_of_codes_are_exact(k):
    """Also where they are beyond what a float32 holds exactly."""
    made = np.random.default_rng(k)
    x = made.integers(-128, 128, (3, k))
    w = made.integers(-128, 128, (5, k))
    x[0], w[0] = -128, -128  # the largest sum that can be
    expected = x.astype(np.int64) @ w.T.astype(np.int64)
    found = exact_product(
        torch.tensor(x, dtype=torch.float32), torch.tensor(w, dtype=torch.float32), most=128 * 128
    )
    assert np.array_equal(found.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("asymmetric", ["", "weights", "activations", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w8a8_is_the_integer_computation(dtype, asymmetric):
    """y = s_x s_w Σ (x - z_x)(w - z_w) in int64, rounded at the end."""
    scheme = scheme_named("w8a8", asymmetric=asymmetric)
    x, weight, bias = drawn(2, 7, 96, outlier=40.0).to(dtype), drawn(24, 96), drawn(24)
    layer = QuantizedWeight(weight.to(dtype), scheme)
    found = layer.product(x, bias.to(dtype))

    def whole(tensor, quantizer):
        scale, zero = scales_of(tensor.float(), quantizer)
        codes = codes_of(tensor.float(), quantizer, scale, zero).long()
        return (codes if zero is None else codes - zero.long()), scale

    x_codes, x_scale = whole(x, scheme.activations)
    w_codes, w_scale = whole(weight.to(dtype), scheme.weights)
    sums = x_codes @ w_codes.T
    expected = sums.float() * x_scale * w_scale.squeeze(-1) + bias.to(dtype).float()
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("name", ["w8a16", "w4a16-g32", "w4a8-g32", "fp8", "w8a8-static"])
def test_other_schemes_multiply_what_the_codes_stand_for(name):
    """Each scheme's product is that of its codes' values."""
    scheme = scheme_named(name)
    x, weight = drawn(5, 64), drawn(12, 64, seed=2)
    limits = (float(x.min()), float(x.max())) if scheme.static else None
    layer = QuantizedWeight(weight, scheme, limits=limits)
    values = x
    if scheme.activations is not None:
        scale, zero = scales_of(x, scheme.activations)
        values = values_of(codes_of(x, scheme.activations, scale, zero), scheme.activations, scale)
    expected = values.double() @ layer.values().double().T
    assert torch.allclose(layer.product(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w4a16-g32", "fp8"])
def test_in_float64_only_rounding_is_gone(name):
    """A truth's codes are those of the run: what differs is rounding, and no step of a code."""
    scheme = scheme_named(name)
    x, weight = drawn(5, 64), drawn(12, 64, seed=2)
    layer = QuantizedWeight(weight, scheme)
    with torch.no_grad(), Widening(torch.float64):
        wide = layer.product(x)
    assert wide.dtype == torch.float64
    assert (wide - layer.product(x).double()).abs().max() < 1e-5 * wide.abs().max()


def test_migration_leaves_the_function_as_it_is():
    """X Wᵀ = (X / s)(W s)ᵀ in float64."""
    x, weight = drawn(9, 64, outlier=200.0).double(), drawn(12, 64).double()
    s = (x.abs().amax(0) ** 0.5 / weight.abs().amax(0) ** 0.5).clamp(min=1e-5)
    one, two = x @ weight.T, (x / s) @ (weight * s).T
    assert ((one - two).abs().max() / one.abs().max()).item() < 1e-12


def test_migration_helps_where_a_channel_is_an_outlier():
    """Scales that move from activations to weights cut the error."""
    x, weight = drawn(64, 64, outlier=200.0), drawn(12, 64)
    s = (x.abs().amax(0) ** 0.5 / weight.abs().amax(0) ** 0.5).clamp(min=1e-5)
    true = x.double() @ weight.double().T

    def error(smooth):
        layer = QuantizedWeight(weight, scheme_named("w8a8"), smooth=smooth)
        return float((layer.product(x) - true).norm() / true.norm())

    assert error(s) < 0.3 * error(None)


def test_a_layer_is_put_in_place_and_taken_out():
    """A module multiplies by codes until it is what it was."""
    layer = nn.Linear(64, 12)
    x, before = drawn(3, 64), layer(drawn(3, 64))
    weight = QuantizedWeight(layer.weight, scheme_named("w8a8"))
    put_in(layer, {"weight": [weight]})
    assert type(layer).__name__ == "QuantizedLinear"
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert torch.equal(layer(x), weight.product(x, layer.bias))
    put_in(layer, {"weight": [weight]})  # once more is no more
    take_out(layer)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(x), before)
    take_out(layer)


def test_stacked_matrices_are_found_by_where_they_lie():
    """Each expert of a stacked parameter has its own codes."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(drawn(4, 12, 64))

        def forward(self, x, at):
            return nn.functional.linear(x, self.up[at])

    experts, x = Experts(), drawn(3, 64)
    weights = [QuantizedWeight(one, scheme_named("w8a8")) for one in experts.up]
    put_in(experts, {"up": weights})
    with torch.no_grad():
        for at in range(4):
            assert torch.equal(experts(x, torch.tensor(at)), weights[at].product(x))
