"""capture(): makes a run from a model on this machine, or repeats one made elsewhere.
truth(): repeats one in float64, which tells what is right. The class Capture is the recipe: from
the tokens to the written run, pass by pass.

Their parameters are options of ``divergence.options``, written down a second time, since type
checkers, editors and ``help()`` read nothing else; a test holds names, types and defaults equal.
What few set is a field of a group (``BatchOptions``), which ``capture`` takes whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch

from divergence.domain import hook_places, placed, sources
from divergence.errors import ModelError, RenamedWarning, UsageError
from divergence.numerics.sketches import sketch_tensor
from divergence.numerics.summary import summarize
from divergence.numerics.sums import kernel_for
from divergence.options.commands import (
    GROUPS,
    BatchOptions,
    CaptureOptions,
    CaseOptions,
    LoadOptions,
    MachineOptions,
    RecordOptions,
    TruthOptions,
    renamed,
    ungrouped,
)
from divergence.options.option import fields_of, given_fields, recorded_in
from divergence.recording.any_module import Inputs, capture_inputs
from divergence.recording.cases import (
    CaseRequest,
    capture_cases,
    refuse_options,
    suite_meant,
    truth_of_cases,
)
from divergence.recording.code import CompiledWatch, note_other_numbers
from divergence.recording.engines.engine import (
    DEFAULT,
    GroupResult,
    Session,
    check_ids,
    engine_named,
    options_for,
    pad_id,
    padded_right,
    refuse_lacking,
)
from divergence.recording.engines.identity import note_changes
from divergence.recording.engines.load import LoadedModel, check_data_alone, map_text, what_follows
from divergence.recording.engines.many_steps import Allowance, Enough, ManySteps
from divergence.recording.engines.media import Media
from divergence.recording.forwards import USUAL, Anchor, Forwards, Sink, steps_joined
from divergence.recording.keeper import BufferKeeper, DigestKeeper, Keeper, ReducedKeeper, can_pin
from divergence.recording.machine import (
    Determinism,
    cpu_threads,
    deterministic_settings,
    resolve_device,
)
from divergence.recording.new_run import check_output, probed, provenance, unlike
from divergence.recording.passes import (
    FloorSink,
    Pass,
    RecordedInputs,
    RepeatSink,
    check_forwards,
    disagreement,
    keeps_tensors,
    mode_of,
    other_device,
    planned_passes,
    why_no_room,
    why_no_truth,
    why_not_anchored,
    widened,
)
from divergence.recording.past import WeightsWatch
from divergence.recording.plant import Plant, check_fired, check_places
from divergence.recording.processes import closed, joined, on_all, own_part, started
from divergence.recording.prompts import Prompt, group_samples, token_texts, tokenize
from divergence.recording.ranks import Division, LocalKeeper
from divergence.recording.recorder import Recorder
from divergence.recording.request import Request, line_of_taken, plain_arguments, resolve_request
from divergence.recording.selection import SiteSelection, check_operators
from divergence.recording.structure import inside, noting_calls, output_paths, settled
from divergence.recording.widening import check_device
from divergence.run.captured import Buffer, BufferLimits
from divergence.run.contents import first_nonfinite, nonfinite_text
from divergence.run.manifest import (
    Manifest,
    OwnTruth,
    Plan,
    Repeatability,
    SampleTokens,
    Settings,
    Sizes,
    StoreMode,
    Tokens,
)
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import INPUTS, OWN_TRUTH, expanded
from divergence.run.site import ROOT
from divergence.run.storage import Location, location_of
from divergence.run.writer import RunWriter, reducer_for, wants_fold
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
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    prepare: Callable[[torch.nn.Module], torch.nn.Module | None] | None = None,
    loading: LoadOptions | None = None,
    batching: BatchOptions | None = None,
    recording: RecordOptions | None = None,
    machine: MachineOptions | None = None,
    cases: CaseOptions | None = None,
    **more: object,
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
    ``full``, ``floor`` or ``no``. ``engine``: what runs the model (docs/engines.md).

    ``prepare`` is called with the loaded model before anything is run or digested, to put another
    kernel or module in place, or to compile it (``torch.compile``); a module that it returns is run
    in its place. A ``model`` ``suite:NAME`` is a suite of cases. A ``model`` that is a torch
    module, of any kind, is run once on each of ``inputs``: a tensor, a tuple of arguments or a dict
    of named ones; only ``sites``, ``label``, ``out`` and ``force`` apply then (``record`` lets the
    caller run it).

    The other options of ``divergence capture --help`` are fields of groups, by the same names:
    ``loading`` the model; ``batching`` and padding the prompts; ``recording``, what else is kept
    and in which passes; ``machine``, its name, switches and memory; ``cases``, of a suite.
    Domains add groups of their own: ``training``, one step of it in place of decoding
    (docs/training.md). Earlier versions took them beside the others, as ``batch=True``: that still
    works, with a RenamedWarning. ``command``: what the manifest names as the command line that
    made the run.

    Raises UsageError, PromptError, PlantError, ModelError, RunFormatError (of
    ``like``), RunExistsError and RunWriteError, and TypeError for a name that there is none of.
    Whatever interrupts it, a readable run is left behind.
    """
    given = locals()
    del given["more"]
    groups = {name: given.pop(name) for name in [*given] if name in GROUPS}
    groups |= {name: more.pop(name) for name in GROUPS if name in more}
    if more:  # by the names of earlier versions
        moved = renamed("capture", more, beside=inspect.signature(capture).parameters)
        warnings.warn(moved, RenamedWarning, stacklevel=2)
    return make_run(**{**given, **ungrouped(groups), **more})


def _with_groups(function: Callable[..., Run]) -> inspect.Signature:
    """Its signature with the groups of domains among its parameters: for ``help()`` and editors."""
    own = inspect.signature(function)
    *named, others = own.parameters.values()
    names = [parameter.name for parameter in named]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{kind.__name__} | None"
        )
        for name, kind in GROUPS.items()
        if name not in names
    ]
    function.__annotations__ |= {group.name: GROUPS[group.name] | None for group in more}
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
    options = CaptureOptions(**plain_arguments(**values))
    command = plain_arguments(force=force, command=command)["command"]
    for source in sources():
        if getattr(options, source.option) is not None:
            made: Run = placed(source.function)(
                model,
                options=options,
                like=None if like is None else Run.open(like),
                out=out,
                force=force,
                command=command,
                progress=progress,
                inputs=inputs,
                prepare=prepare,
            )
            return made
        # what belongs to it means nothing by itself
        fields = {
            field.name: field.option
            for kind in GROUPS.values()
            for field in fields_of(kind)
            if source.option in kind.__dataclass_fields__
        }
        for field in given_fields(options):
            if field.name in fields:
                needed = fields[source.option].words
                raise UsageError(f"{field.option.names[0]} needs {needed}")
    if inputs is not None or not isinstance(model, str | Path | None):
        return capture_inputs(model, inputs, out=out, like=like, options=options, force=force)
    like = None if like is None else Run.open(like)
    if (suite := suite_meant(model, like)) is not None:
        return capture_cases(
            suite,
            CaseRequest(
                out=out,
                like=like,
                options=options,
                force=force,
                command=command,
                progress=progress or silent,
            ),
            prepare=prepare,
        )
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
    given = locals()
    options = TruthOptions(
        **plain_arguments(**{f.name: given[f.name] for f in fields_of(TruthOptions)})
    )
    plain_arguments(force=force, command=command)  # raises for what is of no such type
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
        return truth_of_cases(
            suite,
            CaseRequest(
                out=out,
                like=recorded,
                options=chosen,
                force=force,
                command=command,
                progress=progress or silent,
            ),
            options,
        )
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
        request,
        out=out,
        force=force,
        command=command,
        progress=progress,
        compute_dtype=torch.float64,
    )


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
        if ranks is None or ranks.is_first:
            others = [substitute.run for substitute in request.substitutes.values()]
            check_output(place, force=force, like=request.like, substitutes=others)
        else:
            progress = None  # the first rank speaks for all
        on_progress: Progress = progress or silent
        if ranks is not None:
            device = ranks.device
        if request.like is not None:
            on_progress("taken", 0, None, line_of_taken(request))
            if not request.like.manifest.complete:
                note = f"{request.like.path} is INCOMPLETE: what it lacks is not repeated either"
                on_progress("note", 0, None, note)
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
            if loaded.adapter is not None:
                on_progress("note", 0, None, f"{request.model}: {loaded.adapter}")
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
            for step in hook_places("step").values() if request.stepping else ():
                session = placed(step)(session, request)
            capturing = Capture(
                request, session, device, determinism, on_progress, compute_dtype=compute_dtype
            )
            return capturing.run(place, force=force, command=command)


# One capture under way: tokens, manifest, and the passes one after another.

SHARE = 0.5
"""Of the time that a capture has taken before, which its own truth may take."""
LEAST_SECONDS = 5.0
"""Less is not worth a share: small models get all of their truth."""


_OTHER_WEIGHTS = "the weights changed while prompts ran"


class Capture:
    """One capture: ``request`` carried out with the model of ``session``. ``run`` is the recipe."""

    def __init__(
        self,
        request: Request,
        session: Session,
        device: str,
        determinism: Determinism,
        on_progress: Progress,
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Settles tokens and sites, and refuses what this model or its engine cannot do."""
        self._begun = time.monotonic()
        self.request, self.session, self.on_progress = request, session, on_progress
        self.compute_dtype, self.device, self.determinism = compute_dtype, device, determinism
        loaded = self.loaded = session.loaded
        like = None if request.like is None else request.like.manifest
        # the tokens, in the batches that were asked for; forced where a run is repeated
        self.media = Media(loaded)
        self.samples, self.groups, self.forced = _tokens_of(request, loaded, self.media)
        self.media.check(request, self.samples)
        behind = what_follows(loaded.source)
        for text in [*self.media.notes, *([] if behind is None else [behind])]:
            self._note(text)
        session.settle(self.samples, self.forced, like)
        # the sites
        self.notes = session.notes()
        self.selection = SiteSelection(request.sites, self.notes, recorded=request.recorded_sites)
        check_operators(self.selection, store=request.store, only_changed=request.only_changed)
        ranks = self.ranks = loaded.ranks
        self.plants, self.step = request.plants, session.step
        places = self.step.places(self.notes)
        check_places(request.plants, places, num_ranks=1 if ranks is None else ranks.size)
        # what cannot be done
        check_forwards(request, session)
        session.check_ids(
            self.samples if like is None else like.tokens.samples, request.max_new_tokens
        )
        refuse_lacking(
            session,
            plants=bool(request.plants),
            pads_right=padded_right(loaded, self.samples),
            operators=bool(self.selection.operators or request.substitutes),
            batch=any(len(group) > 1 for group in self.groups),
            media=bool(self.media),
        )
        # this rank's share of it, of several
        self.division: Division | None = None
        self.own_groups = self.groups
        if ranks is not None:
            self.division = Division(
                ranks, loaded, request, self.selection, self.notes, self.samples, self.groups
            )
            self.own_groups = self.division.groups
            self.plants = self.division.plants(request.plants)
        self.keeper: Keeper | None = None
        self.passes, self.missed = planned_passes(
            request, self.session, self.selection, self.notes, compute_dtype=compute_dtype
        )
        self._many_steps: ManySteps | None = None
        self._weights: WeightsWatch | None = None
        self._num_substituted = 0

    def run(self, out: Location, *, force: bool, command: str | None) -> Run:
        """Write the run to ``out``, and open it."""
        request = self.request
        # 1. What is known before the first forward: the passes, the model, the machine.
        for text in self.missed:
            self._note(text)
        if self.compute_dtype == torch.float64 and not (self.plants or request.substitutes):
            self._allow_many_steps()
        manifest = self._manifest(command)
        wants_truth = self.compute_dtype is None and mode_of(request) != "no"
        lacking = why_no_truth(request, self.session, self.device, out) if wants_truth else None
        if lacking is not None:
            self._no_truth(manifest, lacking)
        watch = CompiledWatch(self.loaded.module)
        for note in watch.beforehand(self.selection.operators, self.selection.hooked):
            self._note(note)
        seen = self.session.num_bytes(self.selection.hooked, self.samples, request.max_new_tokens)
        num_bytes = seen * len(self.passes)
        with (
            self._storage(out, manifest, request.store, num_bytes, force) as writer,
            watch.watching(),
        ):
            # 2. What pictures and sound became, then the passes, one after another: the free one
            # first.
            self.media.write(writer)
            if self.ranks is None:
                self._weights = WeightsWatch(self.loaded.module, manifest.model.digests)
            for planned in self.passes:
                if self._weights is None or self._weights.changed() is None:
                    self._run_pass(planned, writer)
                else:  # what it would run is not what the free pass ran
                    manifest.plan.passes.remove(planned.name)
                    self._note(f"no {planned.name} pass: {_OTHER_WEIGHTS}")
            if wants_truth and self._weights is not None and self._weights.changed() is not None:
                lacking = _OTHER_WEIGHTS
                self._no_truth(manifest, lacking)
            if request.substitutes and not self._num_substituted:
                self._note("no operator was met whose result was to be replaced")
            # 3. What the machine did while they ran.
            self.determinism.note_in(manifest.settings)
            manifest.engine, manifest.plan.compiled = self.session.note(), watch.notes()
            manifest.training = msgspec.structs.replace(
                self.step.training, precision=self.session.precision
            )
            for note in watch.afterwards():
                self._note(note)
            # 4. Does this machine repeat itself? The free pass again, its digests held against the
            # first one's.
            if request.repeat > 1:
                repeatability = Repeatability(num_runs=request.repeat)
                sink = RepeatSink(self._reopened(writer), repeatability)
                for number in range(1, request.repeat):
                    self.on_progress("repeat", number, request.repeat - 1, "")
                    self._forwards(self._recorder(sink, self.passes[0]), self.passes[0], again=True)
                manifest.repeatability = repeatability
            # 5. The run's own truth, last, so that nothing else that is recorded depends on it.
            if wants_truth and lacking is None:
                self._make_truth(writer, manifest)
            # 6. What the other ranks saw, added up.
            if self.division is not None:
                writer.flush()
                self.division.count(manifest, writer.record_digests)
        # 7. The run as it is read from now on.
        run = Run.open(out) if self.ranks is None else closed(self.ranks, manifest, out, self._note)
        bad = first_nonfinite(run.manifest, run.records)
        if bad is not None:
            self._note(f"no usable run: {nonfinite_text(bad)}; what follows from it is no result")
        return run

    # --- one pass -------------------------------------------------------------------------------

    def _run_pass(
        self,
        planned: Pass,
        writer: RunWriter,
        *,
        sink: Sink | None = None,
        own: Run | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """Run one pass over all prompts. Of a truth: ``sink``, where its tensors go; ``own``, the
        run whose free pass it is anchored to; ``allowance``, how far it goes."""
        manifest = writer.manifest
        # What each block gets in place of its own input.
        anchor: Anchor | None = None
        if planned.anchored_to is not None:
            like = self.request.like if planned.anchored_to == "like" else None
            inputs = like or own or self._reopened(writer)
            if like is None and planned.name == "escalated":
                reason = why_not_anchored(inputs, self.notes)
                if reason is not None:
                    manifest.plan.passes.remove(planned.name)
                    self._note(f"no escalated pass: {reason}")
                    return
            recorded = RecordedInputs(
                inputs, self.samples, self.groups, manifest.training.loss_scale
            )
            anchor = self._in_one_forward(recorded) if planned.whole else recorded
        # The forwards.
        recorder = self._recorder(sink or writer, planned, anchor, allowance)
        self.on_progress(planned.name, 0, None, "")
        noted = writer if planned.name == "free" else None
        with widened(planned, self.loaded, self.step) as wide, noting_calls(self.loaded, noted):
            self._forwards(recorder, planned, noted=noted, allowance=allowance)
        if noted is not None and self.division is not None:
            self.division.join_tokens(self.samples, manifest)
            writer.update_manifest()
        elif noted is not None and manifest.plan.not_called:
            writer.update_manifest()  # passes that begin from this run read what rests
        if wide is not None and wide.num_rounded:
            self._note(
                f"the model writes into narrower tensors of its own in {wide.num_rounded} places: "
                f"there the {planned.name} pass is rounded to them"
            )
        # What it saw.
        num_emitted, num_anchored = on_all(self.ranks, recorder.num_emitted, recorder.anchored)
        if planned.whole and num_emitted == 0:
            manifest.plan.passes.remove(planned.name)
            self._note("no whole pass: no decode step was made, so there is nothing to hold to it")
        elif planned.anchored_to is not None and num_anchored == 0:
            self._note(
                f"the {planned.name} pass replaced no input: the recorded inputs fit none of "
                "this model's"
            )
        if planned.name == "free":
            check_fired(self.plants, recorder.fired)
            if num_emitted == 0:
                raise UsageError(
                    "nothing was recorded: no tensor passed the chosen sites, steps and positions",
                    where=f"--sites {' '.join(manifest.plan.sites)}",
                    hint="`divergence capture MODEL --sites modules --dry-run` lists every site",
                )
        if recorder.operators is not None and not planned.is_own_truth:
            self._num_substituted += recorder.operators.num_substituted
            skipped = manifest.plan.skipped_operators
            for reason, count in recorder.operators.skipped.items():
                skipped[reason] = skipped.get(reason, 0) + count

    def _forwards(
        self,
        recorder: Recorder,
        planned: Pass,
        *,
        again: bool = False,
        noted: RunWriter | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """Run every group of prompts once under the recorder's hooks. ``again``: with the tokens
        that this run's free pass had; ``noted``: who is told the tokens."""
        again = again or planned.is_own_truth or planned.anchored_to == "own"
        forced = [sample.generated_ids for sample in self.samples] if again else self.forced
        most = self.request.max_new_tokens
        weights = self._weights if noted is not None else None
        with recorder.installed():
            for group in self.own_groups:
                if allowance is not None and not allowance.begins():
                    recorder.cut_short()
                    continue
                members = [self.samples[number] for number in group]
                fed = None if forced is None else [forced[number][:most] for number in group]
                how: dict[str, Any] = {"max_new_tokens": most, "forced": fed}
                num_kept = None
                if planned.whole:
                    # The last generated token was never fed forward, so it is left out. Logits of
                    # the prefill's last token too: what the free pass handed to the head.
                    num_kept = len(members[0].generated_ids) - 1
                    if num_kept < 1:
                        continue
                    members = [
                        msgspec.structs.replace(
                            sample,
                            prompt_ids=sample.prompt_ids + sample.generated_ids[:-1],
                            generated_ids=[],
                        )
                        for sample in members
                    ]
                    how = {"max_new_tokens": 1, "num_logits": num_kept + 1}
                if weights is not None:
                    for sample in members:
                        sample.weights = weights.changed()
                num_tokens = members[0].num_padded
                recorder.begin(
                    sample=group[0], batch=len(group), num_tokens=num_tokens, num_kept=num_kept
                )
                # Forced steps of a truth are made many at a time where the model allows it.
                steps = None if planned.whole or fed is None else self._many_steps
                if steps is not None and fed is not None and not steps.suits(len(fed[0])):
                    steps = None
                if allowance is not None:
                    allowance.together = steps is not None
                try:
                    if steps is not None and fed is not None:
                        result = steps.run_group(recorder, members, fed, allowance)
                    else:
                        how |= self.media.fed(group[0], num_tokens)
                        result = self.session.run_group(recorder, members, **how)
                except Enough:
                    continue
                if noted is not None and (self.ranks is None or self.ranks.owns(group[0])):
                    self._note_tokens(noted, group, result)

    def _note_tokens(self, writer: RunWriter, group: list[int], result: GroupResult) -> None:
        """Writes down the tokens of a group, and what the model derived anew meanwhile."""
        identity = writer.manifest.model
        note_changes(self.loaded.module, identity.derived, group[-1])
        with contextlib.suppress(Exception):  # modules are anybody's code
            note_other_numbers(self.loaded.module, identity.code, group[-1])
        tokens, like = writer.manifest.tokens, self.request.like
        for place, number in enumerate(group):
            sample = self.samples[number]
            sample.generated_ids = result.generated[place]
            sample.chosen_ids = result.chosen[place]
            sample.decoder_prompt_ids = result.decoder_prompt[place]
            if like is not None and self.request.regrouped:
                recorded = like.manifest.tokens.samples[number]
                del sample.chosen_ids[len(recorded.chosen_ids or recorded.generated_ids) :]
        tokens.texts.update(token_texts(self.loaded.tokenizer, result.seen_ids))
        writer.update_manifest()

    def _recorder(
        self,
        sink: Any,
        planned: Pass,
        anchor: Anchor | None = None,
        allowance: Allowance | None = None,
    ) -> Recorder:
        request, task = self.request, self.loaded.task
        # In a wide pass one forward may take minutes: progress goes by blocks. (Of an
        # encoder-decoder not each forward passes every block.)
        num_blocks = sum(note.role == "block" for note in self.notes.values())
        wide = planned.compute_dtype is not None
        by_block = wide and num_blocks > 0 and task != "encoder-decoder"
        steps = 1 if planned.whole or task == "encoder" else request.max_new_tokens
        forwards = steps * len(self.groups) or len(self.groups)
        total, done = forwards * (num_blocks if by_block else 1), itertools.count(1)

        def advance(what: str) -> None:
            self.on_progress(planned.name, min(next(done), total), total, what)

        def end_of_forward(step: int) -> None:
            if not by_block:
                advance(f"step {step - 1}")
            if allowance is not None:
                allowance.after_forward()

        plants: list[Plant] = [] if planned.is_own_truth else self.plants
        if planned.anchored_to == "own":  # inputs from the free pass have theirs already
            plants = [
                plant
                for plant in plants
                if not plant.port.startswith("in") or self.notes[plant.path].role == "inner"
            ]
        decides = task == "causal-lm" and not padded_right(self.loaded, self.samples)
        return self.session.recorder(
            self.notes,
            wanted=self.selection.wanted,
            hooked=self.selection.hooked,
            flat=self.selection.is_routing,
            sink=sink if self.division is None else self.division.sink(sink),
            pass_=planned.name,
            steps=request.steps,
            positions=request.positions,
            logit_paths=output_paths(self.loaded.structure) if decides else (),
            plants=plants,
            anchor=anchor,
            keeper=self.keeper,
            operators=self.selection.operators if planned.operators else None,
            weights=request.weights,
            forwards=USUAL if planned.whole else self.loaded.forwards,
            substitutes={} if planned.is_own_truth else request.substitutes,
            on_step=None if by_block and allowance is None else end_of_forward,
            on_block=advance if by_block else None,
        )

    def _reopened(self, writer: RunWriter) -> Run:
        """Open what this capture (this rank of it) has written so far."""
        own = own_part(Run.open(writer.flush()), 0 if self.ranks is None else self.ranks.rank)
        own.set_fallback(self.request.like)
        return own

    def _in_one_forward(self, recorded: Anchor) -> Anchor:
        """The rows of all steps of a group, one after another."""

        def anchor(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
            steps = range(len(self.samples[sample].generated_ids))
            return steps_joined(recorded, sample, steps, site, own)

        return anchor

    # --- the run's own truth --------------------------------------------------------------------

    def _allow_many_steps(self) -> None:
        """Make many decode steps in one forward from now on, where all are made alike."""
        request = self.request
        apart = request.prefill_chunk is not None or self.selection.operators or self.media
        if request.use_cache and not apart:
            self._many_steps = ManySteps(self.loaded, self.samples)

    def _no_truth(self, manifest: Manifest, reason: str) -> None:
        """Says why this run carries no truth, although it was to, and notes it in the run."""
        self._note(f"no truth: {reason}")
        mode = cast(Literal["auto", "full", "floor"], mode_of(self.request))
        manifest.plan.truth = OwnTruth(
            mode=mode, num_steps=[0] * len(self.groups), device=self.device, seconds=0.0
        )
        manifest.plan.truth.stopped_by = reason

    def _make_truth(self, writer: RunWriter, manifest: Manifest) -> None:
        """The run's own truth and floor: what fails in them ends them, and nothing else."""
        request = self.request
        full, keeps = mode_of(request) == "full", keeps_tensors(request)
        with contextlib.ExitStack() as stack:
            # Where the inputs come from: this run, or, where it keeps no bytes, the free pass once
            # more.
            if request.store == "full":
                own = self._reopened(writer)
                stack.callback(own.close)
            else:
                writer.flush()
                room = why_no_room(manifest.sizes.seen_bytes)
                if room is not None:
                    self._no_truth(manifest, room)
                    return
                own = stack.enter_context(self._again_in_full(manifest))
            reason = why_not_anchored(own, self.notes)
            if reason is not None and full and keeps:
                self._note(f"no anchored truth: {reason}")
            elif reason is not None:
                self._no_truth(manifest, reason)
                return
            elsewhere = other_device(self.device)
            passes = [
                Pass(
                    name,
                    "own" if kind == "anchored" else None,
                    torch.float64,
                    device=elsewhere,
                    operators=kind == "anchored" or reason is not None,
                )
                for name, kind in OWN_TRUTH.items()
                if (reason is None if kind == "anchored" else full and keeps)
            ]
            # The passes, as far as the time goes.
            self._allow_many_steps()
            begun = time.monotonic()
            seconds = None if full else max(LEAST_SECONDS, SHARE * (begun - self._begun))
            lengths = [sum(self.samples[n].num_padded for n in group) for group in self.groups]
            sums = (
                None if request.stepping else FloorSink(own, self.notes, writer if keeps else None)
            )
            allowances: list[Allowance] = []
            stopped_by = None
            where = elsewhere or self.device
            try:
                at = dataclasses.replace(self.loaded, device=torch.device(where))
                check_ids(at, self.samples, itemsize=8)
                for planned in passes:
                    allowances.append(Allowance(seconds, lengths))
                    manifest.plan.passes += [planned.name] * keeps
                    sink = None if planned.anchored_to is None else sums
                    self._run_pass(planned, writer, sink=sink, own=own, allowance=allowances[-1])
            except ModelError as error:
                stopped_by = error.message
                self._note(f"the truth was not finished: {error.message}")
            # What it covers, and whether the free pass is near it.
            kept: Literal["auto", "full", "floor"] = "full" if full else "auto"
            num_steps = allowances[0].num_steps if allowances else []
            manifest.plan.truth = OwnTruth(
                mode=kept if keeps else "floor",
                num_steps=num_steps + [0] * (len(self.groups) - len(num_steps)),
                device=where,
                seconds=round(time.monotonic() - begun, 2),
                budget_seconds=seconds,
                stopped_by=stopped_by,
            )
            if sums is not None and sums.write(writer):
                manifest.plan.passes.append("floor")
            made = Run.open(writer.flush())
            apart = disagreement(made)
            made.close()
            if apart is not None:
                block, ratio = apart
                kernel = "this machine's kernel, or the code's own casts"
                cause = "a planted fault" if self.plants else kernel
                self._note(f"{block}: its float64 differs by {ratio:,.0f} x rounding: {cause}")

    @contextlib.contextmanager
    def _again_in_full(self, manifest: Manifest) -> Iterator[Run]:
        """The free pass once more, on the same tokens, in a temporary run that keeps what this one
        does not: blocks get their inputs from it, and their outputs are what float64 is held to."""
        free, keeper = self.passes[0], self.keeper
        plan = msgspec.structs.replace(manifest.plan, passes=["free"], store="full")
        copy = msgspec.structs.replace(manifest, plan=plan, sizes=Sizes())
        with tempfile.TemporaryDirectory(prefix="divergence-") as folder:
            num_bytes = manifest.sizes.seen_bytes
            with self._storage(Path(folder) / "run", copy, "full", num_bytes) as writer:
                self._forwards(self._recorder(writer, free), free, again=True)
                own = Run.open(writer.flush())
                yield own
                own.close()
            self.keeper = keeper

    # --- what is written ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _storage(
        self,
        out: Location,
        manifest: Manifest,
        store: StoreMode,
        num_bytes: int,
        force: bool = False,
    ) -> Iterator[RunWriter]:
        """The writer of this rank's part of ``out``, and its keeper, which fills its buffer.
        ``num_bytes``: of tensors, about as many as will be seen."""
        request, device, ranks = self.request, self.loaded.device, self.ranks
        kernel = kernel_for(num_bytes, memory_bytes=request.buffer_bytes)
        if kernel == "compiled":  # loaded now: the writer's thread would keep Python's lock for it
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                tensor = torch.ones(1, 16, dtype=dtype)
                summarize(tensor, kernel=kernel)
                if store == "sketch":
                    sketch_tensor(tensor, 8, kernel=kernel)
        buffer = Buffer(
            BufferLimits.of(request.buffer_bytes, kernel=kernel), pinned=can_pin(device)
        )
        like, changed = request.like, request.only_changed
        reducer = reducer_for(store, like=like, only_changed=changed, kernel=kernel)
        how: dict[str, Any] = {"reducer": reducer, "buffer": buffer, "device": device}
        write = functools.partial(RunWriter, out, manifest, force=force, **how)
        with started(ranks, write) as writer:
            keeper: Keeper = BufferKeeper(writer, buffer)
            if store == "hash" and not wants_fold(like):
                keeper = DigestKeeper(keeper)
            # Does the run to be repeated hold nothing but hosts' digests of what is not to be kept?
            # A device's own could be held against nothing: its tensors go to the host, and are
            # reduced there. (Hosts that keep sketches note both kinds.)
            of_hosts = (
                like is not None
                and store in ("stats", "hash")
                and not wants_fold(like)
                and any(record.place is None for record in like.records)
            )
            if store != "full" and not of_hosts:
                keeper = ReducedKeeper(store, keeper, note=self._note)
            self.keeper = keeper if ranks is None else LocalKeeper(keeper)
            yield writer

    def _manifest(self, command: str | None) -> Manifest:
        """The manifest as far as it is known before the first forward."""
        request, like = self.request, self.request.like
        like_id = None if like is None else like.manifest.id
        kept = self.selection.hooked | self.step.owners()
        plan = Plan(
            passes=[*(planned.name for planned in self.passes), *[INPUTS] * bool(self.media)],
            **{**recorded_in(request, "plan", CaptureOptions), "sites": self.selection.sites},
            only_changed=like_id if request.only_changed else None,
            anchored_to=like_id if any(p.anchored_to for p in self.passes if not p.whole) else None,
            plants=[f"{plant.site}={plant.fault}" for plant in request.plants],
            substitutes=[str(substitute) for substitute in request.substitutes.values()],
            logits_site=f"{ROOT}:out" if self.loaded.task != "encoder" else None,
            modules={
                path: note
                for path, note in self.notes.items()
                if path in kept or inside(path, self.selection.operators)
            },
        )
        identity = self.session.identity(
            lambda done, total, name: self.on_progress("digest", done, total, name)
        )
        if like is not None:
            for text in unlike(like.manifest, identity, self.session.note(), self.notes):
                self._note(text)
        settings = Settings(
            **recorded_in(request, "settings", CaptureOptions),
            device=self.device,
            device_map=map_text(request.device_map),
            switches=self.determinism.switches,
        )
        if self.compute_dtype is not None:
            settings.compute_dtype = str(self.compute_dtype).removeprefix("torch.")
        source = None if like is None else like.manifest
        manifest = Manifest(
            **provenance(self.device, label=request.label, command=command, like=source),
            model=identity,
            engine=self.session.note(),
            tokens=Tokens(
                samples=self.samples,
                groups=self.groups,
                forced_by=like_id,
                processor=self.media.settings,
            ),
            settings=settings,
            training=self.step.training,
            arithmetic=probed(self.device, self.on_progress) if request.probe else [],
            plan=plan,
            overrides=request.overrides,
        )
        if self.division is not None:
            manifest.mesh = self.division.ranks.mesh_of(manifest.environment)
        return manifest

    def _note(self, text: str) -> None:
        self.on_progress("note", 0, None, text)


def _tokens_of(
    request: Request, loaded: LoadedModel, media: Media
) -> tuple[list[SampleTokens], list[list[int]], list[list[int]] | None]:
    """(samples, groups, forced tokens) in the batches asked for: of the prompts, or of the run that
    is repeated. ``media`` takes what their pictures and sound are."""
    left = loaded.task == "causal-lm" and not request.pad_right
    if request.like is None:
        media.check_read([not prompt.media for prompt in request.prompts])
        samples = tokenize(
            request.prompts, loaded.tokenizer, chat=request.chat, process=media.process
        )
        return samples, group_samples(samples, pad_left=left, **request.grouping), None
    media.read(request.like)
    recorded = request.like.manifest.tokens
    forced = [sample.generated_ids for sample in recorded.samples]
    samples = [
        msgspec.structs.replace(
            sample, generated_ids=[], chosen_ids=[], decoder_prompt_ids=[], weights=None
        )
        for sample in recorded.samples
    ]
    if request.regrouped:
        groups = group_samples(samples, pad_left=left, **request.grouping)
        for group in groups:  # each is fed equally many tokens: padding after it has ended
            longest = max(len(forced[number]) for number in group)
            for number in group:
                padding = [pad_id(loaded)] * (longest - len(forced[number]))
                forced[number] = forced[number] + padding
        return samples, groups, forced
    return samples, recorded.groups, forced
