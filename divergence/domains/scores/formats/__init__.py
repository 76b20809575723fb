"""The formats, a module each: what lies in a folder becomes an Evaluation."""

from __future__ import annotations

import os
from collections.abc import Collection

from divergence.domains.scores.formats.evalscope import EVALSCOPE
from divergence.domains.scores.formats.inspect_ai import INSPECT
from divergence.domains.scores.formats.lm_eval import LM_EVAL
from divergence.domains.scores.formats.opencompass import OPENCOMPASS
from divergence.domains.scores.formats.plain import PLAIN
from divergence.domains.scores.formats.reading import ReadRequest, text_of
from divergence.domains.scores.formats.totals import (
    EVALSCOPE_REPORT,
    EVERY_EVAL,
    LM_EVAL_RESULTS,
    OPENCOMPASS_SUMMARY,
)
from divergence.domains.scores.rows import Evaluation, Series, SeriesName
from divergence.errors import DumpError, UsageError
from divergence.facts import fact, sentence
from divergence.outside import read_as
from divergence.recording.prompts import Prompt
from divergence.run.foreign import DumpFolder

FORMATS = {
    "inspect": INSPECT,
    "evalscope": EVALSCOPE,
    "opencompass": OPENCOMPASS,
    "lm-eval": LM_EVAL,
    "every-eval-ever": EVERY_EVAL,
    "lm-eval-results": LM_EVAL_RESULTS,
    "evalscope-report": EVALSCOPE_REPORT,
    "opencompass-summary": OPENCOMPASS_SUMMARY,
    "plain": PLAIN,
}
"""In the order in which ``auto`` tries them; ``plain`` takes any table with its columns."""


def read(path: str, reading: ReadRequest, *, format: str = "auto") -> Evaluation:
    """The evaluation that lies there."""
    file, _, column = path.rpartition("#")
    named = bool(file) and os.path.exists(file) and not os.path.exists(path)
    folder = DumpFolder(file if named else path)
    evaluation = Evaluation(
        path=path if named else str(folder.path), format=format, column=column if named else None
    )
    for name in FORMATS if format == "auto" else (format,):
        form = FORMATS[name]
        # a field of another type than its tool writes may come anywhere, and is no fault of ours
        hint = "--format NAME, if another tool wrote it"
        with read_as(form.words, where=evaluation.path, hint=hint):
            if format != "auto" or form.recognise(folder):
                evaluation.format = name
                form.read(folder, reading, evaluation)
                break
    else:
        raise DumpError(
            "no results of an evaluation were recognised",
            where=evaluation.path,
            hint=(
                *(["unpack the .gz files"] if any(n.endswith(".gz") for n in folder.names) else []),
                "docs/scores.md has all formats; lm-eval writes documents with --log_samples",
                "or write a table: JSON lines or CSV with id and score",
            ),
        )
    evaluation.series = reading.series_of()
    evaluation.model = None if evaluation.model is None else text_of(evaluation.model)
    evaluation.remarks += [fact(code, num=n) for code, n in sorted(reading.left_out.items())]
    if not any(series.rows or series.total for series in evaluation.series):
        if reading.refused:
            there = ", ".join(map(str, list(reading.refused)[:12]))
            raise UsageError(
                "nothing has the task, metric and filter asked for",
                where=evaluation.path,
                hint=f"there are: {there}",
            )
        raise DumpError(
            "nothing that is scored was found",
            where=evaluation.path,
            hint="; ".join(map(sentence, evaluation.remarks)) or None,
        )
    reading.clear()
    # parts of one score, or two runs of it: one file alone would be taken for all
    files: dict[SeriesName, str] = {}
    for series in evaluation.series:
        first = files.setdefault(series.name, series.file)
        if first != series.file:
            raise DumpError(
                f"two files hold {series.name}: {first} and {series.file}",
                where=evaluation.path,
                hint="name one of them, or put the parts of one evaluation into one file",
            )
    return evaluation


def prompts_of(format: str, series: Series, places: Collection[int]) -> dict[int, Prompt]:
    """Return what the model was given for the rows at these places, as far as the format holds it.
    Raises DumpError."""
    form, folder = FORMATS[format], DumpFolder(series.file)
    with read_as(form.words, where=series.file):
        return dict(form.prompts(folder, folder.names[0], places))
