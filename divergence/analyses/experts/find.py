"""Experts: routers that choose otherwise than rounding may, and what tokens that are far off share.

A router in a coarser dtype than the other side's is one, too, be its error as small as rounding: of
the same scores other tokens are near a tie.

One expert of many that is wrong shows in the tokens that were sent to it, and in no other. So where
all tokens beyond the limit share an expert, it is named; tokens that went there and are fine
speak against it and are counted. Rerouted tokens (comparison.experts) are in none of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.constants import FEWEST_WITNESSES
from divergence.comparison.decide import check, in_most
from divergence.comparison.experts import (
    Routes,
    Unexplained,
    choices_in,
    logits_decide,
    route_key,
    routed_blocks,
    same_experts,
)
from divergence.comparison.result import Finding, SiteResult, Verdict, onset_at, order_of
from divergence.facts import Fact, fact
from divergence.numerics.arrays import rounded, wide
from divergence.numerics.formats import Format, format_named
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.words import SIDES, Side


def find(measured: Measured) -> AnalysisResult:
    """The first choice of experts that rounding does not explain: its router is where the error
    comes in, whatever the experts make of it. Else the first router that one side computes in a
    coarser dtype than the other, in runs of one dtype."""
    choices = sorted(measured.routes.unexplained.values(), key=lambda pair: order_of(pair[0]))
    if not choices:
        return AnalysisResult(findings=_coarse_routers(measured))
    behind, first = choices[0]
    router = first.router or first.site
    seen = max(
        (
            s
            for s in measured.sites
            if (s.pass_, s.of, s.sample, s.step)
            == (behind.pass_, behind.of, behind.sample, behind.step)
            and (
                s.site == router
                or (
                    module_of(s.site) == module_of(router)
                    and not s.identical
                    and format_named(s.reference_dtype).kind == "int"
                )
            )
        ),  # what it chose, where that was recorded, else the logits that it was made of
        key=order_of,
        default=behind,
    )
    side = _side(measured, behind, first)
    blocks = {result.block for result, _ in choices}
    num_routed = len(routed_blocks(measured.reference.manifest))
    many = in_most(len(blocks), num_routed)
    name: Fact | str = fact("experts.router_of", module=behind.block)
    if first.router:
        name = module_of(first.router)
    sends = fact("experts.router_sends", router=name, scores=len(set(first.follows)) == 2)
    if many:
        sends = fact("experts.routers_send", router=name, num=len(blocks), num_routed=num_routed)
    evidence = fact(
        "experts.sent_elsewhere",
        num_different=sum(len(choice.tokens) for _, choice in choices),
        num_compared=sum(choice.num_tokens for _, choice in choices),
        token=first.tokens[0],
        sample=behind.sample,
        step=behind.step,
        reference=first.experts[0][0].tolist(),
        candidate=first.experts[1][0].tolist(),
    )
    position = first.tokens[0] if behind.step == 0 else seen.worst_position
    finding = measured.finding_at(
        seen,
        claim="integers_differ",
        kind="systematic" if many else "localized",
        headline=[sends, fact("by", by=side, both=False)],
        onset=replace(onset_at(seen), position=position, sample=behind.sample),
        equal_inputs=behind.pass_ != "free",
        side=side,
        evidence=[evidence],
        beside=[evidence],
        commands=measured.advice.look_at(first.site),
    )
    return AnalysisResult(findings=[finding])


def _coarse_routers(measured: Measured) -> list[Finding]:
    """Find coarser routers in runs of one dtype, by autocast too. Where that has 16 bits, the
    rounding before a router hides that of its logits; the numbers show whether they are float32's
    or that dtype's."""
    runs = measured.reference, measured.candidate
    usual = format_named(runs[0].manifest.model.dtype)
    of_sides = [(m.model.dtype, m.training.autocast) for m in (run.manifest for run in runs)]
    if of_sides[0] != of_sides[1]:
        return []
    routers = {
        record.site
        for (kind, *_), records in choices_in(runs[0]).items()
        if kind == "logits"
        for record in records
    }
    judged: set[str] = set()
    coarse: list[tuple[SiteResult, list[Format]]] = []
    for site in sorted(measured.sites, key=order_of):
        if site.pass_ != "anchored" or site.identical or site.site not in routers - judged:
            continue
        judged.add(site.site)
        forms = [
            _format_of_numbers(run, (site.pass_, site.sample, site.step, name), dtype, usual)
            for run, name, dtype in (
                (runs[0], site.site, site.reference_dtype),
                (runs[1], site.candidate_site or site.site, site.candidate_dtype),
            )
        ]
        if forms[0].mantissa_bits != forms[1].mantissa_bits:
            coarse.append((site, forms))
    if not coarse:
        return []
    first, forms = coarse[0]
    narrow = int(forms[1].mantissa_bits < forms[0].mantissa_bits)
    side, other = SIDES[narrow], SIDES[1 - narrow]
    many = in_most(len(coarse), len(routers))
    headline = fact(
        "experts.router_coarse",
        router=module_of(first.site),
        num=len(coarse) if many else None,
        num_routed=len(routers),
        side=side,
        dtype=forms[narrow].name,
        other=other,
        other_dtype=forms[1 - narrow].name,
    )
    finding = measured.finding_at(
        first,
        claim="error_everywhere_of_kind" if many else "error_made_here",
        kind="systematic" if many else "localized",
        headline=[headline],
        equal_inputs=True,
        side=side if measured.truth is not None and side == "candidate" else None,
        rests_on=[check("clear", False, fact("experts.hidden"))],
        flags=[site.key for site, _ in coarse],
    )
    return [finding]


def _format_of_numbers(
    run: Run, place: tuple[str, int, int, str], dtype: str, usual: Format
) -> Format:
    """Say of which format a result's numbers are: that in which they are recorded, or the run's
    where all of them are of that."""
    recorded = format_named(dtype)
    record = run.find(place) or run.find(("free", *place[1:]))  # whose inputs anchored it
    if recorded.mantissa_bits <= usual.mantissa_bits or record is None or not run.has_bytes(record):
        return recorded
    values = run.array(record)
    exact = bool((wide(values) == wide(rounded(values, usual))).all())
    return usual if exact else recorded


def _side(measured: Measured, behind: SiteResult, choice: Unexplained) -> Side | None:
    """The side that does not choose the largest of its own logits, where these decide and the other
    does for every token of a prompt; else that whose experts the truth does not have, if it has the
    other's."""
    decide = choice.router and logits_decide(
        measured.reference.manifest, module_of(choice.router)
    )  # else a side without its bias follows them
    if decide and len(set(choice.follows)) == 2 and choice.num_tokens >= FEWEST_WITNESSES:
        return "candidate" if choice.follows[0] else "reference"
    if measured.truth is None:
        return None
    truth = measured.truth.run
    record = truth.find((behind.pass_, behind.sample, behind.step, choice.site))
    if record is None or not truth.has_bytes(record):
        return None
    rows = truth.array(record).reshape(-1, record.shape[-1])
    if len(rows) != choice.num_tokens:
        return None
    shares = [float(same_experts([rows[choice.tokens], own]).mean()) for own in choice.experts]
    if max(shares) <= 2 * min(shares):
        return None
    return "candidate" if shares[0] > shares[1] else "reference"


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """The expert that the onset's tokens share, if they share one."""
    onset, routes = verdict.onset, measured.routes
    if onset is None or onset.block is None:
        return []
    at_onset = [
        s
        for s in measured.sites
        if s.site == onset.site
        and s.pass_ == onset.pass_
        and route_key(s) in routes.found
        and (s.of is None or s.of == verdict.side)
    ]
    shared = _shared(at_onset, routes)
    if shared is None:
        return []
    return [Finding(claim="explanation", role="explains", about_onset=True, evidence=[shared])]


def _shared(results: Sequence[SiteResult], routes: Routes) -> Fact | None:
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
    return fact(
        "experts.shared", num_tokens=len(off), experts=named, num_fine=len(fine), num_there=there
    )
