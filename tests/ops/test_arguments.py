"""Tensors laid out in memory as an operator saw them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divergence.ops.allowed import Refusal
from divergence.ops.replay import contiguous_stride, laid_out, span_of

BASE = torch.arange(24.0)


@pytest.mark.parametrize(
    "view",
    [
        BASE.reshape(4, 6).t(),
        BASE.reshape(4, 6)[:, 1:3],
        BASE[:4].reshape(4, 1).expand(4, 3),
        BASE.unfold(0, 5, 2),  # windows share elements
        BASE.reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0, 3),
        BASE.to(torch.complex64).reshape(4, 6).t(),
    ],
    ids=lambda view: f"{tuple(view.shape)} {view.stride()}",
)
def test_values_and_strides_are_restored(view):
    """Also of axes that share memory, and of none at all."""
    values = view.clone(memory_format=torch.contiguous_format)
    found = laid_out(values, None if view.is_contiguous() else view.stride())
    assert torch.equal(found, view)
    assert found.stride() == view.stride() or 0 in view.shape


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    strides=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    bytes_=st.sampled_from(range(0, 64, 4)),
)
def test_any_view_of_memory_can_be_made_again(shape, strides, bytes_):
    """Whatever its strides, and wherever it begins."""
    stride = strides[: len(shape)]
    view = torch.arange(200.0).as_strided(shape, stride)
    found = laid_out(
        view.clone(memory_format=torch.contiguous_format), stride, misalignment_bytes=bytes_
    )
    assert torch.equal(found, view)
    if view.numel():
        assert found.stride() == tuple(stride)
        assert found.data_ptr() % 64 == bytes_


def test_memory_is_fresh():
    """An operator may write to it."""
    values = torch.ones(3)
    laid_out(values, None).add_(1)
    assert torch.equal(values, torch.ones(3))


def test_impossible_layouts_are_refused():
    """Strides of another number of axes, or that span more memory than anyone has."""
    with pytest.raises(Refusal, match="damaged"):
        laid_out(torch.ones(2, 2), (1,))
    with pytest.raises(Refusal, match="too much memory"):
        laid_out(torch.ones(2, 2), (1 << 50, 1))


def test_span():
    """From the first to the last element, both counted."""
    assert span_of((2, 3), (3, 1)) == 6
    assert span_of((2, 3), (0, 1)) == 3
    assert span_of((0, 3), (3, 1)) == 0
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)
