"""Recorded measurements and observations of every benchmark pair, for any change of the judge.

    python benchmarks/observations.py record STORE [--seconds 3600] [--kinds ...] [--cases FOLDER]
    python benchmarks/observations.py replay STORE [--kinds ...]
    python benchmarks/observations.py figures STORE

``record`` plants and captures what the benchmarks plant and capture (health.jsonl,
localization.jsonl, operator_localization.jsonl, trained.jsonl name the pairs; trust.py has its
cases; new are models with massive activations, Mamba with a whole pass and the trained model over
20 prompts), compares, and keeps for each pair

    STORE/answers/KIND.jsonl     what was planted, the benchmark's own row as it is now, and what
                                 was answered: with the truth that the benchmark gives, with the
                                 one that the run carries, and without any
    STORE/recordings/KIND/       what today's judge takes as input (benchmarks/_recorded.py)
    STORE/columns/KIND/          what another judge will want beside it (benchmarks/_observed.py)

It goes on where it stopped. Kinds take turns by the time that each has had, and the pairs of a kind
come shuffled, so that a part is a fair sample of all. ``replay`` asks today's judge again, of what
was kept alone, and prints which answers are not equal, and why. ``figures`` holds the stored rows
(of older code) against the answers of now.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import lzma
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "200")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec
import numpy as np
import torch

from benchmarks import _massive
from benchmarks._machines import SWITCHES, Machine
from benchmarks._observed import Observed
from benchmarks._recorded import Answer, Recorder, answer_of, load, save
from divergence.comparison import api
from divergence.comparison.result import Report
from divergence.errors import DivergenceError
from divergence.numerics.floor import THRESHOLDS
from divergence.run.reader import Run

BENCHMARKS = ROOT / "benchmarks"
SHARES = {
    "localization": 3.0, "health": 3.0, "operators": 1.5, "massive": 1.0, "mamba-whole": 0.3,
    "trust": 0.6, "trained": 1.0, "trained-prompts": 0.6, "cases": 0.5,
}  # fmt: skip
"""Of the time, by kind."""
QUIET = ("identical", "within_floor")


# ── the store ───────────────────────────────────────────────────────────────────────────────────


class Line(msgspec.Struct):
    """One pair: a line of answers/KIND.jsonl. ``answers``: by truth (given, carried, none).
    ``carries``: the reference's own passes of the truth and the floor, where it was asked so."""

    kind: str
    key: str
    planted: dict[str, Any]
    row: dict[str, Any] | None
    answers: dict[str, Answer]
    why_not: dict[str, str]
    bits: int
    seconds: float
    num_bytes: int
    carries: str = ""


class Store:
    """A folder of recorded pairs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, kind: str | None = None) -> list[Line]:
        files = sorted(self.path.glob(f"answers/{kind or '*'}.jsonl"))
        decode = msgspec.json.Decoder(Line).decode
        return [decode(line) for file in files for line in file.read_bytes().splitlines()]

    def file(self, what: str, kind: str, key: str) -> Path:
        name = re.sub(r"[^\w.-]+", "-", key)[:80]
        digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
        return self.path / what / kind / f"{name}-{digest}.xz"

    def add(self, line: Line) -> None:
        file = self.path / "answers" / f"{line.kind}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.write(msgspec.json.encode(line) + b"\n")


def write_columns(path: Path, table: dict[str, np.ndarray]) -> int:
    """Column by column, high and low bytes apart. Gives its size."""
    heads, parts = [], []
    for name, column in table.items():
        if column.dtype == object:
            data, form = "\n".join(column).encode(), "text"
        else:
            planes = column.view(np.uint8).reshape(-1, column.itemsize).T
            data, form = planes.tobytes(), column.dtype.str
        heads.append((name, form, len(data)))
        parts.append(data)
    head = msgspec.json.encode(heads)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(b"\n".join([head, b"".join(parts)]), preset=4)
    path.write_bytes(packed)
    return len(packed)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The tables that ``write_columns`` wrote."""
    head, _, data = lzma.decompress(path.read_bytes()).partition(b"\n")
    table, start = {}, 0
    for name, form, size in json.loads(head):
        part = data[start : start + size]
        start += size
        if form == "text":
            table[name] = np.array(part.decode().split("\n"), dtype=object)
            continue
        width = np.dtype(form).itemsize
        planes = np.frombuffer(part, np.uint8).reshape(width, -1)
        table[name] = np.ascontiguousarray(planes.T).view(form).ravel()
    return table


# ── taking what is compared ─────────────────────────────────────────────────────────────────────


_original = api.compare


class Taking:
    """Takes the comparisons that are made within it into the store, one recording for each pair of
    runs. Each is asked with the truth that its reference carries, and without any, too.

    ``anchor``: the run that both sides repeat, where the reference is such a repetition: it is the
    one that carries a truth, and that a user compares B with."""

    def __init__(self, store: Store, kind: str, key: str, planted: dict[str, Any],
                 anchor: Path | None = None) -> None:  # fmt: skip
        self.store, self.kind, self.key, self.planted = store, kind, key, planted
        self.anchor = anchor
        self._pairs: dict[Any, tuple[Recorder, Observed, Any, Any, dict[str, Any]]] = {}
        self._refused: list[str] = []
        self._began = time.perf_counter()

    def compare(self, a: Any, b: Any = None, *, truth: Any = None, **options: Any) -> Report:
        if b is None:
            return _original(a, truth=truth, **options)
        usual = {"floor": (), "layers": (), "name_map": None, "force": False, "device": "cpu",
                 "thresholds": THRESHOLDS}  # fmt: skip
        options = {name: value for name, value in options.items()
                   if name != "progress" and usual.get(name, ...) != value}  # fmt: skip
        first, second = Run.open(a), Run.open(b)
        key = (first.manifest.id, second.manifest.id, str(sorted(options)))
        if key not in self._pairs:
            names = {first.manifest.id: "a", second.manifest.id: "b"}
            self._pairs[key] = (Recorder(), Observed(names), first, second, options)
        recorder, observed = self._pairs[key][:2]
        asked = "carried" if truth is None else "given"
        if any(each.truth == asked for each in recorder.recording.asked):
            return _original(first, second, truth=truth, **options)
        try:
            if observed.num_pairs:
                return recorder.compare(asked, first, second, truth, ask=_original, **options)
            with observed.operators():
                return recorder.compare(asked, first, second, truth, observe=observed.observe,
                                        ask=_original, **options)  # fmt: skip
        except DivergenceError as error:
            self._refused.append(error.message)
            raise

    def finish(self, row: Any) -> None:
        """Writes what was taken; ``row``: the benchmark's own of the pair."""
        if is_dataclass(row):
            row = asdict(row)
        if not self._pairs:
            answers = {"given": Answer("refused", "", *(None,) * 6, 0.0, (), text)
                       for text in self._refused[-1:]}  # fmt: skip
            self._write(self.key, row, answers, {}, 0, 0)
        for number, (recorder, observed, a, b, options) in enumerate(self._pairs.values()):
            asked = recorder.recording.asked
            user = Run.open(self.anchor) if self.anchor is not None else a
            carries = " ".join({"truth", "truth_free", "floor"} & set(user.manifest.plan.passes))
            if asked and not options:
                for truth, reference in (("carried", user), ("none", a)):
                    if not any(each.truth == truth for each in asked):
                        with contextlib.suppress(DivergenceError):
                            recorder.compare(truth, reference, b, ask=_original)
            key = self.key if number == 0 else f"{self.key} #{number}"
            num_bytes, bits = 0, 0
            if asked:
                file = self.store.file("recordings", self.kind, key)
                bits = save(file, recorder.recording).bits
                num_bytes = file.stat().st_size
                num_bytes += write_columns(self.store.file("columns", self.kind, key),
                                           observed.table())  # fmt: skip
            self._write(key, row if number == 0 else None,
                        {each.truth: each.answer for each in asked},
                        {each.truth: each.why_not for each in asked if each.why_not}, bits,
                        num_bytes, carries)  # fmt: skip

    def _write(self, key: str, row: Any, answers: dict[str, Answer], why_not: dict[str, str],
               bits: int, num_bytes: int, carries: str = "") -> None:  # fmt: skip
        now = time.perf_counter()
        self.store.add(Line(self.kind, key, self.planted, row, answers, why_not, bits,
                            round(now - self._began, 2), num_bytes, carries))  # fmt: skip
        self._began = now


_taking: Taking | None = None


@functools.wraps(_original)
def _compare(*args: Any, **options: Any) -> Report:
    """``compare``, into what is being taken; a comparison that another makes is its own affair."""
    global _taking
    taking, _taking = _taking, None
    try:
        return (_original if taking is None else taking.compare)(*args, **options)
    finally:
        _taking = taking


def install() -> None:
    """Programs that are imported get ``_compare`` for ``compare``, and those that come later."""
    for name, module in list(sys.modules.items()):
        own = name.startswith(("benchmarks._recorded", "benchmarks.observations", "__main__"))
        if not own and getattr(module, "compare", None) is _original:
            module.compare = _compare  # type: ignore[attr-defined]


def take(store: Store, kind: str, key: str, planted: dict[str, Any], run: Callable[[], Any],
         anchor: Path | None = None) -> None:  # fmt: skip
    """Runs a benchmark's pair and writes what it compared. One that cannot be made is told, and
    tried again the next time."""
    global _taking
    _taking = taking = Taking(store, kind, key, planted, anchor)
    try:
        row = run()
        _taking = None
        taking.finish(row)
    except Exception as error:
        print(f"{kind}: {key}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        _taking = None


# ── kinds of pairs: each goes on by one pair at a time ──────────────────────────────────────────


class Work:
    """What kinds share: machines, a folder for runs, and the store."""

    def __init__(self, store: Store, root: Path, cases: Path | None) -> None:
        self.store, self.root, self.cases = store, root, cases
        self._machines: dict[str, Machine] = {}

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
    return (f"{row['architecture']} {row['dtype']} {row['fault']} {row['block']} {row['side']} "
            f"{round(row['strength'], 9):.9g}")  # fmt: skip


def localization(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks.localization import Bench

    benches: dict[tuple[str, str], Bench] = {}
    for row in even(stored("localization.jsonl"), "architecture", "dtype"):
        key = trial_key(row)
        if key in done:
            continue
        model = row["architecture"], row["dtype"]
        if model not in benches:
            benches[model] = Bench(work.root / f"faults-{'-'.join(model)}", *model,
                                   work.machine("native"), work.machine("old"))  # fmt: skip
        bench = benches[model]
        planted = {name: row[name] for name in
                   ("architecture", "dtype", "fault", "kind", "block", "side", "strength")}  # fmt: skip
        planted["place"] = bench.blocks[row["block"]]
        take(work.store, "localization", key, planted,
             lambda b=bench, r=row: b.trial(r["fault"], r["block"], r["side"], r["strength"]),
             bench.root / ("a" if row["side"] == "candidate" else "faulty"))  # fmt: skip
        yield


def health(work: Work, done: set[str]) -> Generator[None]:
    from benchmarks._health import NUM_BLOCKS, SHAPES, judge_healthy
    from tests.models.tiny import build

    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in stored("health.jsonl"):
        if row["label"] not in done:
            first = row["label"].split()[3]
            groups[row["shape"], row["architecture"], row["dtype"], first].append(row)
    heads = even([{"group": group, "dtype": group[2], "shape": group[0], "model": group[1]}
                  for group in groups], "shape", "dtype", "model")  # fmt: skip
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

            def judged(row: dict[str, Any] = row, a: Path = a, b: Path = b, name: str = name,
                       special: dict[str, Any] = special, truth: Path = truth) -> dict[str, Any]:  # fmt: skip
                work.machine(name).run("capture", like=a, out=b, escalate=True, **special)
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
    from benchmarks.operator_localization import Bench, plan

    machines: Any = _ByName(work)
    benches: dict[Any, Bench] = {}
    blocks: dict[tuple[str, str], dict[tuple[str, str], tuple[Any, int]]] = {}
    for row in even(stored("operator_localization.jsonl"), "architecture", "dtype", "pair"):
        key = operator_key(row)
        if key in done:
            continue
        architecture, dtype = row["architecture"], row["dtype"]
        if (architecture, dtype) not in blocks:
            blocks[architecture, dtype] = {
                (fault.name, role): (pair, block)
                for pair, block, fault, role, _ in plan(dtype, architecture, 1.0, 0)
            }
        pair, block = blocks[architecture, dtype][row["fault"], row["role"]]
        assert "-".join(pair) == row["pair"], (pair, row["pair"])
        ties = FAULTS[row["fault"]].ties
        place = (architecture, dtype, pair, block, ties)
        if place not in benches:
            where = work.root / f"operators-{len(benches)}-{'-'.join(place[:2])}"
            benches[place] = Bench(where, architecture, dtype, pair, block, ties=ties,
                                   machines=machines)  # fmt: skip
        planted = {name: row[name] for name in
                   ("architecture", "dtype", "pair", "fault", "kind", "role", "side", "strength")}  # fmt: skip
        take(work.store, "operators", key, planted,
             lambda b=benches[place], r=row: b.trial(r["fault"], r["role"], r["side"], r["strength"]))  # fmt: skip
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

        def judged(where: Path = where, dtype: str = dtype, number: int = number,
                   first: str = first, second: str = second) -> None:  # fmt: skip
            kind = ("mamba", "mamba2")[number // 3 % 2]
            model = build(kind, where / "model", dtype=dtype, num_blocks=4, seed=number)
            a, b, truth = (where / name for name in ("a", "b", "truth"))
            work.machine(first).run("capture", model=model, out=a, prompts=PROMPTS,
                                    max_new_tokens=3, whole=True)  # fmt: skip
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
        take(work.store, "trust", case.name, {"planted": case.planted},
             functools.partial(program.tell, bench, case))  # fmt: skip
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
            planted |= {"fault": what[0], "block": what[1], "side": what[2],
                        "place": f"model.layers.{what[1]}"}  # fmt: skip
            run = functools.partial(program.fault, runs, key, dtype, shape, what)
        take(work.store, "trained", key, planted, run)
        yield


def _trained_runs(program: Any, work: Work) -> Any:
    folder = work.root / "trained"
    folder.mkdir(parents=True, exist_ok=True)
    runs = program.Runs(folder)
    runs.machine = work.machine
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
        words = [sys.executable, str(Path(__file__)), "case", str(work.store.path), str(program)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, check=False, timeout=900, stdout=subprocess.DEVNULL,
                           env=environment)  # fmt: skip
        work.store.add(Line("cases", program.stem, {"program": program.name}, None, {}, {}, 0,
                            round(time.perf_counter() - began, 2), 0))  # fmt: skip
        yield


def run_case(store: Store, program: Path) -> None:
    """Runs a program; what it and its children compare is written at once."""
    import runpy

    import divergence

    store = Store(store.path.resolve())
    counter = Path(tempfile.mkstemp()[1])

    def taken(*args: Any, **options: Any) -> Report:
        with counter.open("a") as file:
            file.write("x")
        key = f"{program.stem} {counter.stat().st_size}"
        taking = Taking(store, "cases", key, {"program": program.name})
        try:
            return taking.compare(*args, **options)
        finally:
            taking.finish(None)

    api.compare = divergence.compare = taken  # type: ignore[assignment]
    from benchmarks._trained import checkpoint

    sys.argv = [str(program), str(checkpoint("bfloat16"))]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        counter.unlink()


KINDS: dict[str, Callable[[Work, set[str]], Generator[None]]] = {
    "localization": localization, "health": health, "operators": operators, "massive": massive,
    "mamba-whole": mamba_whole, "trust": trust, "trained": trained,
    "trained-prompts": trained_prompts, "cases": cases,
}  # fmt: skip


def record(store: Store, kinds: list[str], seconds: float, most: int, cases: Path | None) -> None:
    """Goes on with all kinds, the one next that had the least of its share of the time."""
    start = time.perf_counter()
    install()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(store, Path(folder), cases)
        going, spent, count = {}, Counter[str](), Counter[str]()
        for kind in kinds:
            lines = store.lines(kind)
            going[kind] = KINDS[kind](work, {line.key for line in lines})
            spent[kind] = sum(line.seconds for line in lines)
        while going and time.perf_counter() - start < seconds:
            kind = min(going, key=lambda kind: spent[kind] / SHARES[kind])
            began, used = time.perf_counter(), work.processor_seconds()
            try:
                next(going[kind])
            except StopIteration:
                del going[kind]
                continue
            except Exception as error:  # what kinds share could not be made
                print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                del going[kind]
                continue
            took = time.perf_counter() - began
            spent[kind] += took
            count[kind] += 1
            used = work.processor_seconds() - used
            print(f"{kind} {count[kind]}: {took:.1f} s, {used:.1f} s of processor", file=sys.stderr,
                  flush=True)  # fmt: skip
            if count[kind] >= most:
                del going[kind]
        work.close()


# ── replay and figures ──────────────────────────────────────────────────────────────────────────


def replay(store: Store, kinds: list[str]) -> bool:
    """Asks today's judge of what was kept; a table, and every answer that is not equal."""
    start = time.perf_counter()
    unequal: list[str] = []
    print("| kind of pair | pairs | answers | equal | not replayed | not equal | s |")
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        began, count = time.perf_counter(), Counter[str]()
        for line in store.lines(kind):
            if not line.num_bytes:
                continue
            count["pairs"] += 1
            recording = load(store.file("recordings", kind, line.key))
            for asked in recording.asked:
                count["answers"] += 1
                if asked.why_not is not None:
                    count["not replayed"] += 1
                    unequal.append(f"{kind}: {line.key}, {asked.truth}: {asked.why_not}")
                    continue
                try:
                    said: tuple[object, ...] = recording.replay(asked).said
                except Exception as error:
                    said = (type(error).__name__, str(error)[:120])
                if said == asked.answer.said:
                    count["equal"] += 1
                else:
                    count["not equal"] += 1
                    unequal.append(f"{kind}: {line.key}, {asked.truth}: {asked.answer.said}, "
                                   f"replayed {said}")  # fmt: skip
        if count["pairs"]:
            cells = [count[name] for name in
                     ("pairs", "answers", "equal", "not replayed", "not equal")]  # fmt: skip
            print(f"| {kind} | {' | '.join(map(str, cells))} | {time.perf_counter() - began:.0f} |",
                  flush=True)  # fmt: skip
    print(f"\n{time.perf_counter() - start:.0f} s")
    for text in unequal:
        print(f"- {text}")
    return not unequal

WAYS = ("stored", "given", "carried", "none")
"""The stored row, of older code; now with the truth that the benchmark gives, with the one that the
reference carries, and without any."""


class Outcome(msgspec.Struct, frozen=True):
    """What one answer is worth. ``place``: exact, elsewhere, or None where none is named."""

    alarm: bool
    place: str | None = None
    side: str | None = None
    """right, wrong, or None where none is named."""


def outcomes(line: Line, row: dict[str, Any] | None) -> dict[str, Outcome]:
    """What each way's answer is worth. ``row``: the stored one."""
    planted = line.planted.get("side")
    worth = {}
    for way in WAYS[1:]:
        answer = line.answers.get(way)
        if answer is None or (way == "carried" and "truth" not in line.carries.split()):
            continue
        worth[way] = _outcome(answer.kind, answer.side, _is_exact(line, way), planted)
    if row is not None and planted is None:
        alarm = row["alarm"] if "alarm" in row else row["verdict"] not in QUIET
        worth["stored"] = Outcome(bool(alarm))
    elif row is not None:
        worth["stored"] = _outcome(row["verdict"], row["side_said"], row["exact"], planted)
    return worth


def _outcome(kind: str, side: str | None, exact: bool, planted: str | None) -> Outcome:
    alarm = kind not in QUIET
    if planted is None:
        return Outcome(alarm)
    named = kind in ("localized", "nonfinite")
    told = side if alarm and side in ("reference", "candidate", "both") else None
    return Outcome(
        alarm=alarm,
        place=None if not named else "exact" if exact else "elsewhere",
        side=None if told is None else "right" if told == planted else "wrong",
    )


def _is_exact(line: Line, way: str) -> bool:
    answer, row = line.answers[way], line.row or {}
    if answer.kind not in ("localized", "nonfinite"):
        return False
    if "place" in line.planted:
        return answer.block == line.planted["place"]
    given = line.answers.get("given")
    if given is not None and given.site == answer.site:  # one name for it on both sides
        return bool(row.get("exact"))
    return (answer.site or "").rpartition(":")[0] == row.get("site")


def figures(store: Store) -> None:
    """Older code against now, pair by pair: a table, and the pairs whose worth is another."""
    rows = {
        "localization": {trial_key(row): row for row in stored("localization.jsonl")},
        "health": {row["label"]: row for row in stored("health.jsonl")},
        "operators": {operator_key(row): row for row in stored("operator_localization.jsonl")},
        "trained": {row["key"]: row for row in stored("trained.jsonl")},
    }
    groups: dict[tuple[str, str, str], list[tuple[Line, dict[str, Outcome]]]] = defaultdict(list)
    for line in store.lines():
        if line.kind in ("trust", "cases") or not line.answers:
            continue
        worth = outcomes(line, rows.get(line.kind, {}).get(line.key))
        what = "faults" if line.planted.get("side") else "healthy"
        dtype = str(line.planted.get("dtype"))
        groups[line.kind, what, dtype].append((line, worth))
        groups[line.kind, what, "all"].append((line, worth))

    def counted(group: list[tuple[Line, dict[str, Outcome]]], field: str, value: Any) -> str:
        """For each way the count, "-" where that way was never asked."""
        cells = []
        for way in WAYS:
            asked = [worth[way] for _, worth in group if way in worth]
            number = sum(getattr(outcome, field) == value for outcome in asked)
            cells.append(f"{number}/{len(asked)}" if asked else "-")
        return " ".join(cells)

    print("Each cell: stored row (older code), now with the given truth, with the carried, without\n")
    print("| pairs | dtype | | alarm or found | exact place | elsewhere | right side | wrong side |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, what, dtype), group in sorted(groups.items()):
        cells = [counted(group, "alarm", True)]
        for field, value in (("place", "exact"), ("place", "elsewhere"), ("side", "right"),
                             ("side", "wrong")):  # fmt: skip
            cells.append(counted(group, field, value) if what == "faults" else "")
        print(f"| {kind}, {what} | {dtype} | {len(group)} | {' | '.join(cells)} |")
    tally = Counter(line.row["outcome"] for line in store.lines("trust") if line.row)
    print(f"\ntrust cases: {', '.join(f'{count} {name}' for name, count in tally.items()) or '-'}\n")
    for (kind, what, dtype), group in sorted(groups.items()):
        for line, worth in group if dtype != "all" else ():
            first = worth.get("stored")
            others = {way: outcome for way, outcome in worth.items() if way != "stored"}
            alarm = what == "healthy" and any(outcome.alarm for outcome in others.values())
            with_truth = [worth[way] for way in ("given", "carried") if way in worth]
            other = first is not None and any(outcome != first for outcome in with_truth)
            if alarm or other:
                said = "; ".join(f"{way} {_told(line.answers[way])}" for way in others)
                before = "" if first is None else f"stored {_worth(first)}; "
                print(f"- {kind} {line.key}: {before}{said}")


def _worth(outcome: Outcome) -> str:
    words = ["found" if outcome.alarm else "quiet", outcome.place, outcome.side]
    return " ".join(word if word not in ("right", "wrong") else f"{word} side"
                    for word in words if word)  # fmt: skip


def _told(answer: Answer) -> str:
    place = "" if answer.site is None else f" {answer.site} {answer.sample}/{answer.step}"
    return f"{answer.kind} {answer.confidence}{place} {answer.side or '-'}"



def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("record", "replay", "figures", "case"))
    parser.add_argument("store", type=Path)
    parser.add_argument("program", type=Path, nargs="?", help="of `case`")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no pair after this")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="pairs of each kind, now")
    parser.add_argument("--cases", type=Path, help="folder of programs that get a wrong answer")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store, kinds = Store(options.store), options.kinds.split(",")
    if options.what == "record":
        record(store, kinds, options.seconds, options.most, options.cases)
    elif options.what == "case":
        run_case(store, options.program)
    elif options.what == "replay":
        return 0 if replay(store, kinds) else 1
    elif options.what == "figures":
        figures(store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
