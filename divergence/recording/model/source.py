"""What a Python function says, apart from how it is laid out.

The digest is of the syntax tree, without annotations, docstrings, comments and line numbers, so
that the same code gives the same digest in any file and any version of Python. Plain numbers from
outside (defaults, closures, globals) count as part of the function: one made by
``patch(scale=1.02)`` differs from one made by ``patch(scale=1.0)``.

A function without source (made by ``exec``) is known by its byte code, one in C by its name alone.
The file is read as it is now: a change on disk after the import is not noticed.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from divergence.run.schema.fingerprint import digest_text

__all__ = [
    "around", "chains", "declared", "digest_of", "file_of", "innermost", "is_library", "layers",
    "place_of", "syntax_of",
]  # fmt: skip

_LIBRARIES = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "numpy", "torch_npu", "vllm",
    "deepspeed", "functools", "contextlib", "torchao", "safetensors", "tokenizers",
)  # fmt: skip
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
