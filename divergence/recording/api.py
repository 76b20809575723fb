"""capture(): makes a run from a model on this machine, or repeats one made elsewhere.
truth(): repeats one in float64, which tells what is right.

Their parameters are options of ``divergence.options``, written down a second time, since type
checkers, editors and ``help()`` read nothing else; a test holds names, types and defaults equal.
What few set is a field of a group (``BatchOptions``), which ``capture`` takes whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from divergence.domain import placed, sources
from divergence.errors import ModelError, RenamedWarning, UsageError
from divergence.options.commands import (
    GROUPS,
    BatchOptions,
    CaptureOptions,
    LoadOptions,
    MachineOptions,
    RecordOptions,
    TrainOptions,
    TruthOptions,
    renamed,
    ungrouped,
)
from divergence.options.option import fields_of, given_fields
from divergence.recording.any_module import Inputs, capture_inputs, refuse_beside_inputs
from divergence.recording.cases import (
    CaseRequest,
    capture_cases,
    refuse_options,
    suite_meant,
    truth_of_cases,
)
from divergence.recording.engines.engine import (
    DEFAULT,
    engine_named,
    options_for,
    refuse_lacking,
)
from divergence.recording.engines.load import check_data_alone
from divergence.recording.execution import Execution
from divergence.recording.hooks import Forwards
from divergence.recording.machine import cpu_threads, deterministic_settings, resolve_device
from divergence.recording.new_run import check_output
from divergence.recording.optimizer import check_stage, training_of
from divergence.recording.plant import Plant
from divergence.recording.processes import joined
from divergence.recording.prompts import Prompt, options_of, plain_wishes
from divergence.recording.request import Request, resolve_request, taken
from divergence.recording.structure import settled
from divergence.recording.training import TrainingSession
from divergence.recording.widening import check_device
from divergence.run.location import location_of
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.words import Progress, silent


def capture(
    model: str | Path | torch.nn.Module | None = None,
    *,
    out: str | Path,
    inputs: Sequence[Inputs] | None = None,
    like: str | Path | Run | None = None,
    prompts: str | Sequence[str | Sequence[int] | Prompt] = (),
    max_new_tokens: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "auto",
    attn_implementation: str | None = None,
    engine: str | None = None,
    sites: str | Sequence[str] = (),
    store: str | None = None,
    truth: str | None = None,
    seed: int | None = None,
    plants: Sequence[str | Plant] = (),
    probe: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    prepare: Callable[[torch.nn.Module], torch.nn.Module | None] | None = None,
    loading: LoadOptions | None = None,
    batching: BatchOptions | None = None,
    recording: RecordOptions | None = None,
    machine: MachineOptions | None = None,
    training: TrainOptions | None = None,
    **old: object,
) -> Run:
    """Run ``model`` here and record it in the directory ``out``; returns the opened run.

        a = capture("MODEL", out="a", prompts=["The capital of France is"], dtype="bfloat16")
        b = capture(like=a, out="b", batching=BatchOptions(batch=True))

    ``like``: a run to repeat (its tokens forced, its sites and settings), with
    ``model`` naming another copy if the recorded source is not on this machine.
    None everywhere means "as recorded" with ``like`` and the default without.
    A prompt is text or a list of token ids; a prompt or site alone needs no list; ``dtype`` and
    ``device`` may be torch's own. ``store``: ``full`` keeps every byte, ``sketch`` projections of
    which differences are estimated, ``stats`` statistics, ``hash`` digests alone. ``truth``: the
    run's own truth, one more pass in float64: ``auto`` (the default where nothing is repeated),
    ``full``, ``floor`` or ``no``. ``engine``: what runs the model (docs/engines.md). ``probe``:
    note what this machine's arithmetic does, before the first pass.

    ``prepare`` is called with the loaded model before anything is run or digested, to put another
    kernel or module in place, or to compile it (``torch.compile``); a module that it returns is run
    in its place. A ``model`` ``suite:NAME`` is a suite of cases. A ``model`` that is a torch
    module, of any kind, is run once on each of ``inputs``: a tensor, a tuple of arguments or a dict
    of named ones; only ``sites``, ``label``, ``out`` and ``force`` apply then (``record`` lets the
    caller run it).

    The other options of ``divergence capture --help`` are fields of groups, by the same names:
    ``loading`` the model; ``batching`` and padding the prompts; ``recording``, what else is kept
    and in which passes; ``machine``, its name, switches and memory; ``training``, one step of it in
    place of decoding (docs/training.md). Domains add groups of their own. Earlier versions took
    them beside the others, as ``batch=True``: that still works, with a RenamedWarning.

    Raises UsageError, PromptError, PlantError, ModelError, RunFormatError (of
    ``like``), RunExistsError and RunWriteError, and TypeError for a name that there is none of.
    Whatever interrupts it, a readable run is left behind.
    """
    groups: dict[str, Any] = {
        "loading": loading, "batching": batching, "recording": recording, "machine": machine,
        "training": training, **{name: old.pop(name) for name in GROUPS if name in old},
    }  # fmt: skip
    command = old.pop("command", None)
    if old:
        moved = renamed("capture", old, beside=inspect.signature(capture).parameters)
        warnings.warn(moved, RenamedWarning, stacklevel=2)
    return make_run(
        model, out=out, inputs=inputs, like=like, force=force, command=command, progress=progress,
        prepare=prepare, prompts=prompts, max_new_tokens=max_new_tokens, dtype=dtype, device=device,
        attn_implementation=attn_implementation, engine=engine, sites=sites, store=store,
        truth=truth, seed=seed, plants=plants, probe=probe, **{**ungrouped(groups), **old},
    )  # fmt: skip


def _with_groups(function: Callable[..., Run]) -> inspect.Signature:
    """Its signature with the groups of domains among its parameters: for ``help()`` and editors."""
    own = inspect.signature(function)
    *named, others = own.parameters.values()
    known = [parameter.name for parameter in named]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{kind.__name__} | None"
        )
        for name, kind in GROUPS.items()
        if name not in known
    ]
    return own.replace(parameters=[*named, *more, others])


capture.__signature__ = _with_groups(capture)  # type: ignore[attr-defined]  # inspect reads it


def make_run(
    model: str | Path | torch.nn.Module | None = None,
    *,
    out: str | Path,
    inputs: Sequence[Inputs] | None = None,
    like: str | Path | Run | None = None,
    force: bool = False,
    command: Any = None,
    progress: Progress | None = None,
    prepare: Callable[[torch.nn.Module], torch.nn.Module | None] | None = None,
    **values: Any,
) -> Run:
    """``capture``, with options of all groups by their names alone; ``command`` is written into
    the manifest."""
    options = CaptureOptions(**plain_wishes(**values))
    command = plain_wishes(force=force, command=command)["command"]
    for source in sources():
        if getattr(options, source.option) is not None:
            made: Run = placed(source.function)(
                model, options=options, like=None if like is None else Run.open(like), out=out,
                force=force, command=command, progress=progress, inputs=inputs, prepare=prepare,
            )  # fmt: skip
            return made
        # what belongs to it means nothing by itself
        fields = {field.name: field.option for kind in GROUPS.values() for field in fields_of(kind)
                  if source.option in kind.__dataclass_fields__}  # fmt: skip
        for field in given_fields(options):
            if field.name in fields:
                needed = fields[source.option].words
                raise UsageError(f"{field.option.names[0]} needs {needed}")
    if inputs is not None or not isinstance(model, str | Path | None):
        refuse_beside_inputs(options, like)
        sites = options.sites or ("modules",)
        return capture_inputs(model, inputs, out=out, sites=sites, label=options.label, force=force)
    like = None if like is None else Run.open(like)
    if (suite := suite_meant(model, like)) is not None:
        return capture_cases(suite, CaseRequest(
            out=out, like=like, options=options, force=force, command=command,
            progress=progress or silent,
        ), prepare=prepare)  # fmt: skip
    refuse_options(None, options)
    request = resolve_request(model, like=like, options=options)
    return _execute(
        request, out=out, force=force, command=command, progress=progress, prepare=prepare
    )


def truth(
    run: str | Path | Run,
    *,
    out: str | Path,
    model: str | Path | None = None,
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    sites: str | Sequence[str] = (),
    max_new_tokens: int | None = None,
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Repeat ``run`` in float64 and record the truth in the directory ``out``.

    Its tokens are forced, its sites (or ``sites``) recorded, free and anchored to it. Weights are
    loaded in the run's dtype (so rounded as there) and every operator, the float32 casts inside
    models included, is computed in float64: see ``divergence.recording.widening``. Memory
    beside the model as loaded is about one operator's float64 weights plus activations.
    ``device``: any that has float64. Fused attention kernels have none: ``eager`` then.

    Raises what ``capture`` raises, and UsageError for a run that is a truth itself.
    """
    options = options_of(TruthOptions, locals())
    plain_wishes(force=force, command=command)
    recorded = unsharded(Run.open(run))
    if recorded.manifest.settings.compute_dtype is not None:
        raise UsageError(
            f"{recorded.path} is a truth itself (computed in "
            f"{recorded.manifest.settings.compute_dtype})",
            hint="give the run that was captured in the model's own dtype",
        )
    if (suite := suite_meant(None, recorded)) is not None:
        chosen = CaptureOptions(
            label=options.label or "float64 truth", seed=0, deterministic=True, probe=False
        )
        return truth_of_cases(suite, CaseRequest(
            out=out, like=recorded, options=chosen, force=force, command=command,
            progress=progress or silent,
        ), options)  # fmt: skip
    attention = recorded.manifest.model.attn_implementation
    if options.attn_implementation is None and attention not in (None, "eager", "sdpa"):
        options = dataclasses.replace(options, attn_implementation="eager")
    values = vars(options) | {"store": "full", "probe": False}
    values["label"] = options.label or "float64 truth"
    engine = recorded.manifest.engine
    values |= {"engine": DEFAULT, "engine_options": {}}
    if engine is not None and engine.simulates:
        values |= {"engine": engine.name, "engine_options": dict(engine.options)}
    request = resolve_request(values.pop("model"), like=recorded, options=CaptureOptions(**values))
    return _execute(
        request, out=out, force=force, command=command, progress=progress,
        compute_dtype=torch.float64,
    )  # fmt: skip


def _execute(
    request: Request,
    *,
    out: str | Path,
    force: bool,
    command: str | None,
    progress: Progress | None,
    prepare: Callable[[torch.nn.Module], torch.nn.Module | None] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Run:
    """Load the model and run what was asked for."""
    place = location_of(out)
    device = resolve_device(request.device)
    if compute_dtype is not None:
        check_device(device, compute_dtype)
    with (
        cpu_threads(request.threads),
        joined(request.mesh, device) as ranks,
        deterministic_settings(
            device.partition(":")[0], seed=request.seed, enabled=request.deterministic
        ) as determinism,
    ):
        check_stage(request, () if ranks is None else ranks.sizes)
        if ranks is None or ranks.is_first:
            others = [substitute.run for substitute in request.substitutes.values()]
            check_output(place, force=force, like=request.like, substitutes=others)
        else:
            progress = None  # the first rank speaks for all
        on_progress: Progress = progress or silent
        if ranks is not None:
            device = ranks.device
        if request.like is not None:
            on_progress("taken", 0, None, taken(request))
            if not request.like.manifest.complete:
                said = f"{request.like.path} is INCOMPLETE: what it lacks is not repeated either"
                on_progress("note", 0, None, said)
        on_progress("load", 0, None, request.model)
        try:
            if not (request.named or request.trust_remote_code):
                check_data_alone(request.model, revision=request.revision)
            engine = engine_named(request.engine, built_in_alone=not request.engine_named)
            loading = dataclasses.replace(request.loading, device=device, ranks=ranks)
            session = engine.load(loading, options_for(engine, request.engine_options))
        except ModelError as error:
            if request.like is None or request.named:
                raise
            # what a run names may be elsewhere here, or a file of the engine that made it
            made_by, path = request.like.manifest.engine, expanded(request.model)
            is_file = path.is_file() or (path.is_absolute() and not path.exists())
            if is_file and made_by is not None and made_by.name != request.engine:
                error.where = f"{request.like.path} was made from it by the engine {made_by.name}"
                error.hint = f"name the model that {request.engine} is to load: --model DIR"
            elif not path.exists():
                error.hint = f"{error.hint}, or name this machine's copy: --model PATH"
            raise
        with contextlib.closing(session):
            loaded = session.loaded
            if loaded.missing:
                text = (
                    f"the checkpoint lacks {len(loaded.missing)} parameters, which "
                    f"{session.note().name} filled with random numbers: "
                    f"{', '.join(loaded.missing[:4])}"
                )
                on_progress("note", 0, None, text)
            module = loaded.module
            if prepare is not None:
                refuse_lacking(session, prepare=True)
                module = settled(module, prepare(module))
            forwards = Forwards(
                cached=request.use_cache, chunk=request.prefill_chunk, hooks=request.hooks
            )
            session.loaded = dataclasses.replace(loaded, module=module, forwards=forwards)
            if request.train:
                session = TrainingSession(session, training_of(request, loaded.ranks))
            execution = Execution(
                request, session, device, determinism, on_progress, compute_dtype=compute_dtype
            )
            return execution.run(place, force=force, command=command)
