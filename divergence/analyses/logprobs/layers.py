"""Log-probabilities beside layers: which block explains Δ log p?

Where a side holds log-probabilities alone, a run that recorded layers of the same set-up on the
same tokens (``--layers``) stands in for it. Two things are asked: do the two layer-level runs show
the same Δ log p, token by token, and what does their own comparison say? Of Δ the share that they
explain is 1 - Σ(Δ - Δ')² / ΣΔ², with Δ' theirs. Where it is small, what differs is not in what
they ran: another build, other weights or other settings of the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from divergence.analyses.logprobs.pairs import PromptPair, pair_runs
from divergence.comparison.api import compare
from divergence.comparison.results import Finding, LogprobLayers
from divergence.errors import UsageError
from divergence.facts import fact
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.site import LOGPROBS
from divergence.words import Progress

__all__ = ["joined", "layers_of", "with_layers"]

_MOST = 0.5
"""Share of Δ log p from which on the layer-level runs show the same difference."""


def with_layers(a: Run, b: Run, given: Sequence[Run]) -> tuple[Run, Run]:
    """The layer-level run of each side: itself, or the next one of ``given``. Raises UsageError."""
    left = list(given)
    sides = []
    for run in (a, b):
        if run.manifest.plan.sites != [LOGPROBS]:
            sides.append(run)
        elif left:
            sides.append(left.pop(0))
        else:
            raise UsageError(
                f"{run.path} holds log-probabilities alone, and no --layers stands in for it",
                hint=f"make one on its tokens: {command_line('capture', like=run.path, o='RUN')}",
            )
    if left:
        raise UsageError(
            f"--layers {left[0].path} stands in for no side: each holds layers, or has one",
            hint="give one for each side that holds log-probabilities alone",
        )
    for run in sides:
        if run.manifest.plan.sites == [LOGPROBS]:
            raise UsageError(f"--layers {run.path} holds log-probabilities alone",
                             hint="a run that recorded blocks")  # fmt: skip
    return sides[0], sides[1]


def layers_of(
    pairs: Sequence[PromptPair], sides: tuple[Run, Run], progress: Progress | None
) -> LogprobLayers:
    """What they show, and how much of Δ log p it is. Raises UsageError for other prompts."""
    report = compare(*sides, progress=progress)
    theirs = {
        (pair.sample, int(place)): float(value)
        for pair in pair_runs(*sides)
        for place, value in zip(pair.places, pair.delta, strict=True)
    }
    ours = {
        (pair.sample, int(place)): float(value)
        for pair in pairs
        for place, value in zip(pair.places, pair.delta, strict=True)
    }
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UsageError(
            "the runs of --layers score none of the compared tokens",
            hint="capture them with --like of the run that holds the log-probabilities",
        )
    mine, other = (np.array([deltas[key] for key in common]) for deltas in (ours, theirs))
    whole = float((mine * mine).sum())
    explained = 1 - float(((mine - other) ** 2).sum()) / whole if whole else None
    onset = report.verdict.onset
    return LogprobLayers(
        num_tokens=len(common), share=None if explained is None else max(0.0, explained),
        kind=report.verdict.kind, headline=report.verdict.headline,
        block=None if onset is None else onset.block, side=report.verdict.side,
        reference=str(sides[0].path), candidate=str(sides[1].path),
    )  # fmt: skip


def joined(finding: Finding, layers: LogprobLayers) -> Finding:
    """``finding`` with what the layers say: the block, where they show the same difference."""
    if layers.share is None:
        return finding
    elsewhere = layers.share < _MOST
    shown = fact(
        "logprobs.layers_show",
        share=layers.share,
        num_tokens=layers.num_tokens,
        what=[fact("logprobs.not_in_layers")] if elsewhere else layers.headline,
    )
    headline = finding.headline
    differs = finding.kind not in ("identical", "within_floor")
    if layers.block is not None and differs and not elsewhere:
        explain = fact("logprobs.layers_explain", module=layers.block, share=layers.share)
        headline = [*headline, explain]
    return replace(finding, headline=headline, evidence=[shown, *finding.evidence])
