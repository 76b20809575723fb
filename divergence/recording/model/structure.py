"""What the parts of a model are, found from its structure and not from a list of names.

A *block list* is an outermost ``ModuleList`` whose members own parameters: the
decoder blocks, an encoder's layers, both stacks of an encoder-decoder. Members are
*blocks*. Every other module that the owner of a block list, or a parent of an
owner, calls directly is *trunk*: embedding, rotary table, final norm, head. So
the trunk and the blocks together are what one forward passes through once, in
order, whatever the model calls them; remote code included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.run.schema.manifest import ModuleNote, ModuleRole
from divergence.run.schema.site import ROOT, escape_path

if TYPE_CHECKING:
    from torch import nn

__all__ = ["describe_modules", "output_paths"]


def describe_modules(model: nn.Module) -> dict[str, ModuleNote]:
    """Class and role of every module, by path; the root is ``"."`` and trunk."""
    lists = _block_lists(model)
    blocks = {f"{path}.{name}" for path, module in lists.items() for name in _children(module)}
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
    from torch import nn

    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(path.startswith(outer + ".") for outer in found):
            continue  # experts, or layers within a layer
        if all(any(True for _ in child.parameters()) for child in module):
            found[path] = module
    return found


def _children(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]
