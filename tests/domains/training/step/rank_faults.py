"""Wrong code of a loop over ranks, put in place for the length of a capture on each rank.

``FAULTS[name]()`` is a context. Faults are those of the loop, so that the model's own forward and
backward stay right. ``BLOCK`` is the block of which a bucket is wrong, on rank 1 where the fault is
one rank's.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from divergence.domains.training.recording import optimizer
from divergence.domains.training.recording import step as session

__all__ = ["BLOCK", "FAULTS"]

BLOCK = "model.layers.1"
RANK = 1


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _of_block(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for name, one in model.named_parameters() if name.startswith(f"{BLOCK}.")]


def skipped() -> AbstractContextManager[None]:
    """Rank 1 leaves its last micro-batch out: its loss does not count."""
    backward = session.TrainRecorder.backward

    def wrong(self: Any, loss: torch.Tensor, share: float = 1.0) -> None:
        backward(self, loss, 0.0 if dist.get_rank() == RANK and self._sample == 3 else share)

    return _patched(session.TrainRecorder, "backward", wrong)


def forgotten() -> AbstractContextManager[None]:
    """Rank 1 clears its gradients before the last micro-batch, not behind the step."""
    begin = session.TrainRecorder.begin

    def wrong(self: Any, *, sample: int, **how: Any) -> None:
        if dist.get_rank() == RANK and sample == 3:
            self._model.zero_grad()
        begin(self, sample=sample, **how)

    return _patched(session.TrainRecorder, "begin", wrong)


@contextlib.contextmanager
def averaged() -> Iterator[None]:
    """Averaged over ranks where the loss is a mean over all of them already."""
    reduce = optimizer.Stepping.reduce

    def halved(self: Any, named: Any) -> Any:
        held = reduce(self, named)
        if "dp" in self._ranks.sizes:
            for *_, holder in held:
                holder.grad /= self._ranks.size
        return held

    with (
        _patched(optimizer.Stepping, "reduce", halved),
        # left alone, FSDP averages by itself
        _patched(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        _patched(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None),
    ):
        yield


@contextlib.contextmanager
def one_divides() -> Iterator[None]:
    """Rank 1 alone divides what it got by the number of ranks."""
    reduce = optimizer.Stepping.reduce

    def halved(self: Any, named: Any) -> Any:
        held = reduce(self, named)
        for *_, holder in held:
            if dist.get_rank() == RANK:
                holder.grad /= self._ranks.size
        return held

    with _patched(optimizer.Stepping, "reduce", halved):
        yield


@contextlib.contextmanager
def stale() -> Iterator[None]:
    """Rank 1 does not get the sum of one block's gradients: it goes on with its own."""
    reduce, begin = optimizer.Stepping.reduce, session.TrainRecorder.begin
    scatter, send = dist.reduce_scatter_single, FSDPParamGroup.post_backward
    model: list[torch.nn.Module] = []
    sending: list[bool] = []

    def known(self: Any, **how: Any) -> None:
        model[:] = [self._model]
        begin(self, **how)

    def not_taken(self: Any, named: Any) -> Any:
        own = {}
        if dist.get_rank() == RANK and "dp" in self._ranks.sizes:
            bucket = {id(one) for one in _of_block(model[0])}
            own = {n: one.grad.clone() for n, (*_, one) in enumerate(named) if id(one) in bucket}
        held = reduce(self, named)
        for number, gradient in own.items():
            held[number][-1].grad = gradient
        return held

    def sent(self: Any, *unused: Any) -> None:
        sending[:] = [self._module_fqn == BLOCK]
        send(self, *unused)

    def not_scattered(output: torch.Tensor, input: torch.Tensor, **how: Any) -> Any:
        own = input.clone().view(how["group"].size(), -1)[how["group"].rank()]
        work = scatter(output=output, input=input, **how)
        if dist.get_rank() == RANK and sending[0]:
            output.copy_(own)
        return work

    with (
        _patched(session.TrainRecorder, "begin", known),
        _patched(optimizer.Stepping, "reduce", not_taken),
        _patched(FSDPParamGroup, "post_backward", sent),
        _patched(dist, "reduce_scatter_single", not_scattered),
    ):
        yield


@contextlib.contextmanager
def early() -> Iterator[None]:
    """Rank 1 sends one block's gradients before its last micro-batch has been added."""
    backward, reduce = session.TrainRecorder.backward, optimizer.Stepping.reduce
    sent: dict[int, torch.Tensor] = {}

    def kept(self: Any, loss: torch.Tensor, share: float = 1.0) -> None:
        if dist.get_rank() == RANK and self._sample == 3:
            sent.update({id(one): one.grad.clone() for one in _of_block(self._model)})
        backward(self, loss, share)

    def too_early(self: Any, named: Any) -> Any:
        for *_, parameter in named:
            parameter.grad = sent.pop(id(parameter), parameter.grad)
        return reduce(self, named)

    with (
        _patched(session.TrainRecorder, "backward", kept),
        _patched(optimizer.Stepping, "reduce", too_early),
    ):
        yield


def unsent() -> AbstractContextManager[None]:
    """Of ZeRO's first stage: new values are not sent to the ranks that did not make them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return _patched(ZeroRedundancyOptimizer, "_sync_params", lambda self: None)


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "skipped": skipped,
    "forgotten": forgotten,
    "averaged": averaged,
    "one divides": one_divides,
    "stale": stale,
    "early": early,
    "unsent": unsent,
}
