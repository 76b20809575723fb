"""Dumps of SGLang: by its forward hooks, and by its dumper.

The hooks (--debug-tensor-dump-output-folder; srt/debug_utils/tensor_dump_forward_hook.py) write
``TP0_PP0_Rank0_pid1/Pass00000.pt``, a dict of outputs by module path, of modules without children
and of the model itself; of a batch its ``forward_batch_info``. A pass is written inside the model's
own hook, before that hook keeps the model's output. So what the model and the modules after it
returned (``model``, ``logits_processor``) lies in the next file, and is put back here, unless the
first file has it already (versions that write at the end).

The dumper (srt/debug_utils/dumper.py) writes one .pt file a tensor, ``{"value", "meta"}``, named by
its tags in any order: ``step=0___rank=0___dump_index=7___name=NAME___layer_id=3.pt``. Names that it
gives by itself (``DUMPER_NON_INTRUSIVE_MODE``) are ``non_intrusive__PATH.output`` (or
``.output.1``) and
``....inputs.0``, besides ``input_ids`` and ``positions``; those of a ``dump()`` call are its
author's, and ``[[key]]`` rules of a map say which site each is, with the tags as groups: ``site =
"model.layers.{layer_id}:in"``.

Norms return (normed, residual): the residual is what entered the norm, the update of the sublayer
before it added. So ``layers.3.input_layernorm`` holds the input of block 3, which is the output of
block 2, and ``norm`` the output of the last one. Blocks, and norms of the dumper, get and return a
hidden state in two parts, update and residual, whose sum it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from divergence.domains.importing.dumped import (
    Dumped,
    DumpedForward,
    Notes,
    check_ranks,
    first_missing,
    module_site,
)
from divergence.domains.importing.layouts import Layout, holding
from divergence.domains.importing.rules import Rules
from divergence.errors import DumpError, UsageError
from divergence.run.foreign import DumpFolder

BLOCK = re.compile(r"(?:.+\.)?(?:layers|layer|h|blocks)\.(\d+)")
"""Path of a repeated block."""


def adds_residual(path: str) -> bool:
    """May the norm at this path get and return a residual beside its input? Those of a block and of
    the model do; one inside a sublayer may have another second input, a gate."""
    parent, _, name = path.rpartition(".")
    beside = BLOCK.fullmatch(parent) is not None or BLOCK.match(path) is None
    return beside and ("norm" in name or name.startswith("ln_"))


def same_kind(part: torch.Tensor, other: torch.Tensor) -> bool:
    """Are both floating, of one shape and one dtype: parts that may be added?"""
    return part.shape == other.shape and part.dtype == other.dtype and part.is_floating_point()


# The forward hooks.

_PASS = re.compile(
    r"(?:.*/)?(?P<folder>TP(?P<tp>\d{1,6})_PP(?P<pp>\d{1,6})_Rank\d{1,6}_pid\d+)"
    r"/Pass(?P<number>\d{1,9})\.pt"
)
_BATCH = ".forward_batch_info."
_FEEDS = {"input_ids": "in", "positions": "in.position_ids"}
_LAST = re.compile(r"(?:.+\.)?(?:logits_processor|lm_head)")


def _read_hooks(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    passes = _passes(folder)
    shifted = not any(_late(_dict(folder, name)) for name in passes[0].values())
    for number, ranks in enumerate(passes):
        tensors: list[Dumped] = []
        where = folder.where(next(iter(ranks.values())))
        following = passes[number + 1] if shifted and number + 1 < len(passes) else {}
        for rank, name in ranks.items():
            table = _dict(folder, name)
            if shifted:
                table = {key: table[key] for key in table if key not in _late(table)}
            late = _late(_dict(folder, following[rank])) if rank in following else {}
            tensors += _returned({**table, **late}, rank, where, notes)
        yield DumpedForward(where=where, tensors=tensors, number=number)


def _late(table: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the model, and of what follows it."""
    top = {key.partition(_BATCH)[0] for key in table if _BATCH in key}
    return {key: table[key] for key in table if key in top or _LAST.fullmatch(key)}


def _passes(folder: DumpFolder) -> list[dict[int, str]]:
    """The files of each pass, by rank."""
    processes: dict[tuple[int, int], str] = {}
    files = []
    for name in folder.names:
        match = _PASS.fullmatch(name)
        if match is None:
            continue
        place = int(match["pp"]), int(match["tp"])
        other = processes.setdefault(place, match["folder"])
        if other != match["folder"]:
            raise DumpError(
                "the folder holds dumps of several processes of one rank",
                where=f"{other} and {match['folder']}",
                hint="keep those of one start of it",
            )
        files.append((int(match["number"]), place, name))
    num_pp, num_tp = (max(numbers) + 1 for numbers in zip(*processes, strict=True))
    passes: dict[int, dict[int, str]] = {}
    for number, (pp, tp), name in sorted(files):
        passes.setdefault(number, {})[pp * num_tp + tp] = name
    check_ranks(
        passes,
        str(folder.path),
        num_pp * num_tp,
        called=lambda rank: f"TP{rank % num_tp} PP{rank // num_tp}",
    )
    if (missing := first_missing(passes)) < len(passes):
        raise DumpError(
            f"Pass{missing:05d}.pt is missing",
            where=folder.where(processes[0, 0]),
            hint="copy all files of the dump",
        )
    return list(passes.values())


def _dict(folder: DumpFolder, name: str) -> dict[str, Any]:
    table = folder.value(name)
    if not isinstance(table, dict):
        raise DumpError("the file holds no tensors by name", where=folder.where(name))
    return {str(key): value for key, value in table.items()}


def _returned(table: dict[str, Any], rank: int, where: str, notes: Notes) -> Iterator[Dumped]:
    lengths = [v for k, v in table.items() if k.endswith(f"{_BATCH}seq_lens")]
    if any(isinstance(length, torch.Tensor) and length.numel() > 1 for length in lengths):
        raise DumpError(
            f"the pass holds {lengths[0].numel()} sequences at once",
            where=where,
            hint="send one request at a time while dumping",
        )
    blocks = [match for key in table if (match := BLOCK.match(key))]
    last = max(blocks, key=lambda match: int(match[1]))[0] if blocks else None
    given: set[str] = set()
    for key, value in table.items():
        for site, tensor, plus in _sites(key, value, last):
            if site not in given:
                given.add(site)
                yield Dumped(site=site, tensor=tensor, plus=plus, rank=rank)
        if not isinstance(value, torch.Tensor | list | tuple):
            notes.add("were no tensors, and left out")


_Found = tuple[str, torch.Tensor, torch.Tensor | None]


def _sites(key: str, value: Any, last: str | None) -> Iterator[_Found]:
    if _BATCH in key:
        path, _, what = key.partition(_BATCH)
        if what in _FEEDS and isinstance(value, torch.Tensor):
            yield module_site(path, _FEEDS[what]), value, None
        return
    path = re.sub(r"(^|\.)logits_processor$", r"\1lm_head", key)
    parts = list(value) if isinstance(value, list | tuple) else [value]
    parts = [part for part in parts if isinstance(part, torch.Tensor)]
    is_pair = len(parts) == 2 and same_kind(*parts)
    if is_pair and BLOCK.fullmatch(key):
        yield module_site(path, "out"), parts[0], parts[1]
        return
    if is_pair and adds_residual(key):  # what entered the norm comes before what it made of it
        for site in (*_around(key, last), module_site(path, "in")):
            yield site, parts[1], None
        parts = parts[:1]
    for number, part in enumerate(parts):
        yield module_site(path, f"out.{number}" if number else "out"), part, None


def _around(key: str, last: str | None) -> list[str]:
    """Sites of blocks that hold what enters a norm: the first of a block, or the last of all."""
    block, _, name = key.rpartition(".")
    match = BLOCK.fullmatch(block)
    if match is not None and name in ("input_layernorm", "ln_1", "attention_norm"):
        before = f"{block[: match.start(1)]}{int(match[1]) - 1}"
        return [module_site(before, "out"), module_site(block, "in")]
    if match is None and last is not None and name in ("norm", "ln_f", "final_layernorm"):
        return [module_site(last, "out")]
    return []


HOOKS = Layout(words="SGLang's forward hooks", recognise=holding(_PASS), read=_read_hooks)


# The dumper.

_FILE = re.compile(
    r"(?:.*/)?(?P<tags>(?=(?:[^/]*___)?(?:step|forward_pass_id)=\d{1,9}(?:___|\.))"
    r"(?=(?:[^/]*___)?rank=\d{1,6}(?:___|\.))[^/=]+=[^/]+)\.pt"
)
HOOKED = re.compile(
    r"non_intrusive__(?:(?P<path>.+)\.)?(?P<what>inputs|output)(?:\.(?P<port>[^.]+))?"
)
_INPUTS = {"input_ids": "model:in", "positions": "model:in.position_ids"}
_NUMBERS = ("step", "forward_pass_id", "rank", "dump_index")

_Tags = dict[str, str]


def _read_dumper(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    steps: dict[int, dict[int, list[tuple[str, _Tags]]]] = {}
    folders = set()
    for name in folder.names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        folders.add(name.rpartition("/")[0])
        tags: _Tags = dict(tag.partition("=")[::2] for tag in match["tags"].split("___"))
        if not all(tags.get(key, "0").isdecimal() for key in _NUMBERS):
            raise DumpError(
                f"{', '.join(_NUMBERS)} are not numbers in its name", where=folder.where(name)
            )
        step = int(tags.get("step") or tags["forward_pass_id"])
        steps.setdefault(step, {}).setdefault(int(tags["rank"]), []).append((name, tags))
    if len(folders) > 1:
        raise DumpError(
            "the folder holds several dumps",
            where=" and ".join(sorted(folders)[:2]),
            hint="name one of them",
        )
    ranks = {rank for files in steps.values() for rank in files}
    check_ranks(steps, str(folder.path))
    names: set[str] = set()
    num_sites = 0
    first = min(steps)  # a server that warmed up before the dump does not begin at 0
    for step in sorted(steps):
        tensors: list[Dumped] = []
        for rank in sorted(steps[step]):
            files = sorted(steps[step][rank], key=lambda file: int(file[1].get("dump_index", "0")))
            values = [(tags, _value_of(folder, name, ranks, notes)) for name, tags in files]
            names |= {tags.get("name", "") for tags, _ in values}
            tensors += _dumped(values, rank, rules, notes, str(folder.path))
        num_sites += len(tensors)
        where = folder.where(steps[step][min(ranks)][0][0])
        yield DumpedForward(where=where, tensors=tensors, number=step - first)
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


def _value_of(folder: DumpFolder, name: str, ranks: set[int], notes: Notes) -> torch.Tensor | None:
    value = folder.value(name)
    meta: Any = {}
    if isinstance(value, dict) and value.keys() >= {"value", "meta"}:
        value, meta = value["value"], value["meta"]
    size = meta.get("world_size") if isinstance(meta, dict) else None
    if isinstance(size, int):
        check_ranks({0: ranks}, folder.where(name), size)
    if isinstance(value, torch.Tensor):
        return value
    notes.add("were no tensors, and left out")
    return None


def _dumped(
    values: list[tuple[_Tags, torch.Tensor | None]],
    rank: int,
    rules: Rules | None,
    notes: Notes,
    where: str,
) -> Iterator[Dumped]:
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
            raise DumpError(
                f"a forward holds {tensor.numel()} sequences at once",
                where=where,
                hint="send one request at a time while dumping",
            )
        target = None if rules is None else rules.place(name, inside="", tags=tags)
        if target is not None:
            yield Dumped(site=target.site, tensor=tensor, rank=rank)
        elif match := HOOKED.fullmatch(name):
            parts = modules.setdefault((match["path"] or "", match["what"]), {})
            if (match["port"] or "0") in parts:
                notes.add("of a module's later calls were left out")
            parts.setdefault(match["port"] or "0", tensor)
        elif name in _INPUTS:
            yield Dumped(site=_INPUTS[name], tensor=tensor, rank=rank)
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


DUMPER = Layout(
    words="SGLang's dumper", recognise=holding(_FILE), read=_read_dumper, takes_map=True
)
