"""Known differences: what a team has looked at, understood and decided to live with.

An entry ``[[known]]`` of a policy excuses the verdicts ``localized`` and ``systematic``, and these
only where *everything* that is flagged is known: every flagged record of every pass matches an
entry, its numbers are within that entry's ``max``, and the entry's last day is not over. A fault
beside a known difference is therefore found as without it. Where the verdict ends at the known
difference, the question behind it is asked here: is the free run farther off than the blocks
together may make it, the known ones as much as they were seen to (drift)?

It never excuses nan and inf, coverage, tokens, a difference that preflight refuses, a rank's
verdict or an abstention; an operator's only in a block whose own output is known, since that bounds
what the operators in it make. A tolerance holds at known sites as elsewhere.
"""

from __future__ import annotations

import datetime

import msgspec

from divergence.analyses.blocks.find import find_drifts
from divergence.comparison.result import Report, SiteResult
from divergence.facts import Fact, fact
from divergence.gate.policy import Known, Policy
from divergence.gate.result import KnownUse


class Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """Says whether the policy's known differences excuse the verdict."""

    excused: bool
    """The entries in ``uses`` excuse the verdict."""
    uses: list[KnownUse]
    """What became of each entry."""
    why_not: Fact | None = None
    """What prevents it, where an entry matches and the verdict is not excused."""


def excuse(report: Report, policy: Policy) -> Knowledge:
    """Say whether the known differences of ``policy`` explain the verdict, and what each did."""
    if not policy.known:
        return Knowledge(excused=False, uses=[])
    day = datetime.date.today()
    flagged = [site for site in report.sites if site.flagged]
    uses = [_use(number, entry, flagged, day) for number, entry in enumerate(policy.known)]
    if report.verdict.kind not in ("localized", "systematic"):
        return Knowledge(excused=False, uses=uses)
    open_ = [entry for entry in policy.known if not _is_over(entry, day)]
    unknown = [site for site in flagged if not any(_covers(entry, site) for entry in open_)]
    why_not = _why_not(report, policy, flagged, unknown)
    if why_not is not None:
        uses = [
            msgspec.structs.replace(use, status="matched") if use.status == "used" else use
            for use in uses
        ]
    return Knowledge(excused=why_not is None, uses=uses, why_not=why_not)


def _why_not(
    report: Report, policy: Policy, flagged: list[SiteResult], unknown: list[SiteResult]
) -> Fact | None:
    onset = report.verdict.onset
    blocks = {site.block for site in flagged if site.site == f"{site.block}:out"}
    if unknown:
        place, num_more = place_of(unknown[0]), len(unknown) - 1
        return fact("gate.flagged_not_known", place=place, num_more=num_more)
    if not flagged:
        return fact("gate.rests_on_no_record")
    operators = report.operators
    first_operator = None if operators is None else operators.onset
    for result in [] if operators is None else operators.results:
        # what a known block's operators make ends in its output, which is no larger than known
        beyond = result.limit_usage > 1 or result.site == first_operator
        if beyond and (result.block not in blocks or result.why == "nonfinite"):
            return fact("gate.operator_beyond", site=result.site)
    inside = onset is not None and onset.block in blocks
    if onset is not None and not inside and onset.site not in {site.site for site in flagged}:
        return fact("gate.ends_elsewhere", site=onset.site)
    if any(check.num_different for check in report.replicas):
        return fact("gate.ranks_disagree")
    drifts = find_drifts(_with_known_errors(report.sites, flagged), policy.thresholds)
    return fact("gate.drifts_beside", what=drifts[0].headline) if drifts else None


def _with_known_errors(sites: list[SiteResult], flagged: list[SiteResult]) -> list[SiteResult]:
    """The free pass of the blocks, where a block with a known difference may make as much as it was
    seen to make from equal inputs, and the others their floor."""
    blocks = {site.block for site in flagged if site.block is not None}
    made: dict[str, float] = {}
    for site in sites:
        if site.block in blocks and site.site == f"{site.block}:out" and site.pass_ != "escalated":
            made[site.block] = max(made.get(site.block, 1.0), site.ratio or 0.0)
    return [
        msgspec.structs.replace(
            site,
            truth=None,
            floor=None if site.floor is None else site.floor * made.get(site.block or "", 1.0),
        )
        for site in sites
        if site.pass_ == "free" and site.role == "block"
    ]


def _use(number: int, entry: Known, flagged: list[SiteResult], day: datetime.date) -> KnownUse:
    meant = [site for site in flagged if entry.matches(site)]
    beyond = [site for site in meant if not _covers(entry, site)]
    limits = entry.max.limits()
    largest: dict[str, float | None] = {}
    for name in limits:
        values = [getattr(site, name) for site in meant]
        largest[name] = None if None in values else max(values, default=None)
    if not meant:
        what = fact("gate.unused")
    elif _is_over(entry, day):
        what = fact("gate.expired", until=str(entry.until))
    elif beyond:
        figures = _figures(limits, {name: getattr(beyond[0], name) for name in limits})
        what = fact("gate.exceeded", figures=figures, place=place_of(beyond[0]))
    else:
        until = None if entry.until is None else str(entry.until)
        figures = _figures(limits, largest)
        what = fact("gate.used", num=len(meant), figures=figures, until=until)
    return KnownUse(
        number=number,
        sites=entry.sites,
        status=what.code.removeprefix("gate."),
        fact=what,
        num_records=len(meant),
        allowed=limits,
        found=largest if meant else {},
        reason=entry.reason,
        until=entry.until,
    )


def _covers(entry: Known, site: SiteResult) -> bool:
    """Is the record meant, and no larger than known? A number that is not known is too large."""
    values = [(getattr(site, name), limit) for name, limit in entry.max.limits().items()]
    return entry.matches(site) and all(
        value is not None and value <= limit for value, limit in values
    )


def _is_over(entry: Known, day: datetime.date) -> bool:
    return entry.until is not None and day > entry.until


def _figures(limits: dict[str, float], values: dict[str, float | None]) -> list[Fact]:
    return [
        fact("gate.figure", name=name, value=value, limit=limits[name])
        for name, value in values.items()
    ]


def place_of(site: SiteResult) -> Fact:
    """A record, for people."""
    return fact("gate.place", site=site.site, pass_=site.pass_, sample=site.sample, step=site.step)
