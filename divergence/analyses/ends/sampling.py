"""Sampling: is each token the largest of the logits that decided it, on each side by itself?

Decoding is greedy, so a choice follows from its own row of logits exactly; no rounding lies between
them. Only where several logits are equal is any of them right. A row with a nan decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.comparison.align.pieces import PromptStep, logits_row
from divergence.run.reader import Run
from divergence.words import Side

if TYPE_CHECKING:
    import torch

__all__ = ["Misfit", "find_misfits", "misfit_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A token that is not the largest of its own logits: ``behind`` the largest by so much."""

    side: Side
    place: PromptStep
    chosen: int
    largest: int
    behind: float


def find_misfits(reference: Run, candidate: Run) -> list[Misfit]:
    """In the order of samples and steps; nothing of runs that recorded no logits."""
    found: list[Misfit] = []
    sides: tuple[tuple[Side, Run], ...]
    sides = (("reference", reference), ("candidate", candidate))
    for side, run in sides:
        other = candidate if run is reference else reference
        if run.manifest.plan.replayed_pass is not None or run.manifest.plan.logits_site is None:
            continue
        for sample, tokens in enumerate(run.manifest.tokens.samples):
            for step, chosen in enumerate(tokens.chosen_ids):
                if run.far and _said_by_both(run, other, sample, step):
                    continue
                row = logits_row(run, sample, step)
                found_there = None if row is None else misfit_in(row, chosen)
                if found_there is not None:
                    largest, behind = found_there
                    found.append(
                        Misfit(side=side, place=(sample, step), chosen=chosen, largest=largest,
                               behind=behind)
                    )  # fmt: skip
    return sorted(found, key=lambda misfit: misfit.place)


def _said_by_both(run: Run, other: Run, sample: int, step: int) -> bool:
    """Do both choose the same token of equal logits? Then those are not fetched for it."""
    samples = other.manifest.tokens.samples
    chosen = run.manifest.tokens.samples[sample].chosen_ids[step]
    if sample >= len(samples) or samples[sample].chosen_ids[step : step + 1] != [chosen]:
        return False
    records = []
    for one in (run, other):
        group = next((g for g in one.manifest.tokens.groups if sample in g), [sample])
        site = one.manifest.plan.logits_site
        records.append(one.find(("free", group[0], step, site)) if site else None)
    first, second = records
    return first is not None and second is not None and first.xxh3 == second.xxh3 is not None


def misfit_in(row: torch.Tensor, chosen: int) -> tuple[int, float] | None:
    """(the largest, by how much) where ``chosen`` is not the largest of a row of logits (V,)."""
    if not row.is_floating_point() or bool(row.isnan().any()):
        return None
    largest = int(row.argmax())
    if chosen >= len(row):
        return largest, float("inf")
    behind = float(row[largest].double() - row[chosen].double())
    return (largest, behind) if behind > 0 else None
