"""SGLang's forward hooks (--debug-tensor-dump-output-folder; srt/debug_utils/
tensor_dump_forward_hook.py): ``TP0_PP0_Rank0_pid1/Pass00000.pt``, a dict of outputs by module path,
of modules without children and of the model itself; of a batch its ``forward_batch_info``.

A pass is written inside the model's own hook, before that hook keeps the model's output. So what
the model and the modules after it returned (``model``, ``logits_processor``) lies in the next file,
and is put back here, unless the first file has it already (versions that write at the end).

Norms return (normed, residual): the residual is what entered the norm, the update of the sublayer
before it added. So ``layers.3.input_layernorm`` holds the input of block 3, which is the output of
block 2, and ``norm`` the output of the last one. A block itself (some versions keep it) returns
(update, residual): their sum is the hidden state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from divergence.errors import DumpError
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

NAME = "SGLang's forward hooks"
TAKES_MAP = False
_PASS = re.compile(
    r"(?:.*/)?(?P<folder>TP(?P<tp>\d{1,6})_PP(?P<pp>\d{1,6})_Rank\d{1,6}_pid\d+)"
    r"/Pass(?P<number>\d{1,9})\.pt"
)
_BATCH = ".forward_batch_info."
_FEEDS = {"input_ids": "in", "positions": "in.position_ids"}
_LAST = re.compile(r"(?:.+\.)?(?:logits_processor|lm_head)")


def recognise(folder: DumpFolder) -> bool:
    return any(_PASS.fullmatch(name) for name in folder.names)


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    passes = _passes(folder)
    shifted = not any(_late(_dict(folder, name)) for name in passes[0].values())
    for number, ranks in enumerate(passes):
        tensors: list[Dumped] = []
        where = folder.where(next(iter(ranks.values())))
        following = passes[number + 1] if shifted and number + 1 < len(passes) else {}
        for rank, name in ranks.items():
            held = _dict(folder, name)
            if shifted:
                held = {key: held[key] for key in held if key not in _late(held)}
            late = _late(_dict(folder, following[rank])) if rank in following else {}
            tensors += _tensors({**held, **late}, rank, where, notes)
        yield DumpedForward(where=where, tensors=tensors, number=number)


def _late(held: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the model, and of what follows it."""
    top = {key.partition(_BATCH)[0] for key in held if _BATCH in key}
    return {key: held[key] for key in held if key in top or _LAST.fullmatch(key)}


def _passes(folder: DumpFolder) -> list[dict[int, str]]:
    files: dict[tuple[int, int], dict[int, str]] = {}
    processes: dict[tuple[int, int], str] = {}
    for name in folder.names:
        match = _PASS.fullmatch(name)
        if match is None:
            continue
        place = int(match["pp"]), int(match["tp"])
        other = processes.setdefault(place, match["folder"])
        if other != match["folder"]:
            raise DumpError(
                "the folder holds dumps of several processes of one rank",
                where=f"{other} and {match['folder']}", hint="keep those of one start of it",
            )  # fmt: skip
        files.setdefault(place, {})[int(match["number"])] = name
    sizes = [max(place[axis] for place in files) + 1 for axis in (0, 1)]
    for pp in range(sizes[0]):
        for tp in range(sizes[1]):
            if (pp, tp) not in files:
                raise DumpError(f"the rank TP{tp} PP{pp} is missing", where=str(folder.path),
                                hint="copy the folders of all ranks together")  # fmt: skip
    num = max(max(numbers) for numbers in files.values()) + 1
    for place, numbers in files.items():
        if (missing := first_missing(numbers)) < num:
            raise DumpError(
                f"Pass{missing:05d}.pt is missing, of {num} passes",
                where=folder.where(processes[place]), hint="copy all files of the dump",
            )  # fmt: skip
    ranks = {place: place[0] * sizes[1] + place[1] for place in sorted(files)}
    return [{ranks[place]: files[place][n] for place in ranks} for n in range(num)]


def _dict(folder: DumpFolder, name: str) -> dict[str, Any]:
    held = folder.value(name)
    if not isinstance(held, dict):
        raise DumpError("the file holds no tensors by name", where=folder.where(name))
    return {str(key): value for key, value in held.items()}


def _tensors(held: dict[str, Any], rank: int, where: str, notes: Notes) -> Iterator[Dumped]:
    lengths = [v for k, v in held.items() if k.endswith(f"{_BATCH}seq_lens")]
    if any(isinstance(length, torch.Tensor) and length.numel() > 1 for length in lengths):
        raise DumpError(
            f"the pass holds {lengths[0].numel()} sequences at once", where=where,
            hint="send one request at a time while dumping",
        )  # fmt: skip
    blocks = [match for key in held if (match := BLOCK.match(key))]
    last = max(blocks, key=lambda match: int(match[1]))[0] if blocks else None
    given: set[str] = set()
    for key, value in held.items():
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
    for number, part in enumerate(parts):
        if not (is_pair and number and adds_residual(key)):
            yield module_site(path, f"out.{number}" if number else "out"), part, None
            continue
        yield module_site(path, "in"), part, None
        for site in _around(key, last):
            yield site, part, None


def _around(key: str, last: str | None) -> list[str]:
    """Sites of blocks that hold what enters a norm: the first of a block, or the last of all."""
    block, _, name = key.rpartition(".")
    match = BLOCK.fullmatch(block)
    if match is not None and name in ("input_layernorm", "ln_1", "attention_norm"):
        before = f"{block[: match.start(1)]}{int(match[1]) - 1}"
        return [module_site(block, "in"), module_site(before, "out")]
    if match is None and last is not None and name in ("norm", "ln_f", "final_layernorm"):
        return [module_site(last, "out")]
    return []
