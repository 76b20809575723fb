"""Samples of lm-evaluation-harness (``--log_samples``): log-likelihoods of whole continuations.

Each line is a document with one request a choice: ``arguments`` holds context and continuation,
``resps`` the log-likelihood of the continuation and whether it is what a greedy decoder would say.
Nobody tells tokens. So each request is a prompt of its own, whose answer is one entry, known by its
text; two runs of one task are compared choice by choice. What was generated freely has no
log-likelihood, and is left out and counted.
"""

from __future__ import annotations

from divergence.domains.importing.dumped import Notes
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.scores import FieldMap, Scored
from divergence.run.foreign import LINES, DumpFolder
from divergence.run.scores import BY_TEXT, Scores, ScoreSource, lm_eval_requests


def recognise(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(".jsonl")]
    return bool(names) and {"doc_id", "resps", "arguments"} <= set(folder.first_fields(names[0]))


def read(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
    facts = {"tokens": "given", "token ids": BY_TEXT, "units": "continuations"}
    scored = Scored(ScoreSource(engine="lm-eval", facts=facts))
    numbers: dict[str, int] = {}
    num_free = 0
    for item, where in folder.objects(*LINES):
        for context, text, value in lm_eval_requests(item, where):
            if value is None:
                num_free += 1
                continue
            number = numbers.setdefault(text, len(numbers))
            scored.texts[str(number)] = text
            scores = Scores(
                prompt_ids=(),
                generated_ids=[number],
                positions=[0],
                logprobs=[value],
                text=context,
            )
            scored.prompts.append((scores, where))
    if num_free:
        notes.say(f"{num_free} requests without a log-likelihood (generated freely) left out")
    return scored


LM_EVAL = Layout(words="lm-evaluation-harness's samples", recognise=recognise, scores=read)
