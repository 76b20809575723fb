"""What `quantize` says: the cost of a scheme, matrix by matrix, and what to keep."""

from __future__ import annotations

import math

from divergence.experiments.quantization.result import (
    Cost,
    MatrixCost,
    Quantization,
    QuantizationPolicy,
)
from divergence.layout import BLANK, Line, Span, columns, count, heading, line, prose

__all__ = ["answer_line", "quantization_lines"]

_SHOWN = 12
_TITLES = ("KL alone", "same top", "at its block", "max |x|", "kurtosis", "quantile", "matrix")


def answer_line(result: Quantization) -> Line:
    """One sentence."""
    cost = result.cost
    if cost is None:
        text = f"{_matrices(result.num_quantized)} quantised; the model gives no next-token choices"
    else:
        text = (
            f"{result.scheme} costs {_nats(cost.kl_mean)} nats of KL a token; the likeliest "
            f"token stays at {_percent(cost.same_top)} of {count(cost.num_tokens, 'position')}"
        )
    policy = result.policy
    if policy is not None:
        text += f"; {_kept(policy)}"
    return Line((Span(text, "bold"),), hang=2)


def quantization_lines(result: Quantization, *, verbose: bool = False) -> list[Line]:
    """One screen; ``verbose``: every matrix."""
    lines = [answer_line(result), BLANK, prose("scheme", f"{result.scheme}: {result.says}")]
    lines.append(prose("model", f"{result.model}, {result.dtype}"))
    # the cost is that of the whole scheme; what the policy keeps, and costs, stands below it
    later = [] if result.policy is None else result.policy.keep
    before = [name for name in result.kept if name not in later]
    kept = f"; kept: {_few(before)}" if before else ""
    what = "keys and values" if result.scheme_as_run.weights is None else (
        _matrices(result.num_quantized + len(later)))  # fmt: skip
    if later:
        what += f" ({result.num_quantized:,} with the policy below)"
    lines.append(prose("quantised", f"{what}{kept}"))
    if result.cost is not None:
        lines += _cost_lines(result.cost)
    if result.unsmoothed is not None and result.cost is not None:
        lines.append(
            prose(
                "migration", _migration(result.cost, result.unsmoothed, result.scheme_as_run.smooth)
            )
        )
    if result.out is not None:
        lines.append(prose("written", result.out))
    lines += [prose("note", note) for note in result.notes]
    if result.matrices:
        lines += [BLANK, *_table(result, verbose=verbose)]
    if result.policy is not None:
        lines += [BLANK, *_policy_lines(result.policy)]
    if result.next:
        lines += [BLANK, heading("next"), *(line(f"  {item}") for item in result.next)]
    return lines


def _cost_lines(cost: Cost) -> list[Line]:
    lines = [
        prose("KL", (
        f"mean {_with(cost.kl_mean, cost.kl_error)}, median {_nats(cost.kl_median)}, "
        f"90% {_nats(cost.kl_p90)}, 99% {_nats(cost.kl_p99)}, max {_nats(cost.kl_max)} nats"
    )),
        prose("same top", _percent_with(cost.same_top, cost.same_top_error)),
    ]  # fmt: skip
    if cost.delta_p_mean is not None:
        assert cost.delta_p_error is not None and cost.delta_p_rms is not None
        lines.append(prose("Δp", (
            f"mean {_percent_with(cost.delta_p_mean, cost.delta_p_error, '+')}, RMS "
            f"{_percent(cost.delta_p_rms)}, 1% {_signed(cost.delta_p_p1)}, "
            f"99% {_signed(cost.delta_p_p99)}"
        )))  # fmt: skip
    if cost.ln_ratio is not None and cost.perplexity is not None:
        correlation = "" if cost.ln_correlation is None else (
            f"; correlation of ln PPL {_percent(cost.ln_correlation)}")  # fmt: skip
        lines.append(prose("perplexity", (
            f"{_nats(cost.perplexity_base)} -> {_nats(cost.perplexity)}; ln ratio "
            f"{_with(cost.ln_ratio, cost.ln_ratio_error, '+')}{correlation}"
        )))  # fmt: skip
    return lines


def _migration(cost: Cost, without: Cost, alpha: float | None) -> str:
    """Does it help, as measured?"""
    gain = without.kl_mean - cost.kl_mean
    doubt = math.hypot(cost.kl_error, without.kl_error)
    if abs(gain) <= doubt:
        word = "no difference beyond what so few tokens tell"
    else:
        word = "it helps" if gain > 0 else "it hurts"
    return f"alpha {alpha:g}: KL {_nats(cost.kl_mean)}, without {_nats(without.kl_mean)}: {word}"


def _table(result: Quantization, *, verbose: bool) -> list[Line]:
    worst = result.worst()
    shown = worst if verbose else worst[:_SHOWN]
    lines = [heading("each alone", f"costliest first; {_sum_text(result)}")]
    lines += columns([_TITLES, *(_row(matrix) for matrix in shown)])
    if len(worst) > len(shown):
        lines.append(line(f"  and {len(worst) - len(shown)} more: -v"))
    lines += [BLANK, heading("by kind", "matrices, sum of KL alone, the costliest of them")]
    return lines + columns(_kinds(result.matrices))


def _sum_text(result: Quantization) -> str:
    if result.predicted is None or result.cost is None:
        return ""
    whole = result.cost.kl_mean
    part = f" ({result.predicted / whole:.2f} x)" if whole > 0 else ""
    return (
        f"the quantised ones add up to KL {_nats(result.predicted)}, together they cost "
        f"{_nats(whole)}{part}"
    )


def _row(matrix: MatrixCost) -> tuple[str, ...]:
    seen = matrix.outliers
    name = matrix.name if matrix.by_default else f"{matrix.name} (kept: {matrix.part})"
    error = "-"
    if matrix.block_error is not None:
        floors = "" if matrix.times_floor is None else f" ({matrix.times_floor:,.0f} x floor)"
        error = f"{matrix.block_error:.1e}{floors}"
    return (
        _nats(matrix.cost.kl_mean), _percent(matrix.cost.same_top), error,
        "-" if seen is None else f"{seen.max:.3g}",
        "-" if seen is None else f"{seen.kurtosis:.3g}",
        "-" if seen is None else f"{seen.quantile_score:.2g}", name,
    )  # fmt: skip


def _kinds(matrices: list[MatrixCost]) -> list[tuple[str, ...]]:
    kinds: dict[str, list[MatrixCost]] = {}
    for matrix in matrices:
        leaf = matrix.name.rpartition(".")[2]
        kept = "" if matrix.by_default else f" (kept: {matrix.part})"
        kinds.setdefault(f"{leaf}{kept}", []).append(matrix)
    rows = []
    for kind, group in kinds.items():
        worst = max(group, key=lambda matrix: matrix.cost.kl_mean)
        total = sum(matrix.cost.kl_mean for matrix in group)
        rows.append((total, (kind, str(len(group)), _nats(total), worst.name)))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _policy_lines(policy: QuantizationPolicy) -> list[Line]:
    what = "KL" if policy.measure == "kl" else "|Δ log p|"
    lines = [heading(f"to hold a mean {what} of {policy.target:g} nats")]
    if not policy.keep:
        lines.append(prose("", f"nothing need be kept: {_nats(policy.measured)}", width=2))
        return lines
    fewer = ""
    if policy.one_fewer is not None:
        group = "of them"
        if policy.num_groups < len(policy.keep):
            groups = count(policy.num_groups, "group")
            group = f"of their {groups} (what engines fuse stays together)"
        fewer = f"; with any one {group} quantised, {_nats(policy.one_fewer)} or more"
    lines.append(prose("", (
        f"{_kept(policy)}: measured {_nats(policy.measured)}, predicted "
        f"{_nats(policy.predicted)}{fewer} ({count(policy.num_runs, 'model')} run)"
    ), width=2))  # fmt: skip
    return lines + [line(f"  {name}") for name in policy.keep]


def _kept(policy: QuantizationPolicy) -> str:
    what = "KL" if policy.measure == "kl" else "|Δ log p|"
    if not policy.keep:
        return f"{what} <= {policy.target:g} holds with nothing kept"
    return (
        f"{what} <= {policy.target:g} holds with {_matrices(len(policy.keep))} kept in "
        f"floating point ({_millions(policy.num_kept_weights)} weights)"
    )


def _matrices(number: int) -> str:
    return "1 matrix" if number == 1 else f"{number:,} matrices"


def _nats(value: float | None) -> str:
    """Three digits."""
    return "-" if value is None else f"{value:.3g}"


def _millions(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,}"


def _few(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _with(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3g}" + ("" if _unknown(error) else f" ± {_nats(error)}")


def _percent_with(value: float, error: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f}%" + ("" if _unknown(error) else f" ± {_percent(error)}")


def _unknown(error: float | None) -> bool:
    """One number alone has no standard error."""
    return error is None or math.isnan(error)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f}%"
