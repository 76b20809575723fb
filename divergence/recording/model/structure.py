"""What the parts of a model are, found from its structure and not from a list of names.

A *block list* is an outermost ``ModuleList`` whose members own parameters: the
decoder blocks, an encoder's layers, both stacks of an encoder-decoder. Members are
*blocks*. Every other module that the owner of a block list, or a parent of an
owner, calls directly is *trunk*: embedding, rotary table, final norm, head. One
forward passes through trunk and blocks once, in order.

A block with experts says which token goes to which of them. That is recorded with ``blocks``,
since one token's error in such a block may mean only that rounding sent it to another expert.

* the module called ``experts``: the chosen experts, its integer argument (T, k). So transformers
  >= 5 calls them, whatever the model;
* the router beside it (``gate``, ``router``, or a class of that name): its first result, the
  logits (T, E).

Both come as rows of a whole batch, one prompt after another; they are recorded as (B, T, ...), like
everything else that has tokens. Where experts are a list of modules (transformers 4) no call tells
the choice, and it stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from divergence.run.schema.manifest import ModuleNote, ModuleRole
from divergence.run.schema.site import ROOT, escape_path

__all__ = [
    "by_token", "describe_modules", "inside", "is_routing", "output_paths", "routing_modules",
]  # fmt: skip


def inside(path: str, roots: Iterable[str]) -> bool:
    """Is the module one of ``roots`` or in one?"""
    return any(root in (ROOT, path) or path.startswith(f"{root}.") for root in roots)


def describe_modules(model: nn.Module) -> dict[str, ModuleNote]:
    """Class and role of every module, by path; the root is ``"."`` and trunk."""
    lists = _block_lists(model)
    blocks = {
        f"{path}.{name}" for path, module in lists.items() for name, _ in module.named_children()
    }
    ancestors = {""}
    for path in lists:
        parts = path.split(".")
        ancestors.update(".".join(parts[:count]) for count in range(len(parts)))
    notes: dict[str, ModuleNote] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if path in blocks:
            role: ModuleRole = "block"
        elif path == "" or (parent in ancestors and path not in ancestors and path not in lists):
            role = "trunk"
        else:
            role = "inner"
        routed = role == "block" and any("experts" in name for name, _ in module.named_modules())
        notes[escape_path(path)] = ModuleNote(kind=_kind(module), role=role, routed=routed)
    return notes


def _kind(module: nn.Module) -> str:
    """Class name, with the variant where one class has several (sliding and full attention)."""
    name = type(module).__name__
    for attribute in ("attention_type", "layer_type", "block_type"):
        variant = getattr(module, attribute, None)
        if isinstance(variant, str):
            return f"{name}/{variant}"
    return name


def output_paths(model: nn.Module) -> set[str]:
    """Paths whose output is logits over the vocabulary: the root and its output embedding."""
    paths = {ROOT}
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is not None:
        paths.update(escape_path(path) for path, module in model.named_modules() if module is head)
    return paths


def _block_lists(model: nn.Module) -> dict[str, nn.Module]:
    lists: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(path.startswith(outer + ".") for outer in lists):
            continue  # experts, or layers within a layer
        if all(any(True for _ in child.parameters()) for child in module):
            lists[path] = module
    return lists


_ROUTER = re.compile(r"Router|Gate$|TopK")
_ROUTER_NAMES = ("gate", "router")


def routing_modules(notes: Mapping[str, ModuleNote]) -> dict[str, str]:
    """Module path → ``experts`` or ``router``, of every routed block."""
    blocks = {path for path, note in notes.items() if note.routed}
    experts = {
        path
        for path in notes
        if path.endswith(".experts") and any(path.startswith(block + ".") for block in blocks)
    }
    parents = {path.rpartition(".")[0] for path in experts}
    kinds = dict.fromkeys(experts, "experts")
    for path, note in notes.items():
        parent, _, name = path.rpartition(".")
        if parent in parents and (name in _ROUTER_NAMES or _ROUTER.search(note.kind)):
            kinds.setdefault(path, "router")
    return kinds


def is_routing(part: str | None, port: str, tensor: torch.Tensor) -> bool:
    """Is this port of an ``experts`` module or of a router one that tells the choice?"""
    if part == "experts":
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return port.startswith("in.") and tensor.ndim == 2 and whole
    return part == "router" and port == "out"


def by_token(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """(B·T, n) → (B, T, n)."""
    if tensor.ndim != 2 or tensor.shape[0] % batch:
        return tensor
    return tensor.reshape(batch, -1, tensor.shape[-1])
