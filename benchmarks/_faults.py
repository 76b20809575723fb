"""Wrong implementations, planted into one block of a loaded Hugging Face model.

A fault replaces ``forward`` on module instances (or, inside attention, the kernel that the
module asks for), so a capture of the model behaves like a machine with that fault. No
parameter is written to: weights keep their digests. There is no way back but to load again.

*Where it is blended.* The output of the one kernel that is wrong (the projection, the norm, the
rotary tables, the attention kernel before its output projection) becomes
``healthy + strength × (faulty - healthy)``, in float32 or float64, rounded once to its dtype;
strength 1 is exactly the faulty kernel, strength 0 patches nothing. Nothing runs twice that has
hooks or a cache, so inner sites and the cache hold what such a machine would hold.

*What stays in higher precision.* ``formula`` and ``data`` faults are made of arithmetic that means
the same in every dtype (fp8 and int8 are rounded to by division and ``round``, not by a cast).
``arithmetic`` faults are casts: a mode that widens every cast makes them vanish.

It refuses architectures that it cannot read from structure: ``applicable`` tells. Masks are
rebuilt from what is visible, so additive position biases (ALiBi, T5) would be lost; caches are
taken to be dynamic: the last key is the newest token's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks._fault_patches import PATCHES, fast_silu, tanh_gelu
from divergence.recording.structure import describe_modules

__all__ = ["FAULTS", "Fault", "applicable", "plant"]


@dataclass(frozen=True, slots=True)
class Fault:
    """``title`` is for tables; ``needs`` names the part of a block that the fault lives in."""

    name: str
    title: str
    kind: Literal["formula", "data", "arithmetic"]
    needs: str


_ROWS: tuple[tuple[str, str, Literal["formula", "data", "arithmetic"], str], ...] = (
    ("scale", "MLP output 5% too large", "formula", "output"),
    ("bias", "constant added to MLP output", "formula", "output"),
    ("noise", "noise on MLP output", "data", "output"),
    ("channel", "one channel is its neighbour's", "data", "output"),
    ("zero-head", "one head zeroed", "data", "attention"),
    ("norm-eps", "wrong norm epsilon", "formula", "norm"),
    ("rope-base", "wrong RoPE base", "formula", "rotary"),
    ("rope-shift", "queries one position late", "formula", "rotary"),
    ("attention-scale", "attention scale 5% off", "formula", "attention"),
    ("mask-short", "token does not see itself", "formula", "attention"),
    ("mask-long", "token sees the next one", "formula", "attention"),
    ("kv-heads", "tiled kv-head mapping", "formula", "grouped-heads"),
    ("kv-fp8", "KV cache in fp8", "data", "cache"),
    ("kv-stale", "stale KV entry (decode)", "data", "cache"),
    ("activation", "approximate activation", "formula", "activation"),
    ("gate-up", "gate and up swapped", "formula", "gated-mlp"),
    ("weight-tile", "transposed weight tile", "data", "linear"),
    ("weight-int8", "projection in int8", "data", "linear"),
    ("partial-sums", "partial sums in bf16", "arithmetic", "linear"),
    ("mantissa", "operands truncated", "arithmetic", "linear"),
    ("norm-bf16", "norm computed in bf16", "arithmetic", "norm"),
    ("router-low", "router in low precision", "arithmetic", "router"),
)
FAULTS: MappingProxyType[str, Fault] = MappingProxyType({row[0]: Fault(*row) for row in _ROWS})
"""Every fault by name. The functions of _fault_patches.py give the numerical idea."""


def applicable(model: nn.Module, name: str, block: int) -> bool:
    """Whether that block has the part that the fault needs. ValueError: no such fault or block."""
    return _target(model, name, block)[1] is not None


def plant(model: nn.Module, name: str, block: int, *, strength: float = 1.0) -> str:
    """Make block number ``block`` faulty, in place; returns its module path.

    Faults add up, on one block too. ValueError: no such fault or block, or not applicable.
    """
    path, target = _target(model, name, block)
    if target is None:
        raise ValueError(f"{name} needs a part that {path} lacks: {FAULTS[name].needs}")
    if strength != 0:
        PATCHES[name](target, float(strength))
    return path


def _target(model: nn.Module, name: str, block: int) -> tuple[str, Any]:
    if name not in FAULTS:
        raise ValueError(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    paths = [path for path, note in describe_modules(model).items() if note.role == "block"]
    if not 0 <= block < len(paths):
        raise ValueError(f"no block {block}: the model has {len(paths)}")
    path = paths[block]
    return path, _PARTS[FAULTS[name].needs](model, model.get_submodule(path))


# ── parts of a block, by structure ──────────────────────────────────────────────────────────────


def _first(module: nn.Module | None, *names: str) -> Any:
    found = (getattr(module, name, None) for name in names)
    return next((part for part in found if part is not None), None)


def _branch(_: nn.Module, block: nn.Module) -> nn.Module | None:
    return _first(block, "mlp", "mixer")


def _output(model: nn.Module, block: nn.Module) -> nn.Module | None:
    """What the second half of the block adds to the stream; a norm after the MLP (Gemma) would
    take out a wrong scale before it."""
    return _first(block, "post_feedforward_layernorm") or _branch(model, block)


def _norm(_: nn.Module, block: nn.Module) -> nn.Module | None:
    """The last one, for the same reason."""
    norms = [part for part in block.children() if "Norm" in type(part).__name__]
    known = [n for n in norms if hasattr(n, "eps") or hasattr(n, "variance_epsilon")]
    return known[-1] if known else None


def _attention(_: nn.Module, block: nn.Module) -> nn.Module | None:
    """A causal self-attention that takes its kernel from transformers' table."""
    for part in block.children():
        table = getattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS", None)
        known = hasattr(part, "scaling") and _first(part, "o_proj", "c_proj") is not None
        if known and getattr(part, "is_causal", False) and hasattr(table, "get_interface"):
            return part
    return None


def _grouped(model: nn.Module, block: nn.Module) -> nn.Module | None:
    part = _attention(model, block)
    groups = getattr(part, "num_key_value_groups", 1)
    heads = getattr(getattr(part, "config", None), "num_key_value_heads", 1)
    return part if groups > 1 and heads > 1 else None


def _rotary(model: nn.Module, block: nn.Module) -> tuple[nn.Module, torch.Tensor, float] | None:
    """The attention, the inverse frequencies of its tables (H/2,), and the tables' factor."""
    part = _attention(model, block)
    prefix = f"{getattr(part, 'layer_type', None)}_"
    for module in model.modules() if part is not None else ():
        for start in (prefix, ""):
            if isinstance(getattr(module, f"{start}inv_freq", None), torch.Tensor):
                factor = getattr(module, f"{start}attention_scaling", 1.0)
                return part, getattr(module, f"{start}inv_freq"), factor
    return None


def _linear(model: nn.Module, block: nn.Module) -> nn.Module | None:
    part = _first(_branch(model, block), "down_proj", "c_proj", "out_proj")
    if part is None:
        part = _first(_attention(model, block), "o_proj", "c_proj")
    known = isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    return part if known else None


def _gated(model: nn.Module, block: nn.Module) -> nn.Module | None:
    mlp = _branch(model, block)
    if all(hasattr(mlp, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return mlp
    experts = getattr(mlp, "experts", None)
    # Experts that interleave gate and up (gpt-oss) do not chunk.
    whole = hasattr(experts, "gate_up_proj") and getattr(experts, "is_concatenated", True)
    return experts if whole else None


def _activation(model: nn.Module, block: nn.Module) -> tuple[nn.Module, Callable] | None:
    """The activation module and its approximation, told by what the module computes."""
    mlp = _branch(model, block)
    module = _first(mlp, "act_fn") or _first(getattr(mlp, "experts", None), "act_fn")
    module = module or (_first(mlp, "act") if hasattr(mlp, "c_proj") else None)
    if not isinstance(module, nn.Module):
        return None
    probe = torch.linspace(-4, 4, 65)
    for exact, other in ((F.silu, fast_silu), (F.gelu, tanh_gelu), (tanh_gelu, F.gelu)):
        # The two gelus differ by up to 5e-4, float32 evaluations of one by less than 1e-6.
        if torch.allclose(module.forward(probe), exact(probe), rtol=0, atol=1e-5):
            return module, other
    return None


def _router(model: nn.Module, block: nn.Module) -> nn.Module | None:
    mlp = _branch(model, block)
    return _first(mlp, "gate", "router") if hasattr(mlp, "experts") else None


_PARTS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "activation": _activation,
    "attention": _attention,
    "cache": _attention,
    "gated-mlp": _gated,
    "grouped-heads": _grouped,
    "linear": _linear,
    "norm": _norm,
    "output": _output,
    "rotary": _rotary,
    "router": _router,
}
