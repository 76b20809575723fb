"""Confirmation: the found sizes planted for real, where the model is at hand.

A trial changes recorded tensors; a real plant changes the running model. For one block each
fault is captured twice: 1.3 times the found size must be seen there by the ordinary compare,
and 0.7 times must not. Where nothing was planted that capture must repeat the candidate: on
another machine it would confirm what that machine sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from divergence.comparison.api import compare
from divergence.errors import UsageError
from divergence.experiments.localization.repetition import check_substituted, why_not_bits
from divergence.experiments.sensitivity.faults import FAULTS
from divergence.experiments.sensitivity.result import Confirmation, FaultSize
from divergence.experiments.sensitivity.trials import Trials, sees
from divergence.numerics.rounding.floor import Thresholds
from divergence.recording.api import capture
from divergence.run.reader import Run
from divergence.run.trust import recorded_attention
from divergence.words import Progress

__all__ = ["confirm_sizes"]

_AROUND = ((1.3, True), (0.7, False))


def confirm_sizes(
    a: Run,
    b: Run,
    trials: Trials,
    sizes: Sequence[FaultSize],
    *,
    block: str,
    folder: Path,
    truth: str | Path | Run | None,
    floor: Sequence[str | Path | Run],
    thresholds: Thresholds,
    progress: Progress | None,
    model: str | None,
    device: str,
    trust_remote_code: bool,
) -> list[Confirmation]:
    """Two captures a fault that has a plant and was seen at ``block``, with the candidate's dtype
    and attention; faults that come in whole features are left out."""
    found: list[Confirmation] = []
    own = b.manifest.model
    for one in sizes:
        fault = FAULTS[one.fault]
        if one.block != block or one.size is None or fault.spelled is None or fault.in_features:
            continue
        for factor, expected in _AROUND:
            size = one.size * factor
            spelled = fault.spelled(size, trials.channel(block), trials.num_features(block))
            plant = f"{block}:out={spelled}"
            faulty = capture(
                like=a,
                out=folder / "planted",
                model=model,
                device=device,
                trust_remote_code=trust_remote_code,
                dtype=None if own.dtype == a.manifest.model.dtype else own.dtype,
                attn_implementation=recorded_attention(b.manifest),
                plants=[plant],
                force=True,
                progress=progress,
            )
            try:
                _check(faulty, b, block)
                report = compare(
                    a, faulty, truth=truth, floor=floor, thresholds=thresholds, progress=progress
                )
            finally:
                faulty.close()
            verdict = report.verdict
            found.append(
                Confirmation(
                    block=block,
                    fault=fault.name,
                    plant=plant,
                    size=size,
                    expected=expected,
                    seen=sees(verdict, block),
                    verdict=verdict.kind,
                    summary=verdict.summary,
                )
            )
    return found


def _check(faulty: Run, b: Run, block: str) -> None:
    """Raises UsageError where this machine does not repeat ``b`` at what the plant leaves alone."""
    found = check_substituted(faulty, b, site=f"{block}:out", block=block, name="the planted run")
    if found.how == "differs" and why_not_bits(b.manifest, faulty.manifest) is None:
        raise UsageError(
            f"this is not the machine of {b.path}: {found.site} differs where nothing was planted, "
            "so a plant here confirms nothing",
            where=f"{found.num_different} of {found.num_compared} shared tensors differ",
            hint="run it on that machine, or without --candidate, or without --confirm",
        )
