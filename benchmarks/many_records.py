"""Runs of very many records: what each command takes, and how soon too large an archive is refused.

    python benchmarks/many_records.py [--records 500000] [--members 1000000] [--rounds 1]

The run: 250 sites in as many decode steps as are needed, float32 tensors of 64 elements, no two
alike; the candidate is the same run again (nothing is measured: reading, checking and judging is
what takes the time), and one of which a tenth of the tensors are off by rounding. Each command is
a process of its own. Seconds of processor time, and on the clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from divergence.recording.api import capture
from divergence.run.reader import Run
from divergence.run.schema.manifest import ModuleNote, Sizes
from divergence.run.writing.writer import CapturedTensor, RunWriter
from tests.models.tiny import build

NUM_SITES = 250
SIZE = 64


def write_runs(folder: Path, num_records: int) -> tuple[Path, Path, Path]:
    """Two equal runs, and one that differs from them by rounding in one of ten tensors."""
    model = build("llama", folder / "model")
    small = capture(str(model), out=folder / "small", prompts=["A bridge"], max_new_tokens=1,
                    device="cpu", probe=False)  # fmt: skip
    paths = folder / "a", folder / "b", folder / "c"
    generator = torch.Generator().manual_seed(0)
    for number, path in enumerate(paths):
        manifest = Run.open(small.path).manifest
        manifest.sizes, manifest.id = Sizes(), uuid.uuid4().hex
        manifest.plan.modules = {
            f"model.layers.{n}": ModuleNote(kind="Block", role="block") for n in range(NUM_SITES)
        }
        writer = RunWriter(path, manifest)
        generator.manual_seed(0)
        for step in range(-(-num_records // NUM_SITES)):
            values = torch.randn(NUM_SITES, 1, 1, SIZE, generator=generator)
            for site in range(min(NUM_SITES, num_records - step * NUM_SITES)):
                tensor = values[site].clone()
                if number == 2 and site % 10 == 0:
                    tensor[..., step % SIZE] *= 1 + 2.0**-23
                writer.put(CapturedTensor(tensor), pass_="free", sample=0, step=step,
                           site=f"model.layers.{site}:out", order=site)  # fmt: skip
        writer.close(complete=True)
    return paths


def timed(*words: str | Path, codes: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """(processor seconds, seconds) of one command; ``codes``: what it may end with."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "divergence", *map(str, words)], capture_output=True, text=True,
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    if done.returncode not in codes:
        raise SystemExit(f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - start


def write_archive(file: Path, num_members: int) -> None:
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(num_members):
            archive.fileobj.write(tarfile.TarInfo(f"run/tensors/{number}").tobuf())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--members", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="make the runs there, or take those that are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        a, b, c = folder / "a", folder / "b", folder / "c"
        start = time.perf_counter()
        if not c.exists():
            a, b, c = write_runs(folder, options.records)
            print(f"three runs of {options.records:,} records: {time.perf_counter() - start:.0f} s")
        large = folder / "large.tar"
        if not large.exists():
            write_archive(large, options.members)
        commands = {
            "inspect": (("inspect", a), (0,)),
            "check, equal": (("check", a, b), (0,)),
            "check, a tenth rounded otherwise": (("check", a, c), (0, 1)),
            "compare, a tenth rounded otherwise": (("compare", a, c, "--quiet"), (0,)),
            f"a tar of {options.members:,} members, refused": (("inspect", large), (2,)),
        }
        print(f"\n| {options.records:,} records | processor s | s |\n|---|---|---|")
        for name, (words, codes) in commands.items():
            found = [timed(*words, codes=codes) for _ in range(options.rounds)]
            used, taken = (statistics.median(one) for one in zip(*found, strict=True))
            print(f"| {name} | {used:.1f} | {taken:.1f} |", flush=True)


if __name__ == "__main__":
    main()
