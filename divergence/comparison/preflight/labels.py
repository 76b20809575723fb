"""The labels of two training steps: the same on both sides, and where not, from which token on."""

from __future__ import annotations

from divergence.comparison.results.findings import PreflightLine
from divergence.run.schema.contents import labels_text
from divergence.run.schema.manifest import NO_LABEL, Manifest

__all__ = ["label_lines"]


def label_lines(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Other labels are another loss, so another experiment. Empty where each token is its own label
    on both sides, and where the prompts themselves differ."""
    samples = a.tokens.samples, b.tokens.samples
    given = any(sample.labels is not None for side in samples for sample in side)
    ids = [[sample.prompt_ids for sample in side] for side in samples]
    if not given or ids[0] != ids[1]:
        return []
    detail = None
    for number, (one, two) in enumerate(zip(*samples, strict=True)):
        if one.used_labels != two.used_labels:
            pairs = enumerate(zip(one.used_labels, two.used_labels, strict=False), 1)
            place, both = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            here, there = ("none" if label == NO_LABEL else label for label in both)
            detail = f"prompt {number}, token {place}: label {here} against {there}"
            break
    return [
        PreflightLine(
            check="labels", status="same" if detail is None else "blocking",
            reference=labels_text(a.tokens) or "each token its own",
            candidate=labels_text(b.tokens) or "each token its own", detail=detail,
        )
    ]  # fmt: skip
