"""`divergence compare` of two files of losses, and what it shows."""

from __future__ import annotations

from functools import partial

from divergence.cli.answers import exit_with, progress_bars, show_document
from divergence.document import Column, Document, Headline, Section, Table, each_in, named
from divergence.domains.training.result import CurveDiff, LossReport
from divergence.options.commands import Output
from divergence.words import relative


def compare(
    reference: str,
    candidate: str | None,
    *,
    exit_code: bool,
    output: Output,
    warmup_steps: int | None = None,
) -> None:
    """Compares both curves, and shows the answer."""
    from divergence.domains.training.judging import compare_losses

    with progress_bars(quiet=output.silent):
        report = compare_losses(reference, candidate, warmup_steps=warmup_steps)
    show_document(losses_document(report), output, json=partial(report.to_json, indent=2))
    if exit_code:
        exit_with(EXIT_CODES[report.verdict.kind])
    if not report.metrics[0].num_steps and report.verdict.kind == "undetermined":
        exit_with(2)  # nothing was compared


_HEADLINES = {
    "identical": "IDENTICAL",
    "aligned": "ALIGNED",
    "misaligned": "MISALIGNED",
    "drift": "DRIFTED",
    "nonfinite": "NAN OR INF",
    "undetermined": "NO ANSWER",
}
EXIT_CODES = {
    "identical": 0,
    "aligned": 0,
    "misaligned": 1,
    "drift": 1,
    "nonfinite": 1,
    "undetermined": 2,
}


def losses_document(report: LossReport) -> Document:
    """Return what is shown of both curves."""
    low, high = report.bands
    style = {0: "bold green", 1: "bold red", 2: "bold yellow"}[EXIT_CODES[report.verdict.kind]]
    about = [
        *(("note", note) for note in report.notes),
        ("A", report.reference),
        ("B", report.candidate),
        ("left out", f"{report.warmup_steps} steps of warm-up"),
        (
            "bands",
            f"a rule of thumb, not statistics: up to {low:.0%} aligned, above "
            f"{high:.0%} misaligned",
        ),
    ]
    figures = each_in(
        report.metrics,
        ("metric", "metric"),
        (Column("steps", "{:,}".format), "num_steps"),
        (Column("mean error", relative), "mean_error"),
        (Column("signed", _signed), "mean_diff"),
        (Column("at the end", _signed), "end_diff"),
        (Column("largest", relative), "max_error"),
        ("at step", "max_step"),
        (Column("noise", relative), "noise"),
        (Column("leaves noise", _leaves_noise), lambda curve: curve),
        (Column("first beyond", "step {}".format), "jump_at"),
    )
    table = Table(**figures)
    return Document(
        headline=Headline(_HEADLINES[report.verdict.kind], report.verdict.summary, style),
        known=[named(*fact) for fact in about],
        sections=[
            Section(title="relative difference of a step", detail="(B - A) / |A|", body=[table])
        ],
    )


def _leaves_noise(curve: CurveDiff) -> str:
    parts = f"near step {curve.trend.parts_at}"
    return {"parts": parts, "within_noise": "no"}.get(curve.trend.state, "not told")


def _signed(value: float) -> str:
    return relative(value, "+")
