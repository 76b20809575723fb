"""Experts: what the tokens that are far off have in common, where a block has experts.

One expert of many that is wrong shows in the tokens that were sent to it, and in no other. So where
all tokens beyond the limit share an expert, it is named; tokens that went there and are fine
speak against it and are counted. Rerouted tokens (comparison.experts) are in none of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.experts import Routes, route_key
from divergence.comparison.results.findings import Evidence, Finding, Verdict
from divergence.comparison.results.sites import SiteResult

__all__ = ["explain"]


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """The expert that the onset's tokens share, if they share one."""
    onset, routes = verdict.onset, measured.routes
    if onset is None or onset.block is None:
        return []
    mine = [
        s for s in measured.sites
        if s.site == onset.site and s.pass_ == onset.pass_ and route_key(s) in routes.found
        and (s.of is None or s.of == verdict.side)
    ]  # fmt: skip
    said = _shared(mine, routes)
    if said is None:
        return []
    return [Finding(claim="explanation", role="explains", about_onset=True, evidence=[said])]


def _shared(results: Sequence[SiteResult], routes: Routes) -> Evidence | None:
    off: list[set[int]] = []
    fine: list[set[int]] = []
    for result in results:
        ratio, experts = routes.found[route_key(result)]
        for value, chosen in zip(ratio.tolist(), experts.tolist(), strict=True):
            if value != value:
                continue  # not judged
            (off if value > (result.limit or 0.0) else fine).append(set(chosen))
    if not off or not fine:
        return None
    shared = set.intersection(*off)
    # an expert that most tokens go to is shared by whatever is wrong
    named = sorted(e for e in shared if sum(e in chosen for chosen in fine) <= len(off) // 2)
    if not named:
        return None
    there = sum(any(e in chosen for e in named) for chosen in fine)
    tokens = "token" if len(off) == 1 else f"{len(off)} tokens"
    all_ = "" if len(off) == 1 else "all "
    text = f"the {tokens} beyond the typical token's limit {all_}went to expert" + (
        f" {named[0]}" if len(named) == 1 else f"s {', '.join(map(str, named))}"
    )
    text += f"; of the {len(fine)} that are fine, {there or 'none'} did"
    return Evidence(text=text, values={"num_tokens": len(off), "num_fine": there})
