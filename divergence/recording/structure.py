"""The structure of a model: blocks and roles, compiled parts, and which modules are called."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from divergence.errors import UsageError
from divergence.recording.engines.load import LoadedModel
from divergence.recording.forwards import patched
from divergence.run.manifest import ModuleNote, ModuleRole
from divergence.run.site import ROOT, escape_path
from divergence.run.writer import RunWriter

# What the parts of a model are, found from its structure and not from a list of names.
#
# A *block list* is an outermost ``ModuleList`` whose members, the *blocks*, own parameters: decoder
# blocks, an encoder's layers, both stacks of an encoder-decoder. Every other module that the owner
# of a block list, or a parent of an owner, calls directly is *trunk*: embedding, rotary table,
# final norm, head. One forward passes through trunk and blocks once, in order.
#
# Which token goes to which expert is recorded with ``blocks``, since one token's error may mean
# only that rounding sent it to another: the integer argument (T, k) of the module called
# ``experts``, as transformers >= 5 calls them, and the logits (T, E) of the router beside it
# (``gate``, ``router``, or a class of that name). Both come as rows of a whole batch and are
# recorded as (B, T, ...). Where experts are a list of modules (transformers 4) no call tells the
# choice.


def inside(path: str, roots: Iterable[str]) -> bool:
    """Is the module one of ``roots`` or in one?"""
    return any(root in (ROOT, path) or path.startswith(f"{root}.") for root in roots)


def describe_modules(model: nn.Module) -> dict[str, ModuleNote]:
    """Class and role of every module, by path; the root is ``"."`` and trunk. Raises UsageError for
    modules of torch.jit, which call no hooks."""
    lists: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{path or 'the module'} runs within torch.jit, where no module is seen",
                hint="record the model as it was before torch.jit.script or torch.jit.trace",
            )
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(path.startswith(outer + ".") for outer in lists):
            continue  # experts, or layers within a layer
        if all(any(True for _ in child.parameters()) for child in module):
            lists[path] = module
    blocks = {
        f"{path}.{name}" for path, module in lists.items() for name, _ in module.named_children()
    }
    ancestors = {""}
    for path in lists:
        parts = path.split(".")
        ancestors.update(".".join(parts[:count]) for count in range(len(parts)))
    notes: dict[str, ModuleNote] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if path in blocks:
            role: ModuleRole = "block"
        elif path == "" or (parent in ancestors and path not in ancestors and path not in lists):
            role = "trunk"
        else:
            role = "inner"
        routed = role == "block" and any("experts" in name for name, _ in module.named_modules())
        notes[escape_path(path)] = ModuleNote(kind=_kind(module), role=role, routed=routed)
    return notes


def _kind(module: nn.Module) -> str:
    """Class name, with the variant where one class has several (sliding and full attention)."""
    name = type(module).__name__
    for attribute in ("attention_type", "layer_type", "block_type"):
        variant = getattr(module, attribute, None)
        if isinstance(variant, str):
            return f"{name}/{variant}"
    return name


def output_paths(model: nn.Module) -> set[str]:
    """Paths whose output is logits over the vocabulary: the root and its output embedding."""
    paths = {ROOT}
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is not None:
        paths.update(escape_path(path) for path, module in model.named_modules() if module is head)
    return paths


_ROUTER = re.compile(r"Router|Gate$|TopK")
_ROUTER_NAMES = ("gate", "router")


def routing_modules(notes: Mapping[str, ModuleNote]) -> dict[str, str]:
    """Module path → ``experts`` or ``router``, of every routed block."""
    blocks = {path for path, note in notes.items() if note.routed}
    experts = {
        path
        for path in notes
        if path.endswith(".experts") and any(path.startswith(block + ".") for block in blocks)
    }
    parents = {path.rpartition(".")[0] for path in experts}
    kinds = dict.fromkeys(experts, "experts")
    for path, note in notes.items():
        parent, _, name = path.rpartition(".")
        if parent in parents and (name in _ROUTER_NAMES or _ROUTER.search(note.kind)):
            kinds.setdefault(path, "router")
    return kinds


def is_routing(part: str | None, port: str, tensor: torch.Tensor) -> bool:
    """Is this port of an ``experts`` module or of a router one that tells the choice?"""
    if part == "experts":
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return port.startswith("in.") and tensor.ndim == 2 and whole
    return part == "router" and port == "out"


def by_token(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """(B·T, n) → (B, T, n)."""
    if tensor.ndim != 2 or tensor.shape[0] % batch:
        return tensor
    return tensor.reshape(batch, -1, tensor.shape[-1])


# Models that run through ``torch.compile``: recorded without being traced.
#
# Torch must not trace a recorder's hooks. A recorded compiled module gets them around the compiled
# call, which stays in one piece; hooks on modules inside it divide its graph there. To record a
# compiled block as it runs in production, record the block and nothing in it.
#
# ``torch.compile(module)`` wraps a module in another, under whose name ``_orig_mod`` all its parts
# would be found; the same compilation is put in place, and names stay.


def settled(model: torch.nn.Module, given: object = None) -> torch.nn.Module:
    """``model``, or ``given`` where that is a module, with every wrapper of ``torch.compile`` taken
    off and its compilation put in place (the model is changed)."""
    if isinstance(given, torch.nn.Module):
        model = given
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and _is_wrapper(child):
                module._modules[name] = _unwrapped(child)
    return _unwrapped(model) if _is_wrapper(model) else model


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields what is called and what is recorded in the place of ``model``: compilations are put in
    place as ``settled`` does, and the modules are those that DataParallel or DDP wraps. Afterwards
    all is as it was."""
    with contextlib.ExitStack() as stack:
        for module in list(model.modules()):
            if _is_wrapper(module):
                inner = module.get_submodule("_orig_mod")
                stack.enter_context(patched(inner, CALL, vars(inner).get(CALL)))
            for name, child in module._modules.items():
                if child is not None and _is_wrapper(child):
                    stack.callback(module._modules.__setitem__, name, child)
        called = structure = settled(model)
        while isinstance(structure, nn.DataParallel | DistributedDataParallel) and not (
            vars(structure).get(CALL)  # its compiled code calls what it wraps
        ):
            structure = structure.module
        yield called, structure


CALL = "_compiled_call_impl"
"""What torch runs of a module in the place of its forward, where it is set."""


def _is_wrapper(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def _unwrapped(wrapper: Any) -> torch.nn.Module:
    inner: torch.nn.Module = wrapper._modules["_orig_mod"]
    if vars(inner).get(CALL) is None:
        inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)
    return inner


def compiled_regions(model: torch.nn.Module) -> dict[str, str]:
    """Path of each module that was given to ``torch.compile`` → backend."""
    regions = {}
    for path, module in model.named_modules():
        if (call := _compiled_call(module)) is not None:
            regions[path or ROOT] = backend_of(call)
    return regions


def _compiled_call(module: torch.nn.Module) -> Any:
    """Return what torch.compile made of the module, or of its forward; None where nothing."""
    forward = vars(module).get("forward", getattr(type(module), "forward", None))  # of torch.jit
    for function in (vars(module).get(CALL), forward):
        disabled = getattr(function, "_torchdynamo_disable", False)
        if hasattr(function, "_torchdynamo_orig_callable") and not disabled:
            return function
    return None


@contextlib.contextmanager
def hooked(
    module: torch.nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    compiled: bool,
) -> Iterator[None]:
    """A pre-hook and a hook (both with keyword arguments) on a module; off again on exit.
    ``compiled``: is something in this model compiled? Then torch is told not to trace the hooks,
    and around a module that is compiled itself they are put around its compiled call."""
    if compiled:
        import torch._dynamo

        before, after = torch._dynamo.disable(before), torch._dynamo.disable(after)
    inner = vars(module).get(CALL)
    if inner is None:
        with (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ):
            yield
        return

    def around(*args: Any, **kwargs: Any) -> Any:
        changed = before(module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = inner(*args, **kwargs)
        new = after(module, args, kwargs, output)
        return output if new is None else new

    with patched(module, CALL, around):
        yield


def compiler_of(module: Any) -> str | None:
    """``torch.compile`` and its backend, where the module or its forward was given to it."""
    call = _compiled_call(module)
    if call is not None:
        return f"torch.compile ({backend_of(call)})"
    return "torch.compile" if "_orig_mod" in module._modules else None


def backend_of(compiled: Any) -> str:
    """Name of the backend that a compiled function was given; ``?`` where torch does not tell."""
    closure = getattr(compiled, "__closure__", None) or ()
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=False)}
    backend = cells.get("callback")
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name) if name else "?"


def listed(paths: list[str]) -> str:
    """Three of them by name."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# Which modules a pass never called: nothing of what they would make was recorded.
#
# A module that nobody called may have been read all the same: a parent's own code multiplies with a
# matrix of a child's. So a module without children is counted only where nothing called its parent
# either, and a parameter that a called module shares is in no count.


@contextlib.contextmanager
def noting_calls(loaded: LoadedModel, writer: RunWriter | None) -> Iterator[None]:
    """Writes what was not called into the manifest's plan; nothing without a writer, where several
    ranks hold the model, and where modules were compiled, whose children are called by no hook."""
    model = loaded.module
    if writer is None or loaded.ranks is not None or compiled_regions(model):
        yield
        return
    own, called = {id(module) for module in model.modules()}, set[int]()

    def note(module: torch.nn.Module, args: Any) -> None:
        if id(module) in own:
            called.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    writer.manifest.plan.not_called = _not_called(model, called)


def _not_called(model: torch.nn.Module, called: set[int]) -> dict[str, int]:
    """Count the numbers that such modules' own parameters hold, by path of the outermost."""
    reached = {
        id(parameter)
        for module in model.modules()
        if id(module) in called
        for parameter in module.parameters(recurse=False)
    }
    counts: dict[str, int] = {}

    def visit(module: torch.nn.Module, path: str, parent_called: bool) -> None:
        rests = all(id(part) not in called for part in module.modules())
        leaf = next(module.children(), None) is None
        if rests and not (leaf and parent_called):
            sizes = [p.numel() for p in module.parameters() if id(p) not in reached]
            if path and sizes:
                counts[escape_path(path)] = sum(sizes)
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, id(module) in called)

    if called:
        visit(model, "", False)
    return counts
