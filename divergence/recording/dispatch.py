"""Operators as torch dispatches them: calls, operands and results, and what flows from one to the
next."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from divergence.errors import UsageError
from divergence.recording.structure import inside
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import NO_TENSOR, digest_tensor
from divergence.run.record import Call, Operand
from divergence.run.site import escape_path, join_site, operator_path

# Names for the tensors and values that modules and operators take and give.
#
# ``forward(hidden, mask=m, position_embeddings=(cos, sin))`` has the ports ``in``, ``in.mask``,
# ``in.position_embeddings.0`` and ``….1``. The first tensor is always ``in`` (or ``out``), given by
# position or by name, and other positional arguments take their names from ``forward``'s signature,
# so that ``layer(hidden)`` and ``layer(hidden_states=hidden)`` have the same sites. Caches and
# other objects are passed by.
#
# Of an operator the schema tells the names, what is written to and whether chance is in it. Its
# scalars become JSON; what JSON has no word for (a dtype, a device, an infinity) is an object of
# one key. What is no scalar (a generator) is named by its type: its call cannot be run again.

Leaf = tuple[str, torch.Tensor]


def argument_names(module: torch.nn.Module) -> list[str]:
    """Names of the positional parameters of ``module.forward``; empty where it hides them. A
    wrapper put over one module's forward (tensor parallelism does) has none: then its class's."""
    names = _positional(module.forward)
    own = getattr(type(module), "forward", None)  # a class of torch.jit has none
    return names or ([] if own is None else _positional(functools.partial(own, module)))


def _positional(forward: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def input_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> list[Leaf]:
    """(port, tensor) for each tensor among the arguments, in order."""
    leaves: list[Leaf] = []
    for index, value in enumerate(args):
        if isinstance(value, _HOLDERS) or is_dataclass(value):
            _collect(value, f"in.{names[index] if index < len(names) else index}", leaves)
    for name, value in kwargs.items():
        if isinstance(value, _HOLDERS) or is_dataclass(value):
            _collect(value, f"in.{name}", leaves)
    if leaves:
        leaves[0] = "in", leaves[0][1]
    return leaves


def map_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, torch.Tensor], torch.Tensor],
    names: Sequence[str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced by ``change(port, tensor)``."""
    named = _first_named(change, "in")
    new_args = tuple(
        _walk(value, f"in.{names[index] if index < len(names) else index}", named)
        for index, value in enumerate(args)
    )
    return new_args, {name: _walk(value, f"in.{name}", named) for name, value in kwargs.items()}


def output_leaves(output: Any) -> list[Leaf]:
    """(port, tensor) for each tensor of a module's result, in order."""
    leaves: list[Leaf] = []
    _collect(output, "out", leaves)
    if leaves:
        leaves[0] = "out", leaves[0][1]
    return leaves


def map_output(output: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The result with each tensor replaced by ``change(port, tensor)``."""
    return _walk(output, "out", _first_named(change, "out"))


_HOLDERS = (torch.Tensor, tuple, list, dict)


def _collect(value: Any, name: str, leaves: list[Leaf]) -> None:
    """The same walk as _walk, without building anything: it runs at every module call."""
    if isinstance(value, torch.Tensor):
        leaves.append((name, value))
    elif type(value) in (tuple, list):
        for index, item in enumerate(value):
            if item is not None:
                _collect(item, f"{name}.{index}", leaves)
    else:
        for key, item in _named_parts(value).items():
            if item is not None:
                _collect(item, f"{name}.{key}", leaves)


def _named_parts(value: Any) -> Mapping[str, Any]:
    """The items of a dictionary, the fields of a named tuple or of a dataclass; empty of others."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return vars(value) if is_dataclass(value) and hasattr(value, "__dict__") else {}


def _first_named(
    change: Callable[[str, torch.Tensor], torch.Tensor], port: str
) -> Callable[..., Any]:
    """Give the first tensor the bare port, whatever it was called."""
    first = True

    def named(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal first
        if first:
            first, name = False, port
        return change(name, tensor)

    return named


def _walk(value: Any, name: str, change: Callable[..., Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if type(value) in (tuple, list):
        new = [_walk(item, f"{name}.{index}", change) for index, item in enumerate(value)]
        changed = any(a is not b for a, b in zip(new, value, strict=True))
        return type(value)(new) if changed else value
    parts = _named_parts(value)
    entries = {key: _walk(item, f"{name}.{key}", change) for key, item in parts.items()}
    different = {key: item for key, item in entries.items() if item is not parts[key]}
    if different and isinstance(value, tuple):
        return value._replace(**different)  # type: ignore[attr-defined]
    if different and not isinstance(value, dict):
        value = copy.copy(value)
        vars(value).update(different)
    elif different:  # ModelOutput is an ordered dict, made anew by each forward
        if type(value) is dict:
            value = dict(value)  # an argument that several blocks may share
        for key, item in different.items():
            value[key] = item
    return value


@functools.cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def operator_name(func: Any) -> str:
    """``aten.mm``: namespace and operator, without the overload."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by the schema's names."""
    return dict(zip(_argument_names(func), args, strict=False)) | kwargs


def with_defaults(func: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: those that were given, and the defaults of others."""
    arguments = func._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()} | dict(named)


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def draws_random_numbers(func: Any, named: Mapping[str, Any]) -> bool:
    """Does this call draw random numbers? Attention kernels may, but for a dropout of 0 do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = with_defaults(func, named)
    if given.get("train") is False or given.get("training") is False:
        return False
    chances = [given.get(name) for name in ("dropout_p", "dropout", "p")]
    numbers = [chance for chance in chances if isinstance(chance, int | float)]
    return not numbers or any(numbers)


def as_json(value: Any) -> Any:
    """A scalar argument as docs/dump-format.md writes it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [as_json(value.real), as_json(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"object": type(value).__name__}


def as_word(value: Any) -> str:
    """Write a value for people: numbers and names; the end of a slice as such."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_word(item) for item in value) + "]"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, int) and value == sys.maxsize:
        return "end"
    encoded = as_json(value)
    return str(next(iter(encoded.values())) if isinstance(encoded, dict) else encoded)


# Dataflow inside a block: which record holds the value that lies in a piece of memory.
#
# A value is recognised by the memory it lies in (storage, offset, shape, stride, dtype), and
# forgotten when an operator writes there. Beside it stands where the memory came from
# (``origin``: the site whose result or argument it is) and which views were taken of that.

View = tuple[int, int | torch.SymInt, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Storage, offset, shape, stride, dtype: one way of looking at one piece of memory."""


class Dataflow:
    """Knows what lies in a block's memory while the block runs."""

    def __init__(self) -> None:
        self._known: dict[View, str] = {}
        self._via: dict[View, tuple[str, ...]] = {}
        self._origins: dict[int, str | None] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor comes to lie there

    def enter(self, tensor: torch.Tensor, site: str) -> None:
        """Notes an argument of the block: not recorded yet, but known by its name."""
        self._origins.setdefault(storage_of(tensor), site)
        self._held.append(tensor)

    def site_of(self, tensor: torch.Tensor) -> str | None:
        """The record that holds this value, if one does."""
        return self._known.get(_view_of(tensor))

    def origin_of(self, tensor: torch.Tensor) -> str | None:
        """The site whose memory this is; None where it is unknown, or written by several."""
        return self._origins.get(storage_of(tensor))

    def via(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The views that were taken of its origin."""
        return self._via.get(_view_of(tensor), ())

    def holds(self, tensor: torch.Tensor, site: str) -> None:
        """Notes that the record ``site`` holds this value."""
        self._known[_view_of(tensor)] = site
        self._held.append(tensor)

    def made(self, tensor: torch.Tensor, site: str) -> None:
        """Notes an operator's result, recorded as ``site``."""
        storage = storage_of(tensor)
        self._origins[storage] = self._origins.get(storage, site) and site
        self._via.setdefault(_view_of(tensor), ())
        self.holds(tensor, site)

    def looked_at(self, tensor: torch.Tensor, step: str, source: torch.Tensor | None) -> None:
        """Notes that ``tensor`` is a view of ``source``, made by ``step``."""
        view = _view_of(tensor)
        if source is not None and view == _view_of(source):
            return  # another shape at most: the same bytes
        before = () if source is None else self.via(source)
        self._via[view] = (*before, step)
        self._held.append(tensor)

    def written_to(self, tensor: torch.Tensor) -> None:
        """Forgets what was known of this memory."""
        storage = storage_of(tensor)
        self._known = {view: site for view, site in self._known.items() if view[0] != storage}
        if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            self._origins[storage] = None  # in part this, in part that
        else:
            self._origins.pop(storage, None)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tells one piece of living memory from another."""
    try:
        number: int = tensor.untyped_storage()._cdata
        return number
    except (RuntimeError, NotImplementedError):  # sparse and other layouts have none
        return id(tensor)


def _view_of(tensor: torch.Tensor) -> View:
    """Return what tells one view from another. Contiguous ones are the same whatever their shape:
    they have the same bytes."""
    storage, shape = storage_of(tensor), tuple(tensor.shape)
    if tensor.layout != torch.strided:
        return storage, 0, shape, (), tensor.dtype
    if tensor.is_contiguous():
        return storage, tensor.storage_offset(), (tensor.numel(),), (1,), tensor.dtype
    return storage, tensor.storage_offset(), shape, tuple(tensor.stride()), tensor.dtype


def lies_inside(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Are the elements of ``tensor`` all elements of ``whole``, in whose memory it lies? Only of a
    contiguous whole, whose memory and values have one order."""
    if tensor.layout != torch.strided or whole.layout != torch.strided:
        return False
    if tensor.dtype != whole.dtype or not whole.is_contiguous():
        return False
    first = tensor.storage_offset() - whole.storage_offset()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum(max(size - 1, 0) * step for size, step in sizes)
    return first >= 0 and last < max(whole.numel(), 1)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def misalignment_bytes(tensor: torch.Tensor) -> int:
    """Return by how far the tensor's memory begins beyond a multiple of 64 bytes; 0 where it has no
    address."""
    try:
        return tensor.data_ptr() % 64
    except (RuntimeError, NotImplementedError):
        return 0


# Operators: every ATen operator called inside chosen modules, with what running it again needs.
#
# A dispatch mode, on only while one of the chosen modules runs, below autograd and composite
# functions: ``linear`` is seen as ``t`` and ``mm``. Results are recorded (``PATH/aten.mm#2:out``),
# and operands whose value no other record of this forward holds (see dataflow). Views compute
# nothing: they are noted in the operand that is such a view (``via``), because a wrong one hands
# the right numbers on in the wrong order.
#
# Operators that are not recorded are counted by reason: higher-order ones (compiled graphs) and
# those that return no tensor. No bit of the result changes: operators run as they were called, and
# tensors are copied before they can be written to.

_TORCH_HOME = os.path.dirname(torch.__file__)
_OWN_HOME = os.path.dirname(os.path.dirname(__file__))
_DRAWS = "draws random numbers"
_UNINITIALISED = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)


Emit = Callable[[str, CapturedTensor, Call | None], None]
"""Makes a record of the forward under way: of a site, and the call that gave it."""

Substitution = Callable[[str], torch.Tensor | None]
"""By site: what is put in place of an operator's result in this forward, or None."""

_Pending = list[tuple[str, CapturedTensor]]
"""By site: an operator's inputs that need records of their own."""


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
        if torch.Tag.inplace_view in func.tags:  # detach_, t_: a view in place; no byte is written
            before = args[0].detach()
            result = func(*args, **kwargs)
            with self.paused():
                self._note_view(func, (before, *args[1:]), kwargs, tensors_in(result))
            return result
        named = named_arguments(func, args, kwargs)
        writes = written_arguments(func)
        if writes:  # its operands must be copied before
            key, where, call, pending = self._described(func, named)
            result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            results = tensors_in(result)
            memories = {storage_of(tensor) for tensor in tensors_in(list(named.values()))}
            if results and all(storage_of(tensor) in memories for tensor in results):
                with self.paused():
                    self._note_view(func, args, kwargs, results)
                return result
            key, where, call, pending = self._described(func, named)
        results = tensors_in(result)
        if not results:  # foreach operators and the like give nothing back: what was written
            results = [t for argument in writes for t in tensors_in(named.get(argument))]
        if not results:
            self.skipped[f"it {NO_TENSOR}"] += 1
            return result
        if self._substitute is not None:  # another run's results, into the memory of these
            for index, tensor in enumerate(results):
                new = self._substitute(f"{where}:out" + (f".{index}" if index else ""))
                if new is None:
                    continue
                if new.numel() != tensor.numel():
                    raise UsageError(
                        f"{where} gives {tuple(tensor.shape)} here, and {tuple(new.shape)} is "
                        "to be put in its place",
                        hint="substitute from a run of the same tokens, at the same operator",
                    )
                tensor.copy_(new.reshape(tensor.shape))
                self.num_substituted += 1
        with self.paused():
            self._numbers[key] += 1
            for site, item in pending:
                self._emit(site, item, None)
            for tensor in (t for name in writes for t in tensors_in(named.get(name))):
                self._flow.written_to(tensor)
                self._weights.pop(storage_of(tensor), None)  # a state from now on, not a weight
            for index, tensor in enumerate(results):
                site = f"{where}:out" + (f".{index}" if index else "")
                self._emit(site, self._keep(tensor), call if index == 0 else None)
                self._flow.made(tensor, site)
        return result

    def _is_inside(self) -> bool:
        """Is it one of the chosen modules that calls operators now?"""
        return bool(self._stack)

    def _caller(self) -> str:
        """That module, with its call."""
        return self._stack[-1] + self._call_of(self._stack[-1])

    def _origin(self, func: Any) -> dict[str, str | None]:
        """Say where in the code an operator is called, as fields of a Call."""
        return {"source": source_line()}

    def _described(
        self, func: Any, named: dict[str, Any]
    ) -> tuple[tuple[str, str], str, Call, _Pending]:
        """A call's counter and path, the call itself, and the operands that no record holds."""
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
        return key, where, call, pending

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
        # What is no part of a single weight (two in one memory seen as one, other bytes of it) is
        # recorded as any value.
        weights = self._weights.get(storage_of(tensor), ())
        weight = next((pair for pair in weights if lies_inside(tensor, pair[1])), None)
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
        holder = self._flow.site_of(tensor)
        if holder is None:
            holder = site
            pending.append((site, self._keep(tensor)))
            self._flow.holds(tensor, site)
        return Operand(site=holder, origin=self._flow.origin_of(tensor), **common)

    def _loaded(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The weight of that name as it was loaded."""
        return parameter

    def _weight_site(self, name: str, parameter: torch.Tensor) -> str:
        """The weight's record in this forward, made when it is first needed there."""
        module, _, last = name.rpartition(".")
        site = join_site(escape_path(module), f"in.{last}")
        if name not in self._weight_items:
            with _disable_current_modes():
                self._weight_items[name] = self._keep(parameter)
        if site not in self._weight_sites:  # a block's dataflow is forgotten, its records are not
            self._emit(site, self._weight_items[name], None)
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
