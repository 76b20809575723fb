"""Blocks in a report: prompts by their worst site, nan and inf, and the table of sites."""

from __future__ import annotations

from divergence.analyses.blocks.tables.prompts import prompt_lines
from divergence.analyses.blocks.tables.table import table_lines
from divergence.comparison.result import Report
from divergence.comparison.results.sites import SiteResult
from divergence.layout.lines import BLANK, Line, columns, heading, line
from divergence.layout.numbers import count

__all__ = ["show"]


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """No table of equal sites, unless all are asked for."""
    same_bits = report.verdict.kind == "identical" and not all_sites
    return [
        *prompt_lines(report, all_sites=all_sites),
        *_nonfinite_lines(report.sites, all_sites=all_sites),
        *([] if same_bits or report.suite else table_lines(report, all_sites=all_sites)),
    ]


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
