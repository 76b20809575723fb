"""Public reports of numbers that differ, rebuilt on tiny models: what the tool says of each.

    python benchmarks/reports.py [--only NAME] [--jobs 2] [--out results.jsonl]
    python benchmarks/reports.py --out results.jsonl --write docs/reports.md

A case (benchmarks/_reports.py) holds what is planted and what is right. Each is played in seconds
and is a line of ``--out``; those that are there are not played again: a stopped run goes on.
``--write`` makes the page of all results.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._reports import CLASSES, GRADES, Answer, Case, Grade, grades_of, overall, play
from benchmarks._reports_kernels import KERNELS
from benchmarks._reports_tokens import TOKENS
from benchmarks._reports_weights import WEIGHTS

CASES: dict[str, Case] = {case.name: case for case in (*KERNELS, *WEIGHTS, *TOKENS)}
WAYS = {"alone": "two runs", "truth": "with a truth made apart", "localize": "after localize"}
_WIDTH = 80
"""Characters of one answer in the table."""


_HEAD = """# Public reports, rebuilt

Public bug reports of models that gave wrong numbers, each rebuilt on a tiny random model with the
cause that its maintainers or its reporter stated. The fault is in B alone. This page is written by
`python benchmarks/reports.py --out FILE.jsonl --write docs/reports.md`.
"""
_GRADES = """**right**: kind, place and side are those of the cause, with the words that tell it
from similar ones. **abstains**: no place or no side, with the reason. **vague**: nothing wrong is
said, but the place or the cause is missing. **wrong**: another place or side, a false alarm, or a
missed fault. A case is wrong where any of its answers is; else its best answer with a truth counts.

The tables show what `localize` says where it names a place, else what `compare` says of the two
runs, of the first of several cases; all are right where nothing else is noted."""


class Result:
    """A case's answers, and their grades."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.case = CASES[line["name"]]
        self.answers = {line["way"]: Answer(**line) for line in line["answers"]}
        self.grades = grades_of(self.case, list(self.answers.values()))
        self.grade: Grade = overall(self.grades)


def played(name: str) -> dict[str, Any]:
    """A case's line of the file: all answers. They are graded when they are read."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        answers = [asdict(answer) for answer in play(CASES[name], Path(folder))]
        line = json.dumps({"name": name, "answers": answers})
        return json.loads(line.replace(f"{folder}/", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", help="a case, or the beginning of its name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="results, one a line; gone on with if it exists")
    parser.add_argument("--write", type=Path, help="the page of all results")
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    options = parser.parse_args()
    wanted = [n for n in CASES if not options.only or any(map(n.startswith, options.only))]
    results: dict[str, Result] = {}
    if options.out is not None and options.out.exists():
        lines = map(json.loads, options.out.read_text().splitlines())
        results = {line["name"]: Result(line) for line in lines if line["name"] in CASES}
    for line in _played([name for name in wanted if name not in results], options.jobs):
        results[line["name"]] = Result(line)
        _print(results[line["name"]], verbose=options.verbose)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    ordered = [results[name] for name in CASES if name in results]
    print("\n" + totals(ordered))
    if options.write is not None:
        options.write.write_text(page(ordered), encoding="utf-8")


def _played(names: list[str], jobs: int) -> Iterable[dict[str, Any]]:
    if jobs == 1:
        return map(played, names)
    # As many cases as a process can hold: torch and transformers are loaded once.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    return pool.map(played, names)


def _print(result: Result, *, verbose: bool) -> None:
    print(f"{result.grade:9} {result.case.name}", flush=True)
    for way, answer in result.answers.items():
        grade, why = result.grades[way]
        if verbose or grade != "right":
            said = f"{answer.kind} {answer.side} {answer.place}, {answer.unit} | {answer.headline}"
            print(f"    {way:9} {grade:9} {said[:230]}\n        {why[:230]}", flush=True)


def totals(results: list[Result]) -> str:
    count = Counter(result.grade for result in results)
    told = ", ".join(f"{count[grade]} {grade}" for grade in GRADES)
    return f"{len(results)} of {len(CASES)} cases: {told}"


def page(results: list[Result]) -> str:
    """docs/reports.md."""
    lines = [
        _HEAD,
        f"**{totals(results)}.**",
        "",
        "| | cases | " + " | ".join(GRADES) + " |",
        "|---|---|" + "---|" * len(GRADES),
    ]
    for letter, title in CLASSES.items():
        mine = [r for r in results if r.case.letter == letter]
        count = Counter(result.grade for result in mine)
        cells = " | ".join(str(count[grade]) for grade in GRADES)
        lines.append(f"| {title} | {len(mine)} | {cells} |")
    for way, title in WAYS.items():
        count = Counter(r.grades[way][0] for r in results if way in r.grades)
        cells = " | ".join(str(count[grade]) for grade in GRADES)
        lines.append(f"| *answers: {title}* | {sum(count.values())} | {cells} |")
    lines += [
        "",
        _GRADES,
    ]
    for letter, title in CLASSES.items():
        mine = [r for r in results if r.case.letter == letter]
        if not mine:
            continue
        lines += [
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| report and its cause | it says |",
            "|---|---|",
        ]
        rows: dict[tuple[str, str, str], list[Result]] = {}
        for result in mine:
            cause = f"{result.case.report}: {result.case.cause}"
            rows.setdefault((cause, _shown(result).kind, result.grade), []).append(result)
        times = Counter(about for about, _, _ in rows)
        lines += [_row(about, each, times[about]) for (about, _, _), each in rows.items()]
    return "\n".join(lines) + "\n"


def _shown(result: Result) -> Answer:
    answer = result.answers.get("localize")
    if answer is None or answer.kind == "stopped":
        answer = next(iter(result.answers.values()))
    return answer


def _row(about: str, results: list[Result], times: int) -> str:
    """Cases of one cause and one kind of answer, with the first one's answer, and its name where
    the cause has several rows."""
    result, note = results[0], ""
    if result.grade != "right":
        reasons = {text for grade, text in result.grades.values() if grade == result.grade}
        note = f"; **{result.grade}**: {_short('; '.join(sorted(reasons)))}"
    name = f"`{result.case.name}`: " if times > 1 else ""
    return f"| {about} | {name}{_cell(_shown(result))}{note} |"


def _cell(answer: Answer) -> str:
    side = {"candidate": "by B", "reference": "by A", "both": "by both", "neither": ""}
    by = side.get(answer.side or "", "")
    kind = "" if answer.kind == "localized" else answer.kind
    said = "" if kind in ("identical", "within_floor") else answer.headline
    parts = [kind, said, "" if by in said else by]
    return _short(", ".join(part for part in parts if part), _WIDTH)


def _short(text: str, width: int = _WIDTH) -> str:
    """Of one line, without what Markdown would read."""
    text = re.sub(r"\s+", " ", text).replace("|", "/").replace("<", "&lt;")
    text = re.sub(r"([_*`\[\]])", r"\\\1", text)
    return text if len(text) <= width else text[:width].rstrip("\\ ,;") + " ..."


if __name__ == "__main__":
    main()
