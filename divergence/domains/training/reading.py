"""Curves from files: JSON lines, CSV, trainer_state.json, TensorBoard's event files.

A row is one logged step: a step under one of several usual names, and numbers. Kept are the
losses and the norm of the gradients; a row without either is passed over. A step that is logged
twice (a training that was resumed) counts with its last value, and that is noted.

Files are data: nothing in them is executed, and a field of a wrong type is an error with its line.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from divergence.errors import DumpError, UsageError, first_line
from divergence.facts import Fact, fact
from divergence.outside import (
    MAX_TEXT_BYTES,
    csv_rows,
    inside,
    json_value,
    lines,
    opened,
    read_as,
    read_bytes,
)

STATE = "trainer_state.json"
EVENTS = "tfevents"
_STEPS = ("step", "global_step", "iteration", "iter", "steps")
_NAMES = {
    "loss": "loss",
    "train_loss": "loss",
    "training_loss": "loss",
    "lm_loss": "loss",
    "grad_norm": "grad_norm",
    "gradient_norm": "grad_norm",
    "global_grad_norm": "grad_norm",
    "eval_loss": "eval_loss",
    "val_loss": "eval_loss",
    "validation_loss": "eval_loss",
    "test_loss": "eval_loss",
}


class Curves(msgspec.Struct, kw_only=True):
    """The curves of one file: metric → step → value."""

    path: str
    metrics: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    remarks: list[Fact] = msgspec.field(default_factory=list)


def is_losses(path: str) -> bool:
    """Is this a file or folder of losses, and no run? By names alone; nothing is opened."""
    if "://" in path:
        return False
    place = Path(path).expanduser()
    if place.is_dir():
        if (place / "manifest.json").exists():
            return False
        return (place / STATE).is_file() or bool(_events(place))
    named = place.suffix.lower() in (".csv", ".jsonl", ".tsv") or EVENTS in place.name
    return named or (place.suffix.lower() == ".json" and place.is_file())


def metric_of(name: str) -> str | None:
    """``train/loss``, ``Loss``, ``lm loss`` → ``loss``; None for what is not compared."""
    whole = re.sub(r"[\s./-]+", "_", name.strip().lower())
    last = re.sub(r"[\s.-]+", "_", name.strip().lower().rpartition("/")[2])
    group = name.strip().lower().rpartition("/")[0]
    if last == "loss" and re.search(r"eval|val|test", group):
        return "eval_loss"
    return _NAMES.get(whole) or _NAMES.get(last)


def read_losses(path: str) -> Curves:
    """The curves at ``path``. Raises UsageError where there is no such file, or TensorBoard is
    needed and absent, and DumpError for a file that holds no loss or is damaged."""
    place = Path(path).expanduser()
    if not place.exists():
        raise UsageError(f"there is no file {path}", hint="check the path")
    curves = Curves(path=path)
    if place.is_dir() and (place / STATE).exists():
        place = inside(place, STATE)
    readers = {".json": _state, ".csv": _table, ".tsv": _table}
    events = place.is_dir() or EVENTS in place.name
    reader = _scalars if events else readers.get(place.suffix.lower(), _lines)
    _take(curves, reader(place), where=path)
    if not curves.metrics.get("loss"):
        others = ", ".join(curves.metrics) or "none of them"
        raise DumpError(
            "no losses were found",
            where=path,
            hint=f"rows of step and loss are needed ({others} found): JSON lines, CSV, "
            f"{STATE}, or TensorBoard's events",
        )
    return curves


Row = tuple[str, Mapping[str, Any]]
"""Where it stands, and its fields by name."""


def _take(curves: Curves, rows: Iterable[Row], *, where: str) -> None:
    twice = unnumbered = 0
    for number, (at, fields) in enumerate(rows):
        values = {
            metric: fields[name]
            for name in fields
            if (metric := metric_of(str(name))) is not None and fields[name] not in (None, "")
        }
        if not values:
            continue
        given = {str(name).strip().lower(): value for name, value in fields.items()}
        name = next((key for key in _STEPS if given.get(key) not in (None, "")), None)
        unnumbered += name is None
        step = number if name is None else _whole(given[name], f"{where}, {at}", name)
        for metric, value in values.items():
            curve = curves.metrics.setdefault(metric, {})
            twice += step in curve
            curve[step] = _number(value, f"{where}, {at}", metric)
    if unnumbered:
        curves.remarks.append(fact("training.rows_without_step", num_rows=unnumbered))
    if twice:
        curves.remarks.append(fact("training.repeated_steps", num_values=twice))
    curves.metrics = {name: dict(sorted(curve.items())) for name, curve in curves.metrics.items()}


def _lines(path: Path) -> Iterable[Row]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        at = f"line {number}"
        text = line.decode("utf-8", "replace").encode()
        row = json_value(text, where=f"{path}, {at}", hint="one object a line")
        if not isinstance(row, dict):
            raise DumpError(f"{at} is no JSON object", where=str(path))
        yield at, row


def _table(path: Path) -> Iterable[Row]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    for number, row in csv_rows(lines(path), delimiter=delimiter, where=str(path), whole=False):
        yield f"line {number}", row


def _state(path: Path) -> Iterable[Row]:
    """``log_history`` of transformers' Trainer; a list of rows is taken too."""
    state = json_value(read_bytes(path), where=str(path))
    rows = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DumpError(
            "it has no log_history, a list of rows",
            where=str(path),
            hint=f"the {STATE} of a checkpoint has one",
        )
    for number, row in enumerate(rows):
        if "train_runtime" not in row:  # the summary at the end: a mean over all steps
            yield f"log_history[{number}]", row


def _scalars(place: Path) -> Iterable[Row]:
    """TensorBoard's event files, a file or a folder of them, through its own reader. Raises
    UsageError without the package."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise UsageError(
            "event files are read with tensorboard, which is not installed",
            where=str(place),
            hint='pip install "divergence-debug[tensorboard]", or export the scalar as CSV',
        ) from error
    # TensorBoard reads whatever is called so, to any length that a record is said to have
    total = 0
    for path in _events(place) if place.is_dir() else [place]:
        with opened(inside(place, path.name) if place.is_dir() else path) as file:
            total += os.fstat(file.fileno()).st_size
    if total > MAX_TEXT_BYTES:
        raise DumpError(f"{total:,} bytes are more than a curve takes", where=str(place))
    everything = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1}
    try:
        events = EventAccumulator(str(place), size_guidance=everything)
        events.Reload()
        tags = events.Tags()
    except Exception as error:  # a damaged file: whatever its reader raises
        raise DumpError(
            f"the event files cannot be read: {first_line(error)}", where=str(place)
        ) from error
    for tag in tags["scalars"]:
        for event in events.Scalars(tag):
            yield f"{tag} at step {event.step}", {"step": event.step, tag: event.value}
    for tag in tags["tensors"]:  # as TensorFlow 2 writes a scalar
        for event in events.Tensors(tag):
            # of the shape alone: one number may be said to fill any
            if any(dim.size != 1 for dim in event.tensor_proto.tensor_shape.dim):
                continue
            with read_as("TensorBoard", where=str(place)):
                value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                yield f"{tag} at step {event.step}", {"step": event.step, tag: float(value.item())}


def _events(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if EVENTS in path.name]


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise DumpError(f"{name} is {type(value).__name__}, not a number", where=where)
    try:
        return float(value)  # also "nan" and "inf"
    except (ValueError, OverflowError) as error:
        raise DumpError(f"{name} is {str(value)[:40]!r}, not a number", where=where) from error


def _whole(value: Any, where: str, name: str) -> int:
    number = _number(value, where, name)
    if not math.isfinite(number) or number != int(number):
        raise DumpError(f"{name} is {str(value)[:40]!r}, not a whole number", where=where)
    return int(number)
