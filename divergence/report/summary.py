"""A report as lines: the verdict and the onset first, then why, then the rest.

Nothing here opens a run or prints. Data (paths, module names, decoded tokens) goes
in as it is; a decoded token is quoted, since it may hold a newline.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from divergence.compare.result import (
    Coverage,
    PreflightLine,
    Report,
    RunSummary,
    SiteResult,
    TokenChoice,
    TokenDifference,
    TokensResult,
    Verdict,
)
from divergence.report.lines import BLANK, Line, columns, heading, line, prose
from divergence.report.numbers import count, decimal, fixed
from divergence.report.table import table_lines

__all__ = ["blessing_lines", "check_lines", "report_lines", "verdict_lines"]

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
    same_bits = report.verdict.kind == "identical" and not all_sites
    return [
        *verdict_lines(report),
        BLANK,
        *_run_lines(report),
        BLANK,
        *_evidence_lines(report.verdict),
        *_preflight_lines(report.preflight, verbose=verbose),
        *_token_lines(report.tokens),
        *_nonfinite_lines(report.sites, all_sites=all_sites),
        *([] if same_bits else table_lines(report, all_sites=all_sites)),
        *_logits_lines(report.sites),
        *_coverage_lines(report.coverage, all_sites=all_sites),
        *_note_lines(report.notes),
        *_next_lines(report.verdict.next),
    ]


def verdict_lines(report: Report) -> list[Line]:
    """The judgement alone: what ``--quiet`` prints."""
    verdict = report.verdict
    style = VERDICT_STYLES[verdict.kind]
    lines = [Line((*line((f"{verdict.kind.upper()}: ", style)).spans, *_span(verdict.summary)), 2)]
    onset = verdict.onset
    if onset is not None:
        forward = "prefill" if onset.step == 0 else f"decode step {onset.step}"
        block = (
            ""
            if onset.block is None or onset.site == f"{onset.block}:out"
            else f", in block {onset.block}"
        )
        token = "" if onset.position is None else f", token {onset.position}"
        lines.append(
            prose(
                "onset",
                f"{onset.site}{block}; {forward}, sample {onset.sample}{token}",
                style="bold",
            )
        )
    sides = {
        "reference": "the reference is wrong",
        "candidate": "the candidate is wrong",
        "both": "both are wrong",
        "neither": "neither is wrong",
    }
    if verdict.side is not None:
        lines.append(prose("side", sides[verdict.side]))
    lines.append(prose("confidence", verdict.confidence))
    return lines


def _span(text: str) -> tuple:
    return line(" ".join(text.split("\n"))).spans


def _run_lines(report: Report) -> list[Line]:
    lines = []
    for name, run in (("reference", report.reference), ("candidate", report.candidate)):
        lines.append(prose(name, _run_text(run)))
        if not run.complete:
            why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
            lines.append(
                prose(
                    "",
                    f"INCOMPLETE: {why} after {count(run.num_records, 'record')}",
                    style="yellow",
                )
            )
        if run.plants:
            lines.append(prose("", f"PLANTED FAULT: {', '.join(run.plants)}", style="yellow"))
    return lines


def _run_text(run: RunSummary) -> str:
    label = f" ({run.label})" if run.label else ""
    dtype = run.dtype.removeprefix("torch.")
    return f"{run.path}{label}: {run.model}, {dtype} on {run.device}"


def _evidence_lines(verdict: Verdict) -> list[Line]:
    if not verdict.evidence:
        return []
    lines = [heading("why")]
    for fact in verdict.evidence:
        values = ", ".join(f"{name} {_value(value)}" for name, value in fact.values.items())
        lines.append(prose("  -", fact.text + (f" [{values}]" if values else ""), width=4))
    return [*lines, BLANK]


def _value(value: float) -> str:
    return f"{value:.3g}"


def _preflight_lines(preflight: list[PreflightLine], *, verbose: bool) -> list[Line]:
    if not preflight:
        return []
    tally = Counter(item.status for item in preflight)
    lines = [
        heading(
            "preflight",
            f"{tally['same']} the same, {tally['differs']} different, {tally['blocking']} blocking",
        )
    ]
    order = ("blocking", "differs", "same") if verbose else ("blocking", "differs")
    for status in order:
        for item in (item for item in preflight if item.status == status):
            word = {"blocking": "BLOCKS", "differs": "differs", "same": "same"}[status]
            style = {"blocking": "red", "differs": "yellow", "same": ""}[status]
            both = item.reference if status == "same" else f"{item.reference} / {item.candidate}"
            lines.append(prose(f"  {word:<8}{item.check}: ", both, style=style, width=10))
            if item.detail:
                lines.append(prose(" " * 10, item.detail, width=10))
    return [*lines, BLANK]


def _token_lines(tokens: TokensResult | None) -> list[Line]:
    if tokens is None or tokens.num_tokens == 0:
        return []
    how = (
        "the candidate was fed the reference's tokens" if tokens.forced else "each run chose alone"
    )
    lines = [heading("tokens", f"{tokens.num_equal} of {tokens.num_tokens} equal; {how}")]
    first = tokens.first_difference
    if first is not None:
        lines += _difference_lines(first, forced=tokens.forced)
    return [*lines, BLANK]


def _difference_lines(first: TokenDifference, *, forced: bool) -> list[Line]:
    order = {
        "before": ", before the onset",
        "same step": ", in the step of the onset",
        "after": ", after the onset",
        None: "",
    }[first.order_to_onset]
    later = "" if forced else "; later steps continue different texts and are not compared"
    lines = [
        prose(
            "  first difference: ",
            f"sample {first.sample}, step {first.step}{order}{later}",
            style="yellow",
            width=4,
        )
    ]
    lines += columns(
        [
            (name, _token(choice), f"margin {fixed(margin)} logits over the next")
            for name, choice, margin in (
                ("reference", first.reference, first.margin),
                ("candidate", first.candidate, first.candidate_margin),
            )
        ],
        indent=4,
        widest=40,
    )
    tops = list(zip_longest_tops(first.reference_top, first.candidate_top))
    if tops:
        rows = [("top of the reference", "logprob", "top of the candidate", "logprob"), *tops]
        lines += columns(rows, indent=4, widest=32)
    return lines


def zip_longest_tops(
    reference: list[TokenChoice], candidate: list[TokenChoice], num: int = 5
) -> list[tuple[str, str, str, str]]:
    """Both top lists side by side, the shorter one padded."""
    rows = []
    for i in range(min(num, max(len(reference), len(candidate)))):
        cells: list[str] = []
        for side in (reference, candidate):
            if i < len(side):
                cells += [_token(side[i]), fixed(side[i].logprob)]
            else:
                cells += ["", ""]
        rows.append((cells[0], cells[1], cells[2], cells[3]))
    return rows


def _token(choice: TokenChoice) -> str:
    """``' the' (262)``: quoted, so that spaces and newlines are seen."""
    return f"#{choice.id}" if choice.text is None else f"{choice.text!r} #{choice.id}"


def _nonfinite_lines(sites: list[SiteResult], *, all_sites: bool) -> list[Line]:
    found = [site for site in sites if site.nonfinite is not None and site.nonfinite.total]
    if not found:
        return []
    found.sort(key=lambda site: (site.sample, site.step, site.order, site.pass_))
    shown = found if all_sites else found[:5]
    lines = [heading("non-finite values", f"at {count(len(found), 'site')}; in order:")]
    rows = [("site", "pass", "step", "reference nan/inf", "candidate nan/inf")]
    for site in shown:
        n = site.nonfinite
        assert n is not None
        rows.append(
            (
                site.site,
                site.pass_,
                str(site.step),
                f"{n.reference_nan:,}/{n.reference_inf:,}",
                f"{n.candidate_nan:,}/{n.candidate_inf:,}",
            )
        )
    lines += columns(rows, widest=42)
    if len(shown) < len(found):
        lines.append(line((f"  … {len(found) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


def _logits_lines(sites: list[SiteResult]) -> list[Line]:
    """Distributions, worst over the steps of each phase and pass."""
    rows = []
    for pass_ in ("anchored", "free"):
        for phase in ("prefill", "decode"):
            group = [
                site.logits
                for site in sites
                if site.logits is not None
                and site.pass_ == pass_
                and (site.step == 0) == (phase == "prefill")
            ]
            if group:
                rows.append(
                    (
                        f"{phase}, {pass_}",
                        decimal(max(item.kl_mean for item in group)),
                        decimal(max(item.kl_max for item in group)),
                        f"{100 * min(item.top1_agreement for item in group):.4g}%",
                        f"{100 * min(item.top5_overlap for item in group):.4g}%",
                        fixed(min(item.margin_min for item in group)),
                        decimal(max(item.chosen_logprob_diff_max for item in group)),
                    )
                )
    if not rows:
        return []
    titles = (
        "pass",
        "KL mean",
        "KL max",
        "same top 1",
        "same top 5",
        "least margin",
        "chosen Δlogp",
    )
    return [
        heading("logits", "KL in nats from reference to candidate; the worst of all steps"),
        *columns([titles, *rows]),
        BLANK,
    ]


def _coverage_lines(coverage: Coverage, *, all_sites: bool) -> list[Line]:
    lines = [
        heading(
            "coverage",
            f"{coverage.num_compared:,} compared, {coverage.num_skipped:,} skipped, "
            f"{coverage.num_only_reference:,} only in the reference, "
            f"{coverage.num_only_candidate:,} only in the candidate",
        )
    ]
    shown = coverage.unmatched if all_sites else coverage.unmatched[:MAX_UNMATCHED]
    lines += columns(
        [
            (
                {"reference": "only reference", "candidate": "only candidate", "both": "skipped"}[
                    item.side
                ],
                f"{item.site} ({item.pass_}, sample {item.sample}, step {item.step})",
                item.reason,
            )
            for item in shown
        ],
        widest=66,
    )
    if len(shown) < len(coverage.unmatched):
        more = len(coverage.unmatched) - len(shown)
        lines.append(line((f"  … {more:,} more (--all lists them)", "dim")))
    return [*lines, BLANK]


def _note_lines(notes: list[str]) -> list[Line]:
    return [*(prose("note", note, width=6) for note in notes), *([BLANK] if notes else [])]


def _next_lines(commands: list[str]) -> list[Line]:
    """Commands stand alone on their lines, so that they can be copied."""
    if not commands:
        return []
    return [heading("next"), *(line(f"  {command}") for command in commands)]


def check_lines(result: Any, *, verbose: bool = False) -> list[Line]:
    """PASSED or FAILED with each rule that is not met, then the report it rests on.

    ``result``: a CheckResult of divergence.compare.check, which may open runs and is
    therefore not imported here.
    """
    policy = result.policy
    if result.passed:
        head = line(("PASSED", "bold green"), f": policy {policy.name or 'given'} is met")
    else:
        head = line(
            ("FAILED", "bold red"),
            f": {count(len(result.failures), 'rule')} of policy {policy.name or 'given'} not met",
        )
    shown = result.failures if verbose else result.failures[:MAX_UNMATCHED]
    lines = [head]
    lines += [prose(f"  {item.rule}: ", item.text, width=4) for item in shown]
    if len(shown) < len(result.failures):
        more = len(result.failures) - len(shown)
        lines.append(line((f"  … {more:,} more (-v lists them)", "dim")))
    if result.tie:
        lines.append(prose("  tie: ", "the first flipped token is within tie_margin", width=4))
    return [*lines, BLANK, *report_lines(result.report, verbose=verbose)]


def blessing_lines(blessing: Any) -> list[Line]:
    """What became the golden, what it replaces and how the two differ.

    ``blessing``: a Blessing of divergence.compare.check.
    """
    lines = [line(("BLESSED", "bold green"), f": {blessing.golden} is the golden now")]
    if blessing.previous is None:
        return [*lines, line("  there was no golden before")]
    lines.append(prose("previous", f"kept as {blessing.previous}"))
    if blessing.verdict is not None:
        lines.append(
            prose(
                "old to new",
                f"{blessing.verdict}: {blessing.summary}",
                style=VERDICT_STYLES[blessing.verdict],
            )
        )
    else:
        lines.append(prose("old to new", f"not compared: {blessing.reason}", style="yellow"))
    for name, sites in (("added", blessing.added_sites), ("removed", blessing.removed_sites)):
        shown = ", ".join(sites[:MAX_UNMATCHED])
        more = f", … {len(sites) - MAX_UNMATCHED} more" if len(sites) > MAX_UNMATCHED else ""
        lines.append(
            prose(name, f"{count(len(sites), 'site')}{': ' if sites else ''}{shown}{more}")
        )
    return lines
