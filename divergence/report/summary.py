"""A whole report as lines: the verdict and the onset first, then why, then the rest.

Nothing here opens a run or prints. Data (paths, module names, decoded tokens) goes
in as it is; a decoded token is quoted, since it may hold a newline.
"""

from __future__ import annotations

import itertools
from collections import Counter
from importlib import import_module
from importlib.util import find_spec

from divergence.comparison import analysis
from divergence.comparison.result import Report, RunSummary
from divergence.comparison.results import Background, PassCoverage, PreflightLine, Visible
from divergence.document import Headline, Section, Sentence, Table, named
from divergence.layout import BLANK, Line, count, next_lines, prose, share
from divergence.report.environment import changed_lines
from divergence.report.text import headline_lines, sections_lines, sentence_line
from divergence.run.manifest import UNKNOWN
from divergence.run.site import of_parameter
from divergence.words import HEADLINES, letter, list_names

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
MAX_UNMATCHED = 12


def report_lines(report: Report, *, all_sites: bool = False, verbose: bool = False) -> list[Line]:
    """The whole report. ``all_sites``: nothing is elided; ``verbose``: also what was the same."""
    why = [Sentence(fact.text, "-", indent=2) for fact in report.verdict.evidence]
    notes = [Sentence(note, "note", indent=0, hang=6) for note in report.notes]
    sections = [
        Section(title="why", body=why),
        *_preflight(report.preflight, verbose=verbose),
        *itertools.chain(*analysis_sections(report, every=all_sites).values()),
        *_coverage(report, all_sites=all_sites, verbose=verbose),
        Section(body=notes),
    ]
    return [
        *verdict_lines(report),
        *map(sentence_line, visible_facts(report)),
        BLANK,
        *_run_lines(report),
        BLANK,
        *sections_lines(sections),
        *next_lines(report.verdict.next),
    ]


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


def verdict_headline(report: Report) -> Headline:
    """The judgement: where the error begins, which side is wrong, and how sure that is."""
    verdict = report.verdict
    facts = []
    onset = verdict.onset
    if onset is not None:
        forward = f"decode step {onset.step}" if onset.step else onset.phase
        inner = onset.block is not None and onset.site != f"{onset.block}:out"
        block = f", in block {onset.block}" if inner else ""
        token = "" if onset.position is None else f", token {onset.position}"
        of = "all prompts" if of_parameter(onset.site) else f"prompt {onset.sample}{token}"
        facts.append(named("onset", f"{onset.site}{block}; {forward}, {of}", "bold"))
    if verdict.side is not None:
        wrong = {"both": "both are", "neither": "neither is"}.get(verdict.side)
        facts.append(named("side", f"{wrong or f'{letter(verdict.side)} is'} wrong"))
    lacking = [check.detail for check in verdict.checks if check.state != "met" and check.detail]
    why = f": {'; '.join(lacking)}" if lacking else ""
    facts.append(named("confidence", verdict.confidence + why))
    return Headline(headline(report), verdict.summary, VERDICT_STYLES[verdict.kind], facts)


def visible_facts(report: Report) -> list[Sentence]:
    """What this comparison could have seen; where it found an error that is not the question."""
    return [named("" if number else "not seen", text) for number, text in enumerate(unseen(report))]


def unseen(report: Report) -> list[str]:
    """What this comparison could not see, where it found no error."""
    if report.verdict.kind not in ("identical", "within_floor", "drift", "undetermined"):
        return []
    seen = None if report.verdict.kind == "identical" else report.visible
    texts = [] if seen is None else [_smallest(seen)]
    if report.not_exercised:
        parts = list_names([part.text for part in report.not_exercised], _MOST_PARTS, "; ")
        texts.append(f"not exercised: {parts}")
    return texts


_MOST_PARTS = 3


def _smallest(seen: Visible) -> str:
    """``errors of a block below about 1.4e-06 of its output, of one token below 5.2e-06``."""
    texts = [f"errors of a block below about {share(seen.block)} of its output"]
    for what, size in (
        ("one prompt or step", seen.forward), ("one token", seen.token),
        ("one channel", seen.channel),
    ):  # fmt: skip
        if size is not None:
            texts.append(f"of {what} below {share(size)}")
    lone = "" if seen.token is not None else "; a single token alone is not judged"
    return ", ".join(texts) + lone


def _run_lines(report: Report) -> list[Line]:
    lines = []
    sides = [("A", report.reference), ("B", report.candidate)]
    if report.collectives is not None and len(report.collectives.sides) == 1:
        sides = sides[:1]
    for name, run in sides:
        lines += [prose(name, run_text(run)), *state_lines(run)]
    return lines


def run_text(run: RunSummary) -> str:
    """``runs/a (H100): tiny/llama, bfloat16 on cuda``."""
    label = f" ({run.label})" if run.label else ""
    return f"{run.path}{label}: {run.model}, {run.dtype.removeprefix('torch.')} on {run.device}"


def state_lines(run: RunSummary) -> list[Line]:
    """What was planted or substituted in a run, and why it is incomplete."""
    lines = changed_lines(run.plants, run.substitutes)
    if not run.complete:
        why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
        text = f"INCOMPLETE: {why} after {count(run.num_records, 'record')}"
        lines.insert(0, prose("", text, style="yellow"))
    return lines


def _preflight(preflight: list[PreflightLine], *, verbose: bool) -> list[Section]:
    tally = Counter(item.status for item in preflight)
    told = f"{tally['same']} the same, {tally['differs']} different, {tally['blocking']} blocking"
    unknown = [item.check for item in preflight if item.status == "unknown"]
    told += f", {len(unknown)} unknown" if unknown else ""
    kinds = (
        ("blocking", "BLOCKS", "red"), ("differs", "differs", "yellow"),
        ("unknown", "unknown", "yellow"), ("same", "same", ""),
    )  # fmt: skip
    body = []
    for status, word, style in kinds if verbose else kinds[:2]:
        for item in (item for item in preflight if item.status == status):
            both = item.reference if status == "same" else f"{item.reference} / {item.candidate}"
            label = f"{word:<8}{item.check}:"
            body.append(Sentence(both, label, style=style, indent=2, hang=10))
            body += [Sentence(item.detail, indent=10)] if item.detail else []
    if unknown and not verbose:
        text = ", ".join(unknown)
        body.append(Sentence(text, "unknown", style="yellow", indent=2, hang=10))
    return [Section(title="preflight", detail=told, body=body)] if preflight else []


def _coverage(report: Report, *, all_sites: bool, verbose: bool) -> list[Section]:
    coverage = report.coverage
    passes = _pass_rows(coverage.passes, verbose=verbose)
    if report.operators is not None and not report.sites and not coverage.unmatched and not passes:
        return []  # operators have a count of their own
    words = {"reference": "only in A", "candidate": "only in B", "both": "skipped"}
    unmatched = [
        (words[i.side], f"{i.site} ({i.pass_}, prompt {i.sample}, step {i.step})", i.reason)
        for i in coverage.unmatched
    ]
    most = None if all_sites else MAX_UNMATCHED
    detail = (
        f"{coverage.num_compared:,} compared, {coverage.num_skipped:,} skipped, "
        f"{coverage.num_only_reference:,} only in A, {coverage.num_only_candidate:,} only in B"
    )
    tables = [Table(columns=("", "", ""), rows=passes, widest=66),
              Table(columns=("", "", ""), rows=unmatched, widest=66, most=most)]  # fmt: skip
    return [Section(title="coverage", detail=detail, body=tables)]


def _pass_rows(passes: list[PassCoverage], *, verbose: bool) -> list[tuple[str, ...]]:
    """What each pass of the reference came to; without ``verbose`` only where it is not all."""
    rows: list[tuple[str, ...]] = []
    for row in passes:
        if row.share == 1.0 and not verbose:
            continue
        total = row.num_compared + row.num_missing + row.num_skipped
        parts = [f"{row.num_compared:,} of {total:,}"]
        parts += [f"{row.num_extra:,} in B alone"] if row.num_extra else []
        parts += [f"{row.num_empty:,} without elements"] if row.num_empty else []
        parts += [f"{row.num_elsewhere:,} not here: {row.elsewhere}"] if row.num_elsewhere else []
        parts += [row.reason] if row.reason else []
        rows.append((row.pass_, row.what, "; ".join(parts)))
    return rows


_ORDER = (
    "tokens", "blocks", "suite", "collectives", "logprobs", "operators", "precision", "ends",
    "ranks",
)  # fmt: skip


def analysis_sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> dict[str, list[Section]]:
    """What each analysis shows, those behind _ORDER last. ``background``: what the report does not
    hold, given for a page."""
    sections = {}
    for name in dict.fromkeys((*_ORDER, *analysis.ANALYSES)):
        path = f"divergence.analyses.{name}.sections"
        if find_spec(path) is not None:
            sections[name] = import_module(path).sections(
                report, every=every, background=background
            )
    return sections
