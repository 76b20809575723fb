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
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from msgspec.structs import replace

from divergence.comparison.result import Report
from divergence.comparison.results import Background, SiteResult
from divergence.html.parts import Element, Section
from divergence.report.machine import csv_columns
from divergence.report.page.frame import frame, printed
from divergence.report.page.runs import coverage_section, machines_section, settings_section
from divergence.report.page.verdict import findings_section, verdict
from divergence.report.summary import headline, shown_analyses

__all__ = ["MOST_BYTES", "analysis_sections", "attached", "page"]


def page(
    report: Report, background: Background, *, openings: Sequence[Element] = (),
    sections: Sequence[Section] = (), command_name: str = "compare",
) -> str:  # fmt: skip
    """The whole file, as text. ``openings``, ``sections``: another command's answer that rests on
    this report (`check`, `localize`), and comes first."""
    packed, num_kept = attached(report)
    shown = [
        *sections,
        *analysis_sections(report, background),
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


def analysis_sections(report: Report, background: Background) -> list[Section]:
    sections: list[Section] = []
    names = sorted(shown_analyses(), key=lambda name: name not in _FIRST)
    for name in names:
        path = f"divergence.analyses.{name}"
        if find_spec(f"{path}.page") is not None:
            sections += import_module(f"{path}.page").page(report, background)
            continue
        lines = import_module(f"{path}.show").show(report, all_sites=False)
        if lines:
            sections.append(Section(id=name, title=name.capitalize(), body=(printed(lines),)))
    return sections


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
