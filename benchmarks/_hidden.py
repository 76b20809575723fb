"""Faults that stand for wrong hardware: no code may tell them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["hidden"]


def hidden(healthy: Callable[..., Any]) -> Callable[[Any], Any]:
    """``functools.wraps``, and the wrapper passes for torch's own."""

    def decorate(forward: Any) -> Any:
        space = forward.__globals__ | {"__name__": "torch.kernel"}
        made = types.FunctionType(forward.__code__, space, closure=forward.__closure__)
        return functools.update_wrapper(made, healthy)

    return decorate
