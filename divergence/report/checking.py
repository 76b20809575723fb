"""`check` and `check --bless` as lines."""

from __future__ import annotations

from msgspec.structs import replace

from divergence.document import Headline
from divergence.gate.result import Blessing, CheckResult
from divergence.layout import BLANK, Line, count, line, prose, size
from divergence.report.screen import screen_lines
from divergence.report.summary import VERDICT_STYLES, report_lines, unseen
from divergence.report.text import headline_lines

MAX_LISTED = 12


def check_headline(result: CheckResult) -> Headline:
    name = f"policy {result.policy.name or 'given'}"
    failures = count(len(result.failures), "failure")
    if result.passed:
        return Headline("PASSED", f"{name} is met", "bold green")
    return Headline("FAILED", f"{failures} of {name}", "bold red")


def check_lines(result: CheckResult, *, verbose: bool = False, brief: bool = False) -> list[Line]:
    """PASSED or FAILED with each rule that is not met and each known difference, then the report
    it rests on; ``brief``: without that. ``result``: a CheckResult of divergence.gate.check."""
    lines = headline_lines(check_headline(result))
    if result.passed:  # what such a golden cannot see
        seen = "; ".join(unseen(result.report))
        lines += [prose("  not seen: ", seen, width=4)] if seen else []
    shown = result.failures if verbose else result.failures[:MAX_LISTED]
    lines += [prose(f"  {item.rule}: ", item.text, width=4) for item in shown]
    if len(shown) < len(result.failures):
        more = len(result.failures) - len(shown)
        lines.append(line((f"  … {more:,} more (-v lists them)", "dim")))
    if result.excused:
        what = f"the verdict is {result.report.verdict.kind}, and all of it is known:"
        lines.append(prose("  excused: ", what, style="yellow", width=4))
    # of each known difference of the policy what it excused, or why it did not
    lines += [prose("  known: ", str(use), style="yellow", width=4) for use in result.known]
    if brief:
        return lines
    if result.num_ties:
        flipped = count(result.num_ties, "flipped token")
        what = f"{flipped} counted as equal: within the policy's tie"
        lines.append(prose("  ties: ", what, width=4))
    lines += [prose("  note: ", note, style="yellow", width=4) for note in result.notes]
    report = result.report
    whole = report_lines(report, verbose=True) if verbose else screen_lines(report)
    return [*lines, BLANK, *whole]


def blessing_lines(blessing: Blessing) -> list[Line]:
    """What became the golden, what it replaces and how the two differ.

    ``blessing``: a Blessing of divergence.gate.check.
    """
    stored = "" if blessing.num_bytes is None else f", {size(blessing.num_bytes)}"
    lines = [line(("BLESSED", "bold green"), f": {blessing.golden} is the golden now{stored}")]
    if blessing.verdict is None and blessing.reason is None:
        return [*lines, line("  there was no golden before")]
    if blessing.previous is not None:
        lines.append(prose("previous", f"kept as {blessing.previous}"))
    text, style = f"not compared: {blessing.reason}", "yellow"
    if blessing.verdict is not None:
        text, style = f"{blessing.verdict}: {blessing.summary}", VERDICT_STYLES[blessing.verdict]
    lines.append(prose("old to new", text, style=style))
    for name, sites in (("added", blessing.added_sites), ("removed", blessing.removed_sites)):
        shown = ", ".join(sites[:MAX_LISTED])
        more = f", … {len(sites) - MAX_LISTED} more" if len(sites) > MAX_LISTED else ""
        text = f"{count(len(sites), 'site')}{': ' if sites else ''}{shown}{more}"
        lines.append(prose(name, text))
    if blessing.report is not None:
        verdict = replace(blessing.report.verdict, commands=[], next=[])  # the old golden is gone
        lines += [BLANK, *screen_lines(replace(blessing.report, verdict=verdict))]
    return lines
