"""The operator suite: what it costs, whether healthy machines pass, whether wrong operators fail.

    python benchmarks/suite.py [--suite llm] [--faults] [--machines NAME ...]

One CPU under ten sets of switches (benchmarks/_machines.py), each repeating the native run. With
``--faults`` every wrong implementation of benchmarks/_wrong_operators.py besides, on every machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machines import SWITCHES, Machine
from _wrong_operators import FAULTS

from divergence.comparison.api import compare
from divergence.recording.api import capture
from divergence.recording.api import truth as make_truth
from divergence.run.reader import Run


def timed(what: str, call, *, run: bool = True):
    start, spent = time.perf_counter(), time.process_time()
    result = call()
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    sizes = result.manifest.sizes if run else None
    stored = f"{sizes.stored_bytes / 2**20:.0f}" if sizes else ""
    records = sizes.num_records if sizes else ""
    print(f"| {what} | {seconds:.1f} | {spent:.1f} | {stored} | {records} |", flush=True)
    return result


def worst(report) -> tuple[float, float]:
    """The largest score and gain of either side, flushed elements left out."""
    sides = [side for case in report.suite.cases for side in (case.reference, case.candidate)]
    scores = [side.score for side in sides if side is not None and side.score is not None]
    gains = [side.gain for side in sides if side is not None and side.gain is not None]
    return max(scores), max(gains)


def healthy(folder: Path, a: Run, truth: Run, machines: list[str]) -> None:
    print("\n| machine | verdict | results that differ | wrong | flushed | score | gain |")
    print("|---|---|---|---|---|---|---|")
    for name in machines:
        machine = Machine(name)
        machine.run("capture", like=str(a.path), out=str(folder / name))
        machine.close()
        report = compare(a, folder / name, truth=truth)
        cases = report.suite.cases
        counts = {
            status: sum(case.status == status for case in cases) for status in ("wrong", "flushed")
        }
        differ = sum(not case.same for case in cases)
        score, gain = worst(report)
        print(
            f"| {name} | {report.verdict.kind} | {differ} of {len(cases)} | {counts['wrong']} | "
            f"{counts['flushed']} | {score:.1f} | {gain:.1f} |",
            flush=True,
        )


def faults(folder: Path, a: Run, truth: Run, machines: list[str]) -> None:
    names = [(operator, fault.__name__) for operator, each in FAULTS.items() for fault in each]
    named = dict.fromkeys(names, 0)
    for place in machines:
        machine = Machine(place)
        for operator, fault in names:
            wish = f"{operator}=benchmarks._wrong_operators:{fault}"
            machine.run(
                "capture",
                like=str(a.path),
                out=str(folder / "fault"),
                impl=[wish],
                sites=[f"{operator}.*"],
            )
            report = compare(a, folder / "fault", truth=truth)
            turned = compare(folder / "fault", a, truth=truth)
            named[operator, fault] += (
                report.verdict.side == "candidate"
                and turned.verdict.side == "reference"
                and [one.status for one in report.suite.operators] == ["wrong"]
            )
        machine.close()
    print(f"\n| operator | fault | named, of {len(machines)} machines |\n|---|---|---|")
    for (operator, fault), count in named.items():
        words = fault.removeprefix(operator).strip("_").replace("_", " ")
        print(f"| {operator} | {words} | {count} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="llm")
    parser.add_argument("--faults", action="store_true", help="also plant wrong operators")
    parser.add_argument(
        "--machines", nargs="+", choices=list(SWITCHES), default=list(SWITCHES), metavar="NAME"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| what | s | CPU s | MiB | records |\n|---|---|---|---|---|")
        a = timed("capture", lambda: capture(f"suite:{options.suite}", out=folder / "a"))
        timed("capture --like", lambda: capture(like=a, out=folder / "again"))
        truth = timed("truth", lambda: make_truth(a, out=folder / "truth"))
        timed("compare", lambda: compare(a, folder / "again", truth=truth), run=False)
        healthy(folder, a, truth, [name for name in options.machines if name != "native"])
        if options.faults:
            faults(folder, a, truth, options.machines)


if __name__ == "__main__":
    main()
