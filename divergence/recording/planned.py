"""What a capture would write, as typed data: the answer of ``--dry-run``."""

from __future__ import annotations

import msgspec

__all__ = ["DryRun", "PlannedSite"]


class PlannedSite(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture would write for one site. Bytes are 0 where the tensor is stored at another
    site."""

    site: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    bytes_prefill: int
    """Over all prompts."""
    bytes_per_step: int
    """Of one decode step of one group."""
    num_steps: int
    bytes: int
    """Over the whole capture."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture would write."""

    model: str
    rows: list[PlannedSite]
    """One for each site."""
    num_sites: int
    num_prompts: int
    num_prompt_tokens: int
    num_steps: int
    """Forwards of each prompt, decoding included."""
    passes: list[str]
    total_bytes: int
    """Sum over all sites."""
    notes: list[str] = []
