"""The page of a report: verdict first, then what each analysis has to show, then the two runs.

Nothing here opens a run: ``background`` brings what the report does not hold. An analysis shows its
part by a ``page`` module in its folder, as it prints it by ``show``; where it has that alone, what
it prints stands on the page as it is.

A page is sent by mail and read in a browser, so what it carries for download is bounded: of a
report with more results than fit, the worst are kept, and the page says how many.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from divergence.comparison.result import Report, RunSummary, strict_json
from divergence.comparison.results import Background, PreflightLine, SiteResult
from divergence.document import Block, Headline, Section, Table
from divergence.html.parts import (
    Element,
    Node,
    command,
    document,
    el,
    facts,
    name,
    prose_block,
)
from divergence.html.sections import element, script_data, section_title
from divergence.layout import Line, count, size
from divergence.report.environment import csv_columns
from divergence.report.screen import known_facts
from divergence.report.summary import (
    analysis_sections,
    headline,
    verdict_headline,
    visible_facts,
)
from divergence.run.manifest import Environment, Manifest
from divergence.words import HEADLINES

# What every page has: a bar on top, an opening with the answer, sections, data to download.

_SIGNS = {"good": "✓", "bad": "✕", "unsure": "?"}
"""By how an answer stands: a sign that needs no colour."""
_STANDINGS = {"green": "good", "red": "bad"}


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
    return document(
        f"{title} · divergence", body, data=strict_json(data, indent=None), attachment=attachment
    )


def opening(
    headline: Headline, *more: Node, standing: str = "", sign: str = "", id: str = "verdict",
    label: str = "Verdict", beside: Node = None, below: Sequence[Node] = (),
) -> Element:  # fmt: skip
    """The answer as the top of a page. ``standing``: how it stands, where its colour in a terminal
    does not say so. ``more``: under its facts. ``beside``: at the right. ``below``: under all."""
    standing = standing or _STANDINGS.get(headline.style.rpartition(" ")[2], "unsure")
    rows = [(fact.label, fact.text) for fact in headline.facts]
    mark = el("span", sign or _SIGNS[standing], class_="sign", aria_hidden="true")
    long = "long" if len(headline.text) > 110 else None
    said = el(
        "div",
        el("p", mark, headline.word, class_="badge") if headline.word else None,
        el("h1", name(_capital(headline.text)), class_=long),
        facts(rows, class_="facts verdict-facts") if rows else None, *more,
    )  # fmt: skip
    content = said if beside is None else el("div", said, beside, class_="opening")
    return el("section", content, *below, class_=f"verdict {standing}", id=id, aria_label=label)


def _capital(sentence: str) -> str:
    """A sentence's first word begins with a capital letter, unless it is a name: of a module, a
    task or a file."""
    word = sentence.partition(" ")[0].rstrip(",:;")
    return sentence[:1].upper() + sentence[1:] if word.isalpha() else sentence


def next_commands(commands: Sequence[str]) -> list[Node]:
    """What to run next, each with a button that copies it."""
    return [el("h2", "Do this next"), *map(command, commands)] if commands else []


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


# Settings that differ, both machines, and how much was compared.

_MOST_UNMATCHED = 100
_STATUS = {"blocking": "blocks", "differs": "differs", "unknown": "unknown", "same": "same"}


def settings_section(report: Report) -> Section | None:
    """What was checked before any number; what differs comes first and stands open."""
    if not report.preflight:
        return None
    by: dict[str, list[PreflightLine]] = {status: [] for status in _STATUS}
    for line in report.preflight:
        by[line.status].append(line)
    shown = [*by["blocking"], *by["differs"], *by["unknown"]]
    body = [_settings("What differs", shown)] if shown else []
    if by["same"]:
        folded = f"{count(len(by['same']), 'setting')} the same"
        body.append(_settings("What is the same", by["same"], folded))
    told = f"{len(by['differs'])} of {len(report.preflight)} differ"
    told += f"; {len(by['blocking'])} more forbid a comparison" if by["blocking"] else ""
    return Section(id="settings", title="Settings", lead=f"{told}.", body=body)


def _settings(caption: str, lines: list[PreflightLine], folded: str = "") -> Table:
    with_detail = any(line.detail for line in lines)
    more = ["detail"] if with_detail else []
    return Table(
        caption=caption, num_left=5, folded=folded,
        columns=("setting", "status", "A", "B", *more),
        rows=[
            (line.check, _STATUS[line.status], line.reference, line.candidate,
             *([line.detail or ""] if with_detail else []))
            for line in lines
        ],
        marks=["blocks" if line.status == "blocking" else "" for line in lines],
    )  # fmt: skip


def machines_section(background: Background) -> Section | None:
    """Both machines side by side, what differs marked."""
    sides = background.reference, background.candidate
    if not any(sides):
        return None
    rows: list[tuple[str, ...]] = []
    for title, read in _FACTS:
        reference, candidate = ("not known" if side is None else read(side) for side in sides)
        if reference or candidate:
            rows.append((title, reference or "-", candidate or "-"))
    names = [_versions(side) for side in sides]
    for package in dict.fromkeys([*names[0], *names[1]]):
        rows.append((package, *(known.get(package, "-") for known in names)))
    apart = [row for row in rows if row[1] != row[2]]
    same = [row for row in rows if row[1] == row[2]]
    columns, folded = ("what", "A", "B"), f"{count(len(same), 'line')} the same"
    tables = [
        Table(caption="What differs", columns=columns, rows=apart, num_left=3),
        Table(caption="What is the same", columns=columns, rows=same, num_left=3, folded=folded),
    ]
    told = f"{len(apart)} of {len(rows)} lines differ."
    body = [table for table in tables if table.rows]
    return Section(id="machines", title="Machines", lead=told, body=body)


def _versions(side: Manifest | None) -> dict[str, str]:
    if side is None:
        return {}
    environment = side.environment
    return {**dict(sorted(environment.versions.items())), **environment.torch_build,
            **environment.variables}  # fmt: skip


def _of(read: Callable[[Environment], str | None]) -> Callable[[Manifest], str | None]:
    return lambda manifest: read(manifest.environment)


def _device(environment: Environment) -> str:
    number = f" × {environment.num_devices}" if environment.num_devices > 1 else ""
    return f"{environment.device_type}: {environment.device_name}{number}"


_FACTS: tuple[tuple[str, Callable[[Manifest], str | None]], ...] = (
    ("label", _of(lambda it: it.label)),
    ("device", _of(_device)),
    ("driver", _of(lambda it: it.driver)),
    ("runtime", _of(lambda it: it.runtime)),
    ("CPU", _of(lambda it: it.cpu)),
    ("CPU model", _of(lambda it: it.cpu_model)),
    ("instructions", _of(lambda it: it.cpu_capability)),
    ("threads", _of(lambda it: str(it.num_threads))),
    ("platform", _of(lambda it: it.platform)),
    ("Python", _of(lambda it: it.python)),
    ("processes", lambda it: it.processes),
    ("engine", lambda it: None if it.engine is None else it.engine.name),
    ("attention", lambda it: it.model.attn_implementation),
    ("weights", lambda it: f"{it.model.num_parameters:,} parameters, {it.model.dtype}"),
    ("captured", lambda it: it.created),
    ("recorded", lambda it: f"{it.sizes.num_records:,} records, {size(it.sizes.stored_bytes)}"),
    ("command", lambda it: it.command),
)  # fmt: skip


def coverage_section(report: Report, background: Background) -> Section:
    """How much of what was recorded was compared, and notes."""
    coverage = report.coverage
    lead = (
        f"{coverage.num_compared:,} tensors compared, {coverage.num_skipped:,} skipped, "
        f"{coverage.num_only_reference:,} only in A, {coverage.num_only_candidate:,} only in B."
    )
    body: list[Block] = []
    if coverage.passes:
        body.append(Table(
            caption="By pass", num_left=2,
            columns=("pass", "what", "compared", "missing", "skipped", "only in B", "share"),
            rows=[
                (pass_.pass_, pass_.what, f"{pass_.num_compared:,}", f"{pass_.num_missing:,}",
                 f"{pass_.num_skipped:,}", f"{pass_.num_extra:,}", f"{100 * pass_.share:.4g}%")
                for pass_ in coverage.passes
            ],
        ))  # fmt: skip
    if coverage.unmatched:
        body.append(Table(
            caption="Not compared", num_left=6, most=_MOST_UNMATCHED,
            folded=f"{count(len(coverage.unmatched), 'tensor')} not compared",
            columns=("site", "side", "pass", "prompt", "step", "why"),
            rows=[(row.site, row.side, row.pass_, row.sample, row.step, row.reason)
                  for row in coverage.unmatched],
        ))  # fmt: skip
    notes = [*report.notes, *background.notes]
    if notes:
        body.append(el("ul", *(el("li", prose_block(text)) for text in notes), class_="notes"))
    return Section(id="coverage", title="What was compared", lead=lead, body=body)


# The top of a page: the verdict in the terminal's words, why, and what to do next.

STANDINGS = {
    "identical": ("good", "✓"),
    "within_floor": ("good", "✓"),
    "systematic": ("bad", "✕"),
    "localized": ("bad", "✕"),
    "nonfinite": ("bad", "✕"),
    "drift": ("unsure", "!"),
    "undetermined": ("unsure", "?"),
    "incomparable": ("unsure", "≠"),
}
"""By kind of verdict: how it stands, and a sign that needs no colour."""


def verdict(report: Report) -> Element:
    """What the terminal's first screen says, why, and the command that goes deeper."""
    kind = report.verdict.kind
    standing, sign = STANDINGS[kind]
    if headline(report) != HEADLINES[kind]:
        standing, sign = STANDINGS["incomparable"]
    top = verdict_headline(report)
    facts = [*top.facts, *visible_facts(report), *known_facts(report, report.preflight)]
    top = Headline(top.word, top.text, top.style, facts)
    return opening(
        top, *_why(report), standing=standing, sign=sign, beside=_pair(report),
        below=next_commands(report.verdict.next),
    )  # fmt: skip


def policy(answer: Headline, more: Sequence[Line]) -> Element:
    """What `check` says of the policy, before the verdict that it judges."""
    items = [el("li", prose_block(line.text.strip())) for line in more]
    return opening(
        answer, el("ul", *items, class_="why") if items else None, id="policy", label="Policy"
    )


def _why(report: Report) -> list[Node]:
    if not report.verdict.evidence:
        return []
    items = [el("li", prose_block(fact.text)) for fact in report.verdict.evidence]
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
    changed = [*(f"planted fault: {plant}" for plant in run.plants),
               *(f"substituted: {substitute}" for substitute in run.substitutes)]  # fmt: skip
    if not run.complete:
        why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
        changed.append(f"incomplete: {why}")
    head = el("h2", el("span", letter, class_=f"letter {side}"), name(run.label or run.path))
    notes = el("ul", *(el("li", name(text)) for text in changed), class_="warnings")
    return el("article", head, facts(rows), notes if changed else None, class_="run")


def findings_section(report: Report) -> Section | None:
    """All findings, of which one verdict was made."""
    if not report.findings:
        return None
    items = []
    for finding in report.findings:
        claim = finding.claim.replace("_", " ")
        evidence = [
            el("li", prose_block(fact.text)) for fact in (*finding.evidence, *finding.beside)
        ]
        items.append(el(
            "li", el("p", el("strong", claim), el("small", finding.role)),
            prose_block(finding.summary) if finding.summary else None,
            el("ul", *evidence) if evidence else None,
        ))  # fmt: skip
    return Section(
        id="findings", title="All findings",
        lead="What each analysis found. The verdict was made of these; a hint or a context is a "
        "place to look, and no fault.",
        body=(el("ol", *items, class_="findings"),),
    )  # fmt: skip


def page(
    report: Report, background: Background, *, openings: Sequence[Element] = (),
    sections: Sequence[Section] = (), command_name: str = "compare",
) -> str:  # fmt: skip
    """The whole file, as text. ``openings``, ``sections``: another command's answer that rests on
    this report (`check`, `localize`), and comes first."""
    packed, num_kept = attached(report)
    made = analysis_sections(report, background=background)
    ordered = sorted(made, key=lambda name: name not in _FIRST)
    shown = [
        *sections,
        *(section for name in ordered for section in made[name]),
        settings_section(report),
        machines_section(background),
        findings_section(report),
        coverage_section(report, background),
    ]
    a, b = (run.label or run.path for run in (report.reference, report.candidate))
    return frame(
        command_name, f"{_answer(report)} · {a[:60]} / {b[:60]}",
        [*openings, verdict(report)], (section for section in shown if section is not None),
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


_FIRST = ("blocks", "suite", "collectives", "logprobs")
"""Before the others, which keep the terminal's order."""


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
