"""Operators that an engine registers with torch under a namespace of its own."""

from __future__ import annotations

import contextlib
import importlib

__all__ = ["register_operators"]

_HOMES = ("transformers.integrations.moe",)


def register_operators() -> None:
    """Have transformers register its ``torch.ops.transformers``; nothing where it has none."""
    for home in _HOMES:
        with contextlib.suppress(Exception):  # an older transformers, or a torch it cannot use
            importlib.import_module(home)
