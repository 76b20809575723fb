"""A training step, recorded: forward, backward, and what is handed on."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from divergence.domains.training.recording.optimizer import (
    Named,
    Stepping,
    Update,
    gathered_once,
    precision_of,
)
from divergence.domains.training.recording.options import check_stage, label_rows, training_of
from divergence.errors import ModelError, UsageError
from divergence.options.commands import CaptureOptions
from divergence.recording.dispatch import (
    Dataflow,
    OperatorRecorder,
    argument_names,
    input_leaves,
    map_output,
    operator_name,
    output_leaves,
    source_line,
    weights_by_storage,
)
from divergence.recording.engines.engine import (
    Feature,
    GroupResult,
    GroupStep,
    Session,
    failures,
    inputs,
)
from divergence.recording.engines.load import LoadedModel
from divergence.recording.forwards import swapped
from divergence.recording.prompts import check_labels
from divergence.recording.recorder import Args, Hook, Kwargs, Recorder
from divergence.recording.structure import hooked, inside
from divergence.run.captured import CapturedTensor
from divergence.run.contents import num_labels
from divergence.run.manifest import (
    NO_LABEL,
    Manifest,
    ModuleNote,
    SampleTokens,
    StepPrecision,
    Training,
)
from divergence.run.site import BACKWARD, GRAD_NORM, LOSS, OPTIMIZER, ROOT, escape_path, join_site

# Training mode of a model, with or without its dropout and checkpointing of its blocks.


@contextlib.contextmanager
def training_mode(
    model: torch.nn.Module, *, on: bool = True, dropout: bool, checkpointing: bool
) -> Iterator[None]:
    """``on``: else the model stays in the mode that it is in. Without ``dropout`` all rates are 0.
    Raises UsageError for ``checkpointing`` of a model that has none."""
    was = model.training
    rates: list[tuple[torch.nn.Module, str, float]] = []
    for module in () if dropout else model.modules():
        own = isinstance(module, torch.nn.Dropout)
        rates += [
            (module, name, value)
            for name, value in vars(module).items()
            if isinstance(value, float) and ("dropout" in name or (own and name == "p"))
        ]
    if on:
        model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    if checkpointing:
        _checkpoint(model)
    try:
        yield
    finally:
        if checkpointing:
            _checkpoint(model, on=False)
        for module, name, rate in rates:
            setattr(module, name, rate)
        model.train(was)


def _checkpoint(model: Any, *, on: bool = True) -> None:
    """Switch checkpointing of blocks, by the name that this release of transformers has for it."""
    switch, kind = "enable" if on else "disable", "activation"
    if not hasattr(model, f"{kind}_checkpointing_{switch}"):
        kind = "gradient"
    change = getattr(model, f"{kind}_checkpointing_{switch}", None)
    if change is None:
        raise UsageError(f"--gradient-checkpointing: {type(model).__name__} has none")
    change(**({f"{kind}_checkpointing_kwargs": {"use_reentrant": False}} if on else {}))


# Operators of a training step: of the forward, and of the backward of the same modules.
#
# The backward runs outside of all modules. Whose an operator is tells the node of autograd's graph
# that calls it: nodes are numbered in the order in which the forward made them, and each belongs to
# the innermost module whose call made it. Its site is ``model.layers.3.mlp#backward/aten.mm:out``,
# with the line of the forward operator of which it is the backward.
#
# Where a tensor was read several times autograd itself adds up its gradients, behind the last of
# those that are added: that is recorded in that one's module. What adds a parameter's gradient to
# those of other prompts belongs to no module. A forward that is run again for its activations
# (gradient checkpointing) is not recorded twice, and what it makes has the names of the first.
#
# On an accelerator autograd runs a backward in threads of its own. While operators are recorded it
# runs in the calling thread, which moves no bit.

_SUMS = ("aten.add", "aten.add_")


def _next_node() -> int:
    """The number of the next node of autograd's graph that this thread makes."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


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
                called = path + self._call_of(path)
                if called in self._flows:
                    for port, tensor in input_leaves(args, kwargs, names):
                        self._flows[called].enter(tensor, join_site(called, port))
                self._again.append(path)
                return
            begin(module, args, kwargs)
            if self._stack:
                root = self._stack[0]
                self._flows.setdefault(root + self._call_of(root), self._flow)
                self._starts.append((self._caller(), _next_node()))

        return push

    def _pop(self, path: str) -> Callable[..., Any]:
        end = super()._pop(path)

        def pop(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._in_backward:
                while path in self._again and self._again.pop() != path:
                    pass
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
        blocks = (flow for flow in self._flows if flow.partition("#")[0] in self.blocks)
        return next((flow for flow in blocks if _is_in(self._owner, flow)), None)

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
        own = source_line(lambda frame: frame.f_code.co_name == "_engine_run_backward")
        if own is None and operator_name(func) in _SUMS:
            return {"source": None}  # behind the node, not of it
        made_by, line = self._forwards.get(self._node._sequence_nr(), (None, None))
        if isinstance(self._node, torch.autograd.function.BackwardCFunction):
            made_by = type(self._node).__name__.removesuffix("Backward")
        return {"source": own or line, "backward_of": made_by}


def _nothing(site: str, item: CapturedTensor, call: Any = None) -> None:
    """Stands in place of a record."""


def _is_in(module: str, root: str) -> bool:
    return inside(module.partition("#")[0], {root.partition("#")[0]})


# Hooks of a training step: what the forward gives, and the gradients that enter and leave modules.
#
# The backward of a module is written as a call of it: ``model.layers.3#backward:in`` is the
# gradient of the loss by the block's output, ``...#backward:out`` that by its input,
# ``...:out.weight`` that by its parameter. So a backward is compared as a forward is, in its own
# order of execution.
#
# Gradients are seen by hooks of tensors, which change no bit. A tensor that several modules read
# has one gradient, their sum: of modules inside a block what enters their backward is recorded, and
# not what leaves it. What a block hands out beside its first result it may have used itself, as
# attention's weights: it hands out a view, whose gradient is what enters from outside alone.
#
# Anchored, each block gets the other run's input and incoming gradient, so that a difference in
# what it hands on, and in its parameters' gradients, was made in it. The graph is cut at the
# blocks' ends, and all pieces are run by one call of torch's autograd. Parameter gradients are
# those of the whole step, of all prompts (each a micro-batch) together, and are recorded behind the
# last one.

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


class Gradients(Hook):
    """Watches the gradients of what modules get and give; anchored, puts the other run's in place
    of those that enter a block."""

    def __init__(self, recorder: TrainRecorder) -> None:
        self._recorder = recorder

    def sees(self, path: str) -> bool:
        return path != ROOT

    def before(
        self, path: str, call: str, args: Args, kwargs: Kwargs, names: Sequence[str]
    ) -> None:
        recorder = self._recorder
        # inside a block several modules may read one tensor: its gradient is no module's own
        if recorder._notes[path].role == "inner" or recorder._backward_runs:
            return  # or it is a forward that is run again, for its activations
        for port, tensor in input_leaves(args, kwargs, names):
            if tensor.requires_grad:
                leaves = partial(recorder._leaves, path, call, f"out{port[2:]}")
                handle = tensor.register_hook(leaves)
                # Before those that are there: what leaves the backward of the module that reads
                # a tensor comes before what enters that of the one that made it. Torch runs
                # them in the order in which they were put in.
                hooks: Any = tensor._backward_hooks
                for key in [key for key in hooks if key != handle.id]:
                    hooks[key] = hooks.pop(key)

    def after(self, path: str, call: str, args: Args, kwargs: Kwargs, output: Any) -> Any:
        recorder = self._recorder
        if recorder._backward_runs:
            return output
        new = output
        if recorder._notes[path].role != "inner" and path != LOSS:
            with recorder._quiet():
                if len(output_leaves(output)) > 1:
                    new = output = map_output(output, _beside)
                if recorder._anchor is not None:
                    new = map_output(output, partial(recorder._cut, path + call))
        roots = {id(root) for root, _ in recorder._roots}
        for port, tensor in output_leaves(output):
            if tensor.requires_grad:
                recorder._graded.add(path + call)
            if tensor.requires_grad and id(tensor) not in roots:
                tensor.register_hook(partial(recorder._leaves, path, call, f"in{port[3:]}"))
        return new


def _beside(port: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view of what a block hands out beside its first result."""
    return tensor.view_as(tensor) if port != "out" and tensor.requires_grad else tensor


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
        self.hooks.append(Gradients(self))
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
        before = self._pre_hook(LOSS, argument_names(self._loss))
        yield hooked(self._loss, before, self._post_hook(LOSS), compiled=False)

    def _recorded_input(self, path: str, port: str, tensor: torch.Tensor) -> torch.Tensor:
        new = super()._recorded_input(path, port, tensor)
        if new is not tensor and tensor.requires_grad:
            new.requires_grad_()
            if path == LOSS and tensor.is_leaf:  # FSDP waits for a gradient of what a model returns
                self._roots.append((tensor, torch.zeros_like(tensor)))
        return new

    def _cut(self, called: str, port: str, tensor: torch.Tensor) -> torch.Tensor:
        """A block's result with the graph cut behind it, where the other run has its gradient."""
        site = join_site(called + BACKWARD, f"in{port[3:]}")
        if not tensor.requires_grad or self._anchor_broken:
            return tensor
        recorded = self._recorded_rows(site, torch.zeros_like(tensor))
        if recorded is None or recorded.shape != tensor.shape:
            return tensor
        self.anchored += 1
        gradient = recorded.to(tensor, copy=True)
        self._enters(called, gradient, site)
        self._roots.append((tensor, gradient))
        return tensor.detach().requires_grad_()

    def _numbered(self, path: str, call: str = "") -> str:
        if self._backward_runs:  # run again: the call that it was
            return self.lane.calls.get(path, "")
        return super()._numbered(path, call)

    def _emit(self, path: str, call: str, port: str, tensor: torch.Tensor) -> None:
        if not self._backward_runs:
            super()._emit(path, call, port, tensor)

    def _end_of_forward(self) -> None:
        return  # the backward belongs to it

    # --- backward -------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """The backward of the forward that was just made. ``share``: 0 where its gradients are not
        to count."""
        if not loss.requires_grad:
            raise ModelError("the loss depends on no parameter: all of them are frozen")
        tensors, gradients = [loss], [torch.ones_like(loss) * (self._stepping.loss_scale * share)]
        for tensor, gradient in self._roots:
            tensors.append(tensor)
            gradients.append(gradient * share)
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
        self.lane.order = 1 << 24  # behind all that the first prompt's forward and backward gave
        named = parameters_of(self._model)
        reduced = self._stepping.reduce(named)
        for path, leaf, holder in reversed(reduced):
            if holder.grad is not None:
                where, port = path + BACKWARD, f"out.{leaf}"
                holder.grad = self._planted(where, port, holder.grad)
                self._keep_as(join_site(where, port), holder.grad)
        steps = self._stepping.training.optimizer is not None
        made = self._step_of(named, reduced) if steps else None
        self.precision = precision_of(self._model, self._stepping.training, reduced, made)

    def _step_of(self, named: Named, reduced: Named) -> Update:
        if self._anchor is not None:
            for path, leaf, holder in reduced:
                if holder.grad is not None:
                    site = join_site(path + BACKWARD, f"out.{leaf}")
                    recorded = self._recorded_rows(site, holder.grad)
                    if recorded is not None and recorded.shape == holder.grad.shape:
                        self.anchored += 1
                        holder.grad = _like(holder.grad, recorded)
        made = self._stepping.step(named, reduced)
        self._keep_as(join_site(ROOT + OPTIMIZER, GRAD_NORM), made.norm)
        first = self.lane.order
        for number, (path, leaf, given, value, moments) in enumerate(made.updates()):
            where = path + OPTIMIZER
            self.lane.order = first + _UPDATE * number  # alike on ranks that hold other moments
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
        if self.lane.selected:
            item = self.lane.keep(tensor)
            if placement is not None:
                item.placement = dict(placement)
            self._put(site, item)


# A session that makes a training step of each group of prompts in place of decoding.


class NextTokenLoss(torch.nn.Module):
    """Σ -log p(next token) / ``num_labels``, by prompt: what each adds to the mean over all tokens
    of the step that have a label."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
        """``logits`` (B, T, V); ``labels`` (B, T), -100 where there is none; (B, 1). Computed in
        float32 or wider, as transformers does."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        next_labels = labels[:, 1:]
        each = cross_entropy(
            logits[:, :-1].flatten(0, 1),
            next_labels.flatten(),
            ignore_index=NO_LABEL,
            reduction="none",
        )
        return each.view(next_labels.shape).sum(dim=1, keepdim=True) / num_labels


class TrainingStep(GroupStep):
    """A training step of the session's model, as a capture asks of it."""

    def __init__(self, loaded: LoadedModel, training: Training) -> None:
        super().__init__(training)
        self._model, self._structure = loaded.module, loaded.structure

    def places(self, paths: Collection[str]) -> list[str]:
        return [path + end for end in ("", BACKWARD, OPTIMIZER) for path in paths]

    def owners(self) -> set[str]:
        """Modules whose parameters have gradients that are recorded, and the loss."""
        names = (name for name, _ in self._structure.named_parameters())
        return {LOSS, *(escape_path(name.rpartition(".")[0]) for name in names)}

    @contextlib.contextmanager
    def in_dtype(self, dtype: torch.dtype | None) -> Iterator[None]:
        """The parameters as leaves of ``dtype``: torch gives a gradient its parameter's dtype, so
        those of a wide pass would be rounded. None: as they are, and buffers as the step has them.
        On exit all is as before: an optimizer's step is no part of the next pass."""
        model, training = self._model, self.training

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, torch.nn.Parameter):
                same = dtype is None or tensor.dtype == dtype
                wide = tensor if same else tensor.detach().to(dtype)
                return tensor if same else torch.nn.Parameter(wide, tensor.requires_grad)
            if dtype is None and training.buffer_dtype is not None and tensor.is_floating_point():
                return tensor.to(getattr(torch, training.buffer_dtype))
            return tensor

        stepped = () if training.optimizer is None else model.parameters()
        originals = [(parameter, parameter.detach().clone()) for parameter in stepped]
        try:
            with swapped(model, leaf):
                yield
        finally:
            with torch.no_grad():
                for parameter, value in originals:
                    parameter.copy_(value)


class TrainingSession:
    """``inner``'s model, in training: a step is fed in one way alone, and decodes nothing."""

    makes_forwards: ClassVar[bool] = False
    has_cache: ClassVar[bool] = False

    def __init__(self, inner: Session, training: Training) -> None:
        self._inner, self._training = inner, training
        self.loaded: LoadedModel = inner.loaded
        self.step: GroupStep = TrainingStep(inner.loaded, training)
        self.lacks: Mapping[Feature, str] = {
            **inner.lacks,
            "whole": "a training step decodes nothing",
        }
        self._stepping = Stepping(training, inner.loaded.ranks)
        self._loss, self._num_labels = NextTokenLoss(), 0
        self._recorded: TrainRecorder | None = None
        self.losses: list[float] = []
        loaded = inner.loaded
        if loaded.task != "causal-lm":
            raise UsageError(f"--train is for causal language models, and this is an {loaded.task}")
        if not inner.makes_forwards:
            raise UsageError(f"--train: the engine {inner.note().name} makes no backward")
        if training.autocast not in (None, "bfloat16", "float16"):
            raise UsageError(f"--autocast {training.autocast}: bfloat16 or float16")
        fixed = [p for p in loaded.module.parameters() if not p.is_floating_point()]
        if fixed or loaded.codes is not None:
            raise ModelError(
                "--train: a quantised model has codes, which have no gradient",
                hint="give the checkpoint that it was quantised from",
            )
        if training.zero == 2:
            gathered_once(inner.loaded.module)

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        self._inner.settle(samples, forced, like)
        check_labels(samples)
        self._num_labels = sum(map(num_labels, samples))
        if self._num_labels < 1:
            raise UsageError(
                "no prompt has a second token, so there is nothing to predict",
                hint="--train needs prompts of two tokens or more",
            )

    def notes(self) -> dict[str, ModuleNote]:
        notes = self._inner.notes()
        if LOSS in notes:
            raise UsageError(f"--train calls its loss {LOSS}, as a module of this model is called")
        return {**notes, LOSS: ModuleNote(kind="NextTokenLoss", role="trunk")}

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        self._inner.check_ids(samples, max_new_tokens)
        config: Any = self.loaded.module.config
        check_labels(samples, getattr(config.get_text_config(), "vocab_size", None))

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        """Values and gradients of modules, and the gradients of parameters."""
        weights = sum(p.nbytes for *_, p in parameters_of(self.loaded.structure))
        copies = 1 if self._training.optimizer is None else 5
        hooked = [path for path in hooked if path != LOSS]
        return 2 * self._inner.num_bytes(hooked, samples, 0) + copies * weights

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        recorder = TrainRecorder(
            self.loaded.module, notes, loss=self._loss, stepping=self._stepping, **how
        )
        if how["pass_"] == "free":
            self._recorded = recorder
        return recorder

    @property
    def precision(self) -> StepPrecision | None:
        """Return the precision of the free pass, once it is made."""
        return None if self._recorded is None else self._recorded.precision

    def run_group(self, recorder: Recorder, samples: list[SampleTokens], **_: Any) -> GroupResult:
        """Forward and backward of one micro-batch."""
        assert isinstance(recorder, TrainRecorder)
        loaded = self.loaded
        ids, mask = inputs(loaded, samples)
        labels = label_rows(samples, ids, mask)
        model: Any = loaded.module
        ranks, share = loaded.ranks, 1.0
        if ranks is not None:
            ranks.idle = False
            if not ranks.owns(recorder._sample):  # it runs for the others' sake, who wait for it
                share = 0.0
            # FSDP divides gradients by the number of ranks; the loss is a mean over all ranks'
            # tokens already, where each has its own prompts
            for module in model.modules() if ranks.dealt else ():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
                    module.set_gradient_divide_factor(1.0)
        dropout, again = self._training.dropout, self._training.gradient_checkpointing
        with (
            failures(loaded, samples, 0),
            torch.enable_grad(),
            training_mode(model, on=dropout or again, dropout=dropout, checkpointing=again),
        ):
            parameters = inspect.signature(model.forward).parameters
            positions = mask.cumsum(-1).sub(1).clamp(min=0)  # pads in front move no token
            beside = {"use_cache": False, "position_ids": positions}
            beside = {name: value for name, value in beside.items() if name in parameters}
            low: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self._training.autocast is not None:
                dtype = getattr(torch, self._training.autocast)
                low = torch.autocast(ids.device.type, dtype=dtype)
            with low:
                output = model(input_ids=ids, attention_mask=mask, **beside)
                loss = self._loss(output.logits, labels, self._num_labels)
            recorder.backward(loss, share)
        self.losses.append(float(loss.detach().sum()))
        none: list[list[int]] = [[] for _ in samples]
        return GroupResult(none, none, none)

    def __getattr__(self, name: str) -> Any:
        """Return what a step leaves alone: the model's identity, the engine's note, its end."""
        return getattr(self._inner, name)


def session_of(inner: Session, request: CaptureOptions) -> TrainingSession:
    """``inner`` with the step that was asked for."""
    ranks = inner.loaded.ranks
    check_stage(request, () if ranks is None else ranks.sizes)
    return TrainingSession(inner, training_of(request, ranks))
