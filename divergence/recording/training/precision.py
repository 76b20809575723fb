"""In which dtypes a training step was really made: read from its tensors, not from its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from divergence.recording.engines.identity import usual_dtype
from divergence.recording.training.optimizer import Named, Update
from divergence.run.schema.provenance import StepPrecision, Training

__all__ = ["precision_of"]


def precision_of(
    model: torch.nn.Module, training: Training, held: Named, made: Update | None
) -> StepPrecision:
    """``held``: what holds the gradients; ``made``: the optimizer's step, where there was one."""
    parameters = [parameter for *_, parameter in held]
    gradients = [holder.grad for holder in parameters if holder.grad is not None]
    compute, sent = _of_fsdp(model)
    own = _usual(parameter for parameter in model.parameters() if parameter.is_floating_point())
    known = StepPrecision(
        parameters=compute or own or "none",
        gradients=_usual(gradients),
        reduction=sent or _reduction(training, gradients),
        buffers=_usual(buffer for buffer in model.buffers() if buffer.is_floating_point()),
    )
    if made is not None:
        known.main_weights = _usual(weight for *_, weight in made.named)
        known.moments = _usual(value for *_, moments in made.updates() for _, value in moments)
        known.num_stepped, known.num_unmoved = made.num_stepped, made.num_unmoved
    return known


def _usual(tensors: Iterable[torch.Tensor]) -> str | None:
    return usual_dtype(
        (str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors
    )


def _reduction(training: Training, gradients: list[torch.Tensor]) -> str | None:
    """None in one process that stands for no ranks."""
    if training.reduce_dtype is not None:
        return training.reduce_dtype
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _usual(gradients)
    return None


def _of_fsdp(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """(compute, reduction) by the MixedPrecisionPolicy of a model that FSDP2 divides."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        policy = getattr(state, "_mp_policy", None)
        if policy is not None:
            named = (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
            compute, sent = (None if d is None else str(d).removeprefix("torch.") for d in named)
            return compute, sent
    return None, None
