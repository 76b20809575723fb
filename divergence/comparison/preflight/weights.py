"""Do both sides compute with the same weights? By digests of their parameters."""

from __future__ import annotations

from typing import Any

from divergence.comparison.align.pairs import NameMap
from divergence.comparison.preflight.models import (
    Matching,
    as_far_as_told,
    match_parameters,
    tells_in_part,
    weight_causes,
)
from divergence.comparison.preflight.relations import Relations, related
from divergence.comparison.results import PreflightLine, PreflightStatus
from divergence.facts import Fact, apart, fact
from divergence.run.manifest import Manifest, ModelIdentity

__all__ = ["other_weights", "weights_line"]


def weights_line(a: Manifest, b: Manifest, names: NameMap | None) -> PreflightLine:
    """Where they are not simply equal. ``names``: the name map that the comparison uses."""
    model_a, model_b = a.model, b.model
    matching = match_parameters(model_a.digests, model_b.digests, names)
    relations = related(model_a, model_b, matching.pairs)
    status, details = _weights_differ(model_a, model_b, matching, relations)
    if status == "blocking" and any(map(tells_in_part, (a, b))):
        status, details = as_far_as_told(model_a, model_b, matching)
    if status == "blocking" or (status == "differs" and model_a.dtype != model_b.dtype):
        guess = relations is None or not relations.facts
        details = [*details, *weight_causes(model_a, model_b, guess=guess)]
    shown = [f"{model.digest[:12]} ({model.dtype})" for model in (model_a, model_b)]
    return PreflightLine(check="weights", status=status, details=apart(details),
                         reference=shown[0], candidate=shown[1])  # fmt: skip


def _weights_differ(
    a: ModelIdentity, b: ModelIdentity, matching: Matching, relations: Relations | None
) -> tuple[PreflightStatus, list[Fact]]:
    """(status, details) of two models' weights. ``matching``: their parameters by name;
    ``relations``: of those that differ, where it is known."""

    def say(
        status: PreflightStatus, code: str, **values: Any
    ) -> tuple[PreflightStatus, list[Fact]]:
        return status, [fact(f"preflight.{code}", **values)]

    same: tuple[PreflightStatus, list[Fact]] = "same", []
    if missing := a.missing or b.missing:
        same = say("same", "missing", num=len(missing), names=missing)
    if a.digest == b.digest and a.dequantized == b.dequantized:
        return same
    if a.digest == b.digest:
        from divergence.comparison.preflight.quantization import dequantized_otherwise

        otherwise = dequantized_otherwise(a, b)
        return same if otherwise is None else ("blocking", [otherwise])
    digested = bool(a.digests and b.digests)
    if a.quantization != b.quantization:
        return say("differs", "codes_against", reference=_codes(a), candidate=_codes(b))
    if a.dtype != b.dtype:
        rounded = a.rounded_digests.get(b.dtype), b.rounded_digests.get(a.dtype)
        if b.digest == rounded[0]:
            return say("same", "rounded", wide=a.dtype, narrow=b.dtype)
        if a.digest == rounded[1]:
            return say("same", "rounded", wide=b.dtype, narrow=a.dtype)
        if digested and not matching.is_one_to_one:
            return say("blocking", "other_parameters", matching=matching.describe())
        if relations is not None and digested:
            return relations.status, relations.details or [fact("preflight.other_weights")]
        if set(a.digests) != set(b.digests):
            return say("differs", "digests_of_other_names")
        if any(rounded):
            return say("blocking", "other_after_rounding")
        return say("differs", "digests_of_dtypes")
    if unknown := _offloaded(a.digests, b.digests):
        return say("differs", "offloaded", num=len(unknown))
    if not digested:
        return say("blocking", "no_digests")
    different = [
        name for name, other in matching.pairs.items() if a.digests[name] != b.digests[other]
    ]
    if different:
        details = [] if relations is None else relations.details
        if relations and details and relations.status == "differs" and matching.is_one_to_one:
            return "differs", details
        differ = fact(
            "preflight.parameters_differ", num=len(different), total=len(matching.pairs),
            names=different,
        )  # fmt: skip
        return "blocking", [differ, *details, *matching.describe()]
    if not matching.is_one_to_one:
        return say("blocking", "other_parameters", matching=matching.describe())
    if matching.prefixes or matching.mapped:
        return say("differs", "other_names", matching=matching.describe())
    return "differs", matching.describe()


def _codes(model: ModelIdentity) -> str:
    return model.dtype if model.quantization is None else model.quantization.name


def _offloaded(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Parameters that one side could not digest, if all the others agree."""
    unknown = [name for name in a if "offloaded" in (a[name], b.get(name))]
    rest = [name for name in a if name not in unknown]
    agree = a.keys() == b.keys() and all(a[name] == b[name] for name in rest)
    return unknown if agree else []


def other_weights(a: Manifest, b: Manifest) -> bool:
    """Have the two, in one dtype, weights that are not equal, as far as both tell?"""
    ref, cand = a.model, b.model
    if ref.dtype != cand.dtype or ref.digest == cand.digest:
        return False
    if not (tells_in_part(a) or tells_in_part(b)):
        relations = related(ref, cand, match_parameters(ref.digests, cand.digests).pairs)
        return (
            relations is None or not relations.only_dtypes or len(ref.digests) != len(cand.digests)
        )
    return as_far_as_told(ref, cand, match_parameters(ref.digests, cand.digests))[0] == "blocking"
