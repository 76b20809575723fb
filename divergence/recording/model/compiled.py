"""Models that run through ``torch.compile``: recorded without being traced; what became of them.

Torch must not trace a recorder's hooks. So a recorded compiled module gets them around the compiled
call, which stays in one piece; hooks on modules inside it divide its graph there, and fusions
across a recorded place are not seen. To record a compiled block as it runs in production, record
the block and nothing in it.

Whether a module really ran compiled is taken from torch: its list of compilations (which function,
how many operators, why not) and its warnings that a limit of recompilations was reached, after
which calls run eager. Torch does not say it call by call, so neither does this.

``torch.compile(module)`` wraps a module in another, under whose name ``_orig_mod`` all its parts
would be found; the same compilation is put in place (``module.compile()``), and names stay.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from divergence.recording.hooks.patch import patched
from divergence.recording.model.source import layers
from divergence.recording.model.structure import inside
from divergence.run.schema.manifest import CompiledNote
from divergence.run.schema.site import ROOT

__all__ = ["CompiledWatch", "compiled_regions", "compiler_of", "hooked", "listed", "settled"]

_LIMIT = "torch._dynamo hit config."
_MOST_EVENTS = 1 << 14


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


def _is_wrapper(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def _unwrapped(wrapper: Any) -> torch.nn.Module:
    inner: torch.nn.Module = wrapper._modules["_orig_mod"]
    if inner.__dict__.get("_compiled_call_impl") is None:
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
    """What torch.compile made of the module, or of its forward; None where nothing."""
    forward = module.__dict__.get("forward", type(module).forward)
    for function in (module.__dict__.get("_compiled_call_impl"), forward):
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
    and around a module that is compiled itself they are put around its compiled call.
    """
    if compiled:
        import torch._dynamo

        before, after = torch._dynamo.disable(before), torch._dynamo.disable(after)
    inner = module.__dict__.get("_compiled_call_impl")
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

    with patched(module, "_compiled_call_impl", around):
        yield


class CompiledWatch:
    """Watches what torch compiles while a capture runs; ``notes()`` then says it by region.

    Costs nothing, and imports nothing of torch's compiler, where no module was given to it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._regions = compiled_regions(model)
        self._events: Callable[[], list[Any]] | None = None
        self._before = 0
        self._limits: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[CompiledWatch]:
        """What is compiled meanwhile is noted."""
        if not self._regions:
            yield self
            return
        import torch._dynamo.utils as dynamo

        logger = logging.getLogger("torch._dynamo.convert_frame")
        handler = _Limits(self._limits)
        try:
            dynamo.set_compilation_metrics_limit(_MOST_EVENTS)
            self._before = len(dynamo.get_compilation_metrics())
            self._events = dynamo.get_compilation_metrics
        except AttributeError:  # a torch that counts otherwise
            self._events = None
        logger.addHandler(handler)
        try:
            yield self
        finally:
            logger.removeHandler(handler)

    def beforehand(self, operators: set[str], recorded: set[str]) -> list[str]:
        """What cannot be recorded of compiled modules, in words. ``operators``: modules whose
        operators are recorded; ``recorded``: modules whose tensors are."""
        told = []
        among = [
            path
            for path in self._regions
            if inside(path, operators) or any(inside(root, (path,)) for root in operators)
        ]
        if among:
            told.append(
                f"{listed(among)} runs through torch.compile: while operators are recorded torch "
                "runs it uncompiled, so they are not those of its compiled kernels"
            )
        divided = [
            path
            for path in self._regions
            if path not in among and any(sub != path and inside(sub, (path,)) for sub in recorded)
        ]
        if divided:
            told.append(
                f"{listed(divided)} runs through torch.compile, and modules inside are recorded: "
                "there its graph is divided, and kernels that would span such a place are not seen"
            )
        return told

    def afterwards(self) -> list[str]:
        """What did not run compiled, in words."""
        groups: dict[tuple[str, str | None], list[str]] = {}
        for path, note in self.notes().items():
            if note.state in ("eager", "partly"):
                groups.setdefault((note.state, note.reason), []).append(path)
        say = {"eager": "ran eager", "partly": "ran eager in part"}
        return [
            f"given to torch.compile, but {say[state]}: {listed(paths)} ({reason})"
            for (state, reason), paths in groups.items()
        ]

    def notes(self) -> dict[str, CompiledNote]:
        """By path of each region."""
        return {path: self._note(path, backend) for path, backend in self._regions.items()}

    def _note(self, path: str, backend: str) -> CompiledNote:
        if self._events is None:
            return CompiledNote(
                backend=backend, state="unknown", reason="this torch does not tell what it compiled"
            )
        codes, seen = self._codes(path), list(self._events())[self._before :]
        events = [event for event in seen if _code_of(event) in codes]
        made = [event for event in events if not getattr(event, "fail_type", None)]
        graphs = sum(1 for event in made if getattr(event, "graph_op_count", None))
        lost = [event for event in seen if _code_of(event)[0] is None]  # of any region
        failed = [event for event in (*events, *lost) if getattr(event, "fail_type", None)]
        places = {f"{file}:{line}" for file, line in codes}
        limits = [limit for limit, place in self._limits if place in places]
        if graphs == 0:
            why = _reason(failed) or "torch compiled nothing of it here"
            return CompiledNote(backend=backend, state="eager", reason=why)
        reason = _reason(failed)
        if limits:
            reason = f"{limits[0]} was reached: calls beyond it ran eager"
        elif not any(event in events for event in failed):
            reason = None
        return CompiledNote(
            backend=backend,
            state="compiled" if reason is None else "partly",
            num_graphs=graphs,
            num_recompilations=sum(
                1 for event in made if getattr(event, "recompile_reason", None) is not None
            ),
            graph_breaks=sorted({text for event in made for text in _graph_breaks(event)}),
            reason=reason,
        )

    def _codes(self, path: str) -> set[tuple[str, int]]:
        """File and line of each function that may be compiled as a frame of this region."""
        module = self._model.get_submodule("" if path == ROOT else path)
        codes = set()
        for submodule in module.modules():
            for function in (submodule.__dict__.get("forward"), type(submodule).forward):
                for each in layers(function):
                    codes.add((each.__code__.co_filename, each.__code__.co_firstlineno))
        return codes


def listed(paths: list[str]) -> str:
    """Three of them by name."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _code_of(event: Any) -> tuple[str | None, int | None]:
    return (getattr(event, "co_filename", None), getattr(event, "co_firstlineno", None))


def _graph_breaks(event: Any) -> Iterator[str]:
    """Why code was left to Python, each in a line. (torch also starts anew for reasons of its own;
    it explains those of its user's code.)"""
    for reason in getattr(event, "restart_reasons", None) or ():
        head, explained, _ = str(reason).partition("Explanation:")
        if explained:
            yield head.strip()[:160]


def _reason(failed: list[Any]) -> str | None:
    """Why torch did not compile, in one line and without a directory."""
    if not failed:
        return None
    text = getattr(failed[0], "fail_reason", None) or failed[0].fail_type
    line = (str(text).strip().splitlines() or ["no reason given"])[0]
    return f"torch could not compile it: {line[:160]}"


class _Limits(logging.Handler):
    """Keeps torch's warnings that a limit of recompilations was reached: (limit, place)."""

    def __init__(self, limits: list[tuple[str, str]]) -> None:
        super().__init__(logging.WARNING)
        self._found = limits

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(_LIMIT) or not isinstance(record.args, tuple):
            return
        name, value, function, *_ = (*record.args, "", "", "")
        place = str(function).rpartition("(")[2].rstrip(")")
        self._found.append((f"torch._dynamo.config.{name} ({value})", place))


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
    held = {name: cell.cell_contents for name, cell in zip(names, closure, strict=False)}
    backend = held.get("callback")
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name) if name else "?"
