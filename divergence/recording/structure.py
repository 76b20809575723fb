"""What a model is made of: blocks and roles, compiled parts, calls, and its source."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import logging
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks import patched
from divergence.run.manifest import CompiledNote, ModuleNote, ModuleRole, digest_text
from divergence.run.site import ROOT, escape_path
from divergence.run.writer import RunWriter

# What a Python function says, apart from how it is laid out.
#
# The digest is of the syntax tree, without annotations, docstrings, comments and line numbers, so
# that the same code gives the same digest in any file and any version of Python. Plain numbers from
# outside (defaults, closures, globals) count as part of the function: one made by
# ``patch(scale=1.02)`` differs from one made by ``patch(scale=1.0)``.
#
# A function without source (made by ``exec``) is known by its byte code, one in C by its name
# alone. The file is read as it is now: a change on disk after the import is not noticed.

_LIBRARIES = """
    torch transformers accelerate peft bitsandbytes numpy torch_npu vllm deepspeed functools
    contextlib torchao safetensors tokenizers
""".split()
"""Packages whose files are named by module alone: version and module say which line."""
_SKIPPED = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_PLAIN = (float, int, bool, str, type(None))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def layers(function: Any) -> list[types.FunctionType]:
    """The function and what it wraps (``functools.wraps``), outermost first; Python's own only."""
    functions: list[types.FunctionType] = []
    while function is not None and len(functions) < 20:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)  # of a method
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None:  # torch.compile(function): what was compiled
            function = compiled
            continue
        if type(function) is not types.FunctionType:  # a proxy passes for what it wraps
            break
        functions.append(function)
        function = function.__dict__.get("__wrapped__")
    return functions


def around(function: Any) -> dict[str, str]:
    """What ``layers`` looks through and yet changes what runs, with a digest: plain arguments that
    a partial binds, and compilation."""
    parts: dict[str, str] = {}
    for _ in range(20):
        if isinstance(function, functools.partial):
            bound = [*enumerate(function.args), *sorted(function.keywords.items())]
            if texts := [f"{key}={value!r}" for key, value in bound if type(value) in _PLAIN]:
                parts["functools.partial"] = digest_text(" ".join(texts))
            function = function.func
            continue
        function = getattr(function, "__func__", function)
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is None:
            function = getattr(function, "__dict__", {}).get("__wrapped__")
        else:
            if not getattr(function, "_torchdynamo_disable", False):
                parts["torch.compile"] = ""
            function = compiled
    return parts


def innermost(function: Any) -> types.FunctionType | None:
    """The function that decorators were put around; None for one that is not Python's."""
    return next(reversed(layers(function)), None)


def file_of(module_name: str | None) -> str | None:
    """The file of an imported Python module."""
    module = sys.modules.get(module_name or "")
    return getattr(module, "__file__", None)


def is_library(function: types.FunctionType) -> bool:
    """Is it the code of torch, transformers or another library whose version a run records?"""
    name = function.__globals__.get("__name__", "")
    return str(name).partition(".")[0] in _LIBRARIES


def place_of(function: types.FunctionType) -> str:
    """``vendor_plugin.py:88``; of a library's function its module and name. No directory."""
    if is_library(function):
        return f"{function.__globals__['__name__']}.{function.__qualname__}"
    code = function.__code__
    return f"{PurePath(code.co_filename.replace(chr(92), '/')).name}:{code.co_firstlineno}"


def syntax_of(function: types.FunctionType) -> ast.AST | None:
    """Its part of its file's syntax tree; None where there is no source."""
    code = function.__code__
    index = _index(code.co_filename)
    candidates = index.get((code.co_name, code.co_firstlineno), ())
    if len(candidates) > 1:  # lambdas of one line: those with these arguments
        wanted = code.co_varnames[: code.co_argcount]
        candidates = [
            n for n in candidates if tuple(a.arg for a in n.args.args) == wanted
        ] or candidates
    return candidates[0] if len(candidates) == 1 else None


@functools.lru_cache(maxsize=4096)
def declared(file: str | None, qualname: str) -> ast.AST | None:
    """What a file itself says that ``qualname`` (``Class``, ``Class.method``, ``function``) is."""
    tree = None if file is None else _tree(file)
    if tree is None:
        return None
    body: list[ast.stmt] = tree.body
    node: ast.AST | None = None
    for name in qualname.split("."):
        node = next((statement for statement in _statements(body) if _binds(statement, name)), None)
        if node is None:
            return None
        body = getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []
    return node


def digest_of(function: types.FunctionType, node: ast.AST | None) -> str:
    """Digest of the syntax and of the plain values held from outside. Without source of the byte
    code, which every version of Python writes otherwise."""
    text = _text(node) if node is not None else _byte_code(function.__code__)
    return digest_text(text + repr(sorted(_plain_values(function).items())))


@functools.lru_cache(maxsize=4096)
def _text(node: ast.AST) -> str:
    """Of trees that are kept (``_tree``), so that a second model of a class costs nothing."""
    return "".join(_dump(node))


def _byte_code(code: types.CodeType) -> str:
    constants = [
        _byte_code(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _plain_values(function: types.FunctionType) -> dict[str, str]:
    """Numbers that the function uses and does not compute: of its closure, its defaults and its
    module. Of a library's module numbers alone; switches there tell what is installed."""
    code = function.__code__
    values: dict[str, Any] = {}
    cells = function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            values[f"closure {name}"] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    pairs = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    values |= {f"default {name}": value for name, value in pairs}
    values |= {f"default {name}": v for name, v in (function.__kwdefaults__ or {}).items()}
    kinds: tuple[type, ...] = (float, int) if is_library(function) else (float, int, bool, str)
    for name in _names(code):
        value = function.__globals__.get(name)
        if type(value) in kinds:
            values[f"global {name}"] = value
    return {name: repr(value) for name, value in values.items() if type(value) in _PLAIN}


@functools.lru_cache(maxsize=4096)
def chains(node: ast.AST) -> tuple[tuple[str, ...], ...]:
    """Every dotted name that is read, in order: ``("nn", "functional", "softmax")``."""
    return tuple(sorted(set(_chains(node))))


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield (node.id, *reversed(parts))
    elif parts:
        yield from _chains(node)
    else:
        for _, child in _children(node):
            yield from _chains(child)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names = names | _names(constant)
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Last first (the last binding counts), also those under ``if`` and ``try``."""
    for node in reversed(body):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name and bool(node.value)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return False


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=64)
def _index(file: str) -> dict[tuple[str, int], list[Any]]:
    """(name, first line) → functions of a file; a decorated one begins with its decorators."""
    tree = _tree(file)
    by_place: dict[tuple[str, int], list[Any]] = {}
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, _FUNCTIONS):
            decorators = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            by_place.setdefault((getattr(node, "name", "<lambda>"), line), []).append(node)
    return by_place


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The parts of a node that change what it does."""
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED:
            continue
        if field == "body" and isinstance(value, list):
            value = [statement for statement in value if not _says_nothing(statement)]
        if field == "decorator_list":
            value = [decorator for decorator in value if not _documents(decorator)]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, ``pass``, ``...``, or a name that is declared and not assigned."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.AnnAssign) and node.value is None)


def _documents(decorator: ast.AST) -> bool:
    """``@auto_docstring``, ``@add_start_docstrings(…)``: what writes documentation only."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return "docstring" in getattr(function, "attr", getattr(function, "id", ""))


def _dump(node: ast.AST) -> Iterator[str]:
    """The node as text that no version of Python writes otherwise. A function's own name does not
    matter: what it is called by does."""
    kind = type(node).__name__
    yield "(Assign" if kind == "AnnAssign" else f"({kind}"
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED or field in ("simple", "lineno"):
            continue
        if field == "name" and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(value, list):
            value = [entry for entry in value if not isinstance(entry, ast.AST)]
        if value not in (None, []) and not isinstance(value, ast.AST):
            yield f" {field}={value!r}"
    for field, child in _children(node):
        yield f" {'targets' if kind == 'AnnAssign' and field == 'target' else field}:"
        yield from _dump(child)
    yield ")"


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
    """Class and role of every module, by path; the root is ``"."`` and trunk."""
    lists: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
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


# Models that run through ``torch.compile``: recorded without being traced; what became of them.
#
# Torch must not trace a recorder's hooks. A recorded compiled module gets them around the compiled
# call, which stays in one piece; hooks on modules inside it divide its graph there. To record a
# compiled block as it runs in production, record the block and nothing in it.
#
# Whether a module really ran compiled is taken from torch: its list of compilations, and its
# warnings that a limit of recompilations was reached, after which calls run eager. Torch does not
# say it call by call. ``torch.compile(module)`` wraps a module in another, under whose name
# ``_orig_mod`` all its parts would be found; the same compilation is put in place, and names stay.

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
    and around a module that is compiled itself they are put around its compiled call."""
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
    """Watches what torch compiles while a capture runs; ``notes()`` then says it by region. Costs
    nothing, and imports nothing of torch's compiler, where no module was given to it."""

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
        notes = []
        among = [
            path
            for path in self._regions
            if inside(path, operators) or any(inside(root, (path,)) for root in operators)
        ]
        if among:
            notes.append(
                f"{listed(among)} runs through torch.compile: while operators are recorded torch "
                "runs it uncompiled, so they are not those of its compiled kernels"
            )
        divided = [
            path
            for path in self._regions
            if path not in among and any(sub != path and inside(sub, (path,)) for sub in recorded)
        ]
        if divided:
            notes.append(
                f"{listed(divided)} runs through torch.compile, and modules inside are recorded: "
                "there its graph is divided, and kernels that would span such a place are not seen"
            )
        return notes

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
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=False)}
    backend = cells.get("callback")
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name) if name else "?"


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
    """By path of the outermost such module: how many numbers its own parameters hold."""
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
