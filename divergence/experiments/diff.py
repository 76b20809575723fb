"""diff(): one model under two settings of this machine, from the captures to the verdict.

Every step is a command of this tool, run in a process of its own: so a setting may be anything that
a process can have (a device, an environment variable, another Python with other versions), and
whoever wants to do a step by hand sees how. A step whose run is there already, made by the same
command, is not done again; and the reference of an earlier diff, with its truth, is this one's too
where nothing that it was made of has changed (``reuse``).

A process imports while what comes before its step runs: the first while this one imports what
compares, the second while the first captures.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divergence.errors import DivergenceError, FaultError, RunExistsError, UsageError, check_process
from divergence.facts import fact, sentence
from divergence.output import output_folder, write_output
from divergence.run.command import command_line, command_words, quoted, quoted_words, split_words
from divergence.run.site import near_names, one_or_more
from divergence.words import HEADLINES, Progress, letter, silent

if TYPE_CHECKING:
    from divergence.comparison.result import Report
    from divergence.run.reader import Run

_ESCALATES = ("transformers", "compile")
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Of transformers; others are its own affair unless they look like a misspelt one of these."""
_NARROW = ("bfloat16", "float16")
_PLACED = ("localized", "systematic")
_SECRET = re.compile(r"(?i)token|secret|passw|credential|(?:api|access)_?key")
_AHEAD = str(Path(__file__).with_name("ahead.py"))
OnStep = Callable[[int, str, bool], None]
"""(number of the step, its command, is it done already?)"""


@dataclass(frozen=True, slots=True)
class DiffResult:
    """Holds what diff made: the report, and where its runs lie."""

    report: Report
    folder: Path
    localize_words: list[str] | None
    """The words of ``localize``."""

    @property
    def localize(self) -> str | None:
        """The command that goes on to the operator, where the verdict names a block and this
        machine can make both sides again."""
        return None if self.localize_words is None else quoted_words(self.localize_words)

    def go_on(self) -> int:
        """Runs ``localize``, which prints its own answer; its exit code.

        In a process of its own: those that captured have ended, and their models with them. To keep
        one waiting would hold a model's memory while the other side is captured and both are
        compared, which most diffs are for nothing; and this process has loaded neither."""
        if self.localize_words is None:
            return 0
        words = [sys.executable, "-m", *self.localize_words]
        code = subprocess.run(words, check=False).returncode
        check_process(code, "localize")
        return code

    def _repr_html_(self) -> str:
        from divergence.html.parts import small_table

        verdict = self.report.verdict
        return small_table(
            f"{HEADLINES[verdict.kind]}: {verdict.summary}",
            [
                ("begins at", None if verdict.onset is None else verdict.onset.site),
                ("wrong side", verdict.side and letter(verdict.side)),
                ("confidence", verdict.confidence),
                ("runs", str(self.folder)),
                ("page", str(self.page)),
                ("next", self.localize or self.whole),
            ],
        )

    @property
    def page(self) -> Path:
        """The report as a page for a browser."""
        return self.folder / "report.html"

    @property
    def whole(self) -> str:
        """The command that prints all of the report."""
        a, b, truth = (self.folder / name for name in ("a", "b", "truth"))
        return command_line("compare", a, b, truth=truth if truth.exists() else None, v=True)


@dataclass(frozen=True, slots=True)
class _Side:
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    batch: int | None = None


def diff(
    model: str | Path,
    *,
    out: str | Path,
    device: str | Sequence[str] = (),
    dtype: str | Sequence[str] = (),
    attn_implementation: str | Sequence[str] = (),
    engine: str | Sequence[str] = (),
    threads: int | Sequence[int] = (),
    batch: int | Sequence[int] = (),
    env: str | Sequence[str] = (),
    env_a: str | Sequence[str] = (),
    env_b: str | Sequence[str] = (),
    python: str | Sequence[str] = (),
    prompts: str | Sequence[str] = (),
    prompts_file: str | Path | None = None,
    chat: bool = False,
    max_new_tokens: int | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    fresh: bool = False,
    quiet: bool = False,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare ``model`` under two settings of this machine.

    Exactly one of ``device`` ... ``python`` has two values, the first of them the reference's. Of
    the others a single value holds for both sides. ``batch``: prompts that run together. ``env``:
    ``NAME=VALUE``; with one value the reference's is this process's, or none. ``env_a``, ``env_b``:
    several ``NAME=VALUE`` of one side; equal ones hold for both. ``python``: a virtual environment
    or interpreter that has divergence. ``out``: holds the runs ``a``, with its truth, and ``b``,
    ``truth`` where ``a`` could make none,
    report.json and report.html; what is there already is used again. An earlier diff beside it
    lends its reference and truth where the same command would run the same: the same files of the
    model, the same code, environment and machine. ``fresh``: everything is captured anew.
    ``force``: removes runs of another diff.

    Raises UsageError for settings that do not make two sides and for a step that fails,
    RunExistsError where ``out`` holds other runs, and what ``compare`` raises.
    """
    given = {
        "device": device,
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "engine": engine,
        "threads": threads,
        "batch": batch,
        "env": env,
        "python": python,
    }
    if "," in str(model) and not Path(model).exists():
        model_a, model_b = str(model).split(",")[:2]
        raise UsageError(
            "diff compares two settings of one model, and these are two models",
            hint=(
                command_line("capture", model_a, o="a"),
                command_line("capture", like="a", o="b", model=model_b),
                command_line("compare", "a", "b"),
            ),
        )
    lists = {name: one_or_more(() if value is None else value) for name, value in given.items()}
    sides = _sides(lists, one_or_more(env_a), one_or_more(env_b))
    common: dict[str, Any] = {
        "prompt": one_or_more(prompts),
        "prompts": prompts_file,
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "trust_remote_code": trust_remote_code,
    }
    first, second = sides
    from divergence.recording.engines.hub import must_lie_here

    with _Steps(
        folder=Path(out),
        model=str(model),
        offline=must_lie_here(str(model)),
        force=force,
        fresh=fresh,
        quiet=quiet,
        on_step=on_step or (lambda number, command, done: None),
        progress=progress or silent,
    ) as steps:
        steps.start(first)  # it imports, and so does this process
        from divergence.recording.engines.load import own_dtype

        engines = {setup.options.get("engine", "transformers") for setup in sides}
        asked = first.options.get("dtype")
        escalates = engines <= {*_ESCALATES} and asked == second.options.get("dtype")
        current = first.python == sys.executable  # others may be older
        narrow = (
            escalates
            and current
            and (asked or own_dtype(str(model), local=steps.offline)) in _NARROW
        )
        a = steps.run(
            "a",
            first,
            "capture",
            str(model),
            like=None,
            then=second,
            **common,
            **_batches(first, model_first=True),
            truth="full" if current else None,
            escalate=narrow,
        )
        manifest = a.manifest
        escalate = escalates and manifest.model.dtype in _NARROW
        remote: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        b = steps.run(
            "b",
            second,
            "capture",
            like=a,
            escalate=escalate,
            **remote,
            **_batches(second, len(manifest.tokens.samples)),
        )
        own, truth = manifest.plan.truth, None
        if own is None or own.mode != "full" or own.stopped_by is not None:
            truth = steps.run(
                "truth", first, "truth", str(a.path), like=a, labelled=False, **remote
            )
    from divergence.comparison.api import compare

    report = compare(a, b, truth=truth, progress=progress)
    write_output(report.to_json(indent=2) + "\n", steps.folder / "report.json", what="report")
    report.to_html(steps.folder / "report.html")
    here = all(not side.variables and side.python == sys.executable for side in sides)
    return DiffResult(
        report=report,
        folder=steps.folder,
        localize_words=command_words(
            "localize",
            a.path,
            b.path,
            truth=None if truth is None else truth.path,
            o=steps.folder / "localized",
            **remote,
        )
        if here and report.verdict.kind in _PLACED
        else None,
    )


def _sides(given: dict[str, list[Any]], env_a: list[str], env_b: list[str]) -> tuple[_Side, _Side]:
    """The two sides; raises UsageError where the settings do not make two."""
    given = {name: values for name, values in given.items() if values}
    for kernel in given.get("attn_implementation", ()):
        near = near_names(kernel, _KERNELS)
        if kernel not in _KERNELS and near:
            raise UsageError(f"unknown attention {kernel!r}", hint=f"did you mean {near[0]}?")
    pairs = given.pop("env", [])
    several = [name for name, values in given.items() if len(values) > 1]
    if len(pairs) > 2:
        raise UsageError(
            f"--env has {len(pairs)} values: it is for one variable that differs",
            hint="several of a side: --env-a NAME=VALUE, --env-b NAME=VALUE, each repeatable",
        )
    if pairs and (env_a or env_b or several):
        raise UsageError(
            "--env makes the two sides differ, and something else does already",
            hint="a variable of both sides stands before the command, NAME=VALUE divergence diff; "
            "those of one side are --env-a and --env-b",
        )
    where = ("--env", "--env") if pairs else ("--env-a", "--env-b")
    if pairs:
        env_a, env_b = pairs[:-1], pairs[-1:]
    variables = _variables(env_a, where[0]), _variables(env_b, where[1])
    for own, other in (variables, variables[::-1]):  # a side keeps what this process has
        own |= {key: os.environ[key] for key in other if key not in own and key in os.environ}
    if variables[0] != variables[1]:
        several.append("env")
    if not several:
        raise UsageError(
            "nothing differs between the two sides"
            + (f": both have {_shown(variables[0])}" if variables[0] else ""),
            hint=(
                "give one setting two values: --device cuda,cpu, --attn-implementation eager,sdpa, "
                "--engine transformers,compile, --batch 1,8, --env NAME=VALUE",
                "two machines: divergence capture MODEL -o a, there divergence capture --like a "
                "-o b",
            ),
        )
    if len(several) > 1:
        raise UsageError(
            f"{len(several)} settings have two values: {', '.join(map(_flag, several))}",
            hint="a diff compares one setting: give the others one value, which holds for both "
            "sides (--attn-implementation eager,sdpa --batch 6), and run a second diff for the "
            "second setting",
        )
    (name,) = several
    if len(given.get(name, ())) > 2:
        raise UsageError(
            f"{_flag(name)} has {len(given[name])} values, and diff compares two",
            hint="capture each with --like, then divergence compare A B C: each is held "
            "against the first",
        )
    fixed = {key: value[0] for key, value in given.items() if key != name}
    if name == "env":
        labels = [
            _shown(own) or f"{' '.join(other)} unset" for own, other in (variables, variables[::-1])
        ]
        settings = [fixed, fixed]
    else:
        labels = [f"{name.replace('_', '-')} {value}" for value in given[name]]
        settings = [{**fixed, name: value} for value in given[name]]
    reference, candidate = map(_side, labels, settings, variables)
    return reference, candidate


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variables(pairs: Sequence[str], where: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = str(pair).partition("=")
        if not (re.fullmatch(r"[A-Za-z_]\w*", key) and equals):
            raise UsageError(f"{pair!r} is not NAME=VALUE", where=where)
        if variables.setdefault(key, text) != text:
            raise UsageError(f"{key} has two values on one side", where=where)
    return variables


def _shown(variables: dict[str, str], words: Callable[[str], str] = str) -> str:
    """The settings as one would type them, without keys and passwords."""
    return " ".join(
        f"{key}={'…' if _SECRET.search(key) else words(value)}" for key, value in variables.items()
    )


def _side(label: str, settings: dict[str, Any], variables: dict[str, str]) -> _Side:
    options = dict(settings)
    python = options.pop("python", None)
    size = options.pop("batch", None)
    if size is not None and size < 1:
        raise UsageError("a batch holds at least one prompt", where="--batch")
    return _Side(label, options, variables, _interpreter(python), size)


def _interpreter(given: str | None) -> str:
    """The Python of a virtual environment, or the one that is named."""
    if given is None:
        return sys.executable
    path = Path(given).expanduser()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.is_file():
        raise UsageError(
            f"{given} is neither a virtual environment nor a Python",
            where="--python",
            hint="give a directory with bin/python, or the interpreter",
        )
    done = subprocess.run([python, "-c", "import divergence"], capture_output=True, check=False)
    if done.returncode:
        checkout = Path(__file__).parents[2]  # that this divergence runs in, if it does
        source = str(checkout) if (checkout / "pyproject.toml").is_file() else "divergence-debug"
        raise UsageError(
            f"{given} has no divergence",
            where="--python",
            hint=f"{quoted(python)} -m pip install {quoted(source)}",
        )
    return str(python)


def _batches(side: _Side, num: int = 0, *, model_first: bool = False) -> dict[str, Any]:
    """The option that runs the prompts by so many. The number of prompts is known once the first
    run is made; that one runs them singly, or all in one batch."""
    if side.batch is None:
        return {}
    if model_first:
        return {"batch": True} if side.batch > 1 else {}
    if side.batch == 1:
        return {"no_batch": True}
    groups = [range(start, min(start + side.batch, num)) for start in range(0, num, side.batch)]
    return {"batches": " ".join(",".join(map(str, group)) for group in groups)}


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Runs the commands, in order, each unless its run is there."""

    folder: Path
    model: str
    offline: bool
    """The hub is out of reach, and no process asks it."""
    force: bool
    fresh: bool
    quiet: bool
    on_step: OnStep
    progress: Progress
    number: int = 0
    waiting: list[tuple[_Side, subprocess.Popen[bytes]]] = field(default_factory=list)

    def __enter__(self) -> _Steps:
        output_folder(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        for _, process in self.waiting:  # that were not needed
            process.kill()
            process.communicate()

    def start(self, side: _Side) -> None:
        """A process for a step of this side, which imports from now on; none where both runs are
        there."""
        if not all((self.folder / name).exists() for name in ("a", "b")) or self.fresh:
            words = [side.python, _AHEAD, self.model]
            process = self._begin(words, side, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.waiting.append((side, process))

    def _environment(self, side: _Side) -> dict[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"} if self.offline else {}
        return {**os.environ, **offline, **side.variables}

    def _begin(self, words: Sequence[str], side: _Side, **streams: Any) -> subprocess.Popen[bytes]:
        errors = subprocess.PIPE if self.quiet else None
        return subprocess.Popen(words, env=self._environment(side), stderr=errors, **streams)

    def run(
        self,
        name: str,
        side: _Side,
        command: str,
        *operands: str,
        like: Run | None,
        then: _Side | None = None,
        labelled: bool = True,
        **options: Any,
    ) -> Run:
        """The run that the command makes in ``name``. ``then``: the side of the next step, whose
        process starts now."""
        from divergence.experiments import reuse
        from divergence.run.reader import Run

        place = self.folder / name
        own = {"label": side.label, **side.options} if labelled else {}
        again = {"like": like.path} if like is not None and command == "capture" else {}
        words = command_words(command, *operands, **again, o=place, **own, **options)
        line = quoted_words(words)
        shown = " ".join(
            [
                *filter(None, [_shown(side.variables, quoted)]),
                *([f"{quoted(side.python)} -m"] if side.python != sys.executable else []),
                line,
            ]
        )
        self.number += 1
        existing = self._existing(place, line, like)
        made = reason = None
        if like is None:
            files = [options["prompts"]] if options.get("prompts") else []
            files.append(os.environ.get("DIVERGENCE_CONFIG") or "divergence.toml")
            made = reuse.made_of(
                _without_place(line),
                python=side.python,
                variables=side.variables,
                model=self.model,
                files=files,
            )
        if made is not None and existing is not None:
            # made of a model that is another one by now?
            before = reuse.read(self.folder)
            file = None if before is None else reuse.changed_file(before, made)
            if file is not None:
                reason, existing = fact("experiments.captured_anew", what=file), None
                shutil.rmtree(place)
        elif made is not None and not self.fresh:
            # may it be that of an earlier diff?
            earlier, reason = reuse.find(made, self.folder)
            if earlier is not None and reuse.take(earlier, self.folder, name):
                existing = self._existing(place, line, like)
                reason = fact("experiments.reference_reused", earlier=os.path.relpath(earlier))
        if reason is not None:
            self.progress("taken", 0, None, f"{place}: {sentence(reason)}")
        self.on_step(self.number, shown, existing is not None)
        if existing is not None:
            return existing
        if then is not None:
            self.start(then)
        code = self._process([side.python, "-m", *words], side, shown)
        if made is not None and code is not None:
            reuse.note(made, code, self.folder)
        return Run.open(place)

    def _existing(self, place: Path, line: str, like: Run | None) -> Run | None:
        """The complete run that this command made; removes one that it did not complete."""
        from divergence.run.reader import Run

        if not place.exists():
            return None
        try:
            run = Run.open(place)
            made = run.manifest.command
            is_run = made is not None and _without_place(made) == _without_place(line)
            follows = like is None or run.manifest.like == like.manifest.id
            if is_run and follows and run.manifest.complete and not self.fresh:
                return run
        except DivergenceError:
            made, is_run = None, (place / "manifest.json").exists()
        if not is_run and not self.force:
            raise RunExistsError(
                f"{place} "
                + ("is no run" if made is None else f"was made by another command: {made}")
                + f"; this diff wants {line}",
                hint="choose another -o, or --force to replace it",
            )
        shutil.rmtree(place)
        return None

    def _process(self, words: Sequence[str], side: _Side, shown: str) -> list[str] | None:
        """Runs a step; the files that ran, where its process told them."""
        wanted = side.python, side.variables
        ready = [pair for pair in self.waiting if (pair[0].python, pair[0].variables) == wanted]
        line = None
        if ready:
            self.waiting.remove(ready[0])
            process, line = ready[0][1], (json.dumps(words[3:]) + "\n").encode()
        else:
            process = self._begin(words, side, stdout=subprocess.DEVNULL)
        try:
            answer, errors = process.communicate(line)
        except BaseException:  # Ctrl-C: the step has had it too, and a moment to end
            process.kill()
            raise
        check_process(process.returncode, shown)
        if process.returncode:
            last = (errors or b"").decode(errors="replace").strip()
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # where nothing was made
            raise (FaultError if process.returncode == FaultError.exit_code else UsageError)(
                f"this step failed: {shown}" + (f"\n{last}" if last else ""),
                hint="settle what it says above, and run the same diff again"
                + (": what is done is kept" if self.folder.exists() else ""),
            )
        with contextlib.suppress(ValueError, IndexError):
            files = json.loads((answer or b"").splitlines()[-1])
            return [str(file) for file in files] if isinstance(files, list) else None
        return None


def _without_place(line: str) -> list[str]:
    """The words of a command, apart from where its run goes."""
    from divergence.recording.engines.identity import without_home

    words = split_words(without_home(line))
    place = words.index("-o") if "-o" in words else len(words)
    return words[:place] + words[place + 2 :]
