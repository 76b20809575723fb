"""Whose machine is this? And a run of either side, made here if it is that side's.

A run records its device, CPU, versions and the environment variables that change arithmetic. If all
but the variables are this machine's, the run is tried here: in this process if they are the same,
else in a process of its own in which they are set. Values decide: a run that was made again must
have the bits of the run it stands for (localization.repetition). A truth or a run with a substitute
has no recorded bits to be held against, so it is made only where the side's own run was repeated
first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.errors import (
    DivergenceError,
    DumpError,
    FaultError,
    ModelError,
    RunExistsError,
    RunWriteError,
    UsageError,
    check_process,
)
from divergence.experiments.localization.repetition import (
    check_repetition,
    check_substituted,
    why_not_bits,
)
from divergence.experiments.result import Repetition
from divergence.facts import Fact, fact, sentence
from divergence.options.commands import CaptureOptions
from divergence.options.option import command_options
from divergence.output import write_output
from divergence.outside import json_value, read_bytes
from divergence.recording.api import make_run
from divergence.recording.api import truth as make_truth
from divergence.recording.engines.load import check_data_alone
from divergence.recording.machine import (
    DEVICE_TYPES,
    VARIABLES,
    collect_environment,
    resolve_device,
)
from divergence.recording.plant import Substitute
from divergence.recording.request import code_words, taken_from
from divergence.run.command import Command, command, command_words
from divergence.run.manifest import Environment
from divergence.run.reader import Run
from divergence.run.record import MANIFEST
from divergence.run.trust import recorded_attention, recorded_sites, recorded_source
from divergence.words import Progress

if TYPE_CHECKING:
    import torch


# The directory of one descent: whose it is, and which runs in it were made on which machine.
#
# ``pair.json`` holds the ids of the two runs it belongs to, so that the runs of another pair are
# never taken for theirs. ``verified.json`` holds the ids of the float64 runs that were made on a
# machine which repeated that side's run: of others it is not known whose code they ran.
# ``localize.json`` is the answer, for `bundle`.

_PAIR, _VERIFIED, _ANSWER = "pair.json", "verified.json", "localize.json"
_RUNS = set(
    "truth truth-operators truth-by-candidate reference-operators candidate-operators "
    "reference-substituted candidate-substituted".split()
)
"""Runs that may be brought from another machine."""
_MADE = {_PAIR, _VERIFIED, _ANSWER} | _RUNS
_MADE |= set(
    "candidate-float64 candidate-again reference-again reference-float64 repro repro-reference "
    "repro-candidate".split()
)
"""All that a descent leaves in its folder."""


# What a process is given of the recorded machine.

_BEYOND = """
    XLA_FLAGS GLIBC_TUNABLES TORCH_CUDA_ARCH_LIST USE_HUB_KERNELS
    PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_TUNING MIOPEN_FIND_ENFORCE
""".split()
"""Flags of programs, what fetches code, and what writes files."""
SETTABLE = [name for name in VARIABLES if name not in _BEYOND]
"""Those that a capture may be given from a recorded run: the others reach beyond arithmetic."""
_VALUE = re.compile(r"[\w.,:;=+@|(){}\[\] -]{0,200}", re.ASCII)
_MOST_THREADS = 4096


def variables_to_set(recorded: Environment) -> dict[str, str | None]:
    """Return what must be set here, or taken away (None), to have the recorded values of
    ``SETTABLE``: names, numbers and lists of them. Others (paths, thousands of threads) are passed
    over."""
    wanted = {name: recorded.variables.get(name) for name in SETTABLE}
    return {
        name: value
        for name, value in wanted.items()
        if value != os.environ.get(name) and (value is None or _is_plain(name, value))
    }


def _is_plain(name: str, value: str) -> bool:
    numbers = [int(number) for number in re.findall(r"[0-9]+", value[:200])]
    too_many = name.endswith("_THREADS") and max(numbers, default=0) > _MOST_THREADS
    return _VALUE.fullmatch(value) is not None and not too_many


def also_taken(
    run: Run,
    model: str | None,
    values: Mapping[str, Any],
    variables: Mapping[str, str | None],
    *,
    with_code: bool,
) -> str | None:
    """Say what is taken from ``run``, of which another run is repeated: its ``model`` (None: the
    user's or the other run's), settings and environment variables. None where that is nothing."""
    words = [] if model is None else [f"model {model} ({code_words(with_code)})"]
    words += [str(values[name]) for name in ("dtype", "attn_implementation") if name in values]
    words += [f"{name}={value}" for name, value in variables.items() if value is not None]
    return taken_from(run.path, words) if words else None


class WorkFolder:
    """Checked to be free, empty, or made for this pair: neither a run itself nor anybody else's
    files. With ``force`` an earlier descent of another pair is removed."""

    def __init__(self, path: Path, runs: dict[str, Run], *, force: bool) -> None:
        self.path = path
        ids = {side: run.manifest.id for side, run in runs.items()}
        self._pair = json.dumps(ids, indent=1) + "\n"
        self._check(force=force)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def claim(self) -> None:
        """Make it this pair's."""
        self._write(_PAIR, self._pair)

    def keep(self, answer: str) -> None:
        """Leave the answer there, where anything was made."""
        if self.path.is_dir():
            self._write(_ANSWER, answer)

    def verify(self, run: Run) -> None:
        """Note that the machine which made ``run`` repeats the run of that side."""
        verified = [*self._verified(), run.manifest.id]
        self._write(_VERIFIED, json.dumps(verified[-16:], indent=1) + "\n")

    def is_verified(self, run: Run) -> bool:
        """Was it made on a machine that repeats the run of that side?"""
        return run.manifest.id in self._verified()

    def _verified(self) -> list[str]:
        file = self.path / _VERIFIED
        try:
            verified = json_value(read_bytes(file), where=str(file))
        except DumpError:
            return []
        return verified if isinstance(verified, list) else []

    def _write(self, name: str, text: str) -> None:
        write_output(
            text, self.path / name, what="folder's notes", error=RunWriteError, make_folder=True
        )

    def _check(self, *, force: bool) -> None:
        folder, text = self.path, None
        names: set[str] = set()
        try:
            if folder.exists() and not folder.is_dir():
                raise RunExistsError(
                    f"{folder} exists and is not a directory", hint="choose another -o"
                )
            if folder.exists():
                names = {entry.name for entry in folder.iterdir()}
            if _PAIR in names:
                text = read_bytes(folder / _PAIR, error=RunWriteError).decode()
            if force and names <= _MADE and text != self._pair and not names <= _RUNS:
                shutil.rmtree(folder)
                return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunWriteError(f"{folder} cannot be used: {reason}") from error
        if MANIFEST in names:
            raise RunExistsError(
                f"{folder} is a run itself", hint="choose another directory with -o"
            )
        others = sorted(names - (_RUNS if text is None else _MADE))
        if others and (text is None or (force and text != self._pair)):
            raise RunExistsError(
                f"{folder} holds other files ({others[0]})"
                + (" and nothing of a descent" if text is None else ""),
                hint="choose another directory with -o",
            )
        if text is not None and text != self._pair:
            raise RunExistsError(
                f"{folder} holds what was made for another pair of runs",
                hint="choose another directory with -o, or pass --force to replace it",
            )


HERE = ("auto", "reference", "candidate", "both", "none")
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Says what runs are made for: ``sites`` in ``block`` (None: those of the reference), up to the
    forward ``step`` (None: all)."""

    block: str | None = None
    sites: list[str] | None = None
    step: int | None = None
    escalate: bool = False

    @property
    def num_tokens(self) -> int | None:
        """Tokens to generate; None: as many as the reference has."""
        return None if self.step is None else self.step + 1


class Maker:
    """Makes what ``localize`` lacks, in ``folder``.

    ``commands``: what other machines must make, ``again``: the command that goes on.
    ``repetitions``: by run, whether it repeats the one it stands for; ``refusals``: why one that
    does not was left out.
    """

    def __init__(
        self,
        a: Run,
        b: Run,
        folder: Path,
        *,
        model: str | None,
        device: str,
        here: str,
        force: bool,
        trust_remote_code: bool,
        operators: Sequence[str] = (),
        prepare: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module | None] | None],
        again: Command,
        progress: Progress,
    ) -> None:
        if here not in HERE:
            raise UsageError(f"--here {here}: unknown", hint=f"one of {', '.join(HERE)}")
        self.runs = {"reference": a, "candidate": b}
        self._model, self._device, self._again = model, device, again
        self.namespaces = operators
        self._trust, self._prepare, self.tell = trust_remote_code, prepare, progress
        self._here = here
        self._repeated: dict[str, Repetition] = {}
        self.commands: list[Command] = []
        self.repetitions: dict[str, Repetition] = {}
        self.refusals: list[Fact] = []
        self.folder = WorkFolder(folder, self.runs, force=force)

    def truth(self, name: str, goal: Goal, *, side: str = "reference") -> Run | None:
        """The reference in float64, by the code of ``side``; None where this is not that side's
        machine, with the command for there in ``commands``."""
        out, source, own = self.folder / name, self.runs["reference"], self.runs[side]
        existing = self._known(out, "reference", goal, compute_dtype="float64")
        if existing is not None and (side == "reference" or self.folder.is_verified(existing)):
            return existing
        if not self.repeats(side):
            self.ask(side, fact("experiments.makes", name=name))
            return None
        self.folder.claim()
        attention = own.manifest.model.attn_implementation
        if side == "reference" or attention not in ("eager", "sdpa"):
            attention = None
        options: dict[str, Any] = {
            "force": True,
            "model": self._model_of(side),
            "sites": goal.sites or (),
            "max_new_tokens": goal.num_tokens,
            "attn_implementation": attention,
            "trust_remote_code": self._trust,
        }
        if variables := variables_to_set(own.manifest.environment):
            words = command_words("truth", source.path, o=out, **options)
            run = _made_elsewhere(words, out, variables)
        else:
            run = make_truth(source, out=out, progress=self.tell, **options)
        self.folder.verify(run)
        return run

    def operators(self, side: str, goal: Goal, *, truth: Run | None = None) -> Run | None:
        """That side's operators, anchored to the reference; None where this is not its machine,
        with the command for there in ``commands``. ``truth``: tells a repetition by its error,
        where its machine does not repeat bits."""
        name = f"{side}-operators"
        out = self.folder / name
        values = self._values(side, goal)
        run = self._known(out, side, goal)
        lay_there = run is not None
        if run is None and not self._is_here(side):
            self.commands.append(self._command(side, out, values))
            return None
        if run is None:
            self.folder.claim()
            run = self._capture(side, out, values)
        repetition = check_repetition(
            run, self.runs[side], name=name, side=side, truth=truth, block=goal.block
        )
        self.repetitions[name] = repetition
        if repetition.how == "differs":
            self._refuse(side, repetition, run if lay_there else None)
            self.commands.append(self._command(side, out, values, force=lay_there))
            if not lay_there:
                run.close()
                shutil.rmtree(out, ignore_errors=True)
            return None
        if not lay_there:
            self._repeated[side] = repetition
        return run

    def substituted(
        self, side: str, goal: Goal, made: Run, *, site: str, healthy: Substitute, block: str
    ) -> Run | None:
        """The same as ``made``, ``side``'s operators, with ``healthy`` in the place of ``site``, an
        operator in ``block``. None where this is not that side's machine."""
        name = f"{side}-substituted"
        out = self.folder / name
        run = self._known(out, side, goal)
        if run is not None and run.manifest.plan.substitutes != [str(healthy)]:
            run = None
        if run is None or not self.folder.is_verified(run):
            if not self.repeats(side):
                self.ask(side, fact("experiments.proves_it"))
                return None
            self.folder.claim()
            run = self._capture(side, out, self._values(side, goal), {site: healthy})
            self.folder.verify(run)
        repetition = check_substituted(run, made, site=site, block=block, name=name)
        self.repetitions[name] = repetition
        return run if repetition.met else None

    def repeats(self, side: str) -> bool:
        """Does this machine repeat that side's run? Tried once, with its free pass, if nothing that
        was made here has shown it."""
        if side in self._repeated:
            return True
        if not self._is_here(side) or f"{side}-again" in self.repetitions:
            return False
        name, own = f"{side}-again", self.runs[side]
        notes = own.manifest.plan.modules
        blocks = {path for path, note in notes.items() if note.role == "block"}
        inside = any(r.pass_ == "free" and r.site.rpartition(":")[0] in blocks for r in own.records)
        sites = ["blocks"] if inside else recorded_sites(own.manifest)
        values = self._values(side, Goal(sites=sites))
        values |= {"anchor": False, "store": "hash", "weights": False, "probe": False}
        self.folder.claim()
        out = self.folder / name
        run = self._capture(side, out, values)
        repetition = check_repetition(run, own, name=name, side=side)
        run.close()
        shutil.rmtree(out, ignore_errors=True)
        self.repetitions[name] = repetition
        why = why_not_bits(own.manifest, run.manifest)
        if repetition.met or (repetition.how == "differs" and why is not None):
            self._repeated[side] = repetition
            return True
        self._refuse(side, repetition, None)
        return False

    @property
    def one_machine(self) -> bool:
        """Were both sides' runs repeated here, by what is installed here?"""
        return {"reference", "candidate"} <= set(self._repeated)

    def is_prepared(self, side: str) -> bool:
        """Does the caller change that side's model?"""
        return self._prepare.get(side) is not None

    def _refuse(self, side: str, repetition: Repetition, lay_there: Run | None) -> None:
        what = repetition.first_apart
        if repetition.how == "unknown":
            what = fact("experiments.no_tensor_to_hold")
        self.refusals.append(
            fact(
                "experiments.not_that_machine",
                side=side,
                what=what,
                label=self.runs[side].manifest.environment.label,
                made=None if lay_there is None else str(lay_there.path),
            )
        )

    def ask(self, side: str, task: Fact) -> None:
        """The same command on that side's machine."""
        note = fact("experiments.on_machine", side=side, task=task)
        self.commands.append(msgspec.structs.replace(self._again, note=note))

    def _values(self, side: str, goal: Goal) -> dict[str, Any]:
        """Return how that side's run is repeated: parameters of capture."""
        source, own = self.runs["reference"], self.runs[side].manifest
        values: dict[str, Any] = {"sites": goal.sites, "weights": True, "escalate": goal.escalate}
        if goal.step is not None:
            values["max_new_tokens"] = goal.num_tokens
        if own.model.dtype != source.manifest.model.dtype:
            values["dtype"] = own.model.dtype
        if own.model.attn_implementation != source.manifest.model.attn_implementation:
            values["attn_implementation"] = recorded_attention(own)
        if not own.settings.deterministic and source.manifest.settings.deterministic:
            values["deterministic"] = False
        if own.tokens.groups != source.manifest.tokens.groups:
            values["batch"] = len(own.tokens.groups) == 1
        if own.plan.plants:
            values["plants"] = own.plan.plants
        values |= own.training.options_beside(source.manifest.training)
        values["label"] = own.environment.label
        return values

    def _capture(
        self,
        side: str,
        out: Path,
        values: dict[str, Any],
        substitutes: Mapping[str, Substitute] | None = None,
    ) -> Run:
        source, model = self.runs["reference"], self._model_of(side)
        variables = variables_to_set(self.runs[side].manifest.environment)
        other_model = None if model == self._model else model
        also = also_taken(self.runs[side], other_model, values, variables, with_code=self._trust)
        if also is not None:
            self.tell("taken", 0, None, also)
        options: dict[str, Any] = {
            "force": True,
            "device": self._device_of(side),
            "trust_remote_code": self._trust,
        }
        if self._prepare.get(side) is not None or not variables:
            return make_run(
                model,
                like=source,
                out=out,
                progress=self.tell,
                prepare=self._prepare.get(side),
                substitutes=substitutes,
                **options,
                **values,
            )
        put = [
            f"{site}={healthy.run.path}" + (f"={healthy.site}" if healthy.site != site else "")
            for site, healthy in (substitutes or {}).items()
        ]
        words = command_words(
            "capture",
            like=source.path,
            o=out,
            model=model,
            **options,
            **command_options(CaptureOptions, values),
            substitute=put,
        )
        return _made_elsewhere(words, out, variables)

    def _model_of(self, side: str) -> str | None:
        source, own = self.runs["reference"].manifest.model, self.runs[side].manifest
        if self._model is None and own.model.source != source.source:
            if not self._trust:  # the run names it, not the user
                check_data_alone(recorded_source(own), revision=None)
            return recorded_source(own)
        return self._model

    def _known(
        self, out: Path, side: str, goal: Goal, *, compute_dtype: str | None = None
    ) -> Run | None:
        """A finished run that lies there already and is what would be made."""
        try:
            run = Run.open(out)
        except DivergenceError:  # nothing there, or damaged: it is made anew
            return None
        source, own = self.runs["reference"].manifest, self.runs[side].manifest
        made = run.manifest
        num_tokens = source.settings.max_new_tokens
        same = (
            made.like == source.id
            and made.complete
            and made.model.digest == own.model.digest
            and made.settings.compute_dtype == compute_dtype
            and made.settings.max_new_tokens >= min(goal.num_tokens or num_tokens, num_tokens)
            and goal.sites in (None, made.plan.sites)
            and (not goal.escalate or compute_dtype is not None or "escalated" in made.plan.passes)
        )
        return run if same else None

    def _is_here(self, side: str) -> bool:
        """May this be that side's machine? By what is recorded; values decide."""
        if self._here != "auto":
            return self._here in (side, "both")
        if self._prepare.get(side) is not None:
            return True
        recorded = self.runs[side].manifest.environment
        try:
            machine = collect_environment(resolve_device(self._device_of(side)))
        except UsageError:
            return False
        names = ("device_type", "device_name", "cpu", "platform")
        return all(getattr(recorded, name) == getattr(machine, name) for name in names) and all(
            recorded.versions.get(package) == machine.versions.get(package) for package in _PACKAGES
        )

    def _recorded_device(self, side: str) -> str | None:
        """The kind of device that the side ran on; None for one that this tool does not know."""
        kind = self.runs[side].manifest.environment.device_type
        return kind if kind in DEVICE_TYPES else None

    def _device_of(self, side: str) -> str:
        """Say where that side runs: the user's device if it is of the kind that the side ran on,
        else that kind. So a reference of this host's CPU is not made on its accelerator."""
        kind = self._recorded_device(side)
        asked = self._device.partition(":")[0]
        return self._device if kind is None or asked == kind else kind

    def _command(
        self, side: str, out: Path, values: dict[str, Any], *, force: bool = False
    ) -> Command:
        source, model = self.runs["reference"], self.runs[side].manifest.model.source
        elsewhere = model != source.manifest.model.source  # as it is called on that machine
        return command(
            "capture",
            like=source.path,
            o=out,
            model=model if elsewhere else None,
            device=self._recorded_device(side),
            trust_remote_code=self._trust,
            force=force,
            **command_options(CaptureOptions, values),
            note=fact("experiments.on_machine", side=side, task=None),
        )


def _made_elsewhere(words: list[str], out: Path, variables: Mapping[str, str | None]) -> Run:
    """The command ``words`` in a process with these variables."""
    environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
    home = str(Path(__file__).parents[3])
    paths = [home, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONSAFEPATH"] = "1"  # nothing is imported from where the command was given
    done = subprocess.run(
        [sys.executable, "-m", *words, "--quiet"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    what = sentence(fact("experiments.with_variables", command=words[1]))
    check_process(done.returncode, what)
    if done.returncode != 0:
        error, *rest = done.stderr.strip().rpartition("error: ")[2].splitlines() or ["no message"]
        tries = [line.strip().removeprefix("try:").strip() for line in rest if "where:" not in line]
        raise (FaultError if done.returncode == FaultError.exit_code else ModelError)(
            f"{what} failed (exit {done.returncode}): {error}", where=str(out), hint=tuple(tries)
        )
    return Run.open(out)
