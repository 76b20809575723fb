"""localize goes into blocks; what is made between them has none."""

from __future__ import annotations

import pytest

from divergence.comparison.results import Onset
from divergence.experiments.localization.localize import _is_outside


@pytest.mark.parametrize(
    ("site", "block", "pass_", "outside"),
    [
        ("model.norm:in", None, "free", True),
        ("model.layers.2:in", "model.layers.2", "free", True),
        ("model.layers.2:in.position_embeddings.0", "model.layers.2", "free", True),
        (".:out", None, "free", True),
        ("model.layers.2:out", "model.layers.2", "free", False),
        ("model.layers.2:out", "model.layers.2", "anchored", False),
        ("model.layers.2.mlp:in", "model.layers.2", "anchored", False),
        ("lm_head:out", None, "anchored", False),
    ],
)
def test_what_is_made_between_modules_has_no_block(site, block, pass_, outside):
    """An input of a block or trunk module that the free pass blames, or the model's own output."""
    onset = Onset(site=site, block=block, sample=0, step=0, position=None, pass_=pass_)
    assert _is_outside(onset) is outside
