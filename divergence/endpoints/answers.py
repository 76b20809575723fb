"""What a server said of one prompt, whatever protocol it said it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Answer", "Token"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token. ``id``: None where the server tells text alone. ``logprob``: None where it has
    none. ``top``: the likeliest tokens at its place, without their own lists."""

    id: int | None
    text: str | None
    logprob: float | None
    top: Sequence[Token] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``prompt_ids``: as the server rendered it; ``num_prompt``: their number, where ids are not
    told. ``prompt``: the prompt's tokens with their scores, the first one without; empty where the
    server scores no prompts."""

    text: str = ""
    tokens: Sequence[Token] = ()
    prompt_ids: Sequence[int] | None = None
    num_prompt: int | None = None
    prompt: Sequence[Token] = ()
    finish: str | None = None
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def has_logprobs(self) -> bool:
        return any(token.logprob is not None for token in self.tokens)

    @property
    def scores_prompt(self) -> bool:
        return any(token.logprob is not None for token in self.prompt)

    @property
    def has_ids(self) -> bool:
        return bool(self.tokens) and all(token.id is not None for token in self.tokens)

    @property
    def num_top(self) -> int:
        """The shortest list of likeliest tokens."""
        return min((len(token.top) for token in self.tokens), default=0)
