"""Operators of a suite, ``suite.NAME``: what they do here, and what is right, in float64.

A suite's operator is a plain function of tensors and scalars by name. ``run`` does it with torch;
``implementations`` are others that this machine has (a vendor's kernels), called as
``suite.NAME.IMPLEMENTATION``; ``truth`` is its definition, written in float64.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from divergence.ops.refusal import Refusal
from divergence.run.site import near_names

__all__ = ["PREFIX", "Definition", "definitions", "find"]

PREFIX = "suite."
_HOMES: tuple[str, ...] = ()
"""Modules whose ``DEFINITIONS`` are the suite's."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One operator. The three take the same arguments, by name."""

    name: str
    run: Function
    truth: Function
    implementations: Mapping[str, Function] = field(default_factory=lambda: MappingProxyType({}))


@functools.cache
def definitions() -> Mapping[str, Definition]:
    """All operators by name, without ``suite.``."""
    found: dict[str, Definition] = {}
    for home in _HOMES:
        for one in importlib.import_module(home).DEFINITIONS:
            found[one.name] = one
    return MappingProxyType(found)


def find(operator: str, *, truth: bool = False) -> Function:
    """What ``suite.NAME`` or ``suite.NAME.IMPLEMENTATION`` stands for. Raises Refusal."""
    name, _, implementation = operator.removeprefix(PREFIX).partition(".")
    one = definitions().get(name)
    if one is None:
        near = near_names(name, definitions())
        raise Refusal(
            f"this divergence has no operator {operator}",
            detail=f"near: {', '.join(near)}" if near else None,
        )
    if truth:
        return one.truth
    if implementation in ("", "default", "torch"):
        return one.run
    if implementation not in one.implementations:
        raise Refusal(f"this machine has no {implementation} for suite.{name}")
    return one.implementations[implementation]
