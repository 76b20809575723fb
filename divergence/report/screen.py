"""The first screen of a comparison: what most readers need, in some 18 lines.

The answer, what it could not have seen, what was compared, the worst rows, and one command. What is
left out stands in the whole report (``report_lines``), behind ``-v``.
"""

from __future__ import annotations

import dataclasses

from divergence.analyses.blocks.sections import num_bad, worst_places, worst_rows
from divergence.comparison.result import Report, RunSummary
from divergence.document import Block, Document, Section, Sentence, Table, named
from divergence.facts import sentence_behind
from divergence.layout import Line, count, cut, decimal, fold, limit_share
from divergence.report.summary import document, is_quiet, model_name, opening_of, run_facts, states
from divergence.report.text import document_lines
from divergence.words import shortened

WIDTH, HEIGHT = 80, 18
_NUM_ROWS = 5
_MOST_WHY = 3
_MOST_OF_FACT = 240
"""Letters of a fact behind the verdict."""


def screen_lines(report: Report, *, more: str = "add -v") -> list[Line]:
    """The first screen. ``more``: how to see the rest. Of a report without blocks (operators alone,
    a suite, log-probabilities) the tables that say most are part of it."""
    if not report.sites and report.verdict.kind != "incomparable":
        return document_lines(_without_blocks(report, more))
    for num_rows in range(_NUM_ROWS, 0, -1):
        lines = document_lines(_screen(report, num_rows, more))
        if sum(len(fold(item, WIDTH)) for item in lines) <= HEIGHT:
            break  # fewer rows where the rest is long
    return lines


def _without_blocks(report: Report, more: str) -> Document:
    """Settings are a line, and what was compared is left out where it was everything."""
    whole, coverage = document(report), report.coverage
    rest = [*["every reason"] * (len(whole.why) > _MOST_WHY), "every table", "every setting"]
    rest += [count(len(report.notes), "note")] if report.notes else []
    hint = Sentence(f"{', '.join(rest)}: {more}", style="dim", indent=0, hang=0)
    lacking = coverage.num_skipped + coverage.num_only_reference + coverage.num_only_candidate
    left = ["settings", "notes", *["coverage"] * (not lacking)]
    tables = [section for section in whole.sections if section.id not in left]
    return dataclasses.replace(
        whole, known=[*run_facts(report), *whole.known], why=whole.why[:_MOST_WHY],
        sections=[*tables, Section(body=[hint])],
    )  # fmt: skip


def _screen(report: Report, num_rows: int, more: str) -> Document:
    whole, verdict = opening_of(report), report.verdict
    # the first fact behind a verdict that is more than that all is well
    most = 5 if verdict.kind in ("incomparable", "undetermined") else 1
    told = [item["what"] for finding in report.findings for item in finding.headline]
    facts = [] if is_quiet(report) else [
        item for item in verdict.evidence[:most] if item["what"] is None or item["what"] not in told
    ]  # fmt: skip
    # the line of the onset names the place already
    place = verdict.onset.site if verdict.onset else None
    texts = [sentence_behind(item, place) if place else item.text for item in facts]
    why = [named("" if number else "because", shortened(text, _MOST_OF_FACT))
           for number, text in enumerate(texts)]  # fmt: skip
    # of the second run only what is not as in the first
    a, b = report.reference, report.candidate
    other = any(
        line.check in ("weights", "quantization") and line.status in ("differs", "blocking")
        for line in report.preflight
    )
    same = (a.model, a.dtype, a.device) == (b.model, b.dtype, b.device) and not other
    text = f"{b.path}: {'the same model and dtype' if same else _model(b)}{_label(b)}"
    if same and a.label == b.label:
        text = f"{b.path}: the same model, dtype and machine"
    known = [named("A", f"{a.path}: {_model(a)}{_label(a)}"), *_states(a),
             named("B", text), *_states(b), *whole.known]  # fmt: skip
    worst = _worst(report, num_rows)
    known += worst if isinstance(worst, list) else []
    rest = [*["every block"] * bool(report.sites), "every setting"]
    rest += [count(len(report.notes), "note")] if report.notes else []
    hint = f"{', '.join(rest)}: {more}"
    body: list[Block] = []
    if more.startswith("divergence "):  # a command stands on a line of its own
        body = [Sentence(hint, style="dim", indent=0, hang=0)]
    elif isinstance(worst, list):
        known.append(named("more", hint, "dim"))
    if isinstance(worst, Table):
        body = [worst, *body] if body else [dataclasses.replace(worst, detail=hint)]
    answer, commands = [*whole.headline.facts, *why], verdict.commands[:1]
    if is_quiet(report):  # what raises the confidence stands below it
        place_of = [fact.label for fact in answer].index("confidence") + 1
        answer[place_of:place_of] = [
            Sentence(command.alone, indent=0, hang=12, whole=True) for command in commands
        ]
    return Document(
        headline=dataclasses.replace(whole.headline, facts=answer), known=known,
        sections=[Section(body=body)],
        next=[] if is_quiet(report) else [command.alone for command in commands],
    )  # fmt: skip


def _states(run: RunSummary) -> list[Sentence]:
    """Each on one line: a run may have many planted faults."""
    return [dataclasses.replace(item, text=shortened(item.text, WIDTH - 12))
            for item in states(run)]  # fmt: skip


def _model(run: RunSummary) -> str:
    return f"{cut(model_name(run), 40)}, {run.dtype.removeprefix('torch.')}"


def _label(run: RunSummary) -> str:
    return f", on {run.label}" if run.label else ""


def _worst(report: Report, num_rows: int) -> Table | list[Sentence]:
    """What is beyond a limit, else what comes nearest to it: one place in a line, more as a table.
    Nothing where no size is known, or a healthy pair is held to no limit."""
    every = worst_rows(report)
    unlike = [row for row in every if not row.worst.identical]
    pairs = list(zip(unlike, worst_places(unlike), strict=True))
    beyond = [(row, place) for row, place in pairs if row.flagged or num_bad(row.worst)]
    shown = (beyond or pairs)[: 1 if is_quiet(report) else num_rows]
    judged = any(row.share is not None for row in unlike)
    known = judged or any(row.errors or num_bad(row.worst) for row, _ in shown)
    if not known or (is_quiet(report) and not judged):
        return []
    same = len(shown) == len(unlike) < len(every)
    if len(shown) > 1:
        sides = max(len(row.errors) for row, _ in shown)
        titles = ("A's error", "B's error") if sides == 2 else ("error",)
        rows = [
            (*map(decimal, row.errors), *["-"] * (sides - len(row.errors)),
             "not finite" if num_bad(row.worst) else limit_share(row.share) if judged else "",
             cut(row.worst.site, 40) + "  !" * (row.flagged or num_bad(row.worst) > 0), place)
            for row, place in shown
        ]  # fmt: skip
        more = ", the others equal bit for bit" * same
        return Table(
            title=f"worst of {count(len(every), 'place')}{more}", rows=rows, num_left=sides + 3,
            columns=(*titles, "of its limit" if judged else "", "where", ""), widest=44,
        )  # fmt: skip
    ((row, place),) = shown
    onset = report.verdict.onset
    where = "" if onset and onset.site == row.worst.site else f"{cut(row.worst.site, 40)}, "
    sizes = [f"{name}{decimal(error)}" for name, error in
             zip(("A's error ", "B's ") if len(row.errors) == 2 else ("error ",), row.errors,
                 strict=False)]  # fmt: skip
    used = limit_share(row.share)
    text = f"{', '.join(sizes)}: {used}{' of' * used.endswith('%')} its limit" * judged
    text = "not finite" if num_bad(row.worst) else text or ", ".join(sizes)
    rest = "; the others equal bit for bit" * same
    return [named("worst", f"{text}; {where}{place}{rest}")]
