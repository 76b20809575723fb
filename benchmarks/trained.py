"""Health and planted faults on a trained model, SmolLM2-135M, with 8 chat prompts or 64 steps.

    make bench-trained                       # or:
    python benchmarks/trained.py --out trials.jsonl [--seconds 1800] [--share 1/4] [--dtypes ...]
    python benchmarks/trained.py --tables trials.jsonl

Machine A runs one set of CPU kernels with eager attention, machine B another with sdpa, each in a
process of its own; the truth is float64. Two shapes of runs: ``prompts``, eight chat prompts and
four tokens, and ``steps``, one prompt and 64 tokens. Faults: in one prompt of eight or one step of
64, of one head, channel, projection, norm or rotary table, of weights, of code, on the candidate's
side and on the reference's by turns. The size of a fault is counted in floors, at its block's
output, in the prompt or step where it is largest. Health: pairs of machines that differ in their
CPU switches and attention kernel.

Every trial is a line of --out; those that are there are not done again, so that it can be stopped
and gone on with. Runs that trials share are kept in --work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._machines import SWITCHES, Machine
from benchmarks._trained import CHAT_PROMPTS, checkpoint
from benchmarks._trials import upper
from divergence.comparison.api import compare
from divergence.run.reader import Run

BLOCKS = (1, 10, 19, 28)
SHAPES = {
    "prompts": {"prompts": CHAT_PROMPTS, "max_new_tokens": 4},
    "steps": {"prompts": CHAT_PROMPTS[6:7], "max_new_tokens": 64},  # its answer is long enough
}
FAULTS: dict[str, tuple[str, str]] = {
    # name: (shape, a fault of _faults or SITE=FAULT with the block's number in place of {})
    "block-in-one-prompt": ("prompts", "model.layers.{}:out=scale:1.05@sample=5"),
    "mlp-in-one-prompt": ("prompts", "model.layers.{}.mlp.down_proj:out=scale:1.2@sample=2"),
    "head-in-one-prompt": ("prompts", "model.layers.{}.self_attn.o_proj:in=zero:64-127@sample=6"),
    "head": ("prompts", "model.layers.{}.self_attn.o_proj:in=zero:128-191"),
    "channel": ("prompts", "model.layers.{}.mlp.down_proj:out=channel:77:3"),
    "projection": ("prompts", "model.layers.{}.self_attn.o_proj:out=scale:1.1"),
    "noise": ("prompts", "model.layers.{}.mlp:out=noise:0.1"),
    "norm-eps": ("prompts", "norm-eps"),
    "weight-int8": ("prompts", "weight-int8"),
    "weight-tile": ("prompts", "weight-tile"),
    "attention-scale": ("prompts", "attention-scale"),
    "rope-base": ("prompts", "rope-base"),
    "code-rope-shift": ("prompts", "rope-shift"),
    "code-mask": ("prompts", "mask-short"),
    "code-activation": ("prompts", "activation"),
    "code-gate-up": ("prompts", "gate-up"),
    "block-in-one-step": ("steps", "model.layers.{}:out=scale:1.05@step=41"),
    "mlp-in-one-step": ("steps", "model.layers.{}.mlp.down_proj:out=scale:1.3@step=17"),
    "kv-stale": ("steps", "kv-stale"),
    "kv-fp8": ("steps", "kv-fp8"),
}


@dataclass(slots=True)
class Trained:
    """One trial. ``fault``: empty for health. ``size``: in floors, 0 for health."""

    key: str
    dtype: str
    shape: str
    fault: str
    block: int
    side: str
    size: float
    verdict: str
    confidence: str
    side_said: str | None
    onset: str | None
    exact: bool
    usage: float
    seconds: float

    @property
    def unit_right(self) -> bool | None:
        """Was it the prompt, or the decode step, that alone has the fault? None where all have, or
        nothing was named."""
        alone = re.search(r"@(sample|step)=(\d+)", FAULTS[self.fault][1] if self.fault else "")
        if alone is None or self.onset is None:
            return None
        return f" {alone[1]} {alone[2]} " in f"{self.onset} "


class Runs:
    """Runs of the two shapes and three dtypes, made once and kept in ``work``."""

    def __init__(self, work: Path) -> None:
        self.work, self.model = work, checkpoint()
        self.machines: dict[str, Machine] = {}

    def machine(self, name: str) -> Machine:
        if name not in self.machines:
            for other in list(self.machines):  # each holds a model: two at once are enough
                if len(self.machines) > 1:
                    self.machines.pop(other).close()
            self.machines[name] = Machine(name)
        return self.machines[name]

    def close(self) -> None:
        for machine in self.machines.values():
            machine.close()

    def reference(self, dtype: str, shape: str, machine: str = "native") -> Path:
        out = self.work / f"{dtype}-{shape}-{machine}"
        if not _complete(out):
            self.machine(machine).run(
                "capture",
                model=self.model,
                out=out,
                dtype=dtype,
                chat=True,
                probe=False,
                **SHAPES[shape],
            )
        return out

    def truth(self, a: Path) -> Path:
        out = a.with_name(a.name + "-truth")
        if not _complete(out):
            self.machine("native").run("truth", run=a, out=out)
        return out

    def like(self, a: Path, machine: str, attention: str, out: Path, **values: Any) -> Path:
        special = {} if attention == "eager" else {"attn_implementation": attention}
        self.machine(machine).run("capture", like=a, out=out, probe=False, **special, **values)
        return out

    def healthy(self, a: Path, machine: str, attention: str) -> Path:
        out = a.with_name(f"{a.name}-like-{machine}-{attention}")
        return out if _complete(out) else self.like(a, machine, attention, out)


def _complete(path: Path) -> bool:
    return path.is_dir() and Run.open(path).manifest.complete


def planned(dtypes: list[str], pairs: int, seed: int) -> Iterator[tuple[str, str, str, Any]]:
    """(key, dtype, shape, what) of every trial, in a fixed order that alternates dtypes."""
    names = [name for name in SWITCHES if name != "threads-2"] + ["threads-2"]
    every = [
        (first, other, kind, shape)
        for first in ("native", "old")
        for other in names
        for kind in ("eager", "sdpa")
        for shape in SHAPES
        if (first, "eager") != (other, kind)
    ]
    random.Random(f"health-{seed}").shuffle(every)
    for pair, dtype in itertools.product(every[:pairs], dtypes):
        yield f"health {dtype} {' '.join(pair)}", dtype, pair[3], pair
    cells = list(itertools.product(FAULTS, BLOCKS))
    random.Random(f"faults-{seed}").shuffle(cells)
    for number, (fault, block) in enumerate(cells):
        for turn, dtype in enumerate(dtypes):
            side = ("candidate", "reference")[(number + turn) % 2]
            shape = FAULTS[fault][0]
            yield f"fault {dtype} {fault} {block} {side}", dtype, shape, (fault, block, side)


def health(runs: Runs, key: str, dtype: str, pair: tuple[str, str, str, str]) -> Trained:
    first, other, kind, shape = pair
    began = time.perf_counter()
    a = runs.reference(dtype, shape, first)
    report = compare(a, runs.healthy(a, other, kind), truth=runs.truth(a))
    return _trial(report, key, dtype, shape, "", -1, "", 0.0, began)


def fault(runs: Runs, key: str, dtype: str, shape: str, what: tuple[str, int, str]) -> Trained:
    """The fault is captured like the healthy reference, whichever side it is on, so that all
    three runs are anchored to the same inputs."""
    name, block, side = what
    began = time.perf_counter()
    a = runs.reference(dtype, shape)
    truth, plan = runs.truth(a), FAULTS[name][1]
    values: dict[str, Any] = {"plants": [plan.format(block)]}
    if (
        "=" not in plan
    ):  # the truth is the healthy code's: it would be refused for another reference
        is_code = name.startswith("code-") and side == "candidate"
        values = {"fault": (plan, block, 1.0), "is_code": is_code}
    machine, attention = ("old", "sdpa") if side == "candidate" else ("native", "eager")
    out = runs.work / "planted"
    bad = runs.like(a, machine, attention, out, **values)
    healthy = runs.healthy(a, "old", "sdpa")
    size = size_at(Run.open(bad), Run.open(a), Run.open(truth), f"model.layers.{block}:out")
    pair = (a, bad) if side == "candidate" else (bad, healthy)
    report = compare(*pair, truth=truth)
    trial = _trial(report, key, dtype, shape, name, block, side, size, began)
    shutil.rmtree(out, ignore_errors=True)
    return trial


def size_at(bad: Run, a: Run, truth: Run, site: str) -> float:
    """The planted change in floors at the block's output, in the forward where it is largest. The
    floor: the reference's own distance from the truth there."""
    best = 0.0
    for record in truth.at_site(site):
        if record.pass_ != "anchored":
            continue
        at = (record.sample, record.step, site)
        right = truth.read(record)
        norm = right.norm(dim=-1).clamp_min(1e-300)
        seen, floor = (
            float(
                ((run.read(run.find((pass_, *at))).double() - right).norm(dim=-1) / norm)
                .square()
                .mean()
            )
            for run, pass_ in ((bad, "anchored"), (a, "free"))
        )
        size = math.sqrt(max(0.0, seen - floor) / max(floor, 1e-300))
        best = max(best, size)
    return best


def _trial(
    report: Any,
    key: str,
    dtype: str,
    shape: str,
    name: str,
    block: int,
    side: str,
    size: float,
    began: float,
) -> Trained:
    verdict, onset = report.verdict, report.verdict.onset
    return Trained(
        key=key,
        dtype=dtype,
        shape=shape,
        fault=name,
        block=block,
        side=side,
        size=size,
        verdict=verdict.kind,
        confidence=verdict.confidence,
        side_said=verdict.side,
        onset=None if onset is None else f"{onset.site} sample {onset.sample} step {onset.step}",
        exact=onset is not None
        and onset.block == f"model.layers.{block}"
        and verdict.kind in ("localized", "nonfinite"),
        usage=max((s.limit_usage for s in report.sites if s.limit_usage is not None), default=0.0),
        seconds=time.perf_counter() - began,
    )


def tables(trials: list[Trained]) -> None:
    """Alarms among healthy pairs; found, block and side of faults, by size."""
    for dtype in sorted({trial.dtype for trial in trials}):
        mine = [trial for trial in trials if trial.dtype == dtype]
        pairs = [trial for trial in mine if not trial.fault]
        alarms = [t for t in pairs if t.verdict not in ("identical", "within_floor")]
        print(f"\n{dtype}\n")
        if pairs:
            print(
                f"- {len(alarms)} alarms in {len(pairs)} healthy pairs (rate < "
                f"{100 * upper(len(alarms), len(pairs)):.1f}%); largest share of a limit "
                f"{max(t.usage for t in pairs):.2f}"
            )
        for trial in alarms:
            print(f"  - ALARM {trial.key}: {trial.verdict} {trial.confidence} {trial.onset}")
        planted = [t for t in mine if t.fault]
        large = [t for t in planted if t.size > 3]
        for title, group in (("above 3 floors", large), ("all", planted)):
            named = [t for t in group if t.side_said in ("candidate", "reference")]
            units = [t for t in group if t.unit_right is not None]
            print(
                f"- faults, {title}: {len(group)}; exact block {sum(t.exact for t in group)}; "
                f"side right {sum(t.side_said == t.side for t in named)} of {len(named)} that "
                f"name one; prompt or step right {sum(bool(t.unit_right) for t in units)} of "
                f"{len(units)}"
            )
        for trial in large:
            if not trial.exact or trial.side_said not in (trial.side, None, "both"):
                print(
                    f"  - {trial.fault} in block {trial.block} by the {trial.side}, "
                    f"{trial.size:.1f} floors: {trial.verdict} {trial.confidence} "
                    f"{trial.side_said} {trial.onset}"
                )


def read(file: Path | None) -> list[Trained]:
    if file is None or not file.exists():
        return []
    return [Trained(**json.loads(line)) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--pairs", type=int, default=20, help="healthy pairs a dtype")
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="of the faults: 1/4")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("health", "faults"))
    parser.add_argument("--out", type=Path, help="trials, one a line; gone on with where it exists")
    parser.add_argument("--work", type=Path, help="keep the runs that trials share here")
    parser.add_argument("--tables", action="store_true", help="print those of --out, run nothing")
    options = parser.parse_args()
    done = read(options.out)
    if options.tables:
        tables(done)
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    plan = list(planned(options.dtypes.split(","), options.pairs, options.seed))
    kinds = Counter(key.split()[0] for key, *_ in plan)
    wanted = [t for t in plan if t[0].startswith("health")]
    wanted += [t for t in plan if t[0].startswith("fault")][: round(options.share * kinds["fault"])]
    if options.only:
        wanted = [t for t in wanted if t[0].startswith(options.only.removesuffix("s"))]
    left = [t for t in wanted if t[0] not in {trial.key for trial in done}]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.work or Path(folder))
        for key, dtype, shape, what in left:
            if time.perf_counter() - start > options.seconds:
                break
            trial = (
                health(runs, key, dtype, what)
                if key.startswith("health")
                else fault(runs, key, dtype, shape, what)
            )
            done.append(trial)
            print(
                f"{key}: {trial.verdict} {trial.confidence} {trial.side_said} {trial.onset} "
                f"size {trial.size:.1f} {trial.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
        runs.close()
    tables(done)
    count = Counter("fault" if trial.fault else "health" for trial in done)
    print(
        f"\nshare that was run: {count['health']} of {kinds['health']} healthy pairs, "
        f"{count['fault']} of {kinds['fault']} faults; {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
