"""Two machines played through in full, as the documents tell users: right module, right side?

    python benchmarks/two_machines.py [--only NAME ...] [--sides candidate,reference] [--dtype ...]

Machine A and machine C are processes of their own; one of them is faulty in all that it runs, by
kernel, code or environment (benchmarks/_machine_faults.py), and no field of a run says so. Every
step is a command line:

    A: capture, C: capture --like, A: reference, A: compare, A: localize,
    and then whatever `localize` prints, each command on the machine that it names, until
    nothing is left to do; with --twice the same `localize` on both machines again.

Every answer on the way is judged, not only the last. *wrong*: a side that is not the faulty one, a
module that is not the faulty one, "nothing found" where there is a fault, or "proven yes" of any
of these. *right*: module and side. *refused*: no side, or no operator, with the reason. *below*:
nothing found of a fault that moves no block's output by 3 floors (a floor: the better side's error
there), as kernels of some bits less do where the model itself is in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._machine_faults import FAULTS, MachineFault  # noqa: E402

__all__ = ["Play", "Step", "main", "play"]

PROMPT = "A bridge is built twice: once on paper."
ROUNDS = 5
BELOW = 3.0
SITE = Path(__file__).parent / "_machine_site"


class Machine:
    """A process that runs command lines of `divergence`, each in a child of its own."""

    def __init__(self, name: str, folder: Path, fault: MachineFault | None) -> None:
        self.name, self._folder = name, folder
        env = {k: v for k, v in os.environ.items() if not k.startswith("DIVERGENCE_")}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
        if fault is not None:
            env |= dict(fault.variables) | {"TWO_MACHINES_FAULT": fault.name}
            paths.insert(0, str(SITE))
        env["PYTHONPATH"] = os.pathsep.join(paths)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.two_machines import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=env,
        )

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `divergence WORDS`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"machine {self.name} ended")
        code, out, err = json.loads(line)
        return code, out, err

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def serve() -> None:
    """One command line a line; each runs in a fork, so that none leaves anything behind."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import divergence.cli.main
    import divergence.experiments.localization.localize
    import divergence.recording.api
    import divergence.recording.engines.engine

    answers = os.dup(1)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("out", "err")]
            child = os.fork()
            if child == 0:
                for number, file in enumerate(files, 1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
                code = 3
                try:
                    divergence.cli.main.app(json.loads(line), prog_name="divergence")
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
            os.write(answers, (json.dumps([code, *texts]) + "\n").encode())


@dataclass(slots=True)
class Step:
    """One answer of `localize`: on which machine, what it said."""

    machine: str
    code: int
    answer: dict


@dataclass(slots=True)
class Play:
    """One fault on one side, played through."""

    fault: MachineFault
    side: str
    dtype: str
    compared: str = ""
    size: float = math.inf
    """Floors by which the fault moves a block's output, at the block where that is most."""
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def outcome(self) -> tuple[str, str]:
        """(right, refused or wrong; the last answer's reason). One wrong answer is enough."""
        found = [self._judge(step) for step in self.steps]
        wrong = [one for one in found if one[0] == "wrong"]
        return wrong[0] if wrong else found[-1] if found else ("refused", self.compared)

    def _judge(self, step: Step) -> tuple[str, str]:
        answer, operator = step.answer, step.answer.get("operator")
        if "levels" not in answer:
            return "refused", answer.get("error", "")
        kind = answer["levels"][0]["verdict"]
        if not self.fault.expected:  # healthy
            fine = operator is None and kind in ("within_floor", "identical")
            return ("right" if fine else "wrong"), kind
        if operator is None:
            # commands left, or a stated reason other than "nothing is wrong"
            reason = answer["stopped"] or ""
            if answer["refused"] or answer["commands"]:
                return "refused", reason
            if kind in ("within_floor", "identical"):
                text = f"{kind}, {self.size:.1f} floors: {reason}"
                return ("below" if self.size < BELOW else "wrong"), text
            named = answer["levels"][-1]["site"] or answer["levels"][0]["site"] or ""
            text = f"{named} {reason}"
            return ("refused" if self._is_there(text) else "wrong"), reason
        said = [operator["site"], operator["candidate_site"], *operator["fed_by"]]
        if not any(map(self._is_there, said)):
            return "wrong", f"operator {operator['site']}"
        if answer["side"] is None:
            return "refused", answer["contradiction"] or answer["doubt"] or "no side"
        if answer["side"] != self.side:
            return "wrong", f"side {answer['side']}"
        proof = answer["causal"]
        return "right", "" if proof is None else "proven" if proof["holds"] else "not proven"

    def _is_there(self, text: str) -> bool:
        return (
            re.search(self.fault.expected.replace("BLOCK", r"model\.layers\.\d+"), text) is not None
        )

    @property
    def named(self) -> str:
        answers = [step.answer for step in self.steps if step.answer.get("operator")]
        return answers[-1]["operator"]["site"] if answers else "-"

    @property
    def said(self) -> str:
        sides = [step.answer.get("side") for step in self.steps if "levels" in step.answer]
        return (sides[-1] if sides else None) or "-"


def play(
    fault: MachineFault,
    side: str,
    folder: Path,
    *,
    model: Path,
    dtype: str = "float32",
    say: bool = False,
    twice: bool = False,
) -> Play:
    """From the first capture to the last localize."""
    start, done = time.perf_counter(), Play(fault=fault, side=side, dtype=dtype)
    folder.mkdir(parents=True)
    machines = {
        one: Machine(name, folder, fault if one == side else None)
        for one, name in (("reference", "A"), ("candidate", "C"))
    }
    a, c = machines["reference"], machines["candidate"]

    def must(machine: Machine, *words: str | Path) -> str:
        code, out, err = machine.run(*words)
        if say:
            print(f"$ {machine.name}: divergence {shlex.join(map(str, words))}\n{out}{err}")
        if code not in (0, 1):
            raise RuntimeError(f"{machine.name}: {words[0]} ended in {code}: {err}")
        return out

    try:
        attention = ["--attn-implementation", fault.attention] if fault.attention else []
        must(
            a,
            "capture",
            model,
            "-o",
            "a",
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "2",
            "--dtype",
            dtype,
            *attention,
            "-q",
        )
        must(c, "capture", "--like", "a", "-o", "b", "-q")
        must(a, "truth", "a", "-o", "truth", "-q")
        report = json.loads(must(a, "compare", "a", "b", "--truth", "truth", "--json"))
        done.compared, done.size = report["verdict"]["summary"], _size(report)
        words = ["localize", "a", "b", "--truth", "truth", "-o", "ab"]
        turn = ["reference"]
        for _ in range(ROUNDS):
            asked: dict[str, list[list[str]]] = {}
            for one in turn:
                answer = _localize(done, machines[one], words, say)
                for command in answer.get("commands", ()):
                    text, _, where = command.partition("   # on ")
                    target = {"A": "reference", "B": "candidate"}[where.partition("'s machine")[0]]
                    asked.setdefault(target, []).append(shlex.split(text)[1:])
            if not asked:
                break
            for target, commands in asked.items():
                for command in commands:
                    if command[0] != "localize":
                        must(machines[target], *command)
            turn = list(asked)
        if twice:
            for one in ("reference", "candidate"):
                _localize(done, machines[one], words, say)
    finally:
        for machine in machines.values():
            machine.close()
    done.seconds = time.perf_counter() - start
    return done


def _size(report: dict) -> float:
    """Of the fault: by how much more one side is off than the other at a block's output, in
    quadrature, over the smaller error. rms over the forwards of a phase; the block and phase where
    it is most. (Which side that is, is not asked: a fault of the reference's code is in its truth
    as well, and then the other side looks wrong.)"""
    errors: dict[tuple[str, bool], list[float]] = {}
    for site in report["sites"]:
        if site["role"] == "block" and site["site"].endswith(":out") and site["truth"] is not None:
            sums = errors.setdefault((site["site"], site["step"] > 0), [0.0, 0.0])
            for number, side in enumerate(("reference", "candidate")):
                sums[number] += site["truth"][f"{side}_error"] ** 2
    sizes = [math.sqrt((max(two) - min(two)) / max(min(two), 1e-300)) for two in errors.values()]
    return max(sizes, default=0.0)


def _localize(done: Play, machine: Machine, words: list[str], say: bool) -> dict:
    code, out, err = machine.run(*words, "--json")
    try:
        answer = json.loads(out)
    except ValueError:
        answer = {"error": err.strip()}
    answer.pop("report", None)
    if say:
        print(f"$ {machine.name}: divergence {shlex.join(words)}   -> {code}")
        print(json.dumps(answer, indent=1)[:6000], err)
    done.steps.append(Step(machine=machine.name, code=code, answer=answer))
    return answer


def main() -> None:
    from tests.models.tiny import build

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--sides", default="candidate,reference")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--say", action="store_true", help="print every command and answer")
    parser.add_argument("--twice", action="store_true", help="localize once more on both machines")
    parser.add_argument("--share", default="1/1", help="2/3: the second third of the plays")
    options = parser.parse_args()
    part, count = map(int, options.share.split("/"))
    counts: dict[str, int] = {}
    print("| fault | kind | on | dtype | operator named | side named | outcome | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as text:
        model = build("llama", Path(text) / "model", dtype=options.dtype, num_blocks=3)
        number = 0
        for fault in FAULTS.values():
            if options.only and fault.name not in options.only:
                continue
            for side in options.sides.split(","):
                number += 1
                if number % count != part % count:
                    continue
                done = play(
                    fault,
                    side,
                    Path(text) / str(number),
                    model=model,
                    dtype=options.dtype,
                    say=options.say,
                    twice=options.twice,
                )
                outcome, reason = done.outcome
                counts[outcome] = counts.get(outcome, 0) + 1
                print(
                    f"| {fault.name} | {fault.kind} | {side} | {done.dtype} | {done.named} "
                    f"| {done.said} | {outcome} | {reason[:160]} ({done.seconds:.0f} s) |",
                    flush=True,
                )
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
