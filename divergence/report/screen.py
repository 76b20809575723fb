"""The first screen of a comparison: what most readers need, in some 18 lines.

The answer, what it could not have seen, what was compared, the worst rows, and one command. What is
left out stands in the whole report (``report_lines``), behind ``-v``.
"""

from __future__ import annotations

import dataclasses

from divergence.analyses.blocks.sections import SiteRow, num_bad, worst_places, worst_rows
from divergence.comparison.result import Report, RunSummary
from divergence.document import Block, Document, Section, Sentence, Table, named
from divergence.facts import sentence_behind
from divergence.layout import Line, count, cut, fold, limit_share
from divergence.report.summary import is_quiet, model_name, opening_of, report_lines, states
from divergence.report.text import document_lines
from divergence.words import shortened

WIDTH, HEIGHT = 80, 18
_NUM_ROWS = 5
_MOST_OF_FACT = 240
"""Letters of a fact behind the verdict."""


def screen_lines(report: Report, *, more: str = "add -v") -> list[Line]:
    """The first screen. ``more``: how to see the rest. A report without blocks (operators alone, a
    suite, probed arithmetic) is shown whole."""
    if not report.sites and report.verdict.kind != "incomparable":
        return report_lines(report)
    for num_rows in range(_NUM_ROWS, 0, -1):
        lines = document_lines(_screen(report, num_rows, more))
        if sum(len(fold(item, WIDTH)) for item in lines) <= HEIGHT:
            break  # fewer rows where the rest is long
    return lines


def _screen(report: Report, num_rows: int, more: str) -> Document:
    whole = opening_of(report)
    # the first fact behind a verdict that is more than that all is well
    most = 5 if report.verdict.kind in ("incomparable", "undetermined") else 1
    facts = [] if is_quiet(report) else report.verdict.evidence[:most]
    # the line of the onset names the place already
    place = report.verdict.onset.site if report.verdict.onset else None
    texts = [sentence_behind(item, place) if place else item.text for item in facts]
    why = [named("" if number else "because", shortened(text, _MOST_OF_FACT))
           for number, text in enumerate(texts)]  # fmt: skip
    # of the second run only what is not as in the first
    a, b = report.reference, report.candidate
    same = (a.model, a.dtype, a.device) == (b.model, b.dtype, b.device)
    text = f"{b.path}: {'the same model and dtype' if same else _model(b)}{_label(b)}"
    if same and a.label == b.label:
        text = f"{b.path}: the same model, dtype and machine"
    runs = [named("A", f"{a.path}: {_model(a)}{_label(a)}"), *states(a),
            named("B", text), *states(b)]  # fmt: skip
    operators: list[Sentence] = []
    if (compared := report.operators) is not None:
        num_beyond = sum(result.limit_usage > 1 for result in compared.results)
        text = f"{compared.num_matched} compared, {num_beyond} beyond the limit"
        first = f"; first {compared.onset}" if compared.onset else ""
        operators = [named("operators", text + first)]
    rest = [*["every block"] * bool(report.sites), "every setting"]
    rest += [count(len(report.notes), "note")] if report.notes else []
    hint = f"{', '.join(rest)}: {more}"
    table, known = None, [*runs, *whole.known, *operators]
    if is_quiet(report):
        known += _nearest(report)
    else:
        table = _worst(report, num_rows)
    alone = more.startswith("divergence ")  # a command stands on a line of its own
    shown: list[Block] = [Sentence(hint, style="dim", indent=0, hang=0)]
    if table is not None:
        shown = [table, *shown] if alone else [dataclasses.replace(table, detail=hint)]
    elif is_quiet(report) and not alone:
        known.append(named("more", hint, "dim"))
        shown = []
    return Document(
        headline=dataclasses.replace(whole.headline, facts=[*whole.headline.facts, *why]),
        known=known,
        sections=[Section(body=shown)],
        next=[command.alone for command in report.verdict.commands[:1]],
    )


def _model(run: RunSummary) -> str:
    return f"{cut(model_name(run), 40)}, {run.dtype.removeprefix('torch.')}"


def _label(run: RunSummary) -> str:
    return f", on {run.label}" if run.label else ""


def _unlike(report: Report) -> tuple[list[tuple[SiteRow, str]], int]:
    """The rows that are not equal bit for bit, the worst first, each with its place; and of how
    many rows."""
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical]
    return list(zip(rows, worst_places(rows), strict=True)), len(every)


def _nearest(report: Report) -> list[Sentence]:
    """Of a healthy pair, what comes nearest to its limit."""
    rows, total = _unlike(report)
    texts = []
    for row, place in rows[:1]:
        site = row.worst
        parts = [] if site.rel_l2 is None else [f"error {site.rel_l2:.1e}"]
        if site.limit_usage is not None:
            parts.append(f"{limit_share(site.limit_usage)} of its limit")
        where = f"of {count(total, 'place')} {cut(site.site, 40)}, {place}"
        texts.append(f"{where}: {', '.join(parts)}")
    return [named("worst", text) for text in texts]


def _worst(report: Report, num_rows: int) -> Table | None:
    """What is beyond a limit, else what uses most of it; None where all is equal."""
    unlike, total = _unlike(report)
    if not unlike:
        return None
    judged = any(row.worst.limit_usage is not None for row, _ in unlike)
    rows = [pair for pair in unlike if pair[0].flagged or num_bad(pair[0].worst)] or unlike
    shown = []
    for row, place in rows[:num_rows]:
        site = row.worst
        used = "not finite" if num_bad(site) else limit_share(site.limit_usage) if judged else ""
        error = "-" if site.rel_l2 is None else f"{site.rel_l2:.1e}"
        name = cut(site.site, 40) + ("  !" if row.flagged else "")
        shown.append((error, used, name, place))
    same = ", the others equal bit for bit" * (len(shown) == len(unlike) < total)
    return Table(
        title=f"worst of {count(total, 'place')}{same}", rows=shown, num_left=4, widest=44,
        columns=("error", "of its limit" if judged else "", "where", ""),
    )  # fmt: skip
