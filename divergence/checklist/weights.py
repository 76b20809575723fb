"""Weights and precision: asked by the first point, and by the second rung of the ladder.

A digest that both sides lack, or that stands for a parameter that was not read, proves nothing:
such weights are unknown, though preflight finds two equal texts.
"""

from __future__ import annotations

from divergence.checklist.pair import Pair, both, worst
from divergence.checklist.result import PointState
from divergence.run.schema.manifest import Manifest

__all__ = ["precision", "weights"]

_UNREAD = "offloaded"


def weights(pair: Pair) -> tuple[PointState, str]:
    """Are the values the same, as far as both runs tell?"""
    line, state = pair.lines["weights"], pair.state_of("weights")
    lacking = [
        name for name, one in zip("AB", pair.manifests, strict=True) if not one.model.digests
    ]
    digests = [one.model.digest for one in pair.manifests]
    if state == "unknown" or (lacking and not (digests[0] and state == "pass")):
        if line.detail and not lacking:
            return "unknown", line.detail
        who = " and ".join(lacking) or "a run"
        return "unknown", f"{who}: digests of the parameters are not recorded"
    found = [
        one
        for one in pair.lines.values()
        if one.status == "blocking" and one.check in ("weights", "blocks")
    ]
    if found:
        return "fail", "; ".join(one.detail or f"other {one.check}" for one in found)
    unread = {
        name for one in pair.manifests for name, digest in one.model.digests.items()
        if digest == _UNREAD
    }  # fmt: skip
    if unread:
        return "unknown", f"{len(unread)} offloaded parameters were not digested"
    if state == "fail":
        two_dtypes = pair.differs("dtype") or pair.differs("quantization")
        detail = line.detail or "the same values"
        return ("unknown", f"weights: {detail}") if two_dtypes else ("pass", detail)
    return "pass", line.detail or f"the same weights ({digests[0][:12]})"


def precision(pair: Pair) -> tuple[PointState, str]:
    """Dtype and quantization, and what a truth was computed in."""

    def say(one: Manifest) -> str:
        quantized = f" ({one.model.quantization})" if one.model.quantization else ""
        widened = one.settings.compute_dtype
        return one.model.dtype + quantized + (f" (computed in {widened})" if widened else "")

    a, b = (one.settings.compute_dtype for one in pair.manifests)
    computed: PointState = "pass" if a == b else "fail"
    return worst(computed, pair.state_of("dtype"), pair.state_of("quantization")), both(pair, say)
