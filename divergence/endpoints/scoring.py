"""A server's answer as the scores of a run: which token is where, by which number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from divergence.endpoints.capabilities import Capabilities
from divergence.endpoints.protocols import ServerAnswer, Token
from divergence.endpoints.questions import Asked
from divergence.errors import EndpointError
from divergence.run.scores import Scores

__all__ = ["Vocabulary", "scores_of"]

_MOST_TEXTS = 1 << 18


class Vocabulary:
    """Texts of tokens by id; with ``by_text`` the ids are numbers that it hands out itself. Else a
    token told by its text alone has the one id that is known to have this text, or none."""

    def __init__(self, texts: dict[str, str], *, by_text: bool) -> None:
        self._texts, self._by_text = texts, by_text
        self._numbers: dict[str, int | None] = {}

    def take(self, texts: Mapping[str, str]) -> None:
        """Those of an earlier capture."""
        for number, text in texts.items():
            self._note(int(number), text)

    def id_of(self, token: Token) -> int | None:
        """None where the run goes by ids, and the server told none of this one."""
        if token.id is not None and not self._by_text:
            if token.text:
                self._note(token.id, token.text)
            return token.id
        if token.text is None:
            return None
        if self._by_text and token.text not in self._numbers:
            self._note(len(self._numbers), token.text)
        return self._numbers.get(token.text)

    def _note(self, number: int, text: str) -> None:
        if len(self._texts) >= _MOST_TEXTS and not self._by_text:
            return
        self._texts.setdefault(str(number), text)
        if self._numbers.setdefault(text, number) != number:
            self._numbers[text] = None  # two ids share it


def scores_of(
    answer: ServerAnswer, asked: Asked, caps: Capabilities, vocabulary: Vocabulary
) -> Scores:
    """Raises EndpointError where the answer is not what was asked."""
    if asked.forced:
        return _forced(answer, asked, caps, vocabulary)
    if caps.logprobs and not answer.has_logprobs and answer.tokens:
        raise EndpointError("the answer has no log-probabilities, as others have")
    if not answer.tokens and caps.logprobs:
        raise EndpointError("the answer has no tokens")
    tokens = answer.tokens or [Token(None, char, None) for char in answer.text]
    ids = [vocabulary.id_of(token) for token in tokens]
    if None in ids:
        raise EndpointError("the answer has a token without an id, as others have")
    prompt = [] if not caps.token_ids else list(answer.prompt_ids or asked.ids or ())
    _check_prompt(answer.prompt_ids, asked.ids)
    rows = list(enumerate(answer.prompt)) if prompt and len(answer.prompt) == len(prompt) else []
    rows += [(len(prompt) + n, token) for n, token in enumerate(tokens)]
    return _scores(prompt, [id_ for id_ in ids if id_ is not None], rows, vocabulary)


def _forced(
    answer: ServerAnswer, asked: Asked, caps: Capabilities, vocabulary: Vocabulary
) -> Scores:
    """The scores of a prompt at whose end the answer stands."""
    prompt, whole = list(asked.ids or ()), [*(asked.ids or ()), *asked.forced]
    tokens: Sequence[Token] = answer.prompt
    if caps.forces == "echo":
        tokens = answer.tokens[: len(whole)]
    if len(tokens) != len(whole):
        raise EndpointError(f"{len(tokens)} tokens were scored, and {len(whole)} were given")
    told = [token.id for token in tokens if token.id is not None]
    _check_prompt(answer.prompt_ids or (told if len(told) == len(tokens) else None), whole)
    named = [Token(id_, t.text, t.logprob, t.top) for id_, t in zip(whole, tokens, strict=True)]
    return _scores(prompt, list(asked.forced), list(enumerate(named)), vocabulary)


def _check_prompt(told: Sequence[int] | None, given: Sequence[int] | None) -> None:
    if told is not None and given is not None and list(told) != list(given):
        at = next(
            (n for n, (x, y) in enumerate(zip(told, given, strict=False)) if x != y),
            min(len(told), len(given)),
        )
        raise EndpointError(
            f"the server read other tokens than were given: from token {at} on "
            f"{list(told[at : at + 4])} instead of {list(given[at : at + 4])}"
        )


def _scores(
    prompt: list[int], answer: list[int], rows: list[tuple[int, Token]], vocabulary: Vocabulary
) -> Scores:
    scored = [(place, token) for place, token in rows if token.logprob is not None]
    for _, token in scored:
        vocabulary.id_of(token)
    top = [
        [
            (number, alternative.logprob)
            for alternative in token.top
            if alternative.logprob is not None
            and (number := vocabulary.id_of(alternative)) is not None
        ]
        for _, token in scored
    ]
    return Scores(
        prompt_ids=prompt, generated_ids=answer, positions=[place for place, _ in scored],
        logprobs=[float(token.logprob or 0.0) for _, token in scored], top=top,
    )  # fmt: skip
