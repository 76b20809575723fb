"""The rules that others use to find the first bad layer, on the same pairs of runs.

All judge the free runs, block outputs in order, and point at the first that breaks the
rule. Sources: relative L2 and cosine thresholds (usual in porting guides); a jump over
the layer before; msprobe's "inputs within 1 per mille and outputs not" (Ascend MindStudio
Probe, accuracy comparison); the accuracy check of torch._dynamo (RMSE against float64 over
that of the eager run: 2 for float32, 3 for 16-bit, plus a tenth of the tolerance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from divergence.run.reader import Run

__all__ = ["RULES", "BlockRow", "block_rows", "first_bad"]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block of the free runs in one forward; errors as in the rules."""

    block: str
    step: int
    rel_in: float
    rel_out: float
    cosine: float
    rmse_reference: float
    rmse_candidate: float
    narrow: bool


def block_rows(a: Run, b: Run, truth: Run, blocks: Sequence[str]) -> list[list[BlockRow]]:
    """By forward, the blocks in order."""
    forwards = sorted({(r.sample, r.step) for r in a.records if r.pass_ == "free"})
    found = []
    for sample, step in forwards:
        rows = []
        for block in blocks:
            x, y, r = (_read(run, sample, step, f"{block}:out") for run in (a, b, truth))
            u, v = (_read(run, sample, step, f"{block}:in") for run in (a, b))
            rows.append(
                BlockRow(
                    block=block,
                    step=step,
                    rel_in=_rel(u, v),
                    rel_out=_rel(x, y),
                    cosine=float((x * y).sum() / (x.norm() * y.norm()).clamp_min(1e-300)),
                    rmse_reference=float((x - r).square().mean().sqrt()),
                    rmse_candidate=float((y - r).square().mean().sqrt()),
                    narrow=a.manifest.model.dtype in ("bfloat16", "float16"),
                )
            )
        found.append(rows)
    return found


def _read(run: Run, sample: int, step: int, site: str) -> torch.Tensor:
    return run.read(run.find(("free", sample, step, site))).double()


def _rel(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm().clamp_min(1e-300))


def _jump(rows: Sequence[BlockRow], place: int) -> bool:
    before = rows[place - 1].rel_out if place else rows[0].rel_in
    return rows[place].rel_out > 3 * before and rows[place].rel_out > 0


def _inductor(row: BlockRow) -> bool:
    multiplier, tolerance = (3.0, 1e-3) if row.narrow else (2.0, 1e-4)
    return row.rmse_candidate > multiplier * row.rmse_reference + tolerance / 10


RULES: dict[str, Callable[[Sequence[BlockRow], int], bool]] = {
    "rel L2 > 1e-2": lambda rows, i: rows[i].rel_out > 1e-2,
    "cosine < 0.99": lambda rows, i: rows[i].cosine < 0.99,
    "cosine < 0.999": lambda rows, i: rows[i].cosine < 0.999,
    "e > 3 e of the layer before": _jump,
    "in <= 1e-3, out > 1e-3": lambda rows, i: rows[i].rel_in <= 1e-3 < rows[i].rel_out,
    "RMSE over eager's x 2 or 3": lambda rows, i: _inductor(rows[i]),
}


def first_bad(rule: str, forwards: Sequence[Sequence[BlockRow]]) -> str | None:
    """The block that ``rule`` points at, None if it passes."""
    test = RULES[rule]
    for rows in forwards:
        for place, row in enumerate(rows):
            if test(rows, place):
                return row.block
    return None
