"""One capture, from top to bottom: what is run, in which order, and where it is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch

from divergence.errors import ModelError, UsageError
from divergence.numerics.kernels import RESIDENT_BYTES, Kernel, kernel_for
from divergence.numerics.summaries import sketch_tensor
from divergence.numerics.summary import summarize
from divergence.options.commands import CaptureOptions, recorded_in
from divergence.recording import optimizer as asked
from divergence.recording.engines.engine import (
    GroupResult,
    Session,
    check_ids,
    padded_right,
    refuse_lacking,
)
from divergence.recording.engines.load import map_text
from divergence.recording.engines.together import Allowance, Together
from divergence.recording.hooks import USUAL, Anchor
from divergence.recording.keeper import BufferKeeper, Keeper, ReducedKeeper, can_pin
from divergence.recording.machine import Determinism
from divergence.recording.modules import Recorder
from divergence.recording.new_run import probed, provenance, unlike
from divergence.recording.passes import (
    ESCALATED,
    LEAST_SECONDS,
    SHARE,
    FloorSink,
    Pass,
    RememberingSink,
    RepeatSink,
    check_forwards,
    disagreement,
    keeps_tensors,
    mode_of,
    other_device,
    own_inputs,
    planned_passes,
    recorded_inputs,
    run_pass,
    run_whole,
    tokens_of,
    why_no_room,
    why_no_truth,
    why_not_anchored,
    widened,
)
from divergence.recording.plant import Plant, check_fired, check_places
from divergence.recording.processes import Ranks, closed, on_all, own_part, started
from divergence.recording.prompts import token_texts
from divergence.recording.ranks import Division, LocalKeeper
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, check_operators
from divergence.recording.structure import CompiledWatch, inside, noting_calls, output_paths
from divergence.run.captured import Buffer, BufferLimits
from divergence.run.contents import first_nonfinite, nonfinite_text
from divergence.run.location import Location
from divergence.run.manifest import (
    Manifest,
    OwnTruth,
    Plan,
    Repeatability,
    SampleTokens,
    Settings,
    Sizes,
    Tokens,
)
from divergence.run.reader import Run
from divergence.run.record import OWN_TRUTH
from divergence.run.site import ROOT, escape_path
from divergence.run.writer import RunWriter, reducer_for, wants_fold
from divergence.words import Progress

# Where a capture puts what it sees: the writer, its buffer and the keeper between, made to fit.

_SHARE = 4
"""Compiled loops may take this part of the buffer."""


@contextlib.contextmanager
def storage(
    request: Request,
    out: Location,
    manifest: Manifest,
    *,
    device: torch.device,
    num_bytes: int,
    ranks: Ranks | None = None,
    force: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[RunWriter, Keeper]]:
    """The writer of this rank's part of ``out``, and the keeper that fills its buffer.
    ``num_bytes``: of tensors, about as many as will be seen. ``note``: told what is done otherwise
    than usual."""
    kernel = _kernel(num_bytes, buffer_bytes=request.buffer_bytes)
    if kernel == "compiled":  # loaded now: the writer's thread would keep Python's lock for it
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tensor = torch.ones(1, 16, dtype=dtype)
            summarize(tensor, kernel=kernel)
            if request.store == "sketch":
                sketch_tensor(tensor, 8, kernel=kernel)
    buffer = Buffer(BufferLimits.of(request.buffer_bytes, kernel=kernel), pinned=can_pin(device))
    reducer = reducer_for(
        request.store, like=request.like, only_changed=request.only_changed, kernel=kernel
    )
    rank = 0 if ranks is None else ranks.rank
    with started(
        ranks,
        lambda: RunWriter(
            out, manifest, force=force, rank=rank, reducer=reducer, buffer=buffer, device=device
        ),
    ) as writer:
        keeper: Keeper = BufferKeeper(writer, buffer)
        # Does the run to be repeated hold nothing but hosts' digests of what is not to be kept? A
        # device's own could be held against nothing: its tensors go to the host, and are reduced
        # there. (Hosts that keep sketches note both kinds.)
        of_hosts = (
            request.like is not None
            and request.store in ("stats", "hash")
            and not wants_fold(request.like)
            and any(record.place is None for record in request.like.records)
        )
        if request.store != "full" and not of_hosts:
            keeper = ReducedKeeper(request.store, keeper, note=note)
        yield writer, keeper if ranks is None else LocalKeeper(keeper)


def _kernel(num_bytes: int, *, buffer_bytes: int) -> Kernel:
    """Compiled loops where they pay, and where their memory is a small part of the buffer, in whose
    bound it is."""
    return kernel_for(num_bytes) if buffer_bytes >= _SHARE * RESIDENT_BYTES else "numpy"


def about_bytes(
    module: torch.nn.Module,
    hooked: Collection[str],
    samples: Sequence[SampleTokens],
    max_new_tokens: int,
) -> int:
    """Bytes of all inputs and outputs of the ``hooked`` modules in one pass over ``samples``: their
    order of magnitude, before a forward is made.

    A matrix (out, in) makes rows of ``out`` features of rows of ``in``; a module without one of its
    own (a block, a norm) takes and gives rows as wide as the last axis of its first parameter.
    """
    num_tokens = sum(len(sample.prompt_ids) + max_new_tokens for sample in samples)
    total = 0
    for path, part in module.named_modules():
        if escape_path(path) not in hooked:
            continue
        own = getattr(part, "weight", None)
        weight = own if own is not None else next(part.parameters(), None)
        if weight is None or weight.ndim == 0:
            continue
        features = sum(weight.shape) if own is not None and own.ndim == 2 else 2 * weight.shape[-1]
        total += num_tokens * features * weight.element_size()
    return total


# One capture under way: tokens, plan, manifest, and the passes one after another.
#
# A pass has a name, may be anchored (every block gets the recorded input of the run that is
# repeated) and may compute every operator in a wider dtype than the model's own. A capture makes
# the free pass, with ``--like`` the anchored one, with ``--escalate`` the escalated one (float32;
# anchored to the run that is repeated, or to this run's own free pass), with ``--whole`` the whole
# one, and last the run's own truth, anchored to its own free pass, in float64. A truth of another
# run makes the first two, in float64.


class Execution:
    """One capture under way: the pieces that the passes share."""

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
        self._begun = time.monotonic()
        self.request, self.session, self.on_progress = request, session, on_progress
        loaded = self.loaded = session.loaded
        self.compute_dtype, self.device, self.determinism = compute_dtype, device, determinism
        self.samples, self.groups, self.forced = tokens_of(request, loaded)
        like = None if request.like is None else request.like.manifest
        session.settle(self.samples, self.forced, like)
        self.notes = session.notes()
        self.selection = SiteSelection(request.sites, self.notes, recorded=request.recorded_sites)
        check_operators(self.selection, store=request.store, only_changed=request.only_changed)
        self.keeper: Keeper | None = None
        self._made: list[Pass] = []
        self.plants, self.training = request.plants, asked.training_of(request, loaded.ranks)
        ranks = self.ranks = loaded.ranks
        places = asked.places_of(self.notes, self.training)
        check_places(request.plants, places, num_ranks=1 if ranks is None else ranks.size)
        check_forwards(request, session)
        first = self.samples if like is None else like.tokens.samples
        session.check_ids(first, request.max_new_tokens)
        refuse_lacking(
            session, plants=bool(request.plants), pads_right=padded_right(loaded, self.samples),
            operators=bool(self.selection.operators or request.substitutes),
            batch=any(len(group) > 1 for group in self.groups),
        )  # fmt: skip
        self.division: Division | None = None
        self.own_groups = self.groups
        if ranks is not None:
            self.division = Division(
                ranks, loaded, request, self.selection, self.notes, self.samples, self.groups
            )
            self.own_groups = self.division.groups
            self.plants = self.division.plants(request.plants)

    def run(self, out: Location, *, force: bool, command: str | None) -> Run:
        """Write the run to ``out``, and open it."""
        request = self.request
        passes, missed = planned_passes(
            request, self.loaded, self.selection, self.notes, lacks=self.session.lacks,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip
        for text in missed:
            self._note(text)
        self._made = passes
        plain = not (self.selection.operators or self.plants or request.substitutes)
        plain = plain and request.use_cache and request.prefill_chunk is None
        truth = self.compute_dtype == torch.float64 and plain
        self._together = Together(self.loaded, self.samples) if truth else None
        manifest = self._manifest(passes, command)
        own_truth = self.compute_dtype is None and mode_of(request) != "no"
        lacking = why_no_truth(request, self.session, self.device, out) if own_truth else None
        if lacking is not None:
            self._no_truth(manifest, lacking)
        watch = CompiledWatch(self.loaded.module)
        for note in watch.beforehand(self.selection.operators, self.selection.hooked):
            self._note(note)
        seen = self.session.num_bytes(self.selection.hooked, self.samples, request.max_new_tokens)
        with storage(
            request, out, manifest, device=self.loaded.device, num_bytes=seen * len(passes),
            ranks=self.ranks, force=force, note=self._note,
        ) as (writer, self.keeper), watch.watching():  # fmt: skip
            remembering = RememberingSink(writer) if request.repeat > 1 else None
            num_substituted = 0
            for made_pass in passes:
                free = made_pass.name == "free"
                anchor = None
                if made_pass.anchored:
                    inputs = request.like or Run.open(writer.flush())
                    reason = why_not_anchored(inputs, self.notes) if request.like is None else None
                    if reason is not None:
                        manifest.plan.passes.remove(made_pass.name)
                        self._note(f"no {made_pass.name} pass: {reason}")
                        continue
                    anchor = recorded_inputs(inputs, self.samples, self.groups)
                if made_pass.whole:
                    rank = 0 if self.ranks is None else self.ranks.rank
                    own = own_part(Run.open(writer.flush()), rank)
                    own.set_fallback(request.like)
                    anchor = own_inputs(own)
                recorder = self._recorder(
                    remembering or writer if free else writer, made_pass, anchor
                )
                self._run_pass(recorder, made_pass, writer if free else None)
                self._check_pass(recorder, made_pass, manifest)
                if recorder.operators is not None:
                    num_substituted += recorder.operators.num_substituted
                    for reason, count in recorder.operators.skipped.items():
                        skipped = manifest.plan.skipped_operators
                        skipped[reason] = skipped.get(reason, 0) + count
            if request.substitutes and not num_substituted:
                self._note("no operator was met whose result was to be replaced")
            self.determinism.note_in(manifest.settings)
            manifest.engine, manifest.plan.compiled = self.session.note(), watch.notes()
            precision = getattr(self.session, "precision", None)  # of the dtypes as they were
            manifest.training = msgspec.structs.replace(self.training, precision=precision)
            for note in watch.afterwards():
                self._note(note)
            if remembering is not None:
                writer.drain()
                repeatability = Repeatability(num_runs=request.repeat)
                for number in range(1, request.repeat):
                    self.on_progress("repeat", number, request.repeat - 1, "")
                    sink = RepeatSink(remembering.items, repeatability)
                    run_pass(
                        self.session, self._recorder(sink, Pass("free")), self.samples,
                        self.own_groups, max_new_tokens=request.max_new_tokens,
                        forced=self.forced or [sample.generated_ids for sample in self.samples],
                    )  # fmt: skip
                manifest.repeatability = repeatability
            if own_truth and lacking is None:
                self._make_truth(writer, manifest)
            if self.division is not None:
                writer.flush()
                self.division.count(manifest, writer.record_digests)
        run = Run.open(out) if self.ranks is None else closed(self.ranks, manifest, out, self._note)
        bad = first_nonfinite(run.manifest, run.records)
        if bad is not None:
            self._note(f"no usable run: {nonfinite_text(bad)}; what follows from it is no result")
        return run

    def _no_truth(self, manifest: Manifest, reason: str) -> None:
        """Says why this run carries no truth, although it was to, and notes it in the run."""
        self._note(f"no truth: {reason}")
        manifest.plan.truth = OwnTruth(
            mode=cast(Literal["auto", "full", "floor"], mode_of(self.request)),
            num_steps=[0] * len(self.groups), device=self.device, seconds=0.0, stopped_by=reason,
        )  # fmt: skip

    def _make_truth(self, writer: RunWriter, manifest: Manifest) -> None:
        """The run's own truth and floor: what fails in them ends them, and nothing else."""
        request = self.request
        with contextlib.ExitStack() as stack:
            if request.store == "full":
                own = Run.open(writer.flush())
                own.set_fallback(request.like)
                stack.callback(own.close)
            else:
                writer.flush()
                room = why_no_room(manifest.sizes.seen_bytes)
                if room is not None:
                    self._no_truth(manifest, room)
                    return
                own = stack.enter_context(self._again_in_full(manifest))
            full, keeps = mode_of(request) == "full", keeps_tensors(request)
            reason = why_not_anchored(own, self.notes)
            if reason is not None and full and keeps:
                self._note(f"no anchored truth: {reason}")
            elif reason is not None:
                self._no_truth(manifest, reason)
            device = other_device(self.device)
            passes = [
                Pass(name, anchored=kind == "anchored", compute_dtype=torch.float64, device=device)
                for name, kind in OWN_TRUTH.items()
                if (reason is None if kind == "anchored" else full and keeps)
            ]
            if passes:
                self._make_passes(writer, manifest, own, passes)

    @contextlib.contextmanager
    def _again_in_full(self, manifest: Manifest) -> Iterator[Run]:
        """The free pass once more, on the same tokens, in a temporary run that keeps what this one
        does not: blocks get their inputs from it, and their outputs are what float64 is held to."""
        request = dataclasses.replace(self.request, store="full")
        with tempfile.TemporaryDirectory(prefix="divergence-") as folder:
            out, keeper = Path(folder) / "run", self.keeper
            plan = msgspec.structs.replace(manifest.plan, passes=["free"], store="full")
            with storage(
                request, out, msgspec.structs.replace(manifest, plan=plan, sizes=Sizes()),
                device=self.loaded.device, num_bytes=manifest.sizes.seen_bytes,
            ) as (writer, self.keeper):  # fmt: skip
                run_pass(
                    self.session, self._recorder(writer, Pass("free")), self.samples,
                    self.own_groups, max_new_tokens=self.request.max_new_tokens,
                    forced=[sample.generated_ids for sample in self.samples],
                )  # fmt: skip
                own = Run.open(writer.flush())
                yield own
                own.close()
            self.keeper = keeper

    def _make_passes(
        self, writer: RunWriter, manifest: Manifest, own: Run, passes: Sequence[Pass]
    ) -> None:
        """In float64; what is anchored is so to the free pass of ``own``."""
        request, full = self.request, mode_of(self.request) == "full"
        keeps, self._made = keeps_tensors(request), list(passes)
        plain = request.use_cache and request.prefill_chunk is None
        if plain and not self.selection.operators:
            self._together = Together(self.loaded, self.samples)
        begun = time.monotonic()
        seconds = max(LEAST_SECONDS, SHARE * (begun - self._begun))
        lengths = [sum(self.samples[n].num_padded for n in group) for group in self.groups]
        sums = None if request.train else FloorSink(own, self.notes, writer if keeps else None)
        allowances: list[Allowance] = []
        stopped_by = None
        try:
            where = torch.device(passes[0].device or self.device)
            check_ids(dataclasses.replace(self.loaded, device=where), self.samples, itemsize=8)
            for pass_ in passes:
                allowance = Allowance(None if full else seconds, lengths)
                allowances.append(allowance)
                manifest.plan.passes += [pass_.name] * keeps
                anchor = recorded_inputs(own, self.samples, self.groups) if pass_.anchored else None
                sink = sums if pass_.anchored and sums is not None else writer
                recorder = self._recorder(
                    sink, pass_, anchor, after_forward=allowance.after_forward
                )
                self._run_pass(recorder, pass_, None, allowance=allowance)
                self._check_pass(recorder, pass_, manifest)
        except ModelError as error:
            stopped_by = error.message
            self._note(f"the truth was not finished: {error.message}")
        kept: Literal["auto", "full", "floor"] = "full" if full else "auto"
        manifest.plan.truth = OwnTruth(
            mode=kept if keeps else "floor", num_steps=allowances[0].num_steps,
            device=passes[0].device or self.device, seconds=round(time.monotonic() - begun, 2),
            budget_seconds=allowances[0].seconds, stopped_by=stopped_by,
        )  # fmt: skip
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

    def _check_pass(self, recorder: Recorder, pass_: Pass, manifest: Manifest) -> None:
        num_emitted, num_anchored = on_all(self.ranks, recorder.num_emitted, recorder.anchored)
        if pass_.whole and num_emitted == 0:
            manifest.plan.passes.remove(pass_.name)
            self._note("no whole pass: no decode step was made, so there is nothing to hold to it")
            return
        if (pass_.anchored or pass_.whole) and num_anchored == 0:
            self._note(
                f"the {pass_.name} pass replaced no input: the recorded inputs fit none of "
                "this model's"
            )
        if pass_.name != "free":
            return
        check_fired(self.plants, recorder.fired)
        if num_emitted == 0:
            raise UsageError(
                "nothing was recorded: no tensor passed the chosen sites, steps and positions",
                where=f"--sites {' '.join(manifest.plan.sites)}",
                hint="`divergence capture MODEL --sites modules --dry-run` lists every site",
            )

    def _note(self, text: str) -> None:
        self.on_progress("note", 0, None, text)

    def _is_own(self, pass_: Pass) -> bool:
        """An escalated pass that is anchored to this run's own free pass?"""
        return pass_.name == ESCALATED.name and self.request.like is None

    def _manifest(self, passes: list[Pass], command: str | None) -> Manifest:
        request, like = self.request, self.request.like
        like_id = None if like is None else like.manifest.id
        kept = self.selection.hooked | asked.owners_of(self.loaded.structure, self.training)
        plan = Plan(
            passes=[made_pass.name for made_pass in passes],
            **{**recorded_in(request, "plan", CaptureOptions), "sites": self.selection.sites},
            only_changed=like_id if request.only_changed else None,
            anchored_to=like_id if any(made_pass.anchored for made_pass in passes) else None,
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
        manifest = Manifest(
            **provenance(
                self.device, label=request.label, command=command,
                like=None if like is None else like.manifest,
            ),
            model=identity,
            engine=self.session.note(),
            tokens=Tokens(
                samples=self.samples, groups=self.groups,
                forced_by=like_id,
            ),
            settings=Settings(
                **recorded_in(request, "settings", CaptureOptions),
                device=self.device,
                device_map=map_text(request.device_map),
                switches=self.determinism.switches,
                compute_dtype=None
                if self.compute_dtype is None
                else str(self.compute_dtype).removeprefix("torch."),
            ),
            training=self.training,
            arithmetic=probed(self.device, self.on_progress) if request.probe else [],
            plan=plan,
            overrides=request.overrides,
        )  # fmt: skip
        if self.division is not None:
            manifest.mesh = self.division.ranks.mesh_of(manifest.environment)
        return manifest

    def _recorder(
        self, sink: Any, pass_: Pass, anchor: Anchor | None = None,
        *, after_forward: Callable[[], None] | None = None,
    ) -> Recorder:  # fmt: skip
        request, task = self.request, self.loaded.task
        steps = 1 if pass_.whole or task == "encoder" else request.max_new_tokens
        forwards = steps * len(self.groups) or len(self.groups)
        num_blocks = sum(note.role == "block" for note in self.notes.values())
        # in a wide pass one forward may take minutes: progress goes by blocks
        # (of an encoder-decoder not each forward passes every block)
        wide = pass_.compute_dtype is not None
        by_block = wide and num_blocks > 0 and task != "encoder-decoder"
        decides = task == "causal-lm" and not padded_right(self.loaded, self.samples)
        # in the anchored passes, where there are any: there an error is where it is made
        anchored = any(made.anchored and not self._is_own(made) for made in self._made)
        with_operators = not pass_.whole and pass_.anchored == anchored
        total, done = forwards * (num_blocks if by_block else 1), itertools.count(1)

        def advance(what: str) -> None:
            self.on_progress(pass_.name, min(next(done), total), total, what)

        def end_of_forward(step: int) -> None:
            if not by_block:
                advance(f"step {step - 1}")
            if after_forward is not None:
                after_forward()

        plants: list[Plant] = [] if pass_.is_own_truth else self.plants
        if pass_.whole or self._is_own(pass_):  # inputs from the free pass have theirs already
            plants = [
                plant for plant in plants
                if not plant.port.startswith("in") or self.notes[plant.path].role == "inner"
            ]  # fmt: skip
        return self.session.recorder(
            self.notes,
            wanted=self.selection.wanted,
            hooked=self.selection.hooked,
            flat=self.selection.is_routing,
            sink=sink if self.division is None else self.division.sink(sink),
            pass_=pass_.name,
            steps=request.steps,
            positions=request.positions,
            logit_paths=output_paths(self.loaded.structure) if decides else (),
            plants=plants,
            anchor=anchor,
            keeper=self.keeper,
            operators=self.selection.operators if with_operators else None,
            weights=request.weights,
            forwards=USUAL if pass_.whole else self.loaded.forwards,
            substitutes={} if pass_.is_own_truth else request.substitutes,
            on_step=None if by_block and after_forward is None else end_of_forward,
            on_block=advance if by_block else None,
        )

    def _run_pass(
        self, recorder: Recorder, pass_: Pass, writer: RunWriter | None,
        *, allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        """Run all groups; with ``writer`` the tokens are noted and the manifest kept up to date."""

        def note_tokens(group: list[int], result: GroupResult) -> None:
            if self.ranks is not None and not self.ranks.owns(group[0]):
                return
            assert writer is not None  # or it is not called
            tokens, like = writer.manifest.tokens, self.request.like
            for place, number in enumerate(group):
                sample = self.samples[number]
                sample.generated_ids = result.generated[place]
                sample.chosen_ids = result.chosen[place]
                sample.decoder_prompt_ids = result.decoder_prompt[place]
                if like is not None and self.request.regrouped:
                    theirs = like.manifest.tokens.samples[number]
                    del sample.chosen_ids[len(theirs.chosen_ids or theirs.generated_ids) :]
            tokens.texts.update(token_texts(self.loaded.tokenizer, result.seen_ids))
            writer.update_manifest()

        self.on_progress(pass_.name, 0, None, "")
        if pass_.whole:
            run_whole(self.session, recorder, self.samples, self.own_groups)
            return
        with widened(pass_, self.loaded, self.training) as wide, noting_calls(self.loaded, writer):
            run_pass(
                self.session,
                recorder,
                self.samples,
                self.own_groups,
                max_new_tokens=self.request.max_new_tokens,
                forced=[sample.generated_ids for sample in self.samples]
                if allowance is not None or self._is_own(pass_)
                else self.forced,
                on_group=None if writer is None else note_tokens,
                together=self._together,
                allowance=allowance,
            )
        if writer is not None and self.division is not None:
            self.division.join_tokens(self.samples, writer.manifest)
            writer.update_manifest()
        if wide is not None and wide.num_rounded:
            self._note(
                f"the model writes into narrower tensors of its own in {wide.num_rounded} places: "
                f"there the {pass_.name} pass is rounded to them"
            )
