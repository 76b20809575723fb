"""The layouts by the name that ``--format`` gives them; ``auto`` asks them in this order."""

from __future__ import annotations

from divergence.importing.building import DumpLayout, ScoreLayout
from divergence.importing.layouts import (
    files,
    llama_kld,
    lm_eval,
    msprobe,
    sglang,
    sglang_dumper,
    transformers,
)
from divergence.importing.layouts.rollouts import ROLLOUTS, TRAINER

LAYOUTS: dict[str, DumpLayout] = {
    "sglang": sglang,
    "sglang-dumper": sglang_dumper,
    "msprobe": msprobe,
    "transformers": transformers,
    "files": files,
}

SCORES: dict[str, ScoreLayout] = {
    "lm-eval": lm_eval, "rollouts": ROLLOUTS, "trainer": TRAINER, "llama-kld": llama_kld,
}  # fmt: skip
"""Log-probabilities alone; ``auto`` asks them behind LAYOUTS."""
