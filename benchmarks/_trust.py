"""Machinery of benchmarks/trust.py: small runs, machines with other code, and what counts as right.

A case plants one thing and looks at what the tool tells through its commands or its API. There are
three outcomes. *right*: the fault is named, at its place and side where the case asks for them.
*abstained*: the tool says that it cannot tell (`undetermined`, low confidence, refused with a
reason). *wrong*: everything else, a confident wrong answer above all.

A machine whose code is another is this process under a patch; one whose environment is another is
a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import divergence
from divergence.errors import DivergenceError
from tests.models.tiny import build

__all__ = [
    "BLOCK",
    "PROMPTS",
    "Bench",
    "Case",
    "Machine",
    "Ran",
    "Told",
    "abstained",
    "checks",
    "fails",
    "finds",
    "many_prompts",
    "play",
    "refuses",
    "right",
    "said",
    "stays_quiet",
    "words_of",
    "wrong",
]

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "In 1687 it was said that every body attracts every other body.",
    "2 + 2 = 4, and 7 x 8 = 56; what is 9 x 9?",
    "Once upon a time there was a machine that rounded to even.",
    "A list of colours: red, green, blue, and then some more of them.",
    "def add(a, b): return a + b  # the order of additions matters",
    "Numbers should stay the same on all machines, whatever happens.",
    "Rain falls mainly on the plain, said the weather report today.",
)
BLOCK = "model.layers.1"
"""Where faults are planted."""
FOUND = ("localized", "systematic", "nonfinite")
QUIET = ("identical", "within_floor")

Outcome = Literal["right", "abstained", "wrong"]


@dataclass(frozen=True, slots=True)
class Told:
    """What the tool said in one case, and what that is worth."""

    outcome: Outcome
    said: str


def right(text: str) -> Told:
    return Told("right", text)


def abstained(text: str) -> Told:
    return Told("abstained", text)


def wrong(text: str) -> Told:
    return Told("wrong", text)


@dataclass(frozen=True, slots=True)
class Case:
    """``point``: a short number to group by; ``planted``: for the table; ``run`` has the sentence
    that says what must hold as its docstring."""

    point: str
    planted: str
    run: Callable[[Bench], Told]

    @property
    def name(self) -> str:
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class Machine:
    """``patched()``: a context in which this machine's code is in place; ``variables``: its
    environment; with any, its commands run in a process of their own."""

    name: str
    patched: Callable[[], Any] = contextlib.nullcontext
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ran:
    """One command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


HEALTHY = Machine("healthy")


class Bench:
    """A folder of models and runs. What is made of the same things twice is made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number = 0
        self._made: dict[str, Path] = {}
        self.sizes: dict[str, float] = {}

    def folder(self, name: str = "run") -> Path:
        """A path that is not taken yet."""
        self._number += 1
        return self.root / f"{name}-{self._number}"

    def model(self, architecture: str = "llama", dtype: str = "bfloat16", **values: Any) -> Path:
        key = f"model {architecture} {dtype} {sorted(values.items())}"
        if key not in self._made:
            self._made[key] = build(architecture, self.folder("model"), dtype=dtype, **values)
        return self._made[key]

    def reference(
        self,
        model: Path | None = None,
        *,
        prompts: int | tuple[str, ...] = 2,
        tokens: int = 3,
        **values: Any,
    ) -> Path:
        """The healthy first run."""
        key = f"a {model} {prompts} {tokens} {sorted(values.items())}"
        if key not in self._made:
            texts = many_prompts(prompts) if isinstance(prompts, int) else prompts
            self._made[key] = self.capture(
                str(model or self.model()), prompts=texts, max_new_tokens=tokens, **values
            )
        return self._made[key]

    def capture(self, *args: Any, machine: Machine = HEALTHY, **values: Any) -> Path:
        out = self.folder()
        with machine.patched():
            divergence.capture(
                *args,
                out=out,
                device="cpu",
                machine=divergence.MachineOptions(probe=values.pop("probe", False)),
                **values,
            ).close()
        return out

    def truth(self, run: Path, *, machine: Machine = HEALTHY) -> Path:
        key = f"truth {run} {machine.name}"
        if key not in self._made:
            out = self.folder("truth")
            with machine.patched():
                divergence.truth(run, out=out).close()
            self._made[key] = out
        return self._made[key]

    def cli(self, *args: object, machine: Machine = HEALTHY, cwd: Path | None = None) -> Ran:
        """A command on that machine; in this process unless its environment is another."""
        words = [str(arg) for arg in args]
        if not machine.variables:
            with machine.patched():
                return _in_process(words, cwd)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **machine.variables,
        }
        done = subprocess.run(
            [sys.executable, "-m", "divergence", *words],
            env=environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)


def many_prompts(count: int) -> tuple[str, ...]:
    """The first are PROMPTS; more are those with a number before them."""
    return tuple(
        PROMPTS[n % len(PROMPTS)] if n < len(PROMPTS) else f"{n}. {PROMPTS[n % len(PROMPTS)]}"
        for n in range(count)
    )


def _in_process(words: list[str], cwd: Path | None) -> Ran:
    from divergence.cli.main import app

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _in_folder(cwd):
        try:
            app(words, prog_name="divergence")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _in_folder(cwd: Path | None) -> Iterator[None]:
    if cwd is None:
        yield
    else:
        with contextlib.chdir(cwd):
            yield


# ── what counts as right ────────────────────────────────────────────────────────────────────────


def said(report: Any) -> str:
    """Kind, confidence, side and onset in one line."""
    verdict, onset = report.verdict, report.verdict.onset
    place = ""
    if onset is not None:
        place = f" {onset.site} sample {onset.sample} step {onset.step} ({onset.pass_})"
    side = f" side {verdict.side}" if verdict.side else ""
    return f"{verdict.kind} {verdict.confidence}{side}{place}"


def words_of(report: Any) -> str:
    """All that a report says in sentences, for cases that ask whether something is named."""
    verdict = report.verdict
    lines = [verdict.summary, *(fact.text for fact in verdict.evidence), *verdict.next]
    lines += report.notes
    lines += [
        f"{line.check}: {line.reference} / {line.candidate} {line.detail or ''}"
        for line in report.preflight
        if line.status != "same"
    ]
    return "\n".join(lines)


def finds(
    report: Any,
    *,
    block: str | None = None,
    side: str | None = None,
    sides: tuple[str | None, ...] | None = None,
    sample: int | None = None,
    step: int | None = None,
    kinds: tuple[str, ...] = FOUND,
) -> Told:
    """right: of these kinds, at this place, by this side. ``side`` alone also accepts no side;
    ``sides``: the ones accepted."""
    verdict, onset, text = report.verdict, report.verdict.onset, said(report)
    if sides is None and side is not None:
        sides = (side, None)
    if sides is not None and verdict.side not in sides and verdict.kind not in QUIET:
        return abstained(text) if verdict.confidence == "low" else wrong(text + " [side]")
    if verdict.kind in kinds:
        at = (
            block is None or (onset is not None and onset.block == block),
            sample is None or (onset is not None and onset.sample == sample),
            step is None or (onset is not None and onset.step == step),
        )
        if all(at):
            return right(text)
        return abstained(text) if verdict.confidence == "low" else wrong(text + " [place]")
    if verdict.kind == "undetermined" or (
        verdict.confidence == "low" and verdict.kind not in QUIET
    ):
        return abstained(text)
    return wrong(text)


def stays_quiet(report: Any) -> Told:
    """right: no alarm among healthy runs."""
    text = said(report)
    if report.verdict.kind in QUIET:
        return right(text)
    return abstained(text) if report.verdict.kind == "undetermined" else wrong(text)


def refuses(run: Callable[[], Any], otherwise: Callable[[Any], Told]) -> Told:
    """abstained: an error of the project's own, with its reason; else what came is judged."""
    try:
        got = run()
    except DivergenceError as error:
        return abstained(f"refused: {error.message}")
    return otherwise(got)


def fails(ran: Ran) -> Told:
    """right: `check` ended with 1; abstained: refused with 2; 0 is a silent pass."""
    text = f"exit {ran.code}: {' '.join((ran.out or ran.err).split())[:110]}"
    if ran.code == 1:
        return right(text)
    return abstained(text) if ran.code == 2 else wrong(text)


def checks(bench: Bench, a: Path, b: Path, *options: object) -> Told:
    """right: exit 1; abstained: refused with exit 2; wrong: a pass, or a fault of the tool."""
    return fails(bench.cli("check", a, b, *options))


# ── two machines, as the docs tell ──────────────────────────────────────────────────────────────


def play(
    bench: Bench,
    a: Path,
    b: Path,
    *,
    reference: Machine,
    candidate: Machine,
    here: str = "candidate",
    rounds: int = 5,
) -> tuple[dict[str, Any], str]:
    """`localize` on one machine, what it asks for on the other, and again: the last answer as
    JSON, and everything that was printed. {} where the command ended in a refusal."""
    machines = {"reference": reference, "candidate": candidate}
    folder, printed, answer = bench.folder("localize"), "", {}
    side, mine = here, machines.get(here, candidate)
    for _ in range(rounds):
        ran = bench.cli("localize", a, b, "-o", folder, "--here", side, "--json", machine=mine)
        printed += ran.text
        if ran.code not in (0, 2) or not ran.out.strip().startswith("{"):
            return {}, printed
        answer = json.loads(ran.out)
        if not answer["commands"]:
            break
        for command in answer["commands"]:
            words, _, note = command.partition("#")
            there = "reference" if "A's machine" in note else "candidate"
            ran = bench.cli(*shlex.split(words)[1:], machine=machines[there])
            printed += ran.text
            if ran.code and words[:19] != "divergence localize":  # which may stop for the other
                return answer, printed
    return answer, printed
