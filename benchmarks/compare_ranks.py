"""compare() by torchrun, and of many runs: time and memory beside one process and one pair.

    python benchmarks/compare_ranks.py [--mib 512] [--rounds 3] [--ranks 2] [--runs 8]

Runs of blocks of 512 × 2048 in bfloat16 are written, every tensor differing by rounding, so that
nothing can be skipped. Each process has one torch thread. Wall time is what a user waits; start is
the same command on runs of a single tensor, since what it costs to start python, torch and the
process group is no matter of the work. CPU time is that of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._dumps import write_runs  # noqa: E402

SHAPE = (1, 512, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=8, help="candidates in one command")
    args = parser.parse_args()
    count = max(1, (args.mib << 20) // (2 * SHAPE[1] * SHAPE[2]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = write_runs(folder, count, SHAPE, torch.bfloat16, num_runs=1 + args.runs)
        few = write_runs(folder / "few", 1, SHAPE, torch.bfloat16)
        alone = [sys.executable, "-m", "divergence", "compare"]
        ranks = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(args.ranks),
            "-m",
            "divergence",
            "compare",
        ]
        rows = {
            "one process": (alone, runs[:2], few),
            f"{args.ranks} ranks": (ranks, runs[:2], few),
            f"{args.runs} candidates": (alone, runs, few),
        }
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in rows}
        for _ in range(args.rounds):  # interleaved: other work on the machine meets all alike
            for row, (command, given, start) in rows.items():
                times[row].append((*run(command, given), *run(command, start)))
        print(f"runs of {args.mib} MiB, {count} tensors; medians of {args.rounds}, interleaved\n")
        print("| | start, s | work, s | CPU of the work, s | s a pair | peak RSS of a process |")
        print("|---|---|---|---|---|---|")
        for row, (_, given, _) in rows.items():
            wall, cpu, rss, start, start_cpu, _ = map(
                statistics.median, zip(*times[row], strict=True)
            )
            work, pairs = wall - start, len(given) - 1
            print(
                f"| {row} | {start:.1f} | {work:.1f} | {cpu - start_cpu:.1f} "
                f"| {work / pairs:.2f} | {rss / (1 << 20):.0f} MiB |"
            )


def run(command: list[str], runs: list[Path]) -> tuple[float, float, float]:
    """(wall s, CPU s, largest RSS in bytes) of all processes that the command starts."""
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)\n"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *command, *map(str, runs), "-q"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    wall = time.perf_counter() - begin
    cpu, rss = map(float, done.stdout.split())
    return wall, cpu, rss * 1024


if __name__ == "__main__":
    main()
