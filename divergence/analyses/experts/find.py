"""Experts: routers that choose otherwise than rounding may, and what tokens that are far off share.

One expert of many that is wrong shows in the tokens that were sent to it, and in no other. So where
all tokens beyond the limit share an expert, it is named; tokens that went there and are fine
speak against it and are counted. Rerouted tokens (comparison.experts) are in none of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.experts import (
    Routes,
    Unexplained,
    logits_decide,
    route_key,
    routed_blocks,
    same_experts,
)
from divergence.comparison.results import Finding, SiteResult, Verdict, onset_at, order_of
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.site import module_of
from divergence.words import Side

_FEW = 10
"""Tokens: that a side follows its logits is known from no fewer."""


def find(measured: Measured) -> AnalysisResult:
    """The first choice of experts that rounding does not explain: its router is where the error
    comes in, whatever the experts make of it."""
    choices = sorted(measured.routes.unexplained.values(), key=lambda pair: order_of(pair[0]))
    if not choices:
        return AnalysisResult()
    behind, first = choices[0]
    router = first.router or first.site
    seen = max(
        (
            s for s in measured.sites
            if (s.pass_, s.of, s.sample, s.step)
            == (behind.pass_, behind.of, behind.sample, behind.step)
            and (s.site == router or (module_of(s.site) == module_of(router) and not s.identical
                 and format_named(s.reference_dtype).kind == "int"))
        ),  # what it chose, where that was recorded, else the logits that it was made of
        key=order_of,
        default=behind,
    )  # fmt: skip
    side = _side(measured, behind, first)
    blocks = {result.block for result, _ in choices}
    num_routed = len(routed_blocks(measured.reference.manifest))
    many = len(blocks) >= 3 and 2 * len(blocks) > num_routed
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
        token=first.tokens[0], sample=behind.sample, step=behind.step,
        reference=first.experts[0][0].tolist(), candidate=first.experts[1][0].tolist(),
    )  # fmt: skip
    position = first.tokens[0] if behind.step == 0 else seen.worst_position
    return AnalysisResult(
        findings=[
            Finding(
                claim="integers_differ",
                kind="systematic" if many else "localized",
                headline=[sends, fact("by", by=side, both=False)],
                onset=replace(onset_at(seen), position=position, sample=behind.sample),
                place=order_of(seen),
                equal_inputs=behind.pass_ != "free",
                side=side,
                evidence=[evidence],
                beside=[evidence],
                commands=measured.advice.look_at(first.site),
                flags=[seen.key],
            )
        ]
    )


def _side(measured: Measured, behind: SiteResult, choice: Unexplained) -> Side | None:
    """The side that does not choose the largest of its own logits, where these decide and the other
    does for every token of a prompt; else that whose experts the truth does not have, if it has the
    other's."""
    decide = choice.router and logits_decide(
        measured.reference.manifest, module_of(choice.router)
    )  # else a side without its bias follows them
    if decide and len(set(choice.follows)) == 2 and choice.num_tokens >= _FEW:
        return "candidate" if choice.follows[0] else "reference"
    if measured.truth is None:
        return None
    truth = measured.truth.run
    record = truth.find((behind.pass_, behind.sample, behind.step, choice.site))
    if record is None or not truth.has_bytes(record):
        return None
    rows = truth.read(record).flatten(0, -2)
    if len(rows) != choice.num_tokens:
        return None
    shares = [
        float(same_experts([rows[choice.tokens], own]).double().mean()) for own in choice.experts
    ]
    if max(shares) <= 2 * min(shares):
        return None
    return "candidate" if shares[0] > shares[1] else "reference"


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
    shared = _shared(mine, routes)
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
