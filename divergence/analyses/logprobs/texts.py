"""Tokens by their text: where a server tells no ids, both sides' ids are numbered by text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from divergence.analyses.logprobs.sequences import Distribution, Sequence

__all__ = ["renumbered"]


def renumbered(
    sequences: list[Sequence], texts: Mapping[str, str], numbers: dict[str, int], unknown: int
) -> list[Sequence]:
    """The same sequences by numbers of texts, which ``numbers`` hands out. Ids whose text nobody
    told become ``unknown``, which equals no token of the other side. Prompts are left out."""

    def number(token: int) -> int:
        text = texts.get(str(token))
        return unknown if text is None else numbers.setdefault(text, len(numbers))

    def one(sequence: Sequence) -> Sequence:
        start, inner = sequence.num_prompt, sequence.distribution

        def distribution(row: int) -> Distribution:
            listed = inner(row)
            if listed.whole:  # texts are told of few ids; the rest is a tail
                few = slice(0, 64)
                listed = Distribution(listed.ids[few], listed.log[few])
            ids = np.array([number(int(token)) for token in listed.ids], np.int64)
            _, first = np.unique(ids, return_index=True)
            kept = np.sort(first[ids[first] >= 0])
            return Distribution(ids[kept], listed.log[kept])

        return dataclasses.replace(
            sequence, ids=[number(token) for token in sequence.ids[start:]], num_prompt=0,
            rows={place - start: row for place, row in sequence.rows.items() if place >= start},
            distribution=distribution,
        )  # fmt: skip

    return [one(sequence) for sequence in sequences]
