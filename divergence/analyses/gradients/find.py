"""Gradients: what parameters' gradients that are off have in common.

Kernels make an error in one place, and it shows in what leaves a block's backward as well. A loop
that adds up micro-batches, reduces among ranks or divides makes one in the gradients of parameters
alone, of all of them or of a bucket. Where all are one multiple of the other side's, the factor
says which divisor to look for.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from divergence.comparison.answer import Answer
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Evidence, Finding, Verdict
from divergence.comparison.results.sites import SiteResult
from divergence.run.schema.site import BACKWARD, of_parameter

__all__ = ["explain"]

_STRAIGHT = 1e-6
"""1 - cosine of two gradients that are one multiple of each other, in float32; in 16 bits their
rounding allows more."""
_MULTIPLE = 1e-2
"""A factor is one where those of nearly all gradients lie as near to their median."""
_APART = 0.02


def explain(measured: Measured, verdict: Verdict, answer: Answer) -> list[Finding]:
    """What a verdict about gradients of parameters means."""
    onset = verdict.onset
    if onset is None or not of_parameter(onset.site) or onset.phase != "backward":
        return []
    pass_ = "anchored" if measured.anchored else "free"
    found = [one for one in measured.sites if one.pass_ == pass_]
    gradients = [one for one in found if one.phase == "backward" and of_parameter(one.site)]
    beyond = [one for one in gradients if one.flagged]
    handed_on = [one for one in found if one.site.endswith(f"{BACKWARD}:out") and one.flagged]
    if len(beyond) < 2 or handed_on:
        return []
    share = f"{len(beyond)} of {len(gradients)} parameters' gradients are off"
    text = (
        f"{share}, and nothing that blocks hand on in the backward is: not a kernel, but what is "
        "done with gradients (adding up micro-batches, reducing among ranks, dividing)"
    )
    evidence = [Evidence(text=text, values={"num_beyond": float(len(beyond))})]
    factor = _factor(beyond)
    if factor is not None and len(beyond) > 0.9 * len(gradients):
        evidence.append(
            Evidence(
                text=f"all of them are {factor:.4g} × A's in B: a divisor (ranks, micro-batches, "
                "tokens) or a loss scale that is not the same",
                values={"factor": factor},
            )
        )
    return [Finding(claim="explanation", role="explains", evidence=evidence)]


def _factor(sites: Sequence[SiteResult]) -> float | None:
    """B over A, where it is the same in nearly all."""
    factors = []
    for one in sites:
        if one.gain is None or one.one_minus_cosine is None:
            return None
        coarse = 1e-4 if one.reference_dtype != "float32" else _STRAIGHT
        if one.one_minus_cosine < coarse:
            factors.append(1 + one.gain)
    if len(factors) < 0.9 * len(sites):
        return None
    middle = statistics.median(factors)
    near = [one for one in factors if abs(one - middle) <= _MULTIPLE * abs(middle)]
    if len(near) < 0.9 * len(factors) or abs(middle - 1) < _APART:
        return None
    return middle
