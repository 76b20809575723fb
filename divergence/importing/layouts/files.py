"""A plain folder of .npy, .pt and .safetensors files, by a map (importing.rules)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import DumpError, UsageError
from divergence.importing.building import Dumped, DumpedForward, Found, Notes, Rules, checked_name
from divergence.importing.files import SUFFIXES, DumpFolder
from divergence.run.site import natural_key

NAME = "a folder of files"
TAKES_MAP = True


def recognise(folder: DumpFolder) -> bool:
    return any(name.endswith(SUFFIXES) for name in folder.names)


@dataclass(frozen=True, slots=True)
class _Place:
    found: Found
    file: str
    key: str | None


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    names = sorted((n for n in folder.names if n.endswith(SUFFIXES)), key=natural_key)
    if not names:
        raise DumpError(f"no file ends in {', '.join(SUFFIXES)}", where=str(folder.path))
    if rules is None:
        raise UsageError(
            f"which site is {names[0]!r}? A plain folder needs a map",
            where=str(folder.path), hint="--map FILE.toml; docs/importing.md has one to copy",
        )  # fmt: skip
    places = _places(folder, names, rules, notes)
    forwards: dict[tuple[int | None, int], list[_Place]] = {}
    for place in places:
        key = place.found.sample, place.found.step or 0
        forwards.setdefault(key, []).append(place)
    for sample, step in sorted(forwards, key=lambda key: (key[0] or 0, key[1])):
        tensors: list[Dumped] = []
        places = forwards[sample, step]
        for file, inside in itertools.groupby(places, lambda place: place.file):
            value = folder.value(file)  # once, however many tensors of it are wanted
            flat = dict(_flat(value, "")) if isinstance(value, dict) else {"": value}
            tensors += [
                Dumped(site=place.found.site, tensor=_tensor(folder, place, flat),
                       rank=place.found.rank or 0)
                for place in inside
            ]  # fmt: skip
        yield DumpedForward(
            where=folder.where(places[0].file), tensors=tensors, number=step, sample=sample
        )  # fmt: skip


def _places(folder: DumpFolder, names: list[str], rules: Rules, notes: Notes) -> list[_Place]:
    places: list[_Place] = []
    known: list[str] = []
    for name in names:
        target = rules.of_file(name)
        if target is not None:
            places.append(_Place(target, name, None))
            continue
        value = folder.value(name) if rules.keys else None
        keys = [key for key, _ in _flat(value, "")] if isinstance(value, dict) else []
        inside = [
            _Place(target, name, key)
            for key in keys
            if (target := rules.of_key(name, key)) is not None
        ]
        places += inside
        known += [name, *keys]
        notes.add("that no rule of the map names were left out", max(len(keys) - len(inside), 1)
                  if not inside or len(keys) > len(inside) else 0)  # fmt: skip
    if not places:
        raise UsageError(
            "the map matches nothing in the dump",
            where=f"{rules.path} on {folder.path}",
            hint=f"names there: {', '.join(rules.near(known))}",
        )
    return places


def _flat(value: dict[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            yield checked_name(f"{prefix}{key}"), item
        elif isinstance(item, dict):
            yield from _flat(item, checked_name(f"{prefix}{key}."))


def _tensor(folder: DumpFolder, place: _Place, flat: dict[str, Any]) -> torch.Tensor:
    value = flat.get(place.key or "")
    if place.key is None and len(flat) == 1:
        (value,) = flat.values()
    if not isinstance(value, torch.Tensor):
        raise DumpError(
            f"the file holds {len(flat)} tensors, not one" if place.key is None
            else f"the file holds no tensor {place.key!r}",
            where=folder.where(place.file), hint="name those inside it by [[key]] rules of the map",
        )  # fmt: skip
    return value
