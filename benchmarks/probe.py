"""What the arithmetic probe costs, and how many orders of addition one CPU has.

    python benchmarks/probe.py               quick form, and the full one at --terms

Each machine is a process of its own under other CPU switches (benchmarks._machines). Printed: the
time of the quick form in a fresh process, one thread unless that machine has two, by the clock and
of the processor (the clock runs on where the machine is shared); the same of the whole probe; and
per operator how many different trees the machines have, how many different outputs, how many orders
are proven, and in how many pairs of machines trees and outputs disagree: equal trees and equal
arithmetic of a node must give equal outputs bit for bit, others must give different ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._machines import SWITCHES  # noqa: E402

_WORK = """
import json, sys, time
import torch
out, threads, form, *terms = sys.argv[1:]
torch.set_num_threads(int(threads))
from divergence.domains.probe.quick import quick_facts
torch.nn.functional.linear(torch.ones(1, 8), torch.ones(4, 8))  # libraries loaded, as in a capture
def spent(call):
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu
quick = spent(lambda: quick_facts("cpu"))
from divergence.domains.probe.api import probe
terms = [int(n) for n in terms]
full = spent(lambda: probe(out=out, device="cpu", quick=form == "quick", terms=terms, force=True))
print(json.dumps({"quick": quick, "full": full}))
"""


def run_machine(
    name: str, out: Path, terms: list[int], *, form: str = "full"
) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds of both forms, or of ``form="quick"`` alone, in a process of its own."""
    switches = SWITCHES[name]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ, **switches}
    threads = switches.get("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])
    done = subprocess.run(
        [sys.executable, "-c", _WORK, str(out), threads, form, *map(str, terms)],
        env=environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def agreement(runs: dict[str, Path]) -> dict[str, dict[str, object]]:
    """Operator → its distinct trees over the machines, how many facts are proven, and how often
    trees and outputs disagree."""
    from divergence.run.reader import Run

    table: dict[str, dict[str, object]] = {}
    by_name: dict[str, list[tuple]] = defaultdict(list)
    for path in runs.values():
        run = Run.open(path)
        facts = {fact.name: fact for fact in run.manifest.arithmetic}
        digests = {record.site: record.xxh3 for record in run.records}
        for name, fact in facts.items():
            if fact.probe != "order":
                continue
            stem = f"probe.order.{fact.subject}".replace(" ", "-").replace("@", "")
            outputs = tuple(digests.get(f"{stem}-{kind}:out") for kind in ("plain", "zero"))
            others = [name.replace("order", probe, 1) for probe in ("fma", "accumulator")]
            node = tuple(facts[other].value for other in others if other in facts)
            by_name[fact.subject].append((fact.verified, fact.digest, node, outputs))
    for subject, found in by_name.items():
        wrong = 0
        for k, one in enumerate(found):
            for two in found[:k]:
                if one[0] and two[0]:
                    wrong += (one[1:3] == two[1:3]) != (one[3] == two[3])
        table[subject] = {
            "trees": len({digest for _, digest, _, _ in found}),
            "kinds": len({(digest, node) for _, digest, node, _ in found}),
            "verified": sum(ok for ok, *_ in found),
            "machines": len(found),
            "outputs": len({outputs for *_, outputs in found}),
            "wrong": wrong,
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--terms", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--machines", nargs="+", default=list(SWITCHES), choices=list(SWITCHES))
    arguments = parser.parse_args()
    print("| machine | quick, s | its CPU s | whole, s | its CPU s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name in arguments.machines:
            runs[name] = Path(folder) / name
            spent = run_machine(name, runs[name], arguments.terms)
            quick, full = spent["quick"], spent["full"]
            print(
                f"| {name} | {quick[0]:.2f} | {quick[1]:.2f} | {full[0]:.1f} | {full[1]:.1f} |",
                flush=True,
            )
        print("\n| operator | different trees | different outputs | proven | disagreements |")
        print("|---|---|---|---|---|")
        for subject, row in agreement(runs).items():
            print(
                f"| {subject} | {row['trees']} | {row['outputs']} | {row['verified']} of "
                f"{row['machines']} | {row['wrong']} |"
            )


if __name__ == "__main__":
    main()
