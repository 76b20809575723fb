"""Log-probabilities in a report: the numbers by the names that people know them by."""

from __future__ import annotations

import math

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table, each_in
from divergence.domains.logprobs.result import LogprobsResult
from divergence.words import count, decimal

_MARKS = {"bad": "wrong", "raised": "differs"}


def sections(report: Report, *, background: Background | None = None, **_: object) -> list[Section]:
    """Nothing where models were compared."""
    result = report.parts.get("logprobs")
    if not isinstance(result, LogprobsResult):
        return []
    rows: list[tuple[str, ...]] = []
    delta, kl = result.delta, result.divergence
    if delta is not None:
        rows += [
            (
                "mean |Δ log p|",
                decimal(delta.mean_abs),
                f"rounding explains {decimal(result.explained)} ({result.explained_by})",
            ),
            ("mean Δ log p", decimal(delta.mean), "B less A, nats"),
            (
                "p50, p90, p99, max",
                ", ".join(
                    decimal(value)
                    for value in (delta.median_abs, delta.p90_abs, delta.p99_abs, delta.max_abs)
                ),
                f"of |Δ|, {count(delta.num_tokens, 'token')}",
            ),
        ]
    if (layers := result.layers) is not None and layers.share is not None:
        where = f", {layers.block}" if layers.block else ""
        rows.append(
            ("layers show", f"{layers.share:.0%}", f"of Δ log p; they are {layers.kind}{where}")
        )
    if (texts := result.texts) is not None:
        seen = (
            "no test" if texts.p_value is None else f"p = {texts.p_value:.2g} of one distribution"
        )
        rows.append(
            ("MMD²", decimal(texts.mmd), f"{texts.num_answers:,} drawn answers each, {seen}")
        )
    if kl is not None:
        upper = "unbounded" if kl.kl_upper is None else decimal(kl.kl_upper)
        rows += [
            (
                "KL",
                f"{decimal(kl.kl_lower)} to {upper}",
                f"over common top lists, {kl.tail:.2%} of the probability outside",
            ),
            (
                "KL p50, p99, max",
                ", ".join(map(decimal, (kl.kl_median, kl.kl_p99, kl.kl_max))),
                "of its lower bound, token by token",
            ),
            ("same top p", f"{kl.same_top:.2%}", "of tokens whose likeliest one is the same"),
            ("total variation", f"{decimal(kl.tv_lower)} to {decimal(kl.tv_upper)}", ""),
        ]
    if (cost := result.perplexity) is not None:
        correlation = (
            "" if cost.ln_correlation is None else f", correlation {cost.ln_correlation:.2%}"
        )
        rows += [
            (
                "Δp",
                f"{cost.delta_p_mean:+.3%}",
                f"mean; RMS {cost.delta_p_rms:.3%}, 1% "
                f"{cost.delta_p_p1:+.2%}, 99% {cost.delta_p_p99:+.2%}",
            ),
            (
                "perplexity",
                f"{cost.reference:.5g} -> {cost.candidate:.5g}",
                f"ln ratio {cost.ln_ratio:+.3g} ± {decimal(cost.ln_ratio_error)}{correlation}",
            ),
        ]
    body: list[Block] = [
        Table(caption="How far apart", columns=("", "", ""), rows=rows, num_left=3)
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
                caption="What trainers watch",
                columns=("trainer-rollout", Column("value", "{:.4g}".format), *titles),
                rows=rows_watched,
                marks=[_MARKS.get(state, "") for *_, state in rows_watched],
            )
        )
    more: list[Block] = []
    if len(result.sequences) > (1 if background is None else 0):
        more.append(
            Table(
                caption="Prompts, the ones that differ most first",
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
            heading="Log-probabilities",
            detail=f"{prompts}, {equal} tokens equal",
            body=body,
        ),
        *[Section(id="prompts", heading="Prompts", body=more, verbose=True)] * bool(more),
    ]
