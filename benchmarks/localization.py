"""How well faults are found: detection, exact block and guilty side against the fault's size.

    python benchmarks/localization.py [--dtypes ...] [--architectures ...] [--share 1/4]
    python benchmarks/localization.py --health-only [--shapes usual,prompts,steps]
    python benchmarks/localization.py --out trials.jsonl --health-out health.jsonl --seconds 1800
    python benchmarks/localization.py --curve .cache/observations

Machine A runs one set of CPU kernels with eager attention, machine B another set with sdpa
(where the model has attention), each in its own process; the truth is float64. Every
implementation fault of benchmarks/_faults.py is planted in a block of the first, middle and last
third, in A as often as in B, at several sizes. The size of a fault is counted in floors: the
rms (over tokens) of what it changes at its block's output, over that of the healthy side's
rounding error there. Counted are the verdict's kind, its block, and its side.

Health: pairs of machines drawn from all, no fault: any verdict beyond within_floor is a
false alarm (benchmarks/_health.py).

With --out and --health-out every trial and every pair is a line of a file; those that are there
are not done again, so that an hour here and there adds up. What share was run is printed.

--curve prints, of recorded faults (benchmarks/observations.py), the share found at the exact block
by size, beside what a judge finds that knows the place and asks nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._faults import FAULTS, applicable
from benchmarks._health import PROMPTS, SHAPES, health
from benchmarks._machines import SWITCHES, Machine
from benchmarks._rivals import RULES, block_rows, first_bad
from benchmarks._trials import Trial, tables
from divergence.comparison.api import compare
from divergence.recording.engines.load import Loading, load_model
from divergence.run.reader import Run
from tests.models.tiny import build

NUM_BLOCKS = 6
PLACES = (0, 3, 5)
SIZES = (0.1, 0.5, 1.5, 4.0, 12.0, 40.0)
"""Sizes aimed at, in floors; the measured one decides the column."""
NEW_TOKENS = 4


class Bench:
    """One model on two machines."""

    def __init__(self, root: Path, architecture: str, dtype: str, a: Machine, b: Machine) -> None:
        self.root, self.a, self.b = root, a, b
        self.architecture, self.dtype = architecture, dtype
        self.model = build(architecture, root / "model", dtype=dtype, num_blocks=NUM_BLOCKS)
        self.module = load_model(Loading(str(self.model))).module
        self.other = {} if architecture == "mamba" else {"attn_implementation": "sdpa"}
        self.a.run(
            "capture", model=self.model, out=root / "a", prompts=PROMPTS, max_new_tokens=NEW_TOKENS
        )
        self._pair(root / "a", "healthy", None)
        run = Run.open(root / "a")
        self.blocks = [p for p, n in run.manifest.plan.modules.items() if n.role == "block"]

    def _pair(self, anchor: Path, name: str, fault: tuple | None, side: str = "candidate") -> Path:
        """Both machines' runs like ``anchor``, and the truth, under root/name."""
        where = self.root / name
        mine, other = (self.b, self.a) if side == "candidate" else (self.a, self.b)
        jobs = {self.a: "a", self.b: "b"}
        mine.ask(
            "capture",
            like=anchor,
            out=where / jobs[mine],
            escalate=True,
            fault=fault,
            **(self.other if mine is self.b else {}),
        )
        if anchor != self.root / "a" or name == "healthy":
            other.ask(
                "capture",
                like=anchor,
                out=where / jobs[other],
                escalate=True,
                **(self.other if other is self.b else {}),
            )
            other.wait()
            other.run("truth", run=anchor, out=where / "truth")
        mine.wait()
        return where

    def size_at(self, where: Path, healthy: Path, side: str, block: int, kind: str) -> float:
        """The planted change at its block's output in floors: prefill or decode, the larger."""
        truth = Run.open(healthy / "truth")
        bad, good = (
            (Run.open(where / "b"), Run.open(healthy / "a"))
            if side == "candidate"
            else (Run.open(where / "a"), Run.open(healthy / "b"))
        )
        site = f"{self.blocks[block]}:out"
        sums: dict[str, list[float]] = {"prefill": [0.0, 0.0], "decode": [0.0, 0.0]}
        for record in truth.at_site(site):
            if record.pass_ != "anchored":
                continue
            at = (record.sample, record.step, site)
            right = truth.read(record)
            # in float32 a fault of formula or data is seen as it is, not as it was rounded
            deep = bad.find(("escalated", *at))
            norm = right.norm(dim=-1).clamp_min(1e-300)

            def error(run: Run, record) -> float:
                return float(
                    ((run.read(record).double() - right).norm(dim=-1) / norm)  # noqa: B023
                    .square()
                    .sum()
                )

            phase = sums["decode" if record.step else "prefill"]
            floor = error(good, good.find(("anchored", *at)))
            seen = error(bad, bad.find(("anchored", *at)))
            exact = deep is not None and kind != "arithmetic"
            phase[0] += error(bad, deep) if exact else max(0.0, seen - floor)
            phase[1] += floor
        return max(math.sqrt(top / max(low, 1e-300)) for top, low in sums.values() if low)

    def trial(self, fault: str, block: int, side: str, strength: float) -> Trial:
        planted = (fault, block, strength)
        if side == "candidate":
            where = self._pair(self.root / "a", "planted", planted)
            healthy, a, b = self.root / "healthy", self.root / "healthy" / "a", where / "b"
        else:
            self.a.run(
                "capture",
                model=self.model,
                out=self.root / "faulty",
                prompts=PROMPTS,
                max_new_tokens=NEW_TOKENS,
                fault=planted,
            )
            where = healthy = self._pair(self.root / "faulty", "other", planted, "reference")
            a, b = where / "a", where / "b"
        size = self.size_at(where, healthy, side, block, FAULTS[fault].kind)
        report = compare(a, b, truth=healthy / "truth")
        verdict, onset = report.verdict, report.verdict.onset
        rivals = {}
        forwards = block_rows(Run.open(a), Run.open(b), Run.open(healthy / "truth"), self.blocks)
        for rule in RULES:
            said = first_bad(rule, forwards)
            rivals[rule] = (
                "missed" if said is None else "exact" if said == self.blocks[block] else "other"
            )
        return Trial(
            architecture=self.architecture,
            dtype=self.dtype,
            fault=fault,
            kind=FAULTS[fault].kind,
            block=block,
            side=side,
            strength=strength,
            size=size,
            verdict=verdict.kind,
            found=verdict.kind not in ("identical", "within_floor", "undetermined"),
            exact=onset is not None
            and onset.block == self.blocks[block]
            and verdict.kind in ("localized", "nonfinite"),
            side_said=verdict.side,
            by_pass=onset.pass_ if onset else None,
            confidence=verdict.confidence,
            rivals=rivals,
        )


def plan(bench: Bench, share: float, seed: int) -> Iterator[tuple[str, int, str, int]]:
    """(fault, block, side, number) in a fixed order; sides alternate within each fault."""
    choose = random.Random(f"{seed}-{bench.architecture}-{bench.dtype}")
    for number, (fault, block) in enumerate(itertools.product(FAULTS, PLACES)):
        if not applicable(bench.module, fault, block) or choose.random() > share:
            continue
        yield fault, block, ("candidate", "reference")[number % 2], number


Key = tuple[str, int, str, float]


def sweep(
    bench: Bench, share: float, seed: int, known: dict[Key, Trial]
) -> Iterator[tuple[Trial, bool]]:
    """(trial, is it new): each fault whole, then blended so that its size meets SIZES below."""

    def trial(fault: str, block: int, side: str, strength: float) -> tuple[Trial, bool]:
        found = known.get((fault, block, side, round(strength, 9)))
        if found is not None:
            return found, False
        return bench.trial(fault, block, side, strength), True

    for fault, block, side, number in plan(bench, share, seed):
        whole, new = trial(fault, block, side, 1.0)
        yield whole, new
        for place, aim in enumerate(SIZES):
            if aim < 0.7 * whole.size and math.isfinite(whole.size):
                turned = side if (place + number) % 2 else _turn(side)
                yield trial(fault, block, turned, aim / whole.size)


def _turn(side: str) -> str:
    return "reference" if side == "candidate" else "candidate"


def faults(root: Path, options: argparse.Namespace, until: float) -> None:
    """Plant what is planned and not stored yet; print the tables of all."""
    stored: list[Trial] = []
    if options.out and options.out.exists():
        stored = [Trial(**json.loads(line)) for line in options.out.read_text().splitlines()]
    a, b = Machine("native"), Machine("old")
    trials: list[Trial] = []
    stopped = False
    for architecture, dtype in itertools.product(
        options.architectures.split(","), options.dtypes.split(",")
    ):
        if stopped or time.perf_counter() > until:
            stopped = True
            break
        print(f"faults: {architecture} {dtype}", file=sys.stderr, flush=True)
        bench = Bench(root / f"{architecture}-{dtype}", architecture, dtype, a, b)
        known = {
            (t.fault, t.block, t.side, round(t.strength, 9)): t
            for t in stored
            if (t.architecture, t.dtype) == (architecture, dtype)
        }
        for trial, new in sweep(bench, options.share, options.seed, known):
            trials.append(trial)
            if new and options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
            if time.perf_counter() > until:
                stopped = True
                break
    a.close()
    b.close()
    tables(trials)
    print(
        f"\n{len(trials)} trials of a share of {options.share:g}"
        + (", stopped by --seconds before the end" if stopped else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--architectures", default="llama,gpt2,qwen3-moe")
    parser.add_argument("--health-architectures", default="llama,gpt2,gemma3,qwen3-moe,mamba")
    parser.add_argument("--machines", default=",".join(SWITCHES))
    parser.add_argument("--pairs", type=int, default=60, help="of machines, for each model")
    parser.add_argument("--share", type=float, default=1.0, help="of the planned faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health-only", action="store_true")
    parser.add_argument("--faults-only", action="store_true")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of the healthy runs")
    parser.add_argument("--out", type=Path, help="go on with the trials of this .jsonl file")
    parser.add_argument("--health-out", type=Path, help="the same for healthy pairs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after as many")
    parser.add_argument("--tables", type=Path, nargs="+", help="print those of stored trials")
    parser.add_argument("--curve", type=Path, help="print that of a store of observations")
    options = parser.parse_args()
    if options.curve:
        from benchmarks import observations

        observations.curve(observations.Store(options.curve))
        return
    if options.tables:
        lines = [line for file in options.tables for line in file.read_text().splitlines()]
        tables([Trial(**json.loads(line)) for line in lines])
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    dtypes = options.dtypes.split(",")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if not options.faults_only:
            health(
                root / "health",
                options.health_architectures.split(","),
                dtypes,
                [name for name in options.machines.split(",") if name in SWITCHES],
                options.pairs,
                options.shapes.split(","),
                options.health_out,
                start + options.seconds,
            )
        if not options.health_only:
            faults(root, options, start + options.seconds)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
