"""Distributions: how far apart the logits are, the worst over the steps of each phase and pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from divergence.comparison.result import Report
from divergence.document import Column, Section, Table
from divergence.run.site import PHASES
from divergence.words import decimal, fixed


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


_WORST: tuple[tuple[Column, str, Callable[..., float]], ...] = (
    (Column("KL mean", decimal), "kl_mean", max),
    (Column("KL max", decimal), "kl_max", max),
    (Column("same top 1", _percent), "top1_agreement", min),
    (Column("top 5", _percent), "top5_overlap", min),
    (Column("least margin", fixed), "margin_min", min),
    (Column("Δlogp", decimal), "chosen_logprob_diff_max", max),
)
"""Each with its attribute of the logits' difference, and which value of several is the worst."""


def sections(report: Report, **_: object) -> list[Section]:
    """Nothing where no logits were recorded."""
    rows = []
    for pass_, phase in product(("anchored", "free"), PHASES):
        sites = (s for s in report.sites if (s.pass_, s.phase) == (pass_, phase))
        group = [site.logits for site in sites if site.logits is not None]
        if group:
            worst = (of(getattr(item, name) for item in group) for _, name, of in _WORST)
            rows.append((phase, pass_, *worst))
    columns: tuple[Column | str, ...] = ("phase", "pass", *(column for column, *_ in _WORST))
    section = Section(
        id="logits",
        title="logits",
        detail="distributions over the next token, the worst of all steps; KL in nats from A to B",
        body=[Table(title="the worst of all steps", columns=columns, rows=rows, num_left=2)],
    )
    return [section] if rows else []
