"""Hooks of a training step: what the forward gives, and the gradients that enter and leave modules.

The backward of a module is written as a call of it: ``model.layers.3#backward:in`` is the gradient
of the loss by the block's output, which enters the block's backward, ``...#backward:out`` that by
its input, which leaves it, and ``...#backward:out.weight`` that by its parameter. So a backward is
compared as a forward is, in its own order of execution.

Gradients are seen by hooks of tensors, which change no bit. A tensor that several modules read has
one gradient, their sum. So of modules inside a block what enters their backward is recorded, and
not what leaves it: to tell apart what each adds, the sums would have to be made in another order.
What a block hands out beside its first result it may have used itself, as attention's weights: it
hands out a view, whose gradient is what enters from outside alone.

Anchored, each block gets the other run's input and the other run's incoming gradient, so that a
difference in what it hands on, and in its parameters' gradients, was made in it. The graph is cut
at the blocks' ends, and all pieces are run by one call of torch's autograd.

Parameter gradients are those of the whole step: of all prompts together, each of which is a
micro-batch. They are recorded behind the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.recording.hooks.arguments import (
    argument_names,
    input_leaves,
    map_output,
    output_leaves,
)
from divergence.recording.hooks.modules import Recorder
from divergence.recording.model.compiled import compiled_regions, hooked
from divergence.recording.training.backward import TrainingOperators
from divergence.recording.training.optimizer import Named, Stepping, Update
from divergence.recording.training.precision import precision_of
from divergence.run.schema.manifest import ModuleNote
from divergence.run.schema.provenance import StepPrecision
from divergence.run.schema.site import (
    BACKWARD,
    GRAD_NORM,
    LOSS,
    OPTIMIZER,
    ROOT,
    escape_path,
    join_site,
)

__all__ = ["TrainRecorder", "parameters_of"]

_UPDATE = 16
"""Places in the order for what is recorded of one parameter's update."""


def parameters_of(model: torch.nn.Module) -> list[tuple[str, str, torch.nn.Parameter]]:
    """(path of the module, the parameter's name there, the parameter), each parameter once."""
    named = []
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        named.append((escape_path(module), leaf, parameter))
    return named


def _like(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value in the gradient's dtype and place; of one that ranks divide, this rank's part."""
    value = value.to(device=gradient.device, dtype=gradient.dtype, copy=True)
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    divided: Any = gradient  # a DTensor
    return distribute_tensor(value, mesh, divided.placements)


def _hook_first(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """A hook of the tensor's gradient, before those that are there: what leaves the backward of the
    module that reads it comes before what enters that of the one that made it."""
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    earlier = {key: hooks[key] for key in list(hooks) if key != handle.id}
    for key, old_hook in earlier.items():  # torch runs them in the order in which they were put in
        del hooks[key]
        hooks[key] = old_hook


class TrainRecorder(Recorder):
    """A Recorder of one training step. ``loss``: the module that computes it. ``stepping``: what is
    done with the gradients."""

    _operator_recorder = TrainingOperators

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        loss: torch.nn.Module,
        stepping: Stepping,
        **how: Any,
    ) -> None:
        self._loss, self._stepping = loss, stepping
        self.precision: StepPrecision | None = None
        """Of the step, once it is made."""
        self._roots: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Results of blocks that the graph is cut at, and their gradients in the other run."""
        self._backward_runs = False
        self._graded: set[str] = set()
        """Modules, with their calls, whose results have a gradient."""
        self._first: int | None = None
        self._is_whole = True
        """Are all micro-batches in it?"""
        super().__init__(model, notes, **(how | {"logit_paths": ()}))
        if isinstance(self.operators, TrainingOperators):
            self.operators.loss = loss
            self.operators.blocks = frozenset(p for p, n in notes.items() if n.role == "block")
        self._hooked |= {LOSS, *(plant.path.partition("#")[0] for plant in self._plants)}

    # --- forward --------------------------------------------------------------------------------

    def begin(
        self, *, sample: int, batch: int, num_tokens: int, num_kept: int | None = None
    ) -> None:
        super().begin(sample=sample, batch=batch, num_tokens=num_tokens, num_kept=num_kept)
        self._first = sample if self._first is None else self._first
        self._roots.clear()

    def cut_short(self) -> None:
        self._is_whole = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Hooks on; at the end of the last group the parameters' gradients are recorded."""
        self._first, self._is_whole = None, True
        self._model.zero_grad(set_to_none=True)
        try:
            with super().installed():
                yield self
                self._end_of_step()
        finally:
            self._model.zero_grad(set_to_none=True)

    def _mounted(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        yield from super()._mounted()
        compiled = bool(compiled_regions(self._model))
        for name, module in self._model.named_modules():
            if (path := escape_path(name)) in self._hooked and path != ROOT:
                before = self._before(path, argument_names(module))
                yield hooked(module, before, self._after(path), compiled=compiled)
        names = argument_names(self._loss)
        yield hooked(self._loss, self._pre_hook(LOSS, names), self._post_hook(LOSS), compiled=False)
        yield hooked(self._loss, self._before(LOSS, names), self._after(LOSS), compiled=False)

    def _before(self, path: str, names: Sequence[str]) -> Callable[..., Any]:
        """Watches the gradients of a module's inputs, where they are the module's own: inside a
        block several modules may read one tensor."""
        inner = self._notes[path].role == "inner"

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if inner or self._backward_runs:  # or a forward that is run again, for its activations
                return
            call = self._calls.get(path, "")
            for port, tensor in input_leaves(args, kwargs, names):
                if tensor.requires_grad:
                    _hook_first(tensor, partial(self._leaves, path, call, f"out{port[2:]}"))

        return before

    def _after(self, path: str) -> Callable[..., Any]:
        """Watches the gradients of a module's results; anchored, puts the other run's there."""
        outer = self._notes[path].role != "inner" and path != LOSS
        anchored = self._anchor is not None and outer

        def beside(port: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor) if port != "out" and tensor.requires_grad else tensor

        def after(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Any:
            if self._backward_runs:
                return None
            call = self._calls.get(path, "")

            def cut(port: str, tensor: torch.Tensor) -> torch.Tensor:
                site = join_site(path + call + BACKWARD, f"in{port[3:]}")
                if not tensor.requires_grad or self._anchor_broken:
                    return tensor
                recorded = self._recorded_rows(site, torch.zeros_like(tensor))
                if recorded is None or recorded.shape != tensor.shape:
                    return tensor
                self.anchored += 1
                gradient = recorded.to(tensor, copy=True)
                self._enters(path + call, gradient, site)
                self._roots.append((tensor, gradient))
                return tensor.detach().requires_grad_()

            given = output
            if outer and len(output_leaves(output)) > 1:
                with self._quiet():
                    output = map_output(output, beside)
            new = output
            if anchored:
                with self._quiet():
                    new = map_output(output, cut)
            known = {id(root) for root, _ in self._roots}
            for port, tensor in output_leaves(output):
                if tensor.requires_grad:
                    self._graded.add(path + call)
                if tensor.requires_grad and id(tensor) not in known:
                    tensor.register_hook(partial(self._leaves, path, call, f"in{port[3:]}"))
            return None if new is given else new

        return after

    def _recorded_input(
        self, path: str, port: str, tensor: torch.Tensor, done: set[str]
    ) -> torch.Tensor:
        new = super()._recorded_input(path, port, tensor, done)
        if new is not tensor and tensor.requires_grad:
            new.requires_grad_()
            if path == LOSS and tensor.is_leaf:  # FSDP waits for a gradient of what a model returns
                self._roots.append((tensor, torch.zeros_like(tensor)))
        return new

    def _numbered(self, path: str, call: str = "") -> str:
        if self._backward_runs:  # run again: the call that it was
            return self._calls.get(path, "")
        return super()._numbered(path, call)

    def _emit(self, path: str, call: str, port: str, tensor: torch.Tensor) -> None:
        if not self._backward_runs:
            super()._emit(path, call, port, tensor)

    def _end_of_forward(self) -> None:
        return  # the backward belongs to it

    # --- backward -------------------------------------------------------------------------------

    @property
    def sample(self) -> int:
        """The first prompt of the group that runs."""
        return self._sample

    def backward(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """The backward of the forward that was just made. ``share``: 0 where its gradients are not
        to count."""
        if not loss.requires_grad:
            raise ModelError("the loss depends on no parameter: all of them are frozen")
        tensors, gradients = [loss], [torch.ones_like(loss) * (self._stepping.loss_scale * share)]
        for tensor, gradient in self._roots:
            tensors.append(tensor)
            gradients.append(gradient * share if share != 1.0 else gradient)
        self._backward_runs = True
        operators = self.operators
        recorded = operators.backward() if isinstance(operators, TrainingOperators) else None
        try:
            with recorded or contextlib.nullcontext():
                torch.autograd.backward(tensors, gradients)
        finally:
            self._backward_runs = False
            self._roots.clear()
            self._graded.clear()
        self._stepping.take([parameter for *_, parameter in parameters_of(self._model)])
        super()._end_of_forward()

    def _leaves(
        self, path: str, call: str, port: str, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """A gradient enters or leaves a module."""
        where = path + call + BACKWARD
        if path + call not in self._graded:  # it was given the tensor and did nothing with it
            return None
        new = self._planted(where, port, gradient)
        key = path, call + BACKWARD, port
        if key not in self._sites:  # a gradient is wanted where that of which it is one is
            of = f"out{port[2:]}" if port.startswith("in") else f"in{port[3:]}"
            wanted = self._wanted(path, of, new)
            flat = self._flat is not None and self._flat(path, of, new)
            self._sites[key] = join_site(where, port) if wanted else None, flat
        super()._emit(*key, new)
        if port.startswith("in"):
            self._enters(path + call, new, join_site(where, port))
        return new if new is not gradient else None

    def _enters(self, called: str, gradient: torch.Tensor, site: str) -> None:
        if isinstance(self.operators, TrainingOperators):
            self.operators.enters(called, gradient, site)

    def _planted(self, where: str, port: str, tensor: torch.Tensor) -> torch.Tensor:
        plants = [plant for plant in self._plants if plant.path == where]
        return self._planter(plants)(port, tensor) if plants else tensor

    # --- the step -------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        """Record the parameters' gradients, last ones first, and what an optimizer makes of it."""
        if self._first is None or not self._is_whole:
            return
        self.begin(sample=0, batch=1, num_tokens=0)
        self._order = 1 << 24  # behind all that the first prompt's forward and backward gave
        named = parameters_of(self._model)
        held = self._stepping.reduce(named)
        for path, leaf, holder in reversed(held):
            if holder.grad is not None:
                where, port = path + BACKWARD, f"out.{leaf}"
                holder.grad = self._planted(where, port, holder.grad)
                self._keep_as(join_site(where, port), holder.grad)
        steps = self._stepping.training.optimizer is not None
        made = self._step_of(named, held) if steps else None
        self.precision = precision_of(self._model, self._stepping.training, held, made)

    def _step_of(self, named: Named, held: Named) -> Update:
        if self._anchor is not None:
            for path, leaf, holder in held:
                if holder.grad is not None:
                    site = join_site(path + BACKWARD, f"out.{leaf}")
                    recorded = self._recorded_rows(site, holder.grad)
                    if recorded is not None and recorded.shape == holder.grad.shape:
                        self.anchored += 1
                        holder.grad = _like(holder.grad, recorded)
        made = self._stepping.step(named, held)
        self._keep_as(join_site(ROOT + OPTIMIZER, GRAD_NORM), made.norm)
        first = self._order
        for number, (path, leaf, given, value, moments) in enumerate(made.updates()):
            where = path + OPTIMIZER
            self._order = first + _UPDATE * number  # alike on ranks that hold other moments
            self._keep_as(join_site(where, f"in.{leaf}"), given)
            self._keep_as(
                join_site(where, f"out.{leaf}"), self._planted(where, f"out.{leaf}", value)
            )
            for name, moment in moments:
                self._keep_as(join_site(where, f"out.{leaf}.{name}"), moment, made.holder)
        return made

    def _keep_as(
        self, site: str, tensor: torch.Tensor, placement: Mapping[str, str] | None = None
    ) -> None:
        """``placement``: how it lies on the mesh, where the tensor does not tell."""
        if self._selected:
            item = self._keep(tensor)
            if placement is not None:
                item.placement = dict(placement)
            self._put(site, item)
