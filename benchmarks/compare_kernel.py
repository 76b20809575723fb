"""How fast a pair is measured: measure_pair beside a naive float64 pass and a plain read.

    python benchmarks/compare_kernel.py [--mib 256] [--rounds 7]

One round runs every line once, so that a busy machine slows all of them alike; the
table gives medians over rounds. GB/s counts the bytes of both tensors, warm (no disk).
"naive" is what one writes first: both sides to float64 whole, then norms, cosine,
largest difference, per-row and per-channel norms in numpy; it has no ulp counts.
"read" sums the same bytes as 64-bit integers: no metric can be faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from divergence.numerics.pair import measure_pair
from divergence.numerics.summary import summarize

NUM_COLS = 2048


def naive(a: torch.Tensor, b: torch.Tensor) -> tuple[float, ...]:
    """The metrics without ulp, the straightforward way."""
    x, y = a.double().numpy(), b.double().numpy()
    d = x - y
    norm_x, norm_y = np.linalg.norm(x), np.linalg.norm(y)
    rows = np.linalg.norm(d, axis=1) / np.linalg.norm(x, axis=1)
    channels = np.linalg.norm(d, axis=0) / np.linalg.norm(x, axis=0)
    cosine = (x * y).sum() / (norm_x * norm_y)
    return np.linalg.norm(d) / norm_x, cosine, np.abs(d).max(), rows.max(), channels.max()


def read(a: torch.Tensor, b: torch.Tensor) -> int:
    """Every byte once."""
    return sum(int(side.view(torch.int64).numpy().sum()) for side in (a, b))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(dtype: torch.dtype, *, mib: int, rounds: int) -> dict[str, float]:
    """Median seconds of each line over ``rounds``, for a pair of ``mib`` MiB in all."""
    num_rows = mib * 2**20 // (2 * dtype.itemsize * NUM_COLS)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(num_rows, NUM_COLS, generator=generator)
    b = (a * (1 + 3e-3 * torch.randn(a.shape, generator=generator))).to(dtype)
    a = a.to(dtype)
    lines: dict[str, Callable[[], object]] = {
        "read": lambda: read(a, b),
        "naive float64": lambda: naive(a, b),
        "measure_pair, 1 thread": lambda: measure_pair(a, b, threads=1),
        "measure_pair, 2 threads": lambda: measure_pair(a, b, threads=2),
        "summarize, both": lambda: (summarize(a), summarize(b)),
    }
    times: dict[str, list[float]] = {name: [] for name in lines}
    for number in range(rounds + 1):
        for name, work in lines.items():
            seconds = _seconds(work)
            if number:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def tiny(*, rounds: int = 200) -> tuple[float, float]:
    """Median seconds of measure_pair and summarize for 64 bfloat16 features."""
    a = torch.randn(1, 1, 64).bfloat16()
    b = (a * 1.01).bfloat16()
    return (
        statistics.median(_seconds(lambda: measure_pair(a, b)) for _ in range(rounds)),
        statistics.median(_seconds(lambda: summarize(a)) for _ in range(rounds)),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of a pair, both sides")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{'dtype':<10} {'what':<24} {'GB/s':>7} {'x naive':>8} {'of read':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        medians = measure(dtype, mib=options.mib, rounds=options.rounds)
        for name, seconds in medians.items():
            rate = options.mib * 2**20 / seconds / 1e9
            print(
                f"{str(dtype).removeprefix('torch.'):<10} {name:<24} {rate:>7.2f} "
                f"{medians['naive float64'] / seconds:>8.1f} {medians['read'] / seconds:>8.1%}"
            )
    pair_s, summary_s = tiny()
    print(
        f"64 features, bfloat16: measure_pair {pair_s * 1e6:.0f} us, summarize "
        f"{summary_s * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
