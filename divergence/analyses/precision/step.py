"""The precision policy of a training step, as rows of the audit.

Held to common practice, which is stated with each row, and named where a side is below it: sums of
gradients in 16 bits, and weights in 16 bits that the optimizer steps themselves, are the two that
cost a training run its last bits. Dtypes are those of the step's tensors (StepPrecision), not those
that were asked for.

Sources: Micikevicius et al., "Mixed precision training", ICLR 2018 (float32 copies of weights);
Megatron-LM, which adds up and reduces gradients in float32 by default where weights are bfloat16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from divergence.analyses.precision.expectations import is_below
from divergence.comparison.results.operators import AuditFinding, AuditRow, Part
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.provenance import StepPrecision
from divergence.run.schema.site import of_parameter
from divergence.words import SideOrBoth

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured

__all__ = ["PHASES", "gradient_errors", "step_rows"]

_MEGATRON = "Megatron-LM's default"
_EXPECTED: dict[Part, tuple[str, bool]] = {
    "reduced gradients": (_MEGATRON, True),
    "gradient sums": (_MEGATRON, True),
    "main weights": ("Micikevicius et al. 2018", True),
    "moments": ("common practice", True),
    "buffers": ("common practice", False),
}
"""Who expects float32, and whether a side below it is named."""

PHASES: dict[Part, str] = {
    "reduced gradients": "backward", "gradient sums": "backward",
    "main weights": "optimizer", "moments": "optimizer",
}  # fmt: skip
"""Where what a part does is first seen: in parameters' gradients, or in what they become."""

_READ: dict[Part, Callable[[StepPrecision], str | None]] = {
    "reduced gradients": lambda step: step.reduction,
    "gradient sums": lambda step: step.gradients,
    "main weights": lambda step: step.main_weights,
    "moments": lambda step: step.moments,
    "buffers": lambda step: step.buffers,
}
_DOES: dict[Part, tuple[str, str]] = {
    "reduced gradients": ("reduces", "reduce"),
    "gradient sums": ("adds up", "add up"),
    "moments": ("keeps", "keep"),
    "buffers": ("keeps", "keep"),
}
_WHAT: dict[Part, str] = {
    "reduced gradients": "gradients among ranks", "gradient sums": "micro-batches' gradients",
    "moments": "the optimizer's moments", "buffers": "the model's buffers",
}  # fmt: skip


def step_rows(
    reference: Manifest, candidate: Manifest | None
) -> tuple[list[AuditRow], list[AuditFinding]]:
    """Of one run, or of two. Nothing where no side made a training step in its own dtype."""
    sides = [_step(manifest) for manifest in (reference, candidate)]
    if sides == [None, None]:
        return [], []
    rows, findings = [], []
    for part, read in _READ.items():
        dtypes = [None if step is None else read(step) for step in sides]
        if part == "gradient sums":  # one micro-batch is no sum
            dtypes = [
                dtype if manifest is not None and len(manifest.tokens.groups) > 1 else None
                for dtype, manifest in zip(dtypes, (reference, candidate), strict=True)
            ]
        if dtypes == [None, None]:
            continue
        by, named = _EXPECTED[part]
        below = [dtype is not None and is_below(dtype, ["float32"]) for dtype in dtypes]
        whose: SideOrBoth | None = None
        if any(below):
            whose = "both" if all(below) else "reference" if below[0] else "candidate"
        given: list[list[str] | None] = [
            None if step is None else [dtype] if dtype is not None else []
            for step, dtype in zip(sides, dtypes, strict=True)
        ]
        row = AuditRow(
            part=part, reference=given[0], candidate=given[1], expected=["float32"],
            expected_by=by, own=named, below=whose,
            differs=None not in dtypes and dtypes[0] != dtypes[1], num_places=1,
        )  # fmt: skip
        rows.append(row)
        if row.differs or (whose is not None and named):
            text = _sentence(row, sides, alone=candidate is None)
            findings.append(AuditFinding(part=part, text=text))
    return rows, findings


def gradient_errors(measured: Measured) -> str:
    """``; their error against the truth: A 4e-3, B 2e-3 ...``: the median parameter's. Empty
    without a truth."""
    known = [
        site.truth for site in measured.sites
        if site.pass_ == "free" and site.phase == "backward" and of_parameter(site.site)
        and site.truth is not None
    ]  # fmt: skip
    if not known:
        return ""
    errors = (
        statistics.median(truth.reference_error for truth in known),
        statistics.median(truth.candidate_error for truth in known),
    )
    said = ", ".join(f"{side} {error:.1e}" for side, error in zip("AB", errors, strict=True))
    return f"; parameters' gradients are off the truth by {said} (median parameter)"


def _step(manifest: Manifest | None) -> StepPrecision | None:
    if manifest is None or manifest.settings.compute_dtype is not None:
        return None
    return manifest.training.precision


def _sentence(row: AuditRow, sides: list[StepPrecision | None], *, alone: bool) -> str:
    dtypes = [cell[0] if cell else None for cell in (row.reference, row.candidate)]
    odd = 0 if row.below == "reference" else 1
    if row.below is None and dtypes[1] == "float32":
        odd = 0
    if alone or row.below == "both":
        odd = 0
    who = "the run" if alone else "both sides" if row.below == "both" else "AB"[odd]
    if not alone and row.below == "both" and row.differs:
        who = "A"
    many = who == "both sides"
    expected = f"; expected {row.expected[0]} ({row.expected_by})"
    other = dtypes[1 - odd]
    beside = f", {'BA'[odd]} in {other}" if not alone and not many and other else ""
    if row.part == "main weights":
        steps = "step" if many else "steps"
        text = f"{who} {steps} the {dtypes[odd]} weights themselves, without float32 copies"
        lost = _lost([sides[odd]] if not many else sides)
        beside = f" ({'BA'[odd]} has them)" if beside and other == "float32" else ""
        return f"{text}{beside}{lost}{expected}"
    does = _DOES[row.part][many]
    return f"{who} {does} {_WHAT[row.part]} in {dtypes[odd]}{beside}{expected}"


def _lost(steps: list[StepPrecision | None]) -> str:
    """What the step did not move."""
    shares = [
        step.num_unmoved / step.num_stepped
        for step in steps
        if step is not None and step.num_stepped
    ]
    if not shares or not max(shares):
        return ""
    said = " and ".join(f"{share:.1%}" for share in shares)
    return f": {said} of the weights that have a gradient did not move, the step was too small"
