"""The report itself inside its page, for download: JSON, of which the script makes CSV.

A page is sent by mail and read in a browser, so what it carries is bounded. Of a report with more
results than fit, the worst are kept, and the page says how many.
"""

from __future__ import annotations

import gzip
import math

from msgspec.structs import replace

from divergence.comparison.result import Report
from divergence.comparison.results.sites import SiteResult

__all__ = ["MOST_BYTES", "attached"]

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
