"""A whole comparison as one Document: the verdict and the onset first, then why, then the rest.

Every face is made of it: the first screen (report/screen.py), ``-v``, the page, the bundle, a
notebook. Nothing here opens a run or prints. Data (paths, module names, decoded tokens) goes in as
it is; a decoded token is quoted, since it may hold a newline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import PurePath

from msgspec.structs import replace

from divergence.analyses.tokens.sections import explained_facts
from divergence.comparison import analysis
from divergence.comparison.result import (
    Background,
    Coverage,
    PassCoverage,
    PreflightLine,
    Report,
    RunSummary,
)
from divergence.document import Block, Column, Document, Headline, Section, Sentence, Table, named
from divergence.layout import Line, cut
from divergence.report.environment import changes
from divergence.report.text import document_lines, headline_lines
from divergence.run.manifest import UNKNOWN
from divergence.run.site import is_of_parameter
from divergence.words import HEADLINES, count, letter, list_names, share, shortened, size

VERDICT_STYLES = {
    "identical": "bold green",
    "within_floor": "bold green",
    "systematic": "bold red",
    "localized": "bold red",
    "nonfinite": "bold red",
    "drift": "bold yellow",
    "undetermined": "bold yellow",
    "incomparable": "bold magenta",
}


def document(
    report: Report,
    *,
    every: bool = False,
    verbose: bool = False,
    background: Background | None = None,
) -> Document:
    """The whole answer. ``every``: nothing is elided; ``verbose``: also what was the same.
    ``background``: what the report does not hold, given for a page, where the figures of what was
    found come before the settings."""
    page = background is not None
    made = analysis_sections(report, every=every, background=background)
    # on a page what was compared comes before the others, which keep the terminal's order
    main = ("blocks", *analysis.whole_places())
    names = sorted(made, key=lambda name: page and name not in main)
    settings = _settings_sections(report.preflight, verbose=verbose or page)
    texts = [*report.notes, *(() if background is None else background.notes)]
    notes = [Sentence(text, "note", indent=0, hang=6) for text in texts]
    sections = [
        *(() if page else settings),
        *chain.from_iterable(made[name] for name in names),
        *(settings if page else ()),
        *(() if background is None else _made(background)),
        *_coverage(report, full=verbose or page),
        *([Section(id="notes", heading="Notes", body=notes)] if notes else ()),
    ]
    return dataclasses.replace(opening_of(report), sections=sections)


def opening_of(report: Report) -> Document:
    """The document without its sections: all that a first screen and a notebook need."""
    top = verdict_headline(report)
    *facts, confidence = top.facts
    seen = [named("" if n else "not seen", text) for n, text in enumerate(unseen(report))]
    preflight = report.preflight
    if report.verdict.kind == "incomparable":  # what stops it stands among the reasons already
        preflight = [line for line in preflight if line.status in ("differs", "unknown")]
    return Document(
        headline=dataclasses.replace(top, facts=[*facts, *_asked(report), confidence, *seen]),
        why=[fact.text for fact in report.verdict.evidence],
        known=[
            *_settings(preflight),
            *_tokens(report),
            *explained_facts(report),
            *_compared(report),
        ],
        next=report.verdict.next,
    )


def report_document(report: Report, *, every: bool = False, verbose: bool = False) -> Document:
    """The whole document for a terminal: the two runs stand where a first screen has what was
    compared."""
    whole = document(report, every=every, verbose=verbose)
    return dataclasses.replace(whole, known=run_facts(report))


def report_lines(report: Report, *, all_sites: bool = False, verbose: bool = False) -> list[Line]:
    whole = report_document(report, every=all_sites, verbose=verbose)
    return document_lines(whole, verbose=verbose, every=all_sites)


def run_facts(report: Report) -> list[Sentence]:
    """The runs, each on a line; of the second only what is not as in the first."""
    a, b = report.reference, report.candidate
    lines = [named("A", run_text(a)), *states(a)]
    if is_alone(report):
        return lines
    other = any(
        line.check in ("weights", "quantization") and line.status in ("differs", "blocking")
        for line in report.preflight
    )
    text = run_text(b)
    same = (a.model, a.dtype, a.device) == (b.model, b.dtype, b.device) and not other
    if same and a.model != UNKNOWN:
        alike = a.label == b.label and UNKNOWN not in a.device
        names = ["model", *["dtype"] * (a.dtype != UNKNOWN), *["machine"] * alike]
        text = f"{b.path}: the same "
        text += " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        text += "" if alike else _label(b)
    return [*lines, named("B", text), *states(b)]


def is_alone(report: Report) -> bool:
    """Was one run judged without another, or held against itself?"""
    return any(part.num_runs == 1 for part in report.parts.values() if part)


# The top: the verdict, and what it could not have seen.


def headline(report: Report) -> str:
    """The first word of the answer. Two dtypes, or codes on one side, without more are no machine's
    doing."""
    kind = report.verdict.kind
    a, b = report.reference, report.candidate
    dtypes = (a.dtype, a.compute_dtype), (b.dtype, b.compute_dtype)
    codes = any(row.check == "quantization" and row.status == "differs" for row in report.preflight)
    wide = dtypes[0] != dtypes[1] and UNKNOWN not in (a.dtype, b.dtype)
    if kind == "within_floor" and (wide or codes):
        return "DIFFERENT PRECISION"
    return HEADLINES[kind]


def verdict_lines(report: Report) -> list[Line]:
    """The judgement alone: what ``--quiet`` prints."""
    return headline_lines(verdict_headline(report))


def is_quiet(report: Report) -> bool:
    """Is all well, and does the headline say so?"""
    verdict = report.verdict
    return verdict.kind in ("identical", "within_floor") and verdict.side in (None, "neither")


def verdict_headline(report: Report) -> Headline:
    """The judgement: where the error begins, which side is wrong, and how sure that is."""
    verdict = report.verdict
    facts = []
    onset = verdict.onset
    if onset is not None:
        word = "decode step" if report.reference.generates else "step"
        forward = f"{word} {onset.step}" if onset.step else onset.phase
        inner = onset.block is not None and onset.site != f"{onset.block}:out"
        block = f", in block {onset.block}" if inner else ""
        token = "" if onset.position is None else f", token {onset.position}"
        of = "all prompts" if is_of_parameter(onset.site) else f"prompt {onset.sample}{token}"
        where = f"; {forward}, {of}" if report.sites or report.operators else ""  # of a model
        facts.append(named("onset", f"{onset.site}{block}{where}", "bold"))
    if verdict.side is not None and not is_quiet(report) and not is_alone(report):
        wrong = {"both": "both are", "neither": "neither is"}.get(verdict.side)
        facts.append(named("side", f"{wrong or f'{letter(verdict.side)} is'} wrong"))
    lacking = [check.detail for check in verdict.checks if check.state != "met" and check.detail]
    why = f": {'; '.join(lacking)}" if lacking else ""
    facts.append(named("confidence", verdict.confidence + why))
    word = headline(report)
    style = VERDICT_STYLES[verdict.kind if word == HEADLINES[verdict.kind] else "incomparable"]
    return Headline(word, verdict.summary, style, facts)


def _asked(report: Report) -> list[Sentence]:
    """Say what can tell the side where two runs alone cannot."""
    verdict, commands = report.verdict, report.verdict.commands
    asked = verdict.kind in ("localized", "systematic", "drift") and verdict.side is None
    if not asked or any(site.truth and not site.truth.estimated for site in report.sites):
        return []
    if commands and "truth" in commands[0].options:
        return [named("side", "not known from two runs: the command below tells it")]
    truth = next((item for item in commands if item.name == "truth"), None)
    if truth is None:
        return [named("side", "not known from two runs")]
    if truth.operands[0] not in (report.reference.path, report.candidate.path):
        # of a run that another command makes
        return [named("side", "not known from two runs; the commands below tell it")]
    line = named("side", "not known from two runs; a truth tells it:")
    return [line, Sentence(replace(truth, note=None).text, indent=0, hang=12, whole=True)]


def unseen(report: Report) -> list[str]:
    """Return what this comparison could not see, where it found no error that is the question."""
    if report.verdict.kind not in ("identical", "within_floor", "drift", "undetermined"):
        return []
    seen = None if report.verdict.kind == "identical" else report.visible
    texts = []
    if seen is not None:
        sizes = (
            ("a step", seen.forward),
            ("a token", seen.token),
            ("a channel", seen.channel),
        )
        least = ", ".join(f"{what} {share(size)}" for what, size in sizes if size is not None)
        parts = f" ({least})" if least else ""
        lone = "" if seen.token is not None else "; a single token alone is not judged"
        texts.append(f"errors below {share(seen.block)} of a block{parts}{lone}")
    if report.not_exercised:
        parts = list_names([part.text for part in report.not_exercised], _MOST_NAMED, "; ")
        texts.append(f"not exercised: {parts}")
    return texts


_MOST_NAMED = 3


# The two runs.


def run_text(run: RunSummary) -> str:
    """``runs/a: llama, bfloat16, H100``."""
    dtype = run.dtype.removeprefix("torch.")
    what = f"{cut(model_name(run), 40)}, {'dtype unknown' if dtype == UNKNOWN else dtype}"
    if run.model == run.dtype == UNKNOWN:
        what = "model and dtype unknown"
    return f"{run.path}: {what}{_label(run)}"


def _label(run: RunSummary) -> str:
    """What it was recorded as: a machine, a setting of `diff`, ``vLLM endpoint``."""
    if not run.label:
        return ""
    return f" ({run.label})" if UNKNOWN in run.device else f", {run.label}"


def computed(run: RunSummary) -> str:
    """``bfloat16 on cuda: H100``."""
    dtype, device = run.dtype.removeprefix("torch."), run.device
    unknown = dtype == UNKNOWN and UNKNOWN in device
    return "dtype and device unknown" if unknown else f"{dtype} on {device}"


def model_name(run: RunSummary) -> str:
    """Name the model as it is called on the hub; of a folder the last name."""
    path = PurePath(run.model)
    return path.name if path.is_absolute() or path.parts[:1] == ("~",) else run.model


def states(run: RunSummary) -> list[Sentence]:
    """Say why a run is incomplete, and what was planted or substituted in it."""
    if run.complete:
        return changes(run.plants, run.substitutes)
    why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
    text = f"INCOMPLETE: {why} after {count(run.num_records, 'record')}"
    return [named("", text, "yellow"), *changes(run.plants, run.substitutes)]


# Settings: in one line, and each of them.

_WIDTH = 86
"""Of all that differs, in one line."""


def _settings(preflight: Sequence[PreflightLine]) -> list[Sentence]:
    """Show what differs; planted faults stand beside their run."""
    differ = [
        line
        for line in preflight
        if line.status in ("differs", "blocking") and line.check != "planted faults"
    ]
    unknown = [line.check for line in preflight if line.status == "unknown"]
    shown: list[str] = []
    for text in map(_setting, differ):
        if shown and len("; ".join([*shown, text])) > _WIDTH - 8:
            break
        shown.append(text)
    if rest := [line.check for line in differ[len(shown) :]]:
        names = f"also {', '.join(rest)}"
        fits = len("; ".join([*shown, names])) <= _WIDTH
        shown.append(names if fits else f"{len(rest)} more")
    shown += [f"unknown: {list_names(unknown, _MOST_NAMED)}"] if unknown else []
    if not shown and preflight:
        planted = any(line.check == "planted faults" for line in preflight if line.status != "same")
        shown = ["all the same" + ", but for what was planted" * planted]
    if not shown:
        return []
    return [named("settings", "; ".join(shown), "yellow" if differ else "")]


_DIGESTED = (
    "weights",
    "code",
    "config",
    "derived tensors",
    "memory layout",
    "tokenizer",
    "chat template",
)
"""Settings whose values are digests: what differs stands in the detail."""


def _setting(item: PreflightLine) -> str:
    both = ("none" if value == "-" else value for value in (item.reference, item.candidate))
    text = item.candidate if item.check == "arithmetic" else " / ".join(both)
    if item.check in _DIGESTED or item.reference == item.candidate:
        text = item.detail or "differs"
    text = f"{item.check} {text}"
    return text if item.check == "arithmetic" else shortened(text, _WIDTH - 8)


_STATES = {
    "blocking": ("BLOCKS", "blocks"),
    "differs": ("differs", "below"),
    "unknown": ("unknown", "below"),
    "same": ("same", ""),
}


def _settings_sections(preflight: list[PreflightLine], *, verbose: bool) -> list[Section]:
    """Show what was checked before any number; what differs comes first and stands open."""
    by = {status: [row for row in preflight if row.status == status] for status in _STATES}
    same, unknown = by["same"], by["unknown"]
    detail = f"{len(same)} the same, {len(by['differs'])} different, {len(by['blocking'])} blocking"
    detail += f", {len(unknown)} unknown" if unknown else ""
    apart = [*by["blocking"], *by["differs"], *(unknown if verbose else ())]
    body: list[Block] = [_table_of("what differs", apart)] if apart else []
    if unknown and not verbose:
        names = ", ".join(item.check for item in unknown)
        body.append(Sentence(names, "unknown", style="yellow", indent=2, hang=10))
    if same and verbose:
        folded = f"{count(len(same), 'setting')} the same"
        body.append(_table_of("what is the same", same, folded))
    section = Section(id="settings", title="settings", detail=detail, body=body)
    return [section] if preflight else []


def _table_of(title: str, rows: Iterable[PreflightLine], folded: str = "") -> Table:
    rows = list(rows)
    alone = len({row.status for row in rows}) == 1  # on a page the caption says it
    state = Column("status", face="terminal" if alone else "")
    detail = ["detail"] * any(row.detail for row in rows)
    return Table(
        title=title,
        num_left=5,
        folded=folded,
        listed=True,
        columns=("setting", state, "A", "B", *detail),
        rows=[
            (row.check, _STATES[row.status][0], row.reference, row.candidate, row.detail or "")
            for row in rows
        ],
        marks=[_STATES[row.status][1] for row in rows],
    )


# The tokens in one line; what was compared, in one line and in full.


def _tokens(report: Report) -> list[Sentence]:
    tokens = report.tokens
    if tokens is None or tokens.num_tokens + tokens.num_missing == 0 or _all_agree(report):
        return []
    how = "" if tokens.forced else " (each continued its own text)"
    text = f"{tokens.num_equal} of {tokens.num_tokens} next tokens equal{how}"
    if tokens.num_missing:
        text += f"; {tokens.num_missing} more in A alone"
    if tokens.num_tokens == 0:
        text = f"none on both sides, {tokens.num_missing} in A alone"
    first = tokens.first_difference
    if first is not None:
        token_a, token_b = (
            f"#{choice.id}" if choice.text is None else repr(choice.text)
            for choice in (first.reference, first.candidate)
        )
        judgement = {"tie": ", a tie", "fault": ", no tie", None: ""}[first.judgement]
        text += f"; first apart at prompt {first.sample}, step {first.step}: "
        text += f"{token_a} / {token_b}{judgement}"
    return [named("tokens", text)]


def _all_agree(report: Report) -> bool:
    """Are all next tokens the same? Then the line of what was compared says so."""
    tokens = report.tokens
    equal = tokens is not None and tokens.num_tokens == tokens.num_equal > tokens.num_missing == 0
    return equal and bool(report.sites)


def _compared(report: Report) -> list[Sentence]:
    coverage, sites = report.coverage, report.sites
    if not sites:
        text = "nothing: what differs between such runs is no machine's doing"
        return [named("compared", text)] if report.verdict.kind == "incomparable" else []
    samples = {prompt.sample for site in sites for prompt in site.prompts}
    samples |= {site.sample for site in sites}
    blocks = {site.block for site in sites if site.block is not None}
    steps = {site.step for site in sites}
    over = [count(len(samples), "prompt"), count(len(steps), "step"), count(len(blocks), "block")]
    what = " × ".join(over[:2]) + (f", {over[2]}" if blocks else "")
    if not blocks and len(samples) == len(steps) == 1:  # of no model
        what = count(coverage.num_compared, "tensor")
    text = f"everything: {what}"
    if gone := lacking(coverage):
        text = f"{coverage.num_compared:,} tensors of {what}; {gone[0]}"
    if report.tokens is not None and _all_agree(report):
        text += f"; all {count(report.tokens.num_tokens, 'next token')} equal"
    if (operators := report.operators) is None:
        return [named("compared", text)]
    num_beyond = sum(result.limit_usage > 1 for result in operators.results)
    inner = f"{operators.num_matched} compared, {num_beyond} beyond the limit"
    if operators.onset and report.verdict.onset is None:
        inner += f"; first {operators.onset}"
    return [named("compared", text), named("operators", inner)]


def lacking(coverage: Coverage) -> list[str]:
    """Return what was not compared, in one text, where there is anything."""
    gone = (
        ("skipped", coverage.num_skipped),
        ("only in A", coverage.num_only_reference),
        ("only in B", coverage.num_only_candidate),
    )
    text = ", ".join(f"{number:,} {name}" for name, number in gone if number)
    return [text] if text else []


def _coverage(report: Report, *, full: bool) -> list[Section]:
    coverage = report.coverage
    passes = [(row.pass_, row.what, row) for row in coverage.passes if full or row.share != 1.0]
    if report.operators is not None and not report.sites and not coverage.unmatched and not passes:
        return []  # operators have a count of their own
    words = {"reference": "only in A", "candidate": "only in B", "both": "skipped"}
    befores = [None, *coverage.unmatched]
    unmatched = [  # a reason stands at the first of several in a row
        (words[item.side], item, item.reason * (before is None or item.reason != before.reason))
        for before, item in zip(befores, coverage.unmatched, strict=False)
    ]
    detail = (
        f"{coverage.num_compared:,} compared, {coverage.num_skipped:,} skipped, "
        f"{coverage.num_only_reference:,} only in A, {coverage.num_only_candidate:,} only in B"
    )
    if report.operators is not None and not coverage.num_compared:
        detail = ""
    tables = [
        Table(
            title="by pass",
            columns=("pass", "what", Column("compared", _num_compared)),
            rows=passes,
            num_left=3,
            bare=True,
        ),
        Table(
            title="not compared",
            columns=(
                "",
                Column("where", "{0.site} ({0.pass_}, prompt {0.sample}, step {0.step})".format),
                "why",
            ),
            rows=unmatched,
            num_left=3,
            bare=True,
            most=12,
            folded=f"{count(len(unmatched), 'tensor')} not compared",
        ),
    ]
    shown = [table for table in tables if table.rows]
    return [Section(id="coverage", title="what was compared", detail=detail, body=shown)]


def _num_compared(row: PassCoverage) -> str:
    parts = [f"{row.num_compared:,} of {row.num_compared + row.num_missing + row.num_skipped:,}"]
    parts += [f"{row.num_extra:,} in B alone"] if row.num_extra else []
    parts += [f"{row.num_empty:,} without elements"] if row.num_empty else []
    parts += [f"{row.num_elsewhere:,} not here: {row.elsewhere}"] if row.num_elsewhere else []
    return "; ".join(filter(None, (*parts, row.reason)))


# On a page alone: how the runs were made.


def _made(background: Background) -> list[Section]:
    """Say when and how each run was made, and on what."""
    sides = background.reference, background.candidate
    if not any(sides):
        return []
    facts: dict[str, dict[str, str | None]] = {
        name: {}
        if side is None
        else {
            "captured": side.created,
            "recorded": f"{side.sizes.num_records:,} records, {size(side.sizes.stored_bytes)}",
            "command": side.command,
            "processes": side.processes,
            **side.environment.facts,
        }
        for name, side in zip("AB", sides, strict=True)
    }
    return [Section(id="machines", title="How the runs were made", body=machine_tables(facts))]


def machine_tables(facts: Mapping[str, Mapping[str, str | None]]) -> list[Table]:
    """A row a fact, a column a machine, by its name: what differs, then what is the same. A machine
    without facts is not known."""
    names = dict.fromkeys(name for side in facts.values() for name, fact in side.items() if fact)
    rows = [
        (name, *(side.get(name) or "-" if side else "not known" for side in facts.values()))
        for name in names
    ]
    apart = [row for row in rows if len(set(row[1:])) > 1]
    same = [row for row in rows if len(set(row[1:])) == 1]
    columns, folded = ("what", *facts), f"{count(len(same), 'line')} the same"
    tables = [
        Table(title="what differs", columns=columns, rows=apart, num_left=3),
        Table(title="what is the same", columns=columns, rows=same, num_left=3, folded=folded),
    ]
    return [table for table in tables if table.rows]


# What the analyses show.

_ORDER = ("tokens", "blocks", "operators", "precision", "ends", "ranks")


def analysis_sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> dict[str, list[Section]]:
    """Return what each analysis shows, by its name, in the order of a report; those of other
    packages last. ``background``: what the report does not hold, given for a page."""
    sections = {}
    places = analysis.places() | analysis.whole_places()
    for name in dict.fromkeys((*_ORDER, *places)):
        path = f"{places.get(name, f'divergence.analyses.{name}')}.sections"
        if find_spec(path) is not None:
            sections[name] = import_module(path).sections(
                report, every=every, background=background
            )
    return sections
