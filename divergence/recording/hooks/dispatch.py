"""Operators: every ATen operator called inside chosen modules, with what running it again needs.

A dispatch mode, on only while one of the chosen modules runs, below autograd and composite
functions: ``linear`` is seen as ``t`` and ``mm``. Results are recorded (``PATH/aten.mm#2:out``),
and operands whose value no other record of this forward holds (see dataflow). Views compute
nothing: they are noted in the operand that is such a view (``via``), because a wrong one hands the
right numbers on in the wrong order.

Operators that are not recorded are counted by reason: higher-order ones (compiled graphs) and those
that return no tensor. No bit of the result changes: operators run as they were called, and tensors
are copied before they can be written to.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from divergence.errors import UsageError
from divergence.recording.hooks.arguments import (
    argument_names,
    as_json,
    as_word,
    draws_random_numbers,
    input_leaves,
    named_arguments,
    operator_name,
    written_arguments,
)
from divergence.recording.hooks.dataflow import (
    Dataflow,
    lies_inside,
    misalignment_bytes,
    storage_of,
    tensors_in,
)
from divergence.recording.model.structure import inside
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.manifest import NO_TENSOR
from divergence.run.schema.record import Call, Operand
from divergence.run.schema.site import escape_path, join_site, operator_path
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["Emit", "OperatorRecorder", "source_line", "weights_by_storage"]

_TORCH_HOME = os.path.dirname(torch.__file__)
_OWN_HOME = os.path.dirname(os.path.dirname(__file__))
_DRAWS = "draws random numbers"
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                            "new_empty_strided"})  # fmt: skip


class Emit(Protocol):
    """Makes a record of the forward under way."""

    def __call__(self, site: str, item: CapturedTensor, call: Call | None = None) -> None: ...


Substitution = Callable[[str], torch.Tensor | None]
"""By site: what is put in place of an operator's result in this forward, or None."""

_Pending = list[tuple[str, CapturedTensor]]
"""By site: an operator's inputs that need records of their own."""


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call that is about to be recorded."""

    key: tuple[str, str]
    """Its counter."""
    where: str
    """The operator's path."""
    call: Call
    pending: _Pending


class OperatorRecorder(TorchDispatchMode):
    """Records inside ``roots`` (module paths) of ``model``, through ``emit``.

    ``call_of(path)`` is what a module's call adds to its path (``#2``). ``active()``: is this
    forward recorded? ``weights``: record the weights' values as well. ``substitute``: another run's
    results, put in place before anything uses these. ``skipped``: number of operators that were
    not recorded, by reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        roots: set[str],
        *,
        emit: Emit,
        call_of: Callable[[str], str],
        active: Callable[[], bool],
        keep: Callable[[torch.Tensor], CapturedTensor],
        weights: bool = False,
        substitute: Substitution | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._model, self._roots = model, roots
        self._emit, self._call_of, self._active, self._keep = emit, call_of, active, keep
        self._keep_weights = weights
        self._substitute, self.num_substituted = substitute, 0
        self.skipped: Counter[str] = Counter()
        self._stack: list[str] = []
        self._paused = 0
        self._entered = False
        self._weights = weights_by_storage(model)
        self._weight_items: dict[str, CapturedTensor] = {}
        self._weight_digests: dict[str, str] = {}
        self.end_of_forward()
        self._flow = Dataflow()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Module hooks on; off again, and this mode too, on any exit."""
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._leave() if self._entered else None)
            for path, module in self._modules():
                if not inside(path, self._roots):
                    continue
                push = self._push(path, argument_names(module))
                stack.enter_context(module.register_forward_pre_hook(push, with_kwargs=True))
                # also after an exception, which a model may catch (a fast path that is not there)
                pop = self._pop(path)
                stack.enter_context(module.register_forward_hook(pop, always_call=True))
            yield

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in self._model.named_modules():
            yield escape_path(name), module

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators that the caller runs meanwhile are not the model's."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _push(self, path: str, names: list[str]) -> Callable[..., Any]:
        def push(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._entered:
                if path not in self._roots or not self._active():
                    return
                self._entered = True
                called = path + self._call_of(path)
                for port, tensor in input_leaves(args, kwargs, names):
                    self._flow.enter(tensor, join_site(called, port))
                self.__enter__()  # type: ignore[no-untyped-call]  # the same
            self._stack.append(path)

        return push

    def _pop(self, path: str) -> Callable[..., Any]:
        def pop(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._entered or path not in self._stack:
                return
            while self._stack.pop() != path:  # modules that an exception left
                pass
            if not self._stack:
                self._leave()

        return pop

    def _leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # the same
        self._entered = False
        self._stack.clear()
        self._flow = Dataflow()  # nothing of a block is held beyond it

    def end_of_forward(self) -> None:
        """Starts to number calls anew."""
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._weight_sites: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._is_inside():
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self.skipped["a higher-order operator, which has no schema"] += 1
            return func(*args, **kwargs)
        if func.namespace == "aten" and func.overloadpacket.__name__ in _UNINITIALISED:
            self.skipped["its result is uninitialised memory"] += 1
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._turned(func, args, kwargs)
        named = named_arguments(func, args, kwargs)
        writes = written_arguments(func)
        if writes:  # its operands must be copied before
            told = self._told(func, named)
            result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            results = tensors_in(result)
            memories = {storage_of(tensor) for tensor in tensors_in(list(named.values()))}
            if results and all(storage_of(tensor) in memories for tensor in results):
                with self.paused():
                    self._note_view(func, args, kwargs, results)
                return result
            told = self._told(func, named)
        results = tensors_in(result)
        if not results:  # foreach operators and the like give nothing back: what was written
            results = [t for argument in writes for t in tensors_in(named.get(argument))]
        if not results:
            self.skipped[f"it {NO_TENSOR}"] += 1
            return result
        if self._substitute is not None:
            self._put_in_place(self._substitute, told.where, results)
        with self.paused():
            self._record(told, results, [t for name in writes for t in tensors_in(named.get(name))])
        return result

    def _is_inside(self) -> bool:
        """Is it one of the chosen modules that calls operators now?"""
        return bool(self._stack)

    def _caller(self) -> str:
        """That module, with its call."""
        return self._stack[-1] + self._call_of(self._stack[-1])

    def _origin(self, func: Any) -> dict[str, str | None]:
        """Where in the code an operator is called: fields of a Call."""
        return {"source": source_line()}

    def _turned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``detach_``, ``t_``: a view in place of its source. No byte is written."""
        before = args[0].detach()
        result = func(*args, **kwargs)
        with self.paused():
            self._note_view(func, (before, *args[1:]), kwargs, tensors_in(result))
        return result

    def _put_in_place(
        self, substitute: Substitution, where: str, results: list[torch.Tensor]
    ) -> None:
        """Writes another run's results into the memory of these."""
        for index, tensor in enumerate(results):
            new = substitute(f"{where}:out" + (f".{index}" if index else ""))
            if new is None:
                continue
            if new.numel() != tensor.numel():
                raise UsageError(
                    f"{where} gives {tuple(tensor.shape)} here, and {tuple(new.shape)} is to be "
                    "put in its place",
                    hint="substitute from a run of the same tokens, at the same operator",
                )
            tensor.copy_(new.reshape(tensor.shape))
            self.num_substituted += 1

    def _told(self, func: Any, named: dict[str, Any]) -> _PendingCall:
        """The call as it is recorded, and the operands that no record holds yet."""
        key = (self._caller(), operator_name(func))
        where = operator_path(*key, self._numbers[key] + 1)
        operands: list[Operand] = []
        pending: _Pending = []
        with self.paused():
            arguments = {
                name: self._encode(value, f"{where}:in.{name}", operands, pending)
                for name, value in named.items()
            }
        call = Call(
            operator=str(func),
            arguments=arguments,
            operands=tuple(operands),
            note=_DRAWS if draws_random_numbers(func, named) else None,
            **self._origin(func),
        )
        return _PendingCall(key, where, call, pending)

    def _record(
        self, told: _PendingCall, results: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        self._numbers[told.key] += 1
        for site, item in told.pending:
            self._emit(site, item)
        for tensor in written:
            self._flow.written_to(tensor)
            self._weights.pop(storage_of(tensor), None)  # a state from now on, not a weight
        for index, tensor in enumerate(results):
            site = f"{told.where}:out" + (f".{index}" if index else "")
            self._emit(site, self._keep(tensor), told.call if index == 0 else None)
            self._flow.made(tensor, site)

    def _encode(self, value: Any, site: str, operands: list[Operand], pending: _Pending) -> Any:
        """An argument as JSON; its tensors become operands."""
        if isinstance(value, torch.Tensor):
            operands.append(self._operand(value, site, pending))
            return {"tensor": len(operands) - 1}
        if isinstance(value, list | tuple):
            return [
                self._encode(item, f"{site}.{index}", operands, pending)
                for index, item in enumerate(value)
            ]
        return as_json(value)

    def _operand(self, tensor: torch.Tensor, site: str, pending: _Pending) -> Operand:
        common: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "stride": None if tensor.is_contiguous() else tuple(tensor.stride()),
            "misalignment_bytes": misalignment_bytes(tensor),
            "via": self._flow.via(tensor),
        }
        weight = self._weight_of(tensor)
        if weight is not None:
            name, parameter = weight
            if name not in self._weight_digests:
                loaded = self._loaded(name, parameter)
                real = loaded.device.type != "meta"  # of a dry run there are no bytes
                with _disable_current_modes():  # as loaded, where a mode computes in a wider dtype
                    self._weight_digests[name] = digest_tensor(loaded) if real else "0" * 32
            return Operand(
                site=self._weight_site(name, parameter) if self._keep_weights else None,
                weight=name,
                xxh3=self._weight_digests[name],
                offset=int(tensor.storage_offset() - parameter.storage_offset()),
                **common,
            )
        known = self._flow.site_of(tensor)
        if known is None:
            known = site
            pending.append((site, self._keep(tensor)))
            self._flow.holds(tensor, site)
        return Operand(site=known, origin=self._flow.origin_of(tensor), **common)

    def _loaded(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The weight of that name as it was loaded."""
        return parameter

    def _weight_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """(name, weight) of which this is a view; None for what is no part of a single weight
        (two in one memory seen as one, other bytes of it): that is recorded as any value."""
        for name, weight in self._weights.get(storage_of(tensor), ()):
            if lies_inside(tensor, weight):
                return name, weight
        return None

    def _weight_site(self, name: str, parameter: torch.Tensor) -> str:
        """The weight's record in this forward, made when it is first needed there."""
        module, _, last = name.rpartition(".")
        site = join_site(escape_path(module), f"in.{last}")
        if name not in self._weight_items:
            with _disable_current_modes():
                self._weight_items[name] = self._keep(parameter)
        if site not in self._weight_sites:  # a block's dataflow is forgotten, its records are not
            self._emit(site, self._weight_items[name])
            self._weight_sites.add(site)
        return site

    def _note_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> None:
        source = next(iter(tensors_in(args)), None)
        words = [as_word(value) for value in args if not isinstance(value, torch.Tensor)]
        words += [f"{name}={as_word(value)}" for name, value in kwargs.items()]
        step = f"{func.overloadpacket.__name__}({', '.join(words)})"
        for index, tensor in enumerate(results):
            part = f"[{index}]" if len(results) > 1 else ""
            self._flow.looked_at(tensor, step + part, source)


def weights_by_storage(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """Several may share one memory: the parts of a fused weight, for example."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        by_storage.setdefault(storage_of(tensor), []).append((name, tensor))
    return by_storage


def source_line(until: Callable[[FrameType], bool] = lambda frame: False) -> str | None:
    """The innermost line of Python that is neither torch's nor this tool's, as far out as to the
    frame of which ``until`` is true."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not until(frame):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_HOME, _OWN_HOME)):
            return f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
