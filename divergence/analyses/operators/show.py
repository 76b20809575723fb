"""Operators of a report: where it begins, what feeds it, and the worst of the rest."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.comparison.results import OperatorResult, OperatorsResult
from divergence.layout import (
    BLANK,
    MAX_WIDTH,
    Line,
    count,
    cut,
    decimal,
    heading,
    line,
    share,
    times,
)
from divergence.words import letter

_AROUND, _WORST = 4, 6
_MATCHED = {"sequence": "~", "value": "=", "dataflow": "&"}
_WORDS = {"fine": "", "unjudged": "-", "differs": "differs"}


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """The section, or nothing where no operator was recorded."""
    operators = report.operators
    if operators is None:
        return []
    modules = {result.block or result.site.partition("/")[0] for result in operators.results}
    inside = next(iter(modules)) if len(modules) == 1 else count(len(modules), "module")
    frame = f"inside {inside}, from equal inputs"
    if operators.frame == "operator":
        frame = "each operator alone, on equal inputs"
    lines = [heading("operators", frame)]
    with_truth = operators.judged == "truth"
    shown = operators.results if all_sites else chosen(operators)
    width = MAX_WIDTH - 4 - (9 + 9 + 8 + 8 + 7 + 11 + 10)
    titles = ["W", "err A", "err B", "ideal", "ulp>1", "verdict"]
    if not with_truth:
        titles = ["share", "differ", "", "floor", "", "verdict"]
    lines.append(line(("    " + "operator".ljust(width) + _cells(titles), "dim")))
    last = None
    for result in shown:
        if last is not None and operators.results.index(result) > last + 1:
            lines.append(line(("  …", "dim")))
        last = operators.results.index(result)
        lines.append(_row(result, operators, width, with_truth=with_truth))
        lines += beside(result)
    lines.append(line((f"    {_footer(operators, with_truth=with_truth)}", "dim")))
    lines += _lone(operators, all_sites=all_sites)
    lines += [line(f"    {note}") for note in operators.notes]
    return [*lines, BLANK]


def beside(result: OperatorResult) -> list[Line]:
    """Under a row: what stands in whose place there, and with what else it was called."""
    lines: list[Line] = []
    if result.region is not None:
        at = f", as {result.region.argument} of {result.region.consumer}"
        text = result.region.text + (at if result.region.argument is not None else "")
        times = result.region.candidate_times
        if times is not None and result.region.reference_times is not None:
            text += f"; {times:.3g} × an ideal product ({result.region.reference_times:.3g} ×)"
        lines.append(line((f"      {cut(text, MAX_WIDTH - 6)}", "dim")))
    for item in result.other_operands:
        text = f"called with {item.argument}={item.candidate} (A {item.reference})"
        lines.append(line((f"      {cut(text, MAX_WIDTH - 6)}", "yellow")))
    return lines


def _cells(values: list[str]) -> str:
    widths = (9, 10, 10, 9, 8)
    cells = "".join(value.rjust(size) for value, size in zip(values[:-1], widths, strict=True))
    return f"{cells}  {values[-1]}"


def chosen(operators: OperatorsResult) -> list[OperatorResult]:
    """The onset and its surroundings, what is flagged, and where nothing is the worst few."""
    results = operators.results
    marked = [i for i, r in enumerate(results) if r.site == operators.onset]
    kept: set[int] = set()
    for i in marked[:1]:
        kept.update(range(max(0, i - _AROUND), min(len(results), i + _AROUND + 1)))
    worst = sorted(range(len(results)), key=lambda i: -results[i].limit_usage)[:_WORST]
    kept.update(worst)
    return [results[i] for i in sorted(kept)]


def _row(
    result: OperatorResult, operators: OperatorsResult, width: int, *, with_truth: bool
) -> Line:
    onset = result.site == operators.onset
    flagged = result.limit_usage > 1
    style = "bold red" if onset else "yellow" if flagged else ""
    mark = (">" if onset else " ") + ("!" if flagged else " ")
    name = short_name(result)
    if result.match != "exact":
        name += f" {_MATCHED[result.match]}"
    verdict = verdict_word(result)
    told = "equal" if result.identical and not verdict else verdict
    figures = against_truth(result)
    if not with_truth:
        figures = (f"{result.limit_usage:.2f}", decimal(result.difference), "",
                   decimal(result.floor), "")  # fmt: skip
    cells = _cells([*figures, told])
    return line(f" {mark} ", (cut(name, width - 1).ljust(width), style), (cells, style))


def against_truth(result: OperatorResult) -> tuple[str, ...]:
    """W, both sides' errors, the ideal one, and the share of elements that are off."""
    over = max(result.ulp_share_reference or 0.0, result.ulp_share_candidate or 0.0)
    return (
        times(result.w) if result.w is not None else "codes" if result.codes is not None else "-",
        decimal(result.reference_error), decimal(result.candidate_error), decimal(result.floor),
        share(over) if result.w is not None else share(result.codes),
    )  # fmt: skip


def verdict_word(result: OperatorResult) -> str:
    """The side that is off and by which question; nothing where all is fine."""
    word = _WORDS.get(result.verdict, result.verdict)
    word = letter(word)
    return f"{word} ({result.why})" if result.why not in ("typical", None) and word else word


def short_name(result: OperatorResult) -> str:
    """Without the block's path, which the heading has; the phase where it is a decode step."""
    name = result.site
    if result.block:
        name = name.removeprefix(result.block).removeprefix(".")
    return name + (" (decode)" if result.phase == "decode" else "")


def _footer(operators: OperatorsResult, *, with_truth: bool) -> str:
    flagged = sum(result.limit_usage > 1 for result in operators.results)
    equal = sum(result.identical for result in operators.results)
    parts = [
        f"{count(len(operators.results), 'operator')}: {flagged} beyond, {equal} bit-identical"
    ]
    if any(result.match == "sequence" for result in operators.results):
        parts.append("~ by order")
    if operators.num_value_matches:
        parts.append("= by value")
    if any(result.match == "dataflow" for result in operators.results):
        parts.append("& by dataflow")
    if with_truth:
        parts.append("W: err B over err A")
    return "; ".join(parts)


def _lone(operators: OperatorsResult, *, all_sites: bool) -> list[Line]:
    lines: list[Line] = []
    for side in ("reference", "candidate"):
        alone = [item for item in operators.unmatched if item.side == side]
        if not alone:
            continue
        names = [item.site for item in (alone if all_sites else alone[:5])]
        more = f" and {len(alone) - len(names)} more" if len(alone) > len(names) else ""
        lines.append(line(f"    only in {letter(side)}: {', '.join(names)}{more}"))
    return lines
