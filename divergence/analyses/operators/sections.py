"""Operators of a report: where it begins, what feeds it, and the worst of the rest; on a page all
others at the block that they ran in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from divergence.comparison.result import Background, OperatorResult, OperatorsResult, Report
from divergence.document import Block, BlockPart, Column, Section, Sentence, Table, each_in
from divergence.layout import MAX_WIDTH, cut
from divergence.words import count, decimal, grouped, letter, limit_share, share, times

_AROUND, _WORST = 4, 6
_MATCHED = {"sequence": "~ by order", "value": "= by value", "dataflow": "& by dataflow"}
_W = "how much farther B is from the truth than A"
_WORDS = {"fine": "", "unjudged": "-", "differs": "differs"}
_MOST_OF_BLOCK = 80
_MOST = 1500
"""Operators of all blocks together."""


def sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> list[Section]:
    """Nothing where no operator was recorded. ``every``: all of them."""
    operators = report.operators
    if operators is None:
        return []
    results = operators.results
    shown = list(range(len(results))) if every else _chosen(operators)
    beyond = sum(result.limit_usage > 1 for result in results)
    equal = sum(result.identical for result in results)
    body: list[Block] = [_table(operators, shown, "where it begins, and the largest")]
    parts = [f"{count(len(results), 'operator')}: {beyond} beyond, {equal} bit-identical"]
    used = {result.match for result in results}
    parts += [text for match, text in _MATCHED.items() if match in used]
    parts += ["W: err B over err A"] * (operators.judged == "truth")
    body.append(Sentence("; ".join(parts), style="dim"))
    if operators.unmatched:
        body.append(
            Table(
                title="called by one side alone",
                names=True,
                columns=("operator", "side", Column("line", face="page")),
                num_left=3,
                rows=[
                    (operator.site, letter(operator.side), operator.source)
                    for operator in operators.unmatched
                ],
                most=8,
            )
        )
    body += [Sentence(note) for note in operators.notes]
    alone = operators.frame == "operator"
    modules = {result.block or result.site.partition("/")[0] for result in results}
    inside = next(iter(modules)) if len(modules) == 1 else count(len(modules), "module")
    detail = f"inside {inside}, from equal inputs"
    if alone:
        detail = f"{count(len(results), 'operator')}, each alone, on equal inputs"
    return [
        Section(
            id="operators",
            title="operators",
            body=body,
            detail=detail,
            parts=() if background is None else _parts(operators),
        )
    ]


def _chosen(operators: OperatorsResult) -> list[int]:
    """The onset and its surroundings, what is flagged, and where nothing is the worst few."""
    results = operators.results
    marked = [n for n, result in enumerate(results) if result.site == operators.onset]
    shown = {
        n
        for at in marked[:1]
        for n in range(max(0, at - _AROUND), min(len(results), at + _AROUND + 1))
    }
    shown.update(sorted(range(len(results)), key=lambda n: -results[n].limit_usage)[:_WORST])
    return sorted(shown)


def _table(
    operators: OperatorsResult, shown: Sequence[int], title: str, *, note: str = ""
) -> Table:
    """Those of ``shown``: their numbers. Below each what stands in whose place there, and with what
    else it was called."""
    results = [operators.results[n] for n in shown]
    below = {n: _beside(result) for n, result in enumerate(results)}
    for n, (this, following) in enumerate(pairwise(shown)):
        if following > this + 1:
            below[n] = [*below[n], Sentence("…", indent=2, style="dim")]
    figures: list[tuple[Column, Any]] = [
        (Column("share of limit", limit_share, short="share", width=7), "limit_usage"),
        (Column("difference", decimal, short="differ", width=8), "difference"),
        (Column("one rounding", decimal, short="floor", width=8), "floor"),
    ]
    if operators.judged == "truth":
        figures = [
            (Column("B over A", _farther, short="W", width=7, meaning=_W), lambda result: result),
            (Column("A from truth", decimal, short="err A", width=8), "reference_error"),
            (Column("B from truth", decimal, short="err B", width=8), "candidate_error"),
            (Column("one rounding", decimal, short="ideal", width=7), "floor"),
            (Column("over 1 ulp", share, short="ulp>1", width=6), _share_off),
        ]
    marks = [
        "onset " * (result.site == operators.onset) + "flagged" * (result.limit_usage > 1)
        for result in results
    ]
    return Table(
        title=title,
        marks=marks,
        names=True,
        note=note,
        below=below,
        **each_in(
            results,
            (Column("operator", width=34), _short_name),
            *figures,
            (Column("verdict", left=True), _verdict),
            (Column("line", face="page", left=True), "source"),
        ),
    )


def _beside(result: OperatorResult) -> list[Sentence]:
    sentences: list[Sentence] = []
    region = result.region
    if region is not None:
        at = f", as {region.argument} of {region.consumer}"
        phrase = region.text + (at if region.argument is not None else "")
        if region.candidate_times is not None and region.reference_times is not None:
            phrase += f"; {region.candidate_times:.3g} × an ideal product "
            phrase += f"({region.reference_times:.3g} ×)"
        sentences.append(Sentence(cut(phrase, MAX_WIDTH - 6), indent=6, style="dim"))
    for item in result.other_operands:
        phrase = f"called with {item.argument}={item.candidate} (A {item.reference})"
        sentences.append(Sentence(cut(phrase, MAX_WIDTH - 6), indent=6, style="yellow"))
    return sentences


def _share_off(result: OperatorResult) -> float | None:
    """The share of elements that are off by over one ulp, or of codes that are others."""
    over = max(result.ulp_share_reference or 0.0, result.ulp_share_candidate or 0.0)
    return over if result.w is not None else result.codes


def _farther(result: OperatorResult) -> str:
    return "codes" if result.w is None and result.codes is not None else times(result.w)


def _verdict(result: OperatorResult) -> str:
    """The side that is off and by which question; nothing where all is fine."""
    word = letter(_WORDS.get(result.verdict, result.verdict))
    why = f" ({result.why})" if result.why not in ("typical", None) and word else ""
    return word + why or "equal" * result.identical


def _short_name(result: OperatorResult) -> str:
    """Name it without its block, which the heading has; with the phase of a decode step, and how it
    was matched."""
    name = result.site
    if result.block:
        name = name.removeprefix(result.block).removeprefix(".")
    matched = "" if result.match == "exact" else f" {_MATCHED[result.match][0]}"
    return name + (" (decode)" if result.phase == "decode" else "") + matched


def _parts(operators: OperatorsResult) -> list[BlockPart]:
    """The operators of each block, where there are many the worst."""
    homes = [result.block or result.site.partition("/")[0] for result in operators.results]
    blocks = grouped(range(len(homes)), homes.__getitem__)
    most = max(4, min(_MOST_OF_BLOCK, _MOST // max(1, len(blocks))))
    parts = []
    for block, numbers in blocks.items():
        worst = sorted(numbers, key=lambda n: -operators.results[n].limit_usage)[:most]
        left = len(numbers) - len(worst)
        note = f"{left} more are in the JSON." if left else ""
        table = _table(operators, sorted(worst), "operators", note=note)
        parts.append(BlockPart(block=block, tables=[table]))
    return parts
