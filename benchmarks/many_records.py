"""Runs of very many records: what each command takes, and how soon too large an archive is refused.

    python benchmarks/many_records.py [--records 500000] [--members 1000000] [--rounds 1]
    python benchmarks/many_records.py --open 100000 1000000 10000000 [--old CHECKOUT]

The run: 250 sites in as many decode steps as are needed, float32 tensors of 64 elements, no two
alike; the candidate is the same run again (nothing is measured: reading, checking and judging is
what takes the time), and one of which a tenth of the tensors are off by rounding. Each command is
a process of its own. Seconds of processor time, and on the clock.

``--open``: opening runs of so many records for the first time and again, and ``inspect`` of one and
of one of its sites: seconds of processor time and the peak of resident memory. These runs are made
without a model, and like the others hold no two tensors that are alike. ``--old``: by another
checkout of this project in turns; it opens those of at most a million records.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import xxhash

from divergence import MachineOptions
from divergence.recording.api import capture
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote, Sizes
from divergence.run.reader import Run
from divergence.run.writer import RunWriter
from tests.models.tiny import build

ROOT = Path(__file__).resolve().parents[1]
CACHE = tempfile.mkdtemp(prefix="divergence-cache-")
os.environ["XDG_CACHE_HOME"] = CACHE  # of the processes that are timed
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
NUM_SITES = 250
SIZE = 64
SHARD_RECORDS = 16_000
USED = """
import re, resource, sys
if sys.argv[1] == "open":
    from divergence.run.reader import Run
    Run.open(sys.argv[2])
else:
    from divergence.cli.main import app
    app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
peak = re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read()).group(1)
print(used.ru_utime + used.ru_stime, peak, file=sys.stderr)
"""


def write_runs(folder: Path, num_records: int) -> tuple[Path, Path, Path]:
    """Two equal runs, and one that differs from them by rounding in one of ten tensors."""
    model = build("llama", folder / "model")
    small = capture(
        str(model),
        out=folder / "small",
        prompts=["A bridge"],
        max_new_tokens=1,
        device="cpu",
        machine=MachineOptions(probe=False),
    )
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
                writer.put(
                    CapturedTensor(tensor),
                    pass_="free",
                    sample=0,
                    step=step,
                    site=f"model.layers.{site}:out",
                    order=site,
                )
        writer.close(complete=True)
    return paths


def write_quickly(path: Path, num_records: int) -> None:
    """A run of so many records, made by hand: see docs/dump-format.md."""
    (path / "tensors").mkdir(parents=True)
    blocks = {f"model.layers.{n}": {"kind": "Block", "role": "block"} for n in range(NUM_SITES)}
    manifest = {
        "schema_version": 4,
        "id": uuid.uuid4().hex,
        "tool_version": "by hand",
        "complete": True,
        "created": "2026-01-01T00:00:00+00:00",
        "sizes": {"num_records": num_records},
        "model": {
            "source": "none",
            "model_class": "None",
            "task": "causal-lm",
            "dtype": "float32",
            "config_digest": "",
            "num_parameters": 0,
            "digest": "",
        },
        "tokens": {"samples": [{"prompt_ids": [1, 2, 3]}], "groups": [[0]]},
        "settings": {
            "deterministic": False,
            "seed": 0,
            "device": "cpu",
            "max_new_tokens": 0,
            "batch": False,
        },
        "environment": {
            "label": "",
            "platform": "",
            "python": "",
            "device_type": "cpu",
            "device_name": "",
            "cpu": "",
            "cpu_capability": "",
            "num_threads": 1,
            "versions": {},
        },
        "plan": {"passes": ["free"], "sites": ["blocks"], "modules": blocks},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    random = np.random.default_rng(0)
    with open(path / "records.jsonl", "w", encoding="ascii") as lines:
        for number, first in enumerate(range(0, num_records, SHARD_RECORDS)):
            num = min(SHARD_RECORDS, num_records - first)
            shard = f"tensors/r00000-{number:06d}.safetensors"
            keys = _write_shard(path / shard, random.standard_normal((num, SIZE), dtype="f4"))
            lines.writelines(
                f'{{"pass":"free","sample":0,"step":{row // NUM_SITES},'
                f'"site":"model.layers.{row % NUM_SITES}:out","order":{row % NUM_SITES},'
                f'"shape":[1,1,{SIZE}],"dtype":"float32","summary":{summary},'
                f'"place":{{"shard":"{shard}","key":"{key}"}},"xxh3":"{key}"}}\n'
                for row, (key, summary) in enumerate(keys, first)
            )


def _write_shard(path: Path, values: np.ndarray) -> list[tuple[str, str]]:
    """Key and summary of each row."""
    rows = [xxhash.xxh3_128_hexdigest(row) for row in values]
    said, width = f'{{"dtype":"F32","shape":[1,1,{SIZE}],"data_offsets":', values[0].nbytes
    entries = [f'"{key}":{said}[{n * width},{(n + 1) * width}]}}' for n, key in enumerate(rows)]
    text = ('{"__metadata__":{"format":"pt"},' + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())
    wide = values.astype("f8")
    columns = (wide.min(1), wide.max(1), wide.mean(1), np.sqrt((wide**2).mean(1)), abs(wide).max(1))
    names = ("min", "max", "mean", "rms", "absmax")
    counts = dict.fromkeys(("num_nan", "num_posinf", "num_neginf", "num_zero"), 0)
    return [
        (key, json.dumps(dict(zip(names, numbers, strict=True)) | counts, separators=(",", ":")))
        for key, *numbers in zip(rows, *(column.tolist() for column in columns), strict=True)
    ]


def used(checkout: Path, *words: str | Path) -> tuple[float, float]:
    """(processor seconds, peak MB) of one command by the code of ``checkout``."""
    done = subprocess.run(
        [sys.executable, "-c", USED, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    if done.returncode:
        raise SystemExit(f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    seconds, kilobytes = done.stderr.split()[-2:]
    return float(seconds), float(kilobytes) / 1024


def compare_opening(sizes: Sequence[int], folder: Path, old: Path | None, rounds: int) -> None:
    """Prints the table of ``--open``."""
    print("| records | | s | MB |" + (" s before | MB before |" if old else ""))
    print("|---|---|---|---|" + ("---|---|" if old else ""))
    for size in sizes:
        run = folder / f"run-{size}"
        if not run.exists():
            write_quickly(run, size)
        commands = {
            "open for the first time": ("open", run),
            "open": ("open", run),
            "`inspect RUN`": ("inspect", run),
            "`inspect RUN --site …`": ("inspect", run, "--site", "model.layers.3:out"),
        }
        checkouts = [ROOT] + ([old] if old and size <= 1_000_000 else [])
        for name, words in commands.items():
            found = []
            for _ in range(rounds):
                if "first" in name:
                    shutil.rmtree(CACHE, ignore_errors=True)
                found.append([used(checkout, *words) for checkout in checkouts])
            cells = [
                f"{min(seconds for seconds, _ in one):.1f} | {max(peak for _, peak in one):,.0f}"
                for one in zip(*found, strict=True)
            ]
            print(f"| {size:,} | {name} | {' | '.join(cells)} |", flush=True)


def timed(*words: str | Path, codes: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """(processor seconds, seconds) of one command; ``codes``: what it may end with."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "divergence", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
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
    parser.add_argument("--open", type=int, nargs="+", help="open runs of so many records instead")
    parser.add_argument("--old", type=Path, help="another checkout, measured in turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if options.open:
            compare_opening(options.open, folder, options.old, options.rounds)
            return
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
