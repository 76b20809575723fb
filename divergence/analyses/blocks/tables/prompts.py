"""The table of prompts: each with the site that uses most of its limits, and how much.

So that "prompt 2 alone is off" is on the first screen. Nothing for a single prompt.
"""

from __future__ import annotations

from divergence.analyses.blocks.tables.rows import main_pass
from divergence.comparison.result import Report
from divergence.comparison.results.sites import SiteResult
from divergence.layout.lines import BLANK, Line, columns, heading, line
from divergence.layout.numbers import count

__all__ = ["prompt_lines"]

MAX_PROMPTS = 12


def prompt_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """One row a prompt, in the order of how much they use of their limits."""
    rows = _rows(report)
    if len(rows) < 2:
        return []
    shown = rows if all_sites else rows[:MAX_PROMPTS]
    beyond = sum(usage > 1 for usage, *_ in rows)
    lines = [
        heading(
            "prompts",
            f"{beyond} of {len(rows)} beyond a limit" if beyond
            else f"{count(len(rows), 'prompt')}, none beyond a limit",
        )
    ]  # fmt: skip
    table = [("prompt", "worst site", "forward", "error / floor", "share of limit", "")]
    for usage, sample, site, ratio in shown:
        forward = f"step {site.step}" if site.step else "prefill"
        mark = "!" if usage > 1 else ""
        table.append((str(sample), site.site, forward, f"{ratio:.2f}", f"{usage:.2f}", mark))
    lines += columns(table, widest=48)
    if len(shown) < len(rows):
        lines.append(line((f"  … {len(rows) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


def _rows(report: Report) -> list[tuple[float, int, SiteResult, float]]:
    """(usage, prompt, site, its ratio), the largest usage first."""
    wanted = main_pass(report.sites)
    found: dict[int, tuple[float, int, SiteResult, float]] = {}
    for site in report.sites:
        if site.pass_ != wanted or site.usage is None or site.ratio is None:
            continue
        prompts = [(one.sample, one.usage, one.ratio) for one in site.prompts]
        for sample, usage, ratio in prompts or [(site.sample, site.usage, site.ratio)]:
            if sample not in found or usage > found[sample][0]:
                found[sample] = (usage, sample, site, ratio)
    return sorted(found.values(), key=lambda row: (-row[0], row[1]))
