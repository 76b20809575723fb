"""Other tools' files that keep this in a tensor's place: norm, mean and extremes, or a checksum.

Such a tensor is recorded as a capture with ``--store stats`` records one, and judged as that: its
statistics show that two are apart, and never that they are near. Sums are what the tool made them:
most add up in the tensor's own dtype (Plan.statistics_off). A number that was printed is known to
half a unit of its last digit.

``ATB``: ``statistic.csv`` of Ascend's transformer boost (MindIE), a line a tensor. ``TORCHTITAN``:
``rank_N_activations.log`` of its numerics debugging, and torch's DebugMode in that style: blocks of
``[NAME/op_0_mm]``, ``Shape: ..., Dtype: ...``, ``L2 norm: ...``. ``TRANSFORMER_ENGINE``: the lines
``LAYER_activation_std iteration=000100 value=1.00`` of nvidia-dlfw-inspect, which tell no shape and
no dtype; an iteration is the step of its number. ``COMPARED``: what msprobe (CSV) or SGLang (JSON
lines) wrote of two dumps, of which each side's statistics are a run.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from divergence.domains.importing.dumped import Dumped, DumpedForward, Notes, leaves, module_site
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.layouts.sglang import HOOKED
from divergence.domains.importing.rules import Rules
from divergence.errors import DumpError
from divergence.numerics.formats import FORMATS
from divergence.numerics.summary import Summary
from divergence.outside import csv_rows
from divergence.run.foreign import LINES, DumpFolder
from divergence.run.manifest import digest_text
from divergence.run.record import Apart

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "double": "float64",
    "long": "int64",
    "int": "int32",
    "boolean": "bool",
}
_NUMBER = re.compile(r"(?:tensor\()?\s*([^\s,()]+).*")
_ONE_SIDED = "the dump holds statistics, no tensors: they can show a fault, and no health"


def kept_of(
    site: str,
    shape: Sequence[Any] | None,
    dtype: str,
    *,
    rank: int = 0,
    low: Any = None,
    high: Any = None,
    mean: Any = None,
    norm: Any = None,
    std: Any = None,
    num_nan: int = 0,
    checksum: str | None = None,
) -> Dumped | None:
    """A tensor of which only this is known; numbers may be text. None where its dtype or shape is
    none. ``shape``: None where it is not known; then extremes say nothing of norms."""
    name = dtype.removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    sizes = [size for size in shape or () if type(size) is int and 0 <= size < 1 << 40]
    if name not in FORMATS or len(sizes) != len(shape or ()):
        return None
    tensor = torch.empty(tuple(sizes), dtype=FORMATS[name].torch_dtype, device="meta")
    given = (low, high, mean, norm, std)
    values = [number(value) for value in given]
    summary = _summary(None if shape is None else tensor.numel(), *values, num_nan=num_nan)
    parts = (1.0, 1.0, 1.0, math.sqrt(max(1, tensor.numel())), 1.0)
    pairs = zip(given, parts, strict=True)
    texts = tuple((value, part) for value, part in pairs if isinstance(value, str))
    return Dumped(
        site=site,
        tensor=tensor,
        rank=rank,
        checksum=checksum,
        summary=summary,
        texts=texts if tensor.is_floating_point() else (),
    )


def number(value: Any) -> float | None:
    """A number, also of text (``tensor(1.0e-02)``, ``nan``, ``True``); None for what is none."""
    if isinstance(value, int | float):
        return float(value)
    match = _NUMBER.fullmatch(str(value).strip()) if value is not None else None
    if match is None:
        return None
    try:
        return float({"True": "1", "False": "0"}.get(match[1], match[1]))
    except ValueError:
        return None


def with_digits(tensors: Sequence[Dumped]) -> list[Dumped]:
    """Say of each what the digits of its numbers leave open, where they are written as text: half a
    unit of the last one. One program wrote all. Where its numbers have as many decimals that is its
    format; else they have as many digits as the longest (zeros at the end may be left out)."""
    texts = [text for dumped in tensors for text, _ in _texts(dumped)]
    plain = {text for text in texts if "e" not in text}
    decimals = {len(text.partition(".")[2]) for text in plain}
    fixed = decimals.pop() if len(decimals) == 1 and len(plain) > 1 else None
    longest = max((len(_DIGITS.sub("", text).lstrip("0")) for text in texts), default=1)

    def half_unit(text: str, part: float) -> float:
        if fixed is not None and "e" not in text:
            return 0.5 * 10.0**-fixed / part
        return 0.5 * 10.0 ** (1 - max(1, longest)) * abs(float(text)) / part

    def off(dumped: Dumped) -> float:
        size = (dumped.summary.rms or dumped.summary.absmax or 0.0) if dumped.summary else 0.0
        units = (half_unit(*text) for text in _texts(dumped))
        return max(units, default=0.0) / size if size else 0.0

    return [replace(dumped, off=off(dumped)) for dumped in tensors]


_DIGITS = re.compile(r"e.*|[^0-9]")


def _texts(dumped: Dumped) -> Iterator[tuple[str, float]]:
    """Those of finite numbers, without what stands around them."""
    for text, part in dumped.texts:
        match = _NUMBER.fullmatch(text.strip())
        if match is not None and (value := number(match[1])) is not None and math.isfinite(value):
            yield match[1].lower(), part


def _summary(
    numel: int | None,
    low: float | None,
    high: float | None,
    mean: float | None,
    norm: float | None,
    std: float | None,
    *,
    num_nan: int,
) -> Summary:
    given = (low, high, mean, norm, std)
    count = max(1, numel or 1)
    if norm is None and std is not None and mean is not None:
        shrunk = std if numel is None else std * math.sqrt((count - 1) / count)
        norm = math.sqrt(count) * math.hypot(shrunk, mean)
    # of nan and inf one is known, however many there are
    num_nan = max(num_nan, int(any(value is not None and math.isnan(value) for value in given)))
    num_posinf, num_neginf = int(high == math.inf), int(low == -math.inf)
    broken = bool(num_nan or num_posinf or num_neginf)
    finite = [None if value is None or not math.isfinite(value) else value for value in given]
    low, high, mean = finite[:3] if numel is not None else (None, None, finite[2])
    rms = None if broken or norm is None or not math.isfinite(norm) else norm / math.sqrt(count)
    ends = [abs(end) for end in (low, high) if end is not None]
    return Summary(
        min=low,
        max=high,
        mean=None if broken else mean,
        rms=rms,
        absmax=max(ends) if len(ends) == 2 else rms,
        num_nan=num_nan,
        num_posinf=num_posinf,
        num_neginf=num_neginf,
    )


_NOTHING = _summary(None, None, None, None, None, None, num_nan=0)


def _forwards(
    folder: DumpFolder,
    rows: Iterable[tuple[Any, str, Dumped | None]],
    notes: Notes,
    *,
    numbered: bool = False,
    trains: bool = False,
) -> Iterator[DumpedForward]:
    """Yield the forwards of rows (forward, where, tensor), in order whatever they are called, or
    ``numbered`` by that."""
    notes.say(_ONE_SIDED)
    forwards: dict[Any, list[Dumped]] = {}
    places: dict[Any, str] = {}
    for key, where, kept in rows:
        if kept is not None and kept.checksum is None and kept.summary == _NOTHING:
            kept = None
        notes.add("without a number, dtype or shape were left out", int(kept is None))
        if kept is not None:
            forwards.setdefault(key, []).append(kept)
            places.setdefault(key, where)
    if not forwards:
        raise DumpError(
            "no line holds a tensor's statistics",
            where=str(folder.path),
            hint='of ATB: dump with "task": "all"; docs/importing.md shows what is read',
        )
    rest = iter(with_digits([kept for key in sorted(forwards) for kept in forwards[key]]))
    for index, key in enumerate(sorted(forwards)):
        tensors = list(itertools.islice(rest, len(forwards[key])))
        yield DumpedForward(
            where=places[key],
            tensors=tensors,
            number=key if numbered else index,
            numbered=numbered,
            trains=trains,
        )


def _table(folder: DumpFolder, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, fields) of each line of a CSV file."""
    where = folder.where(name)
    for number, row in csv_rows(folder.lines(name), where=where):
        yield f"{where}, line {number}", {key.strip(): cell.strip() for key, cell in row.items()}


def _header(folder: DumpFolder, name: str) -> list[str]:
    try:
        line = next(iter(folder.lines(name)), b"").decode("utf-8-sig", "replace")
    except DumpError:
        return []
    return [field.strip() for field in next(csv.reader([line]), [])]


def told_by(
    row: Mapping[str, Any], low: str, high: str, mean: str, norm: str = "", std: str = ""
) -> dict[str, Any]:
    """A row's statistics under the names by which ``kept_of`` takes them."""
    columns = {"low": low, "high": high, "mean": mean, "norm": norm, "std": std}
    return {name: row.get(column) for name, column in columns.items() if column}


def _sizes(text: str) -> list[int]:
    return [int(size) for size in re.findall(r"\d+", text)]


# ATB's statistic.csv.

_ATB = ("Device and PID", "Execution Count", "Op Name", "Op Id", "Input/Output", "Index", "Dtype")


def _is_atb(folder: DumpFolder) -> bool:
    return any(
        name.rpartition("/")[2] == "statistic.csv" and set(_ATB) <= set(_header(folder, name))
        for name in folder.names
    )


def _read_atb(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    """Read a file of each device and round. Its lines are in no order: several threads write
    them."""
    devices: dict[str, str] = {}
    lines: list[tuple[tuple[float, ...], int, str, Dumped | None]] = []
    for name in folder.names:
        if name.rpartition("/")[2] != "statistic.csv":
            continue
        for where, row in _table(folder, name):
            device, _, process = row["Device and PID"].partition("_")
            if devices.setdefault(device, process) != process:
                raise DumpError(
                    f"the folder holds dumps of several processes on device {device}",
                    where=where,
                    hint="name one of them",
                )
            ids = [int(number) for number in row["Op Id"].split("_")]
            path = ".".join([*row["Op Name"].split("/"), *map(str, ids)])
            side = "in" if row["Input/Output"].lower().startswith("in") else "out"
            port = side if row["Index"].partition("_")[0] == "0" else f"{side}.{row['Index']}"
            kept = kept_of(
                module_site(path, port),
                _sizes(row.get("Shape", "")),
                row["Dtype"],
                rank=list(devices).index(device),
                **told_by(row, "Min", "Max", "Mean", "Norm"),
            )
            # what enters an operator comes before what is inside it, what leaves it behind that
            place = *ids, -1 if side == "in" else math.inf
            lines.append((place, int(row["Execution Count"]), where, kept))
    lines.sort(key=lambda line: line[0])
    rows = ((number, where, kept) for _, number, where, kept in lines)
    yield from _forwards(folder, rows, notes, numbered=True)


# torchtitan's log, and DebugMode's.

_OPERATOR = re.compile(r"\[(?P<name>[^\[\]]+)\]")
_FIELD = re.compile(
    r"(Shape|Dtype|L2 norm|Min|Max|Mean|Phase|Hash): ((?:torch\.Size\()?\[[^\]]*\]\)?|[^,]+)"
)
_LOG = re.compile(r"(?:.*/)?(?:rank_(?P<rank>\d{1,6})_)?[^/]*\.log")


def _head(folder: DumpFolder, name: str) -> list[str]:
    """The first lines of a log."""
    lines = itertools.islice(folder.lines(name), 40)
    return [line.decode("utf-8", "replace").strip() for line in lines]


def _is_titan(folder: DumpFolder) -> bool:
    heads = [_head(folder, name) for name in folder.names if _LOG.fullmatch(name)]
    return any(
        any(map(_OPERATOR.fullmatch, head)) and any(line.startswith("Shape:") for line in head)
        for head in heads
    )


def _read_titan(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    def blocks(name: str) -> Iterator[tuple[str, str, dict[str, str]]]:
        title, fields, where = "", dict[str, str](), ""
        for line in folder.lines(name):
            text = line.decode("utf-8", "replace").strip()
            if match := _OPERATOR.fullmatch(text):
                if title:
                    yield title, where, fields
                title, fields, where = match["name"], {}, folder.place()
            fields |= dict(_FIELD.findall(text))
        if title:
            yield title, where, fields

    def rows() -> Iterator[tuple[Any, str, Dumped | None]]:
        for name in folder.names:
            match = _LOG.fullmatch(name)
            if match is None:
                continue
            for title, where, fields in blocks(name):
                if fields.get("Phase", "forward") != "forward":
                    notes.add("of backward passes were left out")
                    continue
                site, rank = module_site(title.replace("/", "."), "out"), int(match["rank"] or 0)
                shape, dtype = _sizes(fields.get("Shape", "")), fields.get("Dtype", "")
                figures = told_by(fields, "Min", "Max", "Mean", "L2 norm")
                yield 0, where, kept_of(site, shape, dtype, rank=rank, **figures)

    yield from _forwards(folder, rows(), notes)


# Transformer Engine's statistics.

_LINE = re.compile(
    r"(?:.* - )?(?P<name>\S+)_(?P<what>activation|gradient|weight|output|wgrad|dgrad)_"
    r"(?P<statistic>min|max|mean|std|l1_norm|l2_norm|\S+)\s+iteration=(?P<number>\d+)\s+"
    r"value=(?P<value>\S+)\s*"
)
_PORTS = {"activation": "in", "output": "out"}
_STATISTICS = {"min": "low", "max": "high", "mean": "mean", "std": "std", "l2_norm": "norm"}


def _is_engine(folder: DumpFolder) -> bool:
    names = (name for name in folder.names if name.endswith(".log"))
    return any(_LINE.fullmatch(line) for name in names for line in _head(folder, name))


def _read_engine(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    def rows() -> Iterator[tuple[Any, str, Dumped | None]]:
        numbers: dict[tuple[int, int, str, str], dict[str, str]] = {}
        files = [name for name in folder.names if name.endswith(".log")]
        for rank, name in enumerate(files):
            for line in folder.lines(name):
                match = _LINE.fullmatch(line.decode("utf-8", "replace"))
                if match is None or match["what"] not in _PORTS:
                    notes.add("of gradients and weights were left out", int(match is not None))
                    continue
                key = _STATISTICS.get(match["statistic"])
                if key is not None:
                    place = (int(match["number"]), rank, match["name"], _PORTS[match["what"]])
                    numbers.setdefault(place, {})[key] = match["value"]
        for (iteration, rank, path, port), values in numbers.items():
            figures: dict[str, Any] = values  # by the names of kept_of's parameters
            kept = kept_of(module_site(path, port), None, "bfloat16", rank=rank, **figures)
            yield iteration, folder.where(files[rank]), kept

    yield from _forwards(folder, rows(), notes, numbered=True, trains=True)


# What msprobe or SGLang wrote of two dumps.

_ROW = re.compile(
    r"(?:Module|Cell)\.(?P<path>.+)\.[^.]+\.forward\.(?P<call>\d{1,9})\."
    r"(?P<side>input|kwargs|output)(?:\.(?:0\.)?(?P<index>.+))?"
)
_COLUMNS = {"NPU Name", "Bench Name", "Result"}
_KINDS = ("config", "comparison", "rank_info", "input_ids")
_NAMES = {"a": ("Bench", "baseline"), "b": ("NPU", "target")}


def _is_compared(folder: DumpFolder) -> bool:
    return any(
        (name.endswith(".csv") and set(_header(folder, name)) >= _COLUMNS)
        or (name.endswith(LINES) and folder.first_fields(name).get("type") in _KINDS)
        for name in folder.names
    )


def _read_compared(
    folder: DumpFolder, rules: Rules | None, notes: Notes, *, side: str
) -> Iterator[DumpedForward]:
    notes.say(
        "its distances, and what two sides' norms, means and extremes show, are judged anew, "
        "whatever it passed; the dumps themselves tell more"
    )

    def rows() -> Iterator[tuple[Any, str, Dumped | None]]:
        for name in folder.names:
            if name.endswith(".csv"):
                yield from _compared_rows(folder, name, _NAMES[side][0], notes)
        for item, where in folder.objects(*LINES):
            if not isinstance(item, dict) or item.get("type") not in ("comparison", "skip"):
                continue
            own_name = item.get(_NAMES[side][1])
            stats = own_name.get("stats") if isinstance(own_name, dict) else None
            if not isinstance(own_name, dict) or not isinstance(stats, dict):
                notes.add("that the comparison skipped were left out")
                continue
            location = item.get("location")
            step = location.get("step") if isinstance(location, dict) else None
            match = HOOKED.fullmatch(name := str(item.get("name", "")))
            path, what, port = (name, "output", None) if match is None else match.groups()
            port = f".{port}" if port and port != "0" else ""
            shape = own_name.get("shape")
            # its JSON has no nan and no inf: a number that stands nowhere is one of them
            stats = {name: math.nan if value is None else value for name, value in stats.items()}
            dumped = kept_of(
                module_site(path or ".", f"{'in' if what == 'inputs' else 'out'}{port}"),
                shape if isinstance(shape, list) else None,
                str(own_name.get("dtype")),
                **told_by(stats, "min", "max", "mean", std="std"),
            )
            if dumped is not None:
                dumped = replace(dumped, apart=_told(item, _relative_of(item)))
            yield step if isinstance(step, int) else 0, where, dumped

    yield from _forwards(folder, rows(), notes)


def _compared_rows(
    folder: DumpFolder, name: str, side: str, notes: Notes
) -> Iterator[tuple[Any, str, Dumped | None]]:
    seen: dict[str, dict[str, tuple[list[int], dict[str, str], str]]] = {}
    for where, row in _table(folder, name):
        match = _ROW.fullmatch(row[f"{side} Name"])
        if match is None:
            notes.add("of operators, parameters or backward passes were left out")
            continue
        call = int(match["call"]) + 1
        path = match["path"] if call == 1 else f"{match['path']}#{call}"
        port = "out" if match["side"] == "output" else "in"
        shape = _sizes(row[f"{side} Tensor Shape"])
        seen.setdefault(f"{path}:{port}", {})[match["index"] or "0"] = (shape, row, where)
    for place, parts in seen.items():
        path, _, port = place.rpartition(":")
        path, _, call_ = path.partition("#")
        for named, (shape, row, where) in leaves(dict(parts), port, lambda v: isinstance(v, tuple)):
            code = row.get(f"{side} MD5", row.get(f"{side.upper()} MD5", ""))
            dumped = kept_of(
                module_site(path, named, int(call_ or 1)),
                shape,
                row[f"{side} Dtype"],
                **told_by(row, *(f"{side} {name}" for name in ("min", "max", "mean", "l2norm"))),
                checksum=f"crc32:{code}" if re.fullmatch("[0-9a-f]{8}", code) else None,
            )
            if dumped is not None:
                dumped = replace(dumped, apart=_told(row, _euclidean(row)))
            yield 0, where, dumped


def _euclidean(row: dict[str, str]) -> float | None:
    """Read msprobe's ``EucDist``, ‖x - y‖, by the norm of the bench's tensor."""
    distance, norm = (number(row.get(name)) for name in ("EucDist", "Bench l2norm"))
    if distance is None or not norm:
        return None
    digits = len(_DIGITS.sub("", row["EucDist"].lower()).lstrip("0"))
    return distance * (1 - 0.5 * 10.0 ** (1 - max(1, digits))) / norm


def _relative_of(item: dict[str, Any]) -> float | None:
    """Read SGLang's ``rel_diff``, Σ(x - y)² / (Σx² + Σy²) in float64."""
    diff = item.get("diff")
    relative = number(diff.get("rel_diff")) if isinstance(diff, dict) else None
    sizes = []
    for side in ("baseline", "target"):
        stats = item[side].get("stats") if isinstance(item.get(side), dict) else None
        values = [number(stats.get(name)) for name in ("mean", "std")] if stats else []
        sizes.append(math.hypot(*values) if values and None not in values else 0.0)  # type: ignore[arg-type]  # numbers
    if relative is None or not sizes[0] or not relative > _CANCELLED:
        return None
    return math.sqrt(relative * (1 + (sizes[1] / sizes[0]) ** 2))


_CANCELLED = 1e-14
"""Of 1 minus a similarity in float64: what is smaller may be its rounding."""
_NORMS_OFF = 2.0**-7
"""Norms may be rounded to bfloat16."""


def _told(row: Any, distance: float | None) -> Apart | None:
    """The distance, by the row that tells it: both sides' records are known by that as of one
    comparison."""
    if distance is None or not 0 <= distance < math.inf:
        return None
    text = json.dumps(row, sort_keys=True, default=str)
    return Apart(compared=digest_text(text), least=distance * (1 - _NORMS_OFF))


ATB = Layout("ATB's statistic.csv", _is_atb, _read_atb)
TORCHTITAN = Layout("torchtitan's or DebugMode's log", _is_titan, _read_titan)
TRANSFORMER_ENGINE = Layout("Transformer Engine's statistics", _is_engine, _read_engine)
_COMPARISON = "msprobe's or SGLang's comparison, its"
COMPARED_A = Layout(f"{_COMPARISON} first side", _is_compared, partial(_read_compared, side="a"))
COMPARED_B = Layout(f"{_COMPARISON} second side", _is_compared, partial(_read_compared, side="b"))
