"""What a capture would write, as typed data: the answer of ``--dry-run``."""

from __future__ import annotations

import msgspec

__all__ = ["DryRun", "PlannedSite"]


class PlannedSite(msgspec.Struct, frozen=True, kw_only=True):
    """One site: ``bytes_prefill`` over all prompts, ``bytes_per_step`` of one decode step of one
    group, ``bytes`` over the whole capture; 0 where the tensor is stored at another site."""

    site: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    bytes_prefill: int
    bytes_per_step: int
    num_steps: int
    bytes: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture would write. ``num_steps``: forwards of each prompt, decoding included."""

    model: str
    rows: list[PlannedSite]
    num_sites: int
    num_prompts: int
    num_prompt_tokens: int
    num_steps: int
    passes: list[str]
    total_bytes: int
    notes: list[str] = []
