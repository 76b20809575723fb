"""What a notebook shows of a run."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.html.notebook import small_table
from divergence.layout import size
from divergence.run.schema.contents import count_passes
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Record

__all__ = ["run_html"]


def run_html(path: str, manifest: Manifest, records: Sequence[Record]) -> str:
    """What ran, where, and whether it finished."""
    model, machine = manifest.model, manifest.environment
    ended = f", stopped by {manifest.stopped_by}" if manifest.stopped_by else ""
    return small_table(
        f"Run {path}",
        [
            ("model", model.source),
            ("computed", f"{model.dtype} on {machine.device_type}: {machine.device_name}"),
            ("machine", machine.label),
            ("state", "complete" if manifest.complete else f"incomplete{ended}"),
            ("passes", ", ".join(count_passes(records))),
            ("prompts", f"{len(manifest.tokens.samples):,}"),
            ("records", f"{len(records):,}, {size(manifest.sizes.stored_bytes)}"),
            ("planted faults", ", ".join(manifest.plan.plants)),
        ],
    )
