"""The page of a report: verdict first, then what each analysis has to show, then the two runs.

Nothing here opens a run: ``background`` brings what the report does not hold.

A page is sent by mail and read in a browser, so what it carries for download is bounded: of a
report with more results than fit, the worst are kept, and the page says how many.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from divergence.comparison.result import Report, RunSummary, strict_json
from divergence.comparison.results import Background, SiteResult
from divergence.document import Document, Headline, Section
from divergence.html import parts
from divergence.html.parts import (
    Element,
    Node,
    command,
    el,
    facts,
    name,
    prose_block,
)
from divergence.html.sections import element, script_data, section_title
from divergence.layout import Line, count
from divergence.report.environment import csv_columns
from divergence.report.summary import document, headline, states
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
    body = el(
        "body",
        el("a", "Skip to the verdict", href=f"#{openings[0].attributes['id']}", class_="skip"),
        _top(command_name),
        el("main", *openings, _contents(shown), *map(element, shown)),
        _bottom(made_by),
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
    rows = [(fact.label, fact.text) for fact in (*headline.facts, *whole.known)]
    mark = el("span", sign, class_="sign", aria_hidden="true")
    long = "long" if len(headline.text) > 110 else None
    said = el(
        "div",
        el("p", mark, headline.word, class_="badge") if headline.word else None,
        el("h1", name(_capital(headline.text)), class_=long),
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


def _top(command_name: str) -> Element:
    toggle = el("button", "Theme", type="button", id="theme", hidden=True,
                aria_label="Switch between light and dark")  # fmt: skip
    brand = el("span", el("b", "divergence"), f" {command_name}", class_="brand")
    return el("header", brand, toggle, class_="top")


def _contents(sections: Sequence[Section]) -> Element:
    links = [
        el("li", el("a", section_title(section), href=f"#{section.id}")) for section in sections
    ]
    return el("nav", el("ul", *links), class_="contents", aria_label="On this page")


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


def _bottom(version: str) -> Element:
    made = f"Made by divergence {version}. This file loads nothing and sends nothing."
    return el("footer", el("p", made))


# The top of a page: the verdict in the terminal's words, why, and what to do next.


def policy(answer: Headline, more: Sequence[Line]) -> Element:
    """What `check` says of the policy, before the verdict that it judges."""
    items = [el("li", prose_block(line.text.strip())) for line in more]
    return opening(
        Document(headline=answer),
        el("ul", *items, class_="why") if items else None,
        id="policy",
        label="Policy",
    )


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


def _pair(report: Report) -> Element:
    """Both runs: what was compared with what."""
    runs = ("A", "reference", report.reference), ("B", "candidate", report.candidate)
    return el("aside", *(_run(*run) for run in runs), class_="pair", aria_label="The two runs")


def _run(letter: str, side: str, run: RunSummary) -> Element:
    dtype = run.dtype.removeprefix("torch.")
    rows = [("model", run.model), ("computed", f"{dtype} on {run.device}"), ("run", run.path)]
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
    whole = document(report, background=background)
    a, b = (run.label or run.path for run in (report.reference, report.candidate))
    return frame(
        command_name, f"{_answer(report)} · {a[:60]} / {b[:60]}",
        [*openings, opening(whole, beside=_pair(report))], [*sections, *whole.sections],
        attachment=packed, data_lead=_data_lead(report, num_kept), made_by=report.tool_version,
        columns=csv_columns(),
    )  # fmt: skip


_SHORT = {
    "identical": "equal bit for bit",
    "within_floor": "only rounding differs",
    "incomparable": "not the same experiment",
    "undetermined": "nothing to tell",
}
"""What a verdict without a place says, in a browser's tab."""


def _answer(report: Report) -> str:
    """``DIVERGED: model.layers.6``."""
    verdict = report.verdict
    onset = verdict.onset and (verdict.onset.block or verdict.onset.site)
    said = onset or _SHORT.get(verdict.kind)
    return headline(report) + (f": {said[:60]}" if said else "")


def _data_lead(report: Report, num_kept: int) -> str:
    total = len(report.sites)
    if num_kept == total:
        return "This page holds the report it was made of."
    return (
        f"This page holds {num_kept:,} of {total:,} results, the worst first, so that it stays "
        "small; `divergence compare --json` and `--csv` write all of them."
    )


MOST_BYTES = 300_000
"""Of the packed report; a third more as text."""
_MOST_RESULTS = 4000
_TRIES = 6


def attached(report: Report) -> tuple[bytes, int]:
    """The JSON, and how many results of sites it holds."""
    ranked = sorted(report.sites, key=_rank)
    most = min(len(ranked), _MOST_RESULTS)
    data = b""
    for _ in range(_TRIES):
        kept = set(map(id, ranked[:most]))
        thinned = replace(
            report, sites=[site for site in report.sites if id(site) in kept],
            **({} if most == len(ranked) else _shorter(report)),
        )  # fmt: skip
        data = thinned.to_json().encode()
        packed = len(gzip.compress(data, compresslevel=6))
        if packed <= MOST_BYTES or most == 0:
            break
        most = int(most * 0.9 * MOST_BYTES / packed)
    return data, most


def _shorter(report: Report) -> dict[str, object]:
    """Lists that no page needs in full, where not even the sites fit."""
    coverage = replace(report.coverage, unmatched=report.coverage.unmatched[: _MOST_RESULTS // 8])
    fields: dict[str, object] = {"coverage": coverage}
    if report.operators is not None:
        worst = sorted(report.operators.results, key=lambda result: -result.limit_usage)
        kept = set(map(id, worst[:500]))
        results = [result for result in report.operators.results if id(result) in kept]
        fields["operators"] = replace(report.operators, results=results)
    return fields


def _rank(site: SiteResult) -> tuple[bool, bool, float, float]:
    """What the verdict rests on first, then by the share of a limit, then by the difference."""
    broken = site.nonfinite is not None and site.nonfinite.total > 0
    return (not site.flagged, not broken, -_size(site.usage), -_size(site.rel_l2))


def _size(value: float | None) -> float:
    return 0.0 if value is None else math.inf if math.isnan(value) else value
