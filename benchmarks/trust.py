"""Is the tool ever wrong with confidence? Plants what once misled it and prints what it says now.

    python benchmarks/trust.py [--only NAME ...] [--list] [--keep DIR]

Every case plants one thing on a small model through the public commands and API: a fault in one
prompt of many, other code on one side, an environment that no field records, faults outside the
blocks, goldens with holes, policies with nonsense. The table has a row for each: what was planted,
what the tool said, and whether that is right, an abstention with its reason, or wrong. Exit 1 if
any is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "200")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import (
    _trust_evidence,
    _trust_gate,
    _trust_passes,
    _trust_ran,
    _trust_sides,
    _trust_units,
)
from benchmarks._trust import Bench, Case, Told, abstained, wrong
from divergence.errors import DivergenceError
from divergence.recording import api

CASES: tuple[Case, ...] = (
    *_trust_units.CASES,
    *_trust_evidence.CASES,
    *_trust_sides.CASES,
    *_trust_passes.CASES,
    *_trust_gate.CASES,
    *_trust_ran.CASES,
)


def tell(bench: Bench, case: Case) -> Told:
    """What the case came to. An error of the project's own is a refusal; any other is wrong."""
    try:
        return case.run(bench)
    except DivergenceError as error:
        return abstained(f"refused: {error.message[:110]}")
    except Exception as error:
        return wrong(f"crashed: {type(error).__name__}: {str(error)[:110]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or globs of cases")
    parser.add_argument("--list", action="store_true", help="list the cases, run none")
    parser.add_argument("--keep", type=Path, help="keep models and runs in this folder")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if not options.only or any(fnmatch.fnmatch(case.name, name) for name in options.only)
    ]
    if not chosen:
        parser.error("no case of that name: see --list")
    if options.list:
        for case in chosen:
            print(f"{case.point:>4}  {case.name:32} {case.run.__doc__.splitlines()[0]}")
        return 0
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    api.LEAST_SECONDS = 300.0  # no truth is given up for time, however busy this machine is
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    print("| | case | planted | the tool said | |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.keep or Path(folder))
        for case in chosen:
            began = time.perf_counter()
            told = tell(bench, case)
            counts[told.outcome] += 1
            mark = "**wrong**" if told.outcome == "wrong" else told.outcome
            text = " ".join(told.said.split()).replace("|", "/")
            print(f"| {case.point} | {case.name} | {case.planted} | {text} | {mark} |", flush=True)
            print(f"{case.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    print(
        f"\n{len(chosen)} of {len(CASES)} cases: {counts['right']} right, {counts['abstained']} "
        f"abstained, {counts['wrong']} wrong; {time.perf_counter() - start:.0f} s"
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
