"""What the README, the tutorial and the pages of tasks show: their commands, run from top to bottom
on a real model.

    python benchmarks/shown_output.py [PAGE ...] [--check] [--work DIR]

MODEL is SmolLM2-135M-Instruct in bfloat16 (benchmarks/_trained.py). A command whose line says
`machine B` runs on other kernels of the same CPU, as in `divergence demo`; every other one on the
CPU's own. Each command is printed with all that it prints, and the seconds that it took, by the
clock and of a core.

--check holds the pages against that: every line of a ```text block must be a line of what the
commands before it printed, in that order. `...` in a page stands for what is left out. Figures
are those of one machine: another CPU prints others, and then the check names the lines.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._trained import checkpoint  # noqa: E402
from divergence.cli.demo import OTHER_KERNELS  # noqa: E402

__all__ = ["main"]

PAGES = (
    "README.md",
    "docs/outputs-changed.md",
    "docs/operators.md",
    "docs/ci.md",
    "docs/tutorial.md",
    "docs/doctor.md",
    "docs/selfcheck.md",
)
FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.M | re.S)
NAMED = re.compile(r"`([\w.-]+)`:\s*\Z")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--work", type=Path, help="a new directory for the runs, which are kept")
    given = parser.parse_args()
    model = checkpoint("bfloat16")
    missing = 0
    for page in given.pages:
        with tempfile.TemporaryDirectory(prefix="shown-") as folder:
            work = folder if given.work is None else given.work / Path(page).stem
            Path(work).mkdir(parents=True, exist_ok=True)
            missing += _page(page, Path(work), model, check=given.check)
    return 1 if missing else 0


def _page(page: str, work: Path, model: Path, *, check: bool) -> int:
    """Run and print one page; how many of its lines nothing printed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    printed: list[str] = []
    missing = 0
    after_output = False
    for match in FENCE.finditer(text):
        language, block = match[1], match[2]
        named = NAMED.search(text[: match.start()])
        if named and language in ("toml", "jsonl"):
            (work / named[1]).write_text(block, encoding="utf-8")
        if language == "text" and check:
            for line in _absent(block, printed):
                print(f"{page}: not printed: {line}", file=sys.stderr)
                missing += 1
        after_output = after_output or language == "text"
        for line, words, variables in _commands(language, block, model):
            if after_output:
                printed, after_output = [], False
            print(f"$ {line}", flush=True)
            began, before = time.perf_counter(), _core_seconds()
            out = _run(words, variables, work)
            seconds = time.perf_counter() - began, _core_seconds() - before
            print("{}[{:.0f} s, {:.0f} of a core]\n".format(out, *seconds), flush=True)
            printed.extend(out.splitlines())
    return missing


def _commands(
    language: str, block: str, model: Path
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """(the line, what to run, its variables) of every command of ours in a block."""
    if language not in ("console", "bash"):
        return
    for line in block.splitlines():
        line = line.strip().removeprefix("$ ")
        words = shlex.split(line, comments=True)
        known = words[:1] == ["divergence"] if language == "console" else words[:1] == ["python"]
        if not known:
            continue
        words = [str(model) if word in ("MODEL", "./elsewhere/MODEL") else word for word in words]
        start = ["-m", "divergence"] if words[0] == "divergence" else []
        variables = OTHER_KERNELS if "machine B" in line else {}
        yield line, [sys.executable, *start, *words[1:]], variables


def _run(words: list[str], variables: dict[str, str], work: Path) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DIVERGENCE_")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        words, cwd=work, env=environment | variables, text=True, stdout=subprocess.PIPE, check=False
    )
    return done.stdout


def _core_seconds() -> float:
    """What all commands so far have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _absent(block: str, printed: list[str]) -> Iterator[str]:
    """The lines of a shown block that are not among ``printed``, each after the one before."""
    position = 0
    for line in block.splitlines():
        if line.strip() in ("...", ""):
            continue
        parts = [r"\s+".join(map(re.escape, part.split())) for part in line.split("...")]
        pattern = re.compile(r"\s*" + r"\s*.*?\s*".join(parts) + r"\s*")
        found = [n for n in range(position, len(printed)) if pattern.fullmatch(printed[n])]
        if found:
            position = found[0] + 1
        else:
            yield line


if __name__ == "__main__":
    sys.exit(main())
