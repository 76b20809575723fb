"""The formats that ``import`` reads: by name, where the ``Layout`` of each is.

They are named as text, so that ``--help`` imports no torch. ``--format auto`` asks them in this
order: ``files`` takes any folder with tensors in it, and is the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import placed

if TYPE_CHECKING:
    from divergence.domains.importing.layouts import Layout

FORMATS = {
    "sglang": "sglang:HOOKS",
    "sglang-dumper": "sglang:DUMPER",
    "msprobe": "msprobe:MSPROBE",
    "transformers": "transformers:DEBUGGER",
    "atb": "statistics:ATB",
    "torchtitan": "statistics:TORCHTITAN",
    "transformer-engine": "statistics:TRANSFORMER_ENGINE",
    "compared-a": "statistics:COMPARED_A",
    "compared-b": "statistics:COMPARED_B",
    "answers": "answers:ANSWERS",
    "lm-eval": "answers:LM_EVAL",
    "llama-kld": "logits:LLAMA_KLD",
    "llama-debug": "logits:LLAMA_DEBUG",
    "tensorrt-edge": "logits:EDGE",
    "rollouts": "rollouts:ROLLOUTS",
    "trainer": "rollouts:TRAINER",
    "files": "files:FILES",
}


def layout_of(name: str) -> Layout:
    """The layout of one of ``FORMATS``."""
    layout: Layout = placed(f"divergence.domains.importing.layouts.{FORMATS[name]}")
    return layout
