"""Distributions: how far apart the logits are, the worst over the steps of each phase and pass."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.layout import BLANK, Line, columns, decimal, fixed, heading
from divergence.run.site import PHASES

TITLES = ("pass", "KL mean", "KL max", "same top 1", "top 5", "least margin", "Δlogp")


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Distributions, worst over the steps of each phase and pass."""
    rows = logit_rows(report)
    if not rows:
        return []
    return [
        heading("logits", "KL in nats from A to B; the worst of all steps"),
        *columns([TITLES, *rows]),
        BLANK,
    ]


def logit_rows(report: Report) -> list[tuple[str, ...]]:
    """One for each phase of each pass, in the order of TITLES."""
    rows: list[tuple[str, ...]] = []
    for pass_ in ("anchored", "free"):
        for phase in PHASES:
            sites = [s for s in report.sites if s.pass_ == pass_]
            sites = [s for s in sites if s.phase == phase]
            group = [site.logits for site in sites if site.logits is not None]
            if not group:
                continue
            row = (
                f"{phase}, {pass_}",
                decimal(max(item.kl_mean for item in group)),
                decimal(max(item.kl_max for item in group)),
                f"{100 * min(item.top1_agreement for item in group):.4g}%",
                f"{100 * min(item.top5_overlap for item in group):.4g}%",
                fixed(min(item.margin_min for item in group)),
                decimal(max(item.chosen_logprob_diff_max for item in group)),
            )
            rows.append(row)
    return rows
