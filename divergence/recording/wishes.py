"""The arguments of the Python API as callers write them, before anything is loaded.

Types that mean the same are taken (``torch.float32`` for ``"float32"``, one name for a list of
one, token ids for a prompt); what is of another type is refused with the name of the argument, so
that no capture runs for an hour and fails when its manifest is written. The types are those of the
options (``divergence.options``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from divergence.errors import UsageError
from divergence.options.capture import CaptureOptions
from divergence.options.option import Options, fields_of, kinds_of
from divergence.options.train import PlanOptions
from divergence.recording.prompts import Prompt
from divergence.run.schema.site import one_or_more

__all__ = ["options_of", "plain_wishes", "plan_options"]

_T = TypeVar("_T", bound=Options)

_OTHERS = {"force": bool, "command": str | None}
"""What every function that makes a run takes beside its options."""


def options_of(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """The options among the arguments ``given``, each of its plain type."""
    names = [field.name for field in fields_of(kind)]
    return kind(**plain_wishes(**{name: given[name] for name in names if name in given}))


def plan_options(given: dict[str, Any]) -> PlanOptions:
    """Those of the plan of a training step, taken out of ``given``."""
    fields = fields_of(PlanOptions)
    values = {field.name: given.pop(field.name) for field in fields if field.name in given}
    types = {field.name: field.type for field in fields}
    return PlanOptions(**{name: _plain(name, value, types[name]) for name, value in values.items()})


def plain_wishes(**wishes: Any) -> dict[str, Any]:
    """The arguments by name, each of its plain type. Raises UsageError that names the argument."""
    plain = dict(wishes)
    types = {field.name: field.type for field in fields_of(CaptureOptions)} | _OTHERS
    for name, value in wishes.items():
        if name in types and name not in ("dtype", "device"):
            plain[name] = _plain(name, value, types[name])
    for name in ("dtype", "device"):
        if wishes.get(name) is not None:
            plain[name] = _torch_name(name, wishes[name])
    if plain.get("dtype") == "auto":
        plain["dtype"] = None
    if "sites" in wishes:
        plain["sites"] = tuple(_text("sites", site) for site in one_or_more(wishes["sites"]))
    if "plants" in wishes:
        plain["plants"] = tuple(one_or_more(wishes["plants"]))
    if "prompts" in wishes:
        prompts = wishes["prompts"]
        if isinstance(prompts, str | Mapping | Prompt):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise _not("prompts", prompts, "a text or a list")
        plain["prompts"] = tuple(map(_prompt, prompts))
    return plain


def _plain(name: str, value: Any, type_: Any) -> Any:
    """What can be told by the type alone: a switch, a number, a text or a path."""
    if value is None and type(None) in get_args(type_):
        return None
    kinds = set(kinds_of(type_))
    if kinds == {bool} and not isinstance(value, bool):
        raise _not(name, value, "True or False")
    if kinds == {int}:
        return _whole_number(name, value)
    if kinds == {str}:
        return _text(name, value)
    if kinds == {Path, str} and not isinstance(value, str | os.PathLike):
        raise _not(name, value, "a path")
    return value


def _prompt(value: Any) -> str | Prompt:
    """Text as it is; token ids (a list of numbers, or a tensor on one axis) as a Prompt."""
    if isinstance(value, str | Prompt):
        return value
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, list | tuple) or not ids:
        raise _not("prompts", value, "a text, or token ids such as [1, 2, 3]")
    numbers = [_whole_number("prompts", token_id) for token_id in ids]
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
