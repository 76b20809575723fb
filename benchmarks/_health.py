"""Healthy pairs: two machines without a fault. Any verdict beyond within_floor is a false alarm.

Pairs of machines (benchmarks/_machines.py) and attention kernels are drawn for each model, dtype
and shape of run. The same pairs are judged by the rules of benchmarks/_rivals.py. Each pair is a
line of ``out``, and is not taken again where it is there.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._machines import Machine
from benchmarks._rivals import RULES, block_rows, first_bad
from benchmarks._trials import upper
from divergence.comparison.api import compare
from divergence.comparison.result import Report
from divergence.run.reader import Run
from tests.models.tiny import build

__all__ = ["PROMPTS", "SHAPES", "health", "usage_of"]

NUM_BLOCKS = 6
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the numbers should stay the same on all "
    "machines, whatever the order of the additions may be.",
    "In 1687 it was said that every body attracts every other body; 2 + 2 = 4, and 7 x 8 = 56.",
)
_EIGHT = tuple(
    " ".join(f"{word} {n}" for word in PROMPTS[n % 2].split()[: 4 + n]) for n in range(8)
)
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {"prompts": PROMPTS, "max_new_tokens": 4},
    "prompts": {"prompts": _EIGHT, "max_new_tokens": 2},
    "steps": {"prompts": PROMPTS[1:], "max_new_tokens": 65},
}
"""Two prompts and four tokens; eight prompts; one prompt and 64 decode steps."""


def health(
    root: Path,
    architectures: list[str],
    dtypes: list[str],
    names: list[str],
    count: int,
    shapes: list[str],
    out: Path | None,
    until: float,
) -> None:
    """``count`` pairs of machines drawn for each model, eager and sdpa; prints a table."""
    rows: list[dict] = []
    if out is not None and out.exists():
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    known = {row["label"] for row in rows}
    machines: dict[str, Machine] = {}
    planned = 0
    for shape, dtype, architecture in itertools.product(shapes, dtypes, architectures):
        attention = ("eager",) if architecture in ("mamba", "mamba2") else ("eager", "sdpa")
        chosen = drawn(names, attention, count, f"{architecture}-{dtype}-{shape}")
        planned += len(chosen)
        chosen = [p for p in chosen if _label(shape, architecture, dtype, *p) not in known]
        if not chosen or time.perf_counter() > until:
            continue
        print(f"health: {shape} {architecture} {dtype}", file=sys.stderr, flush=True)
        where = root / f"{shape}-{architecture}-{dtype}"
        model = build(architecture, where / "model", dtype=dtype, num_blocks=NUM_BLOCKS, seed=1)
        for first in sorted({pair[0] for pair in chosen}, key=names.index):
            if time.perf_counter() > until:
                break
            others = [(name, kind) for one, name, kind in chosen if one == first]
            for name in {first, *(name for name, _ in others)} - machines.keys():
                machines[name] = Machine(name)
            _capture(machines, where, model, first, others, SHAPES[shape])
            for name, kind in others:
                label = _label(shape, architecture, dtype, first, name, kind)
                row = {"shape": shape, "dtype": dtype, "architecture": architecture, "label": label}
                a, b = where / first, where / f"{first}-{name}-{kind}"
                rows.append(row | judge_healthy(label, a, b, where / f"{first}-truth"))
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    for machine in machines.values():
        machine.close()
    mine = [
        r
        for r in rows
        if r["dtype"] in dtypes and r["shape"] in shapes and r["architecture"] in architectures
    ]
    _print(mine, dtypes, shapes)
    print(
        f"\n{len(mine)} pairs of {planned} planned: {', '.join(architectures)} on the machines "
        f"{', '.join(names)}"
    )


def _label(shape: str, architecture: str, dtype: str, first: str, name: str, kind: str) -> str:
    return f"{shape} {architecture} {dtype} {first} {name} {kind}"


def _capture(
    machines: dict[str, Machine],
    where: Path,
    model: Path,
    first: str,
    others: list[tuple[str, str]],
    shape: dict[str, Any],
) -> None:
    """The reference on ``first``, its truth, and the candidates like it."""
    a = where / first
    machines[first].run("capture", model=model, out=a, **shape)
    machines[first].ask("truth", run=a, out=where / f"{first}-truth")
    asked = []
    for name, kind in others:
        special = {} if kind == "eager" else {"attn_implementation": kind}
        out = where / f"{first}-{name}-{kind}"
        machines[name].ask("capture", like=a, out=out, escalate=True, **special)
        asked.append(name)
    machines[first].wait()
    for name in asked:
        machines[name].wait()


def drawn(
    names: list[str], attention: tuple[str, ...], count: int, seed: str
) -> list[tuple[str, str, str]]:
    """(reference's machine, candidate's, its attention): another machine or another kernel."""
    every = [
        (first, name, kind)
        for first, name, kind in itertools.product(names, names, attention)
        if (first, "eager") != (name, kind)
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


def judge_healthy(label: str, a: Path, b: Path, truth: Path) -> dict[str, Any]:
    """One healthy pair's verdicts, without and with the truth, and those of the rival rules."""
    report, alone = compare(a, b, truth=truth), compare(a, b)
    run = Run.open(a)
    blocks = [p for p, n in run.manifest.plan.modules.items() if n.role == "block"]
    blocks = [p for p in blocks if run.find(("free", 0, 0, f"{p}:out"))]
    alarm = False
    for one in (report, alone):
        if one.verdict.kind not in ("identical", "within_floor"):
            alarm = True
            why = [fact.text for fact in one.verdict.evidence[:2]]
            print(f"ALARM {label}: {one.verdict.summary}; {why}", flush=True)
    forwards = block_rows(run, Run.open(b), Run.open(truth), blocks)
    return {
        "blocks": len(blocks) * 2,
        "alarm": alarm,
        "standout": any("than its siblings" in e.text for e in report.verdict.evidence),
        "usage": max(usage_of(report), usage_of(alone)),
        **{rule: first_bad(rule, forwards) is not None for rule in RULES},
    }


def usage_of(report: Report) -> float:
    """The largest share of any limit that a report's sites use."""
    return max(
        (site.limit_usage for site in report.sites if site.limit_usage is not None), default=0.0
    )


def _print(rows: list[dict], dtypes: list[str], shapes: list[str]) -> None:
    print("\n| | " + " | ".join(dtypes) + " |\n|---|" + "---|" * len(dtypes))

    def table_row(name: str, cell) -> None:
        cells = (cell([row for row in rows if row["dtype"] == dtype]) for dtype in dtypes)
        print(f"| {name} | " + " | ".join(cells) + " |")

    def alarms(mine: list[dict], key: str) -> str:
        bad = sum(row[key] for row in mine)
        return f"{bad} (rate < {100 * upper(bad, len(mine)):.1f}%)" if mine else "-"

    for shape in shapes:
        table_row(
            f"pairs of runs, {shape}",
            lambda mine, s=shape: str(sum(row["shape"] == s for row in mine)),
        )
    table_row(
        "pairs of blocks (prefill and decode)", lambda mine: str(sum(row["blocks"] for row in mine))
    )
    for key in ("alarm", *RULES):
        name = "divergence" if key == "alarm" else key
        table_row(f"false alarms: {name}", lambda mine, k=key: alarms(mine, k))
    table_row("a stand-out was noted", lambda mine: str(sum(row["standout"] for row in mine)))
    table_row(
        "largest share of a limit used",
        lambda mine: f"{max((row['usage'] for row in mine), default=0.0):.2f}",
    )
