"""A checkup as lines for a terminal, and as Markdown for an issue.

Markdown goes where others read it, and names come from runs. So every sentence stands in a <code>
element, in which GitHub sees no mention, no issue and no emoji, and each character that Markdown
could read is written as a number.
"""

from __future__ import annotations

from divergence.document import Column, Table
from divergence.domains.doctor.result import Checkup
from divergence.layout import BLANK, Line, Span, heading, next_lines, prose
from divergence.run.command import command_line
from divergence.words import HEADLINES, letter, markdown_code, printable

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow", "not_reached": "dim"}
_WORDS = {"pass": "pass", "fail": "FAIL", "unknown": "?", "not_reached": "-"}


def checkup_lines(checkup: Checkup, *, brief: bool = False, verbose: bool = False) -> list[Line]:
    """The verdict, the points, the ladder, and what to run. ``brief``: the verdict, and the rungs
    that fail; ``verbose``: also the evidence of the verdict."""
    lines = [Line((Span(f"{_kind(checkup)}: ", "bold"), Span(_summary(checkup))), 2)]
    if brief:
        return lines + [_row(rung.state, rung.name, rung.evidence, 17) for rung in checkup.failed]
    for name, run in (("A", checkup.reference), ("B", checkup.candidate)):
        lines.append(prose(name, f"{run.path}: {run.model}, {run.dtype} on {run.device}", width=3))
    lines += [BLANK, heading("points")]
    for point in checkup.points:
        lines.append(_row(point.state, f"{point.number} {point.title}", point.evidence, 32))
    lines += [BLANK, heading("ladder", _stop(checkup))]
    lines += [_row(rung.state, rung.name, rung.evidence, 17) for rung in checkup.ladder]
    lines += [prose("note", note, width=6) for note in checkup.notes]
    if verbose and checkup.verdict is not None and checkup.verdict.evidence:
        lines += [BLANK, heading("why")]
        lines += [prose("  -", fact.text, width=4) for fact in checkup.verdict.evidence]
    return [*lines, BLANK, *next_lines(_commands(checkup))]


def _row(state: str, name: str, evidence: str, width: int) -> Line:
    lead = Span(f"  {_WORDS[state]:<6}", _STYLES[state])
    label = Span(name.ljust(width - 8))
    return Line((lead, label, Span(printable(evidence))), hang=width)


def _kind(checkup: Checkup) -> str:
    return "NOT COMPARED" if checkup.verdict is None else HEADLINES[checkup.verdict.kind]


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


def checkup_markdown(checkup: Checkup) -> str:
    """Tables that can be pasted into an issue, with nothing in them that Markdown obeys."""
    lines = [f"**{_kind(checkup)}**: {markdown_code(_summary(checkup))}", ""]
    shown = {"fail": "**fail**", "not_reached": "not reached"}
    state = Column("state", lambda state: shown.get(state, state), own=True)
    number, point, rung = (Column(title, own=True) for title in ("", "point", "rung"))
    runs = [(name, run.path, run.model, run.dtype, run.device)
            for name, run in (("A", checkup.reference), ("B", checkup.candidate))]  # fmt: skip
    points = [(item.number, item.title, item.state, item.evidence) for item in checkup.points]
    ladder = [(item.name, item.state, item.evidence) for item in checkup.ladder]
    for table in (
        Table(columns=(number, "run", "model", "dtype", "device"), rows=runs),
        Table(columns=(number, point, state, "evidence"), rows=points),
        Table(columns=(rung, state, "evidence"), rows=ladder),
    ):
        lines += [*table.markdown(), ""]
    lines += [f"The ladder: {_stop(checkup)}.", ""]
    lines += [f"- {markdown_code(note)}" for note in checkup.notes]
    lines += [""] if checkup.notes else []
    lines += [f"Next: {markdown_code(command)}<br>" for command in _commands(checkup)]
    lines.append(f"\nMade by `divergence doctor --markdown` {checkup.tool_version}.")
    return "\n".join(lines) + "\n"
