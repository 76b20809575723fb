"""compare() on dumps of any size, beside reading the same bytes and beside what others do.

    python benchmarks/compare_throughput.py [--gib 1] [--rounds 3] [--dtype bfloat16,float32]
    python benchmarks/compare_throughput.py --gib 1,4,20 --rounds 1 --ways read,compiled
    python benchmarks/compare_throughput.py --gib 1 --msprobe VENV/bin/msprobe

Two runs are written, ``--gib`` GiB in all, of blocks of 2048 × 4096 whose tensors all differ by
rounding, so that nothing can be skipped. Then in turn, each in a process of its own, cold (the
files dropped from the page cache first, where the system allows it) and warm:

read      every byte of both dumps, read() in 8 MiB pieces
compiled  divergence: checksums of both, the full metric set, judged; loops compiled by numba
numpy     the same without numba
naive     per tensor in numpy: both to float64, norm of the difference over the norm, cosine
close     per tensor torch.testing.assert_close (which stops at nothing: tolerances are met)
msprobe   `msprobe compare` on the same tensors in its format, if --msprobe names the program; the
          time that it takes for one pair of 8 numbers is taken off, and printed beside it

Seconds are of the call, without imports. GB/s and ratios count the bytes of both dumps. On a busy
machine seconds say little: "CPU s" is what all threads together took, and "GB per CPU s" what one
core does. Peak RSS is of the process, mapped file pages included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._dumps import write_msprobe, write_runs  # noqa: E402
from divergence.numerics.sums import has_compiled  # noqa: E402

SHAPE = (1, 2048, 4096)

_TIMED = """
import json, re, resource, sys, time
from pathlib import Path
way, paths = sys.argv[1], [Path(name) for name in sys.argv[2:]]
if way == "read":
    def work():
        buffer = bytearray(8 << 20)
        for path in paths:
            for shard in sorted((path / "tensors").iterdir()):
                with open(shard, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
elif way in ("compiled", "numpy"):
    import torch
    import divergence.comparison.measure.pairs as measuring
    from divergence.comparison.api import compare
    measuring.kernel_for = lambda num_bytes: way
    if way == "compiled":
        import numba
    def work():
        compare(*paths)
else:
    import numpy as np, torch
    from divergence.run.reader import Run
    def work():
        a, b = (Run.open(path) for path in paths)
        for one, two in zip(a.records, b.records):
            x, y = a.read(one, verify=False), b.read(two, verify=False)
            if way == "close":
                torch.testing.assert_close(y, x, rtol=1e-2, atol=1e-2)
                continue
            x, y = (t.to(torch.float64).numpy() for t in (x, y))
            np.linalg.norm(x - y) / np.linalg.norm(x)
            (x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y))
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
start, used = time.perf_counter(), cpu()
work()
seconds, used = time.perf_counter() - start, cpu() - used
status = Path("/proc/self/status")
peak = float("nan")  # getrusage would tell the parent's, if that was larger
if status.exists():
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1024
print(json.dumps({"seconds": seconds, "cpu_s": used, "peak_mib": peak}))
"""


def timed(way: str, paths: tuple[Path, Path]) -> dict[str, float]:
    """One way in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _TIMED, way, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def timed_msprobe(program: str, paths: tuple[Path, Path], out: Path) -> dict[str, float]:
    """`msprobe compare`, its workers included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [program, "compare", "-tp", str(paths[1]), "-gp", str(paths[0]), "-o", str(out)],
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if not any(out.glob("*.csv")):
        raise RuntimeError("msprobe wrote no result")
    shutil.rmtree(out)
    return {"seconds": time.perf_counter() - start, "cpu_s": cpu_s, "peak_mib": float("nan")}


def drop(folder: Path) -> None:
    """Ask the system to forget the files."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(label: str, found: dict[str, list[dict]], num_bytes: int) -> None:
    """One line a way, medians over the rounds."""
    medians = {
        way: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for way, rounds in found.items()
    }
    read_s = medians["read"]["seconds"] if "read" in medians else float("nan")
    for way, value in medians.items():
        seconds, cpu_s = max(value["seconds"], 1e-9), max(value["cpu_s"], 1e-9)
        print(
            f"| {label} | {way} | {seconds:.2f} | {num_bytes / seconds / 1e9:.2f} "
            f"| {seconds / read_s:.2f} | {cpu_s:.2f} | {num_bytes / cpu_s / 1e9:.2f} "
            f"| {value['peak_mib']:.0f} |",
            flush=True,
        )


def bench(dtype: torch.dtype, gib: float, options: argparse.Namespace, folder: Path) -> None:
    """Write one pair of dumps, measure, print."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = max(1, round(gib * 2**30 / (2 * itemsize * SHAPE[1] * SHAPE[2])))
    paths = write_runs(folder / "runs", count, SHAPE, dtype)
    num_bytes = sum(f.stat().st_size for p in paths for f in (p / "tensors").iterdir())
    ways = [way for way in options.ways.split(",") if way != "compiled" or has_compiled()]
    if "compiled" in ways:
        timed("compiled", paths)  # compiles, where this machine has not yet
    rivals: dict[str, tuple[Path, Path]] = {}
    if options.msprobe:
        for name, much in (("start", (1, (1, 8))), ("whole", (count, SHAPE))):
            rivals[name] = write_msprobe(folder / f"msprobe-{name}", *much, dtype)
        ways.append("msprobe")
    for cache in options.cache.split(","):
        found: dict[str, list[dict]] = {way: [] for way in ways}
        starts = []
        for _ in range(options.rounds):
            for way in ways:
                if cache == "cold":
                    drop(folder)
                elif not found[way] and way == ways[0]:
                    timed("read", paths)
                if way != "msprobe":
                    found[way].append(timed(way, paths))
                    continue
                out = folder / "out"
                start = timed_msprobe(options.msprobe, rivals["start"], out)
                whole = timed_msprobe(options.msprobe, rivals["whole"], out)
                starts.append(start["seconds"])
                found[way].append({name: whole[name] - start[name] for name in whole})
        name = str(dtype).removeprefix("torch.")
        show(f"{name} | {num_bytes / 1e9:.1f} | {cache}", found, num_bytes)
        if starts:
            print(f"<!-- msprobe's start: {statistics.median(starts):.1f} s -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", default="1", help="sizes of both runs together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--cache", default="cold,warm")
    parser.add_argument("--ways", default="read,compiled,numpy,naive,close")
    parser.add_argument("--msprobe", help="the program, from an environment of its own")
    options = parser.parse_args()
    print(
        "| dtype | GB | cache | way | median s | GB/s | × read | CPU s | GB per CPU s | peak RSS "
        "MiB |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in options.dtype.split(","):
        for gib in options.gib.split(","):
            with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
                bench(getattr(torch, name), float(gib), options, Path(folder))
    load = os.getloadavg()[0]
    print(
        f"\n{torch.get_num_threads()} threads, {os.cpu_count()} cores, {options.rounds} rounds, "
        f"load {load:.1f} at the end"
    )


if __name__ == "__main__":
    main()
