"""The answer of `tokens` about two tokenizers, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from divergence.comparison.result import JsonAnswer
from divergence.facts import Fact, Worded


class TokenizerSide(msgspec.Struct, frozen=True, kw_only=True):
    """One tokenizer."""

    source: str
    """The directory or hub id, or the file of examples."""
    kind: str
    """Its class; ``examples`` of a file of them."""
    num_tokens: int
    """How many it knows, added ones too; of examples, how many different ones they hold."""


class TokensCause(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One way in which texts become other tokens."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "facts"}

    name: str
    """The first thing that makes another of a text: ``template``, ``normaliser``, ``split``,
    ``merges``, ``added`` or ``ids``; or what stands around it: ``start``, ``end``; of equal tokens
    ``truncation``, and ``twice`` of a chat that is rendered first and then tokenised. Of examples
    ``start``, ``end``, ``cut`` (truncation), ``tokens``, ``padding``, or labels that one side alone
    has: ``labels before``, ``labels within``, ``labels behind`` the other's, else ``labels``."""
    num_texts: int
    first: int
    """The first of these texts, counted from 0."""
    shown: str
    """Of that text, from where it matters."""
    facts: list[Fact]
    """What it is in that text."""
    text: str = ""


class TokensReport(msgspec.Struct, JsonAnswer, Worded, frozen=True, kw_only=True):
    """The answer of `compare_tokens`."""

    TEXTS: ClassVar[Mapping[str, str]] = {"settings": "facts"}

    schema_version: int = 1
    tool_version: str
    reference: TokenizerSide
    candidate: TokenizerSide
    chat: bool
    """Did texts go through the chat templates?"""
    num_texts: int
    num_equal: int
    """Texts that become the same token ids."""
    num_tokens: list[int]
    """Of all texts together, by side."""
    facts: list[Fact]
    """What the tokenizers themselves say otherwise, whether a text shows it or not."""
    settings: list[str] = []
    causes: list[TokensCause]
    """The most frequent first; a text may have several."""

    @property
    def equal(self) -> bool:
        """Do all texts become the same token ids?"""
        return self.num_equal == self.num_texts

    def __repr__(self) -> str:
        """``<TokensReport a b: 163 of 200 texts equal>``"""
        sides = f"{self.reference.source} {self.candidate.source}"
        return f"<TokensReport {sides}: {self.num_equal} of {self.num_texts} texts equal>"
