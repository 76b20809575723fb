"""Samples of lm-evaluation-harness (``--log_samples``): log-likelihoods of whole continuations.

Each line is a document with one request a choice: ``arguments`` holds context and continuation,
``resps`` the log-likelihood of the continuation and whether it is what a greedy decoder would say.
Nobody tells tokens. So each request is a prompt of its own, whose answer is one entry, known by its
text; two runs of one task are compared choice by choice. What was generated freely has no
log-likelihood, and is left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from divergence.errors import DumpError
from divergence.importing.building import FieldMap, Notes, Scored
from divergence.importing.files import DumpFolder
from divergence.importing.layouts.rollouts import objects
from divergence.outside import json_value
from divergence.run.scores import BY_TEXT, Scores, ScoreSource

NAME = "lm-evaluation-harness's samples"
TAKES_MAP = False


def recognise(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(".jsonl")]
    if not names:
        return False
    try:
        first = json_value(next(folder.lines(names[0]), b""), where=names[0])
    except DumpError:
        return False
    return isinstance(first, dict) and {"doc_id", "resps", "arguments"} <= set(first)


def scores(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
    facts = {"tokens": "given", "token ids": BY_TEXT, "units": "continuations"}
    scored, numbers, num_free = (
        Scored(ScoreSource(engine="lm-eval", facts=facts)),
        dict[str, int](),
        0,
    )
    for item, where in objects(folder):
        for context, text, value in requests(item, where):
            if value is None:
                num_free += 1
                continue
            number = numbers.setdefault(text, len(numbers))
            scored.texts[str(number)] = text
            scored.scores.append(Scores(
                prompt_ids=(), generated_ids=[number], positions=[0], logprobs=[value],
                text=context,
            ))  # fmt: skip
            scored.wheres.append(where)
    if num_free:
        notes.say(f"{num_free} requests without a log-likelihood (generated freely) left out")
    return scored


def requests(item: Any, where: str) -> Iterator[tuple[str, str, float | None]]:
    """(context, continuation, log-likelihood) of each choice."""
    if not isinstance(item, dict):
        raise DumpError("the line is no object", where=where)
    given = item.get("arguments")
    given = list(given.values()) if isinstance(given, dict) else given
    answers = item.get("resps")
    if not isinstance(given, list) or not isinstance(answers, list) or len(given) != len(answers):
        raise DumpError("arguments and resps are not of one length", where=where)
    for request, answer in zip(given, answers, strict=True):
        words = list(request.values()) if isinstance(request, dict) else request
        if not isinstance(words, list) or len(words) < 2:
            raise DumpError("a request is context and continuation", where=where)
        while isinstance(answer, list) and answer and isinstance(answer[0], list):
            answer = answer[0]
        yield str(words[0]), str(words[1]), _value(answer)


def _value(answer: Any) -> float | None:
    """Of ``[log-likelihood, is greedy]``, whose parts are written as text."""
    if not isinstance(answer, list) or len(answer) != 2:
        return None
    try:
        value = float(answer[0])
    except (TypeError, ValueError):
        return None
    return None if math.isnan(value) else value
