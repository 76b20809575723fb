"""Operators of a training step: of the forward, and of the backward of the same modules.

The backward runs outside of all modules. Whose an operator is tells the node of autograd's graph
that calls it: nodes are numbered in the order in which the forward made them, and so each belongs
to the innermost module whose call made it. Its site is ``model.layers.3.mlp#backward/aten.mm:out``,
with the line of the forward operator of which it is the backward.

Where a tensor was read several times its gradients are added up, by autograd itself. Such a sum is
called behind the last of those that are added, and is recorded in that one's module. What adds a
parameter's gradient to those of other prompts belongs to no module and is not recorded.

A forward that is run again for its activations (gradient checkpointing) is what it was the first
time: its operators are not recorded twice, and what they make is known by the names of the first.

On an accelerator autograd runs a backward in a thread of its own, and in several where there are
several devices. While operators are recorded it runs in the calling thread, which moves no bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from divergence.recording.hooks.arguments import input_leaves, operator_name
from divergence.recording.hooks.dataflow import Dataflow
from divergence.recording.hooks.dispatch import OperatorRecorder, source_line, weights_by_storage
from divergence.recording.model.structure import inside
from divergence.run.schema.site import BACKWARD, LOSS, join_site
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["TrainingOperators"]


_SUMS = ("aten.add", "aten.add_")


def _next_node() -> int:
    """The number of the next node of autograd's graph that this thread makes."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _is_autograds(frame: FrameType) -> bool:
    """Is it where torch's autograd is called?"""
    return frame.f_code.co_name == "_engine_run_backward"


class TrainingOperators(OperatorRecorder):
    """Records the operators of modules, and, within ``backward``, those of their backward."""

    def __init__(self, model: torch.nn.Module, roots: set[str], **how: Any) -> None:
        self.loss: torch.nn.Module | None = None
        """What computes the loss: a module that is none of the model's."""
        self._as_loaded = dict(model.named_parameters())
        self.blocks: frozenset[str] = frozenset()
        """Modules whose forward may run again without their hooks."""
        self._in_backward = False
        super().__init__(model, roots, **how)

    # --- forward --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self._weights = weights_by_storage(self._model)  # in a wide pass they are others by now
        with super().installed():
            yield

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from super()._modules()
        if self.loss is not None:
            yield LOSS, self.loss

    def _loaded(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        return self._as_loaded.get(name, parameter)

    def end_of_forward(self) -> None:
        """Starts to number calls anew, and forgets the graph."""
        super().end_of_forward()
        self._owners: dict[int, tuple[str, Dataflow]] = {}
        """By number of autograd's node: the module whose forward made it, and what is known of its
        memory."""
        self._flows: dict[str, Dataflow] = {}
        self._forwards: dict[int, tuple[str, str | None]] = {}
        """By number of a node: the forward operator that made it, and its line."""
        self._starts: list[tuple[str, int]] = []
        """The modules that run, and the number that the next node had when each began."""
        self._again: list[str] = []
        """Modules that run again."""
        self._numbers_again: Counter[tuple[str, str]] = Counter()

    def _push(self, path: str, names: list[str]) -> Callable[..., Any]:
        begin = super()._push(path, names)

        def push(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._in_backward:
                self._runs_again(path, input_leaves(args, kwargs, names))
                return
            begin(module, args, kwargs)
            if self._stack:
                self._flows.setdefault(self._root(), self._flow)
                self._starts.append((self._caller(), _next_node()))

        return push

    def _pop(self, path: str) -> Callable[..., Any]:
        end = super()._pop(path)

        def pop(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._in_backward:
                self._has_run_again(path)
                return
            flow = self._flow
            if path in self._stack:
                index = len(self._stack) - 1 - self._stack[::-1].index(path)
                called, start = self._starts[index]
                del self._starts[index:]  # and modules that an exception left
                for number in range(start, _next_node()):
                    self._owners.setdefault(number, (called, flow))
            end(module, args, output)

        return pop

    def _root(self) -> str:
        return self._stack[0] + self._call_of(self._stack[0])

    # --- backward -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of the forward that was just made runs within."""
        if not (self._owners and self._active()):
            yield
            return
        self._in_backward = True
        try:
            with torch.autograd.set_multithreading_enabled(False), self:
                yield
        finally:
            self._in_backward = False
            self._flow = Dataflow()

    def enters(self, called: str, gradient: torch.Tensor, site: str) -> None:
        """Notes the gradient that enters the backward of a module, by its name."""
        if called in self._flows:
            self._flows[called].enter(gradient, site)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._in_backward and self._runs_forward():
            recording = self._emit, self._keep, self._numbers
            self._emit, self._keep, self._numbers = _nothing, CapturedTensor, self._numbers_again
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._emit, self._keep, self._numbers = recording
        if not self._in_backward and self._stack and isinstance(func, torch._ops.OpOverload):
            number = _next_node() - 1
            if number not in self._forwards:
                self._forwards[number] = operator_name(func), source_line()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _runs_forward(self) -> bool:
        """Is it a forward that is run again? A backward runs without gradients of its own."""
        return torch.is_grad_enabled()

    def _is_inside(self) -> bool:
        if not self._in_backward:
            return super()._is_inside()
        if self._runs_forward() and self._again:
            root = next((flow for flow in self._flows if _is_in(self._again[-1], flow)), None)
            self._flow = self._flow if root is None else self._flows[root]
            return root is not None
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() not in self._owners:
            return False
        self._node = node
        self._owner, self._flow = self._owners[node._sequence_nr()]
        return not self._runs_forward() or self._block() is not None

    def _block(self) -> str | None:
        """The recorded block, with its call, that the node at hand belongs to."""
        return next(
            (flow for flow in self._flows if flow.partition("#")[0] in self.blocks
             and _is_in(self._owner, flow)), None,
        )  # fmt: skip

    def _caller(self) -> str:
        if not self._in_backward:
            return super()._caller()
        if not self._runs_forward():
            return self._owner + BACKWARD
        if self._again:
            return self._again[-1] + self._call_of(self._again[-1])
        block = self._block()
        assert block is not None  # or it is not inside
        return block

    def _origin(self, func: Any) -> dict[str, str | None]:
        if not self._in_backward or self._runs_forward():
            return super()._origin(func)
        own = source_line(_is_autograds)
        if own is None and operator_name(func) in _SUMS:
            return {"source": None}  # behind the node, not of it
        made_by, line = self._forwards.get(self._node._sequence_nr(), (None, None))
        if isinstance(self._node, torch.autograd.function.BackwardCFunction):
            made_by = type(self._node).__name__.removesuffix("Backward")
        return {"source": own or line, "backward_of": made_by}

    def _runs_again(self, path: str, given: list[tuple[str, torch.Tensor]]) -> None:
        called = path + self._call_of(path)
        if called in self._flows:
            for port, tensor in given:
                self._flows[called].enter(tensor, join_site(called, port))
        self._again.append(path)

    def _has_run_again(self, path: str) -> None:
        while path in self._again and self._again.pop() != path:
            pass


def _nothing(site: str, item: CapturedTensor, call: Any = None) -> None:
    """In place of a record."""


def _is_in(module: str, root: str) -> bool:
    return inside(module.partition("#")[0], {root.partition("#")[0]})
