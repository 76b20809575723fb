"""Every benchmark's pairs, one at a time: each kind is a generator that goes on by one pair.

Pairs come in an order in which a part of them is a fair sample: shuffled, and models and dtypes by
turns. What is planted, and how, is the benchmarks' own; here is only which pair comes next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import _massive
from benchmarks._machines import SWITCHES, Machine
from benchmarks._taken import Line, Store, install, take
from divergence.comparison import api

__all__ = ["KINDS", "LATER", "SHARES", "Work", "operator_key", "stored", "trial_key"]

BENCHMARKS = Path(__file__).resolve().parent
SHARES = {
    "localization": 3.0,
    "health": 3.0,
    "operators": 1.5,
    "massive": 1.0,
    "mamba-whole": 0.3,
    "trust": 0.6,
    "trained": 1.0,
    "trained-prompts": 0.6,
    "cases": 0.5,
}
"""Of the time, by kind."""
LATER = {
    "operators": 20.0,
    "massive": 20.0,
    "mamba-whole": 40.0,
    "trust": 40.0,
    "trained": 200.0,
    "cases": 200.0,
    "trained-prompts": 400.0,
}
"""A kind begins when others have had so many seconds for each of their shares: faults and healthy
pairs come first."""


class Work:
    """What kinds share: machines, a folder for runs, and the store."""

    def __init__(
        self, store: Store, root: Path, cases: Path | None, accelerator: str | None = None
    ) -> None:
        self.store, self.root, self.cases = store, root, cases
        self._accelerator = accelerator
        self._machines: dict[str, Machine] = {}

    def second(self, name: str) -> str:
        """The machine that repeats a run: ``name``, or the accelerator in place of any."""
        return self._accelerator or name

    def machine(self, name: str) -> Machine:
        if name not in self._machines:
            self._machines[name] = Machine(name)
        return self._machines[name]

    def processor_seconds(self) -> float:
        """Of this process, its children that have ended, and the machines."""
        used = sum(os.times()[:4])
        for machine in self._machines.values():
            stat = Path(f"/proc/{machine._process.pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        return used

    def close(self) -> None:
        for machine in self._machines.values():
            machine.close()


def stored(name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark's file in the order of a fair sample."""
    lines = (BENCHMARKS / name).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    random.Random(name).shuffle(rows)
    return rows


def even(rows: list[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    """Rows of each combination of ``fields`` by turns."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[field] for field in fields)].append(row)
    turns = itertools.zip_longest(*groups.values())
    return [row for turn in turns for row in turn if row is not None]


def trial_key(row: dict[str, Any]) -> str:
    return (
        f"{row['architecture']} {row['dtype']} {row['fault']} {row['block']} {row['side']} "
        f"{round(row['strength'], 9):.9g}"
    )


def localization(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks.localization import Bench

    benches: dict[tuple[str, str], Bench] = {}
    for row in even(stored("localization.jsonl"), "architecture", "dtype"):
        key = trial_key(row)
        if key in done:
            continue
        model = row["architecture"], row["dtype"]
        if model not in benches:
            benches[model] = Bench(
                work.root / f"faults-{'-'.join(model)}",
                *model,
                work.machine("native"),
                work.machine(work.second("old")),
            )
        bench = benches[model]
        planted = {
            name: row[name]
            for name in ("architecture", "dtype", "fault", "kind", "block", "side", "strength")
        }
        planted["place"] = bench.blocks[row["block"]]
        take(
            work.store,
            "localization",
            key,
            planted,
            lambda b=bench, r=row: b.trial(r["fault"], r["block"], r["side"], r["strength"]),
            bench.root / ("a" if row["side"] == "candidate" else "faulty"),
        )
        yield


def health(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks._health import NUM_BLOCKS, SHAPES, judge_healthy
    from tests.models.tiny import build

    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in stored("health.jsonl"):
        if row["label"] not in done:
            first = row["label"].split()[3]
            groups[row["shape"], row["architecture"], row["dtype"], first].append(row)
    heads = even(
        [
            {"group": group, "dtype": group[2], "shape": group[0], "model": group[1]}
            for group in groups
        ],
        "shape",
        "dtype",
        "model",
    )
    for head in heads:
        shape, architecture, dtype, first = head["group"]
        where = work.root / "health" / "-".join(head["group"][:3])
        model = where / "model"
        if not model.exists():
            build(architecture, model, dtype=dtype, num_blocks=NUM_BLOCKS, seed=1)
        a, truth = where / first, where / f"{first}-truth"
        work.machine(first).run("capture", model=model, out=a, **SHAPES[shape])
        work.machine(first).run("truth", run=a, out=truth)
        for row in groups[head["group"]]:
            label = row["label"]
            _, _, _, _, name, attention = label.split()
            b = where / f"{first}-{name}-{attention}"
            special = {} if attention == "eager" else {"attn_implementation": attention}
            planted = {"shape": shape, "dtype": dtype, "architecture": architecture}

            def judged(
                row: dict[str, Any] = row,
                a: Path = a,
                b: Path = b,
                name: str = name,
                special: dict[str, Any] = special,
                truth: Path = truth,
            ) -> dict[str, Any]:
                work.machine(work.second(name)).run(
                    "capture", like=a, out=b, escalate=True, **special
                )
                head = {key: row[key] for key in ("shape", "dtype", "architecture", "label")}
                return head | judge_healthy(row["label"], a, b, truth)

            with contextlib.redirect_stdout(sys.stderr):
                take(work.store, "health", label, planted, judged)
            shutil.rmtree(b, ignore_errors=True)
            yield
        for path in (a, truth):
            shutil.rmtree(path, ignore_errors=True)


def operator_key(row: dict[str, Any]) -> str:
    names = ("architecture", "dtype", "pair", "fault", "role", "side")
    return " ".join(str(row[name]) for name in names) + f" {row['strength']:.9g}"


def operators(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks._operator_faults import FAULTS
    from benchmarks.operator_localization import PAIRS, Bench

    machines: Any = _ByName(work)
    pairs = {"-".join(pair): pair for pair in PAIRS}
    benches: dict[Any, Bench] = {}
    for row in even(stored("operator_localization.jsonl"), "architecture", "dtype", "pair"):
        key = operator_key(row)
        if key in done:
            continue
        architecture, dtype, pair = row["architecture"], row["dtype"], pairs[row["pair"]]
        number = re.search(r"\.(\d+)[./]", row["site"])
        assert number is not None, row["site"]
        block = int(number[1])
        ties = FAULTS[row["fault"]].ties
        place = (architecture, dtype, pair, block, ties)
        if place not in benches:
            where = work.root / f"operators-{len(benches)}-{'-'.join(place[:2])}"
            benches[place] = Bench(
                where, architecture, dtype, pair, block, ties=ties, machines=machines
            )
        planted = {
            name: row[name]
            for name in (
                "architecture",
                "dtype",
                "pair",
                "fault",
                "kind",
                "role",
                "side",
                "strength",
            )
        }
        take(
            work.store,
            "operators",
            key,
            planted,
            lambda b=benches[place], r=row: b.trial(
                r["fault"], r["role"], r["side"], r["strength"]
            ),
        )
        yield


class _ByName(dict):  # type: ignore[type-arg]
    """Machines by name, started when they are asked for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __missing__(self, name: str) -> Machine:
        return self._work.machine(name)


def massive(work: Work, done: set[str]) -> Generator[None]:
    for pair in _massive.planned():
        if pair.key in done:
            continue
        where = work.root / "massive"
        shutil.rmtree(where, ignore_errors=True)

        def judged(pair: _massive.Massive = pair, where: Path = where) -> None:
            other = work.second(pair.second)
            if other != pair.second:  # where no process splits its sums
                pair = replace(pair, second=other, way=pair.way.replace("split", "machine"))
            a, b, truth = _massive.make(pair, where, work.machine)
            api.compare(a, b, truth=truth)

        take(work.store, "massive", pair.key, asdict(pair), judged)
        yield


def mamba_whole(work: Work, done: set[str]) -> Generator[None]:
    """Healthy Mamba, whose whole pass holds observations of one token."""
    from benchmarks._health import PROMPTS
    from tests.models.tiny import build

    names = list(SWITCHES)
    for number in range(30):
        draw = random.Random(f"mamba-{number}")
        dtype = ("float32", "bfloat16", "float16")[number % 3]
        first, second = draw.sample(names, 2)
        key = f"{number} {dtype} {first} {second}"
        if key in done:
            continue
        where = work.root / "mamba"
        shutil.rmtree(where, ignore_errors=True)

        def judged(
            where: Path = where,
            dtype: str = dtype,
            number: int = number,
            first: str = first,
            second: str = second,
        ) -> None:
            kind = ("mamba", "mamba2")[number // 3 % 2]
            model = build(kind, where / "model", dtype=dtype, num_blocks=4, seed=number)
            a, b, truth = (where / name for name in ("a", "b", "truth"))
            work.machine(first).run(
                "capture", model=model, out=a, prompts=PROMPTS, max_new_tokens=3, whole=True
            )
            work.machine(first).run("truth", run=a, out=truth)
            work.machine(second).run("capture", like=a, out=b)
            api.compare(a, b, truth=truth)

        take(work.store, "mamba-whole", key, {"dtype": dtype}, judged)
        yield


def trust(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks import trust as program

    bench = program.Bench(work.root / "trust")
    cases = list(program.CASES)
    random.Random("trust").shuffle(cases)
    for case in cases:
        if case.name in done:
            continue
        install()  # modules that a case imports have their own name of it
        take(
            work.store,
            "trust",
            case.name,
            {"planted": case.planted},
            functools.partial(program.tell, bench, case),
        )
        yield


def trained(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks import trained as program

    rows = {row["key"] for row in stored("trained.jsonl")}
    plan = list(program.planned(["float32", "bfloat16", "float16"], 20, 0))
    random.Random("trained").shuffle(plan)
    plan.sort(key=lambda item: item[2] != "prompts")  # runs of 64 steps take several times as long
    runs = _trained_runs(program, work)
    for key, dtype, shape, what in plan:
        if key in done or key not in rows:
            continue
        planted = {"dtype": dtype, "shape": shape}
        if key.startswith("health"):
            run = functools.partial(program.health, runs, key, dtype, what)
        else:
            planted |= {
                "fault": what[0],
                "block": what[1],
                "side": what[2],
                "place": f"model.layers.{what[1]}",
            }
            run = functools.partial(program.fault, runs, key, dtype, shape, what)
        take(work.store, "trained", key, planted, run)
        yield


def _trained_runs(program: Any, work: Work) -> Any:
    folder = work.store.path / "work" / "trained"  # each takes a minute: another day needs them
    folder.mkdir(parents=True, exist_ok=True)
    runs = program.Runs(folder)
    runs.machine = lambda name: work.machine(name if name == "native" else work.second(name))
    return runs


def trained_prompts(work: Work, done: set[str]) -> Generator[None]:
    """The trained model over 20 prompts, healthy."""
    from benchmarks import trained as program
    from benchmarks._trained import CHAT_PROMPTS

    more = tuple(f"{text} Answer in {n + 2} words." for n, text in enumerate(CHAT_PROMPTS))
    last = tuple(f"Question {n}: {text}" for n, text in enumerate(CHAT_PROMPTS[:4]))
    program.SHAPES["twenty"] = {"prompts": (*CHAT_PROMPTS, *more, *last), "max_new_tokens": 3}
    runs = _trained_runs(program, work)
    for (other, attention), dtype in itertools.product(
        (("old", "sdpa"), ("aten-avx2", "eager"), ("onednn-sse41", "sdpa"), ("threads-2", "sdpa")),
        ("bfloat16", "float32", "float16"),
    ):
        key = f"{dtype} native {other} {attention}"
        if key in done:
            continue
        pair = "native", other, attention, "twenty"
        run = functools.partial(program.health, runs, key, dtype, pair)
        take(work.store, "trained-prompts", key, {"dtype": dtype}, run)
        yield


def cases(work: Work, done: set[str]) -> Generator[None]:
    """Programs that get a wrong answer, each in a process of its own."""
    for program in sorted(work.cases.glob("*.py")) if work.cases else ():
        if program.stem in done:
            continue
        began = time.perf_counter()
        words = [BENCHMARKS / "observations.py", "case", "--store", work.store.path, program]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, *map(str, words)],
                check=False,
                timeout=900,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
            )
        line = Line(
            kind="cases",
            key=program.stem,
            planted={"program": program.name},
            row=None,
            answers={},
            seconds=round(time.perf_counter() - began, 2),
        )
        work.store.add(line)
        yield


KINDS: dict[str, Callable[[Work, set[str]], Generator[None]]] = {
    "localization": localization,
    "health": health,
    "operators": operators,
    "massive": massive,
    "mamba-whole": mamba_whole,
    "trust": trust,
    "trained": trained,
    "trained-prompts": trained_prompts,
    "cases": cases,
}
