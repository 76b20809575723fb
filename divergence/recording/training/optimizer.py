"""What is done with the gradients of a step: reduced among ranks, unscaled, clipped, applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from divergence.errors import UsageError
from divergence.recording.training.reduction import ORDERS, reduced
from divergence.recording.training.zero import DividedOptimizer, check_reduced
from divergence.run.schema.engine import Training

if TYPE_CHECKING:
    from divergence.recording.ranks.processes import Ranks

__all__ = ["OPTIMIZERS", "Stepping", "Update"]

OPTIMIZERS = ("adamw", "sgd")

Named = Sequence[tuple[str, str, torch.nn.Parameter]]
"""(module path, parameter name, parameter)."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step. ``norm``: the L2 norm of all gradients, before they are clipped."""

    norm: torch.Tensor
    named: Named
    optimizer: torch.optim.Optimizer | DividedOptimizer
    holder: dict[str, str] | None = None
    """The placement of moments that one rank alone has."""

    def updates(
        self,
    ) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor, list[tuple[str, torch.Tensor]]]]:
        """(path, name, gradient as the optimizer got it, new value, moments by name)."""
        for path, leaf, parameter in self.named:
            if parameter.grad is None:
                continue
            state = self.optimizer.state.get(parameter, {})
            moments = [
                (name, value)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            ]
            yield path, leaf, parameter.grad, parameter.detach(), moments


class Stepping:
    """The end of a training step, as ``training`` has it."""

    def __init__(self, training: Training, ranks: Ranks | None = None) -> None:
        self._training, self._ranks = training, ranks
        if training.optimizer not in (None, *OPTIMIZERS):
            raise UsageError(
                f"--optimizer-step {training.optimizer}: there is no such optimizer",
                hint=f"one of {', '.join(OPTIMIZERS)}",
            )
        self._parts: dict[int, list[torch.Tensor]] = {}
        _check_reduction(training, ranks)

    @property
    def loss_scale(self) -> float:
        return self._training.loss_scale or 1.0

    @property
    def makes_step(self) -> bool:
        return self._training.optimizer is not None

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A micro-batch's gradients are there: kept apart, where they are to be reduced."""
        if self._training.reduce_dtype is None:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                self._parts.setdefault(id(parameter), []).append(parameter.grad)
                parameter.grad = None

    def _add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """What ``take`` kept apart; in a truth simply the sum."""
        dtype, order = self._training.reduce_dtype, self._training.reduce_order
        for parameter in parameters:
            parts = self._parts.pop(id(parameter), [])
            if not parts or dtype is None or order is None:
                continue
            exact = parameter.dtype == torch.float64
            parameter.grad = (
                torch.stack(parts).sum(0) if exact
                else reduced(parts, dtype=getattr(torch, dtype), order=order)
            )  # fmt: skip

    def reduce(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of all micro-batches of this rank are there: add up those of all ranks, and
        divide the loss's factor out of them. (FSDP has added them up in the backward.)"""
        self._add_up(parameters)
        ranks = self._ranks
        check_reduced(parameters, ranks)
        if ranks is not None and ranks.dealt and "dp" in ranks.sizes:
            made = ranks.gather([parameter.grad is not None for parameter in parameters])
            for parameter, *by_rank in zip(parameters, *made, strict=True):
                if not any(by_rank):  # frozen, or part of no forward
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)
        if self._training.loss_scale is None:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / self.loss_scale

    def step(self, named: Named) -> Update:
        """Clip and apply. The parameters are changed (session.leaves gives their values back)."""
        parameters = [parameter for *_, parameter in named if parameter.grad is not None]
        limit = self._training.clip_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        optimizer = self._optimizer(parameters)
        optimizer.step()
        alone = {"dp": "single"} if isinstance(optimizer, DividedOptimizer) else None
        return Update(norm=norm, named=named, optimizer=optimizer, holder=alone)

    def _optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer | DividedOptimizer:
        name = self._training.optimizer
        assert name is not None  # asked where a step is made
        how: dict[str, Any] = {"lr": self._training.learning_rate}
        matrices = [one for one in parameters if one.ndim > 1]
        rest = [one for one in parameters if one.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self._training.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        return (DividedOptimizer(kind, groups, **how) if self._training.zero == 1
                else kind(groups, **how))  # fmt: skip


def _check_reduction(training: Training, ranks: Ranks | None) -> None:
    dtypes = ("float32", "bfloat16", "float16")
    if training.reduce_order is not None and training.reduce_dtype is None:
        raise UsageError("--reduce-order needs --reduce-dtype")
    if training.reduce_dtype not in (None, *dtypes):
        raise UsageError(f"--reduce-dtype {training.reduce_dtype}: one of {', '.join(dtypes)}")
    if training.reduce_order not in (None, *ORDERS):
        raise UsageError(f"--reduce-order {training.reduce_order}: one of {', '.join(ORDERS)}")
    if training.reduce_dtype is not None and ranks is not None:
        raise UsageError("--reduce-dtype stands for ranks, and --mesh starts some")
