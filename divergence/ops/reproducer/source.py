"""What a script is made of: a run's values as Python source, and functions of the suite.

A run may come from anyone, and a script that is made of it is run on other machines. So whatever
a run says reaches the script through ``node`` alone: a syntax tree of a value whose type is
checked, whose text Python itself writes. A script is then read back: its tree must be that of
its template with these trees in their places.

A suite's operator is pasted with all that it stands on in this package, since a script has torch
alone. A function stands alone if everything that it names is torch's, the standard library's, a
constant that ``repr`` writes, or a function of this package that stands alone itself.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import math
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from divergence.errors import FaultError
from divergence.ops.allowed import Refusal, suite_function

__all__ = ["call_node", "check_script", "literal", "node", "pasted_source", "place"]

_MAX_BITS = 64
_PLACE = "MEANT_"


def literal(value: Any) -> str:
    """``value`` as Python source. Raises Refusal for what is no plain value."""
    return ast.unparse(node(value))


def node(value: Any) -> ast.expr:
    """The syntax tree of a value: None, bool, int, float, complex, str, torch's dtypes, layouts and
    memory formats, and lists, tuples and dicts of them. A tree is taken as it is.

    Raises Refusal for anything else.
    """
    kind = type(value)
    if isinstance(value, ast.expr):
        return value
    if value is None or kind in (bool, str):
        return ast.Constant(value)
    if kind is int and value.bit_length() <= _MAX_BITS:
        return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if kind is float:
        if not math.isfinite(value):  # Python has no word for them
            return call_node(["float"], [str(value)])
        sign = math.copysign(1.0, value) < 0
        return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if sign else ast.Constant(value)
    if kind is complex:
        return call_node(["complex"], [value.real, value.imag])
    if kind is list:
        return ast.List([node(item) for item in value], ast.Load())
    if kind is tuple:
        return ast.Tuple([node(item) for item in value], ast.Load())
    if kind is dict:
        return ast.Dict([node(key) for key in value], [node(item) for item in value.values()])
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        name = str(value).removeprefix("torch.")
        if getattr(torch, name, None) is value:
            return dotted(["torch", name])
    raise Refusal("its arguments cannot be written down", detail=repr(value)[:80])


def dotted(names: Sequence[str]) -> ast.expr:
    """``["torch", "ops"]`` → the tree of ``torch.ops``. Raises Refusal for what is no name."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise Refusal(f"{name[:80]!r} is no name")
    tree: ast.expr = ast.Name(names[0], ast.Load())
    for name in names[1:]:
        tree = ast.Attribute(tree, name, ast.Load())
    return tree


def call_node(
    function: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> ast.expr:
    """The tree of ``function(*args, **keywords)``. Raises Refusal for what is no name or value."""
    for name in keywords or ():
        dotted([name])
    return ast.Call(
        dotted(function),
        [node(value) for value in args],
        [ast.keyword(name, node(value)) for name, value in (keywords or {}).items()],
    )


def place(name: str) -> str:
    """What stands in a template for the value ``name``."""
    return _PLACE + name


def check_script(text: str, template: str, meant: Mapping[str, ast.expr]) -> None:
    """Is ``text`` the script ``template`` with the trees ``meant`` in their places, and no other?
    Docstrings and comments may differ.

    Raises FaultError: such a script is not to be written.
    """
    wanted = _Filled(meant).visit(ast.parse(template))
    try:
        syntax = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise FaultError(f"the script would be no Python: {error}") from error
    if _plain(syntax) != _plain(wanted):
        raise FaultError("the script would hold something that was not meant: it is not written")


class _Filled(ast.NodeTransformer):
    def __init__(self, meant: Mapping[str, ast.expr]) -> None:
        self._meant = meant

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return self._meant[name.id.removeprefix(_PLACE)] if name.id.startswith(_PLACE) else name


def _plain(tree: ast.Module) -> str:
    """The tree as text, without the docstring: one constant text, or it would be another tree."""
    first = tree.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        first.value.value = ""
    return ast.dump(tree)


_OWN = "divergence."
_THERE = frozenset({"torch", "numpy"})
"""Packages that are wherever torch is, beside the standard library."""


def pasted_source(operator: str) -> tuple[str, str, str]:
    """(imports, source, name of the function) of ``suite.NAME``. Raises Refusal where it does not
    stand alone."""
    function = suite_function(operator)
    imports: dict[str, str] = {}
    parts: dict[str, str] = {}
    _collect(function, operator, imports, parts)
    return "".join(imports.values()), "\n\n".join(parts.values()), function.__name__


def _collect(
    function: Callable[..., Any], operator: str, imports: dict[str, str], parts: dict[str, str]
) -> None:
    """Into ``parts`` the functions that ``function`` names, of its module or this package, then
    itself; into ``imports`` the rest."""
    if not inspect.isfunction(function) or function.__closure__:
        raise _not_alone(operator, getattr(function, "__name__", repr(function)))
    for name in sorted(_names(function.__code__)):
        known = name in imports or name in parts or name == function.__name__
        if not known and name in function.__globals__:  # else an attribute's name, or a builtin
            value = function.__globals__[name]
            own: str = getattr(value, "__module__", None) or ""
            if inspect.isfunction(value) and (own == function.__module__ or own.startswith(_OWN)):
                if value.__name__ != name:
                    raise _not_alone(operator, name)
                _collect(value, operator, imports, parts)
            else:
                _name(name, value, operator, imports, parts)
    parts[function.__name__] = textwrap.dedent(inspect.getsource(function)).rstrip()


def _name(
    name: str, value: Any, operator: str, imports: dict[str, str], parts: dict[str, str]
) -> None:
    if isinstance(value, types.ModuleType):
        home = value.__name__
        if home.partition(".")[0] not in _THERE | sys.stdlib_module_names:
            raise _not_alone(operator, home)
        if name not in ("torch", "sys", "platform"):  # those the script has
            imports[name] = f"import {home} as {name}\n" if name != home else f"import {home}\n"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        home = getattr(value, "__module__", None) or type(value).__module__
        if home.partition(".")[0] not in _THERE | sys.stdlib_module_names:
            raise _not_alone(operator, name)
        imports[name] = f"from {home} import {getattr(value, '__name__', name)} as {name}\n"


def _names(code: types.CodeType) -> set[str]:
    """Every global name that a function and what is defined inside it uses."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _not_alone(operator: str, name: str) -> Refusal:
    return Refusal(f"{operator} does not stand alone: it needs {name}")
