"""Tokens that went to other experts, as rounding alone may send them: where, and how many."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.experts import Routes, choices_in, routed_blocks
from divergence.comparison.results import SiteResult
from divergence.comparison.routers import same_experts
from divergence.facts import Fact, fact
from divergence.run.manifest import Manifest
from divergence.run.reader import Run

__all__ = ["free_routes_differ", "mostly_rerouted", "routing_notes", "unknown_blocks"]


def free_routes_differ(runs: Sequence[Run], sample: int, step: int) -> bool:
    """Did any token of this prompt go to other experts in one of these free runs, up to this step?
    It then took another way, and attention carried it to those behind. True where it is not
    known."""
    first, *others = ((run, choices_in(run)) for run in runs)
    for key, records in first[1].items():
        pass_, prompt, number, *_ = key  # of the routers' logits it has one more
        if pass_ != "free" or prompt != sample or int(number or 0) > step:
            continue
        for place, record in enumerate(records):
            chosen = [(first[0], record)]
            chosen += [(run, index[key][place]) for run, index in others
                      if len(index.get(key, ())) > place]  # fmt: skip
            if len(chosen) < len(runs) or not all(run.has_bytes(choice) for run, choice in chosen):
                return True
            rows = [run.read(choice).flatten(0, -2).sort().values for run, choice in chosen]
            if any(row.shape != rows[0].shape for row in rows):
                return True
            if not bool(same_experts(rows).all()):
                return True
    return False


def unknown_blocks(manifest: Manifest, sites: Sequence[SiteResult]) -> frozenset[str]:
    """Blocks with experts in which some forward's choices are not known: one token's error says
    nothing there."""
    blocks = frozenset(routed_blocks(manifest))
    anchored = {(s.sample, s.step) for s in sites if s.pass_ == "anchored"}
    free = {(s.sample, s.step) for s in sites if s.pass_ == "free"}
    if not anchored or free - anchored:
        return blocks  # judged from free runs
    return frozenset(
        s.block
        for s in sites
        if s.pass_ != "free" and s.block in blocks and s.ratio is not None
        and s.num_rerouted is None
    )  # fmt: skip


def mostly_rerouted(sites: Sequence[SiteResult]) -> Fact | None:
    """Of a block's tokens, in the prefill or the decode steps, most were not judged since the sides
    sent them to other experts: the first such block."""
    counts: dict[tuple[str, str], list[int]] = {}
    for site in _routed_outs(sites):
        count = counts.setdefault((str(site.block), site.phase), [0, 0])
        count[0] += site.num_rerouted or 0
        count[1] += site.numel // max(site.shape[-1], 1)
    for (block, phase), (moved, num) in counts.items():
        if 2 * moved > num:
            return fact("measure.mostly_rerouted", num=moved, total=num, module=block, phase=phase)
    return None


def routing_notes(sites: Sequence[SiteResult], routes: Routes) -> list[Fact]:
    """How many tokens rounding sent elsewhere, where any."""
    outs = _routed_outs(sites)
    moved = [s for s in outs if s.num_rerouted]
    if not moved:
        return []
    blocks = {s.block for s in moved}
    return [
        fact(
            "measure.rerouted", num=sum(s.num_rerouted or 0 for s in moved),
            total=sum(s.numel // max(s.shape[-1], 1) for s in outs if s.block in blocks),
            blocks=sorted(map(str, blocks)), margin=routes.margin,
        )
    ]  # fmt: skip


def _routed_outs(sites: Sequence[SiteResult]) -> list[SiteResult]:
    """Outputs of blocks with experts, where the choices are known."""
    return [
        site for site in sites
        if site.num_rerouted is not None and site.role == "block" and site.site.endswith(":out")
        and site.pass_ == "anchored"
    ]  # fmt: skip
