"""How long the judge takes: observations against their siblings, by how many there are.

    python benchmarks/judge_time.py [--rounds 5]

Errors of two sides in blocks × rows, each of 64 numbers; the table is made and judged
(comparison/judge.py), in one thread. Processor seconds, the median round; exit code 1 where that is
more than it may be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from divergence.comparison.judge import limit_of, observed, outliers
from divergence.numerics.floor import THRESHOLDS

TABLES = ((30, 500, 0.1), (80, 12500, 5.0))
"""Blocks, rows, and the most seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    draw = np.random.default_rng(0)
    slow = 0
    print("| blocks × rows | observations | s | at most |\n|---|---|---|---|")
    for blocks, rows, most in TABLES:
        energy = draw.chisquare(64, (2, blocks, rows)) / 64
        numbers = np.full_like(energy, 64.0)
        seconds = []
        for _ in range(rounds):
            start = time.process_time()
            x, own = observed(energy, numbers, THRESHOLDS.truth_least)
            outliers(x, own, THRESHOLDS.row_spread, limit_of(blocks * rows))
            seconds.append(time.process_time() - start)
        middle = statistics.median(seconds)
        slow |= middle > most
        print(f"| {blocks} × {rows:,} | {blocks * rows:,} | {middle:.2g} | {most:g} |", flush=True)
    return slow


if __name__ == "__main__":
    sys.exit(main())
