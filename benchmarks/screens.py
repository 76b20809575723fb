"""Every first screen of the net in one file, and every command that they offer run.

    python benchmarks/screens.py [--only PATTERN] [--work DIR] [--verbose] [--follow] [--jobs N]

Each question of `_questions.py` is asked for its text in a terminal of 100 letters, and printed
with its number of lines. ``--follow``: each command that stands on a line of its own in an answer
(under `next` and elsewhere) is run in a folder of its own beside the runs that the question names,
in the order in which they stand, and so are the commands that those offer; it has to end with 0 or
1 and must not offer itself again. What takes another machine (the model of a recorded fixture, an
accelerator) is counted apart, with what needs it. Exits with 1 where a command is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import same_answers
from _questions import INPUTS
from same_answers import ROOT, Side, needs, order, stubs

PLACES = {"FILE": "texts.txt", "URL": "PLAIN", "MODEL": "model-llama-float32"}
"""What words in capitals stand for that are no run."""
DEPTH = 2
ELSEWHERE = re.compile(
    r"cannot load '|no such model|device cuda is not there|(?:this is|was) not (?:made on )?[AB]'s"
    r" machine"
)
"""What says that a command wants another machine."""
EXAMPLES = ("--help", "compare --help")
"""Questions whose answers show commands that nobody offers."""


def questions(pattern: str) -> list[str]:
    """Those whose answer is a text; without an option that takes it away."""
    asked = dict.fromkeys(
        question for question, face in same_answers.chosen(pattern) if face not in ("api", "view")
    )
    return list(asked)


def offered(text: str) -> list[str]:
    """Commands on a line of their own."""
    lines = (re.sub(r"\s{2,}#.*", "", line).strip() for line in text.splitlines())
    tools = ("divergence ", "python ", "torchrun ")
    return list(dict.fromkeys(line for line in lines if line.startswith(tools)))


class Walk:
    """One question in a folder of its own, and what it leads to."""

    def __init__(self, side: Side, question: str, folder: Path) -> None:
        self.side, self.question, self.folder = side, question, folder
        self.tried: dict[str, str] = {}
        """Each command, and what is wrong with it."""
        self.elsewhere: list[str] = []
        """Commands that take another machine."""
        self.missing: set[str] = set()
        """What they would have made."""

    def ask(self, text: str, tool: str = "divergence") -> tuple[int, str, str]:
        if tool != "divergence":  # a script that an answer wrote, or a capture by several ranks
            module = ["-m", "torch.distributed.run"] * (tool == "torchrun")
            words = [sys.executable, *module, *shlex.split(text)]
            done = subprocess.run(
                words, cwd=self.folder, capture_output=True, text=True, check=False
            )
            return done.returncode, done.stdout, done.stderr
        with self.side.server("a") as server:
            printed = self.folder / ".printed"
            code = server.ask("command", self.side.filled(text), printed, self.folder)
            out, err = (Path(f"{printed}.{name}").read_text() for name in ("out", "err"))
        return code, out, err

    def other(self) -> str:
        """The second run: the one that was made, else the one that was named last."""
        if (self.folder / "other").exists():
            return "other"
        named = [word for word in self.question.split() if word in INPUTS]
        return named[-1] if named else "other"

    def follow(self, text: str, depth: int = DEPTH) -> None:
        """Runs the commands of an answer, and those of their answers."""
        for command in offered(text):
            if command in self.tried:
                continue
            self.tried[command] = ""
            made = re.search(r" -o (\S+)", command)
            first = next(iter(needs("", self.question)), "a")
            source = (
                next(
                    (name for name in needs(first, INPUTS[first][1]) if "model" not in name), first
                )
                if first in INPUTS
                else first
            )
            places = {"OTHER": self.other(), "A": source, "B": source, "RUN": source, **PLACES}
            if made is not None:
                places["OTHER"] = "other"
            words = [places.get(word, word) for word in shlex.split(command)]
            if self.missing.intersection(words[1:]):
                self.elsewhere.append(command)
                continue
            code, out, err = self.ask(shlex.join(words[1:]), words[0])
            if code not in (0, 1) and ELSEWHERE.search(err + out):
                self.elsewhere.append(command)
                self.missing |= {places.get(made[1], made[1])} if made is not None else set()
            elif code not in (0, 1):
                self.tried[command] = f"exit {code}: {err.strip()}"
            elif command in offered(out) and "OTHER" not in command:
                self.tried[command] = "offers itself again"
            elif depth > 1:
                self.follow(out, depth - 1)


def walk(side: Side, question: str, verbose: bool, follow: bool) -> tuple[str, Walk]:
    """The screen of a question, and the commands that it led to."""
    folder = Path(tempfile.mkdtemp(dir=side.folder, prefix=".walk-"))
    try:
        for name in [name for level in order(needs("", question)) for name in level]:
            path = side.folder / name
            copy = shutil.copytree if path.is_dir() else os.link
            extra = {"copy_function": os.link} if path.is_dir() else {}
            copy(path, folder / name, **extra)
        for path in side.folder.glob("*.toml"):
            os.link(path, folder / path.name)
        (folder / "texts.txt").write_text("Snow fell on the town.\nOne two three.\n")
        (folder / "OUT").mkdir()
        now = Walk(side, question, folder)
        code, out, err = now.ask(question + " -v" * (verbose and not question.endswith("-v")))
        num = len(out.rstrip("\n").splitlines())
        shown = f"{'=' * 20} {num} lines, exit {code}: {question}\n{out}"
        shown += "".join(f"! {line}\n" for line in err.splitlines())
        if follow and not question.startswith(EXAMPLES):
            now.follow(out)
        return shown, now
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answers(
    place: Path, source: Path, asked: list[str], verbose: bool, follow: bool, jobs: int
) -> Iterator[tuple[str, Walk]]:
    """``walk`` of each; inputs that are not in ``place`` are made first."""
    for path in (place / "runs/.made", place / "runs/.log"):
        path.mkdir(parents=True, exist_ok=True)
    with stubs(source) as addresses, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        side = Side(source, place / "runs", addresses)
        try:
            names = list(dict.fromkeys(name for each in asked for name in needs("", each)))
            for level in order(names):
                if wrong := [text for text in pool.map(side.make, level) if text]:
                    raise SystemExit("\n".join(wrong))
            yield from pool.map(lambda each: walk(side, each, verbose, follow), asked)
        finally:
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="questions that this expression is in")
    parser.add_argument("--work", type=Path, help="keep runs there, or take those of same_answers")
    parser.add_argument("--verbose", action="store_true", help="the whole answers")
    parser.add_argument("--follow", action="store_true", help="run the commands that are offered")
    parser.add_argument("--jobs", type=int, default=2, help="questions asked at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.work or Path(temporary)).resolve()
        num, elsewhere, wrong = 0, 0, []
        asked = questions(options.only)
        how = options.verbose, options.follow, options.jobs
        for shown, way in answers(place, ROOT, asked, *how):
            print(shown, flush=True)
            num += len(way.tried)
            elsewhere += len(way.elsewhere)
            for command, text in way.tried.items():
                there = " (takes another machine)" * (command in way.elsewhere)
                print(f"-> {command}{there}" + (f"\n   WRONG: {text}" if text else ""), flush=True)
            wrong += [command for command, text in way.tried.items() if text]
        print(
            f"{len(asked)} answers, {num} commands, {elsewhere} of them for another machine, "
            f"{len(wrong)} wrong"
        )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
