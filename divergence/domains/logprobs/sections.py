"""Log-probabilities in a report: the numbers by the names that people know them by."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table, each_in
from divergence.domains.logprobs.result import LogprobsResult
from divergence.facts import fact, sentence
from divergence.words import count, decimal

_MARKS = {"bad": "wrong", "raised": "differs"}
_SHOWN = (
    ("mean |Δ log p|", "delta", "shown_mean_abs"),
    ("mean Δ log p", "delta", "shown_mean"),
    ("of |Δ|", "delta", "shown_quantiles"),
    ("layers show", "layers", "shown_layers"),
    ("MMD²", "texts", "shown_texts"),
    ("KL", "divergence", "shown_kl"),
    ("KL of a token", "divergence", "shown_kl_quantiles"),
    ("same top p", "divergence", "shown_same_top"),
    ("total variation", "divergence", "shown_total_variation"),
    ("Δp", "perplexity", "shown_delta_p"),
    ("perplexity", "perplexity", "shown_perplexity"),
)
"""Each with the field that holds it, and its sentence."""


def sections(report: Report, *, background: Background | None = None, **_: object) -> list[Section]:
    """Nothing where models were compared."""
    result = report.parts.get("logprobs")
    if not isinstance(result, LogprobsResult):
        return []
    rows = []
    for name, field, code in _SHOWN:
        numbers = getattr(result, field)
        if numbers is not None and (field != "layers" or numbers.share is not None):
            bound: dict[str, Any] = {
                "explained": result.explained,
                "explained_by": result.explained_by,
            }
            shown = fact(f"logprobs.{code}", **msgspec.structs.asdict(numbers), **bound)
            rows.append((name, shown))
    body: list[Block] = [
        Table(title="how far apart", columns=("", Column("", sentence)), rows=rows, num_left=2)
    ]
    checks = {check.name: check for check in result.checks}
    if result.rollout:  # what trainers watch, then the rest of those numbers
        values = sorted(result.rollout.items(), key=lambda item: item[0] not in checks)
        titles = (Column(title, left=True) for title in ("of", "normal", ""))
        rows_watched = [
            (name, value, check.framework, check.normal, check.state)
            if (check := checks.get(name)) is not None
            else (name, value, "", "", "")
            for name, value in values
        ]
        body.append(
            Table(
                title="numbers that trainers watch",
                columns=("trainer-rollout", Column("value", "{:.4g}".format), *titles),
                rows=rows_watched,
                marks=[_MARKS.get(state, "") for *_, state in rows_watched],
            )
        )
    more: list[Block] = []
    if len(result.sequences) > (1 if background is None else 0):
        more.append(
            Table(
                title="prompts",
                detail="the ones that differ most first",
                folded=f"All {len(result.sequences):,} prompts",
                most=5,
                **each_in(
                    result.sequences,
                    ("prompt", "sample"),
                    (Column("tokens", "{:,}".format), "num_tokens"),
                    (Column("mean |Δ|", decimal), "mean_abs"),
                    (Column("mean Δ", decimal), "mean"),
                    (Column("max |Δ|", decimal), "max_abs"),
                    ("at", "worst_position"),
                    (Column("log ratio", "{:.4g}".format), "log_ratio"),
                    (Column("exp|Δ|", "{:.4f}".format), "mult_prob_error"),
                ),
            )
        )
    if result.delta is not None and result.delta.by_position:
        tenths = " ".join(
            "-" if math.isnan(mean) else decimal(mean) for mean in result.delta.by_position
        )
        text = f"mean |Δ| by tenths of the longest answer: {tenths}"
        more.append(Sentence(text, "along", indent=0, hang=12))
    equal = f"{result.num_equal:,} of {result.num_tokens:,}"
    prompts = count(result.num_sequences, "prompt")
    return [
        Section(
            id="logprobs",
            title="log-probabilities",
            detail=f"{prompts}, {equal} tokens equal",
            body=body,
        ),
        *[Section(id="prompts", heading="Prompts", body=more, verbose=True)] * bool(more),
    ]
