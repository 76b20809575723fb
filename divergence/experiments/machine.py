"""Whose machine is this? And a run of either side, made here if it is that side's.

A run tells its device, CPU, versions and the environment variables that change arithmetic. If
all but the variables are this machine's, the run can be repeated here: in this process if they
are the same, else in one of its own in which they are set.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from divergence.capture.api import capture, reference
from divergence.capture.environment import VARIABLES, collect_environment, resolve_device
from divergence.capture.substitute import Substitute
from divergence.errors import (
    DivergenceError,
    ModelError,
    RunExistsError,
    RunWriteError,
    UsageError,
)
from divergence.run.layout import MANIFEST
from divergence.run.reader import Run

__all__ = ["HERE", "Maker"]

HERE = ("auto", "reference", "candidate", "both", "none")
_PACKAGES = ("torch", "transformers")
_PAIR = "pair.json"
"""In the folder: the ids of the two runs that it belongs to."""
_RUNS = {"truth", "truth-operators", "reference-operators", "candidate-operators"}
"""Runs that may be brought from another machine."""
_MADE = _RUNS | {
    _PAIR, "reference-substituted", "candidate-substituted", "reference-float64",
    "candidate-float64", "repro",
}  # fmt: skip
"""All that a descent leaves in its folder."""


class Maker:
    """Makes what ``localize`` lacks, in ``folder``; ``commands``: what other machines must make."""

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
        prepare: Mapping[str, Callable[[Any], None] | None],
        progress: Callable[..., None],
    ) -> None:
        if here not in HERE:
            raise UsageError(f"--here {here}: unknown", hint=f"one of {', '.join(HERE)}")
        self._runs = {"reference": a, "candidate": b}
        self._folder, self._model, self._device = folder, model, device
        self._trust, self._prepare, self._tell = trust_remote_code, prepare, progress
        self._here = here
        self.commands: list[str] = []
        self._check_folder(force=force)

    def truth(self, name: str, *, sites: list[str] | None = None, step: int | None = None) -> Run:
        """The float64 run of the reference, with these sites."""
        out, source = self._folder / name, self._runs["reference"]
        known = self._known(out, "reference", sites, step)
        if known is not None:
            return known
        self._claim()
        return reference(
            source, out=out, model=self._model, sites=sites or (), force=True,
            trust_remote_code=self._trust, progress=self._tell,
            max_new_tokens=None if step is None else step + 1,
        )  # fmt: skip

    def operators(
        self,
        side: str,
        *,
        sites: list[str],
        escalate: bool,
        step: int | None,
        name: str | None = None,
        substitute: tuple[str, Run, str] | None = None,
    ) -> Run | None:
        """That side's operators, anchored to the reference; None where this is not its machine,
        with the command for there in ``commands``."""
        out, source = self._folder / (name or f"{side}-operators"), self._runs["reference"]
        if substitute is None:
            known = self._known(out, side, sites, step, escalate=escalate)
            if known is not None:
                return known
        own = self._runs[side].manifest
        values: dict[str, Any] = {"sites": sites, "weights": True, "escalate": escalate}
        if step is not None:
            values["max_new_tokens"] = step + 1
        if own.model.dtype != source.manifest.model.dtype:
            values["dtype"] = own.model.dtype
        if own.model.attn_implementation != source.manifest.model.attn_implementation:
            values["attn_implementation"] = own.model.attn_implementation
        if not own.settings.deterministic and source.manifest.settings.deterministic:
            values["deterministic"] = False
        if own.tokens.groups != source.manifest.tokens.groups:
            values["batch"] = len(own.tokens.groups) == 1
        if own.plan.plants:
            values["plants"] = own.plan.plants
        values["label"] = own.environment.label
        self._claim()
        if not self._is_here(side):
            self.commands.append(self._command(side, out, values))
            return None
        model = self._model
        if model is None and own.model.source != source.manifest.model.source:
            model = own.model.source
        variables = _variables(own.environment.variables)
        if self._prepare.get(side) is not None or not variables:
            if substitute is not None:
                site, run, other = substitute
                values["substitutes"] = {site: Substitute(run, other)}
            return capture(
                model, like=source, out=out, force=True, device=self._device,
                trust_remote_code=self._trust, progress=self._tell,
                prepare=self._prepare.get(side), **values,
            )  # fmt: skip
        words = ["--like", str(source.path), "-o", str(out), "--force", "--device", self._device]
        words += ["--model", model] if model is not None else []
        words += ["--trust-remote-code"] if self._trust else []
        words += _words(values)
        if substitute is not None:
            site, run, other = substitute
            words += ["--substitute", f"{site}={run.path}" + (f"={other}" if other != site else "")]
        return _elsewhere(words, out, variables)

    def _check_folder(self, *, force: bool) -> None:
        """Free, empty, or made for this pair: neither a run itself nor anybody else's files.
        With ``force`` an earlier descent of another pair is removed."""
        folder, text = self._folder, None
        names: set[str] = set()
        try:
            if folder.exists() and not folder.is_dir():
                raise RunExistsError(
                    f"{folder} exists and is not a directory", hint="choose another -o"
                )
            if folder.exists():
                names = {entry.name for entry in folder.iterdir()}
            if _PAIR in names:
                text = (folder / _PAIR).read_text(encoding="utf-8")
            if force and names <= _MADE and text != self._pair() and not names <= _RUNS:
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
        if others and (text is None or (force and text != self._pair())):
            raise RunExistsError(
                f"{folder} holds other files ({others[0]})"
                + (" and nothing of a descent" if text is None else ""),
                hint="choose another directory with -o",
            )
        if text is not None and text != self._pair():
            raise RunExistsError(
                f"{folder} holds what was made for another pair of runs",
                hint="choose another directory with -o, or pass --force to replace it",
            )

    def _pair(self) -> str:
        """Whose runs lie in the folder, so that none is taken for another machine's."""
        ids = {side: run.manifest.id for side, run in self._runs.items()}
        return json.dumps(ids, indent=1) + "\n"

    def _claim(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _PAIR).write_text(self._pair(), encoding="utf-8")
        except OSError as error:
            raise RunWriteError(
                f"writing failed: {error.strerror or error}", where=str(self._folder),
                hint="choose another disk with -o",
            ) from error  # fmt: skip

    def _known(
        self,
        out: Path,
        side: str,
        sites: list[str] | None,
        step: int | None,
        *,
        escalate: bool = False,
    ) -> Run | None:
        """A finished run that lies there already and is what would be made."""
        try:
            run = Run.open(out)
        except DivergenceError:  # nothing there, or damaged: it is made anew
            return None
        source, own = self._runs["reference"].manifest, self._runs[side].manifest
        made = run.manifest
        num_steps = source.settings.max_new_tokens if step is None else step + 1
        same = (
            made.like == source.id
            and made.complete
            and made.model.digest == own.model.digest
            and made.settings.max_new_tokens >= min(num_steps, source.settings.max_new_tokens)
            and (sites is None or made.plan.sites == sites)
            and (not escalate or "escalated" in made.plan.passes)
        )
        return run if same else None

    def _is_here(self, side: str) -> bool:
        if self._here != "auto":
            return self._here in (side, "both")
        if self._prepare.get(side) is not None:
            return True
        recorded = self._runs[side].manifest.environment
        try:
            mine = collect_environment(resolve_device(self._device))
        except UsageError:
            return False
        names = ("device_type", "device_name", "cpu", "platform")
        if any(getattr(recorded, name) != getattr(mine, name) for name in names):
            return False
        return all(recorded.versions.get(p) == mine.versions.get(p) for p in _PACKAGES)

    def _command(self, side: str, out: Path, values: dict[str, Any]) -> str:
        source, own = self._runs["reference"], self._runs[side].manifest.model
        words = ["divergence", "capture", "--like", str(source.path), "-o", str(out)]
        if own.source != source.manifest.model.source:  # as it is called on that machine
            words += ["--model", own.source]
        words += ["--trust-remote-code"] if own.trust_remote_code else []
        return f"{shlex.join(words + _words(values))}   # on the {side}'s machine"


def _words(values: Mapping[str, Any]) -> list[str]:
    """Parameters of capture as options of the command."""
    words: list[str] = []
    for site in values.get("sites", ()):
        words += ["--sites", site]
    for name in ("weights", "escalate"):
        words += [f"--{name}"] if values.get(name) else []
    for name in ("max_new_tokens", "dtype", "attn_implementation", "label"):
        if values.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(values[name])]
    if values.get("batch") is not None:
        words.append("--batch" if values["batch"] else "--no-batch")
    if values.get("deterministic") is False:
        words.append("--no-deterministic")
    for plant in values.get("plants", ()):
        words += ["--plant", plant]
    return words


def _variables(recorded: Mapping[str, str]) -> dict[str, str | None]:
    """What must be set, or taken away (None), to have the recorded variables."""
    return {
        name: recorded.get(name) for name in VARIABLES if os.environ.get(name) != recorded.get(name)
    }


def _elsewhere(words: list[str], out: Path, variables: Mapping[str, str | None]) -> Run:
    """`divergence capture` in a process with these variables."""
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    environment |= {k: v for k, v in variables.items() if v is not None}
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-m", "divergence", "capture", *words, "--quiet"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ModelError(
            f"the capture with the recorded environment variables failed (exit {done.returncode})",
            where=str(out),
            hint=(done.stderr.strip().splitlines() or ["no message"])[-1],
        )
    return Run.open(out)
