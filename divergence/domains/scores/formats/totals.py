"""Scores without documents: what tools write of a task as a whole.

``LM_EVAL_RESULTS``: ``results_<date>.json`` of lm-evaluation-harness without ``--log_samples``.
``EVALSCOPE_REPORT``: ``reports/<model>/<dataset>.json``; its scores have four digits, and subsets
that are aggregates (``is_aggregate``) are counted once, as what they are made of.
``OPENCOMPASS_SUMMARY``: ``summary/summary_<date>.csv`` or ``.txt``: a column a model, which is
named behind the file, ``FILE#MODEL``; in percent, and without the number of documents.
``EVERY_EVAL``: every-eval-ever's records (evaluation_results), and its JSON lines of single
documents, which are paired as any others.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any

from divergence.domains.scores.formats.lm_eval import RESULTS, settings_of
from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    number_of,
    table_of,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, SeriesName, Total
from divergence.errors import DumpError, UsageError
from divergence.recording.prompts import Prompt
from divergence.run.foreign import LINES, DumpFolder

_FIRST = 50
"""Files of a folder by which its format is known."""


def _put(
    reading: ReadRequest,
    name: SeriesName,
    file: str,
    settings: dict[str, str],
    value: Any,
    *,
    error: Any = None,
    num: Any = None,
    higher: bool | None = None,
) -> None:
    """A score as a whole, if it is asked for and is one."""
    score, _ = number_of(value)
    if score is None or isinstance(value, bool):
        return
    series = reading.series(name, file, settings, higher=higher)
    if series is not None:
        count = num if type(num) is int and num > 0 else None
        series.total = Total(score, error if type(error) in (int, float) else None, count)


def _tables(
    folder: DumpFolder, *keys: str, most: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, object) of each JSON file that has all of these keys."""
    for name in folder.names[:most]:
        try:
            value = table_of(folder.json(name)) if name.endswith(".json") else {}
        except DumpError:
            continue
        if value.keys() >= {*keys}:
            yield name, value


# lm-eval's results.


def _lm_eval_names(folder: DumpFolder) -> list[str]:
    names = [name for name in folder.names if RESULTS.fullmatch(PurePosixPath(name).name)]
    return names or [name for name, _ in _tables(folder, "results", "configs", most=_FIRST)]


def _read_lm_eval(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    name = max(_lm_eval_names(folder), key=lambda name: PurePosixPath(name).name)
    report, file = table_of(folder.json(name)), folder.where(name)
    groups = table_of(report.get("groups")).keys() | {
        task for task, parts in table_of(report.get("group_subtasks")).items() if parts
    }
    for task, results in table_of(report.get("results")).items():
        if task in groups:  # the mean of tasks that stand there, too
            continue
        scores = table_of(results)
        num = table_of(table_of(report.get("n-samples")).get(task)).get("effective")
        better = table_of(table_of(report.get("higher_is_better")).get(task))
        for key, value in scores.items():
            metric, _, filter_name = key.partition(",")
            if metric.endswith("_stderr") or metric in ("alias", "name", "sample_len"):
                continue
            error = scores.get(f"{metric}_stderr,{filter_name}", scores.get(f"{metric}_stderr"))
            named = SeriesName(task, "" if filter_name == "none" else filter_name, metric)
            higher = bool(better[metric]) if metric in better else None
            settings = settings_of(task, report, {})
            _put(reading, named, file, settings, value, error=error, num=num, higher=higher)
    config = table_of(report.get("config"))
    arguments = config.get("model_args")
    evaluation.model = report.get("model_name") or config.get("model")
    if isinstance(arguments, dict):
        evaluation.model = arguments.get("pretrained") or evaluation.model
    version = report.get("lm_eval_version")
    evaluation.tool = f"lm-eval {version}" if version else None


# evalscope's reports.


_REPORT = ("dataset_name", "model_name", "metrics")


def _read_report(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    for name, report in _tables(folder, *_REPORT):
        file = folder.where(name)
        evaluation.model = evaluation.model or report.get("model_name")
        for metric in map(table_of, report.get("metrics") or ()):
            for category in map(table_of, metric.get("categories") or ()):
                for part in map(table_of, category.get("subsets") or ()):
                    if part.get("is_aggregate"):
                        continue
                    task = f"{report['dataset_name']}_{text_of(part.get('name'))}"
                    named = SeriesName(task, "", text_of(metric.get("name")))
                    _put(reading, named, file, {}, part.get("score"), num=part.get("num"))


# opencompass's summary.

_HEAD = ["dataset", "version", "metric", "mode"]


def _summary(folder: DumpFolder, name: str) -> list[list[str]]:
    """The table of a file, head first; empty where it has none."""
    if not name.endswith((".csv", ".txt")):
        return []
    try:
        texts = [line.decode("utf-8-sig", "replace") for line in folder.lines(name)]
    except DumpError:
        return []
    table: list[list[str]] = []
    for row in csv.reader(texts):
        fields = [field.strip() for field in row]
        if fields[:4] == _HEAD:
            table = [fields]
        elif table and len(fields) == len(table[0]):
            table.append(fields)
        elif table and fields and name.endswith(".csv"):
            raise DumpError(
                "the row has not as many cells as the first one",
                where=folder.place(),
                hint="it may be half written",
            )
        elif table:
            break
    return table if len(table) > 1 else []


def _read_summary(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    tables = {name: table for name in folder.names if (table := _summary(folder, name))}
    name = max(tables, key=lambda name: (PurePosixPath(name).stem, name.endswith(".csv")))
    head, *rows = tables[name]
    models, file = head[4:], folder.where(name)
    column = evaluation.column
    if column is None and len(models) == 1:
        (column,) = models
    if column not in models:
        pair = [f"'{file}#{model}'" for model in (*models, *models)[:2]]
        raise UsageError(
            f"the summary has {len(models)} models, and none is named"
            if column is None
            else f"the summary has no model {column!r}",
            where=file,
            hint=f"divergence scores {' '.join(pair)}; there: {', '.join(models)}",
        )
    evaluation.model = column
    for row in rows:
        value = row[4 + models.index(column)]
        if value in ("", "-"):
            continue
        try:
            score = float(value) / 100
        except ValueError as error:
            raise DumpError(f"{row[0]}: {value!r} is no score", where=file) from error
        settings = {"task version": row[1]}
        named = SeriesName(row[0], row[3], row[2])
        _put(reading, named, f"{file}#{column}", settings, score)


# every-eval-ever's records.


_RECORD = ("evaluation_results", "model_info")


def _is_instances(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(LINES)]
    fields = {"evaluation_name", "sample_id", "evaluation"}
    return bool(names) and fields <= folder.first_fields(names[0]).keys()


def _read_records(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    instances = _is_instances(folder)
    for name, record in _tables(folder, *_RECORD):
        library = table_of(record.get("eval_library"))
        evaluation.model = evaluation.model or table_of(record.get("model_info")).get("name")
        evaluation.tool = f"{library.get('name')} {library.get('version')}"
        for result in () if instances else map(table_of, record.get("evaluation_results") or ()):
            details, metric = (table_of(result.get(k)) for k in ("score_details", "metric_config"))
            doubt = table_of(details.get("uncertainty"))
            _put(
                reading,
                SeriesName(text_of(result.get("evaluation_name")), "", "score"),
                folder.where(name),
                {},
                details.get("score"),
                error=table_of(doubt.get("standard_error")).get("value"),
                num=doubt.get("num_samples"),
                higher=not metric.get("lower_is_better"),
            )
    if instances:
        _read_instances(folder, reading, evaluation)


def _read_instances(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    for name in folder.names:
        if not name.endswith(LINES):
            continue
        seen: dict[str, int] = {}
        for number, item in folder.rows(name):
            where = f"{folder.where(name)}, line {number}"
            scored = table_of(item.get("evaluation")) if isinstance(item, dict) else {}
            if "score" not in scored:
                raise DumpError(
                    "the line is no document of every-eval-ever",
                    where=where,
                    hint="it needs evaluation.score; write it by its converter",
                )
            task = text_of(item.get("evaluation_name"))
            series = reading.series(SeriesName(task, "", "score"), folder.where(name), {})
            if series is None:
                continue
            asked, output = table_of(item.get("input")), table_of(item.get("output"))
            document = text_of(item.get("sample_hash") or item.get("sample_id"))
            repeat = seen[document] = seen.get(document, -1) + 1
            row = reading.row(
                document,
                scored["score"],
                number,
                repeat=repeat,
                prompt=asked.get("formatted") or asked.get("raw"),
                target=asked.get("reference"),
                answer=output.get("raw"),
                fields=item.get("metadata"),
            )
            series.rows.append(row)
            evaluation.model = evaluation.model or text_of(item.get("model_id"))


def _prompts(
    folder: DumpFolder, name: str, places: Collection[int]
) -> Iterator[tuple[int, Prompt]]:
    for number, item in folder.rows(name) if name.endswith(LINES) else ():
        asked = table_of(item.get("input"))
        given = asked.get("formatted") or asked.get("raw")
        if number in places and given:
            yield number, Prompt(text=text_of(given))


LM_EVAL_RESULTS = ResultFormat(
    words="lm-evaluation-harness's results",
    recognise=lambda folder: bool(_lm_eval_names(folder)),
    read=_read_lm_eval,
    documents="lm_eval --log_samples",
)
EVALSCOPE_REPORT = ResultFormat(
    words="an evalscope report",
    recognise=lambda folder: any(_tables(folder, *_REPORT, most=_FIRST)),
    read=_read_report,
    documents="the folder that holds reviews/",
)
OPENCOMPASS_SUMMARY = ResultFormat(
    words="opencompass's summary",
    recognise=lambda folder: any(_summary(folder, name) for name in folder.names[:_FIRST]),
    read=_read_summary,
    documents="opencompass --dump-eval-details",
)
EVERY_EVAL = ResultFormat(
    words="every-eval-ever",
    recognise=lambda folder: any(_tables(folder, *_RECORD, most=_FIRST)) or _is_instances(folder),
    read=_read_records,
    prompts=_prompts,
    documents="its JSON lines of single documents",
)
