"""What `from divergence import ...` offers says its types, and none of them is Any."""

import ast
import dataclasses
import inspect
import sys
import typing
from collections import abc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import msgspec

import divergence

BARE = (dict, frozenset, list, set, tuple, type, *(getattr(abc, name) for name in abc.__all__))
"""Of anything, where nothing is said of what."""

OPTIONAL = ("pandas", "polars")
"""Libraries that a user may have, and whose tables a report makes."""


@cache
def namespace(module: str) -> dict[str, object]:
    """A module's names, with those that it imports for its annotations alone."""
    found = sys.modules[module]
    names = dict(vars(found))
    source = Path(found.__file__).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                try:
                    exec(compile(ast.Module([line], []), found.__file__, "exec"), names)
                except ModuleNotFoundError as error:  # pandas, polars: asked for by name alone
                    if error.name not in OPTIONAL:
                        raise
                    names[error.name] = SimpleNamespace(DataFrame=type("DataFrame", (), {}))
    return names


def hints(thing: object) -> dict[str, object]:
    """Its annotations, resolved."""
    return typing.get_type_hints(thing, globalns=namespace(thing.__module__))


def parts(hint: object) -> Iterator[object]:
    """The hint and all that it is made of."""
    yield hint
    if typing.get_origin(hint) is not typing.Literal:
        for argument in typing.get_args(hint):
            for one in argument if isinstance(argument, list) else [argument]:
                yield from parts(one)


def is_any(hint: object) -> bool:
    """Is it Any, made of it, or a container of nobody says what?"""
    return any(part is typing.Any or part in BARE for part in parts(hint))


def annotated(name: str, thing: object) -> Iterator[tuple[str, dict[str, object]]]:
    """(where, annotations) of a function; of a class, its fields and its public methods."""
    thing = inspect.unwrap(thing)
    if inspect.isfunction(thing):
        found = hints(thing)
        wanted = {*inspect.signature(thing).parameters, "return"} - {"self", "cls"}
        yield name, {one: found.get(one, typing.Any) for one in wanted}
        return
    if not inspect.isclass(thing):
        return
    yield name, {field: hint for field, hint in hints(thing).items() if field[0] != "_"}
    for attribute, value in vars(thing).items():
        if attribute.startswith("_") and attribute != "__init__":
            continue
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if inspect.isfunction(value):
            yield from annotated(f"{name}.{attribute}", value)


def reached() -> dict[str, object]:
    """What is offered, and every record that is reached from there by annotations."""
    waiting = [(name, getattr(divergence, name)) for name in divergence.__all__]
    found: dict[str, object] = {}
    while waiting:
        name, thing = waiting.pop()
        if name in found:
            continue
        found[name] = thing
        for _, told in annotated(name, thing):
            for hint in told.values():
                for one in parts(hint):
                    is_record = inspect.isclass(one) and (
                        issubclass(one, msgspec.Struct) or dataclasses.is_dataclass(one)
                    )
                    if is_record and one.__module__.startswith("divergence."):
                        waiting.append((one.__name__, one))
    return found


def test_no_any():
    """No argument, result or field of the offered names, and of the records of a report, is Any, or
    made of it; none lacks its type."""
    things = reached()
    assert {*divergence.__all__, "Manifest", "SiteResult", "Verdict"} <= set(things)
    assert not {
        f"{where}({argument})"
        for name, thing in things.items()
        for where, told in annotated(name, thing)
        for argument, hint in told.items()
        if is_any(hint)
    }


def said(a: dict[str, list[typing.Any]], b: abc.Callable[[int], typing.Any], c: dict) -> int: ...


def unsaid(a, b: int): ...


def test_any_would_be_seen():
    """Also inside of other types, and where nothing is said."""
    found = [
        {name for name, hint in told.items() if is_any(hint)}
        for function in (said, unsaid)
        for _, told in annotated("it", function)
    ]
    assert found == [{"a", "b", "c"}, {"a", "return"}]
