"""A table: CSV, TSV or JSON lines with ``id`` and ``score``, one answer a row.

Further columns, all optional: ``group`` (the cluster; ``--cluster`` names another column),
``repeat``, ``task``, ``metric``, ``prompt``, ``target``, ``answer``. A row whose score is empty is
an answer that was not scored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, ScoreRow, SeriesName
from divergence.errors import DumpError
from divergence.outside import csv_rows
from divergence.recording.prompts import Prompt
from divergence.run.foreign import LINES, DumpFolder

_TABLES = {".csv": ",", ".tsv": "\t"}


def _names(folder: DumpFolder) -> list[str]:
    return [name for name in folder.names if PurePosixPath(name).suffix in (*_TABLES, *LINES)]


def recognise(folder: DumpFolder) -> bool:
    names = _names(folder)
    try:
        return bool(names) and {"id", "score"} <= set(next(_rows(folder, names[0]))[1])
    except (DumpError, StopIteration):
        return False


def _rows(folder: DumpFolder, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    suffix = PurePosixPath(name).suffix
    if suffix not in _TABLES:
        for number, item in folder.rows(name):
            if not isinstance(item, dict):
                raise DumpError(
                    "the line is no object", where=f"{folder.where(name)}, line {number}"
                )
            yield number, item
        return
    yield from csv_rows(folder.lines(name), delimiter=_TABLES[suffix], where=folder.where(name))


def read(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    alone = len(_names(folder)) == 1
    for name in _names(folder):
        for number, item in _rows(folder, name):
            where = f"{folder.where(name)}, line {number}"
            if item.get("id") in (None, "") or "score" not in item:
                raise DumpError(
                    "the row has no id, or no score",
                    where=where,
                    hint="columns: id, score, perhaps group, repeat, task",
                )
            default = "scores" if alone else PurePosixPath(name).stem
            metric = text_of(item.get("metric") or "score")
            named = SeriesName(text_of(item.get("task") or default), "", metric)
            series = reading.series(named, folder.where(name), {}, where=where)
            if series is not None:
                series.rows.append(_row(item, number, where, reading))


def _row(item: Mapping[str, Any], number: int, where: str, reading: ReadRequest) -> ScoreRow:
    given = {name: value for name, value in item.items() if value != ""}  # a cell that is empty
    try:
        repeat = int(item.get("repeat") or 0)
        if repeat != float(item.get("repeat") or 0):
            raise ValueError("a fraction")
    except (OverflowError, TypeError, ValueError) as error:
        raise DumpError("the repeat is no number", where=where) from error
    row = reading.row(
        item["id"],
        _number(item["score"]),
        number,
        repeat=repeat,
        prompt=given.get("prompt"),
        target=given.get("target"),
        answer=item.get("answer"),
        fields=given,
    )
    if reading.cluster is None and given.get("group") is not None:
        row.cluster = text_of(given["group"])
    return row


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word) if word else None
    except ValueError:
        return value


def prompts(folder: DumpFolder, name: str, places: Collection[int]) -> Iterator[tuple[int, Prompt]]:
    """The column ``prompt``."""
    for number, item in _rows(folder, name):
        if number in places and item.get("prompt"):
            yield number, Prompt(text=text_of(item["prompt"]))


PLAIN = ResultFormat(words="a table of scores", recognise=recognise, read=read, prompts=prompts)
