"""Source of a suite's operator, with all that it stands on in this package: for a script that has
torch alone.

A function stands alone if everything that it names is torch's, the standard library's, a constant
that ``repr`` writes, or a function of this package that stands alone itself.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

from divergence.ops import registry
from divergence.ops.refusal import Refusal

__all__ = ["pasted_source"]

_OWN = "divergence."
_THERE = frozenset({"torch", "numpy"})
"""Packages that are wherever torch is, beside the standard library."""


def pasted_source(operator: str) -> tuple[str, str, str]:
    """(imports, source, name of the function) of ``suite.NAME``. Raises Refusal where it does not
    stand alone."""
    function = registry.find(operator)
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
    parts[function.__name__] = _plain(inspect.getsource(function))


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
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(source: str) -> str:
    """As it stands in its file; annotations name nothing, the script has them postponed."""
    return textwrap.dedent(source).rstrip()


def _not_alone(operator: str, name: str) -> Refusal:
    return Refusal(f"{operator} does not stand alone: it needs {name}")
