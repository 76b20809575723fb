"""How fast a pair is measured: both kernels beside a naive float64 pass and a plain read.

    python benchmarks/compare_kernel.py [--mib 256] [--rounds 7]

One round runs every line once, so that a busy machine slows all of them alike; the
table gives medians over rounds, of processor time: what one core does, however busy it is. GB/s
counts the bytes of both tensors (of all four for the truth), warm (no disk).
"naive" is what one writes first: both sides to float64 whole, then norms, cosine,
largest difference, per-row and per-channel norms in numpy; it has no ulp counts.
"read" sums the same bytes as 64-bit integers: no metric can be faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from divergence.numerics.pairs import measure_against, measure_pair  # noqa: E402
from divergence.numerics.summary import summarize  # noqa: E402
from divergence.numerics.sums import has_compiled  # noqa: E402

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


def _both(a: torch.Tensor, b: torch.Tensor, *, kernel: str) -> None:
    summarize(a, kernel=kernel), summarize(b, kernel=kernel)


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(dtype: torch.dtype, *, mib: int, rounds: int) -> dict[str, float]:
    """Median seconds of each line over ``rounds``, for a pair of ``mib`` MiB in all."""
    num_rows = mib * 2**20 // (2 * dtype.itemsize * NUM_COLS)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(num_rows, NUM_COLS, generator=generator)
    b = (a * (1 + 3e-3 * torch.randn(a.shape, generator=generator))).to(dtype)
    a = a.to(dtype)
    truth = a.double()
    lines: dict[str, Callable[[], object]] = {
        "read": lambda: read(a, b),
        "naive float64": lambda: naive(a, b),
    }
    for kernel in ("numpy", "compiled") if has_compiled() else ("numpy",):
        lines |= {
            f"measure_pair, {kernel}": partial(measure_pair, a, b, threads=1, kernel=kernel),
            f"summarize, both, {kernel}": partial(_both, a, b, kernel=kernel),
            f"measure_against, {kernel}": partial(measure_against, a, b, truth, kernel=kernel),
        }
    times: dict[str, list[float]] = {name: [] for name in lines}
    for number in range(rounds + 1):
        for name, work in lines.items():
            seconds = _seconds(work)
            if number:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def tiny(kernel: str, *, rounds: int = 200) -> tuple[float, float]:
    """Median seconds of measure_pair and summarize for 64 bfloat16 features."""
    a = torch.randn(1, 1, 64).bfloat16()
    b = (a * 1.01).bfloat16()
    measure_pair(a, b, kernel=kernel), summarize(a, kernel=kernel)
    return (
        statistics.median(
            _seconds(lambda: measure_pair(a, b, kernel=kernel)) for _ in range(rounds)
        ),
        statistics.median(_seconds(lambda: summarize(a, kernel=kernel)) for _ in range(rounds)),
    )


_START = """
import resource, time, torch
from divergence.numerics.pairs import measure_pair
a = torch.randn(64, 64).bfloat16()
measure_pair(a, a * 1.01, kernel="numpy")
def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, before = time.process_time(), resident()
measure_pair(a, a * 1.01, kernel="compiled")
print(time.process_time() - start, (resident() - before) / 1024)
"""


def start() -> tuple[float, float]:
    """Processor seconds until compiled loops answer in a new process, machine code kept, and the
    MiB by which its resident memory has grown then (Linux)."""
    found = []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", _START],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        found.append([float(word) for word in done.stdout.split()])
    seconds, mib = zip(*found[1:], strict=True)  # the first may compile
    return statistics.median(seconds), statistics.median(mib)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of a pair, both sides")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{'dtype':<10} {'what':<26} {'GB/s':>7} {'x naive':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        medians = measure(dtype, mib=options.mib, rounds=options.rounds)
        for name, seconds in medians.items():
            # the truth is float64: of a pair of n bytes it has n · 8 / (2 · itemsize)
            more = 1 + 4 / dtype.itemsize if "against" in name else 1
            rate = more * options.mib * 2**20 / seconds / 1e9
            naive_s = medians["naive float64"]
            ratio = "" if "against" in name else f"{naive_s / seconds:.1f}"  # other work
            print(f"{str(dtype).removeprefix('torch.'):<10} {name:<26} {rate:>7.2f} {ratio:>8}")
    for kernel in ("numpy", "compiled") if has_compiled() else ("numpy",):
        pair_s, summary_s = tiny(kernel)
        print(
            f"64 features, bfloat16, {kernel}: measure_pair {pair_s * 1e6:.0f} us, summarize "
            f"{summary_s * 1e6:.0f} us"
        )
    if has_compiled():
        seconds, mib = start()
        print(f"compiled loops start in {seconds:.2f} s of a new process and take {mib:.0f} MiB")


if __name__ == "__main__":
    main()
