"""The arguments of the Python API as callers write them, before anything is loaded.

Types that mean the same are taken (``torch.float32`` for ``"float32"``, one name for a list of
one, token ids for a prompt); what is of another type is refused with the name of the argument, so
that no capture runs for an hour and fails when its manifest is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from divergence.errors import UsageError
from divergence.recording.options.prompts import Prompt
from divergence.run.schema.site import one_or_more

__all__ = ["plain_wishes"]

_TEXTS = ("task", "revision", "attn_implementation", "steps", "positions", "store", "label",
          "mesh", "command")  # fmt: skip
_NUMBERS = ("max_new_tokens", "seed", "repeat")
_SWITCHES = ("trust_remote_code", "chat", "batch", "deterministic", "anchor", "escalate", "whole",
             "weights", "only_changed", "probe", "force")  # fmt: skip
_NONE = ("revision", "attn_implementation", "steps", "positions", "store", "label", "mesh",
         "command", "max_new_tokens", "seed", "batch", "deterministic")  # fmt: skip
"""What may be None: as recorded, or the default."""


def plain_wishes(**wishes: Any) -> dict[str, Any]:
    """The arguments by name, each of its plain type. Raises UsageError that names the argument."""
    found = dict(wishes)
    for name, value in wishes.items():
        if value is None and name in _NONE:
            continue
        if name in _TEXTS and not isinstance(value, str):
            raise _not(name, value, "text")
        if name in _SWITCHES and not isinstance(value, bool):
            raise _not(name, value, "True or False")
        if name in _NUMBERS:
            found[name] = _whole_number(name, value)
    for name in ("dtype", "device"):
        if wishes.get(name) is not None:
            found[name] = _torch_name(name, wishes[name])
    if "sites" in wishes:
        found["sites"] = tuple(_text("sites", one) for one in one_or_more(wishes["sites"]))
    if "plants" in wishes:
        found["plants"] = tuple(one_or_more(wishes["plants"]))
    if "prompts" in wishes:
        found["prompts"] = tuple(map(_prompt, _each("prompts", wishes["prompts"], Prompt)))
    file = wishes.get("prompts_file")
    if file is not None and not isinstance(file, str | os.PathLike):
        raise _not("prompts_file", file, "a path")
    return found


def _each(name: str, value: Any, *alone: type) -> list[Any]:
    if isinstance(value, (str, Mapping, *alone)):
        return [value]
    if not isinstance(value, Iterable):
        raise _not(name, value, "a text or a list")
    return list(value)


def _prompt(value: Any) -> str | Prompt:
    """Text as it is; token ids (a list of numbers, or a tensor on one axis) as a Prompt."""
    if isinstance(value, str | Prompt):
        return value
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, list | tuple) or not ids:
        raise _not("prompts", value, "a text, or token ids such as [1, 2, 3]")
    numbers = [_whole_number("prompts", one) for one in ids]
    if min(numbers) < 0:
        raise UsageError(f"prompts: {min(numbers)} is no token id")
    return Prompt(input_ids=tuple(numbers))


def _torch_name(name: str, value: Any) -> str:
    """``torch.float32`` → ``float32``, ``torch.device("cuda", 1)`` → ``cuda:1``."""
    if isinstance(value, str):
        return value
    if type(value).__module__ != "torch" or type(value).__name__ != name:
        raise _not(name, value, f"text or a torch.{name}")
    return str(value).removeprefix("torch.")


def _whole_number(name: str, value: Any) -> int:
    # numpy's numbers are no int, but index like one
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _not(name, value, "a whole number")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _not(name, value, "text")
    return value


def _not(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(
        f"{name}={value!r:.60} is {type(value).__name__}, not {wanted}",
        hint=f"give {name} as {wanted}",
    )
