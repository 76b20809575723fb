"""What is shown of a checkup: the verdict, the points, the ladder, and what to run."""

from __future__ import annotations

from divergence.document import Column, Document, Headline, Section, Table, named
from divergence.domains.doctor.result import Checkup
from divergence.report.summary import computed, model_name
from divergence.run.command import command_line
from divergence.words import HEADLINES, letter

_WORDS = {"pass": "pass", "fail": "FAIL", "unknown": "?", "not_reached": "-"}
_MARKS = {"fail": "wrong", "unknown": "below"}


def checkup_document(checkup: Checkup, *, brief: bool = False, verbose: bool = False) -> Document:
    """``brief``: the headline also tells the rungs that fail; ``verbose``: with the evidence of the
    verdict."""
    verdict = checkup.verdict
    word = "NOT COMPARED" if verdict is None else HEADLINES[verdict.kind]
    failed = [named(f"FAIL  {rung.name}", rung.evidence) for rung in checkup.failed]
    runs = [
        named(name, f"{run.path}: {model_name(run)}, {computed(run)}")
        for name, run in (("A", checkup.reference), ("B", checkup.candidate))
    ]
    state = Column("", _WORDS.__getitem__, own=True)
    points, ladder = (
        Table(
            columns=(state, Column(what, own=True), "evidence"), rows=rows, bare=True,
            marks=[_MARKS.get(row[0], "") for row in rows],
        )
        for what, rows in (
            ("point", [(item.state, f"{item.number} {item.title}", item.evidence)
                       for item in checkup.points]),
            ("rung", [(item.state, item.name, item.evidence) for item in checkup.ladder]),
        )
    )  # fmt: skip
    notes = [named("note", note) for note in checkup.notes]
    sections = [Section(title="points", body=[points]),
                Section(title="ladder", detail=_stop(checkup), body=[ladder, *notes])]  # fmt: skip
    evidence = [] if verdict is None or not verbose else verdict.evidence
    return Document(
        headline=Headline(word, _summary(checkup), "bold", failed if brief else ()),
        known=runs, why=[item.text for item in evidence],
        sections=sections, next=_commands(checkup),
    )  # fmt: skip


def _summary(checkup: Checkup) -> str:
    if checkup.verdict is None:
        return checkup.reason or ""
    side = {"both": "both are wrong", "neither": "neither is wrong", None: ""}.get(
        checkup.verdict.side, f"{letter(checkup.verdict.side)} is wrong"
    )
    told = f"{checkup.verdict.confidence} confidence" + (f", {side}" if side else "")
    return f"{checkup.verdict.summary} ({told})"


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
    """What settles the rungs that fail; else what compare says, or compare itself."""
    commands = dict.fromkeys(rung.next for rung in checkup.failed if rung.next is not None)
    if not commands and checkup.verdict is not None:
        commands = dict.fromkeys(checkup.verdict.next[:1])
    return list(commands) or [
        command_line("compare", checkup.reference.path, checkup.candidate.path)
    ]
