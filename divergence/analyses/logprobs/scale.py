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
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from divergence.analyses.logprobs.pairs import pair_runs, prompt_line
from divergence.comparison.trusted import refuse_compared
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.site import LOGPROBS

__all__ = ["BY_DTYPE", "FAR", "WIDEST", "Scale", "scale_of"]

BY_DTYPE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-14, "float64": 2.0**-20}
WIDEST = BY_DTYPE["bfloat16"]
"""Of the widest dtype whose rounding is called rounding: narrower ones are another quantisation."""
FAR = 4.0
"""Times WIDEST, half a nat: beyond it no precision in use is meant, but another model."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What rounding explains."""

    value: float
    """A mean of |Δ| in nats."""
    source: Fact
    """Where it is from: ``dtype``, ``no_dtype``, ``floor_runs`` or ``far_floor_runs``."""
    floor: np.ndarray | None = None
    """|Δ| of the floor runs' tokens, where such were named."""

    @property
    def known(self) -> bool:
        """Is it of these two sides? Else it is the widest that might be meant."""
        return self.by_dtype or self.floor is not None

    @property
    def by_dtype(self) -> bool:
        """Is it the bound of a dtype that both sides tell?"""
        return self.source.code == "logprobs.dtype"

    @property
    def without_dtype(self) -> bool:
        """Does nothing tell it, neither a dtype nor a floor run?"""
        return self.source.code == "logprobs.no_dtype"

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
        if value > FAR * WIDEST:
            return Scale(value, fact("logprobs.far_floor_runs", num_runs=len(floors)))
        source = fact("logprobs.floor_runs", num_runs=len(floors))
        return Scale(max(value, 2.0**-20), source, floor)
    dtypes = [_dtype(run) for run in (a, b)]
    if all(dtype in BY_DTYPE for dtype in dtypes):
        coarse = max(dtypes, key=BY_DTYPE.__getitem__)
        return Scale(BY_DTYPE[coarse], fact("logprobs.dtype", dtype=coarse))
    return Scale(WIDEST, fact("logprobs.no_dtype"))


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


def _dtype(run: Run) -> str:
    manifest = run.manifest
    alone = manifest.plan.sites == [LOGPROBS]
    name = manifest.settings.dtype if alone else manifest.model.dtype
    return "" if name is None else name.removeprefix("torch.")
