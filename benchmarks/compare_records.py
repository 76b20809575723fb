"""Pairs that ``compare`` takes a second, against the number of records and their size.

    python benchmarks/compare_records.py [--records 1000 10000 100000] [--sizes 576 ...]
                                         [--rounds 3] [--old CHECKOUT] [--keep FOLDER]
    python benchmarks/compare_records.py --runs A B TRUTH [--rounds 3] [--old CHECKOUT]

The runs: 30 blocks' inputs and outputs in as many decode steps as are needed, bfloat16, no two
tensors alike: the reference and the candidate are a float64 run rounded twice (by two noises of
half a unit), which is the truth. Each round compares in a process of its own, with and without the
truth, and by another checkout of this project in turns. The clock starts when everything is
imported; opening the runs and making the report are in it. A second table has the seconds, and the
peak of resident memory. ``--runs``: that table of these runs, and
the seconds of the whole command, start-up included, which is what a user waits for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from divergence import MachineOptions
from divergence.recording.api import capture
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote, Sizes
from divergence.run.reader import Run
from divergence.run.writer import RunWriter
from tests.models.tiny import build

ROOT = Path(__file__).resolve().parents[1]
NUM_BLOCKS = 30
TIMED = """
import re, sys, time
from divergence import compare
from divergence.comparison import api
import divergence.analyses.blocks.find, divergence.analyses.ends.find
start = time.perf_counter()
report = compare(*sys.argv[1:3], truth=sys.argv[3] if len(sys.argv) > 3 else None)
spent = time.perf_counter() - start
peak = re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read()).group(1)
print(spent, len(report.sites), int(peak) / 1024)
"""


def write_runs(folder: Path, num_records: int, size: int) -> None:
    """A reference ``a``, a candidate ``b`` and their ``truth``, each of ``num_records``."""
    model = build("llama", folder / "model")
    small = capture(
        str(model),
        out=folder / "small",
        prompts=["A bridge"],
        max_new_tokens=1,
        device="cpu",
        machine=MachineOptions(probe=False),
    )
    writers = {}
    for name in ("a", "b", "truth"):
        manifest = Run.open(small.path).manifest
        manifest.sizes, manifest.id = Sizes(), uuid.uuid4().hex
        manifest.model.dtype = "bfloat16"
        manifest.plan.logits_site = None
        manifest.plan.modules = {
            f"model.layers.{n}": ModuleNote(kind="Block", role="block") for n in range(NUM_BLOCKS)
        }
        if name == "truth":
            manifest.settings.compute_dtype, manifest.like = "float64", writers["a"].manifest.id
        writers[name] = RunWriter(folder / name, manifest)
    make = torch.Generator().manual_seed(0)
    sites = [f"model.layers.{n}:{port}" for n in range(NUM_BLOCKS) for port in ("in", "out")]
    for step in range(-(-num_records // len(sites))):
        truth = torch.randn(len(sites), 1, 1, size, generator=make, dtype=torch.float64)
        noise = 2**-9 * torch.rand(2, *truth.shape, generator=make, dtype=torch.float64)
        values = {"truth": truth, "a": truth * (1 + noise[0]), "b": truth * (1 + noise[1])}
        for name, writer in writers.items():
            dtype = torch.float64 if name == "truth" else torch.bfloat16
            tensors = values[name].to(dtype)
            for order, site in enumerate(sites[: num_records - step * len(sites)]):
                writer.put(
                    CapturedTensor(tensors[order].clone()),
                    pass_="free",
                    sample=0,
                    step=step,
                    site=site,
                    order=order,
                )
    for writer in writers.values():
        writer.close(complete=True)


def measured(checkout: Path, *runs: Path) -> tuple[float, int, float]:
    """One comparison by the code of ``checkout``: its seconds, its pairs, and the peak in MB."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED, *(str(run.resolve()) for run in runs)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    spent, pairs, peak = done.stdout.split()
    return float(spent), int(pairs), float(peak)


def command_seconds(*runs: Path) -> float:
    """Of ``divergence compare A B``, with the third run as ``--truth``."""
    words = [str(run.resolve()) for run in runs[:2]]
    words += [f"--truth={run.resolve()}" for run in runs[2:]]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "divergence", "compare", *words, "--quiet"],
        stdout=subprocess.DEVNULL,
        check=True,
        cwd=ROOT,
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--sizes", type=int, nargs="+", default=[576])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--old", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--keep", type=Path, help="make the runs there, or take those that are")
    parser.add_argument("--runs", type=Path, nargs=3, metavar=("A", "B", "TRUTH"))
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.old} if options.old else {})
    names = [f"{name}{more}" for more in ("", ", truth") for name in checkouts]
    costs: list[str] = []

    def medians(what: str, runs: tuple[Path, Path, Path]) -> list[float]:
        """Pairs a second of each name; notes a row of ``costs``."""
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                found[name].append(measured(checkout, *runs[:2]))
                found[f"{name}, truth"].append(measured(checkout, *runs))
        columns = [list(map(statistics.median, zip(*found[name], strict=True))) for name in names]
        shown = " | ".join(f"{spent:.2f} | {peak:,.0f}" for spent, _, peak in columns)
        costs.append(f"| {what} | {shown} |")
        return [pairs / spent for spent, pairs, _ in columns]

    if options.runs:
        medians("these", tuple(options.runs))
    else:
        print(f"| records | size | {' | '.join(f'pairs/s {name}' for name in names)} |")
        print("|---|---|" + "---|" * len(names))
        with tempfile.TemporaryDirectory() as temporary:
            for num_records in options.records:
                for size in options.sizes:
                    folder = (options.keep or Path(temporary)) / f"{num_records}-{size}"
                    if not (folder / "truth").exists():
                        write_runs(folder, num_records, size)
                    rates = medians(
                        f"{num_records:,} of {size}", (folder / "a", folder / "b", folder / "truth")
                    )
                    shown = " | ".join(f"{rate:,.0f}" for rate in rates)
                    print(f"| {num_records:,} | {size} | {shown} |", flush=True)
    print(f"\n| runs | {' | '.join(f's {name} | MB {name}' for name in names)} |")
    print("|---|" + "---|---|" * len(names))
    print(*costs, sep="\n")
    if options.runs:
        pairs = [
            (command_seconds(*options.runs[:2]), command_seconds(*options.runs))
            for _ in range(options.rounds)
        ]
        without, with_truth = map(statistics.median, zip(*pairs, strict=True))
        print(
            f"\nthe command: {without:.2f} s, with the truth {with_truth:.2f} s, "
            f"{with_truth / without:.2f} x"
        )


if __name__ == "__main__":
    main()
