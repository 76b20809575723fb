"""mindstudio-probe (msprobe) 26: ``stepN/rankR/dump.json`` (or ``procPID`` where
one process ran). Of the task ``tensor`` a file a tensor lies beside it in ``dump_tensor_data/``. Of
``statistics``, the default, the numbers stand in it: ``Max``, ``Min``; ``Mean`` and ``Norm``, added
up in the tensor's dtype; ``md5``, which is a crc32, or with ``xor`` that sum alone. ``nan_check``
tells no more than ``is_nan`` of a module.

A captured graph (ACLGraph) leaves no dump.json: ``stepN/pidP/dump_tensor_data/TAG.pt``, where TAG
is ``Module.PATH.CLASS.CALL.output.0`` or an operator's; nothing tells their order.

``dump.json`` names modules ``Module.PATH.CLASS.forward.CALL``, each with ``input_args``,
``input_kwargs`` and ``output``. It is written when a step ends. Its ``dump_data_dir`` is not
followed: data lies beside it. Backward passes and parameters are counted and left out; so are
operators (``Functional.linear.3.forward``), but where level L1, as of every ``nan_check``, has them
alone.
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
    checked_name,
    leaves,
    module_site,
)
from divergence.domains.importing.layouts import Layout, holding
from divergence.domains.importing.layouts.statistics import kept_of, told_by
from divergence.domains.importing.rules import Rules
from divergence.errors import DumpError
from divergence.run.foreign import DumpFolder
from divergence.run.site import natural_key

_DUMP = re.compile(
    r"(?:(?:(?P<before>.*)/)?step(?P<step>\d{1,9})/)?"
    r"(?:(?P<rank>rank\d*|proc\d+|pid\d+)/)?dump\.json"
)
"""Also of one step, or one rank's, by itself."""
_DATA = re.compile(
    r"(?P<folder>(?:.*/)?step\d{1,9}/(?:rank\d*|proc\d+|pid\d+))/(?:dump_)?tensor_data/[^/]+"
)
_GRAPH = re.compile(
    r"(?:(?P<before>.*)/)?step(?P<step>\d{1,9})/(?P<rank>rank\d*|pid\d+)/(?:dump_)?tensor_data/"
    r"Module\.(?P<path>.+)\.(?!forward\.)[^.]+\.(?P<call>\d{1,9})\.(?P<side>input|input_kwargs|output)"
    r"(?:\.(?P<port>.+))?\.pt"
)
_MODULE = re.compile(r"(?:Module|Cell)\.(?P<path>.+)\.[^.]+\.forward\.(?P<call>\d{1,9})")
_OPERATOR = re.compile(r"(?P<path>[^.]+\..+)\.(?P<call>\d{1,9})\.forward")


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    if not any(name.endswith("dump.json") for name in folder.names):
        graphs = {name: match for name in folder.names if (match := _GRAPH.fullmatch(name))}
        if graphs:
            yield from _read_graphs(folder, graphs, notes)
            return
    for step, ranks in sorted(_steps(folder).items()):
        tensors = [
            tensor
            for rank in sorted(ranks)
            for tensor in _tensors(folder, ranks[rank], rank, notes)
        ]
        yield DumpedForward(where=folder.where(ranks[min(ranks)]), tensors=tensors, number=step)


def _read_graphs(
    folder: DumpFolder, graphs: dict[str, re.Match[str]], notes: Notes
) -> Iterator[DumpedForward]:
    """Read captured graphs, whose files alone say what they are."""
    notes.add("of operators were left out", len(folder.names) - len(graphs))
    steps: dict[int, dict[int, dict[tuple[str, int, str], dict[str, str]]]] = {}
    processes = {(match["before"], match["rank"]) for match in graphs.values()}
    if len({before for before, _ in processes}) > 1 or (
        len(processes) > 1 and any("pid" in rank for _, rank in processes)
    ):
        raise DumpError(
            "the folder holds dumps of several processes",
            where=str(folder.path),
            hint="name one of them, or rename their folders to rank0, rank1, ...",
        )
    for name in sorted(graphs, key=natural_key):
        match = graphs[name]
        digits = match["rank"].removeprefix("rank")
        rank = int(digits) if digits.isdecimal() else 0
        path = "" if match["path"] == "__root__" else match["path"]
        place = path, int(match["call"]) + 1, "out" if match["side"] == "output" else "in"
        ports = steps.setdefault(int(match["step"]), {}).setdefault(rank, {})
        ports.setdefault(place, {})[match["port"] or "0"] = name
    check_ranks(steps, str(folder.path))
    for step, ranks in sorted(steps.items()):
        tensors = []
        for rank, places in ranks.items():
            for (path, call, side), parts in places.items():
                for port, name in leaves(parts, side, lambda value: isinstance(value, str)):
                    tensor = folder.value(name)
                    if not isinstance(tensor, torch.Tensor):
                        raise DumpError("the file holds no tensor", where=folder.where(name))
                    site = module_site(path, port, call)
                    tensors.append(Dumped(site=site, tensor=tensor, rank=rank))
        first = next(name for name, match in graphs.items() if int(match["step"]) == step)
        yield DumpedForward(where=folder.where(first), tensors=tensors, number=step)


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
        digits = (match["rank"] or "").removeprefix("rank")
        rank = int(digits) if digits.isdecimal() else 0
        ranks = steps.setdefault(int(match["step"] or 0), {})
        if rank in ranks or len(before) > 1:
            raise DumpError(
                "the folder holds several dumps",
                where=f"{ranks.get(rank, '')} and {name}",
                hint="name one of them",
            )
        ranks[rank] = name
    data = {match["folder"] for name in folder.names if (match := _DATA.fullmatch(name))}
    if cut := sorted(data - written):
        raise DumpError(
            "there are tensors without dump.json: the dump is half written",
            where=folder.where(cut[0]),
            hint="dump again, and let the step end (debugger.step())",
        )
    check_ranks(steps, str(folder.path))
    return steps


def _tensors(folder: DumpFolder, name: str, rank: int, notes: Notes) -> Iterator[Dumped]:
    described, where = folder.json(name), folder.where(name)
    data = described.get("data") if isinstance(described, dict) else None
    if not isinstance(data, dict):
        raise DumpError("the file is no dump.json of msprobe", where=where)
    first: dict[str, int] = {}
    rows: list[tuple[tuple[int, int, int], str, int, str, Any]] = []
    pattern = _MODULE if any(map(_MODULE.fullmatch, data)) else _OPERATOR
    if pattern is _OPERATOR:
        notes.say("the dump names no module (level L1): its places are operators, by their calls")
    for number, (full, entry) in enumerate(data.items()):
        match = pattern.fullmatch(checked_name(full))
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
            if "is_nan" in entry and port.startswith("out"):
                leaf = {**leaf, "is_nan": entry["is_nan"]}
            place = (begin, 0, depth) if port.startswith("in") else (number, 1, 0)
            rows.append((place, path, call, port, leaf))
    files: set[str] = set()
    if rows and all("data_name" not in leaf for *_, leaf in rows):
        notes.say(
            "the dump holds statistics, no tensors: they can show a fault, and no health "
            '(tensors: "task": "tensor")'
        )
    for _, path, call, port, leaf in sorted(rows, key=lambda row: row[0]):
        if "data_name" not in leaf:
            kept = _kept(module_site(path, port, call), leaf, rank)
            notes.add("without a number were left out", int(kept is None))
            if kept is not None:
                yield kept
            continue
        file = leaf["data_name"]
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.(?:pt|npy)", file):
            raise DumpError(f"{path} names no file of the dump: {str(file)[:80]!r}", where=where)
        if file in files:  # a small file named often would be a large run
            raise DumpError(f"{file} is named twice", where=where)
        files.add(file)
        dumped_file = f"{name.removesuffix('dump.json')}dump_tensor_data/{file}"
        tensor = folder.value(dumped_file)
        if not isinstance(tensor, torch.Tensor):
            raise DumpError("the file holds no tensor", where=folder.where(dumped_file))
        yield Dumped(site=module_site(path, port, call), tensor=tensor, rank=rank)


def _kept(site: str, leaf: dict[str, Any], rank: int) -> Dumped | None:
    code = leaf.get("md5")
    checksum = None
    if isinstance(code, str) and re.fullmatch(r"(?:0x)?[0-9a-f]{1,64}", code):
        checksum = f"xor:{code[2:]}" if code.startswith("0x") else f"crc32:{code}"
    keys = ("Max", "Min", "Mean", "Norm", "is_nan")
    if checksum is None and all(leaf.get(key) is None for key in keys):
        return None
    shape = leaf["shape"] if isinstance(leaf["shape"], list) else [None]
    return kept_of(
        site,
        shape,
        str(leaf["dtype"]),
        rank=rank,
        **told_by(leaf, "Min", "Max", "Mean", "Norm"),
        num_nan=int(leaf.get("is_nan") == 1),
        checksum=checksum,
    )


def _ports(entry: dict[str, Any]) -> list[tuple[str, Any]]:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, dict) and ("data_name" in value or "shape" in value)

    args, kwargs = entry.get("input_args") or [], entry.get("input_kwargs") or {}
    given = {**dict(enumerate(args)), **kwargs}
    output = entry.get("output")
    if isinstance(output, list) and len(output) == 1:  # of one value it makes a list of one
        output = output[0]
    return [*leaves(given, "in", is_leaf), *leaves(output, "out", is_leaf)]


MSPROBE = Layout(words="msprobe", recognise=holding(_DUMP, _DATA), read=read)
