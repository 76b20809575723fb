"""What is kept of a tensor, and when it is the same one."""

from __future__ import annotations

import pytest
import torch

from divergence.recording.keeper import CopyKeeper, Recent


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["transposed", "strided", "sparse", "with a gradient", "scalar", "empty"],
)
def test_a_copy_holds_the_values_and_nobody_writes_to_it(tensor):
    """Dense, contiguous, detached, in memory of its own."""
    item = CopyKeeper().keep(tensor)
    expected = (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone()
    if not tensor.is_sparse:
        with torch.no_grad():
            tensor.zero_()
    assert item.tensor.is_contiguous()
    assert not item.tensor.requires_grad
    assert torch.equal(item.tensor, expected)


def test_a_tensor_is_recognised_until_it_is_written_to():
    """By identity and version: a view, an equal tensor and a changed one are others."""
    recent, tensor = Recent(), torch.ones(3)
    item = CopyKeeper().keep(tensor)
    recent.add(tensor, item)
    assert recent.find(tensor) is item
    assert recent.find(tensor[:]) is None
    assert recent.find(torch.ones(3)) is None
    tensor.add_(1)
    assert recent.find(tensor) is None


def test_recognition_keeps_no_tensor_alive():
    """Its memory is the model's to give back; an address used again is no recognition."""
    recent, tensor = Recent(), torch.ones(3)
    recent.add(tensor, CopyKeeper().keep(tensor))
    (reference,) = (entry[0] for entry in recent._items.values())
    del tensor
    assert reference() is None


def test_without_a_version_counter_nothing_is_recognised():
    """In inference mode torch counts no writes, so nobody knows."""
    recent = Recent()
    with torch.inference_mode():
        tensor = torch.ones(3)
        recent.add(tensor, CopyKeeper().keep(tensor))
        assert recent.find(tensor) is None
