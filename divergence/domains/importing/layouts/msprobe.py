"""mindstudio-probe (msprobe) 26, task ``tensor``, levels L0 and mix: ``stepN/rankR/dump.json`` (or
``procPID`` where one process ran) beside ``dump_tensor_data/``, a file a tensor.

``dump.json`` names modules ``Module.PATH.CLASS.forward.CALL``, each with ``input_args``,
``input_kwargs`` and ``output``. It is written when a step ends. Its ``dump_data_dir`` is not
followed: data lies beside it. Operators (``Functional.``, ``Tensor.``, ...), backward passes and
parameters are counted and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from divergence.domains.importing.building import (
    Dumped,
    DumpedForward,
    Notes,
    Rules,
    check_ranks,
    checked_name,
    leaves,
    module_site,
)
from divergence.domains.importing.layouts import Layout, holding
from divergence.errors import DumpError
from divergence.run.foreign import DumpFolder

_DUMP = re.compile(
    r"(?:(?P<before>.*)/)?step(?P<step>\d{1,9})/(?P<rank>rank\d*|proc\d+)/dump\.json"
)
_DATA = re.compile(r"(?P<folder>(?:.*/)?step\d{1,9}/(?:rank\d*|proc\d+))/dump_tensor_data/[^/]+")
_MODULE = re.compile(r"(?:Module|Cell)\.(?P<path>.+)\.[^.]+\.forward\.(?P<call>\d{1,9})")


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    for step, ranks in sorted(_steps(folder).items()):
        tensors = [
            tensor
            for rank in sorted(ranks)
            for tensor in _tensors(folder, ranks[rank], rank, notes)
        ]  # fmt: skip
        yield DumpedForward(where=folder.where(ranks[min(ranks)]), tensors=tensors, number=step)


def _steps(folder: DumpFolder) -> dict[int, dict[int, str]]:
    steps: dict[int, dict[int, str]] = {}
    written = set()
    before = set()
    for name in folder.names:
        match = _DUMP.fullmatch(name)
        if match is None:
            continue
        written.add(name.removesuffix("/dump.json"))
        before.add(match["before"])
        digits = match["rank"].removeprefix("rank")
        rank = int(digits) if digits.isdecimal() else 0
        ranks = steps.setdefault(int(match["step"]), {})
        if rank in ranks or len(before) > 1:
            raise DumpError(
                "the folder holds several dumps", where=f"{ranks.get(rank, '')} and {name}",
                hint="name one of them",
            )  # fmt: skip
        ranks[rank] = name
    data = {match["folder"] for name in folder.names if (match := _DATA.fullmatch(name))}
    if cut := sorted(data - written):
        raise DumpError(
            "there are tensors without dump.json: the dump is half written",
            where=folder.where(cut[0]), hint="dump again, and let the step end (debugger.step())",
        )  # fmt: skip
    check_ranks(steps, str(folder.path))
    return steps


def _tensors(folder: DumpFolder, name: str, rank: int, notes: Notes) -> Iterator[Dumped]:
    described, where = folder.json(name), folder.where(name)
    data = described.get("data") if isinstance(described, dict) else None
    if not isinstance(data, dict):
        raise DumpError("the file is no dump.json of msprobe", where=where)
    if described.get("task") != "tensor":
        raise DumpError(
            f"the dump holds {described.get('task')}, no tensors", where=where,
            hint='dump with "task": "tensor"',
        )  # fmt: skip
    first: dict[str, int] = {}
    rows: list[tuple[tuple[int, int, int], str, int, str, Any]] = []
    for number, (full, entry) in enumerate(data.items()):
        match = _MODULE.fullmatch(checked_name(full))
        if match is None or not isinstance(entry, dict):
            what = "backward passes" if ".backward" in full else "operators, not of modules,"
            notes.add(f"of {what} were left out")
            continue
        notes.add("were parameters, and left out", len(entry.get("parameters") or {}))
        path, call = match["path"], int(match["call"]) + 1
        depth = path.count(".")
        for count in range(1, depth + 2):
            first.setdefault(".".join(path.split(".")[:count]), number)
        # a module is named when it ends; its inputs come before those of the modules inside it
        begin = first[path] if call == 1 else number
        for port, leaf in _ports(entry):
            place = (begin, 0, depth) if port.startswith("in") else (number, 1, 0)
            rows.append((place, path, call, port, leaf))
    files: set[str] = set()
    for _, path, call, port, leaf in sorted(rows, key=lambda row: row[0]):
        file = leaf["data_name"]
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.(?:pt|npy)", file):
            raise DumpError(f"{path} names no file of the dump: {str(file)[:80]!r}", where=where)
        if file in files:  # a small file named often would be a large run
            raise DumpError(f"{file} is named twice", where=where)
        files.add(file)
        held = f"{name.removesuffix('dump.json')}dump_tensor_data/{file}"
        tensor = folder.value(held)
        if not isinstance(tensor, torch.Tensor):
            raise DumpError("the file holds no tensor", where=folder.where(held))
        yield Dumped(site=module_site(path, port, call), tensor=tensor, rank=rank)


def _ports(entry: dict[str, Any]) -> list[tuple[str, Any]]:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, dict) and "data_name" in value

    args, kwargs = entry.get("input_args") or [], entry.get("input_kwargs") or {}
    given = {**dict(enumerate(args)), **kwargs}
    output = entry.get("output")
    if isinstance(output, list) and len(output) == 1:  # of one value it makes a list of one
        output = output[0]
    return [*leaves(given, "in", is_leaf), *leaves(output, "out", is_leaf)]


MSPROBE = Layout(words="msprobe", recognise=holding(_DUMP, _DATA), read=read)
