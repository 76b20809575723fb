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
from typing import TYPE_CHECKING, Any

from divergence.analyses.precision.expectations import is_below
from divergence.comparison.results import AuditFinding, AuditRow, Part
from divergence.facts import Fact, fact
from divergence.run.manifest import Manifest, StepPrecision
from divergence.run.site import of_parameter
from divergence.words import Side, SideOrBoth

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured

__all__ = ["PHASES", "gradient_errors", "step_rows"]

_EXPECTED: dict[Part, tuple[str, bool]] = {
    "reduced gradients": ("precision.megatron", True),
    "gradient sums": ("precision.megatron", True),
    "main weights": ("precision.mixed_precision", True),
    "moments": ("precision.common_practice", True),
    "buffers": ("precision.common_practice", False),
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
_CODES: dict[Part, str] = {
    "reduced gradients": "precision.reduced_gradients",
    "gradient sums": "precision.gradient_sums",
    "main weights": "precision.main_weights",
    "moments": "precision.moments",
    "buffers": "precision.buffers",
}
_SIDES: tuple[Side, Side] = ("reference", "candidate")


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
            expected_from=fact(by), own=named, below=whose,
            differs=None not in dtypes and dtypes[0] != dtypes[1], num_places=1,
        )  # fmt: skip
        rows.append(row)
        if row.differs or (whose is not None and named):
            what = _what_is_done(row, sides, alone=candidate is None)
            findings.append(AuditFinding(part=part, what=what))
    return rows, findings


def gradient_errors(measured: Measured) -> Fact | None:
    """The error of both sides' parameters' gradients against the truth: the median parameter's.
    None without a truth."""
    truths = [
        site.truth for site in measured.sites
        if site.pass_ == "free" and site.phase == "backward" and of_parameter(site.site)
        and site.truth is not None
    ]  # fmt: skip
    if not truths:
        return None
    return fact(
        "precision.gradient_errors",
        reference=statistics.median(truth.reference_error for truth in truths),
        candidate=statistics.median(truth.candidate_error for truth in truths),
    )


def _step(manifest: Manifest | None) -> StepPrecision | None:
    if manifest is None or manifest.settings.compute_dtype is not None:
        return None
    return manifest.training.precision


def _what_is_done(row: AuditRow, steps: list[StepPrecision | None], *, alone: bool) -> Fact:
    """Who does it in which dtype: the side that is below what is expected, or both alike."""
    dtypes = [cell[0] if cell else None for cell in (row.reference, row.candidate)]
    odd = 0 if row.below == "reference" else 1
    if alone or row.below == "both" or (row.below is None and dtypes[1] == "float32"):
        odd = 0
    both = not alone and row.below == "both" and not row.differs
    other = dtypes[1 - odd] if not alone and not both else None
    values: dict[str, Any] = {
        "who": "run" if alone else "both" if both else _SIDES[odd],
        "dtype": dtypes[odd],
        "expected": row.expected,
        "expected_from": row.expected_from,
    }
    if row.part == "main weights":
        shares = [
            step.num_unmoved / step.num_stepped
            for step in (steps if both else [steps[odd]])
            if step is not None and step.num_stepped
        ]
        return fact(
            _CODES[row.part], **values,
            holder=_SIDES[1 - odd] if other == "float32" else None,
            unmoved=[fact("precision.unmoved", share=share) for share in shares if any(shares)],
        )  # fmt: skip
    return fact(
        _CODES[row.part], **values, other_dtype=other,
        other=_SIDES[1 - odd] if other else None,
    )  # fmt: skip
