"""capture(): makes a run from a model on this machine, or repeats one made elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from divergence._version import __version__
from divergence.capture.determinism import Determinism, deterministic_settings
from divergence.capture.dry_run import DryRun, plan_capture
from divergence.capture.engines.generate import GroupResult, check_ids
from divergence.capture.engines.identity import identify, without_home
from divergence.capture.engines.load import LoadedModel, load_model
from divergence.capture.engines.tokenizing import group_samples, token_texts, tokenize
from divergence.capture.environment import collect_environment, resolve_device
from divergence.capture.hooks import Recorder
from divergence.capture.passes import (
    RememberingSink,
    RepeatSink,
    can_anchor,
    recorded_inputs,
    run_pass,
)
from divergence.capture.request import Request, resolve_request
from divergence.capture.sites import SiteSelection
from divergence.capture.structure import describe_modules, output_paths
from divergence.errors import PlantError, RunExistsError, RunWriteError, UsageError
from divergence.run.layout import expanded
from divergence.run.manifest import Manifest, Plan, Repeatability, SampleTokens, Settings, Tokens
from divergence.run.reader import Run
from divergence.run.site import ROOT, near_names
from divergence.run.target import check_target
from divergence.run.writer import RunWriter, new_run_id

__all__ = ["DryRun", "Progress", "capture", "plan_capture"]


class Progress(Protocol):
    """Called as work goes on. ``event``: ``load``, ``digest``, ``free``, ``repeat``,
    ``anchored``, or ``note`` for a warning in ``detail``."""

    def __call__(self, event: str, done: int, total: int | None, detail: str) -> None: ...


def capture(
    model: str | None = None,
    *,
    out: str | Path,
    like: str | Path | Run | None = None,
    task: str = "auto",
    revision: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    device_map: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    prompts: Sequence[str] = (),
    prompts_file: str | Path | None = None,
    chat: bool = False,
    batch: bool | None = None,
    max_new_tokens: int | None = None,
    sites: Sequence[str] = (),
    steps: str | None = None,
    positions: str | None = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    repeat: int = 1,
    anchor: bool = True,
    plants: Sequence[str] = (),
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run ``model`` here and record it in the directory ``out``; returns the opened run.

    ``like``: a run to repeat (its tokens forced, its sites and settings), with
    ``model`` naming another copy if the recorded source is not on this machine.
    None everywhere means "as recorded" with ``like`` and the default without.
    Parameters are those of the command line; see ``divergence capture --help``.

    Raises UsageError, PromptError, PlantError, ModelError, RunFormatError (of
    ``like``), RunExistsError and RunWriteError. Whatever interrupts it, a readable
    run is left behind.
    """
    request = resolve_request(
        model, like=like, task=task, revision=revision, dtype=dtype, device=device,
        device_map=device_map, attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code, prompts=prompts, prompts_file=prompts_file,
        chat=chat, batch=batch, max_new_tokens=max_new_tokens, sites=sites, steps=steps,
        positions=positions, deterministic=deterministic, seed=seed, repeat=repeat,
        anchor=anchor, plants=plants, label=label,
    )  # fmt: skip
    out = expanded(out)
    _check_output(out, force=force, like=request.like)
    tell: Progress = progress or (lambda event, done, total, detail: None)
    device = resolve_device(request.device)
    with deterministic_settings(
        device.partition(":")[0], seed=request.seed, enabled=request.deterministic
    ) as determinism:
        tell("load", 0, None, request.model)
        loaded = load_model(
            request.model,
            task=request.task,
            revision=request.revision,
            dtype=request.dtype,
            device=device,
            device_map=request.device_map,
            attn_implementation=request.attn_implementation,
            trust_remote_code=request.trust_remote_code,
        )
        if loaded.missing:
            tell(
                "note",
                0,
                None,
                f"the checkpoint lacks {len(loaded.missing)} parameters, which "
                f"transformers filled with random numbers: {', '.join(loaded.missing[:4])}",
            )
        return _Capture(request, loaded, device, determinism, tell).run(
            out, force=force, command=command
        )


class _Capture:
    """One capture under way: the pieces that the passes share."""

    def __init__(
        self,
        request: Request,
        loaded: LoadedModel,
        device: str,
        determinism: Determinism,
        tell: Progress,
    ) -> None:
        self.request, self.loaded, self.tell = request, loaded, tell
        self.device, self.determinism = device, determinism
        self.notes = describe_modules(loaded.module)
        self.selection = SiteSelection(request.sites, self.notes)
        for plant in request.plants:
            if plant.path not in self.notes:
                near = near_names(plant.path, self.notes)
                raise PlantError(
                    f"no module {plant.path!r} to plant a fault at",
                    hint=f"did you mean {', '.join(near)}?" if near else None,
                )
        self.samples, self.groups, self.forced = self._tokens()
        check_ids(loaded, self.samples if request.like is None else _recorded_samples(request.like))

    def run(self, out: Path, *, force: bool, command: str | None) -> Run:
        request, plan = self.request, self._plan()
        manifest = self._manifest(plan, command)
        with RunWriter(out, manifest, force=force) as writer:
            first = RememberingSink(writer) if request.repeat > 1 else writer
            recorder = self._recorder(first, "free")
            self._pass(recorder, "free", writer)
            recorder.check_plants()
            if recorder.num_emitted == 0:
                raise UsageError(
                    "nothing was recorded: no tensor passed the chosen sites, steps and positions",
                    where=f"--sites {' '.join(plan.sites)}",
                    hint="`divergence capture MODEL --sites modules --dry-run` lists every site",
                )
            if "anchored" in plan.passes:
                anchored = self._recorder(writer, "anchored", anchor=recorded_inputs(request.like))
                self._pass(anchored, "anchored", None)
                if anchored.anchored == 0:
                    self.tell(
                        "note",
                        0,
                        None,
                        "the anchored pass replaced no input: the recorded "
                        "inputs fit none of this model's",
                    )
            manifest.settings.nondeterministic_warnings = self.determinism.warnings
            if request.repeat > 1:
                writer.drain()
                manifest.repeatability = self._repeat(first.items)
        return Run.open(out)

    def _tokens(self) -> tuple[list[SampleTokens], list[list[int]], list[list[int]] | None]:
        """(samples, groups, forced tokens), tokenised here or taken from the recorded run."""
        request, like = self.request, self.request.like
        if like is not None:
            recorded = like.manifest.tokens
            samples = [
                SampleTokens(
                    text=s.text,
                    prompt_ids=s.prompt_ids,
                    num_left_pad=s.num_left_pad,
                    num_right_pad=s.num_right_pad,
                )
                for s in recorded.samples
            ]
            return samples, recorded.groups, [s.generated_ids for s in recorded.samples]
        samples = tokenize(request.prompts, self.loaded.tokenizer, chat=request.chat)
        pad_left = self.loaded.task == "causal-lm"
        groups = group_samples(samples, batch=request.batch, pad_left=pad_left)
        return samples, groups, None

    def _plan(self) -> Plan:
        request = self.request
        passes = ["free"]
        if request.like is not None and request.anchor:
            reason = can_anchor(request.like, self.notes)
            if reason is None:
                passes.append("anchored")
            else:
                self.tell(
                    "note",
                    0,
                    None,
                    f"no anchored pass: {request.like.path} cannot anchor one, {reason}",
                )
        return Plan(
            passes=passes,
            sites=self.selection.sites,
            steps=request.steps,
            positions=request.positions,
            anchored_to=request.like.manifest.id if "anchored" in passes else None,
            plants=[f"{plant.site}={plant.fault}" for plant in request.plants],
            logits_site=f"{ROOT}:out" if self.loaded.task != "encoder" else None,
            modules={
                path: self.notes[path] for path in self.notes if path in self.selection.hooked
            },
        )

    def _manifest(self, plan: Plan, command: str | None) -> Manifest:
        request = self.request
        identity = identify(
            self.loaded,
            on_parameter=lambda done, total, name: self.tell("digest", done, total, name),
        )
        recorded = None if request.like is None else request.like.manifest.model
        same_dtype = recorded is not None and recorded.dtype == identity.dtype
        if same_dtype and recorded.digest != identity.digest:
            self.tell(
                "note",
                0,
                None,
                f"these are not the weights of the recorded run ({identity.digest[:12]}, "
                f"there {recorded.digest[:12]}): compare will say which differ",
            )
        return Manifest(
            id=new_run_id(),
            tool_version=__version__,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=None if command is None else without_home(command),
            like=None if request.like is None else request.like.manifest.id,
            model=identity,
            tokens=Tokens(
                samples=self.samples,
                groups=self.groups,
                forced_by=None if request.like is None else request.like.manifest.id,
            ),
            settings=Settings(
                deterministic=request.deterministic,
                seed=request.seed,
                device=self.device,
                device_map=request.device_map,
                dtype=request.dtype,
                attn_implementation=request.attn_implementation,
                max_new_tokens=request.max_new_tokens,
                batch=request.batch,
                switches=self.determinism.switches,
            ),
            environment=collect_environment(self.device, label=request.label),
            plan=plan,
            overrides=request.overrides,
        )

    def _recorder(self, sink: Any, pass_: Any, *, anchor: Any = None) -> Recorder:
        request, task = self.request, self.loaded.task
        total = request.max_new_tokens * len(self.groups) or len(self.groups)
        steps_before = 0

        def on_step(step: int) -> None:
            nonlocal steps_before
            steps_before += 1
            self.tell(pass_, steps_before, total, f"step {step - 1}")

        return Recorder(
            self.loaded.module,
            self.notes,
            wanted=self.selection.wanted,
            hooked=self.selection.hooked,
            sink=sink,
            pass_=pass_,
            steps=request.steps,
            positions=request.positions,
            logit_paths=frozenset(output_paths(self.loaded.module))
            if task == "causal-lm"
            else frozenset(),
            plants=request.plants,
            anchor=anchor,
            on_step=on_step,
        )

    def _pass(self, recorder: Recorder, name: str, writer: RunWriter | None) -> None:
        """Run all groups; with ``writer`` the tokens are noted and the manifest kept up to date."""

        def note_tokens(group: list[int], result: GroupResult) -> None:
            tokens = writer.manifest.tokens
            for place, number in enumerate(group):
                sample = self.samples[number]
                sample.generated_ids = result.generated[place]
                sample.chosen_ids = result.chosen[place]
                sample.decoder_prompt_ids = result.decoder_prompt[place]
            tokens.texts.update(token_texts(self.loaded.tokenizer, result.seen_ids))
            writer.update_manifest()

        self.tell(name, 0, None, "")
        run_pass(
            self.loaded,
            recorder,
            self.samples,
            self.groups,
            max_new_tokens=self.request.max_new_tokens,
            forced=self.forced,
            on_group=None if writer is None else note_tokens,
        )

    def _repeat(self, first: dict) -> Repeatability:
        result = Repeatability(num_runs=self.request.repeat)
        for number in range(1, self.request.repeat):
            self.tell("repeat", number, self.request.repeat - 1, "")
            forced = self.forced or [sample.generated_ids for sample in self.samples]
            recorder = self._recorder(RepeatSink(first, result), "free")
            run_pass(
                self.loaded, recorder, self.samples, self.groups,
                max_new_tokens=self.request.max_new_tokens, forced=forced,
            )  # fmt: skip
        return result


def _recorded_samples(run: Run) -> list[SampleTokens]:
    return run.manifest.tokens.samples


def _check_output(out: Path, *, force: bool, like: Run | None) -> None:
    """Refuse before hours of work what the writer would refuse after them."""
    if like is not None and out.exists() and out.resolve() == like.path.resolve():
        raise RunExistsError(f"{out} is the run to be repeated", hint="choose another -o")
    try:
        check_target(out, force=force)
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
