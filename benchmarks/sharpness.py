"""Would benchmarks/same_answers.py notice a small change?

    python benchmarks/sharpness.py --work DIR [--only PATTERN]

Small edits are planted one at a time in a copy of this tree: a limit moved, a word of a sentence, a
column dropped, a row's order, an exit code, a side swapped, a fact lost on one of the faces. Each
is (file, old text, new text, questions): the old text must stand in the file exactly once, else
the edit says so and counts as not noticed. The questions are a pattern for --only, as whoever edits
that file would choose them: those of the command whose code it is, not those that are known to
change. Ends with 1 where more than one edit goes unnoticed.

``--work`` is same_answers' own work folder: runs and answers of HEAD are kept there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

EDITS: list[tuple[str, str, str, str]] = [
    # a limit moved
    (
        "numerics/floor.py",
        "    token: float = 12.0",
        "    token: float = 14.0",
        "^compare a-llama-bfloat16 ",
    ),
    (
        "domains/training/judging.py",
        "_JUMP, _STAYS, _MIN_AFTER = 10.0,",
        "_JUMP, _STAYS, _MIN_AFTER = 2.0,",
        "losses",
    ),
    (
        "domains/logprobs/pattern.py",
        "_LEAST = THRESHOLDS.truth_least",
        "_LEAST = 4.0",
        "^compare (served|rollout)",
    ),
    ("experiments/sensitivity.py", "PER_DOUBLING = 8", "PER_DOUBLING = 4", "^sensitivity"),
    ("domains/probe/quick.py", "QUICK_TERMS = 512", "QUICK_TERMS = 256", "^probe"),
    # a word
    (
        "report/summary.py",
        "{len(by['differs'])} different,",
        "{len(by['differs'])} other,",
        "^compare a-llama-float32 ",
    ),
    (
        "analyses/tokens/sentences.py",
        "p99 {p99:.2e} nats",
        "p95 {p99:.2e} nats",
        "^compare a-gpt2",
    ),
    ("domains/doctor/show.py", 'return "no rung fails"', 'return "all rungs hold"', "^doctor"),
    ("run/target.py", "is not the name of an archive", "is no archive", "^pack"),
    (
        "domains/importing/importing.py",
        "{out} lies in the dump itself",
        "{out} is in the dump itself",
        "^import",
    ),
    # a column or a line dropped
    (
        "domains/scores/show.py",
        '("width", "p_value", "equal", "needed")',
        '("width", "p_value", "equal")',
        "^scores",
    ),
    (
        "report/inspection.py",
        '[named("like", manifest.like)] if manifest.like else []',
        "[]",
        "^inspect",
    ),
    (
        "report/capturing.py",
        'named("machine", f"',
        'named("host", f"',
        "^capture",
    ),
    (
        "domains/collectives/sections.py",
        '(Column("error", limit_share), "limit_usage"),',
        '(Column("error", limit_share), "num_cases"),',
        "collectives",
    ),
    # an order
    (
        "report/experiments.py",
        "rows=[(way.name, way, way) for way in result.lines],\n",
        "rows=[(way.name, way, way) for way in result.lines[::-1]],\n",
        "^selfcheck",
    ),
    (
        "report/checking.py",
        "    for case in page.cases:\n",
        "    for case in page.cases[::-1]:\n",
        "^check",
    ),
    (
        "report/matrix.py",
        "for row in matrix.rows]\n    hidden",
        "for row in matrix.rows[::-1]]\n    hidden",
        "healthy-llama-float32 planted",
    ),
    # an exit code
    ("cli/check.py", "        exit_with(1)\n", "        exit_with(2)\n", "^check"),
    # a side or a number swapped
    (
        "analyses/blocks/units.py",
        "return Blame(SIDES[x > 0], why,",
        "return Blame(SIDES[x < 0], why,",
        "^compare .*--truth",
    ),
    (
        "domains/quantization/sentences.py",
        "{kl_p99:.3g}, max {kl_max:.3g} nats",
        "{kl_p90:.3g}, max {kl_max:.3g} nats",
        "^quantize",
    ),
    (
        "gate/sentences.py",
        "{check}: {reference} in the golden, {candidate} in the new run[[ ({details})]]",
        "{check}: {candidate} in the golden, {reference} in the new run[[ ({details})]]",
        "^check",
    ),
    # a fact lost on one of the faces
    (
        "report/bundle.py",
        '    files = {"report.json": report.to_json(indent=1)}',
        "    files: dict[str, str] = {}",
        "^bundle",
    ),
    ("domains/view/app.py", "report_lines(report, verbose=True)", "report_lines(report)", "^view"),
    ("analyses/blocks/sections.py", "_WORST = 5", "_WORST = 4", "^compare .* page"),
    (
        "ops/reproducer.py",
        '        lines += ["", f"Other arguments: {text}."]',
        "        pass",
        "^repro",
    ),
]
"""(file below divergence/, text in it, text in its place, questions)."""


def plant(tree: Path, file: str, old: str, new: str) -> str:
    """Put the edit in; the file's text before. Raises ValueError where it does not apply."""
    path = tree / "divergence" / file
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"stands {text.count(old)} times in the file")
    path.write_text(text.replace(old, new))
    return text


def ask(tree: Path, work: Path, pattern: str) -> tuple[int, int]:
    """(answers, answers that differ from HEAD's)."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks/same_answers.py"),
            "--new",
            str(tree),
            "--work",
            str(work),
            "--only",
            pattern,
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    counts = re.search(r"^(\d+) answers to \d+ questions, (\d+) differ", done.stdout, re.M)
    if counts is None:
        raise SystemExit(f"{pattern}: {done.stdout}{done.stderr}")
    return int(counts[1]), int(counts[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="same_answers' work folder")
    parser.add_argument("--only", default="", help="edits of files that this expression is in")
    options = parser.parse_args()
    chosen = [edit for edit in EDITS if re.search(options.only, edit[0])]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary)
        for part in ("divergence", "configs"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        asked, different = ask(tree, options.work, "|".join({pattern for *_, pattern in chosen}))
        if different:
            raise SystemExit(f"{different} of {asked} answers differ before anything is planted")
        for file, old, new, pattern in chosen:
            try:
                before = plant(tree, file, old, new)
            except ValueError as error:
                print(f"DOES NOT APPLY  {file}: {old!r} {error}", flush=True)
                unnoticed += 1
                continue
            asked, different = ask(tree, options.work, pattern)
            (tree / "divergence" / file).write_text(before)
            unnoticed += not different
            state = "noticed" if different else "UNNOTICED"
            text = old.strip().splitlines()[0][:60]
            print(f"{state:<10}{different:>4} of {asked:>4}  {file}: {text}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} edits are noticed")
    raise SystemExit(unnoticed > 1)


if __name__ == "__main__":
    main()
