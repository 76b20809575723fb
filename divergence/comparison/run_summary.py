"""What a report says about each run."""

from __future__ import annotations

from divergence.comparison.result import RunSummary
from divergence.run.reader import Run

__all__ = ["summary_of"]


def summary_of(run: Run) -> RunSummary:
    manifest = run.manifest
    return RunSummary(
        path=str(run.path),
        id=manifest.id,
        label=manifest.environment.label,
        model=manifest.model.source,
        dtype=manifest.model.dtype,
        device=f"{manifest.environment.device_type}: {manifest.environment.device_name}",
        complete=manifest.complete,
        stopped_by=manifest.stopped_by,
        num_records=len(run.records),
        compute_dtype=manifest.settings.compute_dtype,
        generates=manifest.model.task in ("causal-lm", "encoder-decoder")
        and manifest.plan.replayed_pass is None,
        plants=manifest.plan.plants,
        substitutes=manifest.plan.substitutes,
    )
