"""The optimizer's step and the reduction of gradients, recorded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import ModelError, UsageError
from divergence.recording.engines.identity import usual_dtype
from divergence.recording.processes import Ranks
from divergence.run.manifest import StepPrecision, Training

# Gradients of several ranks added up as a collective does: in which dtype, in which order.
#
# Each micro-batch stands for a rank. In a *ring* a tensor of n ranks is cut into n chunks; chunk c
# starts at rank c + 1 and goes around, each rank adding its own, so that every chunk is added up in
# another order (n - 1 additions deep). In a *tree* neighbours are added pair by pair (log2 n deep).
# Every partial sum is rounded to the dtype in which it is sent.
#
# Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations", J. Parallel Distrib. Comput. 69, 2009 (ring); Thakur, Rabenseifner and Gropp, Int.
# J. High Perform. Comput. Appl. 19, 2005 (recursive halving and doubling).

ORDERS = ("ring", "tree")


def reduced(parts: Sequence[torch.Tensor], *, dtype: torch.dtype, order: str) -> torch.Tensor:
    """The sum of tensors of one shape, one a rank, in ``dtype``; of that shape, in the dtype of the
    first."""
    given = [part.to(dtype).flatten() for part in parts]
    if order == "tree":
        while len(given) > 1:
            pairs = [a + b for a, b in zip(given[::2], given[1::2], strict=False)]
            given = pairs + given[len(given) - len(given) % 2 :]
        total = given[0]
    else:
        count, chunks = len(given), []
        sliced = [tensor.tensor_split(count) for tensor in given]
        for chunk in range(count):
            around = [sliced[(chunk + 1 + step) % count][chunk] for step in range(count)]
            chunks.append(functools.reduce(torch.add, around))
        total = torch.cat(chunks)
    return total.view(parts[0].shape).to(parts[0].dtype)


# ZeRO: what of a training step each rank keeps, beside its own part of the prompts: by the stage,
# as docs/training.md has it. At stage 1 torch's ``ZeroRedundancyOptimizer`` gives each parameter to
# one rank, which alone has its moments, makes its update and sends it to the others. At stages 2
# and 3 FSDP2 (``fully_shard``) divides the rows of each parameter; stage 2 is its
# ``reshard_after_forward=False``. That differs from the paper's stage 2 in what is kept *between*
# steps (parameters are in parts then, too) and in no number: the gradients are added up and divided
# by the same reduce-scatter.
#
# Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
# models", SC20, arXiv 1910.02054, section 5.


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
        self, kind: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], **how: Any
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
        """Return the state of this rank's own parameters alone."""
        return {key: value for part in self._parts for key, value in part.optim.state.items()}


# What is done with the gradients of a step: added up, reduced among ranks, unscaled, clipped,
# applied. In which dtypes, a precision policy says; a truth is in float64 throughout.
#
# A gradient that is added up in another dtype than its parameter's, and a weight that has a float32
# copy for the optimizer, are held by a *holder*: a parameter of that dtype, which stands for the
# model's from there on. Where there is neither, the holder is the model's parameter itself.

OPTIMIZERS = ("adamw", "sgd")

Named = Sequence[tuple[str, str, torch.nn.Parameter]]
"""(module path, parameter name, parameter)."""

_DTYPES_OPTIMIZER = ("float32", "bfloat16", "float16")


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
        for name in ("accumulate_dtype", "moments_dtype", "reduce_dtype", "buffer_dtype"):
            if getattr(training, name) not in (None, *_DTYPES_OPTIMIZER):
                option = f"--{name.replace('_', '-')} {getattr(training, name)}"
                raise UsageError(f"{option}: one of {', '.join(_DTYPES_OPTIMIZER)}")
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
            if together:
                gradient = parameter.grad.to(self._sums_dtype(parameter))
                parts[:] = [parts[0] + gradient if parts else gradient]
            else:
                parts.append(parameter.grad)
            parameter.grad = None

    def _sums_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype in which its gradients are added up."""
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
        ranks, gathered = self._ranks, []
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
                gradient = self._sum_over_ranks(parameter, gradient)
            if gradient is not None and self.training.loss_scale is not None:
                gradient = gradient / self.loss_scale
            holder = parameter
            if gradient is not None and gradient.dtype != parameter.dtype:
                holder = torch.nn.Parameter(parameter.detach().to(gradient.dtype))
            parameter.grad = None
            holder.grad = gradient
            gathered.append((path, leaf, holder))
        return gathered

    def _sum_over_ranks(
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

    def step(self, named: Named, gradients: Named) -> Update:
        """Clip and apply. ``gradients``: of ``reduce``, for the parameters ``named``, which are
        changed (session.leaves gives their values back)."""
        # main weights, where they are asked for, else the parameters; each with its gradient
        stepped: list[tuple[str, str, torch.nn.Parameter]] = []
        for (path, leaf, own), (*_, holder) in zip(named, gradients, strict=True):
            wide = self.training.main_weights and own.dtype.itemsize < 4
            dtype = torch.float32 if wide else own.dtype
            if holder.dtype != dtype:
                gradient = holder.grad
                holder = torch.nn.Parameter(own.detach().to(dtype)) if wide else own
                holder.grad = None if gradient is None else gradient.to(dtype)
            stepped.append((path, leaf, holder))
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
            norm=norm,
            named=stepped,
            optimizer=optimizer,
            moments_dtype=None if moments is None or exact else getattr(torch, moments),
            num_stepped=sum(int(_whole(move.sum())) for move in moves),
            num_unmoved=sum(int(_whole(count)) for count in still),
            holder={"dp": "single"} if isinstance(optimizer, DividedOptimizer) else None,
        )

    def _optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer | DividedOptimizer:
        name = self.training.optimizer
        assert name is not None  # asked where a step is made
        how: dict[str, Any] = {"lr": self.training.learning_rate}
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        rest = [parameter for parameter in parameters if parameter.ndim <= 1]
        decays = (matrices, self.training.weight_decay), (rest, 0.0)
        groups = [{"params": own, "weight_decay": decay} for own, decay in decays if own]
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        if self.training.zero == 1:
            return DividedOptimizer(kind, groups, **how)
        return kind(groups, **how)


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a number that ranks hold parts of."""
    whole: torch.Tensor = getattr(value, "full_tensor", lambda: value)()
    return whole


# In which dtypes a training step was really made: read from its tensors, not from its options.


def precision_of(
    model: torch.nn.Module, training: Training, named: Named, made: Update | None
) -> StepPrecision:
    """``named``: what holds the gradients; ``made``: the optimizer's step, where there was one."""
    parameters = [parameter for *_, parameter in named]
    gradients = [holder.grad for holder in parameters if holder.grad is not None]
    compute, sent = _fsdp_dtypes(model)
    own = _usual(parameter for parameter in model.parameters() if parameter.is_floating_point())
    precision = StepPrecision(
        parameters=compute or own or "none",
        gradients=_usual(gradients),
        reduction=sent,
        buffers=_usual(buffer for buffer in model.buffers() if buffer.is_floating_point()),
    )
    if sent is None:  # and of one process that stands for no ranks
        precision.reduction = training.reduce_dtype
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if precision.reduction is None and joined:
            precision.reduction = _usual(gradients)
    if made is not None:
        precision.main_weights = _usual(weight for *_, weight in made.named)
        precision.moments = _usual(value for *_, moments in made.updates() for _, value in moments)
        precision.num_stepped, precision.num_unmoved = made.num_stepped, made.num_unmoved
    return precision


def _usual(tensors: Iterable[torch.Tensor]) -> str | None:
    return usual_dtype(
        (str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors
    )


def _fsdp_dtypes(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """(compute, reduction) by the MixedPrecisionPolicy of a model that FSDP2 divides."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        policy = getattr(state, "_mp_policy", None)
        if policy is not None:
            named = (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
            compute, sent = (None if d is None else str(d).removeprefix("torch.") for d in named)
            return compute, sent
    return None, None
