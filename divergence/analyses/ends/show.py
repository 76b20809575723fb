"""Distributions: how far apart the logits are, the worst over the steps of each phase and pass."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.layout import BLANK, Line, columns, decimal, fixed, heading

__all__ = ["show"]


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Distributions, worst over the steps of each phase and pass."""
    rows = []
    for pass_ in ("anchored", "free"):
        for phase in ("prefill", "decode"):
            group = [
                site.logits
                for site in report.sites
                if site.logits is not None
                and site.pass_ == pass_
                and (site.step == 0) == (phase == "prefill")
            ]
            if group:
                rows.append(
                    (
                        f"{phase}, {pass_}",
                        decimal(max(item.kl_mean for item in group)),
                        decimal(max(item.kl_max for item in group)),
                        f"{100 * min(item.top1_agreement for item in group):.4g}%",
                        f"{100 * min(item.top5_overlap for item in group):.4g}%",
                        fixed(min(item.margin_min for item in group)),
                        decimal(max(item.chosen_logprob_diff_max for item in group)),
                    )
                )
    if not rows:
        return []
    titles = (
        "pass",
        "KL mean",
        "KL max",
        "same top 1",
        "same top 5",
        "least margin",
        "chosen Δlogp",
    )
    return [
        heading("logits", "KL in nats from reference to candidate; the worst of all steps"),
        *columns([titles, *rows]),
        BLANK,
    ]
