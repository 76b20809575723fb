"""lm-evaluation-harness: ``samples_<task>_<date>.jsonl`` and ``results_<date>.json``.

``--log_samples`` writes them. A line is a document under one filter: ``doc_hash``, ``prompt_hash``
and ``target_hash`` say which, ``metrics`` names its scores, each of which is a field of its own.
Multiple choice has the log-likelihood of each choice in ``filtered_resps``. The task's name stands
in the file's name; of several dates of one task the newest is taken. Few-shot count and generation
settings stand in the results file beside it; without one, the generation settings come from the
requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    hashed,
    number_of,
    only_model,
    part_of,
    table_of,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, SeriesName
from divergence.errors import DumpError
from divergence.facts import fact
from divergence.recording.prompts import Prompt
from divergence.run.foreign import DumpFolder
from divergence.run.scores import lm_eval_requests

_SAMPLES = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
RESULTS = re.compile(r"results_(\d{4}-\d\d-\d\dT[\d.-]+)\.json")
_SETTINGS = (
    "num_fewshot repeats generation_kwargs description fewshot_config doc_to_text output_type "
    "target_delimiter fewshot_delimiter"
).split()
"""Of a task's configuration: what makes it another question."""


def recognise(folder: DumpFolder) -> bool:
    """Recognise it by name; a file of another name by its first line."""
    if any(_SAMPLES.fullmatch(PurePosixPath(name).name) for name in folder.names):
        return True
    if len(folder.names) != 1 or not folder.names[0].endswith(".jsonl"):
        return False
    return {"doc_id", "metrics", "filter"} <= set(folder.first_fields(folder.names[0]))


def read(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    results = _results(folder)
    for task, (date, name) in _samples(folder, evaluation).items():
        report = results.get(date) or (next(iter(results.values())) if len(results) == 1 else {})
        _task(folder, name, task, report, reading)
        series = reading.series_of(folder.where(name))
        effective = table_of(table_of(report.get("n-samples")).get(task)).get("effective")
        num_documents = max(
            (len({row.document for row in entry.rows}) for entry in series), default=effective
        )
        if isinstance(effective, int) and num_documents != effective:
            evaluation.incomplete = fact(
                "evaluations.other_number",
                task=task,
                num_documents=num_documents,
                expected=effective,
            )
        config = table_of(report.get("config"))
        evaluation.model = evaluation.model or config.get("model_source") or config.get("model")
        arguments = config.get("model_args")
        if isinstance(arguments, Mapping):
            evaluation.model = arguments.get("pretrained") or evaluation.model
        dtype = config.get("model_dtype")
        if isinstance(dtype, str):
            evaluation.dtype = evaluation.dtype or dtype.removeprefix("torch.")
        version = report.get("lm_eval_version")
        evaluation.tool = evaluation.tool or (f"lm-eval {version}" if version else None)


def _samples(folder: DumpFolder, result: Evaluation) -> dict[str, tuple[str, str]]:
    """The newest file of each task, by date."""
    files: dict[str, tuple[str, str]] = {}
    older = 0
    samples = [name for name in folder.names if _SAMPLES.fullmatch(PurePosixPath(name).name)]
    only_model(folder, samples, hint="name the folder of one of them")
    for name in folder.names:
        match = _SAMPLES.fullmatch(PurePosixPath(name).name)
        if match is None and len(folder.names) > 1:
            continue
        task, date = (match[1], match[2]) if match else (PurePosixPath(name).stem, "")
        older += task in files
        files[task] = max(files.get(task, ("", "")), (date, name))
    if older:
        result.remarks.append(fact("evaluations.older_files", num=older))
    return files


def _results(folder: DumpFolder) -> dict[str, dict[str, Any]]:
    """List, by date, the results files in the folder, or beside a single file of samples."""
    if folder.path.is_file():
        match = _SAMPLES.fullmatch(folder.path.name)
        beside = part_of(folder.path.parent, f"results_{match[2]}.json") if match else None
        if beside is None:
            return {}
        folder = DumpFolder(beside)
    return {
        match[1]: table_of(folder.json(name))
        for name in folder.names
        if (match := RESULTS.fullmatch(PurePosixPath(name).name))
    }


def _task(
    folder: DumpFolder, name: str, task: str, report: Mapping[str, Any], reading: ReadRequest
) -> None:
    seen: dict[tuple[str, str], dict[str, int]] = {}
    file = folder.where(name)
    settings: dict[str, str] | None = None
    better = table_of(table_of(report.get("higher_is_better")).get(task))
    for number, item in folder.rows(name):
        if not isinstance(item, dict) or not isinstance(item.get("metrics"), list):
            raise DumpError(
                "the line is no sample of lm-eval",
                where=f"{file}, line {number}",
                hint="write it by lm_eval --log_samples",
            )
        filter_name = text_of(item.get("filter") or "none")
        # equal documents of one data set are told apart by their order
        key = text_of(item.get("doc_hash") or hashed(item.get("doc")))
        order = seen.setdefault((filter_name, key), {})
        place = order.setdefault(text_of(item.get("doc_id")), len(order))
        document = f"{key}#{place}" if place else key
        # (text, log-likelihood) of each choice; None unless every request was judged
        judged: list[tuple[str, float]] | None = None
        if isinstance(item.get("arguments"), dict | list) and len(item["arguments"]) > 1:
            asked_of = [(text, value) for _, text, value in lm_eval_requests(item, file)]
            judged = [(text, value) for text, value in asked_of if value is not None]
            judged = judged if len(judged) == len(asked_of) else None
        ways: dict[bool, tuple[tuple[float, ...] | None, str | None]] = {}
        row = reading.row(
            document,
            None,
            number,
            prompt=item.get("prompt_hash"),
            target=item.get("target_hash"),
            fields=item.get("doc"),
        )
        for metric in dict.fromkeys(map(text_of, item["metrics"])):
            if settings is None:
                settings = settings_of(task, report, item)
            named = SeriesName(task, "" if filter_name == "none" else filter_name, metric)
            higher = bool(better[metric]) if metric in better else None
            series = reading.series(named, file, settings, higher=higher)
            if series is None:
                continue
            way = metric == "acc_norm"
            if way not in ways:  # what this metric ranks the choices by, and the answer by that
                given = item.get("filtered_resps")
                choices, answer = None, hashed(given) if given else None
                if judged is not None:
                    choices = tuple([value * weight(metric, text) for text, value in judged])
                    answer = str(choices.index(max(choices)))
                ways[way] = choices, answer
            choices, answer = ways[way]
            score, why = number_of(item.get(metric))
            series.rows.append(replace(row, score=score, why=why, answer=answer, choices=choices))


def settings_of(task: str, report: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, str]:
    """Read the settings of a task, whose first line is ``item``."""
    config = table_of(table_of(report.get("configs")).get(task))
    settings = (
        {"task version": text_of(table_of(report.get("versions")).get(task))} if report else {}
    )
    shots = table_of(report.get("n-shot")).get(task, config.get("num_fewshot"))
    if shots is not None:
        settings["few-shot"] = text_of(shots)
    if "generation_kwargs" in config:
        settings["generation settings"] = json.dumps(config["generation_kwargs"], sort_keys=True)
    elif table_of(report.get("config")).get("gen_kwargs"):
        settings["generation settings"] = json.dumps(report["config"]["gen_kwargs"], sort_keys=True)
    arguments = item.get("arguments")
    for request in arguments.values() if isinstance(arguments, dict) else ():
        for value in request.values() if isinstance(request, dict) else ():
            if isinstance(value, dict):  # what the first request asked of a generator
                settings.setdefault("generation settings", json.dumps(value, sort_keys=True))
    if config:
        rest = {key: config.get(key) for key in _SETTINGS}
        settings["task settings"] = hashed(json.dumps(rest, sort_keys=True, default=str))
    if report:
        chat = report.get("chat_template_sha") or report.get("chat_template")
        settings["chat template"] = text_of(chat or "none")
        settings["system prompt"] = text_of(report.get("system_instruction_sha") or "none")
    return settings


def weight(metric: str, text: str) -> float:
    """Tell by what the metric multiplies a choice's log-likelihood before it ranks choices."""
    return 1 / max(len(text.strip()), 1) if metric == "acc_norm" else 1.0


def prompts(folder: DumpFolder, name: str, places: Collection[int]) -> Iterator[tuple[int, Prompt]]:
    """The contexts, as they were rendered."""
    for number, (context, _) in asked(folder, name, places).items():
        if context:
            yield number, Prompt(text=context)


def asked(
    folder: DumpFolder, name: str, places: Collection[int]
) -> dict[int, tuple[str, list[str]]]:
    """Context and continuations of some rows. Blanks at the end of what choices follow belong to
    the choices, as lm-eval has it."""
    by_place: dict[int, tuple[str, list[str]]] = {}
    for number, item in folder.rows(name):
        if len(by_place) == len(places):
            break
        if number not in places:
            continue
        given = list(lm_eval_requests(item, folder.where(name)))
        context = given[0][0] if given else ""
        if any(value is None for _, _, value in given):
            by_place[number] = context, []
            continue
        bare = context.rstrip()
        by_place[number] = bare, [context[len(bare) :] + text for _, text, _ in given]
    return by_place


LM_EVAL = ResultFormat(
    words="lm-evaluation-harness", recognise=recognise, read=read, prompts=prompts
)
