"""How well a faulty operator is named: detection, exact operator and guilty side by size.

    python benchmarks/operator_localization.py [--dtypes ...] [--architectures ...] [--share 1/4]
    python benchmarks/operator_localization.py --health-only

One block of a small model is recorded operator by operator on two machines (CPU kernels of their
own, benchmarks/_machines.py, eager and sdpa) and in float64. Every fault of
benchmarks/_operator_faults.py is planted in it, in A as often as in B, whole and weakened. A
planted A is the reference: its run is the faulty one, B repeats it healthy, and the truth is
the healthy model in float64 on A's inputs.

Sizes count floors: the planted operator's error against the truth, over the same operator's error
in the healthy run with the operator's own floor in quadrature (rms over all rows; prefill or
decode, the larger). "Exact" is the verdict's onset at the expected operator. Where the other
side has no such operator (it is inside a fused kernel there), the first results after it that
both sides have are expected, and sized.

Health: pairs of machines, no fault; any operator blamed is a false alarm, with the truth
and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file

from benchmarks._machines import SWITCHES, Machine
from benchmarks._operator_faults import FAULTS, site_of
from benchmarks._trials import upper
from divergence.analyses.operators.measure import num_terms
from divergence.comparison.api import compare
from divergence.comparison.calls import forwards_of
from divergence.comparison.result import Report
from divergence.numerics.operator import measure_operator
from divergence.run.reader import Run
from tests.models.tiny import build

NUM_BLOCKS = 3
SIZES = (0.7, 2.0, 4.5, 12.0)
"""Sizes aimed at, in floors; the measured one decides the column."""
EDGES = (0.0, 1.0, 2.0, 3.0, 6.0, 20.0, math.inf)
PAIRS = (
    ("native", "eager", "old", "sdpa"),
    ("old", "sdpa", "native", "sdpa"),
    ("aten-avx2", "eager", "mkl-compatible", "eager"),
    ("onednn-sse41", "sdpa", "threads-2", "eager"),
)
"""(A's machine, its attention, B's machine, its attention)."""
CLEARED = {"float32": (2, 4, 8, 13), "float16": (1, 3, 4, 6), "bfloat16": (1, 2, 3, 5)}
"""Mantissa bits that are cleared."""
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the numbers should stay the same on all "
    "machines, whatever the order of the additions may be.",
)
NEW_TOKENS = 3


@dataclass(slots=True)
class Trial:
    """One planted pair. ``site``: the operator expected, on the planted side; ``fused``: the other
    side has no such operator; ``said``: the onset, on the planted side."""

    architecture: str
    dtype: str
    pair: str
    fault: str
    kind: str
    role: str
    site: str
    side: str
    strength: float
    size: float
    fused: bool
    verdict: str
    said: str | None
    exact: bool
    side_said: str | None
    confidence: str


class Bench:
    """One model on two machines, one of its blocks recorded."""

    def __init__(
        self,
        root: Path,
        architecture: str,
        dtype: str,
        pair: tuple,
        block: int,
        *,
        ties: bool,
        machines: dict[str, Machine],
        keep: bool = False,
    ) -> None:
        self.root, self.architecture, self.dtype, self.pair = root, architecture, dtype, pair
        first, self.attention_a, second, self.attention_b = pair
        self.a, self.b, self.keep = machines[first], machines[second], keep
        self._numbers = itertools.count()
        self.model = build(architecture, root / "model", dtype=dtype, num_blocks=NUM_BLOCKS)
        if ties:
            equal_experts(self.model)
        stem = "transformer.h" if architecture == "gpt2" else "model.layers"
        self.block = f"{stem}.{block}"
        self._capture_a(root / "a")
        self._capture_b(root / "a", root / "b")
        self.b.run("truth", run=root / "a", out=root / "truth")

    def _capture_a(self, out: Path, fault: tuple | None = None) -> None:
        self.a.run(
            "capture",
            model=self.model,
            out=out,
            prompts=PROMPTS,
            max_new_tokens=NEW_TOKENS,
            attn_implementation=self.attention_a,
            sites=["blocks", f"ops@{self.block}"],
            operator_fault=fault,
        )

    def _capture_b(self, like: Path, out: Path, fault: tuple | None = None) -> None:
        self.b.run(
            "capture",
            like=like,
            out=out,
            attn_implementation=self.attention_b,
            operator_fault=fault,
        )

    def paths(self, side: str) -> list[str]:
        """Of the healthy run's operators: of the prefill and the decode steps."""
        run, pass_ = (
            (self.root / "a", "free") if side == "reference" else (self.root / "b", "anchored")
        )
        forwards = forwards_of(Run.open(run), pass_)
        return list(dict.fromkeys(node.path for nodes in forwards.values() for node in nodes))

    def trial(self, fault: str, role: str, side: str, strength: float) -> Trial | None:
        """None where that side has no such operator."""
        planted = site_of(role, self.block, self.paths(side))
        if planted is None:
            return None
        where = self.root / f"trial-{next(self._numbers)}"
        if side == "candidate":
            self._capture_b(self.root / "a", where / "b", (fault, planted, strength))
        else:
            self._capture_a(where / "a", (fault, planted, strength))
            self._capture_b(where / "a", where / "b")
            self.b.run("truth", run=where / "a", out=where / "truth")
        spec = {
            "architecture": self.architecture,
            "dtype": self.dtype,
            "pair": "-".join(self.pair),
            "fault": fault,
            "kind": FAULTS[fault].kind,
            "role": role,
            "side": side,
            "strength": strength,
        }
        (where / "planted.json").write_text(json.dumps([spec, planted]))
        made = judged(where)
        if not self.keep:
            shutil.rmtree(where)
        return made


def judged(where: Path) -> Trial:
    """The trial whose runs lie in ``where``, beside those of the healthy machines."""
    spec, planted = json.loads((where / "planted.json").read_text())
    root, side = where.parent, spec["side"]
    if side == "candidate":
        a, b, truth = root / "a", where / "b", root / "truth"
    else:
        a, b, truth = where / "a", where / "b", where / "truth"
    report = compare(a, b, truth=truth)
    site, fused = expected(report, a if side == "reference" else b, side, planted)
    bad, good = (b, root / "b") if side == "candidate" else (a, root / "a")
    size = size_at(site, side, report, (bad, truth), (good, root / "truth"))
    verdict, onset = report.verdict, report.verdict.onset
    said = None
    if onset is not None and verdict.kind in ("localized", "nonfinite") and "/" in onset.site:
        said = on_side(report, onset.site.rpartition(":")[0], side)
    return Trial(
        **spec,
        site=site,
        size=size,
        fused=fused,
        verdict=verdict.kind,
        said=said,
        exact=said == site,
        side_said=verdict.side,
        confidence=verdict.confidence,
    )


def equal_experts(model: Path) -> None:
    """The routers' first two experts get equal rows: their scores are exactly equal."""
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("mlp.gate.weight"):
                weight[1] = weight[0]
        save_file(weights, file, metadata={"format": "pt"})


def on_side(report: Report, site: str, side: str) -> str:
    """The operator's name on that side."""
    if side == "reference":
        return site
    found = [r.candidate_site for r in report.operators.results if r.site == site]
    return found[0] if found else site


def expected(report: Report, run: Path, side: str, planted: str) -> tuple[str, bool]:
    """The planted operator, or where it has no partner the first results after it that have."""
    matched = {
        r.site if side == "reference" else r.candidate_site for r in report.operators.results
    }
    if planted in matched:
        return planted, False
    for nodes in forwards_of(Run.open(run), "free" if side == "reference" else "anchored").values():
        reached = {planted}
        for node in nodes:  # in order: what feeds a call comes before it
            if reached & set(node.feeds):
                if node.path in matched:
                    return node.path, True
                reached.add(node.path)
    return planted, True


def size_at(
    site: str, side: str, report: Report, planted: tuple[Path, Path], healthy: tuple[Path, Path]
) -> float:
    """In floors. ``planted``, ``healthy``: the run and its truth."""
    pass_ = "free" if side == "reference" else "anchored"
    right = next(
        (
            r.site
            for r in report.operators.results
            if (r.site if side == "reference" else r.candidate_site) == site
        ),
        site,
    )
    sums: dict[str, list[float]] = {"prefill": [0.0, 0.0], "decode": [0.0, 0.0]}
    runs = [(Run.open(one), Run.open(two)) for one, two in (planted, healthy)]
    for forward, nodes in forwards_of(runs[0][0], pass_).items():
        node = next((n for n in nodes if n.path == site), None)
        if node is None:
            continue
        errors = []
        for run, truth in runs:
            record = run.find((pass_, *forward, f"{site}:out"))
            exact = truth.find(("anchored", *forward, f"{right}:out"))
            if record is None or exact is None:
                continue
            value, right_value = run.read(record), truth.read(exact)
            if run is runs[0][0] and _beyond_size(run, truth, pass_, forward, site, right):
                return math.inf
            measured = measure_operator(
                right_value.to(value.dtype), value, right_value, num_terms=num_terms(node)
            )
            if measured is not None and len(measured.reference):
                errors.append((measured.candidate.square().mean(), measured.floor.square().mean()))
        if len(errors) == 2:
            phase = sums["decode" if forward[1] else "prefill"]
            phase[0] += float(errors[0][0])
            phase[1] += float(errors[1][0] + errors[1][1])
    found = [math.sqrt(top / low) for top, low in sums.values() if low > 0]
    return max(found, default=0.0)


def _beyond_size(
    run: Run, truth: Run, pass_: str, forward: tuple[int, int], site: str, right: str
) -> bool:
    """Other codes, or an infinity: faults that have no size. A masked score is -inf on purpose."""
    codes = run.find((pass_, *forward, f"{site}:out.1"))
    if codes is not None and codes.dtype == "int64":
        other = truth.find(("anchored", *forward, f"{right}:out.1"))
        return other is not None and not torch.equal(run.read(codes), truth.read(other))
    value = run.read(run.find((pass_, *forward, f"{site}:out")))
    return bool(value.isnan().any() or (value == torch.inf).any())


def plan(dtype: str, architecture: str, share: float, seed: int) -> Iterator[tuple]:
    """(pair, block, fault, role, side, number): each placement on one pair of machines."""
    choose = random.Random(f"{seed}-{architecture}-{dtype}")
    placements = [(fault, role) for fault in FAULTS.values() for role in fault.roles]
    turn = choose.randrange(len(PAIRS))
    for number, (fault, role) in enumerate(placements):
        if choose.random() > share:
            continue
        pair = PAIRS[(number + turn) % len(PAIRS)]
        side = ("candidate", "reference")[choose.randrange(2)]
        yield pair, (number + turn) % NUM_BLOCKS, fault, role, side


def sweep(
    root: Path,
    architecture: str,
    dtype: str,
    share: float,
    seed: int,
    machines: dict[str, Machine],
    *,
    keep: bool,
) -> Iterator[Trial]:
    """Each fault whole, then weakened so that its size meets SIZES; sides take turns."""
    benches: dict[tuple, Bench] = {}
    for pair, block, fault, role, side in plan(dtype, architecture, share, seed):
        if fault.ties and architecture != "qwen3-moe":
            continue
        for name in (pair[0], pair[2]):
            if name not in machines:
                machines[name] = Machine(name)
        key = (pair, block, fault.ties)
        if key not in benches:
            where = root / f"{architecture}-{dtype}-{len(benches)}"
            benches[key] = Bench(
                where,
                architecture,
                dtype,
                pair,
                block,
                ties=fault.ties,
                machines=machines,
                keep=keep,
            )
        bench, other = benches[key], _turn(side)
        if fault.name == "mantissa":
            for place, cleared in enumerate(CLEARED[dtype]):
                yield from _made(bench.trial(fault.name, role, (side, other)[place % 2], cleared))
            continue
        whole = bench.trial(fault.name, role, side, 1.0)
        yield from _made(whole)
        if fault.whole or whole is None:
            if fault.whole:
                yield from _made(bench.trial(fault.name, role, other, 1.0))
            continue
        for place, aim in enumerate(SIZES):
            if aim < 0.7 * whole.size and math.isfinite(whole.size):
                turned = (other, side)[place % 2]
                yield from _made(bench.trial(fault.name, role, turned, aim / whole.size))


def _made(trial: Trial | None) -> list[Trial]:
    return [] if trial is None else [trial]


def _turn(side: str) -> str:
    return "reference" if side == "candidate" else "candidate"


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def interval(num: int, count: int) -> tuple[float, float]:
    """95% interval of a rate (Clopper and Pearson): 2.5% on either side."""
    return 1 - upper(count - num, count, 0.025), upper(num, count, 0.025)


def _share(num: int, count: int) -> str:
    return f"{100 * num / count:.0f}%" if count else "-"


def _blamed_elsewhere(trial: Trial) -> bool:
    return trial.said is not None and not trial.exact


def tables(trials: list[Trial]) -> None:
    columns = [f"{a:g}-{b:g}" if b < math.inf else f"> {a:g}" for a, b in itertools.pairwise(EDGES)]
    for dtype in sorted({t.dtype for t in trials}):
        mine = [t for t in trials if t.dtype == dtype]
        groups = [
            [t for t in mine if a <= t.size < b or (b == t.size == math.inf)]
            for a, b in itertools.pairwise(EDGES)
        ]
        print(f"\n{dtype}: {len(mine)} planted pairs, by size in floors\n")
        print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
        print("| pairs | " + " | ".join(str(len(g)) for g in groups) + " |")
        for name, what in (
            ("exact operator", lambda t: t.exact),
            ("another operator blamed", _blamed_elsewhere),
            ("no operator blamed", lambda t: t.said is None),
        ):
            cells = [_share(sum(map(what, g)), len(g)) for g in groups]
            print(f"| {name} | " + " | ".join(cells) + " |")
        exact = [[t for t in g if t.exact] for g in groups]
        cells = [_share(sum(t.side_said == t.side for t in g), len(g)) for g in exact]
        print("| right side, of those with exact operator | " + " | ".join(cells) + " |")
        named = [[t for t in g if t.said is not None] for g in groups]
        cells = [_share(sum(t.side_said not in (t.side, None) for t in g), len(g)) for g in named]
        print("| wrong side said, of those blamed | " + " | ".join(cells) + " |")
    large = [t for t in trials if t.size >= 3]
    print("\nAbove 3 floors:\n")
    print("| | pairs | exact operator | 95% interval | right side | elsewhere | not found |")
    print("|---|---|---|---|---|---|---|")

    def row(name: str, group: list[Trial]) -> None:
        if not group:
            return
        good = sum(t.exact for t in group)
        low, high = interval(good, len(group))
        sides = sum(t.exact and t.side_said == t.side for t in group)
        cells = (
            str(len(group)),
            _share(good, len(group)),
            f"{100 * low:.0f}-{100 * high:.0f}%",
            _share(sides, good),
            str(sum(map(_blamed_elsewhere, group))),
            str(sum(t.said is None for t in group)),
        )
        print(f"| {name} | " + " | ".join(cells) + " |")

    row("all", large)
    for field in ("dtype", "architecture", "side", "kind", "pair"):
        for value in sorted({getattr(t, field) for t in large}):
            row(f"{field}: {value}", [t for t in large if getattr(t, field) == value])
    row("both sides call the operator", [t for t in large if not t.fused])
    row("inside a fused kernel of the other side", [t for t in large if t.fused])
    for fault in FAULTS.values():
        row(fault.text, [t for t in large if t.fault == fault.name])


# ── health ──────────────────────────────────────────────────────────────────────────────────────


def health(
    root: Path,
    architectures: list[str],
    dtypes: list[str],
    count: int,
    seed: int,
    machines: dict[str, Machine],
) -> None:
    """``count`` pairs for each model, all blocks recorded; prints a table."""
    names = list(SWITCHES)
    rows: dict[str, dict[str, float]] = {}
    largest: dict[str, tuple[float, str]] = {}
    for dtype, architecture in itertools.product(dtypes, architectures):
        print(f"health: {architecture} {dtype}", file=sys.stderr, flush=True)
        got = rows.setdefault(dtype, dict.fromkeys(("pairs", "operators", "alarms", "alone"), 0))
        choose = random.Random(f"{seed}-{architecture}-{dtype}")
        where = root / f"{architecture}-{dtype}"
        model = build(architecture, where / "model", dtype=dtype, num_blocks=NUM_BLOCKS, seed=1)
        stem = "transformer.h" if architecture == "gpt2" else "model.layers"
        every = list(itertools.product(names, ("eager", "sdpa")))
        for number in range(count):
            first, second = choose.sample(every, 2)
            for name, _ in (first, second):
                if name not in machines:
                    machines[name] = Machine(name)
            a, b, truth = (where / f"{kind}{number}" for kind in ("a", "b", "truth"))
            machines[first[0]].run(
                "capture",
                model=model,
                out=a,
                prompts=PROMPTS,
                max_new_tokens=NEW_TOKENS,
                attn_implementation=first[1],
                sites=["blocks", f"ops@{stem}.*"],
            )
            machines[second[0]].run("capture", like=a, out=b, attn_implementation=second[1])
            machines[second[0]].run("truth", run=a, out=truth)
            label = f"{architecture} {dtype} {'-'.join(first)} {'-'.join(second)}"
            got["pairs"] += 1
            for with_truth in (True, False):
                report = compare(a, b, truth=truth if with_truth else None)
                operators = report.operators
                judged = [r for r in operators.results if r.verdict != "unjudged"]
                if operators.onset is not None:
                    got["alarms" if with_truth else "alone"] += 1
                    print(
                        f"ALARM {label} truth={with_truth}: {operators.onset} "
                        f"{operators.side} {[f.text for f in report.verdict.evidence[:1]]}",
                        flush=True,
                    )
                if with_truth:
                    got["operators"] += len(judged)
                    for result in judged:
                        if result.limit_usage > largest.get(dtype, (0.0, ""))[0]:
                            largest[dtype] = result.limit_usage, f"{result.site}, {label}"
    print("\n| | " + " | ".join(dtypes) + " |\n|---|" + "---|" * len(dtypes))
    for name, text in (
        ("pairs", "pairs of runs"),
        ("operators", "operators judged"),
        ("alarms", "false alarms, with a truth"),
        ("alone", "false alarms, without"),
    ):
        cells = [f"{rows[d][name]:,}" for d in dtypes]
        if name in ("alarms", "alone"):
            cells = [
                f"{rows[d][name]} (rate < {100 * upper(rows[d][name], rows[d]['pairs']):.1f}%)"
                for d in dtypes
            ]
        print(f"| {text} | " + " | ".join(cells) + " |")
    print(
        "| largest share of a limit | "
        + " | ".join(f"{largest.get(d, (0.0, ''))[0]:.2f}" for d in dtypes)
        + " |"
    )
    for dtype in dtypes:
        print(f"\nlargest share, {dtype}: {largest.get(dtype, (0.0, 'none'))[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--architectures", default="llama,gpt2,qwen3-moe,gemma3")
    parser.add_argument("--pairs", type=int, default=12, help="healthy ones, for each model")
    parser.add_argument("--share", type=float, default=1.0, help="of the planned faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health-only", action="store_true")
    parser.add_argument("--faults-only", action="store_true")
    parser.add_argument("--out", type=Path, help="append every trial to this .jsonl file")
    parser.add_argument("--keep", type=Path, help="keep all runs of the trials here")
    parser.add_argument("--again", type=Path, help="judge the runs that were kept there again")
    parser.add_argument("--tables", type=Path, nargs="+", help="print those of stored trials")
    options = parser.parse_args()
    if options.tables:
        lines = [line for file in options.tables for line in file.read_text().splitlines()]
        tables([Trial(**json.loads(line)) for line in lines])
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    dtypes, architectures = options.dtypes.split(","), options.architectures.split(",")
    machines: dict[str, Machine] = {}
    trials: list[Trial] = []

    def took(trial: Trial) -> None:
        trials.append(trial)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")

    if options.again:
        for file in sorted(options.again.glob("*/trial-*/planted.json")):
            took(judged(file.parent))
        tables(trials)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if not options.faults_only:
            health(root / "health", architectures, dtypes, options.pairs, options.seed, machines)
        if not options.health_only:
            for architecture, dtype in itertools.product(architectures, dtypes):
                print(f"faults: {architecture} {dtype}", file=sys.stderr, flush=True)
                where = options.keep or root
                for trial in sweep(
                    where,
                    architecture,
                    dtype,
                    options.share,
                    options.seed,
                    machines,
                    keep=options.keep is not None,
                ):
                    took(trial)
            tables(trials)
        for machine in machines.values():
            machine.close()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
