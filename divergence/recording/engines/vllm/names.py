"""Where the modules of transformers are in vLLM's: name maps, by model family.

``configs/maps/NAME.toml`` lists vLLM's modules that have transformers' names (``same``), those that
have another (``renamed``), and those that compute several of its modules in one (``split``: which,
in the order of their rows). ``weights`` are parameters whose modules are not to be recorded: an
embedding that is scaled outside its module gives another thing. ``*`` stands for one part of a
path. A matrix is split by vLLM's word on it, or by the sizes that transformers' own model has.

Of a family without a map the blocks alone are known, and only where both have them at one path:
what stands between them may mean another thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from divergence.config import config_names, decode, find_config, load_toml
from divergence.errors import UsageError
from divergence.recording.model.structure import describe_modules
from divergence.run.schema.site import ROOT, did_you_mean, escape_path

__all__ = ["ModuleMap", "ModulePlace", "map_for", "parameters_of", "places_of"]

_FOLDER = "maps/"
_OWN_ROWS = "output_partition_sizes"
"""Of a fused module: the rows of each part that this rank has."""


class ModuleMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of configs/maps/."""

    models: tuple[str, ...]
    """``model_type`` of the configurations that it is for."""
    same: tuple[str, ...]
    """Modules with one path in both."""
    renamed: dict[str, str] = {}
    """vLLM's module → transformers'."""
    split: dict[str, tuple[str, ...]] = {}
    """vLLM's module → transformers' modules that it computes in one."""
    weights: dict[str, str] = {}
    """vLLM's parameter → transformers', where the modules are not one another's."""
    tables: dict[str, str] = {}
    """vLLM's rotary module in one block → transformers', whose output is read from its table."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """Where one module of transformers is found."""

    theirs: str
    """Path of vLLM's module, as torch writes it."""
    rows: slice | None = None
    """The part of its output (last axis) and of its weight (first axis), where it is fused."""
    is_table: bool = False
    """A rotary table, of which the rows are recorded that a forward reads."""


def map_for(model_type: str, given: str | None = None) -> ModuleMap | None:
    """The map of a family, or the one that was named (by name or path); None where there is none.

    Raises ConfigError for a file that is no map, or is not there.
    """
    if given is not None:
        return _read(given)
    maps = (_read(name) for name in config_names(_FOLDER))
    return next((name_map for name_map in maps if model_type in name_map.models), None)


def places_of(
    map_: ModuleMap | None, *, structure: torch.nn.Module, module: torch.nn.Module, model_type: str
) -> dict[str, ModulePlace]:
    """By transformers' (escaped) path. ``structure``: transformers' model; ``module``: vLLM's.

    Raises UsageError for a pattern of the map that matches nothing, with near names, and for a
    model of which not even the blocks are found.
    """
    ours = dict(structure.named_modules(remove_duplicate=False))
    theirs = dict(module.named_modules(remove_duplicate=False))
    places = {ROOT: ModulePlace("")}
    if map_ is None:
        notes = describe_modules(structure)
        blocks = [path for path, note in notes.items() if note.role == "block"]
        if not blocks or any(path not in theirs for path in blocks):
            known = sorted({name for each in config_names(_FOLDER) for name in _read(each).models})
            raise UsageError(
                f"--engine vllm: the modules of a {model_type} model have other names in vLLM, and "
                "no name map is known",
                hint=f"known: {', '.join(known)}; or --engine-option name_map=FILE.toml "
                "(docs/engines.md)",
            )
        return places | {path: ModulePlace(path) for path in blocks}
    named = {shared: shared for shared in map_.same} | map_.renamed
    for pattern, other in (named | map_.tables).items():
        for path, (name,) in _pairs(pattern, (other,), theirs, ours):
            places[escape_path(name)] = ModulePlace(path, is_table=pattern in map_.tables)
    for pattern, parts in map_.split.items():
        for path, names in _pairs(pattern, parts, theirs, ours):
            first, own = 0, getattr(theirs[path], _OWN_ROWS, None)
            for number, name in enumerate(names):
                weight = getattr(ours[name], "weight", None)
                num_rows = 0 if weight is None else int(weight.shape[0])
                if own is not None:
                    num_rows = int(own[number])
                places[escape_path(name)] = ModulePlace(path, slice(first, first + num_rows))
                first += num_rows
    return places


def parameters_of(
    map_: ModuleMap | None, *, structure: torch.nn.Module, module: torch.nn.Module
) -> dict[str, str]:
    """transformers' parameter → vLLM's, of those that the map names one by one."""
    ours = dict(structure.named_parameters(remove_duplicate=False))
    theirs = dict(module.named_parameters(remove_duplicate=False))
    weights = {} if map_ is None else map_.weights
    return {
        name: path
        for pattern, other in weights.items()
        for path, (name,) in _pairs(pattern, (other,), theirs, ours)
    }


def _read(name: str) -> ModuleMap:
    path = find_config(name, prefix=_FOLDER, what="name map")
    return decode(load_toml(path), ModuleMap, where=str(path))


def _pairs(
    pattern: str, others: Iterable[str], theirs: Mapping[str, object], ours: Mapping[str, object]
) -> Iterator[tuple[str, list[str]]]:
    """(path in vLLM, paths in transformers) of each module that the patterns name, at least one."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
    hits = [(path, match.groups()) for path in theirs if (match := expression.fullmatch(path))]
    if not hits:
        _nothing(pattern, "vLLM", theirs)
    for path, stars in hits:
        names = [_filled(other, stars) for other in others]
        for name in names:
            if name not in ours:
                _nothing(name, "transformers", ours)
        yield path, names


def _filled(pattern: str, stars: Iterable[str]) -> str:
    values = iter(stars)
    return re.sub(r"\*", lambda _: next(values, "*"), pattern)


def _nothing(pattern: str, library: str, paths: Iterable[str]) -> None:
    near = did_you_mean(pattern.replace("*", "0"), [path for path in paths if path])
    raise UsageError(
        f"the name map's {pattern!r} matches no module of the model in {library}",
        hint=near or "is it a map for another family?",
    )
