"""The norm of all gradients, and the error that all clipped ones have in common.

Each clipped one is multiplied by limit / norm, so the rounding of that one number is in all that an
optimizer gets and in all moments. It is no small one: some kernels add millions of squares one
after the other in float32, and lose a share of them once the sum is large.
"""

from __future__ import annotations

from collections.abc import Sequence

from divergence.numerics.floor import norm_floor
from divergence.run.reader import Run
from divergence.run.site import OPTIMIZER, is_norm

__all__ = ["SharedRounding"]


class SharedRounding:
    """By site, the error that all of an optimizer's input and moments have in common: gradients
    that are clipped are multiplied by a number that the norm of all of them gives. That norm is
    judged as a site of its own; what follows from it is held to how far the norms are apart. A new
    value moves by no more than its step times that: a first step of AdamW is the rate at most, one
    of SGD the rate times what gradients are clipped to."""

    def __init__(self, runs: Sequence[Run]) -> None:
        given = [
            record for run in runs for record in run.records if f"{OPTIMIZER}:in." in record.site
        ]
        self._rounding = max(
            (norm_floor(record.numel, lanes=8 if record.dtype in ("float32", "float64") else 1)
             for record in given), default=0.0,
        )  # fmt: skip
        norms = _last_norms(runs)
        apart = max(norms) / min(norms) - 1 if norms and min(norms) > 0 else 0.0
        self._error = max(self._rounding, apart)
        training = runs[0].manifest.training
        self._clipped = any(run.manifest.training.clip_grad_norm is not None for run in runs)
        self._rate = (training.learning_rate or 0.0) * max(1.0, training.clip_grad_norm or 0.0)
        self._sizes = {
            record.site: record.summary.rms
            for record in runs[0].records
            if f"{OPTIMIZER}:out." in record.site and record.summary is not None
        }

    def __call__(self, site: str) -> float:
        path, _, port = site.partition(":")
        if not path.endswith(OPTIMIZER):
            return 0.0
        if is_norm(site):
            return self._rounding
        if not self._clipped:
            return 0.0
        if port[:3] == "out" and port.count(".") == 1:  # a new value: its step, in shares of it
            return self._error * self._rate / (self._sizes.get(site) or 1.0)
        return self._error * (2 if port.endswith("_sq") else 1)


def _last_norms(runs: Sequence[Run]) -> list[float]:
    """Of each run's last pass, which is the anchored one where there is one."""
    norms = []
    for run in runs:
        summaries = {record.pass_: record.summary for record in run.records
                 if is_norm(record.site) and record.summary is not None}  # fmt: skip
        summary = summaries.get("anchored", summaries.get("free"))
        if summary is not None and summary.rms is not None:
            norms.append(summary.rms)
    return norms
