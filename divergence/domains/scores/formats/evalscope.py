"""evalscope: ``reviews/<model>/<benchmark>_<subset>.jsonl``, beside ``configs/task_config.yaml``.

A line is one answer: ``sample_score`` holds its scores by metric and its status. Answers to one
question share ``group_id``, and ``generation_index`` is the repeat; older versions have no
``generation_index`` and are read as one answer a question. A status that is not usable (a judge
that failed) is no score of 0: the answer is left out, as evalscope leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    chat_of,
    files_in,
    number_of,
    only_model,
    part_of,
    root_of,
    table_of,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, ScoreRow, SeriesName
from divergence.errors import DumpError
from divergence.facts import fact
from divergence.outside import check_value, read_as, read_bytes
from divergence.recording.prompts import Prompt
from divergence.run.foreign import DumpFolder

_USABLE = ("success", "fallback", "degraded")
"""evalscope.constants.ScoreStatus.is_usable."""
_MAX_UNUSABLE = 1_000_000
_MAX_SETTINGS_BYTES, _MAX_SETTINGS = 1 << 18, 100_000
"""Of the settings, which have some kilobytes: YAML is slow to read, and its parts may be shared."""


def recognise(folder: DumpFolder) -> bool:
    names = files_in(folder, "reviews", ".jsonl")
    return bool(names) and "sample_score" in folder.first_fields(names[0])


def read(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    names = files_in(folder, "reviews", ".jsonl")
    only_model(folder, names, hint="name one of them: FOLDER/reviews/MODEL/FILE.jsonl")
    settings: dict[Path | None, dict[str, str]] = {}
    for name in names:
        root = root_of(folder, name, "reviews")
        if root not in settings:
            settings[root] = _settings(root, evaluation)
        _task(folder, name, settings[root], reading)


def _task(folder: DumpFolder, name: str, settings: dict[str, str], reading: ReadRequest) -> None:
    task, file = PurePosixPath(name).stem, folder.where(name)
    unusable: list[ScoreRow] = []
    for number, item in folder.rows(name):
        sample = item.get("sample_score") if isinstance(item, dict) else None
        score = sample.get("score") if isinstance(sample, dict) else None
        if not isinstance(sample, dict) or not isinstance(score, dict):
            raise DumpError(
                "the line is no review of evalscope",
                where=f"{file}, line {number}",
                hint="take the folder that holds reviews/",
            )
        row = _row(item, sample, score, number, reading)
        status = text_of(score.get("status") or "success")
        if status not in _USABLE:
            unusable.append(replace(row, why=fact("evaluations.status", status=status[:80])))
            continue
        values = score.get("value")
        for metric, value in values.items() if isinstance(values, dict) else ():
            series = reading.series(SeriesName(task, "", text_of(metric)), file, settings)
            if series is not None:
                number_, why = number_of(value)
                series.rows.append(replace(row, score=number_, why=why))
    # evalscope leaves their metrics out of the file; they lack a score by each
    begun = reading.series_of(file)
    if len(begun) * len(unusable) > _MAX_UNUSABLE:
        raise DumpError(
            f"{len(unusable):,} answers have no score by any of {len(begun):,} metrics", where=file
        )
    for entry in begun:
        entry.rows += unusable


def _row(
    item: Mapping[str, Any],
    sample: Mapping[str, Any],
    score: Mapping[str, Any],
    number: int,
    reading: ReadRequest,
) -> ScoreRow:
    document, repeat = sample.get("group_id"), sample.get("generation_index")
    if document is None or not isinstance(repeat, int):  # not of a group, or without a place in it
        document, repeat = sample.get("sample_id", item.get("index")), 0
    extracted = score.get("extracted_prediction")
    return reading.row(
        document,
        None,
        number,
        repeat=repeat,
        answer=score.get("prediction") if extracted is None else extracted,
        prompt=_asked(item) or None,
        target=item.get("target"),
        fields=sample.get("sample_metadata"),
    )


def _asked(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The chat up to the answer."""
    turns: list[tuple[str, str]] = []
    for message in (turn for turn in item.get("messages") or [] if isinstance(turn, dict)):
        if message.get("role") == "assistant" and message.get("source") == "generate":
            break
        turns.append((text_of(message.get("role")), text_of(message.get("content"))))
    while turns and turns[-1][0] == "assistant":
        turns.pop()
    return turns


def _settings(root: Path | None, evaluation: Evaluation) -> dict[str, str]:
    """Read the settings of ``configs/task_config.yaml``, by the YAML reader that comes with
    transformers. Everything stays the text that it is: nothing is computed or merged."""
    path = part_of(root, "configs/task_config.yaml")
    if path is None:
        return {}
    import yaml

    data = read_bytes(path, most=_MAX_SETTINGS_BYTES)
    with read_as("evalscope", where=str(path)):
        try:
            config = yaml.load(data.decode(), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise DumpError("the file is no YAML, or was cut off", where=str(path)) from error
    check_value(config, where=str(path), most=_MAX_SETTINGS)
    if not isinstance(config, dict):
        return {}
    evaluation.model = evaluation.model or config.get("model_id") or config.get("model")
    version = config.get("evalscope_version")
    evaluation.tool = f"evalscope {version}" if version else None
    arguments = {
        name: {k: v for k, v in options.items() if k not in ("local_path", "dataset_id")}
        for name, options in table_of(config.get("dataset_args")).items()
        if isinstance(options, dict)
    }
    generation = table_of(config.get("generation_config"))
    generation = {k: v for k, v in generation.items() if k != "batch_size"}
    return {
        "generation settings": json.dumps(generation, sort_keys=True),
        "task settings": json.dumps(arguments, sort_keys=True),
    }


def prompts(folder: DumpFolder, name: str, places: Collection[int]) -> Iterator[tuple[int, Prompt]]:
    for number, item in folder.rows(name):
        if number in places and (asked := _asked(item)):
            yield number, chat_of(asked)


EVALSCOPE = ResultFormat(words="evalscope", recognise=recognise, read=read, prompts=prompts)
