"""Shows what `quantize` says: the cost of a scheme, matrix by matrix, and what to keep."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from divergence.document import Column, Document, Headline, Section, Table, each_in, named
from divergence.domains.quantization.result import MatrixCost, Quantization
from divergence.facts import Fact, fact, sentence
from divergence.words import decimal, list_names


def told_by() -> list[Fact]:
    """Return what tells the cost of codes that are on one side alone."""
    return [fact("quantization.matrices_pay")]


def quantization_document(result: Quantization) -> Document:
    """The cost in one sentence, what was quantised, matrix by matrix. Where more than the cost was
    asked for, the figures of it stand behind ``-v``."""
    cost, policy = result.cost, result.policy
    top = _told("no_choices", num=result.num_quantized)
    if cost is not None:
        top = _told("costs", scheme=result.scheme, **msgspec.structs.asdict(cost))
    # the cost is that of the whole scheme; what the policy keeps, and costs, stands below it
    later = [] if policy is None else policy.keep
    before = [name for name in result.kept if name not in later]
    quantised = _told(
        "quantised",
        weights=result.scheme_as_run.weights is not None,
        num=result.num_quantized + len(later),
        then=result.num_quantized if later else None,
        kept=before,
    )
    notes = [("scheme", f"{result.scheme}: {result.says}"), ("quantised", quantised)]
    figures = [("model", f"{result.model}, {result.dtype}")]
    if cost is not None:
        # one number alone has no standard error
        values = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in msgspec.structs.asdict(cost).items()
        }
        names = {
            "KL": "kl_mean",
            "same top": "same_top",
            "Δp": "delta_p_mean",
            "perplexity": "ln_ratio",
        }
        figures += [
            (name, _told(code, **values))
            for name, code in names.items()
            if values[code] is not None
        ]
    more = []
    if result.matrices:  # what they cost is the answer
        body = [named(*fact, indent=2, width=14) for fact in figures]
        more = [Section(title="cost", body=body, verbose=True), *_each_alone(result)]
    else:
        notes += figures
    if policy is not None:
        num = policy.num_kept_weights
        weights = f"{num / 1e6:.3g} M" if num >= 1e6 else f"{num:,}"
        values = msgspec.structs.asdict(policy) | {"num": len(policy.keep) or None}
        what = "KL" if policy.measure == "kl" else "|Δ log p|"
        top += _told("holds", what=what, weights=weights, **values)
        if policy.keep:
            notes.append(("to keep", list_names(policy.keep, 4)))
        fused = policy.num_groups if policy.num_groups < len(policy.keep) else None
        notes.append(("measured", _told("measured", fused=fused, **values)))
    if result.unsmoothed is not None and cost is not None:
        gain = result.unsmoothed.kl_mean - cost.kl_mean
        error = math.hypot(cost.kl_error, result.unsmoothed.kl_error)
        migration = _told(
            "migration",
            alpha=result.scheme_as_run.smooth,
            kl=cost.kl_mean,
            without=result.unsmoothed.kl_mean,
            gain="none" if abs(gain) <= error else "helps" if gain > 0 else "hurts",
        )
        notes.append(("migration", migration))
    notes += [("written", result.out)] if result.out is not None else []
    notes += [("note", note) for note in result.notes]
    if later:
        table = Table(columns=("",), rows=[(name,) for name in later])
        more.append(Section(title="kept in floating point", body=[table], verbose=True))
    return Document(
        headline=Headline("", top, "bold"),
        known=[named(*fact) for fact in notes],
        sections=more,
        next=result.next,
    )


def _told(code: str, **values: Any) -> str:
    return sentence(fact(f"quantization.{code}", **values))


def _each_alone(result: Quantization) -> list[Section]:
    nats, rough = "{:.3g}".format, "{:.2g}".format
    alone = Table(
        most=3,
        more="-v lists them",
        names=True,
        **each_in(
            result.worst(),
            ("matrix", lambda matrix: matrix.name + " (kept)" * (not matrix.by_default)),
            (Column("KL alone", nats), "cost.kl_mean"),
            (Column("same top", "{:.2%}".format), "cost.same_top"),
            (Column("at its block", decimal), "block_error"),
            (Column("floors", "{:,.0f} ×".format), "times_floor"),
            (Column("max |x|", nats), lambda matrix: matrix.outliers and matrix.outliers.max),
            (Column("kurtosis", nats), lambda matrix: matrix.outliers and matrix.outliers.kurtosis),
            (
                Column("quantile", rough),
                lambda matrix: matrix.outliers and matrix.outliers.quantile_score,
            ),
        ),
    )
    together = ""
    if result.predicted is not None and result.cost is not None:
        together = (
            f"; the quantised ones add up to KL {nats(result.predicted)}, together they cost "
            f"{nats(result.cost.kl_mean)}"
        )
    kinds = Table(
        columns=("", "", Column("", nats), Column("", left=True)), rows=_kinds(result.matrices)
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


def _kinds(matrices: list[MatrixCost]) -> list[tuple[str, int, float, str]]:
    """(kind, how many, what they cost together, the costliest), the costliest kind first."""
    kinds: dict[str, list[MatrixCost]] = {}
    for matrix in matrices:
        leaf = matrix.name.rpartition(".")[2]
        kept = "" if matrix.by_default else " (kept)"
        kinds.setdefault(f"{leaf}{kept}", []).append(matrix)
    rows = []
    for kind, group in kinds.items():
        worst = max(group, key=lambda matrix: matrix.cost.kl_mean)
        rows.append((kind, len(group), sum(item.cost.kl_mean for item in group), worst.name))
    return sorted(rows, key=lambda row: -row[2])
