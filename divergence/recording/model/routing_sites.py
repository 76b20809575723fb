"""Routing sites: where a block with experts says which token goes to which of them.

Recorded with ``blocks``, since without them one token's error in such a block says nothing:
rounding may have sent it to another expert. They are small: some numbers a token.

* the module called ``experts``: the chosen experts, its integer argument (T, k). So transformers
  >= 5 calls them, whatever the model;
* the router beside it (``gate``, ``router``, or a class of that name): its first result, the
  logits (T, E).

Both come as rows of a whole batch, one prompt after another; they are recorded as (B, T, ...), like
everything else that has tokens.

Where experts are a list of modules (transformers 4) no call tells the choice, and it stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from divergence.run.schema.manifest import ModuleNote

if TYPE_CHECKING:
    import torch

__all__ = ["by_token", "is_routing", "routing_modules"]

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
    found = dict.fromkeys(experts, "experts")
    for path, note in notes.items():
        parent, _, name = path.rpartition(".")
        if parent in parents and (name in _ROUTER_NAMES or _ROUTER.search(note.kind)):
            found.setdefault(path, "router")
    return found


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
