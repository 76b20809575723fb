"""Distributions: how far apart the logits are, the worst over the steps of each phase and pass."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.document import Column, Section, Table
from divergence.run.site import PHASES
from divergence.words import decimal, fixed


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


_COLUMNS = (
    "phase",
    "pass",
    Column("KL mean", decimal),
    Column("KL max", decimal),
    Column("same top 1", _percent),
    Column("top 5", _percent),
    Column("least margin", fixed),
    Column("Δlogp", decimal),
)


def sections(report: Report, **_: object) -> list[Section]:
    """Nothing where no logits were recorded."""
    rows = []
    for pass_ in ("anchored", "free"):
        for phase in PHASES:
            sites = (s for s in report.sites if (s.pass_, s.phase) == (pass_, phase))
            group = [site.logits for site in sites if site.logits is not None]
            if group:
                rows.append(
                    (
                        phase,
                        pass_,
                        max(item.kl_mean for item in group),
                        max(item.kl_max for item in group),
                        min(item.top1_agreement for item in group),
                        min(item.top5_overlap for item in group),
                        min(item.margin_min for item in group),
                        max(item.chosen_logprob_diff_max for item in group),
                    )
                )
    section = Section(
        id="logits",
        title="logits",
        detail="distributions over the next token, the worst of all steps; KL in nats from A to B",
        body=[Table(title="the worst of all steps", columns=_COLUMNS, rows=rows, num_left=2)],
    )
    return [section] if rows else []
