"""``ANSWERS``: of servers, as people save them: OpenAI's and vLLM's chat and completions (with
prompt_logprobs), llama.cpp's of its three ages, SGLang's and TGI's.

A file is one answer, a list of them, or JSON lines; each may lie inside what a log or a batch puts
around it (``response``, ``body``). Every choice is a prompt. How a form is read stands in
divergence.run.answers, which reads live servers too; -9999.0 is no number there.

``LM_EVAL``: samples of lm-evaluation-harness (``--log_samples``), log-likelihoods of whole
continuations.

Each line is a document with one request a choice: ``arguments`` holds context and continuation,
``resps`` the log-likelihood of the continuation and whether it is what a greedy decoder would say.
Nobody tells tokens. So each request is a prompt of its own, whose answer is one entry, known by its
text; two runs of one task are compared choice by choice. What was generated freely has no
log-likelihood, and is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from divergence.domains.importing.dumped import Notes
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.scores import FieldMap, Scored
from divergence.errors import DumpError
from divergence.run.answers import (
    ServerAnswer,
    Token,
    Vocabulary,
    chat_answer,
    completions_answer,
    llama_answer,
    scores_from,
    sglang_answer,
    tgi_answer,
)
from divergence.run.foreign import LINES, DumpFolder
from divergence.run.scores import BY_TEXT, Scores, ScoreSource, lm_eval_requests

_ENDINGS = (".json", *LINES)
_AROUND = ("response", "body", "result", "output")


@dataclass(frozen=True, slots=True)
class _Form:
    """``keys``: by which an answer is known; ``of_choice``: by which its first choice is."""

    name: str
    parse: Callable[[dict[str, Any]], ServerAnswer]
    keys: frozenset[str]
    of_choice: str | None = None

    def holds(self, item: dict[str, Any]) -> bool:
        choices = item.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        is_choice = self.of_choice is None or (isinstance(first, dict) and self.of_choice in first)
        return is_choice and self.keys <= item.keys()


_FORMS = (
    _Form("chat", chat_answer, frozenset(("choices",)), "message"),
    _Form("completions", completions_answer, frozenset(("choices",)), "text"),
    _Form("llama.cpp", llama_answer, frozenset(("completion_probabilities",))),
    _Form("sglang", sglang_answer, frozenset(("meta_info", "text"))),
    _Form("tgi", tgi_answer, frozenset(("generated_text", "details"))),
)


def _inner(item: Any) -> dict[str, Any] | None:
    """The answer itself, out of what was put around it."""
    for _ in range(4):
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        if not isinstance(item, dict):
            return None
        if any(form.holds(item) for form in _FORMS):
            return item
        item = next((item[key] for key in _AROUND if key in item), None)
    return None


def _items(folder: DumpFolder) -> Iterator[tuple[Any, str]]:
    for name in folder.names:
        if name.endswith(".json"):
            value = folder.json(name)
            every = value if isinstance(value, list) and len(value) > 1 else [value]
            for number, item in enumerate(every):
                place = f", entry {number}" if len(every) > 1 else ""
                yield item, f"{folder.where(name)}{place}"
    yield from folder.objects(*LINES)


def recognise(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(_ENDINGS)]
    if not names:
        return False
    if names[0].endswith(LINES):
        return _inner(folder.first_fields(names[0])) is not None
    if len(names) < len(folder.names):
        return False
    try:
        return _inner(next(iter(_items(folder)), (None, ""))[0]) is not None
    except DumpError:  # of which the format that is named says what it is
        return False


def read(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
    answers: list[tuple[ServerAnswer, str]] = []
    engine = "unknown"
    for item, where in _items(folder):
        response = _inner(item)
        if response is None:
            raise DumpError(
                "this is no answer of a server that is known",
                where=where,
                hint="chat or completions as OpenAI and vLLM send them, or llama.cpp's, SGLang's, "
                "TGI's; errors and requests are no answers",
            )
        form = next(form for form in _FORMS if form.holds(response))
        engine = form.name
        choices = response.get("choices")
        every = choices if isinstance(choices, list) else [None]
        for choice in every:
            alone = response if choice is None else {**response, "choices": [choice]}
            answers.append((form.parse(alone), where))
    by_text = not any(answer.has_ids for answer, _ in answers) or not all(
        answer.has_ids for answer, _ in answers if answer.tokens
    )
    models = {answer.model for answer, _ in answers if answer.model}
    counts = ["-" if a.num_prompt is None else str(a.num_prompt) for a, _ in answers]
    facts = {"tokens": "sampled", "prompt tokens": " ".join(counts), "form": engine}
    facts |= {"token ids": BY_TEXT} if by_text else {}
    longest = max((len(answer.tokens) for answer, _ in answers), default=0)
    source = ScoreSource(
        engine="saved answers",
        model=" and ".join(sorted(models)) or "unknown",
        facts=facts,
        max_new_tokens=longest,
    )
    scored = Scored(source)
    vocabulary = Vocabulary(scored.texts, by_text=by_text)
    num_without = 0
    for answer, where in answers:
        chars = [Token(None, char, None) for char in answer.text] if by_text else []
        tokens = answer.tokens or chars
        ids = [vocabulary.id_of(token) for token in tokens]
        if None in ids:
            raise DumpError("the answer has a token without id and text", where=where)
        prompt = [] if by_text else list(answer.prompt_ids or ())
        rows = list(enumerate(answer.prompt)) if len(answer.prompt) == len(prompt) else []
        rows += [(len(prompt) + n, token) for n, token in enumerate(tokens)]
        scores = scores_from(prompt, [id_ for id_ in ids if id_ is not None], rows, vocabulary)
        num_without += not scores.positions
        scored.prompts.append((scores, where))
    if num_without:
        notes.say(
            f"{num_without} of {len(answers)} answers have no log-probabilities (ask with logprobs)"
        )
    if by_text:
        notes.say("tokens are told by their text alone (vLLM: return_token_ids)")
    return scored


ANSWERS = Layout(words="saved answers of a server", recognise=recognise, scores=read)


# Samples of lm-evaluation-harness.


def _is_lm_eval(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(".jsonl")]
    return bool(names) and {"doc_id", "resps", "arguments"} <= set(folder.first_fields(names[0]))


def _read_lm_eval(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
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
                prompt_ids=(), generated_ids=[number], positions=[0], logprobs=[value], text=context
            )
            scored.prompts.append((scores, where))
    if num_free:
        notes.say(f"{num_free} requests without a log-likelihood (generated freely) left out")
    return scored


LM_EVAL = Layout(
    words="lm-evaluation-harness's samples", recognise=_is_lm_eval, scores=_read_lm_eval
)
