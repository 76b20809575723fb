"""Weights and precision, and code: what is computed with, and what computes.

The first point and the second rung ask for weights and precision. A digest that both sides lack, or
that stands for a parameter that was not read, proves nothing: such weights are unknown, though
preflight finds two equal texts.

The rung of code explains what was found where all of this holds: the onset lies in a module of a
class whose code differs; the difference is somebody's doing, or cannot be a matter of another
version; and the error is made wherever that code runs. Other code elsewhere, another configuration
or another attention fails without explaining, since a correct one makes no more than rounding.
"""

from __future__ import annotations

from divergence.checklist.numbers import Said
from divergence.checklist.pair import CheckedPair, both, differs, worst
from divergence.checklist.result import PointState
from divergence.comparison.preflight.code import CodeDifference, code_differences
from divergence.comparison.preflight.lines import CPU_OPERATORS
from divergence.comparison.results import Onset, Verdict
from divergence.facts import Fact, apart, fact
from divergence.run.manifest import Manifest
from divergence.run.site import ROOT, module_of, starred

__all__ = ["code", "precision", "settings_differ", "weights"]

_UNREAD = "offloaded"


def weights(pair: CheckedPair) -> tuple[PointState, list[Fact]]:
    """Are the values the same, as far as both runs tell?"""
    line, state = pair.lines["weights"], pair.state_of("weights")
    lacking = [
        name
        for name, manifest in zip("AB", pair.manifests, strict=True)
        if not manifest.model.digests
    ]
    digests = [manifest.model.digest for manifest in pair.manifests]
    if state == "unknown" or (lacking and not (digests[0] and state == "pass")):
        if line.details and not lacking:
            return "unknown", line.details
        return "unknown", [fact("checklist.digests_not_recorded", sides=lacking or None)]
    blocking = [
        preflight_line
        for preflight_line in pair.lines.values()
        if preflight_line.status == "blocking" and preflight_line.check in ("weights", "blocks")
    ]
    if blocking:
        return "fail", apart(
            [
                item
                for blocker in blocking
                for item in blocker.details or [fact("checklist.other_check", check=blocker.check)]
            ]
        )
    unread = {
        name for manifest in pair.manifests for name, digest in manifest.model.digests.items()
        if digest == _UNREAD
    }  # fmt: skip
    if unread:
        return "unknown", [fact("checklist.offloaded", num=len(unread))]
    if state == "fail":
        two_dtypes = pair.differs("dtype") or pair.differs("quantization")
        details = line.details or [fact("checklist.same_values")]
        if two_dtypes:
            return "unknown", [fact("checklist.weights_detail", details=details)]
        return "pass", details
    return "pass", line.details or [fact("checklist.same_weights", digest=digests[0][:12])]


def precision(pair: CheckedPair) -> tuple[PointState, Fact]:
    """Dtype and quantization, and what a truth was computed in."""

    def say(manifest: Manifest) -> Fact:
        model = manifest.model
        return fact(
            "checklist.computed_as", dtype=model.dtype, computed=manifest.settings.compute_dtype,
            quantized=model.quantization.name if model.quantization else None,
        )  # fmt: skip

    a, b = (manifest.settings.compute_dtype for manifest in pair.manifests)
    computed: PointState = "pass" if a == b else "fail"
    return worst(computed, pair.state_of("dtype"), pair.state_of("quantization")), both(pair, say)


_LIBRARIES = ("torch", "transformers")
_SETTINGS = ("engine", "model class", "config", "attention")
_LINES = (*_SETTINGS, CPU_OPERATORS, "substituted operators")
"""Lines of preflight about what computes, beside the code itself."""


def code(pair: CheckedPair) -> Said:
    """Is the same computed, by the same code?"""
    a, b = pair.manifests
    differences = code_differences(a, b)
    lines = [pair.lines[name] for name in _LINES if pair.differs(name)]
    texts = [*map(differs, lines), *(difference.text for difference in differences)]
    lacking = [name for name, manifest in (("A", a), ("B", b)) if not manifest.model.code]
    untold = [name for name in _LINES if pair.state_of(name) == "unknown"]
    if untold:
        texts.append(fact("checklist.lines_not_known", checks=untold))
    if lacking:
        texts.append(fact("checklist.code_not_recorded", sides=lacking))
    if not texts:
        return "pass", [both(pair, _say)], False
    text = fact("checklist.first_parts", parts=texts)
    verdict = pair.verdict
    if verdict is not None and verdict.kind in ("identical", "within_floor"):
        if not (lines or differences):
            return "unknown", [text], False
        effect = fact("checklist.effect", what=text, identical=verdict.kind == "identical")
        return "pass", [effect], False
    if not lines and not differences:
        return "unknown", [text], False
    if not pair.diverged:  # compare abstains: whether it makes a difference is not known
        why = fact("checklist.unjudged_code", what=text, why=pair.why_unjudged)
        return "unknown", [why], False
    assert verdict is not None
    guilty = [difference for difference in differences if _explains(difference, verdict, pair)]
    if guilty:
        assert verdict.onset is not None
        begin = fact("checklist.code_explains", difference=guilty[0].text, site=verdict.onset.site)
        return "fail", [begin], True
    return "fail", [text], False


def settings_differ(pair: CheckedPair) -> bool:
    """Is there a difference that capturing the candidate like the reference takes away?"""
    return any(map(pair.differs, _SETTINGS))


def _say(manifest: Manifest) -> Fact:
    return fact("checklist.same_code", num=len(manifest.model.code))


def _explains(difference: CodeDifference, verdict: Verdict, pair: CheckedPair) -> bool:
    """Is the onset where this code runs, and is the error in the blocks that run it and in no
    other?"""
    onset = verdict.onset
    if onset is None or not difference.places or not _runs_at(difference, onset):
        return False
    if not difference.deliberate and _other_versions(*pair.manifests):
        return False
    assert pair.report is not None
    blocks = {site.block for site in pair.report.sites if site.block is not None}
    beyond = {site.block for site in pair.report.sites if site.flagged and site.block is not None}
    running = {block for block in blocks if difference.concerns(block)}
    return not running or (
        beyond <= running and (verdict.kind == "systematic" or running <= beyond)
    )


def _runs_at(difference: CodeDifference, onset: Onset) -> bool:
    """Does a module of this class lie in the one that the onset names? What enters a module was
    made by those around it."""
    if difference.concerns(module_of(onset.site)):
        return True
    path = starred(module_of(onset.site))
    return ":in" in onset.site and any(
        place == ROOT or path.startswith(f"{place}.") for place in difference.places
    )


def _other_versions(a: Manifest, b: Manifest) -> bool:
    versions_a, versions_b = a.environment.versions, b.environment.versions
    return any(versions_a.get(name) != versions_b.get(name) for name in _LIBRARIES)
