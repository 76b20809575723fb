"""`divergence compare` of two files of losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from divergence.cli.answers import exit_with, show_document
from divergence.options.commands import Options, Output, option


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """What only they are asked."""

    warmup_steps: int | None = option(
        "--warmup-steps N",
        "Of two files of losses: leave out steps below N. Default: the first tenth of those in "
        "both, at most 100.",
        minimum=0,
        after="model",
    )


def compare(
    reference: str, candidate: str | None, *, exit_code: bool, output: Output,
    warmup_steps: int | None = None,
) -> None:  # fmt: skip
    """Compares both curves, and shows the answer."""
    from divergence.training.curves.judging import compare_losses
    from divergence.training.curves.show import EXIT_CODES, losses_document

    report = compare_losses(reference, candidate, warmup_steps=warmup_steps)
    show_document(losses_document(report), output, json=partial(report.to_json, indent=2))
    if exit_code:
        exit_with(EXIT_CODES[report.verdict.kind])
    if not report.metrics[0].num_steps and report.verdict.kind == "undetermined":
        exit_with(2)  # nothing was compared
