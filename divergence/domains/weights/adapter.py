"""LoRA adapters, in the form that PEFT writes: adapter_config.json and adapter_model.safetensors.

Of a module with weight W an adapter stores A (rank, in) and B (out, rank); what runs is W + s·B·A,
s = alpha / rank (by its root with ``use_rslora``). A and B say nothing by themselves, as any pair
of one product does the same, so that two adapters are compared by their products, and one against a
checkpoint by its base with the products added, in the base's dtype: merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from divergence.domains.weights.checkpoint import Stored, StoredWeights, open_checkpoint
from divergence.domains.weights.relations import Relation
from divergence.errors import UsageError
from divergence.facts import fact
from divergence.numerics.formats import format_of
from divergence.outside import json_value, read_bytes

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.[\w-]+)?(?:\.weight)?$")


@dataclass(frozen=True, slots=True)
class Adapter:
    """``products``: of each parameter what is added to it; ``whole``: parameters that it holds
    itself (``modules_to_save``)."""

    source: str
    base: str
    rank: int
    alpha: float
    products: Mapping[str, Stored]
    whole: Mapping[str, Stored]

    @property
    def changes(self) -> StoredWeights:
        """Return what it stores, by the parameters that it changes."""
        form = f"LoRA adapter, rank {self.rank}, alpha {self.alpha:g}"
        return StoredWeights(self.source, form, {**self.whole, **self.products})

    @property
    def text(self) -> str:
        """Return what it is, once it is merged."""
        return f"LoRA, rank {self.rank}, alpha {self.alpha:g}, merged into {self.base}"

    @torch.no_grad()
    def merge_into(self, model: torch.nn.Module) -> None:
        """Adds what it adds to its base's parameters, in their dtype. Raises UsageError for a model
        that is not its base."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # a layer of embeddings may be there as it is, and with what is added to it
        for name, change in (*self.whole.items(), *self.products.items()):
            own = parameters.get(name)
            if own is None or tuple(own.shape) != change.shape or not own.is_floating_point():
                what = (
                    "has not" if own is None else f"has as {str(own.dtype)[6:]} {list(own.shape)}"
                )
                raise UsageError(
                    f"{self.source} changes {name} {list(change.shape)}, which {self.base} {what}",
                    hint="merge it with PEFT (merge_and_unload, then save_pretrained)",
                )
            value = change.read().to(own.device)
            own.copy_(own + value if change is self.products.get(name) else value)

    def merged(self) -> StoredWeights:
        """Its base with what it adds. Raises UsageError where the base is not here."""
        base = open_checkpoint(str(self.base_folder()))
        tensors = {**base.tensors, **self.whole}
        for name, product in self.products.items():
            stored = tensors.get(name)
            if stored is None or stored.shape != product.shape:
                there = "has not" if stored is None else f"has as {list(stored.shape)}"
                raise UsageError(
                    f"{self.source} changes {name} {list(product.shape)}, which {self.base} {there}"
                )
            tensors[name] = Stored(stored.shape, stored.dtype, partial(_sum, stored, product))
        return StoredWeights(self.source, f"{base.form} with {self.changes.form}", tensors)

    def base_folder(self) -> Path:
        """Find the base: as the adapter names it, beside it, or as the hub's cache has it."""
        for place in (Path(self.base).expanduser(), Path(self.source, self.base)):
            if place.is_dir():
                return place
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(self.base, "config.json")
        except ValueError:  # a path that is not here is no id
            cached = None
        if isinstance(cached, str):
            return Path(cached).parent
        raise UsageError(
            f"{self.source} is an adapter of {self.base}, which is not here",
            hint="get that, or compare two adapters, which needs no base",
        )


def open_adapter(source: str) -> Adapter | None:
    """The adapter in this directory; None where there is none. Raises UsageError for one of a kind
    that is not known here, and what reading a checkpoint raises."""
    file = Path(source).expanduser() / CONFIG
    if not file.is_file():
        return None
    config = json_value(read_bytes(file, error=UsageError), where=str(file), error=UsageError)
    try:
        _check_kind(source, config)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        base = str(config["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is no configuration of LoRA: {error}") from error
    factors: dict[str, dict[str, Stored]] = {}
    whole: dict[str, Stored] = {}
    embeddings: set[str] = set()
    for name, stored in open_checkpoint(source).tensors.items():
        path = name.removeprefix(_PREFIX)
        match = _FACTOR.search(path)
        if match is None:
            whole[path.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = stored
        else:
            module = path[: match.start()]
            factors.setdefault(module, {})[match[1]] = stored
            if "lora_embedding" in match[0]:
                embeddings.add(module)
    products = {}
    for module, pair in factors.items():
        if pair.keys() != {"A", "B"}:
            raise UsageError(f"{source} holds one factor of {module}: a file that was cut short?")
        own_rank = int(_module_value(config.get("rank_pattern"), module, rank))
        own_alpha = float(_module_value(config.get("alpha_pattern"), module, alpha))
        scale = own_alpha / (math.sqrt(own_rank) if config.get("use_rslora") else own_rank)
        a, b = pair["A"], pair["B"]
        shape = (b.shape[0], a.shape[-1])
        turned = bool(config.get("fan_in_fan_out")) or module in embeddings
        if turned:
            shape = (shape[1], shape[0])
        products[f"{module}.weight"] = Stored(
            shape, "float32", partial(_product, a.read, b.read, scale, turned)
        )
    return Adapter(source, base, rank, alpha, products, whole)


def open_weights(source: str) -> StoredWeights:
    """A checkpoint, or an adapter merged into its base. Raises what opening these raises."""
    adapter = open_adapter(source)
    return open_checkpoint(source) if adapter is None else adapter.merged()


_OTHERWISE = {
    "use_dora": "DoRA",
    "target_parameters": "LoRA of single parameters (target_parameters)",
    "trainable_token_indices": "LoRA with tokens of its own (trainable_token_indices)",
    "lora_bias": "LoRA with biases (lora_bias)",
    "layer_replication": "LoRA with layers that are there twice (layer_replication)",
    "alora_invocation_tokens": "aLoRA, which runs behind its tokens alone",
}
_REBUILT = ("pissa", "olora", "corda", "loftq")
"""Ways to begin that change the base's weights too."""


def _check_kind(source: str, config: Mapping[str, Any]) -> None:
    kind = next((kind for key, kind in _OTHERWISE.items() if config.get(key)), None)
    start = str(config.get("init_lora_weights", "")).lower()
    if config.get("peft_type", "LORA") != "LORA":
        kind = str(config["peft_type"])
    elif kind is None and start.startswith(_REBUILT):
        kind = f"LoRA that began as {start}, which changes the base too"
    if kind is not None:
        raise UsageError(
            f"{source} is an adapter of kind {kind}, and plain LoRA is known here",
            hint="merge it with PEFT (merge_and_unload) and compare that",
        )


def _module_value(pattern: Mapping[str, Any] | None, module: str, usual: float) -> float:
    """The value of a module: PEFT's patterns name it, or the end of its path."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return float(value)
    return usual


def _product(
    a: Callable[[], torch.Tensor], b: Callable[[], torch.Tensor], scale: float, turned: bool
) -> torch.Tensor:
    """As PEFT multiplies on a CPU, bit for bit."""
    product = (b().float() @ a().float()) * scale
    return product.T if turned else product


def _sum(stored: Stored, product: Stored) -> torch.Tensor:
    weight = stored.read()
    return (weight + product.read()).to(weight.dtype)


# How a checkpoint is related to an adapter's base, and two adapters to one another.

_SAME_PRODUCT = 1e-5
"""Products in float32 of factors that are written otherwise, relative to their norm."""
_LEAST_SIGNAL = 4.0
"""Standard errors that the factor of what was added must have to be told."""


def merged_relation(merged: Adapter, name: str, other: torch.Tensor) -> Relation | None:
    """Return how often a checkpoint holds what the adapter adds to a parameter, by least squares;
    None where it holds something else as well, or the rounding of its dtype hides it."""
    product = merged.products[name].read().double()
    base = open_checkpoint(str(merged.base_folder())).tensors[name].read()
    apart = other.double() - base.double()
    factor = float((apart * product).sum() / (product * product).sum())
    rest = float((apart - factor * product).norm())
    size = max(float(part.double().norm()) for part in (base, other))
    rounding = format_of(other.dtype).unit_roundoff * size
    error = rounding / float(product.norm())
    if not math.isfinite(factor) or error * _LEAST_SIGNAL > 1 or rest > 2 * rounding:
        return None
    if abs(factor) <= _LEAST_SIGNAL * error:
        return Relation("unmerged", False, fact("weights.unmerged"))
    if abs(factor - 1) <= _LEAST_SIGNAL * error:
        return Relation("merged", True, fact("weights.merged"))
    factor = float(f"{factor:.2g}")
    return Relation("merged_times", False, fact("weights.merged_times", factor=factor))


def product_relation(x: torch.Tensor, y: torch.Tensor) -> Relation | None:
    """The same product of other factors, or a multiple of it; else None."""
    if x.shape != y.shape or not x.any():
        return None
    x, y = x.double(), y.double()
    factor = float((x * y).sum() / (x * x).sum())
    if not float((y - factor * x).norm()) <= _SAME_PRODUCT * float(y.norm()):
        return None
    if abs(factor - 1) <= _SAME_PRODUCT:
        return Relation("product", True, fact("weights.product"))
    factor = float(f"{factor:.4g}")
    return Relation("product_times", False, fact("weights.product_times", factor=factor))
