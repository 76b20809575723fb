"""Shows what `quantize` says: the cost of a scheme, matrix by matrix, and what to keep."""

from __future__ import annotations

import math

from divergence.document import Column, Document, Headline, Section, Table, named
from divergence.domains.quantization.result import (
    Cost,
    MatrixCost,
    Quantization,
    QuantizationPolicy,
)
from divergence.facts import Fact, fact
from divergence.words import count, list_names


def told_by() -> list[Fact]:
    """Return what tells the cost of codes that are on one side alone."""
    return [fact("quantization.matrices_pay")]


def quantization_document(result: Quantization) -> Document:
    """The cost in one sentence, what was quantised, matrix by matrix. Where more than the cost was
    asked for, most figures of it stand behind ``-v``."""
    cost, policy = result.cost, result.policy
    if cost is None:
        text = f"{_matrices(result.num_quantized)} quantised; the model gives no next-token choices"
    else:
        text = (
            f"{result.scheme} costs {_nats(cost.kl_mean)} nats of KL a token; the likeliest "
            f"token stays at {_percent(cost.same_top)} of {count(cost.num_tokens, 'position')}"
        )
    if policy is not None:
        text += f"; {_kept(policy)}"
    # the cost is that of the whole scheme; what the policy keeps, and costs, stands below it
    later = [] if policy is None else policy.keep
    before = [name for name in result.kept if name not in later]
    kept = f"; kept: {list_names(before, 4)}" if before else ""
    what = (
        "keys and values"
        if result.scheme_as_run.weights is None
        else (_matrices(result.num_quantized + len(later)))
    )
    if later:
        what += f" ({result.num_quantized:,} with the policy below)"
    figures = [("model", f"{result.model}, {result.dtype}"), *(_cost(cost) if cost else ())]
    notes = [("scheme", f"{result.scheme}: {result.says}"), ("quantised", f"{what}{kept}")]
    more = []
    if result.matrices:  # what they cost is the answer
        body = [named(*fact, indent=2) for fact in figures]
        more = [Section(title="cost", body=body, verbose=True), *_each_alone(result)]
    notes += figures[1:2] if result.matrices else figures
    if policy is not None:
        notes += _policy(policy)
    if result.unsmoothed is not None and cost is not None:
        without, alpha = result.unsmoothed, result.scheme_as_run.smooth
        gain = without.kl_mean - cost.kl_mean
        word = "it helps" if gain > 0 else "it hurts"
        if abs(gain) <= math.hypot(cost.kl_error, without.kl_error):
            word = "no difference beyond what so few tokens tell"
        both = f"KL {_nats(cost.kl_mean)}, without {_nats(without.kl_mean)}"
        notes.append(("migration", f"alpha {alpha:g}: {both}: {word}"))
    notes += [("written", result.out)] if result.out is not None else []
    notes += [("note", note) for note in result.notes]
    if later:
        names = Table(columns=("",), rows=[(name,) for name in later])
        more.append(Section(title="kept in floating point", body=[names], verbose=True))
    return Document(
        headline=Headline("", text, "bold"),
        known=[named(*fact) for fact in notes],
        sections=more,
        next=result.next,
    )


def _cost(cost: Cost) -> list[tuple[str, str]]:
    rows = [
        (
            "KL",
            f"mean {_with(cost.kl_mean, cost.kl_error)}, median {_nats(cost.kl_median)}, "
            f"90% {_nats(cost.kl_p90)}, 99% {_nats(cost.kl_p99)}, max {_nats(cost.kl_max)} nats",
        ),
        ("same top", _percent_with(cost.same_top, cost.same_top_error)),
    ]
    if cost.delta_p_mean is not None:
        assert cost.delta_p_error is not None and cost.delta_p_rms is not None
        rows.append(
            (
                "Δp",
                f"mean {_percent_with(cost.delta_p_mean, cost.delta_p_error, '+')}, RMS "
                f"{_percent(cost.delta_p_rms)}, 1% {_signed(cost.delta_p_p1)}, "
                f"99% {_signed(cost.delta_p_p99)}",
            )
        )
    if cost.ln_ratio is not None and cost.perplexity is not None:
        text = f"{_nats(cost.perplexity_base)} -> {_nats(cost.perplexity)}; ln ratio "
        text += _with(cost.ln_ratio, cost.ln_ratio_error, "+")
        if cost.ln_correlation is not None:
            text += f"; correlation of ln PPL {_percent(cost.ln_correlation)}"
        rows.append(("perplexity", text))
    return rows


def _each_alone(result: Quantization) -> list[Section]:
    precise, rough = "{:.3g}".format, "{:.2g}".format
    alone = Table(
        rows=list(map(_row, result.worst())),
        num_left=0,
        most=3,
        more="-v lists them",
        columns=(
            Column("KL alone", _nats),
            Column("same top", _percent),
            Column("at its block"),
            Column("max |x|", precise),
            Column("kurtosis", precise),
            Column("quantile", rough),
            Column("matrix", left=True),
        ),
    )
    together = ""
    if result.predicted is not None and result.cost is not None:
        together = (
            f"; the quantised ones add up to KL {_nats(result.predicted)}, together they cost "
            f"{_nats(result.cost.kl_mean)}"
        )
    kinds = Table(
        columns=("", "", Column("", _nats), Column("", left=True)), rows=_kinds(result.matrices)
    )
    return [
        Section(
            title="each alone",
            detail=f"costliest first{together}",
            body=[alone],
            verbose=result.policy is not None,
        ),
        Section(
            title="by kind",
            detail="matrices, sum of KL alone, the costliest of them",
            body=[kinds],
            verbose=True,
        ),
    ]


def _row(matrix: MatrixCost) -> tuple[object, ...]:
    seen = matrix.outliers
    name = matrix.name if matrix.by_default else f"{matrix.name} (kept: {matrix.part})"
    error = None if matrix.block_error is None else f"{matrix.block_error:.1e}"
    if error is not None and matrix.times_floor is not None:
        error += f" ({matrix.times_floor:,.0f} x floor)"
    outliers = (None,) * 3 if seen is None else (seen.max, seen.kurtosis, seen.quantile_score)
    return matrix.cost.kl_mean, matrix.cost.same_top, error, *outliers, name


def _kinds(matrices: list[MatrixCost]) -> list[tuple[str, int, float, str]]:
    """(kind, how many, what they cost together, the costliest), the costliest kind first."""
    kinds: dict[str, list[MatrixCost]] = {}
    for matrix in matrices:
        leaf = matrix.name.rpartition(".")[2]
        kept = "" if matrix.by_default else f" (kept: {matrix.part})"
        kinds.setdefault(f"{leaf}{kept}", []).append(matrix)
    rows = []
    for kind, group in kinds.items():
        worst = max(group, key=lambda matrix: matrix.cost.kl_mean)
        rows.append((kind, len(group), sum(item.cost.kl_mean for item in group), worst.name))
    return sorted(rows, key=lambda row: -row[2])


def _policy(policy: QuantizationPolicy) -> list[tuple[str, str]]:
    """Return what it keeps, and how near to the target that comes."""
    measured = f"{_nats(policy.measured)}"
    if not policy.keep:
        return [("measured", f"{measured}: nothing need be kept")]
    fewer = ""
    if policy.one_fewer is not None:
        group = "of them"
        if policy.num_groups < len(policy.keep):
            groups = count(policy.num_groups, "group")
            group = f"of their {groups} (what engines fuse stays together)"
        fewer = f"; with any one {group} quantised, {_nats(policy.one_fewer)} or more"
    runs = count(policy.num_runs, "model")
    return [
        ("to keep", list_names(policy.keep, 4)),
        ("measured", f"{measured}, predicted {_nats(policy.predicted)}{fewer} ({runs} run)"),
    ]


def _kept(policy: QuantizationPolicy) -> str:
    what = "KL" if policy.measure == "kl" else "|Δ log p|"
    if not policy.keep:
        return f"{what} <= {policy.target:g} holds with nothing kept"
    num = policy.num_kept_weights
    return (
        f"{what} <= {policy.target:g} holds with {_matrices(len(policy.keep))} kept in "
        f"floating point ({f'{num / 1e6:.3g} M' if num >= 1e6 else f'{num:,}'} weights)"
    )


def _matrices(number: int) -> str:
    return "1 matrix" if number == 1 else f"{number:,} matrices"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


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
