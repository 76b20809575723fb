"""The precision audit of a report: one line per part, both sides, and every place on request."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.comparison.results import INSIDE, AuditedPlace, AuditResult, AuditRow
from divergence.layout import BLANK, MAX_WIDTH, Line, count, cut, heading, line, prose

_PART, _SIDE = 18, 19


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """The audit of both sides."""
    return audit_lines(report.audit, all_sites=all_sites)


def audit_lines(
    audit: AuditResult | None, *, alone: bool = False, all_sites: bool = False
) -> list[Line]:
    """The section, or nothing where no operator was recorded. ``alone``: of one run, not of two."""
    if audit is None or not audit.rows:
        return []
    titles = ("computed in",) if alone else ("A", "B")
    operators = audit.reference is not None or audit.candidate is not None
    by = ", by its operators" if operators else ""
    lines = [heading("precision", f"in which dtype each part ran{by}")]
    cells = "".join(title.ljust(_SIDE) for title in titles)
    lines.append(line((f"    {'part'.ljust(_PART)}{cells}expected", "dim")))
    for row in audit.rows:
        lines.append(_row(row, alone=alone))
        if all_sites:
            for name, places in (("A", audit.reference), ("B", audit.candidate)):
                of_part = [place for place in places or () if place.part == row.part]
                lines += [_place("" if alone else name, place) for place in of_part]
    lines += footer(audit, alone=alone)
    return [*lines, BLANK]


def _row(row: AuditRow, *, alone: bool) -> Line:
    wrong = row.differs or (row.below is not None and row.own)
    style = "bold red" if wrong else "yellow" if row.below is not None else ""
    mark = "!" if wrong else "?" if row.below is not None else " "
    sides = (row.reference,) if alone else (row.reference, row.candidate)
    cells = "".join(cut(dtype_words(side), _SIDE - 1).ljust(_SIDE) for side in sides)
    text = f"{row.part.ljust(_PART)}{cells}{expectation(row)}"
    return line(f"  {mark} ", (text[: MAX_WIDTH - 4], style))


def expectation(row: AuditRow) -> str:
    """The dtypes that will do, and who says so."""
    expected = " or ".join(row.expected) if len(row.expected) < 3 else f"{row.expected[0]} or less"
    return expected + (f" ({row.expected_by})" if row.expected else "-")


def dtype_words(side: list[str] | None) -> str:
    """What a part was computed in."""
    if side is None:
        return "not audited"
    known = ["in one kernel" if name.startswith(INSIDE) else name for name in side]
    return ", ".join(dict.fromkeys(known)) or "-"


def _place(name: str, place: AuditedPlace) -> Line:
    flow = f"{'+'.join(place.operands) or '?'} → {place.result}"
    dtype = place.computed or f"{INSIDE}{place.kernel}"
    where = f"; {place.source}" if place.source else ""
    text = f"{place.site}: {dtype}; {flow}; {count(place.num_calls, 'call')}{where}"
    mark = "!" if place.below and place.own else "?" if place.below else " "
    return prose(f"    {mark} {name}".ljust(18 if name else 8), text, width=18 if name else 8)


def footer(audit: AuditResult, *, alone: bool) -> list[Line]:
    """What the table's words mean."""
    places = [*(audit.reference or ()), *(audit.candidate or ())]
    lines = []
    kernels = list(dict.fromkeys(place.kernel for place in places if place.kernel))
    if kernels:
        text = f"{', '.join(map(str, kernels))}; what it does inside is not in the records"
        lines.append(prose("    one kernel: ", text, width=16))
    if any(place.accumulates for place in places):
        text = "products, sums and softmax are shown as stored; "
        text += "what their kernels accumulate in is for the probe to tell"
        lines.append(prose("    as stored: ", text, width=15))
    if any(row.below is not None and not row.own for row in audit.rows):
        lines.append(prose("    ?: ", "below what is usual; the model may be meant so", width=7))
    if alone:
        lines += [prose("    !: ", item.text, width=7, style="yellow") for item in audit.findings]
    return lines + [prose("    note: ", note, width=10) for note in audit.notes]
