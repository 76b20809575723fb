"""ZeRO: what of a training step each rank keeps, beside its own part of the prompts.

    stage   parameters   gradients   optimizer's state   with
    0       all          all         all                 --mesh dp
    1       all          all         a part              --mesh dp: ZeroRedundancyOptimizer
    2       all          a part      a part              --mesh fsdp, gathered once a micro-batch
    3       a part       a part      a part              --mesh fsdp, gathered twice

At stage 1 torch's ``ZeroRedundancyOptimizer`` gives each parameter to one rank, which alone has its
moments, makes its update and sends it to the others. At stages 2 and 3 FSDP2 (``fully_shard``)
divides the rows of each parameter; stage 2 is its ``reshard_after_forward=False``. That differs
from the paper's stage 2 in what is kept *between* steps (parameters are in parts then, too) and in
no number: the gradients are added up and divided by the same reduce-scatter.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
SC20, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from divergence.errors import ModelError, UsageError
from divergence.options.capture import CaptureOptions
from divergence.recording.ranks.processes import Ranks

__all__ = ["DividedOptimizer", "check_reduced", "check_stage", "gathered_once", "stage_of"]

_AXES = {0: "dp", 1: "dp", 2: "fsdp", 3: "fsdp"}
"""The axis of the mesh that keeps so much."""


def stage_of(zero: int | None, ranks: Ranks | None) -> int | None:
    """The stage as the manifest has it; None where each process keeps all."""
    if ranks is None or not {"dp", "fsdp"} & ranks.sizes.keys():
        return None
    if zero is None:
        zero = 3 if "fsdp" in ranks.sizes else 0
    return zero or None


def check_stage(options: CaptureOptions, axes: Collection[str]) -> None:
    """Raise UsageError for a stage that these axes of ``--mesh`` do not make. ``axes`` is empty
    in one process."""
    zero = options.zero
    if zero is None:
        return
    if zero not in _AXES:
        raise UsageError(f"--zero {zero} is no stage of ZeRO", hint="0, 1, 2 or 3")
    axis = _AXES[zero]
    if not {"dp", "fsdp"} & set(axes):
        if zero:
            raise UsageError(f"--zero {zero} has no ranks to divide over",
                             hint=f"under torchrun, with --mesh {axis}")  # fmt: skip
        return
    if axis not in axes:
        why = (
            "each rank of dp keeps all parameters and gradients" if axis == "fsdp"
            else "ranks of fsdp keep a part of all three"
        )  # fmt: skip
        given = "dp" if axis == "fsdp" else "fsdp"
        raise UsageError(f"--zero {zero} with --mesh {given}: {why}", hint=f"--mesh {axis}")
    if zero == 1 and options.optimizer is None:
        raise UsageError(
            "--zero 1 divides the optimizer's state, and no step is made",
            hint="--optimizer-step adamw",
        )


def gathered_once(model: torch.nn.Module) -> None:
    """Stage 2: parameters stay gathered from the forward to the end of the backward."""
    for module in model.modules():
        keep: Any = getattr(module, "set_reshard_after_forward", None)
        if keep is not None:
            keep(False, recurse=False)


def check_reduced(parameters: Sequence[torch.nn.Parameter], ranks: Ranks | None) -> None:
    """Raise ModelError where FSDP has left a gradient as this rank made it: a model whose backward
    does not pass where FSDP waits for it."""
    if ranks is None or "fsdp" not in ranks.sizes:
        return
    own = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = sum(not hasattr(grad, "device_mesh") for grad in own)
    if whole:
        raise ModelError(
            f"FSDP has not added up {whole} of {len(own)} parameters' gradients among the ranks",
            hint="--mesh dp",
        )


class DividedOptimizer:
    """Stage 1: an optimizer of which each rank makes the updates of its own parameters and sends
    them to the others."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        **how: Any,
    ) -> None:
        """``groups``: parameters and their settings, as torch's optimizers take them, alike on all
        ranks. Torch divides parameters of one dtype alone: each dtype has an optimizer."""
        with warnings.catch_warnings():  # torch's own import compiles what it has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer

        dtypes = dict.fromkeys(param.dtype for group in groups for param in group["params"])
        self._parts: list[Any] = []
        for dtype in dtypes:
            own = [
                {**group, "params": [param for param in group["params"] if param.dtype == dtype]}
                for group in groups
            ]
            own = [group for group in own if group["params"]]
            self._parts.append(ZeroRedundancyOptimizer(own, optimizer_class=kind, **how))

    def step(self) -> None:
        """All ranks must call it."""
        for part in self._parts:
            part.step()

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Of this rank's own parameters alone."""
        return {key: value for part in self._parts for key, value in part.optim.state.items()}
