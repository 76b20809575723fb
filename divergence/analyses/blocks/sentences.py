"""The sentences of blocks. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "weights": "weights: {relation}",
    "own_noise": "{what}: differences include its own noise",
}
