"""Cases: what is run in the place of a model, ``capture suite:NAME``, by whichever suite.

A case is one thing on given inputs: an operator, a collective. A suite is made of them. It has no
tokens, no weights and no modules; it is run and repeated like a model, and each case stands in the
run by its path: its inputs, and its results with the call. A domain names its suites, and for each
the module that runs it, which has

    capture(name, request)     runs the cases, or those of ``request.like`` again, and records them
    plan(name, request)        what that would run: a ``PlannedSite`` for each case
    truth(run, request)        the cases of a run by their definitions, in float64; or NO_TRUTH says
                               why there is none

What is common to them stands here: which suite is meant and what it may be told, which cases are
wanted, the manifest, how a case is written, and what ``--impl`` says.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from divergence.domain import Suite, suites
from divergence.errors import UsageError
from divergence.options.commands import CaptureOptions, TruthOptions
from divergence.options.option import Options, given_fields
from divergence.recording.machine import Determinism, deterministic_settings
from divergence.recording.new_run import PlannedSite, check_output, probed, provenance
from divergence.recording.processes import Ranks, started
from divergence.run.captured import CapturedTensor
from divergence.run.command import command_line
from divergence.run.manifest import (
    SUITE,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Tokens,
    digest_tensor,
)
from divergence.run.reader import Run
from divergence.run.record import Call, PassName, Placement
from divergence.run.site import compile_patterns
from divergence.run.storage import Url, location_of
from divergence.run.trust import recorded_seed
from divergence.run.writer import RunWriter
from divergence.words import Progress, count, silent

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRequest:
    """Holds what was asked of a suite."""

    out: str | Path | Url = ""
    like: Run | None = None
    options: CaptureOptions
    force: bool = False
    command: str | None = None
    progress: Progress = silent

    @property
    def seed(self) -> int:
        """Raises RunFormatError for a recorded one that torch does not take."""
        if self.options.seed is not None or self.like is None:
            return self.options.seed or 0
        return recorded_seed(self.like.manifest)

    @property
    def deterministic(self) -> bool:
        if self.options.deterministic is not None or self.like is None:
            return self.options.deterministic is not False
        return self.like.manifest.settings.deterministic

    @property
    def patterns(self) -> list[str]:
        """Return the patterns of the cases that are wanted."""
        return list(self.options.sites) or ["*"]

    def chosen(self, cases: Mapping[str, C]) -> list[C]:
        """Return those of ``cases``, by path, that are wanted."""
        matches = compile_patterns(self.patterns)
        return [case for path, case in cases.items() if matches(f"{path}:out")]

    def nothing_chosen(self, hint: str) -> UsageError:
        return UsageError(f"--sites {' '.join(self.patterns)} matches no case", hint=hint)

    @contextlib.contextmanager
    def recording(
        self,
        plan: Plan,
        *,
        device: str,
        source: str,
        kind: str,
        ranks: Ranks | None = None,
        num_runs: int = 1,
    ) -> Iterator[CaseWriter]:
        """A run that is written case by case, under the switches that were asked for. ``kind``
        stands for a model's class. Nothing is generated: one sample stands for the cases. Of
        several ranks each writes its part."""
        like = None if self.like is None else self.like.manifest
        with deterministic_settings(
            device.partition(":")[0], seed=self.seed, enabled=self.deterministic
        ) as determinism:
            manifest = Manifest(
                **provenance(device, label=self.options.label, command=self.command, like=like),
                model=ModelIdentity(
                    source=source,
                    model_class=kind,
                    task="operators",
                    config_digest="",
                    dtype="float32",
                    num_parameters=0,
                    digest="",
                ),
                tokens=Tokens(samples=[SampleTokens(prompt_ids=[0])], groups=[[0]]),
                settings=Settings(
                    deterministic=self.deterministic,
                    seed=self.seed,
                    device=device,
                    max_new_tokens=0,
                    batch=False,
                    switches=determinism.switches,
                ),
                plan=plan,
            )
            manifest.repeatability.num_runs = num_runs
            if ranks is not None:
                manifest.mesh = ranks.mesh_of(manifest.environment)
            if self.options.probe and (ranks is None or ranks.is_first):
                manifest.arithmetic = probed(device, self.progress)
            write = partial(RunWriter, self.out, manifest, force=self.force)
            with started(ranks, write) as writer:
                try:
                    pass_: PassName = "free" if plan.replayed_pass is None else "replayed"
                    yield CaseWriter(writer, pass_, determinism)
                finally:
                    determinism.note_in(manifest.settings)


@dataclass(slots=True)
class CaseWriter:
    """Puts cases into a run, in order. ``pass_``: of this run."""

    writer: RunWriter
    pass_: PassName
    determinism: Determinism
    order: int = 0

    @property
    def manifest(self) -> Manifest:
        return self.writer.manifest

    def skip(self, reason: str) -> None:
        """Count a case that was not run."""
        skipped = self.manifest.plan.skipped_operators
        skipped[reason] = skipped.get(reason, 0) + 1

    def repeated(self, output: torch.Tensor, again: torch.Tensor, where: str) -> None:
        """Count whether a repetition gave the same bits."""
        counts = self.manifest.repeatability
        counts.num_compared += 1
        if digest_tensor(output) != digest_tensor(again):
            counts.num_different += 1
            counts.first_difference = counts.first_difference or where

    def put(
        self,
        site: str,
        tensor: torch.Tensor,
        call: Call | None = None,
        *,
        placement: Placement | None = None,
    ) -> None:
        """``placement``: of what several ranks record, which part this one is."""
        item = CapturedTensor(tensor.detach().to("cpu", copy=True).contiguous())
        self.writer.put(
            item,
            pass_=self.pass_,
            sample=0,
            step=0,
            site=site,
            order=self.order,
            call=call,
            placement=None if placement is None else (placement,),
        )
        self.order += 1

    def done(self, progress: Progress, *, num_written: int, what: str) -> None:
        """Say what was left out. Raises UsageError where nothing is left."""
        skipped = self.manifest.plan.skipped_operators
        if not num_written:
            raise UsageError(
                f"nothing was recorded: no {what} could be run here",
                where=next(iter(skipped), None),
            )
        for reason, num in skipped.items():
            progress("note", 0, None, f"{count(num, 'case')} skipped: {reason}")


# Which suite is meant, what it may be told, and what it is asked.


def suite_meant(model: object, like: Run | None) -> Suite | None:
    """The suite that ``model`` names, or that ``like`` is a run of; None where it is a model.
    Raises UsageError for a suite that is not there, and for another model with ``like`` of one."""
    source = str(model or "")
    if like is not None:
        recorded = like.manifest.model
        source = recorded.source if recorded.task == "operators" else ""
    if not source.startswith(SUITE):
        return None
    if like is not None and model is not None:
        raise UsageError(
            f"{like.path} was made of {source}, which needs no model", hint="leave out --model"
        )
    there = suites()
    suite = there.get(source.removeprefix(SUITE))
    if suite is None:
        names = ", ".join(f"{SUITE}{suite.name} ({suite.line})" for suite in there.values())
        raise UsageError(
            f"no suite is called {source.removeprefix(SUITE)!r}", hint=f"there are {names}"
        )
    return suite


def _module_of(suite: Suite) -> ModuleType:
    return importlib.import_module(suite.module)


def capture_cases(suite: Suite, request: CaseRequest, *, prepare: object = None) -> Run:
    """The run of a suite."""
    refuse_options(suite, request.options)
    if prepare is not None:
        raise _meaningless("prepare", suite)
    if os.environ.get("RANK", "0") == "0":  # the others find what the first has made
        check_output(location_of(request.out), force=request.force, like=request.like)
    run: Run = _module_of(suite).capture(suite.name, request)
    return run


def plan_cases(suite: Suite, request: CaseRequest) -> list[PlannedSite]:
    """The cases that a capture would run, with the bytes of their inputs."""
    refuse_options(suite, request.options)
    planned: list[PlannedSite] = _module_of(suite).plan(suite.name, request)
    return planned


def truth_of_cases(suite: Suite, request: CaseRequest, options: TruthOptions) -> Run:
    """The truth of a suite's run."""
    refuse_options(suite, options)
    module, run = _module_of(suite), request.like
    assert run is not None
    if (why := getattr(module, "NO_TRUTH", None)) is not None:
        raise UsageError(
            f"{run.path} needs no truth: {why}", hint=command_line("compare", run.path)
        )
    if options.device != "cpu":
        raise UsageError(
            f"--device {options.device}: a suite's truth is computed on the CPU",
            hint="leave it out",
        )
    check_output(location_of(request.out), force=request.force, like=run)
    made: Run = module.truth(run, request)
    return made


def refuse_options(suite: Suite | None, options: Options) -> None:
    """Raise UsageError for an option that means nothing to ``suite``; without one, to a model."""
    for field in given_fields(options):
        name, words, meant = field.option.names[0], field.option.words, field.option.suite
        if suite is not None and meant != "too" and name not in suite.takes:
            raise _meaningless(name, suite)
        if suite is None and meant == "alone":
            others = _taking(name) or [f"{SUITE}NAME"]
            hint = f"{command_line('capture', others[0], o='RUN')} {words}"
            if name == "--ranks":
                launched = "torchrun --nproc-per-node N -m divergence capture MODEL --mesh tp"
                hint = f"of a model: {launched}"
            owners = ", ".join(_taking(name)) or f"{SUITE}NAME, which is not installed"
            raise UsageError(f"{name} belongs to {owners}", hint=hint)


def _taking(name: str) -> list[str]:
    """The suites to which an option means something that means nothing to others."""
    return [f"{SUITE}{suite.name}" for suite in suites().values() if name in suite.takes]


def _meaningless(name: str, suite: Suite) -> UsageError:
    others = _taking(name)
    return UsageError(
        f"{name} means nothing to {SUITE}{suite.name}"
        + (f"; it belongs to {', '.join(others)}" if others else ""),
        hint=f"{', '.join((*suite.takes, '--sites', '--device', '--repeat'))} and --label do",
    )


# What ``--impl`` says.

Implementations = str | Sequence[str] | Mapping[str, Callable[..., Any]]
"""Values of ``--impl``, or functions by what they are to run."""


def pairs_of(given: Implementations) -> list[tuple[str, Any]]:
    """(where, what): ``where`` is empty of what is meant everywhere. Raises UsageError for half a
    pair."""
    if isinstance(given, Mapping):
        return list(given.items())
    pairs = []
    for text in [given] if isinstance(given, str) else given:
        where, equals, what = text.rpartition("=")
        if not what or (equals and not where):
            raise UsageError(
                f"--impl {text!r} has nothing {'before' if what else 'behind'} its '='"
                if equals
                else "--impl has no name",
                hint="NAME, WHERE=NAME or WHERE=MODULE:FUNCTION",
            )
        pairs.append((where, what))
    return pairs


def function_named(name: str, where: str) -> Callable[..., Any]:
    """The function of ``package.module:function``, for ``where``; modules of the directory that the
    command was given in count. Raises UsageError."""
    module, _, attribute = name.partition(":")
    hint = f"--impl {where}=MODULE:FUNCTION, where python -c 'import MODULE' works"
    here = os.getcwd()
    sys.path.insert(0, here)  # searched first, as ``python -m`` does
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's own
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UsageError(f"cannot import {name!r}: {kind}{error}", hint=hint) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
    if not callable(function):
        raise UsageError(f"{name!r} is not a function", hint=hint)
    return function


def label_of(function: Callable[..., Any]) -> str:
    """Return the name under which a function that was handed over is recorded."""
    label: str = getattr(function, "__qualname__", type(function).__name__)
    return label
