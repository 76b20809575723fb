"""What stands around a module, or in place of its weights: adapters, sharding, hooks, compilers.

Found by what libraries leave on a module, not by importing them: a capture needs none of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from divergence.recording.model.source import innermost, is_library, place_of

__all__ = ["attributes_of", "compiler_of", "hooks_of", "original_forward", "wrappers_of"]

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
    found: dict[str, str] = {}
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
        found[name] = "; ".join([usual, *odd[:_MOST_VALUES]])
    return found


def _kinds(module: Any) -> tuple[type, ...]:
    made = (one.__module__ for one in type(module).__mro__)
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
    found: dict[str, Any] = {}
    for kind, hooks in (
        ("forward pre-hook", module._forward_pre_hooks),
        ("forward hook", module._forward_hooks),
    ):
        for number, hook in enumerate(hooks.values()):
            function = innermost(hook if not isinstance(hook, functools.partial) else hook.func)
            function = function or innermost(vars(type(hook)).get("__call__"))
            if function is not None and not is_library(function):
                found[f"{kind} {number}"] = function
    return found


def wrappers_of(module: Any) -> list[str]:
    """What stands around a module, in words."""
    found = [
        f"{name.rpartition(' ')[0]} {place_of(hook)}" for name, hook in hooks_of(module).items()
    ]
    names = [f"{one.__module__}.{one.__name__}" for one in type(module).__mro__]
    if _is_divided(module.__dict__.get("forward")):
        found.append("tensor parallel")
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        found.append(f"accelerate: {type(hook).__name__}")
    if any(name.startswith("torch.distributed") and "FSDP" in name for name in names):
        found.append("FSDP")
    if type(module).__name__ in _PARALLEL:
        found.append(_PARALLEL[type(module).__name__])
    found += _adapters(module)
    found += _quantized(module, names)
    if "parametrizations" in module._modules:
        found.append(f"parametrised: {', '.join(module._modules['parametrizations'])}")
    return found


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
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _quantized(module: Any, names: list[str]) -> list[str]:
    weight = module._parameters.get("weight")
    if weight is not None:
        names = [*names, f"{type(weight.data).__module__}."]
    for name in names:
        top = name.partition(".")[0]
        if top in _QUANTIZED:
            return [f"quantised by {_QUANTIZED[top]}"]
        if name.startswith("torch.ao.nn.quantized"):
            return ["quantised by torch.ao"]
        if name.startswith("transformers.integrations.") and name.endswith("Linear"):
            return [f"quantised: {name.rpartition('.')[2]}"]
    return []


def compiler_of(module: Any) -> str | None:
    """``torch.compile`` and its backend, where the module or its forward was given to it."""
    forward = module.__dict__.get("forward", type(module).forward)
    for one in (module.__dict__.get("_compiled_call_impl"), forward):
        if one is not None and hasattr(one, "_torchdynamo_orig_callable"):
            return f"torch.compile ({backend_of(one)})"
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
