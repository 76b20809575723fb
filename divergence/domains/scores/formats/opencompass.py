"""opencompass: ``results/<model>/<dataset>.json`` with ``details``, beside ``predictions/``.

``details`` comes in the two forms that its evaluators write: a list with one entry a document,
whose values are lists with one entry a repeat (``correct: [true]``), and a table by number. The
prompt is that of ``predictions/<model>/<dataset>.json``, where it lies beside; a data set that was
divided into ``<dataset>_0.json``, ``_1``… is read as one. Results without details hold no pairs:
evaluate with ``--dump-eval-details``.

An evaluator without details of its own (``AccEvaluator``) gets a table of predictions and
references, which does not say what was right. Equal texts are, where that gives the score that
stands in the file; else the file is left out. A table may hold the data set several times over
(``n``): these are repeats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    chat_of,
    files_in,
    only_model,
    part_of,
    root_of,
    table_of,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, SeriesName
from divergence.errors import DumpError
from divergence.recording.prompts import Prompt
from divergence.run.foreign import DumpFolder

_SCORES = ("correct", "is_correct", "cascade_correct", "score", "accuracy")
_ANSWERS = ("pred", "predictions", "prediction")
_ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}
_TARGETS = ("answer", "refr", "references", "gold")


def recognise(folder: DumpFolder) -> bool:
    names = files_in(folder, "results", ".json")
    if not names:
        return False
    if "results" in PurePosixPath(names[0]).parts:
        return True
    try:
        return "details" in table_of(folder.json(names[0]))
    except DumpError:
        return False


def read(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    names = files_in(folder, "results", ".json")
    evaluation.model = only_model(
        folder, names, hint="name one file: FOLDER/results/MODEL/DATASET.json"
    )
    for name in names:
        result = table_of(folder.json(name))
        details = result.get("details")
        if not isinstance(details, list | dict):
            reading.left_out["evaluations.data_sets_without_details"] += 1
            continue
        _task(folder, name, result, reading)


def _task(folder: DumpFolder, name: str, result: dict[str, Any], reading: ReadRequest) -> None:
    task, file = PurePosixPath(name).stem, folder.where(name)
    asked = _predictions(folder, name)
    entries = list(_entries(result["details"]))
    tables = [entry for _, _, entry in entries]
    num = len(tables) if isinstance(result["details"], list) else _num_once(tables)
    _judge(tables, result, num)
    for number, key, entry in entries:
        prediction = asked.get(str(number), {})
        before = 0
        if num < len(tables):
            before, key = number // num, str(number % num)
        for metric in _SCORES:
            if metric not in entry:
                continue
            series = reading.series(SeriesName(task, "", metric), file, {}, higher=True)
            if series is None:
                continue
            values = entry[metric] if isinstance(entry[metric], list) else [entry[metric]]
            prompt = entry.get("prompt", prediction.get("origin_prompt"))
            if isinstance(entry[metric], list) and isinstance(prompt, list) and "prompt" in entry:
                prompt = prompt[0]  # one for each repeat, all of them equal
            target = next((entry[name] for name in _TARGETS if name in entry), None)
            answers = next((entry[name] for name in _ANSWERS if name in entry), None)
            # an answer for each repeat, or one for all
            listed = answers if isinstance(answers, list) else []
            for repeat, value in enumerate(values):
                row = reading.row(
                    key,
                    value,
                    number + 1,
                    repeat=before + repeat,
                    prompt=prompt,
                    target=target[0] if isinstance(target, list) and target else target,
                    answer=listed[repeat] if repeat < len(listed) else answers,
                    fields=entry,
                )
                series.rows.append(row)
            break
        else:
            reading.left_out["evaluations.documents_without_score"] += 1


def _entries(details: list[Any] | dict[str, Any]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    items = enumerate(details) if isinstance(details, list) else details.items()
    for key, detail in items:
        if isinstance(detail, dict) and str(key).isdigit():
            yield int(key), text_of(detail.get("example_abbr", key)), detail


def _num_once(tables: list[dict[str, Any]]) -> int:
    """Tell of how many documents the table is made, which may stand there several times over."""
    keys = [(text_of(table.get("prompt")), text_of(table.get("references"))) for table in tables]
    if not all("prompt" in table for table in tables):
        return max(len(keys), 1)
    for num in range(1, len(keys) // 2 + 1):
        if len(keys) % num == 0 and keys[num:] == keys[:-num]:
            return num
    return max(len(keys), 1)


def _judge(tables: list[dict[str, Any]], result: Mapping[str, Any], num: int) -> None:
    """Scores where an evaluator told none, if equality gives the file's own score: that of the
    last ``num`` entries, as opencompass writes it."""
    if (
        not tables
        or any(name in table for table in tables for name in _SCORES)
        or not all("predictions" in table and "references" in table for table in tables)
    ):
        return
    same = [text_of(table["predictions"]) == text_of(table["references"]) for table in tables]
    share = 100 * sum(same[-num:]) / num
    if any(isinstance(rate, int | float) and abs(rate - share) < 1e-6 for rate in result.values()):
        for table, equal in zip(tables, same, strict=True):
            table["accuracy"] = equal


def _predictions(folder: DumpFolder, name: str) -> dict[str, dict[str, Any]]:
    """Read, by number, those of ``predictions/`` beside ``results/``, whole or in parts."""
    root, path = root_of(folder, name, "results"), Path(folder.where(name))
    stem = f"predictions/{path.parent.name}/{path.stem}"
    whole = part_of(root, f"{stem}.json")
    parts = [] if whole is None else [whole]
    while whole is None and (part := part_of(root, f"{stem}_{len(parts)}.json")) is not None:
        parts.append(part)
    predictions: dict[str, dict[str, Any]] = {}
    for part in parts:
        part_folder = DumpFolder(part)
        table = table_of(part_folder.json(part_folder.names[0]))
        start = len(predictions)
        predictions |= {str(start + n): table_of(table.get(str(n))) for n in range(len(table))}
    return predictions


def prompts(folder: DumpFolder, name: str, places: Collection[int]) -> Iterator[tuple[int, Prompt]]:
    """The prompt: text, or chat in opencompass's words (HUMAN, BOT)."""
    asked = _predictions(folder, name)
    for place in places:
        given = asked.get(str(place - 1), {}).get("origin_prompt")
        if isinstance(given, str) and given:
            yield place, Prompt(text=given)
        elif isinstance(given, list) and given:
            turns = [turn for turn in given if isinstance(turn, dict)]
            roles = (_ROLES.get(text_of(turn.get("role")), "user") for turn in turns)
            texts = (text_of(turn.get("prompt") or "") for turn in turns)
            yield place, chat_of(zip(roles, texts, strict=True))


OPENCOMPASS = ResultFormat(words="opencompass", recognise=recognise, read=read, prompts=prompts)
