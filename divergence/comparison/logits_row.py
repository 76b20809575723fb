"""One forward of one prompt, and the logits that chose its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.run.reader import Run

if TYPE_CHECKING:
    import torch

__all__ = ["PromptStep", "logits_row"]

PromptStep = tuple[int, int]
"""(sample, step)."""


def logits_row(run: Run, sample: int, step: int) -> torch.Tensor | None:
    """The logits (V,) that decided this token, if they were recorded."""
    site = run.manifest.plan.logits_site
    group = next((g for g in run.manifest.tokens.groups if sample in g), [sample])
    record = run.find(("free", group[0], step, site)) if site else None
    if record is None or not run.has_bytes(record):
        return None
    tensor = run.read(record)
    if tensor.ndim != 3 or tensor.shape[0] <= group.index(sample):
        return None
    return tensor[group.index(sample), -1]
