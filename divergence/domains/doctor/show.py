"""A checkup as it is shown: the verdict, the points, the ladder, and what to run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from divergence.document import Column, Document, Headline, Section, Table, named
from divergence.domains.doctor.result import Checkup, RungState
from divergence.report.summary import run_text
from divergence.run.command import command_line
from divergence.words import HEADLINES, letter, shortened

_WORDS = {"pass": "pass", "fail": "FAIL", "unknown": "?", "not_reached": "-"}
_MARKS = {"fail": "blocks", "unknown": "differs"}
"""Their words say it; no sign stands before them."""
_LONGEST = 70
"""Letters of what a first screen says of a point."""


def checkup_document(checkup: Checkup, *, brief: bool = False, verbose: bool = False) -> Document:
    """``brief``: the headline also tells the rungs that fail; ``verbose``: with the evidence of the
    verdict."""
    verdict = checkup.verdict
    word = "NOT COMPARED" if verdict is None else HEADLINES[verdict.kind]
    failed = [named(f"FAIL  {rung.name}", rung.evidence) for rung in checkup.failed]
    runs = [
        named(name, run_text(run))
        for name, run in (("A", checkup.reference), ("B", checkup.candidate))
    ]
    points = [(item.state, f"{item.number} {item.title}", item.evidence) for item in checkup.points]
    ladder = [(item.state, item.name, item.evidence) for item in checkup.ladder]
    num_passed = sum(state == "pass" for state, *_ in points)
    passed = f"{num_passed} of {len(points)} conditions of a fair comparison pass"
    notes = [named("note", note if verbose else shortened(note, 88)) for note in checkup.notes]
    more = [] if verbose else [named("more", "every point and rung: add -v", "dim")]
    sections = [
        Section(title="points", detail=passed, body=[_table("point", points, every=verbose)]),
        Section(
            title="ladder",
            detail=f"of causes: {_stop(checkup)}",
            body=[_table("rung", ladder, every=verbose), *notes, *more],
        ),
    ]
    evidence = [] if verdict is None or not verbose else verdict.evidence
    return Document(
        headline=Headline(word, _summary(checkup), "bold", failed if brief else ()),
        known=runs,
        why=[item.text for item in evidence],
        sections=sections,
        next=_commands(checkup),
    )


def page_document(checkup: Checkup) -> Document:
    """That of a page: everything."""
    return checkup_document(checkup, verbose=True)


def _table(what: str, rows: Sequence[tuple[RungState, str, str]], *, every: bool) -> Table:
    """Make the table, without what passes or another rung explains unless ``every`` is set."""
    shown = [row for row in rows if every or row[0] in ("fail", "unknown")]
    evidence = Column("evidence", str if every else partial(shortened, most=_LONGEST))
    return Table(
        columns=(
            Column("", _WORDS.__getitem__, own=True),
            Column(what, "{}:".format, own=True),
            evidence,
        ),
        rows=shown,
        num_left=3,
        bare=True,
        marks=[_MARKS.get(state, "") for state, *_ in shown],
    )


def _summary(checkup: Checkup) -> str:
    if checkup.verdict is None:
        return checkup.reason or ""
    quiet = checkup.verdict.kind in ("identical", "within_floor")
    side = {"both": "both are wrong", "neither": "" if quiet else "neither is wrong", None: ""}.get(
        checkup.verdict.side, f"{letter(checkup.verdict.side)} is wrong"
    )
    words = f"{checkup.verdict.confidence} confidence" + (f", {side}" if side else "")
    return f"{checkup.verdict.summary} ({words})"


def _stop(checkup: Checkup) -> str:
    """One clause on what the ladder came to."""
    stop = checkup.explained_by
    if stop is not None:
        names = [rung.name for rung in checkup.ladder]
        above = checkup.ladder[: names.index(stop)]
        unsettled = [rung.name for rung in above if rung.state != "pass"]
        first = f"; settle {' and '.join(unsettled)} first" if unsettled else ""
        how = "may explain" if stop == "code" else "explains"
        return f"stops at {stop}, which {how} the rest{first}"
    if checkup.failed:
        return f"{checkup.failed[0].name} fails, and no rung explains all"
    if any(rung.state == "unknown" for rung in checkup.ladder):
        return "no rung fails, as far as is known"
    return "no rung fails"


def _commands(checkup: Checkup) -> list[str]:
    """Return what settles the rungs that fail; else what compare says, or compare itself."""
    commands = dict.fromkeys(rung.next for rung in checkup.failed if rung.next is not None)
    if not commands and checkup.verdict is not None:
        commands = dict.fromkeys(checkup.verdict.next[:1])
    return list(commands) or [
        command_line("compare", checkup.reference.path, checkup.candidate.path)
    ]
