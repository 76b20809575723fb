"""Which code the modules of a model run: what their classes say, and what was put in its place.

Of each class: ``forward`` and what it calls by name. A name is looked up as Python does, in the
closure, in the globals of the function and on the module, so that a function which a plugin put
into the namespace of a modeling file is found, although the file says otherwise. Functions of the
class' own file are followed further; of others only the first is read. The code that runs is then
compared with the file, which tells what was replaced.

Nothing of the model is executed, and code without source is not judged: an operator in C is known
by its name alone. Torch's operators are named where their kernel was registered anew; kernels that
come with a build of torch or a preloaded library are not seen: the environment has their versions.
"""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from divergence.recording.model.compiled import compiler_of, listed
from divergence.recording.model.replacement import (
    attributes_of,
    hooks_of,
    kernels_replaced,
    module_text,
    original_forward,
    put_by,
    put_in_namespace,
    put_in_place,
    replaced_in_torch,
    wrappers_of,
)
from divergence.recording.model.source import (
    around,
    chains,
    digest_of,
    file_of,
    innermost,
    is_library,
    layers,
    place_of,
    syntax_of,
)
from divergence.run.schema.fingerprint import digest_many, digest_text
from divergence.run.schema.manifest import CodeNote
from divergence.run.schema.site import ROOT, starred
from divergence.run.trust import ATTENTION

__all__ = ["FUNCTIONAL", "code_notes"]

FUNCTIONAL = "torch.nn.functional"
"""Key of the note on torch's own functions, where any were replaced."""
_MOST_FUNCTIONS = 100
_PLACEHOLDERS = "transformers.distributed.pipeline_parallel"
"""What stands for the blocks of another stage computes nothing."""


def code_notes(model: nn.Module) -> dict[str, CodeNote]:
    """A note on each class of module in ``model``."""
    groups: dict[type, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith(_PLACEHOLDERS):
            continue
        groups.setdefault(_own_class(type(module)), {})[path or ROOT] = module
    names = Counter(kind.__name__ for kind in groups)
    notes: dict[str, CodeNote] = {}
    for kind, modules in groups.items():
        name = kind.__name__
        if names[name] > 1:
            name = f"{module_text(kind.__module__)}.{name}"
        note = _note(kind, modules)
        if note is not None:
            notes[name] = note
    return notes | _torch_note()


def _own_class(kind: type) -> type:
    """Classes that torch makes at run time (fully sharded, parametrised) stand for their base."""
    for base in kind.__mro__:
        if not base.__module__.startswith(("torch.distributed", "torch.nn.utils.parametrize")):
            return kind if base.__module__ == "torch.nn.modules.module" else base
    return kind


def _note(kind: type, modules: dict[str, Any]) -> CodeNote | None:
    seen: dict[tuple[object, ...], _Reader] = {}
    readers: dict[str, _Reader] = {}
    for path, module in modules.items():
        key = _instance_key(module)
        if key not in seen:
            seen[key] = _Reader(kind, module)
        readers[path] = seen[key]
    if not any(reader.functions for reader in seen.values()):
        return None  # a container: no forward of its own
    digests = {path: reader.digest for path, reader in readers.items()}
    own = [reader.digest for reader in readers.values() if not (reader.replaced or reader.hooked)]
    usual = Counter(own or digests.values()).most_common(1)[0][0]
    first = next(reader for reader in seen.values() if reader.digest == usual)
    places: dict[str, list[str]] = {}
    for path, reader in readers.items():
        for text in reader.replaced:
            places.setdefault(text, []).append(path)
    wrapped = Counter(text for module in modules.values() for text in wrappers_of(module))
    compiled = Counter(by for module in modules.values() if (by := compiler_of(module)))
    return CodeNote(
        digest=usual,
        origin=first.origin,
        functions=first.functions,
        replaced=[
            text if len(paths) == len(modules) else f"{text} in {listed(paths)}"
            for text, paths in places.items()
        ],
        wrapped=[_of_all(text, count, len(modules)) for text, count in wrapped.items()],
        compiled="; ".join(_of_all(text, n, len(modules)) for text, n in compiled.items()) or None,
        places=sorted({starred(path) for path in modules}),
        attributes=attributes_of(modules),
        odd={path: digest for path, digest in digests.items() if not own or digest != usual},
    )


def _of_all(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text} ({count} of {total})"


def _instance_key(module: Any) -> tuple[object, ...]:
    """What of an instance changes which functions run."""
    kinds = types.FunctionType | types.MethodType | types.BuiltinFunctionType
    own = tuple(
        (name, id(value))
        for name, value in module.__dict__.items()
        if name == "forward" or isinstance(value, kinds)
    )
    config = getattr(module, "config", None)
    chosen = [getattr(config, f"_{part}_implementation", None) for part in ("attn", "experts")]
    return type(module), own, *chosen, tuple(map(id, hooks_of(module).values()))


class _Reader:
    """The functions that one module runs, and those that replace others."""

    def __init__(self, kind: type, module: Any) -> None:
        self._kind, self._module = kind, module
        self._file = file_of(kind.__module__)
        self._done: set[int] = set()
        self.functions: dict[str, str] = {}
        self.replaced: list[str] = []
        self._foreign: dict[str, str] = {}
        self.origin = module_text(kind.__module__)
        forward = original_forward(module)
        if forward is not None or _has_forward(kind):
            self._method("forward", forward)
        hooks = hooks_of(module)
        self.hooked = bool(hooks)
        for name, hook in hooks.items():
            self._outside(name, hook)
        # which implementation of attention was asked for is a setting: no other code of the class
        chosen = {n: d for n, d in self.functions.items() if not n.endswith("]")}
        self.digest = digest_many(chosen | self._foreign)

    def _method(self, name: str, own: Any = None) -> None:
        """A method by name: of the instance where it has one, else of the class."""
        definer = next((base for base in self._kind.__mro__ if name in base.__dict__), None)
        declared_ = None if definer is None else definer.__dict__[name]
        value = own if name == "forward" else self._module.__dict__.get(name)
        on_instance = value is not None
        chain = layers(value)
        own_chain = layers(_plain(declared_))
        added = [layer for layer in chain if layer not in own_chain and not is_library(layer)]
        is_own = bool(chain and own_chain) and chain[-1] is own_chain[-1]
        if is_own and not (added or self._parts(name, value)):
            on_instance = False  # bound once more: the class' own
        function = value if on_instance else _plain(declared_)
        chain = layers(function)
        if not chain:
            if function is not None and (on_instance or not isinstance(declared_, property)):
                self.functions[name] = ""
                if on_instance and name == "forward":
                    self._say(name, type(function).__name__)
            return
        inner = chain[-1]
        if name == "forward":
            self.origin = _origin(inner)
        if on_instance:
            parts = " and ".join(self._parts(name, function))
            self._say(name, parts if is_own and not added else put_by((added or chain)[0]))
        elif (other := put_in_place(chain, definer, name)) is not None:
            self._say(name, put_by(other))
        self._read(name, chain, follow=True)
        self._surround(name, function)

    def _say(self, name: str, by: str) -> None:
        self.replaced.append(f"{self._kind.__name__}.{name} was replaced by {by}")

    def _read(self, name: str, chain: list[types.FunctionType], *, follow: bool) -> None:
        inner = chain[-1]
        for number, function in enumerate(chain[:-1]):
            if not is_library(function):  # wrapped around it later, or a decorator of its own file
                self._read(f"{name} (around it, {number + 1})", [function], follow=True)
        if id(inner.__code__) in self._done or len(self.functions) >= _MOST_FUNCTIONS:
            self.functions.setdefault(name, digest_of(inner, syntax_of(inner)))
            return
        self._done.add(id(inner.__code__))
        node = syntax_of(inner)
        self.functions[name] = digest_of(inner, node)
        if follow and node is not None:
            self._follow(inner, node)

    def _surround(self, name: str, function: Any) -> None:
        parts = self._parts(name, function)
        self.functions |= {f"{name} ({by})": digest for by, digest in parts.items()}

    @staticmethod
    def _parts(name: str, function: Any) -> dict[str, str]:
        """That a whole forward is compiled stands in a line of its own."""
        return {
            by: digest
            for by, digest in around(function).items()
            if (name, by) != ("forward", "torch.compile")
        }

    def _outside(self, name: str, function: Any) -> None:
        chain = layers(function)
        if chain and not is_library(chain[-1]):
            self._read(name, chain, follow=False)

    def _follow(self, function: types.FunctionType, node: ast.AST) -> None:
        """What a function calls by name."""
        code = function.__code__
        first = code.co_varnames[0] if code.co_argcount else None
        local = {*code.co_varnames} - {*code.co_freevars}
        for chain in chains(node):
            if (chain[0] == first and "." in function.__qualname__) or chain[0] == "self":
                if len(chain) > 1 and chain[1] != "forward":
                    self._attribute(chain[1])
            elif chain[0] not in local:
                self._named(function, chain)

    def _attribute(self, name: str) -> None:
        """``self.name`` of a module: a method, or a function that the instance holds."""
        if name in self.functions:
            return
        value = self._module.__dict__.get(name)
        if isinstance(value, types.FunctionType | types.MethodType):
            if hasattr(self._kind, name):
                self._method(name)
            else:
                self._read_named(name, value)
            return
        definer = next((base for base in self._kind.__mro__ if name in base.__dict__), None)
        if definer is None or definer.__module__ == "torch.nn.modules.module":
            return
        inner = innermost(_plain(definer.__dict__[name]))
        if inner is not None and (
            definer.__module__ == self._kind.__module__ or not is_library(inner)
        ):
            self._method(name)

    def _named(self, function: types.FunctionType, chain: tuple[str, ...]) -> None:
        """A dotted name that is no local variable."""
        value, used = _resolve(function, chain)
        name = ".".join(chain[:used])
        if value is None or name in self.functions:
            return
        registry = _chosen(value, self._module)
        if registry is not None:
            choice, value = registry
            if value is None:
                return  # the default, which is named beside it
            name = f"{name}[{choice}]"
            self._read_named(name, value, force=True)
            if choice in ATTENTION and not all(map(is_library, layers(value))):
                self._foreign[name] = self.functions.get(name, "")
                self.replaced.append(f"{name} was replaced by {put_by(innermost(value))}")
            return
        if isinstance(value, type):
            autograd = issubclass(value, torch.autograd.Function)
            value = _plain(value.__dict__.get("forward")) if autograd else None
            name += ".forward"
        if not callable(value) or isinstance(value, types.BuiltinFunctionType):
            return
        other = put_in_namespace(function, chain[:used], value)
        if other is not None:
            self.replaced.append(f"{other} was replaced by {put_by(innermost(value))}")
        self._read_named(name, value, force=other is not None)

    def _read_named(self, name: str, value: Any, *, force: bool = False) -> None:
        chain = layers(value)
        if not chain:
            text = getattr(value, "code", None)  # of torch.jit.script
            if isinstance(text, str):
                self.functions[name] = digest_text(text)
            return
        inner = chain[-1]
        if inner.__globals__.get("__name__", "").partition(".")[0] == "torch" and not force:
            return  # torch's version tells
        same_file = inner.__code__.co_filename == self._file
        self._read(name, chain, follow=same_file or not is_library(inner))
        self._surround(name, value)


def _plain(value: Any) -> Any:
    """What a class attribute calls."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _has_forward(kind: type) -> bool:
    forward = innermost(getattr(kind, "forward", None))
    return forward is not None and forward.__name__ != "_forward_unimplemented"


def _origin(function: types.FunctionType) -> str:
    name = module_text(str(function.__globals__.get("__name__", "?")))
    return name if is_library(function) else f"{name}, {place_of(function)}"


def _resolve(function: types.FunctionType, chain: tuple[str, ...]) -> tuple[Any, int]:
    """(value, how many parts of the name lead to it); modules are walked through."""
    root = chain[0]
    if root in function.__code__.co_freevars:
        place = function.__code__.co_freevars.index(root)
        try:
            value = (function.__closure__ or ())[place].cell_contents
        except (ValueError, IndexError):
            return None, 1
    elif root in function.__globals__:
        value = function.__globals__[root]
    else:
        return None, 1
    used = 1
    while used < len(chain) and isinstance(value, types.ModuleType):
        value = value.__dict__.get(chain[used])
        used += 1
    return value, used


def _chosen(value: Any, module: Any) -> tuple[str, Any] | None:
    """Of a table of implementations (attention, experts) the one that the config chooses."""
    if not isinstance(value, Mapping) or not hasattr(value, "valid_keys"):
        return None
    config = getattr(module, "config", None)
    for word, name in (("Expert", "experts"), ("Attention", "attn")):
        if word in type(value).__name__:
            choice = getattr(config, f"_{name}_implementation", None)
            return (str(choice), value.get(choice)) if isinstance(choice, str) else None
    return None


def _torch_note() -> dict[str, CodeNote]:
    """torch's own functions that something else was put in place of, by name."""
    notes: dict[str, str] = {}
    replaced = []
    for title, function in replaced_in_torch():
        chain = layers(function)
        notes[title] = digest_of(chain[-1], syntax_of(chain[-1])) if chain else ""
        replaced.append(f"{title} was replaced by {put_by(chain[0] if chain else None)}")
    for text in kernels_replaced():
        replaced.append(text)
        notes[text.partition(" was ")[0]] = ""
    if not replaced:
        return {}
    note = CodeNote(digest=digest_many(notes), origin="torch", functions=notes, replaced=replaced)
    return {FUNCTIONAL: note}
