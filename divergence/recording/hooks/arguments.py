"""Scalar arguments of an operator, as JSON for a record and as words for people.

JSON has no word for a dtype, a device or an infinity: those are objects of one key. What is no
scalar at all (a generator) is named by its type, and a call with it cannot be run again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["as_json", "as_word"]


def as_json(value: Any) -> Any:
    """A scalar argument as docs/dump-format.md writes it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        finite = value == value and abs(value) != float("inf")
        return value if finite else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [as_json(value.real), as_json(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    for kind, word in (
        (torch.device, "device"),
        (torch.layout, "layout"),
        (torch.memory_format, "memory_format"),
    ):
        if isinstance(value, kind):
            return {word: str(value).removeprefix("torch.")}
    return {"object": type(value).__name__}


def as_word(value: Any) -> str:
    """For people: numbers and names; the end of a slice as such."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_word(item) for item in value) + "]"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, int) and value == sys.maxsize:
        return "end"
    encoded = as_json(value)
    return str(next(iter(encoded.values())) if isinstance(encoded, dict) else encoded)
