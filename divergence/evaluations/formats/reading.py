"""What all formats need: which series are wanted, numbers, hashes, counts of what is left out."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from divergence.evaluations.rows import Evaluation, SeriesName

__all__ = ["LOWER_IS_BETTER", "ReadRequest", "finish", "hashed", "number_of", "text_of"]

LOWER_IS_BETTER = frozenset(
    "bits_per_byte bpb brier_score byte_perplexity cer error error_rate loss mae mse nll "
    "perplexity ppl rmse ter wer word_perplexity".split()
)
"""Metrics that are known to be better where they are lower, for formats that do not tell."""


_MOST = 1e100
"""No score is as large, and squares of it would be out of range."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What is asked for. Empty: everything."""

    tasks: Sequence[str] = ()
    metrics: Sequence[str] = ()
    filters: Sequence[str] = ()
    cluster: str | None = None
    """The field of a document that names its cluster."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What was not taken, counted by reason."""
    refused: dict[SeriesName, None] = field(default_factory=dict)
    """What is there and was not asked for."""

    def wants(self, name: SeriesName) -> bool:
        wanted = all(
            not patterns or any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns)
            for part, patterns in (
                (name.task, self.tasks), (name.metric, self.metrics), (name.filter, self.filters),
            )
        )  # fmt: skip
        if not wanted:
            self.refused[name] = None
        return wanted

    def cluster_of(self, fields: Any) -> str | None:
        """Of a document's fields. One without the field is a cluster of its own."""
        if self.cluster is None or not isinstance(fields, Mapping):
            return None
        cluster = fields.get(self.cluster)
        return None if cluster is None else text_of(cluster)


def finish(result: Evaluation, reading: ReadRequest) -> Evaluation:
    """With what was left out as notes."""
    result.notes += [f"{count:,} {reason}" for reason, count in sorted(reading.left_out.items())]
    reading.left_out.clear()
    return result


def number_of(value: Any) -> tuple[float | None, str | None]:
    """(score, why there is none) of what stands in the place of a score."""
    if isinstance(value, bool | int | float):
        score = float(value)
        return (score, None) if abs(score) < _MOST else (None, f"the score is {score:g}")
    return None, "without a score" if value is None else "the score is no number"


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def hashed(value: Any) -> str:
    """Of a prompt or a target, whatever it is made of."""
    return xxhash.xxh3_64_hexdigest(str(value).encode("utf-8", "surrogatepass"))
