"""compare() on dumps, beside reading the same bytes and beside naive float64 numpy.

    python benchmarks/compare_throughput.py [--mib 512] [--rounds 3] [--dtype bfloat16]

Two runs of the same shape are written (blocks of 512 × 2048; every tensor differs by
rounding, so nothing can be skipped), then in turn, cold (the files dropped from the page
cache first, where the system allows it) and warm:

read      every byte of both dumps, read() in 8 MiB pieces
naive     per tensor: both to float64, norm of the difference over the norm, cosine
compare   divergence: checksums of both, the full metric set, judged

Rates are bytes of both dumps over seconds. Peak memory is compare's own process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from divergence.capture.engines.tiny import build  # noqa: E402
from divergence.run.manifest import ModuleNote, Sizes  # noqa: E402
from divergence.run.reader import Run  # noqa: E402
from divergence.run.writer import Item, RunWriter  # noqa: E402


def write(folder: Path, mib: int, dtype: torch.dtype) -> tuple[Path, Path]:
    """Two runs of ``mib`` MiB each; the manifest is a real capture's, the tensors are drawn."""
    from divergence.capture.api import capture

    model = build("llama", folder / "model")
    small = capture(str(model), out=folder / "small", max_new_tokens=1, device="cpu")
    shape = (1, 512, 2048)
    count = max(1, (mib << 20) // (512 * 2048 * torch.empty((), dtype=dtype).element_size()))
    generator = torch.Generator().manual_seed(0)
    paths = folder / "a", folder / "b"
    writers = []
    for path in paths:
        manifest = Run.open(small.path).manifest
        manifest.sizes = Sizes()
        manifest.plan.modules = {
            f"model.layers.{n}": ModuleNote(kind="Block", role="block") for n in range(count)
        }
        writers.append(RunWriter(path, manifest))
    for number in range(count):
        values = torch.randn(shape, generator=generator)
        noise = 1 + 1e-3 * torch.randn(shape, generator=generator)
        for writer, tensor in zip(writers, (values, values * noise), strict=True):
            writer.put(
                Item(tensor.to(dtype)), pass_="free", sample=0, step=0,
                site=f"model.layers.{number}:out", order=number,
            )  # fmt: skip
    for writer in writers:
        writer.close(complete=True)
    return paths


def shards(paths: tuple[Path, Path]) -> list[Path]:
    return [file for path in paths for file in sorted((path / "tensors").iterdir())]


def drop(paths: tuple[Path, Path]) -> None:
    """Ask the system to forget the files."""
    for path in shards(paths):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: tuple[Path, Path]) -> None:
    buffer = bytearray(8 << 20)
    for path in shards(paths):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def naive(paths: tuple[Path, Path]) -> None:
    import numpy as np

    a, b = (Run.open(path) for path in paths)
    for one, two in zip(a.records, b.records, strict=True):
        x = a.read(one, verify=False).to(torch.float64).numpy()
        y = b.read(two, verify=False).to(torch.float64).numpy()
        _ = np.linalg.norm(x - y) / np.linalg.norm(x)
        _ = (x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y))


_COMPARE = """
import json, resource, sys, time
from divergence.compare.api import compare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
report = compare(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - start
import re
status = open("/proc/self/status").read() if sys.platform == "linux" else ""
anonymous = re.search(r"RssAnon:\\s+(\\d+)", status)
print(json.dumps({"seconds": seconds, "pairs": report.coverage.num_compared,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "anonymous_mib": int(anonymous[1]) / 1024 if anonymous else float("nan")}))
"""


def compared(paths: tuple[Path, Path]) -> dict:
    """compare() in a process of its own; the time is of the call, not of imports."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16,float32")
    args = parser.parse_args()
    print("| dtype | cache | way | median s | GB/s | × read | × naive |")
    print("|---|---|---|---|---|---|---|")
    notes = []
    for name in args.dtype.split(","):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            paths = write(Path(folder), args.mib, getattr(torch, name))
            total = sum(file.stat().st_size for file in shards(paths))
            for cache in ("cold", "warm"):
                times: dict[str, list[float]] = {"read": [], "naive": [], "compare": []}
                for _ in range(args.rounds):
                    for way, found in times.items():
                        if cache == "cold":
                            drop(paths)
                        found.append(timed(way, paths, notes, name))
                medians = {way: statistics.median(found) for way, found in times.items()}
                for way, seconds in medians.items():
                    print(
                        f"| {name} | {cache} | {way} | {seconds:.2f} | {total / seconds / 1e9:.2f} "
                        f"| {seconds / medians['read']:.2f} | {seconds / medians['naive']:.2f} |"
                    )
    print(f"\n{args.mib} MiB a run, {torch.get_num_threads()} threads, {args.rounds} rounds; "
          + "; ".join(dict.fromkeys(notes)))  # fmt: skip


def timed(way: str, paths: tuple[Path, Path], notes: list[str], name: str) -> float:
    if way == "compare":
        result = compared(paths)
        notes[:] = [note for note in notes if not note.startswith(name)]
        notes.append(f"{name}: compare's peak RSS {result['peak_mib']:.0f} MiB (mapped file pages "
                     f"included), {result['anonymous_mib']:.0f} MiB of its own")  # fmt: skip
        return result["seconds"]
    ways: dict[str, Callable[[tuple[Path, Path]], None]] = {"read": read, "naive": naive}
    start = time.perf_counter()
    ways[way](paths)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
