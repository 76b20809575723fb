"""Pages: the verdict first, then what there is to show, then the two runs; of a report, of many
runs, of localize, and of each answer that has documents.

Nothing here opens a run: ``background`` brings what the report does not hold.

A page is sent by mail and read in a browser, so what it carries for download is bounded: of a
report with more results than fit, the worst are kept, and the page says how many.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from divergence._version import __version__
from divergence.analyses.blocks.sections import curves
from divergence.comparison.result import Answer, Report, RunSummary, strict_json
from divergence.comparison.results import Background
from divergence.document import Document, Section
from divergence.domain import placed
from divergence.errors import UsageError
from divergence.experiments.result import Localization
from divergence.fleet.result import Matrix
from divergence.html import parts
from divergence.html.parts import (
    Element,
    Node,
    command,
    el,
    facts,
    name,
    prose_block,
    render,
    small_table,
)
from divergence.html.picture import Picture, compose
from divergence.html.sections import element, script_data, section_title
from divergence.layout import count
from divergence.report import localization as localized
from divergence.report.environment import csv_columns
from divergence.report.matrix import matrix_document
from divergence.report.summary import (
    computed,
    document,
    headline,
    model_name,
    opening_of,
    run_text,
    states,
    verdict_headline,
)
from divergence.words import HEADLINES

# What every page has: a bar on top, an opening with the answer, sections, data to download.

_STANDINGS = {"green": ("good", "✓"), "red": ("bad", "✕"), "magenta": ("unsure", "≠")}
"""By an answer's colour in a terminal: how it stands, and a sign that needs no colour."""


def frame(
    command_name: str, title: str, openings: Sequence[Element], sections: Iterable[Section], *,
    attachment: bytes, made_by: str, columns: Sequence[str] = (), noun: str = "Block",
    data_lead: str = "This page holds the answer it was made of.",
) -> str:  # fmt: skip
    """The whole file. ``title``: the answer, as a browser's tab shows it. ``attachment``: the JSON
    to download, of which the script makes the CSV of ``columns``, where there are some. ``noun``:
    what can be chosen in a figure."""
    shown = [*sections, _download(data_lead, csv=bool(columns))]
    toggle = el("button", "Theme", type="button", id="theme", hidden=True,
                aria_label="Switch between light and dark")  # fmt: skip
    brand = el("span", el("b", "divergence"), f" {command_name}", class_="brand")
    links = [el("li", el("a", section_title(section), href=f"#{section.id}")) for section in shown]
    contents = el("nav", el("ul", *links), class_="contents", aria_label="On this page")
    made = f"Made by divergence {made_by}. This file loads nothing and sends nothing."
    body = el(
        "body",
        el("a", "Skip to the verdict", href=f"#{openings[0].attributes['id']}", class_="skip"),
        el("header", brand, toggle, class_="top"),
        el("main", *openings, contents, *map(element, shown)),
        el("footer", el("p", made)),
    )
    data = {**script_data(shown), "columns": columns, "noun": noun}
    return parts.document(
        f"{title} · divergence", body, data=strict_json(data, indent=None), attachment=attachment
    )


def opening(
    whole: Document, *more: Node, id: str = "verdict", label: str = "Verdict", beside: Node = None
) -> Element:
    """The answer as the top of a page: what is known at once, why, and what to run next, each
    command with a button that copies it. ``more``: under the facts. ``beside``: at the right."""
    headline = whole.headline
    standing, sign = _STANDINGS.get(headline.style.rpartition(" ")[2], ("unsure", "?"))
    sign = "!" if headline.word == HEADLINES["drift"] else sign
    told = [*headline.facts, *whole.known]
    lone = list(itertools.takewhile(lambda fact: not fact.label, told))  # sentences of their own
    rows = [(fact.label.removesuffix(":"), fact.text) for fact in told[len(lone) :]]
    mark = el("span", sign, class_="sign", aria_hidden="true")
    long = "long" if len(headline.text) > 110 else None
    said = el(
        "div",
        el("p", mark, headline.word, class_="badge") if headline.word else None,
        el("h1", name(_capital(headline.text)), class_=long),
        *(el("p", fact.text) for fact in lone),
        facts(rows, class_="facts verdict-facts") if rows else None, *more, *_why(whole.why),
    )  # fmt: skip
    content = said if beside is None else el("div", said, beside, class_="opening")
    below = [el("h2", "Do this next"), *map(command, whole.next)] if whole.next else []
    return el("section", content, *below, class_=f"verdict {standing}", id=id, aria_label=label)


def _capital(sentence: str) -> str:
    """A sentence's first word begins with a capital letter, unless it is a name: of a module, a
    task or a file."""
    word = sentence.partition(" ")[0].rstrip(",:;")
    return sentence[:1].upper() + sentence[1:] if word.isalpha() else sentence


def _download(lead: str, *, csv: bool) -> Section:
    buttons = [
        el("button", "Download JSON", type="button", id="download-json"),
        el("button", "Download CSV", type="button", id="download-csv") if csv else None,
    ]
    return Section(
        id="download", title="Data", lead=lead,
        body=(
            el("p", *buttons, class_="buttons", hidden=True, id="downloads"),
            el("noscript", el("p", "Downloads need scripts, which this viewer does not run.")),
        ),
    )  # fmt: skip


# The top of a page: the verdict in the terminal's words, why, and what to do next.


def _why(texts: Sequence[str]) -> list[Node]:
    if not texts:
        return []
    items = [el("li", prose_block(text)) for text in texts]
    shown, hidden = items[:4], items[4:]
    more = el(
        "details", el("summary", f"{count(len(hidden), 'more fact')}"), el("ul", *hidden),
        class_="more",
    )  # fmt: skip
    return [el("h2", "Why"), el("ul", *shown, class_="why"), more if hidden else None]


def _run(letter: str, side: str, run: RunSummary) -> Element:
    rows = [("model", model_name(run)), ("computed", computed(run)), ("run", run.path)]
    changed = [item.text for item in states(run)]
    head = el("h2", el("span", letter, class_=f"letter {side}"), name(run.label or run.path))
    notes = el("ul", *(el("li", name(text)) for text in changed), class_="warnings")
    return el("article", head, facts(rows), notes if changed else None, class_="run")


def page(
    report: Report, background: Background, *, openings: Sequence[Element] = (),
    sections: Sequence[Section] = (), command_name: str = "compare",
) -> str:  # fmt: skip
    """The whole file, as text. ``openings``, ``sections``: another command's answer that rests on
    this report (`check`, `localize`), and comes first."""
    packed, num_kept = attached(report)
    data_lead, total = "This page holds the report it was made of.", len(report.sites)
    if num_kept != total:
        data_lead = (
            f"This page holds {num_kept:,} of {total:,} results, the worst first, so that it stays "
            "small; `divergence compare --json` and `--csv` write all of them."
        )
    verdict = report.verdict
    onset = verdict.onset and (verdict.onset.block or verdict.onset.site)
    said = onset or _SHORT.get(verdict.kind)
    answer = headline(report) + (f": {said[:60]}" if said else "")  # ``DIVERGED: model.layers.6``
    pair = [_run("A", "reference", report.reference), _run("B", "candidate", report.candidate)]
    beside = el("div", *pair, class_="pair", role="group", aria_label="The two runs")
    whole = document(report, background=background)
    a, b = (run.label or run.path for run in (report.reference, report.candidate))
    return frame(
        command_name, f"{answer} · {a[:60]} / {b[:60]}",
        [*openings, opening(whole, beside=beside)], [*sections, *whole.sections],
        attachment=packed, data_lead=data_lead, made_by=report.tool_version,
        columns=csv_columns(),
    )  # fmt: skip


_SHORT = {
    "identical": "equal bit for bit",
    "within_floor": "only rounding differs",
    "incomparable": "not the same experiment",
    "undetermined": "nothing to tell",
}
"""What a verdict without a place says, in a browser's tab."""


MOST_BYTES = 300_000
"""Of the packed report; a third more as text."""
_MOST_RESULTS = 4000
_TRIES = 6


def attached(report: Report) -> tuple[bytes, int]:
    """The JSON, and how many results of sites it holds."""
    # what the verdict rests on first, then by the share of a limit, then by the difference
    ranked = sorted(report.sites, key=lambda site: (
        not site.flagged, not (site.nonfinite is not None and site.nonfinite.total > 0),
        -_size(site.usage), -_size(site.rel_l2),
    ))  # fmt: skip
    most = min(len(ranked), _MOST_RESULTS)
    data = b""
    for _ in range(_TRIES):
        kept = set(map(id, ranked[:most]))
        thinned = replace(report, sites=[site for site in report.sites if id(site) in kept])
        if most < len(ranked):  # lists that no page needs in full, where not even the sites fit
            unmatched = report.coverage.unmatched[: _MOST_RESULTS // 8]
            thinned = replace(thinned, coverage=replace(report.coverage, unmatched=unmatched))
        if most < len(ranked) and (operators := report.operators) is not None:
            worst = sorted(operators.results, key=lambda result: -result.limit_usage)[:500]
            kept = set(map(id, worst))
            results = [result for result in operators.results if id(result) in kept]
            thinned = replace(thinned, operators=replace(operators, results=results))
        data = thinned.to_json().encode()
        packed = len(gzip.compress(data, compresslevel=6))
        if packed <= MOST_BYTES or most == 0:
            break
        most = int(most * 0.9 * MOST_BYTES / packed)
    return data, most


def _size(value: float | None) -> float:
    return 0.0 if value is None else math.inf if math.isnan(value) else value


# The pages of answers: each has the terminal's answer on top and its tables as tables.


def page_of(answer: Answer, background: Background | None = None) -> str:
    """The page, whatever the answer is of. ``background``: of its report, where it has one."""
    if isinstance(answer, Matrix):
        small = replace(answer, rows=[replace(row, report=None) for row in answer.rows])
        lead = "This page holds the answer it was made of, without the report of each pair."
        whole = matrix_document(answer, page=True)
        return _framed(small, [whole], noun="Run", data_lead=lead)
    if answer.DOCUMENTS is not None:
        documents = placed(answer.DOCUMENTS)(answer)
        return _framed(answer, [documents] if isinstance(documents, Document) else documents)
    background = background or Background()
    if isinstance(answer, Localization):
        return _localization(answer, background)
    assert isinstance(answer, Report)
    return page(answer, background)


def _framed(answer: Any, documents: list[Document], **parts: str) -> str:
    """A page of documents alone. ``parts``: others of ``frame``."""
    openings = [
        opening(whole, id=f"verdict-{number}" if number else "verdict")
        for number, whole in enumerate(documents)
    ]
    return frame(
        answer.COMMAND, str(documents[0].headline)[:120], openings,
        [section for whole in documents for section in whole.sections],
        attachment=answer.to_json().encode(), made_by=answer.tool_version, **parts,
    )  # fmt: skip


def _localization(result: Localization, background: Background) -> str:
    answer = localized.headline_of(result)
    top = opening(Document(headline=answer, next=result.commands), id="answer", label="Answer")
    sections = [localized.descent_section(result)]
    if result.report is None:
        return frame(
            "localize", str(answer)[:120], [top], sections,
            attachment=result.to_json().encode(), made_by=__version__,
        )  # fmt: skip
    return page(
        result.report, background, openings=[top], sections=sections, command_name="localize"
    )


# A report as a picture, and what a notebook shows of it.


def picture_of(report: Report) -> Picture:
    """The curves of the page. Raises UsageError where no block was compared."""
    plots = curves(report)
    if not plots:
        raise UsageError(
            "no output of a block was compared, so there is no curve to draw",
            hint="print the report, or write it with --html",
        )
    runs = f"A  {run_text(report.reference)}", f"B  {run_text(report.candidate)}"
    return Picture(render(compose(str(verdict_headline(report)), runs, plots)))


def report_html(report: Report) -> str:
    """The verdict, and the curve of the phase that it is about."""
    whole = opening_of(report)
    onset = report.verdict.onset
    wanted = "error-decode" if onset is not None and onset.step else "error-prefill"
    plots = [plot for plot in curves(report) if plot.id == wanted]
    rows = [(fact.label, fact.text) for fact in whole.headline.facts]
    rows += [("A", run_text(report.reference)), ("B", run_text(report.candidate))]
    rows += [("next", command) for command in whole.next[:1]]
    return small_table(str(whole.headline), rows, compose("", (), plots) if plots else None)
