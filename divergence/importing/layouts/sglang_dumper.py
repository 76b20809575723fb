"""SGLang's dumper (srt/debug_utils/dumper.py): one .pt file a tensor, ``{"value", "meta"}``, named
by its tags: ``step=0___rank=0___dump_index=7___name=NAME___layer_id=3.pt``.

Names that it gives by itself (``DUMPER_NON_INTRUSIVE_MODE``) are ``non_intrusive__PATH.output`` (or
``.output.1``) and ``....inputs.0``, besides ``input_ids`` and ``positions``; those of a ``dump()``
call are its author's, and ``[[key]]`` rules of a map say which site each is, with the tags as
groups: ``site = "model.layers.{layer_id}:in"``. Blocks and norms get and return a hidden state in
two parts, update and residual, whose sum it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from divergence.errors import DumpError, UsageError
from divergence.importing.building import (
    BLOCK,
    Dumped,
    DumpedForward,
    Notes,
    Rules,
    adds_residual,
    first_missing,
    module_site,
    same_kind,
)
from divergence.importing.files import DumpFolder

NAME = "SGLang's dumper"
TAKES_MAP = True
_FILE = re.compile(r"(?:.*/)?(?P<tags>(?:step|forward_pass_id)=\d{1,9}___rank=\d{1,6}___.+)\.pt")
_HOOKED = re.compile(
    r"non_intrusive__(?:(?P<path>.+)\.)?(?P<what>inputs|output)(?:\.(?P<port>[^.]+))?"
)
_FEEDS = {"input_ids": "model:in", "positions": "model:in.position_ids"}
_NUMBERS = ("step", "forward_pass_id", "rank", "dump_index")

_Tags = dict[str, str]


def recognise(folder: DumpFolder) -> bool:
    return any(_FILE.fullmatch(name) for name in folder.names)


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    steps: dict[int, dict[int, list[tuple[str, _Tags]]]] = {}
    folders = set()
    for name in folder.names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        folders.add(name.rpartition("/")[0])
        tags: _Tags = dict(tag.partition("=")[::2] for tag in match["tags"].split("___"))
        if not all(tags.get(key, "0").isdecimal() for key in _NUMBERS):
            raise DumpError(f"{', '.join(_NUMBERS)} are not numbers in its name",
                            where=folder.where(name))  # fmt: skip
        step = int(tags.get("step") or tags["forward_pass_id"])
        steps.setdefault(step, {}).setdefault(int(tags["rank"]), []).append((name, tags))
    if len(folders) > 1:
        raise DumpError("the folder holds several dumps", where=" and ".join(sorted(folders)[:2]),
                        hint="name one of them")  # fmt: skip
    ranks = {rank for held in steps.values() for rank in held}
    names: set[str] = set()
    num_sites = 0
    first = min(steps)  # a server that warmed up before the dump does not begin at 0
    for number, step in enumerate(sorted(steps)):
        if step != first + number:
            raise DumpError(f"step {first + number} is missing", where=str(folder.path),
                            hint="copy all files of the dump")  # fmt: skip
        tensors: list[Dumped] = []
        for rank in sorted(steps[step]):
            files = sorted(steps[step][rank], key=lambda file: int(file[1].get("dump_index", "0")))
            values = [(tags, _value(folder, name, ranks, notes)) for name, tags in files]
            names |= {tags.get("name", "") for tags, _ in values}
            tensors += _tensors(values, rank, rules, notes, str(folder.path))
        num_sites += len(tensors)
        if missing := ranks - steps[step].keys():
            raise DumpError(f"rank {min(missing)} is missing at step {step}",
                            where=str(folder.path), hint="copy the files of all ranks")  # fmt: skip
        where = folder.where(steps[step][min(ranks)][0][0])
        yield DumpedForward(where=where, tensors=tensors, number=number)
    if not num_sites:
        near = sorted(names)[:4] if rules is None else rules.near(sorted(names))
        raise UsageError(
            "no name of the dump is that of a module"
            if rules is None
            else "the map matches nothing in the dump",
            where=str(folder.path) if rules is None else f"{rules.path} on {folder.path}",
            hint=f"names there: {', '.join(near)}; [[key]] rules of --map FILE.toml say which site "
            "each is",
        )


def _value(folder: DumpFolder, name: str, ranks: set[int], notes: Notes) -> torch.Tensor | None:
    held = folder.value(name)
    meta: Any = {}
    if isinstance(held, dict) and held.keys() >= {"value", "meta"}:
        held, meta = held["value"], held["meta"]
    size = meta.get("world_size") if isinstance(meta, dict) else None
    if isinstance(size, int) and (missing := first_missing(ranks)) < size:
        raise DumpError(
            f"rank {missing} is missing, of {size}", where=folder.where(name),
            hint="copy the files of all ranks",
        )  # fmt: skip
    if isinstance(held, torch.Tensor):
        return held
    notes.add("were no tensors, and left out")
    return None


def _tensors(
    values: list[tuple[_Tags, torch.Tensor | None]], rank: int, rules: Rules | None, notes: Notes,
    where: str,
) -> Iterator[Dumped]:  # fmt: skip
    """Sites in the order of the dump. The parts of a module's input or output stand together."""
    modules: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for tags, tensor in values:
        name = tags.get("name", "")
        if tensor is None:
            continue
        if tags.get("recompute_status", "disabled") not in ("disabled", "original"):
            notes.add("were computed again for a backward pass, and left out")
            continue
        if name == "seq_lens" and tensor.numel() > 1:
            raise DumpError(f"a forward holds {tensor.numel()} sequences at once", where=where,
                            hint="send one request at a time while dumping")  # fmt: skip
        target = None if rules is None else rules.of_key("", name, tags)
        if target is not None:
            yield Dumped(site=target.site, tensor=tensor, rank=rank)
        elif match := _HOOKED.fullmatch(name):
            parts = modules.setdefault((match["path"] or "", match["what"]), {})
            if (match["port"] or "0") in parts:
                notes.add("of a module's later calls were left out")
            parts.setdefault(match["port"] or "0", tensor)
        elif name in _FEEDS:
            yield Dumped(site=_FEEDS[name], tensor=tensor, rank=rank)
        else:
            notes.add("under names that are no module's were left out")
    for (path, what), parts in modules.items():
        for port, tensor, plus in _parts(path, what == "output", parts):
            yield Dumped(site=module_site(path, port), tensor=tensor, plus=plus, rank=rank)


def _parts(
    path: str, out: bool, parts: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    side = "out" if out else "in"
    floats = [tensor for tensor in parts.values() if tensor.is_floating_point()]
    is_block = BLOCK.fullmatch(path) is not None
    is_norm = adds_residual(path)
    if (is_block or (is_norm and not out)) and floats:
        plus = floats[1] if len(floats) > 1 and same_kind(floats[0], floats[1]) else None
        yield side, floats[0], plus
        return
    for number, (port, tensor) in enumerate(parts.items()):
        if is_norm and out and number and same_kind(tensor, floats[0]):
            continue  # the residual: the norm's input again
        yield side if not number else f"{side}.{port}", tensor, None
