"""What is off in many parameters alike is told of all of them, with where to look."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from divergence import Run, TrainOptions, capture, compare
from divergence.domains.training.recording.optimizer import Stepping

PROMPTS = [[5, 9, 31, 7, 12, 40], [8, 3, 22, 9]]


@pytest.fixture
def a(shared_run) -> Run:
    """Three blocks: the least that make a kind."""
    training = TrainOptions(train=True, optimizer="adamw")
    model = {"dtype": "float32", "num_blocks": 3}
    return shared_run(model=model, training=training, prompts=PROMPTS, probe=False)


def _summary(a: Run, out) -> str:
    verdict = compare(a, capture(like=a, out=out, probe=False)).verdict
    assert verdict.kind == "systematic", verdict.summary
    return verdict.summary


@pytest.mark.slow
def test_new_values_that_are_all_off_are_no_fault_of_one_kind(a, tmp_path, monkeypatch):
    """Another learning rate: the first place is an example, not what is special."""
    make = Stepping._optimizer

    def faster(self: Any, parameters: Any) -> Any:
        optimizer = make(self, parameters)
        for group in optimizer.param_groups:
            group["lr"] *= 1.5
        return optimizer

    monkeypatch.setattr(Stepping, "_optimizer", faster)
    summary = _summary(a, tmp_path / "b")
    assert summary.startswith("30 of 30 parameters' new values differ by more than rounding")
    assert "the optimizer's step or its settings" in summary


@pytest.mark.slow
def test_gradients_that_are_all_off_are_not_called_a_kernels(a, tmp_path, monkeypatch):
    """Twice the gradient of every parameter, as of a sum that is made twice."""
    reduce = Stepping.reduce

    def twice(self: Any, named: Any) -> Any:
        held = reduce(self, named)
        for *_, holder in held:
            holder.grad *= 2
        return held

    monkeypatch.setattr(Stepping, "reduce", twice)
    summary = _summary(a, tmp_path / "b")
    assert summary.startswith("30 of 30 parameters' gradients differ by more than rounding")
    assert "not a kernel" in summary and "precision setting" not in summary


class _Product(torch.autograd.Function):
    """x W^T, of which the gradient by W is made in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        rows, columns = out.flatten(0, -2).bfloat16(), x.flatten(0, -2).bfloat16()
        return out @ weight, (rows.t() @ columns).to(weight.dtype)


@contextlib.contextmanager
def coarse_products() -> Iterator[None]:
    forward = torch.nn.Linear.forward
    torch.nn.Linear.forward = lambda self, x: _Product.apply(x, self.weight)
    try:
        yield
    finally:
        torch.nn.Linear.forward = forward


def test_gradients_of_one_class_of_modules_may_be_a_kernels(a, tmp_path):
    """Nothing that blocks hand on is off, and yet it is the product that makes the gradient."""
    with coarse_products():
        summary = _summary(a, tmp_path / "b")
    assert "the product that makes it in Linear" in summary
    assert "not a kernel" not in summary
