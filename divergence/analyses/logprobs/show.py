"""Log-probabilities in a report: the numbers by the names that people know them by."""

from __future__ import annotations

import math

from divergence.comparison.result import Report
from divergence.comparison.results import LogprobsResult
from divergence.layout import BLANK, Line, columns, count, decimal, heading, line, prose

_NUM_SEQUENCES = 5


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """The tables; with ``all_sites`` every prompt."""
    result = report.logprobs
    if result is None:
        return []
    title = f"{count(result.num_sequences, 'prompt')}, tokens equal {result.num_equal:,} of "
    lines = [heading("log-probabilities", f"{title}{result.num_tokens:,}")]
    lines += columns(number_rows(result))
    for row, item in zip(check_rows(result), columns(check_rows(result)), strict=True):
        lines.append(line((item.text, {"bad": "bold red", "raised": "yellow"}.get(row[-1], ""))))
    rows = sequence_rows(result, None if all_sites else _NUM_SEQUENCES)
    if len(rows) > 2:
        lines += [BLANK, heading("prompts", "the ones that differ most first"), *columns(rows)]
    if result.delta is not None and result.delta.by_position:
        tenths = " ".join(
            "-" if math.isnan(mean) else decimal(mean) for mean in result.delta.by_position
        )
        lines.append(prose("along", f"mean |Δ| by tenths of the longest answer: {tenths}"))
    return [*lines, BLANK]


def number_rows(result: LogprobsResult) -> list[tuple[str, ...]]:
    """Name, value and what it is."""
    rows: list[tuple[str, ...]] = []
    delta, kl = result.delta, result.divergence
    if delta is not None:
        rows += [
            ("mean |Δ log p|", decimal(delta.mean_abs),
             f"rounding explains {decimal(result.explained)} ({result.explained_by})"),
            ("mean Δ log p", decimal(delta.mean), "B less A, nats"),
            ("p50, p90, p99, max", ", ".join(
                decimal(value)
                for value in (delta.median_abs, delta.p90_abs, delta.p99_abs, delta.max_abs)
            ), f"of |Δ|, {count(delta.num_tokens, 'token')}"),
        ]  # fmt: skip
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
            ("KL", f"{decimal(kl.kl_lower)} to {upper}", f"over common top lists, "
             f"{kl.tail:.2%} of the probability outside"),
            ("KL p50, p99, max", ", ".join(map(decimal, (kl.kl_median, kl.kl_p99, kl.kl_max))),
             "of its lower bound, token by token"),
            ("same top p", f"{kl.same_top:.2%}", "of tokens whose likeliest one is the same"),
            ("total variation", f"{decimal(kl.tv_lower)} to {decimal(kl.tv_upper)}", ""),
        ]  # fmt: skip
    if (cost := result.perplexity) is not None:
        told = "" if cost.ln_correlation is None else f", correlation {cost.ln_correlation:.2%}"
        rows += [
            ("Δp", f"{cost.delta_p_mean:+.3%}", f"mean; RMS {cost.delta_p_rms:.3%}, 1% "
             f"{cost.delta_p_p1:+.2%}, 99% {cost.delta_p_p99:+.2%}"),
            ("perplexity", f"{cost.reference:.5g} -> {cost.candidate:.5g}",
             f"ln ratio {cost.ln_ratio:+.3g} ± {decimal(cost.ln_ratio_error)}{told}"),
        ]  # fmt: skip
    return rows


def check_rows(result: LogprobsResult) -> list[tuple[str, ...]]:
    """What trainers watch, then the rest of those numbers."""
    if not result.rollout:
        return []
    rows: list[tuple[str, ...]] = [("trainer-rollout", "value", "of", "normal", "")]
    watched = {check.name: check for check in result.checks}
    for name, value in sorted(result.rollout.items(), key=lambda item: item[0] not in watched):
        check = watched.get(name)
        said = ("", "", "") if check is None else (check.framework, check.normal, check.state)
        rows.append((name, f"{value:.4g}", *said))
    return rows


def sequence_rows(result: LogprobsResult, most: int | None) -> list[tuple[str, ...]]:
    """One a prompt, the worst first."""
    rows: list[tuple[str, ...]] = [
        ("prompt", "tokens", "mean |Δ|", "mean Δ", "max |Δ|", "at", "log ratio", "exp|Δ|")
    ]
    for sequence in result.sequences[:most]:
        rows.append((
            str(sequence.sample), f"{sequence.num_tokens:,}", decimal(sequence.mean_abs),
            decimal(sequence.mean), decimal(sequence.max_abs), str(sequence.worst_position),
            f"{sequence.log_ratio:.4g}", f"{sequence.mult_prob_error:.4f}",
        ))  # fmt: skip
    return rows
