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

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from divergence.analyses.logprobs.pairs import pair_runs, prompt_line
from divergence.comparison.trusted import refuse_compared
from divergence.errors import UsageError
from divergence.numerics.floor import THRESHOLDS
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.schema.site import LOGPROBS

__all__ = ["BY_DTYPE", "FAR", "NO_DTYPE", "WIDEST", "Scale", "scale_of"]

BY_DTYPE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-14, "float64": 2.0**-20}
WIDEST = BY_DTYPE["bfloat16"]
"""Of the widest dtype whose rounding is called rounding: narrower ones are another quantisation."""
NO_DTYPE = "for want of a side's dtype"
FAR = 4.0
"""Times WIDEST, half a nat: beyond it no precision in use is meant, but another model."""


class Scale:
    """``known``: is it of these two sides? Else it is the widest that might be meant. ``floor``:
    |Δ| of the floor runs' tokens, where such were named."""

    def __init__(
        self, value: float, of: str, *, known: bool, floor: np.ndarray | None = None
    ) -> None:
        self.value, self.of, self.known, self.floor = value, of, known, floor

    def usual_share(self, bound: float) -> float:
        """Of a trusted machine's tokens, how many differ by more than ``bound``: at most (the upper
        end of Wilson's 99% interval). 0 without floor runs."""
        if self.floor is None:
            return 0.0
        num, z = len(self.floor), NormalDist().inv_cdf(0.99)
        share, room = float((self.floor > bound).mean()), z * z / num
        middle = share + room / 2
        return (middle + z * math.sqrt((share * (1 - share) + room / 4) / num)) / (1 + room)


def scale_of(a: Run, b: Run, floors: Sequence[Run]) -> Scale:
    """From the runs of ``floors``, else from both sides' dtypes. Raises UsageError for a floor run
    that is a compared one, or scored none of A's tokens."""
    if floors:
        together = np.concatenate([_from_floor(a, b, run) for run in floors])
        floor = np.abs(together)
        value = THRESHOLDS.widen * float(floor.mean())
        name = "the floor run" if len(floors) == 1 else f"the {len(floors)} floor runs"
        if value > FAR * WIDEST:
            return Scale(value, f"{name}, farther off than any precision in use", known=False)
        return Scale(max(value, 2.0**-20), name, known=True, floor=floor)
    dtypes = [_dtype(run) for run in (a, b)]
    told = [BY_DTYPE[dtype] for dtype in dtypes if dtype in BY_DTYPE]
    if len(told) == 2:
        coarse = max((dtype for dtype in dtypes if dtype), key=lambda dtype: BY_DTYPE.get(dtype, 0))
        return Scale(max(told), coarse, known=True)
    return Scale(WIDEST, f"bfloat16, {NO_DTYPE}", known=False)


def _from_floor(a: Run, b: Run, run: Run) -> np.ndarray:
    refuse_compared(run, a, b)
    pairs = pair_runs(a, run)
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in pairs)])
    line = prompt_line(pairs, a, run)
    if line.status == "blocking" or not len(delta):
        raise UsageError(
            f"{run.path} shows no floor for {a.path}: "
            + ("other prompts" if line.status == "blocking" else "no token in common"),
            hint=command_line("capture", like=a.path, o="RUN") + " on a trusted machine",
        )
    return delta


def _dtype(run: Run) -> str | None:
    manifest = run.manifest
    alone = manifest.plan.sites == [LOGPROBS]
    name = manifest.settings.dtype if alone else manifest.model.dtype
    return None if name is None else name.removeprefix("torch.")
