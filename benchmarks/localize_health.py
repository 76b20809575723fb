"""Does the descent name an operator where nothing is wrong?

    python benchmarks/localize_health.py [--quick] [--seed 0] [--pairs 2] [--seconds 1500]
    python benchmarks/localize_health.py --trained --seconds 900

Healthy pairs: a small random model on this CPU under two sets of switches
(benchmarks/_machines.py), each in a process of its own, with eager or sdpa attention, with one
prompt, several or a batch, with and without an escalated pass. Each pair is played as the documents
tell users: capture on A, --like on C, truth on A, compare, and then ``localize --block`` into
*every* block, with the commands that it prints run on C. What feeds a block is the same on both
sides, so each descent is a trial of its own. ``--trained``: a few blocks of SmolLM2-135M in
bfloat16 instead.

Any operator that is named is a false alarm: it is printed with the share of its limit, and the
program exits with 1. So it does where nothing was descended into. Descents that stop before
operators are compared are counted, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._machines import SWITCHES  # noqa: E402
from benchmarks._trained import CHAT_PROMPTS, checkpoint  # noqa: E402
from benchmarks._trials import upper  # noqa: E402
from benchmarks.same_answers import Server  # noqa: E402
from divergence.recording.machine import cpu_name  # noqa: E402
from divergence.run.reader import Run  # noqa: E402
from tests.models.tiny import build  # noqa: E402

ARCHITECTURES = (
    "llama",
    "gpt2",
    "gemma3",
    "qwen3",
    "qwen3-moe",
    "mixtral",
    "mamba",
    "mamba2",
    "bert",
    "t5",
)
QUICK = ("llama", "gpt2", "qwen3-moe")
DTYPES = ("float32", "bfloat16", "float16")
EAGER_ALONE = frozenset({"mamba", "mamba2"})
NUM_BLOCKS = 3
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the numbers should stay the same on all "
    "machines, whatever the order of the additions may be.",
    "In 1687 it was said that every body attracts every other body; 2 + 2 = 4, and 7 x 8 = 56.",
    "A bridge is built twice:",
)
SHAPES: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "one": (PROMPTS[:1], 3, False),
    "several": (PROMPTS, 4, False),
    "short": (PROMPTS[2:], 8, False),
    "batch": (PROMPTS, 3, True),
}
"""Name to (prompts, new tokens, whether they run as one batch)."""
TRAINED_BLOCKS = (0, 1, 10, 19, 28, 29)
ROUNDS = 4
"""Of localize on A and its commands on C. Two are enough: one that asks, one that has all."""


@dataclass(slots=True, frozen=True)
class Pair:
    """One healthy pair. ``a``, ``c``: (machine, attention); ``number``: seeds its model."""

    architecture: str
    dtype: str
    number: int
    a: tuple[str, str]
    c: tuple[str, str]
    shape: str
    escalate: bool

    @property
    def machines(self) -> str:
        return f"{'/'.join(self.a)} and {'/'.join(self.c)}"


@dataclass(slots=True)
class Descent:
    """One block gone into. ``compared``: operators that were judged; ``usage``, ``usage_at``: the
    largest share of a limit, and whose; ``operator``: the one that was named, None where all is
    well; ``stopped``: why operators were not compared. ``kind``, ``standout``: what the pair's
    comparison said, and whether it alone would have gone into a block."""

    architecture: str
    dtype: str
    machines: str
    shape: str
    escalate: bool
    pair: str
    kind: str
    standout: bool
    block: str
    compared: int = 0
    usage: float = 0.0
    usage_at: str = ""
    module: str | None = None
    operator: str | None = None
    why: str | None = None
    side: str | None = None
    stopped: str | None = None


class Hosts:
    """The machines, started when they are first asked for; one command line at a time on each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Server, threading.Lock]] = {}
        self._lock = threading.Lock()

    def run(self, name: str, *words: object) -> tuple[int, str]:
        """(exit code, stdout) of ``divergence WORDS`` on the machine ``name``."""
        with self._lock:
            if name not in self._made:
                server = Server(ROOT, self._folder, SWITCHES[name], name)
                self._made[name] = server, threading.Lock()
        server, lock = self._made[name]
        printed = self._folder / f".{name}"
        with lock:
            code = server.ask("command", shlex.join(map(str, words)), printed)
            return code, Path(f"{printed}.out").read_text()

    def must(self, name: str, *words: object) -> None:
        """The same, of what has to succeed. Raises RuntimeError."""
        code, out = self.run(name, *words)
        if code:
            raise RuntimeError(f"{name}: divergence {shlex.join(map(str, words))}: {code}\n{out}")

    def answer(self, name: str, *words: object) -> dict[str, Any]:
        """What a command says with --json. Raises RuntimeError where that is nothing."""
        code, out = self.run(name, *words, "--json")
        try:
            return json.loads(out)
        except ValueError:
            told = shlex.join(map(str, words))
            raise RuntimeError(f"{name}: divergence {told}: {code}\n{out}") from None

    def close(self) -> None:
        for server, _ in self._made.values():
            server.close()


def drawn(architecture: str, dtype: str, number: int, seed: int) -> Pair:
    """Two machines, or two attentions on one, a shape, and whether there is an escalated pass."""
    choose = random.Random(f"{seed}-{architecture}-{dtype}-{number}")
    attention = ("eager",) if architecture in EAGER_ALONE else ("eager", "sdpa")
    a, c = choose.sample(list(itertools.product(SWITCHES, attention)), 2)
    shape = "several" if architecture == "smollm2" else choose.choice(list(SHAPES))
    return Pair(
        architecture=architecture,
        dtype=dtype,
        number=number,
        a=a,
        c=c,
        shape=shape,
        escalate=choose.random() < 0.5,
    )


def descents(hosts: Hosts, pair: Pair, folder: Path, seed: int) -> Iterator[Descent]:
    """Make the pair in ``folder`` and go into each of its blocks."""
    trained = pair.architecture == "smollm2"
    if trained:
        model, prompts, tokens, batch = checkpoint("bfloat16"), CHAT_PROMPTS[:3], 3, False
    else:
        prompts, tokens, batch = SHAPES[pair.shape]
        model = build(
            pair.architecture,
            folder / "model",
            dtype=pair.dtype,
            num_blocks=NUM_BLOCKS,
            seed=seed * 1000 + pair.number,
        )
    a, c, truth = folder / "a", folder / "c", folder / "truth"
    quiet = ("--no-probe", "-q")
    texts = [word for text in prompts for word in ("--prompt", text)]
    hosts.must(
        pair.a[0],
        "capture",
        model,
        "-o",
        a,
        *texts,
        "--max-new-tokens",
        tokens,
        "--attn-implementation",
        pair.a[1],
        *(["--batch"] if batch else []),
        *(["--chat"] if trained else []),
        *quiet,
    )
    hosts.must(
        pair.c[0],
        "capture",
        "--like",
        a,
        "-o",
        c,
        "--attn-implementation",
        pair.c[1],
        *(["--escalate"] if pair.escalate else []),
        *quiet,
    )
    hosts.must(pair.a[0], "truth", a, "-o", truth, "-q")
    verdict = hosts.answer(pair.a[0], "compare", a, c, "--truth", truth)["verdict"]
    standout = any(one.get("block") for one in verdict["evidence"])
    run = Run.open(a)
    blocks = [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]
    run.close()
    if trained:
        blocks = [blocks[number] for number in TRAINED_BLOCKS]
    for block in blocks:
        made = Descent(
            architecture=pair.architecture,
            dtype=pair.dtype,
            machines=pair.machines,
            shape=pair.shape,
            escalate=pair.escalate,
            block=block,
            pair=f"{pair.architecture}-{pair.dtype}-{seed}-{pair.number}",
            kind=verdict["kind"],
            standout=standout,
        )
        where = folder / f"into-{block}"
        fill(made, played(hosts, pair, a, c, truth, block, where))
        yield made
        if made.operator is None:
            shutil.rmtree(where, ignore_errors=True)


def played(
    hosts: Hosts, pair: Pair, a: Path, c: Path, truth: Path, block: str, where: Path
) -> dict[str, Any]:
    """The last answer of ``localize`` on A, once C has run what it was asked for."""
    answer: dict[str, Any] = {}
    for _ in range(ROUNDS):
        answer = hosts.answer(
            pair.a[0],
            "localize",
            a,
            c,
            "--truth",
            truth,
            "--block",
            block,
            "-o",
            where,
            "--here",
            "reference",
        )
        asked = [
            shlex.split(line.partition("   # ")[0])
            for line in answer.get("commands", [])
            if "on B's machine" in line
        ]
        asked = [words[1:] for words in asked if words[1] != "localize"]
        if not asked:
            break
        for words in asked:
            hosts.must(pair.c[0], *words, "-q")
    return answer


def fill(made: Descent, answer: dict[str, Any]) -> None:
    """What ``localize`` said of the block."""
    report = answer.get("report") or {}
    operators = report.get("operators")
    for level in answer.get("levels", []):
        if level["level"] == "module":
            made.module = level["site"]
    if operators is None:
        made.stopped = answer.get("stopped") or str(answer)[:300]
        return
    judged = [one for one in operators["results"] if one["verdict"] != "unjudged"]
    made.compared = len(judged)
    if not judged:
        made.stopped = "no operator could be judged"
    for one in judged:
        usage = float(one["limit_usage"])
        if usage >= made.usage:
            made.usage, made.usage_at = usage, f"{one['site']} {one['phase']}"
    named = answer.get("operator")
    if named is not None:
        made.operator, made.why = named["site"], named.get("why")
        made.side = answer.get("side") or operators.get("side")
        made.usage, made.usage_at = float(named["limit_usage"]), f"{named['site']} {named['phase']}"


def tried(made: Iterator[Descent], pair: Pair) -> Iterator[Descent]:
    """The same, where a command that failed ends the pair and not the program."""
    try:
        yield from made
    except RuntimeError as error:
        print(f"FAILED {pair.architecture} {pair.dtype}, {pair.machines}: {error}", flush=True)
        yield Descent(
            architecture=pair.architecture,
            dtype=pair.dtype,
            machines=pair.machines,
            shape=pair.shape,
            escalate=pair.escalate,
            pair=f"failed-{pair}",
            kind="failed",
            standout=False,
            block="",
            stopped="a command failed",
        )


def planned(options: argparse.Namespace) -> list[Pair]:
    """All pairs, shuffled: a time that runs out leaves some of every model."""
    if options.trained:
        models: Iterable[tuple[str, str]] = [("smollm2", "bfloat16")]
    else:
        models = itertools.product(options.architectures.split(","), options.dtypes.split(","))
    pairs = [
        drawn(*model, number, options.seed) for model in models for number in range(options.pairs)
    ]
    random.Random(options.seed).shuffle(pairs)
    return pairs


def sweep(pairs: list[Pair], folder: Path, options: argparse.Namespace) -> list[Descent]:
    """Every pair, two at a time; one line for each, and one for each operator that is named."""
    found: list[Descent] = []
    hosts = Hosts(folder)
    until = time.perf_counter() + options.seconds
    writing = threading.Lock()

    def one(numbered: tuple[int, Pair]) -> None:
        number, pair = numbered
        if time.perf_counter() > until:
            return
        where = folder / f"pair-{number}"
        alarmed = False
        for made in tried(descents(hosts, pair, where, options.seed), pair):
            alarmed = alarmed or made.operator is not None
            with writing:
                found.append(made)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(asdict(made)) + "\n")
            if made.operator is not None:
                print(
                    f"ALARM {made.pair} {made.machines}, {made.shape}: {made.block}: "
                    f"{made.operator} ({made.why}, {made.side}), {made.usage:.2f} of its limit",
                    flush=True,
                )
            if time.perf_counter() > until:
                break
        print(
            f"{number + 1} of {len(pairs)}: {pair.architecture} {pair.dtype}, {pair.machines}, "
            f"{pair.shape}",
            file=sys.stderr,
            flush=True,
        )
        if not alarmed or options.keep is None:
            shutil.rmtree(where, ignore_errors=True)

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, enumerate(pairs)))
    finally:
        hosts.close()
    return found


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def tables(found: list[Descent]) -> None:
    """One row a model, one a dtype, and all; then where the most of a limit was used."""
    print(
        "| | pairs | blocks gone into | operators judged | named | largest share of a limit "
        "| 99% of blocks below |\n|---|---|---|---|---|---|---|"
    )
    for field in ("architecture", "dtype"):
        for value in sorted({getattr(one, field) for one in found}):
            _row(value, [one for one in found if getattr(one, field) == value])
    _row("all", found)
    reached = [one for one in found if one.compared]
    alarms = [one for one in reached if one.operator is not None]
    if reached:
        apart = [one for one in reached if one.kind != "identical"]
        rate = 100 * upper(len(alarms), max(1, len(apart)))
        print(
            f"\n{len(alarms)} of {len(reached)} descents named an operator; {len(apart)} were in "
            f"pairs that are not equal bit for bit: rate < {rate:.2f}% (95%)"
        )
    if alarms:
        print(
            "\n| named | why | share of its limit | model | dtype | machines |"
            "\n|---|---|---|---|---|---|"
        )
        for one in alarms:
            print(
                f"| {one.operator} | {one.why} | {one.usage:.2f} | {one.architecture} "
                f"| {one.dtype} | {one.machines} |"
            )
    for dtype in sorted({one.dtype for one in reached}):
        most = max((one for one in reached if one.dtype == dtype), key=lambda one: one.usage)
        print(
            f"\nlargest share, {dtype}: {most.usage:.2f}, {most.usage_at}, {most.architecture}, "
            f"{most.machines}"
        )
    kinds = Counter({one.pair: one.kind for one in found}.values())
    alone = {one.pair for one in found if one.standout}
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"\nThe pairs' own comparisons: {said}; a block stood out in {len(alone)} of them.")
    modules = sum(one.module is not None for one in reached)
    print(f"Modules named on the way: {modules}.")
    for reason, count in Counter(one.stopped for one in found if one.stopped).most_common(5):
        print(f"Not reached, {count}: {reason}")


def _row(name: str, mine: list[Descent]) -> None:
    reached = [one for one in mine if one.compared]
    usages = sorted(one.usage for one in reached)
    largest = f"{usages[-1]:.2f}" if usages else "-"
    most = f"{usages[math.ceil(0.99 * len(usages)) - 1]:.2f}" if usages else "-"
    named = sum(one.operator is not None for one in reached)
    print(
        f"| {name} | {len({one.pair for one in mine})} | {len(reached)} "
        f"| {sum(one.compared for one in reached):,} | {named} | {largest} "
        f"| {most} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--pairs", type=int, default=2, help="of each model and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after that long")
    parser.add_argument("--jobs", type=int, default=2, help="pairs at a time")
    parser.add_argument("--quick", action="store_true", help="three models, a pair each: 2 minutes")
    parser.add_argument("--trained", action="store_true", help="SmolLM2-135M in bfloat16 instead")
    parser.add_argument("--out", type=Path, help="append every descent to this .jsonl file")
    parser.add_argument("--keep", type=Path, help="keep there the runs of pairs that alarm")
    parser.add_argument("--tables", type=Path, nargs="+", help="print those of such files")
    options = parser.parse_args()
    if options.tables:
        lines = [line for file in options.tables for line in file.read_text().splitlines()]
        found = [Descent(**json.loads(line)) for line in lines]
        tables(found)
        raise SystemExit(not_healthy(found))
    if options.quick:
        options.architectures, options.pairs = ",".join(QUICK), 1
        options.dtypes = "float32,bfloat16"
    start = time.perf_counter()
    pairs = planned(options)
    with tempfile.TemporaryDirectory() as folder:
        where = options.keep or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        found = sweep(pairs, where.resolve(), options)
    print()
    tables(found)
    print(
        f"\n{cpu_name()}, seed {options.seed}: {len({one.pair for one in found})} pairs of "
        f"{len(pairs)} planned in {time.perf_counter() - start:.0f} s"
    )
    raise SystemExit(not_healthy(found))


def not_healthy(found: list[Descent]) -> bool:
    """Was an operator named, or nothing gone into?"""
    return any(one.operator is not None for one in found) or not any(one.compared for one in found)


if __name__ == "__main__":
    main()
