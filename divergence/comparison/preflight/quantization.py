"""How each side is quantised, scales included: those that a simulated scheme took from calibration
or migrated stand in no note of the model, and other ones are another quantised model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from divergence.comparison.results import PreflightLine
from divergence.facts import Fact, fact, sentence
from divergence.run.manifest import Calibration, EngineNote, Manifest, ModelIdentity

__all__ = ["dequantized_otherwise", "line_of_codes"]


def line_of_codes(a: Manifest, b: Manifest) -> PreflightLine:
    """Schemes; of simulated ones the migration, the matrices kept, and the first calibrated scales
    that are not the other side's."""
    shown = [_with(str(m.model.quantization or "none"), _migration(m.engine)) for m in (a, b)]
    if shown[0] == shown[1]:
        shown = [
            _with(text, own)
            for text, own in zip(shown, _simulated_apart(a.engine, b.engine), strict=True)
        ]
    return PreflightLine(
        check="quantization", status="same" if shown[0] == shown[1] else "differs",
        reference=shown[0], candidate=shown[1],
    )  # fmt: skip


def dequantized_otherwise(a: ModelIdentity, b: ModelIdentity) -> Fact | None:
    """Equal codes that became other weights on the two sides: no kernel ran yet. None where a side
    does not tell, or dequantised into another dtype."""
    if a.dtype != b.dtype:
        return None
    shared = [path for path in a.dequantized if path in b.dequantized]
    names = [path for path in shared if a.dequantized[path] != b.dequantized[path]]
    if not names:
        return None
    return fact("preflight.dequantized", num=len(names), total=len(shared), names=names)


def _with(text: str, more: str) -> str:
    """``W8A8: ... (simulated)`` with one more of its parts, before who made the codes."""
    told, by, name = text.rpartition(" (")
    return f"{told}; {more}{by}{name}" if more and told else text


def _is_simulated(note: EngineNote | None) -> bool:
    return note is not None and note.name == "quantize"


def _migration(note: EngineNote | None) -> str:
    alpha = note.options.get("smooth") if note is not None and _is_simulated(note) else None
    return "" if alpha is None else sentence(fact("preflight.scales_migrated", alpha=alpha))


def _simulated_apart(a: EngineNote | None, b: EngineNote | None) -> Sequence[str]:
    """What each side's simulation has that the other's has not, of two that follow one scheme."""
    if a is None or b is None or not (_is_simulated(a) and _is_simulated(b)):
        return "", ""
    kept = [note.facts.get("kept", "") for note in (a, b)]
    cut = any(" more" in names for names in kept) and a.options.get("keep") != b.options.get("keep")
    if kept[0] != kept[1] or cut:
        told = [str(note.options.get("keep")) for note in (a, b)] if cut else kept
        return [f"kept: {names.replace('; ', ' ')}" for names in told]
    if a.calibration is None or b.calibration is None:
        return "", ""
    return _scales_apart(a.calibration, b.calibration)


def _scales_apart(a: Calibration, b: Calibration) -> Sequence[str]:
    for code, here, there in (
        ("static_range", a.limits, b.limits),
        ("migrated_scales", a.scales, b.scales),
    ):
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            return [
                sentence(
                    fact(
                        f"preflight.{code}", name=names[0], num_more=len(names) - 1,
                        what=_first_apart(names[0], own, other),
                    )
                )
                for own, other in ((here, there), (there, here))
            ]  # fmt: skip
    return "", ""


def _first_apart(
    name: str, own: Mapping[str, list[float]], other: Mapping[str, list[float]]
) -> str:
    """A range as it is; of more numbers the first that differs."""
    mine, theirs = own.get(name), other.get(name)
    if mine is None:
        return "none"
    if len(mine) == 2:
        return f"{mine[0]:g} to {mine[1]:g}"
    pairs = enumerate(zip(mine, theirs or [], strict=False))
    channel = next((k for k, (x, y) in pairs if x != y), 0)
    return f"{mine[channel]:g} at channel {channel}"
