"""What it costs to keep a run in an archive or far away.

    python benchmarks/stores.py [--mib 512] [--rounds 5] [--latency-ms 30] [--mbps 80]

First, runs of this machine: the same tensors as a directory, a tar and a zip; the processor's time
(user and system) to open each and to read and check every byte, rounds interleaved, warm; and that
of packing beside copying the files.

Last, a store that is far away: kept in memory behind fsspec, where each request takes a latency and
each connection has a bandwidth, both stated and simulated by sleeping. What is counted (requests,
bytes) is exact; seconds are those of the simulated store.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

from divergence import compare, pack, unpack
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import (
    Environment,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Tokens,
)
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

TENSOR_MIB = 2


class Far(MemoryFileSystem):
    """A store with a latency and a bandwidth for each connection; counts requests and bytes."""

    protocol = "far"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way: one store a class
    latency_s, bytes_per_s = 0.0, 1e12
    num_requests = num_bytes = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("far://", "memory://"))

    def find(self, path: str, **options: Any) -> Any:
        return self._counted(super().find(path, **options), 0)

    def info(self, path: str, **options: Any) -> Any:
        return self._counted(super().info(path, **options), 0)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        data = super().cat_file(path, start=start, end=end, **options)
        return self._counted(data, len(data))

    def _counted(self, answer: Any, num_bytes: int) -> Any:
        Far.num_requests += 1
        Far.num_bytes += num_bytes
        time.sleep(Far.latency_s + num_bytes / Far.bytes_per_s)
        return answer


def write(place: Path, *, mib: int, odd: set[int]) -> None:
    """A run of tensors of TENSOR_MIB; those in ``odd`` are others than in the run without any."""
    generator = torch.Generator().manual_seed(0)
    manifest = Manifest(
        id=f"{len(odd):032x}",
        tool_version="benchmark",
        created="2026-01-01T00:00:00+00:00",
        model=ModelIdentity(
            source="none",
            model_class="None",
            task="causal-lm",
            dtype="bfloat16",
            config_digest="",
            num_parameters=0,
            digest="",
        ),
        tokens=Tokens(samples=[SampleTokens(prompt_ids=[1] * 256)], groups=[[0]]),
        settings=Settings(deterministic=True, seed=0, device="cpu", max_new_tokens=0, batch=False),
        environment=Environment(
            label="here",
            platform="",
            python="",
            device_type="cpu",
            device_name="",
            cpu="",
            cpu_capability="",
            num_threads=1,
            versions={},
        ),
        plan=Plan(passes=["free"], sites=["modules"]),
    )
    with RunWriter(place, manifest, force=True) as writer:
        for number in range(mib // TENSOR_MIB):
            x = torch.randn(1, 256, TENSOR_MIB << 11, generator=generator).to(torch.bfloat16)
            if number in odd:
                x = x * 1.01
            writer.put(
                CapturedTensor(x),
                pass_="free",
                sample=0,
                step=0,
                site=f"m.{number}:out",
                order=number,
            )


def seconds(action: Any, clock: Any = time.perf_counter) -> float:
    begin = clock()
    action()
    return clock() - begin


def cpu(action: Any) -> float:
    return seconds(action, time.process_time)


def near(folder: Path, *, mib: int, rounds: int) -> None:
    write(folder / "run", mib=mib, odd=set())
    ways = {"directory": folder / "run", "tar": folder / "run.tar", "zip": folder / "run.zip"}
    opened: dict[str, list[float]] = {name: [] for name in ways}
    read: dict[str, list[float]] = {name: [] for name in ways}
    packed: dict[str, list[float]] = {"copied": [], "tar": [], "zip": [], "unpacked": []}
    for _ in range(rounds):
        for kind in ("tar", "zip"):
            packed[kind].append(cpu(lambda k=kind: pack(folder / "run", out=ways[k], force=True)))
        packed["unpacked"].append(
            cpu(lambda: unpack(folder / "run.tar", out=folder / "out", force=True))
        )
        shutil.rmtree(folder / "copy", ignore_errors=True)
        packed["copied"].append(cpu(lambda: shutil.copytree(folder / "run", folder / "copy")))
        for name, place in ways.items():
            begin = time.process_time()
            run = Run.open(place)
            middle = time.process_time()
            assert run.verify() == []
            opened[name].append(middle - begin)
            read[name].append(time.process_time() - middle)
            run.close()
    print(f"{mib} MiB here, CPU time, medians of {rounds} interleaved rounds")
    for name in ways:
        rate = mib / 1024 / statistics.median(read[name])
        times = statistics.median(read[name]) / statistics.median(read["directory"])
        print(
            f"  {name:10} opened in {statistics.median(opened[name]) * 1e3:5.1f} ms, "
            f"read and checked at {rate:5.2f} GiB/s, {times:.2f} x the directory"
        )
    for name, found in packed.items():
        times = statistics.median(found) / statistics.median(packed["copied"])
        print(f"  {name:10} in {statistics.median(found):5.2f} s, {times:.2f} x copying the files")


def far(folder: Path, *, mib: int, latency_ms: float, mbps: float) -> None:
    num = mib // TENSOR_MIB
    cases = {
        "nothing": set(),
        "1 tensor": {num // 2},
        "a tenth": set(range(0, num, 10)),
        "everything": set(range(num)),
    }
    write(folder / "a", mib=mib, odd=set())
    forms = {"objects": "far://b/a", "tar": "far://b/a.tar", "zip": "far://b/a.zip"}
    fsspec.filesystem("far").put(str(folder / "a"), "/b/a", recursive=True)
    for kind in ("tar", "zip"):
        pack(folder / "a", out=forms[kind])
    whole = sum(path.stat().st_size for path in (folder / "a").rglob("*") if path.is_file())
    Far.latency_s, Far.bytes_per_s = latency_ms / 1e3, mbps * 1e6
    print(
        f"\n{whole / 1e6:.0f} MB far away, {num} tensors; {latency_ms:g} ms a request, "
        f"{mbps:g} MB/s a connection"
    )
    print("  differs     read as    requests      MB   share  seconds")
    for differs, odd in cases.items():
        write(folder / "b", mib=mib, odd=odd)
        for form, url in forms.items():
            Far.num_requests = Far.num_bytes = 0
            took = seconds(lambda u=url: compare(u, folder / "b"))
            print(
                f"  {differs:11} {form:9} {Far.num_requests:9} {Far.num_bytes / 1e6:7.1f} "
                f"{Far.num_bytes / whole:7.1%} {took:8.1f}"
            )
        here = seconds(lambda: compare(folder / "a", folder / "b"))
        print(f"  {differs:11} {'here':9} {'-':>9} {'-':>7} {'-':>7} {here:8.1f}")
    found = []
    for _ in range(3):
        run = Run.open(forms["objects"])
        found.append(seconds(run.verify))
        run.close()
    print(
        f"  every byte read and checked: {statistics.median(found):.1f} s; over one connection "
        f"{whole / Far.bytes_per_s:.1f} s alone"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--far-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=30)
    parser.add_argument("--mbps", type=float, default=80)
    given = parser.parse_args()
    fsspec.register_implementation("far", Far)
    with tempfile.TemporaryDirectory(prefix="divergence-bench-") as folder:
        near(Path(folder), mib=given.mib, rounds=given.rounds)
        far(Path(folder), mib=given.far_mib, latency_ms=given.latency_ms, mbps=given.mbps)


if __name__ == "__main__":
    main()
