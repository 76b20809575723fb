"""What stands around a module or in place of something: wrappers, and functions that were swapped.

Adapters, sharding, hooks and quantisation are found by what libraries leave on a module, not by
importing them: a capture needs none of them.

For functions, what runs is held against what the file says: a method whose code lies in another
file, or under another name, than its class declares; a name of a module that is bound to another
function than the module defines or imports. It claims nothing where the file says nothing (classes
and functions made at run time), nor of what a library's own decorators made.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import torch

from divergence.recording.model.source import (
    declared,
    file_of,
    innermost,
    is_library,
    layers,
    place_of,
    syntax_of,
)

__all__ = [
    "attributes_of", "hooks_of", "kernels_replaced", "module_text", "original_forward", "put_by",
    "put_in_namespace", "put_in_place", "quantized_by", "replaced_in_torch", "wrappers_of",
]  # fmt: skip

_TORCH_FUNCTIONS = {
    "torch.nn.functional": (
        "linear", "embedding", "silu", "gelu", "relu", "softmax", "log_softmax", "rms_norm",
        "layer_norm", "group_norm", "scaled_dot_product_attention", "softplus", "sigmoid", "conv1d",
    ),
    "torch": (
        "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "softmax", "rsqrt", "exp", "sigmoid",
        "tanh", "cos", "sin", "add", "mul", "sum", "mean", "cumsum", "topk",
    ),
    "torch.Tensor": (
        "matmul", "__matmul__", "__add__", "__mul__", "softmax", "pow", "mean", "sum", "exp",
        "float", "to", "type_as", "masked_fill", "transpose", "rsqrt",
    ),
}  # fmt: skip
_OPERATORS = (
    "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "embedding", "silu", "gelu", "relu",
    "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "cos", "sin", "_softmax", "_log_softmax", "topk",
    "cumsum", "mean.dim", "sum.dim_IntList", "pow.Tensor_Scalar", "mul.Tensor", "add.Tensor",
    "sub.Tensor", "div.Tensor", "cat", "native_layer_norm", "_fused_rms_norm", "rms_norm",
    "index_select", "gather", "where.self", "_to_copy", "copy_", "convolution", "_grouped_mm",
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""What language models compute with, for which a kernel may be registered again."""
_REGISTERED = re.compile(r"^(\w+)( \(inactive\))?: registered at (.*?):(\d+) ::", re.MULTILINE)


def module_text(name: str) -> str:
    """A module's name; of code that came with a checkpoint the last part: the rest is where the
    checkpoint lay."""
    return name.rpartition(".")[2] if name.startswith("transformers_modules") else name


def put_by(function: types.FunctionType | None) -> str:
    """Who put it there, in words."""
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
        source = _source_module(says, str(space.get("__package__") or ""))
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


def _source_module(node: ast.ImportFrom, package: str) -> types.ModuleType | None:
    name = node.module or ""
    if node.level:
        base = package.split(".")
        base = base[: len(base) - node.level + 1]
        name = ".".join([*base, name] if name else base)
    return sys.modules.get(name)


def replaced_in_torch() -> Iterator[tuple[str, Any]]:
    holders = {"torch": torch, "torch.nn.functional": torch.nn.functional,
               "torch.Tensor": torch.Tensor}  # fmt: skip
    for holder, names in _TORCH_FUNCTIONS.items():
        for name in names:
            function = getattr(holders[holder], name, None)
            chain = layers(function)
            if chain and any(
                func.__globals__.get("__name__", "").partition(".")[0] != "torch" for func in chain
            ):
                yield f"{holder}.{name}", function


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
    "bitsandbytes": "bitsandbytes", "auto_gptq": "GPTQ", "gptqmodel": "GPTQ", "awq": "AWQ",
    "hqq": "HQQ", "quanto": "quanto", "optimum": "optimum", "aqlm": "AQLM", "eetq": "EETQ",
    "compressed_tensors": "compressed-tensors", "torchao": "torchao", "fbgemm_gpu": "FBGEMM",
}  # fmt: skip
"""Package of a module's class, or of its weight's → what it is called."""
_PARALLEL = {
    "DataParallel": "DataParallel", "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
}  # fmt: skip


_MOST_VALUES = 3


def attributes_of(modules: dict[str, Any]) -> dict[str, str]:
    """Plain numbers that the modules hold (a scale, an epsilon), as most of them have it, with the
    few that have another; what differs from module to module (its number) is left out, and so are
    the sizes of torch's own layers: the configuration and the shapes tell them."""
    attributes: dict[str, str] = {}
    names = dict.fromkeys(
        name
        for module in modules.values()
        for name, value in module.__dict__.items()
        if type(value) in _kinds(module) and not name.startswith("_")
    )
    for name in names:
        values = {path: repr(module.__dict__.get(name)) for path, module in modules.items()}
        counts = Counter(values.values())
        usual, number = counts.most_common(1)[0]
        if len(counts) > _MOST_VALUES or (len(modules) > 1 and number == 1):
            continue
        odd = [f"{values[path]} in {path}" for path in modules if values[path] != usual]
        attributes[name] = "; ".join([usual, *odd[:_MOST_VALUES]])
    return attributes


def _kinds(module: Any) -> tuple[type, ...]:
    made = (base.__module__ for base in type(module).__mro__)
    own = next(name for name in made if not name.startswith("torch.distributed"))  # fully sharded
    return (float,) if own.startswith("torch.nn.") else (int, float)


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
    """What stands around a module, in words."""
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
    """A PEFT layer: which adapters, and are they merged into the weight."""
    active = _names(_attribute(module, "active_adapters") or _attribute(module, "active_adapter"))
    held = _attribute(module, "lora_A")
    if held is None and not (active and hasattr(type(module), "merged")):
        return []
    names = active or _names(list(held) if hasattr(held, "keys") else None) or ["default"]
    kind = "LoRA" if held is not None else "adapter"
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
    """What put codes in place of a module's weight."""
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
