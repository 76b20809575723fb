"""Operators by name, as torch knows them: what a recorded call may run, and what it may not.

A run may come from a stranger and names its operators itself. Found are only operators that
are registered in this process (nothing is imported by name but transformers' own), that give
tensors, and that touch nothing but their arguments: no files, no other processes.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from divergence.ops.refusal import Refusal

__all__ = ["draws_random_numbers", "find_operator", "is_uninitialised", "short_name"]

_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")
_COLLECTIVE = frozenset("c10d _c10d_functional _dtensor symm_mem rpc fsdp".split())
_OUTSIDE = frozenset({"filename", "path", "file"})
"""Names of arguments by which an operator reads or writes files."""
_UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in "empty empty_like empty_permuted empty_strided empty_quantized new_empty "
    "new_empty_strided resize resize_ resize_as_".split()
)


def short_name(operator: str) -> str:
    """``"aten.mm.default"`` → ``"aten.mm"``."""
    return operator.rpartition(".")[0] or operator


def find_operator(name: str) -> torch._ops.OpOverload:
    """The operator of that full name, ``aten.mm.default``. Raises Refusal."""
    if _NAME.fullmatch(name) is None:
        raise Refusal(f"{name!r} is no operator's name")
    space, packet, overload = name.split(".")
    if space in _COLLECTIVE:
        raise Refusal(f"{short_name(name)} works on several processes")
    if space == "transformers":
        from divergence.recording.engines.load import register_operators

        register_operators()
    home = torch.ops.__dict__.get(space) or getattr(torch.ops, space)
    found: Any = None
    if isinstance(home, torch._ops._OpNamespace):
        found = getattr(getattr(home, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise Refusal(f"this machine has no operator {name}")
    schema = found._schema
    if any(argument.name in _OUTSIDE for argument in schema.arguments):
        raise Refusal(f"{short_name(name)} reads or writes files")
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    if not writes and not any("Tensor" in str(result.type) for result in schema.returns):
        raise Refusal(f"{short_name(name)} returns no tensor")
    return found


def is_uninitialised(name: str) -> bool:
    """Does the operator give memory as it was found?"""
    return short_name(name) in _UNINITIALISED


def draws_random_numbers(operator: torch._ops.OpOverload, bound: dict[str, Any]) -> bool:
    """Does this call draw? Dropout of nothing does not. ``bound``: arguments by name."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    if bound.get("train") is False or bound.get("training") is False:
        return False
    chances = [bound[name] for name in ("dropout_p", "dropout", "p") if name in bound]
    return not (chances and all(chance == 0 for chance in chances))
