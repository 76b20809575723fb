"""What is done with the gradients of a step: added up, reduced among ranks, unscaled, clipped,
applied. In which dtypes, a precision policy says; a truth is in float64 throughout.

A gradient that is added up in another dtype than its parameter's, and a weight that has a float32
copy for the optimizer, are held by a *holder*: a parameter of that dtype, which stands for the
model's from there on. Where there is neither, the holder is the model's parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import UsageError
from divergence.recording.ranks.processes import Ranks
from divergence.recording.training.reduction import ORDERS, reduced
from divergence.recording.training.zero import DividedOptimizer, check_reduced
from divergence.run.schema.provenance import Training

__all__ = ["OPTIMIZERS", "Named", "Stepping", "Update"]

OPTIMIZERS = ("adamw", "sgd")

Named = Sequence[tuple[str, str, torch.nn.Parameter]]
"""(module path, parameter name, parameter)."""

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Update:
    """One step. ``norm``: the L2 norm of all gradients, before they are clipped. ``num_stepped``:
    weights whose gradient is not zero; ``num_unmoved``: those that are as they were."""

    norm: torch.Tensor
    named: Named
    optimizer: torch.optim.Optimizer | DividedOptimizer
    moments_dtype: torch.dtype | None
    num_stepped: int
    num_unmoved: int
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
                (name, value.to(self.moments_dtype or value.dtype))
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            ]
            yield path, leaf, parameter.grad, parameter.detach(), moments


class Stepping:
    """The end of a training step, as ``training`` has it."""

    def __init__(self, training: Training, ranks: Ranks | None = None) -> None:
        self.training, self._ranks = training, ranks
        if training.optimizer not in (None, *OPTIMIZERS):
            raise UsageError(
                f"--optimizer-step {training.optimizer}: there is no such optimizer",
                hint=f"one of {', '.join(OPTIMIZERS)}",
            )
        self._parts: dict[int, list[torch.Tensor]] = {}
        _check_precision(training, ranks)

    @property
    def loss_scale(self) -> float:
        return self.training.loss_scale or 1.0

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A micro-batch's gradients are there: kept apart, where torch is not to add them up."""
        together = self.training.reduce_dtype is None or self._ranks is not None
        if together and self.training.accumulate_dtype is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                continue
            parts = self._parts.setdefault(id(parameter), [])
            if together and parts:
                parts[0] = parts[0] + parameter.grad.to(parts[0].dtype)
            elif together:
                parts.append(parameter.grad.to(self._sums_dtype(parameter)))
            else:
                parts.append(parameter.grad)
            parameter.grad = None

    def _sums_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """In which its gradients are added up."""
        named = self.training.accumulate_dtype
        if named is None or parameter.dtype == torch.float64:  # a truth
            return parameter.dtype
        dtype: torch.dtype = getattr(torch, named)
        return dtype

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The sum of what ``take`` kept apart, or what torch added up."""
        parts = self._parts.pop(id(parameter), [])
        dtype, order = self.training.reduce_dtype, self.training.reduce_order
        if not parts:
            return parameter.grad
        if dtype is None or order is None:
            return parts[0]
        if parameter.dtype == torch.float64:
            return torch.stack(parts).sum(0)
        sums = reduced(parts, dtype=getattr(torch, dtype), order=order)
        return sums.to(self._sums_dtype(parameter))

    def reduce(self, named: Named) -> Named:
        """The gradients of all micro-batches of this rank are there: add up those of all ranks, and
        divide the loss's factor out of them. (FSDP has added them up in the backward.) Returns what
        holds them: each its gradient, and the value that is stepped."""
        ranks, held = self._ranks, []
        check_reduced([parameter for *_, parameter in named], ranks)
        gradients = [self._gradient(parameter) for *_, parameter in named]
        made = [[grad is not None for grad in gradients]]
        between = ranks is not None and ranks.dealt and "dp" in ranks.sizes
        if between and ranks is not None:
            made = ranks.gather(made[0])
        anywhere = [any(by_rank) for by_rank in zip(*made, strict=True)]  # not frozen, and used
        for (path, leaf, parameter), gradient, wanted in zip(
            named, gradients, anywhere, strict=True
        ):
            if between and wanted:
                gradient = self._of_all_ranks(parameter, gradient)
            if gradient is not None and self.training.loss_scale is not None:
                gradient = gradient / self.loss_scale
            holder = parameter
            if gradient is not None and gradient.dtype != parameter.dtype:
                holder = torch.nn.Parameter(parameter.detach().to(gradient.dtype))
            parameter.grad = None
            holder.grad = gradient
            held.append((path, leaf, holder))
        return held

    def _of_all_ranks(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = self._sums_dtype(parameter)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=dtype)
        sent = self.training.reduce_dtype
        if sent is not None and dtype != torch.float64:
            gradient = gradient.to(getattr(torch, sent), copy=True)
        torch.distributed.all_reduce(gradient)
        return gradient.to(dtype)

    def step(self, named: Named, held: Named) -> Update:
        """Clip and apply. ``held``: of ``reduce``, for the parameters ``named``, which are changed
        (session.leaves gives their values back)."""
        stepped = self._stepped(named, held)
        parameters = [parameter for *_, parameter in stepped if parameter.grad is not None]
        limit = self.training.clip_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = self._optimizer(parameters)
        optimizer.step()
        moves = [p.grad != 0 for p in parameters if p.grad is not None]
        still = [
            (moving & (old == parameter.detach())).sum()
            for moving, old, parameter in zip(moves, before, parameters, strict=True)
        ]
        moments = self.training.moments_dtype
        exact = any(p.dtype == torch.float64 for p in parameters)
        return Update(
            norm=norm, named=stepped, optimizer=optimizer,
            moments_dtype=None if moments is None or exact else getattr(torch, moments),
            num_stepped=sum(int(_whole(move.sum())) for move in moves),
            num_unmoved=sum(int(_whole(count)) for count in still),
            holder={"dp": "single"} if isinstance(optimizer, DividedOptimizer) else None,
        )  # fmt: skip

    def _stepped(self, named: Named, held: Named) -> Named:
        """Main weights, where they are asked for, else the parameters; each with its gradient."""
        stepped = []
        for (path, leaf, parameter), (*_, holder) in zip(named, held, strict=True):
            wide = self.training.main_weights and parameter.dtype.itemsize < 4
            dtype = torch.float32 if wide else parameter.dtype
            if holder.dtype != dtype:
                gradient = holder.grad
                holder = parameter
                if wide:
                    holder = torch.nn.Parameter(parameter.detach().to(dtype))
                holder.grad = None if gradient is None else gradient.to(dtype)
            stepped.append((path, leaf, holder))
        return stepped

    def _optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer | DividedOptimizer:
        name = self.training.optimizer
        assert name is not None  # asked where a step is made
        how: dict[str, Any] = {"lr": self.training.learning_rate}
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        rest = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.training.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        return (DividedOptimizer(kind, groups, **how) if self.training.zero == 1
                else kind(groups, **how))  # fmt: skip


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Of a number that ranks hold parts of, their sum."""
    whole: torch.Tensor = getattr(value, "full_tensor", lambda: value)()
    return whole


def _check_precision(training: Training, ranks: Ranks | None) -> None:
    for name in ("accumulate_dtype", "moments_dtype", "reduce_dtype", "buffer_dtype"):
        if getattr(training, name) not in (None, *_DTYPES):
            option = f"--{name.replace('_', '-')} {getattr(training, name)}"
            raise UsageError(f"{option}: one of {', '.join(_DTYPES)}")
    if training.optimizer is None and training.precision_policy is None:
        for name in ("main_weights", "moments_dtype"):
            if getattr(training, name):
                raise UsageError(f"--{name.replace('_', '-')} needs --optimizer-step")
    if training.reduce_order is not None and training.reduce_dtype is None:
        raise UsageError("--reduce-order needs --reduce-dtype")
    if training.reduce_order not in (None, *ORDERS):
        raise UsageError(f"--reduce-order {training.reduce_order}: one of {', '.join(ORDERS)}")
    if ranks is not None and "fsdp" in ranks.sizes:
        names = ("reduce_dtype", "accumulate_dtype", "main_weights")
        named = [name for name in names if getattr(training, name)]
        if named:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in named)
            raise UsageError(
                f"{options}: with --mesh fsdp torch adds up gradients and holds the weights",
                hint="in one process, or with --mesh dp",
            )
