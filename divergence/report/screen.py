"""The first screen of a comparison: what most readers need, in some 12 lines, or 18 where something
is wrong.

The answer, what it could not have seen, what was compared, the worst rows, and one command. What is
left out stands in the whole report (``report_lines``), behind ``-v``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

from divergence.analyses.blocks.sections import SiteRow, num_bad, worst_places, worst_rows
from divergence.comparison.result import Report
from divergence.document import Block, Column, Document, Section, Sentence, Table, named
from divergence.facts import Fact, sentence_behind
from divergence.layout import MAX_WIDTH, Line, cut, fold
from divergence.report.summary import (
    document,
    is_quiet,
    lacking,
    opening_of,
    run_facts,
)
from divergence.report.text import document_lines
from divergence.words import count, decimal, limit_share, shortened

HEIGHT, _HEALTHY = 18, 12
"""Lines at most; and where all is well."""
_NUM_ROWS = 5
_MOST_WHY = 3
_BY_REASONS = ("incomparable", "undetermined")
"""Verdicts whose reasons tell more than sizes do."""
_MOST_OF_FACT = 240
"""Letters of a fact behind the verdict."""
_OF_ALL = ("", "settings", "tokens", "notes", "coverage")
"""Sections that say nothing of what was compared in a report without blocks."""
_WRONG = ("onset", "odd", "flagged", "wrong")
"""Marks of the rows that a first screen shows."""


def screen_lines(report: Report, *, more: str = "add -v") -> list[Line]:
    return document_lines(screen_document(report, more=more))


def screen_document(report: Report, *, more: str = "add -v", num_above: int = 0) -> Document:
    """The first screen. ``more``: how to see the rest. There are fewer rows where the rest is long,
    or there are ``num_above`` lines before it, then nothing of what is as usual (settings that are
    the same, all compared; where all is well its worst place), then fewer reasons where it alone is
    long."""
    without_blocks = not report.sites and report.verdict.kind != "incomparable"
    make = _without_blocks if without_blocks else _screen
    whole = document(report) if without_blocks else opening_of(report)
    most = _HEALTHY if is_quiet(report) and not num_above else HEIGHT
    usual = "worst" if is_quiet(report) else "" if lacking(report.coverage) else "compared"
    for num_rows in range(_NUM_ROWS, -_MOST_WHY if without_blocks else -1, -1):
        screen = make(report, whole, num_rows, more)
        too_long = _num_lines(screen) > most - num_above
        if num_rows < 2 and too_long and not without_blocks:
            sentences = [
                item
                for item in screen.known
                if item.label != usual and (item.label != "settings" or item.style)
            ]
            screen = dataclasses.replace(screen, known=sentences)
        if _num_lines(screen) <= most - num_above * (num_rows > 1):
            break
    return screen


def _num_lines(screen: Document) -> int:
    return sum(len(fold(item, MAX_WIDTH)) for item in document_lines(screen))


def _without_blocks(report: Report, whole: Document, num_rows: int, more: str) -> Document:
    """Show a report without blocks (operators alone, a suite, log-probabilities): the first reason,
    and of the first table that has any the rows that are wrong; where there are none, or none has
    room (``num_rows`` 0 and less), as many reasons as have."""
    quiet = is_quiet(report)
    wrong = None if quiet else _wrong_rows(whole.sections, num_rows)
    num_why = 1 if quiet or wrong else _MOST_WHY + min(0, num_rows)
    reasons = [fact.text for fact in _reasons(report)]
    label = "found" if quiet else _label_of_reasons(report)
    why = _why(label, reasons[:num_why])
    inner = [item.detail for item in whole.sections if item.id not in _OF_ALL and item.detail]
    num = report.coverage.num_compared
    what = "; ".join([*(inner[:1] or [count(num, "tensor")]), *lacking(report.coverage)])
    rest = [*["every reason"] * (len(whole.why) > len(why)), "every table", "every setting"]
    hint = _hint(report, rest, more)
    if wrong:  # the table's title has the hint
        table, legend = wrong
        wrong, hint = (dataclasses.replace(table, detail=f"more: {hint[0].text}"), legend), []
    return dataclasses.replace(
        whole,
        why=(),
        next=[command.alone for command in report.verdict.commands[:1]],
        headline=dataclasses.replace(whole.headline, facts=[*whole.headline.facts, *why]),
        known=[*_runs(report), *whole.known, named("compared", what), *hint],
        sections=[Section(body=wrong or ())],
    )


def _wrong_rows(sections: Sequence[Section], most: int) -> tuple[Table, Sentence | None] | None:
    """Return the wrong rows of the first table that has any, and what its columns hold."""
    for section in sections:
        for block, following in zip(section.body, [*section.body, None][1:], strict=True):
            if not isinstance(block, Table) or most < 1:
                continue
            what = (section.title if block is section.body[0] else "") or block.title
            wrong = [number for number in range(len(block.rows)) if block.mark(number) in _WRONG]
            if not wrong:
                continue
            cut_down = dataclasses.replace(
                block,
                rows=[block.rows[number] for number in wrong],
                most=most,
                below={},
                marks=[block.marks[number] for number in wrong],
                more="-v lists them",
                title=f"worst of {what}",
            )
            legend = following if isinstance(following, Sentence) else None
            return cut_down, legend if legend is not None and legend.style == "dim" else None
    return None


def _screen(report: Report, whole: Document, num_rows: int, more: str) -> Document:
    verdict = report.verdict
    # the first fact behind a verdict that is more than that all is well
    most = num_rows if verdict.kind in _BY_REASONS else min(1, num_rows)
    most = 0 if verdict.kind == "nonfinite" else most  # the headline counts them
    facts = [] if is_quiet(report) else _reasons(report, most)
    # and what is plain of the difference: it tells the cause
    facts += [item for item in verdict.evidence[1:] if item["plain"] and item not in facts]
    # the line of the onset names the place already
    place = verdict.onset.site if verdict.onset else None
    texts = [sentence_behind(item, place) if place else item.text for item in facts]
    why = _why(_label_of_reasons(report), texts)
    worst = _worst(report, max(1, num_rows), explained=bool(facts))
    every = any(site.block for site in report.sites)
    rest = [*[f"every {'block' if every else 'tensor'}"] * bool(report.sites), "every setting"]
    hint = _hint(report, rest, more)
    settings = [*_runs(report), *whole.known]
    body: list[Block] = []
    if isinstance(worst, Table):
        body = [worst]
        if not more.startswith("divergence "):
            body, hint = [dataclasses.replace(worst, detail=f"more: {hint[0].text}")], []
    else:
        settings += worst
    if more.startswith("divergence "):  # a command stands on a line of its own
        body += [dataclasses.replace(item, label="", hang=0) for item in hint]
    else:
        settings += hint
    answer, commands = [*whole.headline.facts, *why], verdict.commands[:1]
    if is_quiet(report):  # what raises the confidence stands below it
        place_of = [fact.label for fact in answer].index("confidence") + 1
        names = [command.name for command in verdict.commands]
        if names == ["capture", "compare"] and verdict.commands[1].options.get("truth"):
            commands = verdict.commands  # the runs that the second is of are not plain
        answer[place_of:place_of] = [
            Sentence(command.alone, indent=0, hang=12, whole=True) for command in commands
        ]
    return Document(
        headline=dataclasses.replace(whole.headline, facts=answer),
        known=settings,
        sections=[Section(body=body)],
        next=[] if is_quiet(report) else [command.alone for command in commands],
    )


def _reasons(report: Report, most: int | None = None) -> list[Fact]:
    """Of the first facts behind the verdict those that its headline does not tell."""
    items = [item["what"] for finding in report.findings for item in finding.headline]
    evidence = report.verdict.evidence[:most]
    return [item for item in evidence if item["what"] is None or item["what"] not in items]


def _label_of_reasons(report: Report) -> str:
    """Behind a headline that holds the first reason itself stands what else was found."""
    return "because" if _reasons(report)[:1] == report.verdict.evidence[:1] else "also"


def _why(label: str, texts: Iterable[str]) -> list[Sentence]:
    """A label, and behind it each reason on a line of its own."""
    shown = (shortened(text, _MOST_OF_FACT) for text in texts)
    return [named("" if number else label, text) for number, text in enumerate(shown)]


def _hint(report: Report, rest: Sequence[str], more: str) -> list[Sentence]:
    notes = [count(len(report.notes), "note")] if report.notes else []
    return [named("more", f"{', '.join([*rest, *notes])}: {more}", "dim")]


def _runs(report: Report) -> list[Sentence]:
    """Each on one line, and what was done to it: a run may have many planted faults."""
    return [
        item if item.label else dataclasses.replace(item, text=shortened(item.text, MAX_WIDTH - 12))
        for item in run_facts(report)
    ]


def _share_used(row: SiteRow, *, judged: bool) -> str:
    return "not finite" if num_bad(row.worst) else limit_share(row.share) if judged else ""


def _worst(report: Report, num_rows: int, *, explained: bool) -> Table | list[Sentence]:
    """Show what is beyond a limit, else what comes nearest to it: one place in a line, more as a
    table. Nothing where no size is known, a healthy pair is held to no limit, or it is the onset
    alone, of which the reasons tell as much (``explained``)."""
    every = worst_rows(report)
    unlike = [row for row in every if not row.worst.identical]
    pairs = list(zip(unlike, worst_places(unlike), strict=True))
    beyond = [(row, place) for row, place in pairs if row.flagged or num_bad(row.worst)]
    shown = (beyond or pairs)[: 1 if is_quiet(report) else num_rows]
    judged = any(row.share is not None for row in unlike)
    has_errors = judged or any(row.errors or num_bad(row.worst) for row, _ in shown)
    if not has_errors or (is_quiet(report) and not judged):
        return []
    same = len(shown) == len(unlike) < len(every)
    if len(shown) > 1:
        sides = max(1, *(len(row.errors) for row, _ in shown))
        titles = ("A's error", "B's error") if sides == 2 else ("error",)
        errors = [() if num_bad(row.worst) else row.errors for row, _ in shown]
        more = ", the others equal bit for bit" * same
        return Table(
            title=f"worst of {count(len(every), 'place')}{more}",
            rows=[
                (*own, *[None] * (sides - len(own)), row, row.worst.site, place)
                for own, (row, place) in zip(errors, shown, strict=True)
            ],
            num_left=0,
            columns=(
                *(Column(title, decimal) for title in titles),
                Column("of its limit" if judged else "", partial(_share_used, judged=judged)),
                Column("where", partial(cut, width=40), left=True),
                Column("", left=True),
            ),
            marks=["flagged" * bool(row.flagged or num_bad(row.worst)) for row, _ in shown],
        )
    ((row, place),) = shown
    onset = report.verdict.onset
    at_onset = onset is not None and onset.site == row.worst.site
    if at_onset and (explained or num_bad(row.worst)):
        return []
    where = "" if at_onset else f"{cut(row.worst.site, 40)}, "
    used = limit_share(row.share)
    text = f"{used}{' of' * used.endswith('%')} its limit"
    if num_bad(row.worst):
        text = "not finite"
    elif not judged:
        text = f"error {' / '.join(map(decimal, row.errors))}"
    rest = "; the others equal bit for bit" * same
    return [named("worst", f"{text}; {where}{place}{rest}")]
