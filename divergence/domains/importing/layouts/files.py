"""A plain folder of .npy, .pt and .safetensors files, by a map (rules.Rules)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from divergence.domains.importing.dumped import Dumped, DumpedForward, Notes, checked_name
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.rules import Rules, Target
from divergence.errors import DumpError, UsageError
from divergence.run.foreign import SUFFIXES, DumpFolder
from divergence.run.site import natural_key


def recognise(folder: DumpFolder) -> bool:
    return any(name.endswith(SUFFIXES) for name in folder.names)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor that the map names: of a file, or under a key inside it."""

    place: Target
    file: str
    key: str | None


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    names = sorted((n for n in folder.names if n.endswith(SUFFIXES)), key=natural_key)
    if not names:
        raise DumpError(f"no file ends in {', '.join(SUFFIXES)}", where=str(folder.path))
    if rules is None:
        raise UsageError(
            f"which site is {names[0]!r}? A plain folder needs a map",
            where=str(folder.path),
            hint="--map FILE.toml; docs/importing.md has one to copy",
        )
    forwards: dict[tuple[int | None, int], list[_Entry]] = {}
    for entry in _entries(folder, names, rules, notes):
        key = entry.place.sample, entry.place.step or 0
        forwards.setdefault(key, []).append(entry)
    for sample, step in sorted(forwards, key=lambda key: (key[0] or 0, key[1])):
        tensors: list[Dumped] = []
        entries = forwards[sample, step]
        for file, inside in itertools.groupby(entries, lambda entry: entry.file):
            value = folder.value(file)  # once, however many tensors of it are wanted
            flat = dict(_flat(value, "")) if isinstance(value, dict) else {"": value}
            for entry in inside:
                tensor = _tensor(entry, flat, folder.where(file))
                rank = entry.place.rank or 0
                tensors.append(Dumped(site=entry.place.site, tensor=tensor, rank=rank))
        where = folder.where(entries[0].file)
        yield DumpedForward(where=where, tensors=tensors, number=step, sample=sample)


def _entries(folder: DumpFolder, names: list[str], rules: Rules, notes: Notes) -> list[_Entry]:
    entries: list[_Entry] = []
    unnamed: list[str] = []
    for name in names:
        if (place := rules.place(name)) is not None:
            entries.append(_Entry(place, name, None))
            continue
        value = folder.value(name) if rules.keys else None
        keys = [key for key, _ in _flat(value, "")] if isinstance(value, dict) else []
        places = {key: rules.place(key, inside=name) for key in keys}
        inside = [_Entry(place, name, key) for key, place in places.items() if place is not None]
        entries += inside
        unnamed += [name, *keys]
        # a file of which nothing is taken counts as one
        num_left_out = len(keys) - len(inside) if inside else max(len(keys), 1)
        notes.add("that no rule of the map names were left out", num_left_out)
    if not entries:
        raise UsageError(
            "the map matches nothing in the dump",
            where=f"{rules.path} on {folder.path}",
            hint=f"names there: {', '.join(rules.near(unnamed))}",
        )
    return entries


def _flat(value: dict[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            yield checked_name(f"{prefix}{key}"), item
        elif isinstance(item, dict):
            yield from _flat(item, checked_name(f"{prefix}{key}."))


def _tensor(entry: _Entry, flat: dict[str, Any], where: str) -> torch.Tensor:
    value = flat.get(entry.key or "")
    if entry.key is None and len(flat) == 1:
        (value,) = flat.values()
    if not isinstance(value, torch.Tensor):
        raise DumpError(
            f"the file holds {len(flat)} tensors, not one"
            if entry.key is None
            else f"the file holds no tensor {entry.key!r}",
            where=where,
            hint="name those inside it by [[key]] rules of the map",
        )
    return value


FILES = Layout(words="a folder of files", recognise=recognise, read=read, takes_map=True)
