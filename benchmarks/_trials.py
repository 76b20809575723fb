"""Trials of planted faults, and the tables that are printed of them."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from benchmarks._rivals import RULES

__all__ = ["Trial", "tables", "upper"]

EDGES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, math.inf)


@dataclass(slots=True)
class Trial:
    """One planted pair."""

    architecture: str
    dtype: str
    fault: str
    kind: str
    block: int
    side: str
    strength: float
    size: float
    verdict: str
    found: bool
    exact: bool
    side_said: str | None
    by_pass: str | None
    confidence: str
    rivals: dict[str, str]


def rate(trials: list[Trial], what) -> str:
    return f"{100 * sum(map(what, trials)) / len(trials):.0f}%" if trials else "-"


def _found(group: list[Trial]) -> str:
    return rate(group, lambda t: t.found)


def _exact(group: list[Trial], kind: str | None = None) -> str:
    return rate([t for t in group if kind in (None, t.kind)], lambda t: t.exact)


def _right_side(group: list[Trial]) -> str:
    return rate([t for t in group if t.exact], lambda t: t.side_said == t.side)


def _wrong_side(group: list[Trial]) -> str:
    return rate([t for t in group if t.exact], lambda t: t.side_said not in (t.side, None))


def _rival(group: list[Trial], rule: str) -> str:
    return rate(group, lambda t: t.rivals[rule] == "exact")


def upper(num_bad: int, num_all: int, chance: float = 0.05) -> float:
    """95% upper bound of a rate (Clopper and Pearson): the p with P(X <= num_bad) = 0.05."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        below = sum(
            math.comb(num_all, k) * p**k * (1 - p) ** (num_all - k) for k in range(num_bad + 1)
        )
        low, high = (p, high) if below > chance else (low, p)
    return high


def tables(trials: list[Trial]) -> None:
    columns = [f"{a:g}-{b:g}" if b < math.inf else f"> {a:g}" for a, b in itertools.pairwise(EDGES)]
    for dtype in sorted({t.dtype for t in trials}):
        mine = [t for t in trials if t.dtype == dtype]
        groups = [[t for t in mine if a <= t.size < b] for a, b in itertools.pairwise(EDGES)]
        print(f"\n{dtype}: {len(mine)} planted pairs, by size in floors\n")
        print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
        rows = {
            "pairs": lambda g: str(len(g)),
            "found": _found,
            "exact block": _exact,
            "right side, of those with exact block": _right_side,
            "wrong side said": _wrong_side,
        }
        if dtype != "float32":
            for kind in ("formula", "data", "arithmetic"):
                rows[f"exact block: {kind}"] = functools.partial(_exact, kind=kind)
        for rule in RULES:
            rows[f"rule: {rule}"] = functools.partial(_rival, rule=rule)
        for name, cell in rows.items():
            print(f"| {name} | " + " | ".join(cell(group) for group in groups) + " |")
        by_fault: dict[str, list[Trial]] = {}
        for trial in mine:
            if trial.size >= 3:
                by_fault.setdefault(trial.fault, []).append(trial)
        missed = {k: [t for t in v if not t.exact] for k, v in by_fault.items()}
        text = ", ".join(f"{k} {len(v)} of {len(by_fault[k])}" for k, v in missed.items() if v)
        print(f"\nabove 3 floors, not at the exact block: {text or 'none'}")
