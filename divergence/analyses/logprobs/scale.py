"""What rounding explains of Δ log p, as a mean of |Δ| in nats.

Measured, where ``--floor`` names trusted runs of the same prompts: their mean |Δ| from the
reference, widened as every floor is (numerics.floor, ``widen``). Else by the dtype that a side
computed in: a random Llama of 16 blocks, whose logits spread by 3 nats, is 0.069 nats from its own
float64 in bfloat16 (``benchmarks/logprobs.py`` prints it), and two such sides √2 times that from
one another: 0.1, and 0.125 here. Random models gather more rounding than trained ones, so this is a
wide bound. float16 has three bits more; float32, whose accumulators are no wider than its stores,
shows 4e-6 there and more where sums are longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from divergence.analyses.logprobs.pairs import pair_runs
from divergence.numerics.floor import THRESHOLDS
from divergence.run.reader import Run
from divergence.run.schema.site import LOGPROBS

__all__ = ["BY_DTYPE", "FAR", "WIDEST", "Scale", "scale_of"]

BY_DTYPE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-14, "float64": 2.0**-20}
WIDEST = BY_DTYPE["bfloat16"]
"""Of the widest dtype whose rounding is called rounding: narrower ones are another quantisation."""
FAR = 4.0
"""Times WIDEST, half a nat: beyond it no precision in use is meant, but another model."""


class Scale:
    """``known``: is it of these two sides? Else it is the widest that might be meant."""

    def __init__(self, value: float, of: str, *, known: bool) -> None:
        self.value, self.of, self.known = value, of, known


def scale_of(a: Run, b: Run, floors: Sequence[Run]) -> Scale:
    """From the runs of ``floors``, else from both sides' dtypes."""
    if floors:
        deltas = [pair.delta for run in floors for pair in pair_runs(a, run)]
        together = np.concatenate(deltas) if deltas else np.empty(0)
        if len(together):
            value = THRESHOLDS.widen * float(np.abs(together).mean())
            return Scale(max(value, 2.0**-20), f"{len(floors)} floor run(s)", known=True)
    dtypes = [_dtype(run) for run in (a, b)]
    told = [BY_DTYPE[dtype] for dtype in dtypes if dtype in BY_DTYPE]
    if len(told) == 2:
        coarse = max((dtype for dtype in dtypes if dtype), key=lambda dtype: BY_DTYPE.get(dtype, 0))
        return Scale(max(told), coarse, known=True)
    return Scale(WIDEST, "bfloat16, for want of a side's dtype", known=False)


def _dtype(run: Run) -> str | None:
    manifest = run.manifest
    alone = manifest.plan.sites == [LOGPROBS]
    name = manifest.settings.dtype if alone else manifest.model.dtype
    return None if name is None else name.removeprefix("torch.")
