"""Operators on a page: where it begins and what feeds it; the rest at the block they ran in."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.analyses.operators.show import (
    against_truth,
    beside,
    chosen,
    short_name,
    verdict_word,
)
from divergence.comparison.result import Report
from divergence.comparison.results import Background, OperatorResult, OperatorsResult
from divergence.html.parts import BlockPart, Node, Section, Table, details, el, facts, table
from divergence.layout import count, decimal

_MOST_OF_BLOCK = 80
_MOST = 1500
"""Operators of all blocks together."""


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no operator was recorded."""
    operators = report.operators
    if operators is None:
        return []
    beyond = sum(result.limit_usage > 1 for result in operators.results)
    equal = sum(result.identical for result in operators.results)
    frame = (
        "each alone, on equal inputs"
        if operators.frame == "operator"
        else "from equal block inputs"
    )
    lead = (
        f"{count(len(operators.results), 'operator')} compared, {frame}: {beyond} beyond a limit, "
        f"{equal} with equal bits."
    )
    shown = chosen(operators)
    body: list[Node] = [table(_table(operators, shown, "Where it begins, and the largest"))]
    beside_them = [line.text.strip() for result in shown for line in beside(result)]
    if beside_them:
        body.append(el("ul", *(el("li", text) for text in beside_them), class_="notes"))
    if operators.causal is not None:
        body.append(facts([("proof", _proof(operators))]))
    if operators.unmatched:
        body.append(_alone(operators))
    body += [el("p", note, class_="note") for note in operators.notes]
    return [Section(id="operators", title="Operators", lead=lead, body=tuple(body),
                    blocks=_parts(operators))]  # fmt: skip


def _proof(operators: OperatorsResult) -> str:
    causal = operators.causal
    assert causal is not None
    held = "everything after it is fine" if causal.holds else "something after it is still beyond"
    return f"with the other side's result in place of {causal.site}, {held}"


def _alone(operators: OperatorsResult) -> Node:
    shown = operators.unmatched[:_MOST_OF_BLOCK]
    left = len(operators.unmatched) - len(shown)
    content = Table(
        caption="Called by one side alone", titles=("operator", "side", "line"), num_left=3,
        rows=[(operator.site, operator.side, operator.source or "-") for operator in shown],
        note=f"{left} more." if left else "", names=True,
    )  # fmt: skip
    named = f"{count(len(operators.unmatched), 'operator')} that one side alone called"
    return details(named, table(content))


def _parts(operators: OperatorsResult) -> list[BlockPart]:
    blocks: dict[str, list[OperatorResult]] = {}
    for result in operators.results:
        blocks.setdefault(result.block or result.site.partition("/")[0], []).append(result)
    most = max(4, min(_MOST_OF_BLOCK, _MOST // max(1, len(blocks))))
    parts = []
    for block, results in blocks.items():
        kept = sorted(results, key=lambda operator: -operator.limit_usage)[:most]
        shown = [operator for operator in results if operator in kept]
        left = len(results) - len(shown)
        content = _table(
            operators, shown, "Operators", f"{left} more are in the JSON." if left else ""
        )
        parts.append(BlockPart(block=block, tables=[content]))
    return parts


def _table(
    operators: OperatorsResult, results: Sequence[OperatorResult], caption: str, note: str = ""
) -> Table:
    with_truth = operators.judged == "truth"
    titles: tuple[str, ...] = (
        "B over A",
        "A from truth",
        "B from truth",
        "one rounding",
        "over 1 ulp",
    )
    if not with_truth:
        titles = ("share of limit", "difference", "one rounding")
    return Table(
        caption=caption, titles=("operator", "verdict", "line", *titles), num_left=3, note=note,
        names=True,
        rows=[
            (short_name(result), verdict_word(result) or "fine", result.source or "-",
             *(against_truth(result) if with_truth else
               (f"{result.limit_usage:.2f}", decimal(result.difference), decimal(result.floor))))
            for result in results
        ],
        marks=["onset" if result.site == operators.onset
               else "flagged" if result.limit_usage > 1 else "" for result in results],
    )  # fmt: skip
