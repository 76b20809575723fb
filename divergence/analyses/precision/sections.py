"""The precision audit: one line per part of the model, both sides, and every place on request."""

from __future__ import annotations

from divergence.comparison.result import INSIDE, AuditedPlace, AuditResult, AuditRow, Report
from divergence.document import Column, Section, Sentence, Table
from divergence.words import count


def sections(report: Report, *, every: bool = False, **_: object) -> list[Section]:
    return audit_sections(report.audit, every=every)


def audit_sections(
    audit: AuditResult | None, *, alone: bool = False, every: bool = False
) -> list[Section]:
    """Nothing where no operator was recorded. ``alone``: of one run, not of two; ``every``: with
    every place."""
    if audit is None or not audit.rows:
        return []
    sides = [Column("computed in" if alone else "A", _dtypes, "not audited", width=17)]
    sides += [] if alone else [Column("B", _dtypes, "not audited", width=17)]
    marks = []
    below: dict[int, list[Sentence]] = {}
    for number, row in enumerate(audit.rows):
        is_wrong = row.differs or (row.below is not None and row.own)
        marks.append("wrong" if is_wrong else "below" if row.below is not None else "")
        for name, places in (("A", audit.reference), ("B", audit.candidate)) if every else ():
            below.setdefault(number, []).extend(
                _place("" if alone else name, place)
                for place in places or ()
                if place.part == row.part
            )
    table = Table(
        title="parts of the model",
        num_left=len(sides) + 2,
        columns=(Column("part", width=16), *sides, Column("expected", _expectation)),
        marks=marks,
        rows=[(row.part, *(row.reference, row.candidate)[: len(sides)], row) for row in audit.rows],
        below=below,
    )
    by = ", by its operators" if audit.reference is not None or audit.candidate is not None else ""
    places = [*(audit.reference or ()), *(audit.candidate or ())]
    sentences = []
    kernels = list(dict.fromkeys(place.kernel for place in places if place.kernel))
    if kernels:
        text = f"{', '.join(map(str, kernels))}; what it does inside is not in the records"
        sentences.append(Sentence(text, "one kernel:"))
    if any(place.accumulates for place in places):
        text = "products, sums and softmax are shown as stored; "
        text += "what their kernels accumulate in is for the probe to tell"
        sentences.append(Sentence(text, "as stored:"))
    if any(row.below is not None and not row.own for row in audit.rows):
        sentences.append(Sentence("below what is usual; the model may be meant so", "?:"))
    if alone:
        sentences += [Sentence(item.text, "!:", style="yellow") for item in audit.findings]
    return [
        Section(
            id="precision",
            title="precision",
            detail=f"in which dtype each part ran{by}",
            body=[table, *sentences, *(Sentence(note, "note:") for note in audit.notes)],
            verbose=not any(marks) and not (alone and audit.findings),
        )
    ]


def _expectation(row: AuditRow) -> str:
    """The dtypes that will do, and who says so."""
    expected = " or ".join(row.expected) if len(row.expected) < 3 else f"{row.expected[0]} or less"
    return expected + (f" ({row.expected_by})" if row.expected else "-")


def _dtypes(side: list[str]) -> str:
    names = ["in one kernel" if name.startswith(INSIDE) else name for name in side]
    return ", ".join(dict.fromkeys(names)) or "-"


def _place(name: str, place: AuditedPlace) -> Sentence:
    flow = f"{'+'.join(place.operands) or '?'} → {place.result}"
    dtype = place.computed or f"{INSIDE}{place.kernel}"
    where = f"; {place.source}" if place.source else ""
    text = f"{place.site}: {dtype}; {flow}; {count(place.num_calls, 'call')}{where}"
    mark = "!" if place.below and place.own else "?" if place.below else " "
    return Sentence(text, f"{mark} {name}", hang=18 if name else 8)
