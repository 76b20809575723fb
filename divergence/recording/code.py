"""The code that a model runs, as digests and names: its own, and replaced parts."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import logging
import pkgutil
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from divergence.recording.structure import compiled_regions, compiler_of, inside, listed
from divergence.run.manifest import (
    ATTENTION,
    CodeNote,
    CompiledNote,
    ModuleNumbers,
    digest_many,
    digest_text,
)
from divergence.run.site import ROOT, starred

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
    """Return what ``layers`` looks through and yet changes what runs, with a digest: plain
    arguments that a partial binds, and compilation."""
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
    """Return what a file itself says that ``qualname`` (``Class``, ``Class.method``, ``function``)
    is."""
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
    """Write out trees that are kept (``_tree``): a second model of a class costs nothing."""
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
    for name in global_names(code):
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
def global_names(code: types.CodeType) -> set[str]:
    """Every global name that a function and what is defined inside it uses."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names = names | global_names(constant)
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
        if field == "decorator_list":  # without ``@auto_docstring``, ``@add_start_docstrings(…)``
            called = [getattr(decorator, "func", decorator) for decorator in value]
            names = [getattr(f, "attr", getattr(f, "id", "")) for f in called]
            value = [x for x, name in zip(value, names, strict=True) if "docstring" not in name]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, ``pass``, ``...``, or a name that is declared and not assigned."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.AnnAssign) and node.value is None)


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


# What stands around a module or in place of something: wrappers, and functions that were swapped.
#
# Adapters, sharding, hooks and quantisation are found by what libraries leave on a module, not by
# importing them: a capture needs none of them.
#
# For functions, what runs is held against what the file says: a method whose code lies in another
# file, or under another name, than its class declares; a name of a module that is bound to another
# function than the module defines or imports. It claims nothing where the file says nothing
# (classes and functions made at run time), nor of what a library's own decorators made.

_TORCH_FUNCTIONS = {
    "torch.nn.functional": """
        linear embedding silu gelu relu softmax log_softmax rms_norm layer_norm group_norm
        scaled_dot_product_attention softplus sigmoid conv1d
    """.split(),
    "torch": """
        matmul mm bmm baddbmm addmm einsum softmax rsqrt exp sigmoid tanh cos sin add mul sum mean
        cumsum topk
    """.split(),
    "torch.Tensor": """
        matmul __matmul__ __add__ __mul__ softmax pow mean sum exp float to type_as masked_fill
        transpose rsqrt
    """.split(),
}
_OPERATORS = """
    mm bmm addmm baddbmm matmul linear embedding silu gelu relu sigmoid tanh exp rsqrt sqrt cos
    sin _softmax _log_softmax topk cumsum mean.dim sum.dim_IntList pow.Tensor_Scalar mul.Tensor
    add.Tensor sub.Tensor div.Tensor cat native_layer_norm _fused_rms_norm rms_norm index_select
    gather where.self _to_copy copy_ convolution _grouped_mm scaled_dot_product_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
""".split()
"""What language models compute with, for which a kernel may be registered again."""
_REGISTERED = re.compile(r"^(\w+)( \(inactive\))?: registered at (.*?):(\d+) ::", re.MULTILINE)


def module_text(name: str) -> str:
    """A module's name; of code that came with a checkpoint the last part: the rest is where the
    checkpoint lay."""
    return name.rpartition(".")[2] if name.startswith("transformers_modules") else name


def put_by(function: types.FunctionType | None) -> str:
    """Say in words who put the function there."""
    if function is None:
        return "something without Python source"
    place, name = place_of(function), str(function.__globals__.get("__name__", ""))
    top = name.partition(".")[0]
    if top == "liger_kernel":
        return f"Liger ({name})"
    if top == "kernels" or "kernels--" in function.__code__.co_filename:
        return f"a kernel of the hub ({place})"
    return place


def put_in_place(
    chain: list[types.FunctionType], definer: type | None, name: str
) -> types.FunctionType | None:
    """The function that stands where the class' own should; None where it is the class' own."""
    if definer is None:
        return None
    file, inner = file_of(definer.__module__), chain[-1]
    if file is None:
        own = innermost(definer.__dict__.get("__init__"))
        file = None if own is None else own.__code__.co_filename
    outer = next((layer for layer in chain[:-1] if _added(layer, chain, file)), None)
    if outer is not None:
        return outer
    if file is None or (
        inner.__code__.co_filename == file
        and inner.__qualname__.rpartition("<locals>.")[2].endswith(f"{definer.__name__}.{name}")
    ):
        return None
    if "<locals>" in definer.__qualname__:
        return None if inner.__code__.co_filename == file else inner
    says = declared(inspect.getsourcefile(definer) or file, definer.__qualname__)
    if says is None:
        return None  # a class made at run time: nothing to hold it against
    method = declared(file, f"{definer.__qualname__}.{name}")
    return None if isinstance(method, ast.Assign | ast.AnnAssign | ast.ImportFrom) else inner


def _added(wrapper: types.FunctionType, chain: list[types.FunctionType], file: str | None) -> bool:
    """Was this wrapper put around a method after its class was made? Decorators in the source say
    how many belong there."""
    if is_library(wrapper) or wrapper.__code__.co_filename == file:
        return False
    inner = syntax_of(chain[-1])
    decorators = len(getattr(inner, "decorator_list", ()))
    return is_library(chain[-1]) or len(chain) - 1 > decorators


def put_in_namespace(
    function: types.FunctionType, chain: tuple[str, ...], value: Any
) -> str | None:
    """The name of a function that another was put in place of, in the namespace where ``chain``
    leads; None where it is what the file says."""
    inner = innermost(value)
    if inner is None or chain[0] in function.__code__.co_freevars:
        return None
    if len(chain) > 1:
        module = function.__globals__[chain[0]]
        for part in chain[1:-1]:
            module = getattr(module, part)
        space = module.__dict__
    else:
        space = function.__globals__
    file, name = space.get("__file__"), chain[-1]
    says = declared(file, name)
    title = module_text(str(space.get("__name__", "?")))
    title = f"{title if title.startswith('torch.') else title.rpartition('.')[2]}.{name}"
    actual = inner.__code__.co_filename
    if isinstance(says, ast.FunctionDef):
        same = actual == file and inner.__name__ == name
        return None if same or _decorated(says, inner) else title
    if isinstance(says, ast.ImportFrom):
        home = says.module or ""
        if says.level:
            base = str(space.get("__package__") or "").split(".")
            base = base[: len(base) - says.level + 1]
            home = ".".join([*base, home] if home else base)
        source = sys.modules.get(home)
        asked = next(alias.name for alias in says.names if (alias.asname or alias.name) == name)
        there = None if source is None else source.__dict__.get(asked)
        if there is not None and there is not value:
            return title
        original = None if source is None else declared(source.__dict__.get("__file__"), asked)
        if isinstance(original, ast.FunctionDef) and actual != source.__dict__.get("__file__"):
            return None if _decorated(original, inner) else title
    return None


def _decorated(node: ast.FunctionDef, inner: types.FunctionType) -> bool:
    """May a decorator of the source have made this function? Then nothing is claimed."""
    return bool(node.decorator_list) and is_library(inner)


def kernels_replaced() -> list[str]:
    """Operators of torch whose kernel another registration (``torch.library``, an extension in C++)
    stands in place of, with the dispatch key; those without values (``Meta``) do not count."""
    kernels = []
    for name in _OPERATORS:
        try:
            text = torch._C._dispatch_dump(f"aten::{name}")
        except (AttributeError, RuntimeError):  # another torch: it has it not, or does not tell
            continue
        if "(inactive)" not in text:
            continue
        active: dict[str, str] = {}
        hidden: set[str] = set()
        for key, inactive, file, line in _REGISTERED.findall(text):
            if inactive:
                hidden.add(key)
            else:
                active[key] = f"{PurePath(file.replace(chr(92), '/')).name}:{line}"
        kernels += [
            f"the {key} kernel of aten.{name} was replaced by {active[key]}"
            for key in sorted(hidden - {"Meta"})
            if key in active
        ]
    return kernels


_QUANTIZED = {
    "bitsandbytes": "bitsandbytes",
    "auto_gptq": "GPTQ",
    "gptqmodel": "GPTQ",
    "awq": "AWQ",
    "hqq": "HQQ",
    "quanto": "quanto",
    "optimum": "optimum",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "compressed_tensors": "compressed-tensors",
    "torchao": "torchao",
    "fbgemm_gpu": "FBGEMM",
}
"""Package of a module's class, or of its weight's → what it is called."""
_PARALLEL = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
}


_MOST_VALUES = 3


def attributes_of(modules: dict[str, Any]) -> dict[str, str | ModuleNumbers]:
    """Plain numbers and switches that the modules hold (a scale, an epsilon, a window or none);
    what differs from module to module (its number) is left out, and so are the sizes of torch's own
    layers: the configuration and the shapes tell them."""
    attributes: dict[str, str | ModuleNumbers] = {}
    names = dict.fromkeys(
        name
        for module in modules.values()
        for name, value in module.__dict__.items()
        if (_drops(module) if name == "training" else type(value) in _kinds(module))
        and not name.startswith("_")
    )
    for name in names:
        places: dict[str, list[str]] = {}
        for path, module in modules.items():
            places.setdefault(repr(module.__dict__.get(name)), []).append(path)
        usual = max(places, key=lambda value: len(places[value]))
        if len(places) > _MOST_VALUES or (len(modules) > 1 and len(places[usual]) == 1):
            continue
        others = {value: paths for value, paths in places.items() if value != usual}
        attributes[name] = usual
        if others:
            attributes[name] = ModuleNumbers(value=usual, num_modules=len(modules), others=others)
    return attributes


def _drops(module: Any) -> bool:
    """Does it compute otherwise while it is trained: by dropout, or by statistics of a batch?"""
    rates = (v for k, v in vars(module).items() if k == "p" or "drop" in k)
    return "running_mean" in module._buffers or any(type(v) is float and v > 0 for v in rates)


def _kinds(module: Any) -> tuple[type, ...]:
    made = (base.__module__ for base in type(module).__mro__)
    own = next(name for name in made if not name.startswith("torch.distributed"))  # fully sharded
    return (float,) if own.startswith("torch.nn.") else (int, float, bool, types.NoneType)


def _is_divided(forward: Any) -> bool:
    """A forward that transformers puts around a module of which each rank holds a part."""
    function = innermost(forward)
    name = "" if function is None else str(function.__globals__.get("__name__", ""))
    return name.startswith(
        ("transformers.distributed", "transformers.integrations.tensor_parallel")
    )


def original_forward(module: Any) -> Any:
    """The ``forward`` of this very instance, without what accelerate or tensor parallelism put
    around it; None where it has none of its own."""
    forward = module.__dict__.get("forward")
    if _is_divided(forward):
        return None
    if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__:
        return module.__dict__["_old_forward"]
    return forward


def hooks_of(module: Any) -> dict[str, Any]:
    """Hooks that are no library's, by what they are called: they may change what passes."""
    functions: dict[str, Any] = {}
    for kind, hooks in (
        ("forward pre-hook", module._forward_pre_hooks),
        ("forward hook", module._forward_hooks),
    ):
        for number, hook in enumerate(hooks.values()):
            function = innermost(hook if not isinstance(hook, functools.partial) else hook.func)
            function = function or innermost(vars(type(hook)).get("__call__"))
            if function is not None and not is_library(function):
                functions[f"{kind} {number}"] = function
    return functions


def wrappers_of(module: Any) -> list[str]:
    """Say in words what stands around a module."""
    wrappers = [
        f"{name.rpartition(' ')[0]} {place_of(hook)}" for name, hook in hooks_of(module).items()
    ]
    names = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
    if _is_divided(module.__dict__.get("forward")):
        wrappers.append("tensor parallel")
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        wrappers.append(f"accelerate: {type(hook).__name__}")
    if any(name.startswith("torch.distributed") and "FSDP" in name for name in names):
        wrappers.append("FSDP")
    if type(module).__name__ in _PARALLEL:
        wrappers.append(_PARALLEL[type(module).__name__])
    wrappers += _adapters(module)
    wrappers += filter(None, [quantized_by(module)])
    if "parametrizations" in module._modules:
        wrappers.append(f"parametrised: {', '.join(module._modules['parametrizations'])}")
    return wrappers


def _adapters(module: Any) -> list[str]:
    """A PEFT layer: which adapters, by which factor, and are they merged into the weight."""
    active = _names(_attribute(module, "active_adapters") or _attribute(module, "active_adapter"))
    matrices = _attribute(module, "lora_A")
    if matrices is None and not (active and hasattr(type(module), "merged")):
        return []
    names = active or _names(list(matrices) if hasattr(matrices, "keys") else None) or ["default"]
    kind = "LoRA" if matrices is not None else "adapter"
    factors = _attribute(module, "scaling")
    factors = factors if isinstance(factors, dict) else {}
    names = [f"{name} times {factors[name]}" if name in factors else name for name in names]
    text = f"{kind} {', '.join(names)}"
    if _attribute(module, "disable_adapters"):
        return [f"{text}, switched off"]
    return [f"{text}, {'merged' if _attribute(module, 'merged') else 'not merged'}"]


def _attribute(module: Any, name: str) -> Any:
    try:
        return getattr(module, name, None)
    except Exception:  # a library's property may do anything
        return None


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(name) for name in value] if isinstance(value, list | tuple) else []


def quantized_by(module: Any) -> str | None:
    """Name what put codes in place of a module's weight; None where nothing did."""
    names = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
    weight = module._parameters.get("weight")
    if weight is not None:
        names += [f"{type(weight).__module__}.", f"{type(weight.data).__module__}."]
    if "quantization_scheme" in module.__dict__:
        names.append("compressed_tensors.")  # it leaves a module's class as it is
    for name in names:
        top = name.partition(".")[0]
        if top in _QUANTIZED:
            return f"quantised by {_QUANTIZED[top]}"
        if name.startswith("torch.ao.nn.quantized"):
            return "quantised by torch.ao"
        if name.startswith("transformers.integrations.") and name.endswith("Linear"):
            return f"quantised: {name.rpartition('.')[2]}"
    return None


# Which code the modules of a model run: what their classes say, and what was put in its place.
#
# Of each class: ``forward`` and what it calls by name. A name is looked up as Python does, in the
# closure, in the globals of the function and on the module, so that a function which a plugin put
# into the namespace of a modeling file is found, although the file says otherwise. Functions of the
# class' own file are followed further; of others only the first is read. The code that runs is then
# compared with the file, which tells what was replaced.
#
# Nothing of the model is executed, and code without source is not judged: an operator in C is known
# by its name alone. Torch's operators are named where their kernel was registered anew; kernels
# that come with a build of torch or a preloaded library are not seen: the environment has their
# versions.

FUNCTIONAL = "torch.nn.functional"
"""Key of the note on torch's own functions, where any were replaced."""
_MOST_FUNCTIONS = 100
_PLACEHOLDERS = "transformers.distributed.pipeline_parallel"
"""What stands for the blocks of another stage computes nothing."""


def _by_class(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """Group the modules by what their class is called in notes: the class, and its modules by
    path."""
    groups: dict[type, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith(_PLACEHOLDERS):
            continue
        groups.setdefault(_own_class(type(module)), {})[path or ROOT] = module
    names = Counter(kind.__name__ for kind in groups)
    return {
        kind.__name__
        if names[kind.__name__] == 1
        else f"{module_text(kind.__module__)}.{kind.__name__}": (kind, modules)
        for kind, modules in groups.items()
    }


def note_other_numbers(model: nn.Module, notes: Mapping[str, CodeNote], sample: int) -> None:
    """Notes which numbers modules no longer hold as they did. ``sample``: the prompt that has just
    run."""
    for name, (_, modules) in _by_class(model).items():
        note = notes.get(name)
        if note is None or note.changed_after is None:
            continue
        now = attributes_of(modules)
        for key in note.attributes.keys() & now.keys() - note.changed_after.keys():
            if now[key] != note.attributes[key]:
                note.changed_after[key] = sample


def code_notes(model: nn.Module) -> dict[str, CodeNote]:
    """A note on each class of module in ``model``."""
    notes: dict[str, CodeNote] = {}
    for name, (kind, modules) in _by_class(model).items():
        note = _note(kind, modules)
        if note is not None:
            notes[name] = note
    # torch's own functions that something else was put in place of, by name
    functions: dict[str, str] = {}
    replaced = []
    for holder, names in _TORCH_FUNCTIONS.items():
        for name in names:
            chain = layers(getattr(pkgutil.resolve_name(holder), name, None))
            homes = (function.__globals__.get("__name__", "") for function in chain)
            if any(home.partition(".")[0] != "torch" for home in homes):
                functions[f"{holder}.{name}"] = digest_of(chain[-1], syntax_of(chain[-1]))
                replaced.append(f"{holder}.{name} was replaced by {put_by(chain[0])}")
    for text in kernels_replaced():
        replaced.append(text)
        functions[text.partition(" was ")[0]] = ""
    if replaced:
        notes[FUNCTIONAL] = CodeNote(
            digest=digest_many(functions), origin="torch", functions=functions, replaced=replaced
        )
    return notes


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
        wrapped=[_share_text(text, count, len(modules)) for text, count in wrapped.items()],
        compiled="; ".join(_share_text(text, n, len(modules)) for text, n in compiled.items())
        or None,
        places=sorted({starred(path) for path in modules}),
        attributes=attributes_of(modules),
        changed_after={},
        odd={path: digest for path, digest in digests.items() if not own or digest != usual},
    )


def _share_text(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text} ({count} of {total})"


def _instance_key(module: Any) -> tuple[object, ...]:
    """Return what of an instance changes which functions run."""
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
        usual = innermost(getattr(kind, "forward", None))
        has_one = usual is not None and usual.__name__ != "_forward_unimplemented"
        if forward is not None or has_one:
            self._method("forward", forward)
        hooks = hooks_of(module)
        self.hooked = bool(hooks)
        for name, hook in hooks.items():
            chain = layers(hook)
            if chain and not is_library(chain[-1]):
                self._read(name, chain, follow=False)
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
        own_chain = layers(_code_plain(declared_))
        added = [layer for layer in chain if layer not in own_chain and not is_library(layer)]
        is_own = bool(chain and own_chain) and chain[-1] is own_chain[-1]
        if is_own and not (added or self._parts(name, value)):
            on_instance = False  # bound once more: the class' own
        function = value if on_instance else _code_plain(declared_)
        chain = layers(function)
        if not chain:
            if function is not None and (on_instance or not isinstance(declared_, property)):
                self.functions[name] = ""
                if on_instance and name == "forward":
                    self._say(name, type(function).__name__)
            return
        inner = chain[-1]
        if name == "forward":
            self.origin = module_text(str(inner.__globals__.get("__name__", "?")))
            self.origin += "" if is_library(inner) else f", {place_of(inner)}"
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

    def _follow(self, function: types.FunctionType, node: ast.AST) -> None:
        """Read what a function calls by name."""
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
        inner = innermost(_code_plain(definer.__dict__[name]))
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
            value = _code_plain(value.__dict__.get("forward")) if autograd else None
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


def _code_plain(value: Any) -> Any:
    """Return the function that a class attribute calls."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


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
    """Return the entry of a table of implementations (attention, experts) that the config
    chooses."""
    if not isinstance(value, Mapping) or not hasattr(value, "valid_keys"):
        return None
    config = getattr(module, "config", None)
    for word, name in (("Expert", "experts"), ("Attention", "attn")):
        if word in type(value).__name__:
            choice = getattr(config, f"_{name}_implementation", None)
            return (str(choice), value.get(choice)) if isinstance(choice, str) else None
    return None


# What torch compiled while a capture ran, region by region.
#
# Whether a module really ran compiled is taken from torch: its list of compilations, and its
# warnings that a limit of recompilations was reached, after which calls run eager. Torch does not
# say it call by call.

_LIMIT = "torch._dynamo hit config."
_MOST_EVENTS = 1 << 14


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
        """Note what is compiled meanwhile."""
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
        """Say in words what cannot be recorded of compiled modules. ``operators``: modules whose
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
        """Say in words what did not run compiled."""
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
        """Note what became of each region, by path."""
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


def _code_of(event: Any) -> tuple[str | None, int | None]:
    return (getattr(event, "co_filename", None), getattr(event, "co_firstlineno", None))


def _graph_breaks(event: Any) -> Iterator[str]:
    """Yield why code was left to Python, each reason in a line. (torch also starts anew for reasons
    of its own; it explains those of its user's code.)"""
    for reason in getattr(event, "restart_reasons", None) or ():
        head, explained, _ = str(reason).partition("Explanation:")
        if explained:
            yield head.strip()[:160]


def _reason(failed: list[Any]) -> str | None:
    """Say why torch did not compile, in one line and without a directory."""
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
