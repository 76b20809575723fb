"""The formats, a module each, known by name.

A module has ``NAME``, ``recognise(folder)``, ``read(folder, options)``, which gives an Evaluation,
and ``prompts(series, places)``, which gives some rows' prompts back as text or chat messages. Files
are read through ``folder``, which refuses links, code and cut files.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any, Protocol, cast

from divergence.errors import DumpError, UsageError
from divergence.evaluations.formats.reading import ReadRequest
from divergence.evaluations.rows import Evaluation, Series, SeriesName
from divergence.facts import sentence
from divergence.importing.files import DumpFolder
from divergence.outside import read_as
from divergence.recording.prompts import Prompt

FORMATS = ("inspect", "evalscope", "opencompass", "lm-eval", "plain")
"""In the order in which ``auto`` tries them; ``plain`` takes any table with its columns."""


class ResultFormat(Protocol):
    """A module of this folder."""

    NAME: str
    """What to call it in words."""

    def recognise(self, folder: DumpFolder) -> bool:
        """Does the folder look like it?"""

    def read(self, folder: DumpFolder, reading: ReadRequest) -> Evaluation:
        """Everything in it. Raises DumpError."""

    def prompts(self, series: Series, places: Collection[int]) -> dict[int, Prompt]:
        """What the model was given for the rows at these places, as far as the format holds it."""


def format_named(name: str) -> ResultFormat:
    """The module. ``inspect`` has another module's name in Python, so its own ends in ``_ai``."""
    word = {"inspect": "inspect_ai"}.get(name, name.replace("-", "_"))
    module: Any = import_module(f"divergence.evaluations.formats.{word}")
    return cast(ResultFormat, module)


def read(path: str, reading: ReadRequest, *, format: str = "auto") -> Evaluation:
    """The evaluation that lies there."""
    folder = DumpFolder(path)
    names = FORMATS if format == "auto" else (format,)
    for name in names:
        reader = format_named(name)
        # a field of another type than its tool writes may come anywhere, and is no fault of ours
        hint = "--format NAME, if another tool wrote it"
        with read_as(reader.NAME, where=str(folder.path), hint=hint):
            if format != "auto" or reader.recognise(folder):
                evaluation = reader.read(folder, reading)
                evaluation.format = name
                break
    else:
        raise DumpError(
            "no results of an evaluation were recognised", where=str(folder.path),
            hint=(
                *(["unpack the .gz files"] if any(n.endswith(".gz") for n in folder.names) else []),
                "lm-eval writes them with --log_samples; docs/scores.md has all formats",
                "or write a table: JSON lines or CSV with id and score",
            ),
        )  # fmt: skip
    if not any(series.rows for series in evaluation.series):
        if reading.refused:
            told = ", ".join(map(str, list(reading.refused)[:12]))
            raise UsageError("nothing has the task, metric and filter asked for",
                             where=str(folder.path), hint=f"there are: {told}")  # fmt: skip
        raise DumpError("nothing that is scored was found", where=str(folder.path),
                        hint="; ".join(map(sentence, evaluation.remarks)) or None)  # fmt: skip
    reading.refused.clear()
    # parts of one score, or two runs of it: one file alone would be taken for all
    files: dict[SeriesName, str] = {}
    for series in evaluation.series:
        first = files.setdefault(series.name, series.file)
        if first != series.file:
            raise DumpError(
                f"two files hold {series.name}: {first} and {series.file}", where=evaluation.path,
                hint="name one of them, or put the parts of one evaluation into one file",
            )  # fmt: skip
    return evaluation


def prompts_of(format: str, series: Series, places: Collection[int]) -> dict[int, Prompt]:
    """What the model was given for the rows at these places, as far as the format holds it. Raises
    DumpError."""
    reader = format_named(format)
    with read_as(reader.NAME, where=series.file):
        return reader.prompts(series, places)
