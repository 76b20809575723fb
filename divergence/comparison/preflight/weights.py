"""Do both sides compute with the same weights? By digests of their parameters."""

from __future__ import annotations

from divergence.comparison.align.pairs import NameMap
from divergence.comparison.preflight.models import (
    Matching,
    as_far_as_told,
    match_parameters,
    tells_in_part,
    weight_causes,
)
from divergence.comparison.preflight.relations import Relations, related
from divergence.comparison.results.findings import PreflightLine, PreflightStatus
from divergence.run.schema.manifest import Manifest, ModelIdentity
from divergence.words import list_names

__all__ = ["other_weights", "weights_line"]


def weights_line(a: Manifest, b: Manifest, names: NameMap | None) -> PreflightLine:
    """Where they are not simply equal. ``names``: the name map that the comparison uses."""
    model_a, model_b = a.model, b.model
    matching = match_parameters(model_a.digests, model_b.digests, names)
    relations = related(model_a, model_b, matching.pairs)
    status, detail = _weights_differ(model_a, model_b, matching, relations)
    if status == "blocking" and any(map(tells_in_part, (a, b))):
        status, detail = as_far_as_told(model_a, model_b, matching)
    if status == "blocking" or (status == "differs" and model_a.dtype != model_b.dtype):
        guess = relations is None or not relations.texts
        causes = weight_causes(model_a, model_b, guess=guess)
        detail = "; ".join([*filter(None, [detail]), *causes])
    shown = [f"{model.digest[:12]} ({model.dtype})" for model in (model_a, model_b)]
    return PreflightLine(check="weights", status=status, detail=detail,
                         reference=shown[0], candidate=shown[1])  # fmt: skip


def _weights_differ(
    a: ModelIdentity, b: ModelIdentity, matching: Matching, relations: Relations | None
) -> tuple[PreflightStatus, str | None]:
    """(status, detail) of two models' weights. ``matching``: their parameters by name;
    ``relations``: of those that differ, where it is known."""
    detail = None
    if missing := a.missing or b.missing:
        detail = (
            f"{len(missing)} parameters were missing from the checkpoint and are random: "
            + list_names(missing)
        )
    if a.digest == b.digest and a.dequantized == b.dequantized:
        return "same", detail
    if a.digest == b.digest:
        from divergence.comparison.preflight.quantization import dequantized_otherwise

        return dequantized_otherwise(a, b) or ("same", detail)
    digested = bool(a.digests and b.digests)
    if a.quantization != b.quantization:
        return "differs", f"{_codes(a)} against {_codes(b)}: not the same model"
    if a.dtype != b.dtype:
        rounded = a.rounded_digests.get(b.dtype), b.rounded_digests.get(a.dtype)
        if b.digest == rounded[0]:
            return "same", f"the same weights, rounded from {a.dtype} to {b.dtype}"
        if a.digest == rounded[1]:
            return "same", f"the same weights, rounded from {b.dtype} to {a.dtype}"
        if digested and not matching.is_one_to_one:
            return "blocking", f"other parameters: {matching.describe()}"
        if relations is not None and digested:
            return relations.status, relations.text or "other weights"
        if set(a.digests) != set(b.digests):
            return "differs", "digests of other names and dtypes cannot be compared"
        if any(rounded):
            return "blocking", "other weights, also after rounding to one dtype"
        return "differs", "digests of different dtypes cannot be compared"
    if unknown := _offloaded(a.digests, b.digests):
        return "differs", f"{len(unknown)} offloaded parameters were not digested"
    if not digested:
        return "blocking", "the parameters' digests are not recorded"
    different = [
        name for name, other in matching.pairs.items() if a.digests[name] != b.digests[other]
    ]
    if different:
        text = (
            f"{len(different)} of {len(matching.pairs)} parameters differ: {list_names(different)}"
        )
        if relations is not None and relations.texts:
            if relations.status == "differs" and matching.is_one_to_one:
                return "differs", relations.text
            text = f"{text}; {relations.text}"
        return "blocking", "; ".join(filter(None, (text, matching.describe())))
    if not matching.is_one_to_one:
        return "blocking", f"other parameters: {matching.describe()}"
    if matching.prefixes or matching.mapped:
        return "differs", f"the same values under other names: {matching.describe()}"
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
