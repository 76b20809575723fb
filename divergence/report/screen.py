"""The first screen of a comparison: what most readers need, in 25 lines of 80 columns.

The answer, what it could not have seen, what was compared, the worst rows, and one command. What is
left out stands in the whole report (``report_lines``), behind ``-v``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from divergence.analyses.blocks.rows import prompt_usage, worst_rows
from divergence.analyses.tokens.sections import explained_facts
from divergence.comparison.result import Report, RunSummary
from divergence.comparison.results import PreflightLine, SiteResult
from divergence.document import Sentence, named
from divergence.layout import BLANK, Line, columns, count, cut, fold, heading, line, prose, times
from divergence.report.summary import report_lines, state_lines, verdict_lines, visible_facts
from divergence.report.text import sentence_line
from divergence.run.site import of_parameter
from divergence.words import list_names

WIDTH, HEIGHT = 80, 25
_NUM_ROWS = 5
_NUM_PROMPTS = 4
_NUM_SETTINGS = 3
_QUIET = ("identical", "within_floor")


def screen_lines(report: Report, *, more: str = "add -v") -> list[Line]:
    """The first screen. ``more``: how to see the rest. A report without blocks (operators alone, a
    suite, probed arithmetic) is shown whole."""
    if not report.sites and report.verdict.kind != "incomparable":
        return report_lines(report)
    for num_rows in range(_NUM_ROWS, 1, -1):  # fewer rows where the rest is long
        lines = _screen(report, num_rows, more)
        if sum(len(fold(item, WIDTH)) for item in lines) <= HEIGHT:
            break
    return lines


def _screen(report: Report, num_rows: int, more: str) -> list[Line]:
    return [
        *_answer_lines(report),
        *map(sentence_line, visible_facts(report)),
        *_why_lines(report),
        BLANK,
        *_run_lines(report),
        *map(sentence_line, known_facts(report, _to_tell(report))),
        *_operator_lines(report),
        BLANK,
        *_worst_lines(report, num_rows),
        *_prompt_lines(report),
        *_next_lines(report, more),
    ]


def _answer_lines(report: Report) -> list[Line]:
    """The answer; where two runs alone cannot tell the side, what can."""
    *answer, confidence = verdict_lines(report)
    verdict = report.verdict
    asked = verdict.kind in ("localized", "systematic", "drift") and verdict.side is None
    measured = (site.truth is not None and not site.truth.estimated for site in report.sites)
    if not asked or any(measured):
        return [*answer, confidence]
    commands = verdict.commands
    if commands and "truth" in commands[0].options:
        side = [prose("side", "not known from two runs: the command below tells it")]
    elif tells := [item for item in commands if item.name == "truth"]:
        first, runs = replace(tells[0], note=None), (report.reference.path, report.candidate.path)
        if first.operands[0] in runs:
            text = "not known from two runs; a truth tells it:"
            side = [prose("side", text), _command(first.text)]
        else:  # of a run that another command makes
            side = [prose("side", "not known from two runs; the commands below tell it")]
    else:
        side = [prose("side", "not known from two runs")]
    return [*answer, *side, confidence]


def _command(text: str) -> Line:
    """To be copied, so it stays one line."""
    return line(" " * 12 + text)


def _why_lines(report: Report) -> list[Line]:
    """The first facts behind a verdict that is more than that all is well."""
    verdict = report.verdict
    if verdict.kind in _QUIET and verdict.side in (None, "neither"):
        return []
    most = 5 if verdict.kind in ("incomparable", "undetermined") else 2
    return [
        prose("because" if number == 0 else "", fact.text)
        for number, fact in enumerate(verdict.evidence[:most])
    ]


def _run_lines(report: Report) -> list[Line]:
    """Both runs; of the second only what is not as in the first."""
    a, b = report.reference, report.candidate
    lines = [prose("A", _run_text(a)), *state_lines(a)]
    same = (a.model, a.dtype, a.device, a.label) == (b.model, b.dtype, b.device, b.label)
    text = f"{b.path}: the same model, dtype and machine" if same else _run_text(b)
    return [*lines, prose("B", text), *state_lines(b)]


def _run_text(run: RunSummary) -> str:
    label = f" ({run.label})" if run.label else ""
    return f"{run.path}: {cut(run.model, 40)}, {run.dtype.removeprefix('torch.')}{label}"


def _to_tell(report: Report) -> list[PreflightLine]:
    """What stops a comparison stands behind ``because`` already."""
    if report.verdict.kind != "incomparable":
        return report.preflight
    return [line for line in report.preflight if line.status in ("differs", "unknown")]


def known_facts(report: Report, preflight: Sequence[PreflightLine]) -> list[Sentence]:
    """Of the settings, the tokens and what was compared."""
    tokens, compared = _tokens(report), _compared(report)
    return [*_settings(preflight), *tokens, *explained_facts(report), *compared]


def _settings(preflight: Sequence[PreflightLine]) -> list[Sentence]:
    """What differs, in the order of how much it explains."""
    differ = [line for line in preflight if line.status in ("differs", "blocking")]
    unknown = [line.check for line in preflight if line.status == "unknown"]
    shown = [_setting(line) for line in differ[:_NUM_SETTINGS]]
    if len(differ) > len(shown):
        shown.append(f"{len(differ) - len(shown)} more")
    shown += [f"unknown: {list_names(unknown, _NUM_SETTINGS)}"] if unknown else []
    if not shown:
        return [named("settings", "all the same")] if preflight else []
    return [named("settings", "; ".join(shown), "yellow" if differ else "")]


_DIGESTED = ("weights", "code", "config", "tokenizer", "chat template")
"""Settings whose values are digests: what differs stands in the detail."""


def _setting(item: PreflightLine) -> str:
    both = ("none" if value == "-" else value for value in (item.reference, item.candidate))
    text = item.candidate if item.check == "arithmetic" else " / ".join(both)
    if item.check in _DIGESTED or item.reference == item.candidate:
        text = item.detail or "differs"
    text = f"{item.check} {text}"
    whole = len(text) <= WIDTH or item.check == "arithmetic"
    return text if whole else text[: WIDTH - 1] + "…"


def _tokens(report: Report) -> list[Sentence]:
    """How many choices of a token agree, and where they first do not."""
    tokens = report.tokens
    if tokens is None or tokens.num_tokens + tokens.num_missing == 0:
        return []
    how = "B continued A's text" if tokens.forced else "each continued its own text"
    text = f"next-token choice agrees in {tokens.num_equal} of {tokens.num_tokens} steps ({how})"
    if tokens.num_missing:
        text += f"; {tokens.num_missing} more in A alone"
    first = tokens.first_difference
    if first is not None:
        token_a, token_b = (
            f"#{choice.id}" if choice.text is None else repr(choice.text)
            for choice in (first.reference, first.candidate)
        )
        said = {"tie": ", a tie", "fault": ", no tie", None: ""}[first.judgement]
        text += f"; first at prompt {first.sample}, step {first.step}: {token_a} / {token_b}{said}"
    return [named("tokens", text)]


def _compared(report: Report) -> list[Sentence]:
    """What was compared, and what not."""
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
    gone = (
        ("skipped", coverage.num_skipped),
        ("only in A", coverage.num_only_reference),
        ("only in B", coverage.num_only_candidate),
    )
    lacking = [f"{number:,} {name}" for name, number in gone if number]
    if not lacking:
        return [named("compared", f"everything: {what}")]
    return [named("compared", f"{coverage.num_compared:,} tensors of {what}; {', '.join(lacking)}")]


def _operator_lines(report: Report) -> list[Line]:
    operators = report.operators
    if operators is None:
        return []
    beyond = [result for result in operators.results if result.limit_usage > 1]
    text = f"{operators.num_matched} compared, {len(beyond)} beyond the limit"
    return [prose("operators", text + (f"; first {operators.onset}" if operators.onset else ""))]


def _worst_lines(report: Report, num_rows: int) -> list[Line]:
    """The rows nearest to their limit, or beyond it."""
    if report.verdict.kind == "identical":
        return []
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical]
    if not rows:
        return []
    judged = any(site.worst.limit_usage for site in rows)
    anchored = any(site.worst.pass_ == "anchored" for site in rows)
    table = [("error", "of its limit" if judged else "", "where", "")]
    for row in rows[:num_rows]:
        site = row.worst
        used = "not finite" if _num_bad(site) else _used(site.limit_usage) if judged else ""
        error = "-" if site.rel_l2 is None else f"{site.rel_l2:.1e}"
        free = ", free pass" if anchored and site.pass_ == "free" and site.role == "block" else ""
        name = cut(site.site, 40) + ("  !" if row.flagged else "")
        table.append((error, used, name, _at(site) + free))
    same = "the others are equal bit for bit" if len(rows) <= num_rows < len(every) else ""
    return [heading(f"worst of {len(every)} places", same), *columns(table, widest=44)]


def _num_bad(site: SiteResult) -> int:
    return site.nonfinite.differ if site.nonfinite is not None else 0


def _used(usage: float | None) -> str:
    if usage is None:
        return "-"
    return times(usage) if usage > 1 else f"{usage:.0%}"


def _at(site: SiteResult) -> str:
    """``prompt 2, token 7``, ``prompt 0, step 3``; a share that all forwards together use is of no
    one forward."""
    if site.usage is not None and (site.limit_usage or 0.0) > 1.05 * site.usage:
        return "decode, all steps" if site.step else f"{site.phase}, all prompts"
    if of_parameter(site.site):
        return f"{site.phase}, all prompts"
    sample, position = site.worst_sample, site.worst_position
    if _num_bad(site) and site.nonfinite is not None:
        sample, position = site.nonfinite.sample, site.nonfinite.position
    place = f"prompt {site.sample if sample is None else sample}"
    if site.step:
        return f"{place}, step {site.step}"
    return place if position is None else f"{place}, token {position}"


def _prompt_lines(report: Report) -> list[Line]:
    rows = prompt_usage(report)
    if len(rows) < 2 or report.verdict.kind == "identical" or not rows[0][0]:
        return []
    if rows[0][0] < 1.1 * rows[-1][0]:
        return [prose("prompts", f"all {len(rows)} alike: {_used(rows[0][0])} of the limit")]
    shown = [f"{sample} ({_used(usage)})" for usage, sample, *_ in rows[:_NUM_PROMPTS]]
    more = f", {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    return [prose("prompts", f"worst first (the first is 0): {', '.join(shown)}{more}")]


def _next_lines(report: Report, more: str) -> list[Line]:
    commands = report.verdict.commands
    lines = [heading("next"), line(f"  {commands[0].alone}")] if commands else []
    rest: Iterable[str] = filter(None, (
        f"{count(len(report.notes), 'note')}" if report.notes else "",
        "every block" if report.sites else "",
        "every setting",
    ))  # fmt: skip
    return [*lines, line((f"{', '.join(rest)}: {more}", "dim"))]
