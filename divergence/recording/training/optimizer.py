"""What is done with the gradients of a step: reduced among ranks, unscaled, clipped, applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import UsageError
from divergence.run.schema.engine import Training

__all__ = ["OPTIMIZERS", "Stepping", "Update"]

OPTIMIZERS = ("adamw", "sgd")
LEARNING_RATE = 1e-3
WEIGHT_DECAY = {"adamw": 0.01, "sgd": 0.0}

Named = Sequence[tuple[str, str, torch.nn.Parameter]]
"""(module path, parameter name, parameter)."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step. ``norm``: the L2 norm of all gradients, before they are clipped."""

    norm: torch.Tensor
    named: Named
    before: list[torch.Tensor]
    optimizer: torch.optim.Optimizer

    def updates(
        self,
    ) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor, list[tuple[str, torch.Tensor]]]]:
        """(path, name, gradient as the optimizer got it, new value - old one, moments by name)."""
        for (path, leaf, parameter), before in zip(self.named, self.before, strict=True):
            if parameter.grad is None:
                continue
            state = self.optimizer.state.get(parameter, {})
            moments = [
                (name, value)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            ]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            update = parameter.detach().to(wide) - before.to(wide)
            yield path, leaf, parameter.grad, update, moments


class Stepping:
    """The end of a training step, as ``training`` has it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        if training.optimizer not in (None, *OPTIMIZERS):
            raise UsageError(
                f"--optimizer-step {training.optimizer}: there is no such optimizer",
                hint=f"one of {', '.join(OPTIMIZERS)}",
            )

    @property
    def loss_scale(self) -> float:
        return self._training.loss_scale or 1.0

    @property
    def makes_step(self) -> bool:
        return self._training.optimizer is not None

    def reduce(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of all micro-batches are there: divide the loss's factor out of them."""
        if self._training.loss_scale is None:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / self.loss_scale

    def step(self, named: Named) -> Update:
        """Clip and apply. The parameters are changed; ``undo`` gives their old values back."""
        parameters = [parameter for *_, parameter in named if parameter.grad is not None]
        limit = self._training.clip_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        before = [parameter.detach().clone() for *_, parameter in named]
        optimizer = self._optimizer(parameters)
        optimizer.step()
        return Update(norm=norm, named=named, before=before, optimizer=optimizer)

    def _optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        name = self._training.optimizer
        assert name is not None  # asked where a step is made
        rate = self._training.learning_rate
        decay = self._training.weight_decay
        how: dict[str, Any] = {"lr": LEARNING_RATE if rate is None else rate}
        matrices = [one for one in parameters if one.ndim > 1]
        rest = [one for one in parameters if one.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY[name] if decay is None else decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return (
            torch.optim.AdamW(groups, **how) if name == "adamw" else torch.optim.SGD(groups, **how)
        )
