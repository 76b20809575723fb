"""record(): a run of any torch module, whatever feeds it.

    with divergence.record(module, out="a") as recording:
        recording.step(x)

Each step is one forward, and one sample of the run: its inputs and outputs are recorded at the
module's own sites. Two such runs are compared like any other; there are no tokens.

    with divergence.record(module, out="b", like="a") as recording:
        recording.repeat()

gives the module what A's was given, step by step, and runs each step once more with A's inputs in
the place of each block's own: the anchored pass. Calls of the module itself within the block are
steps too, so that a pipeline or a loop that nobody can change is recorded as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import GeneratorType
from typing import Any

import torch

from divergence.errors import UsageError
from divergence.numerics.formats import format_of
from divergence.options.commands import CaptureOptions
from divergence.recording.dispatch import argument_names, input_leaves
from divergence.recording.engines.identity import (
    configured,
    derived_state,
    note_changes,
    usual_dtype,
)
from divergence.recording.forwards import patched
from divergence.recording.new_run import check_output, provenance
from divergence.recording.passes import RecordedInputs, can_anchor
from divergence.recording.past import Past, chance_of, stamp
from divergence.recording.recorder import Hook, Recorder
from divergence.recording.selection import SiteSelection
from divergence.recording.structure import CALL, describe_modules, unwrapped
from divergence.run.manifest import (
    ConfigValue,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Tokens,
    digest_many,
    digest_tensor,
)
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import ROOT, join_site
from divergence.run.storage import location_of
from divergence.run.writer import RunWriter

Inputs = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
"""What one forward is given: its only argument, all of them, or named ones."""
_APPLY = ("sites", "label")
_AGAIN = contextvars.ContextVar("again", default=False)
"""Is an anchored forward under way? What it calls is no step of another recording."""


class _OneThread(Hook):
    """Refuses a call that another thread makes while a step is under way."""

    thread = 0

    def sees(self, path: str) -> bool:
        return path == ROOT

    def before(self, *_: Any) -> None:
        if threading.get_ident() != self.thread:
            raise UsageError(
                "the module is called by several threads at once, and steps are told apart by none",
                hint="one call after another, or a record of each thread's own copy",
            )


class Recording:
    """Makes the steps of a run under way; ``record`` hands it out."""

    def __init__(
        self,
        given: torch.nn.Module,
        module: torch.nn.Module,
        structure: torch.nn.Module,
        recorders: Sequence[Recorder],
        manifest: Manifest,
        like: Run | None,
    ) -> None:
        """``given``: what the caller has, which may wrap ``module``, which is called in its place,
        and ``structure``, whose modules are recorded."""
        self._module, self._structure = module, structure
        self._recorders, self._manifest, self._like = recorders, manifest, like
        self._names, self._past = argument_names(structure), Past(structure)
        self._marks = _marks(structure)
        self._weights: str | None = None
        self._lock, self._guard = threading.RLock(), _OneThread()
        for recorder in recorders:
            recorder.hooks.insert(0, self._guard)
        doors = {id(door): door for door in (given, module, structure)}.values()
        self._doors = [(door, vars(door).get(CALL)) for door in doors]
        self.is_open = True
        # inputs of each step of ``like``, by port
        self._before: dict[int, dict[str, Record]] = {}
        for record in [] if like is None else like.records:
            path, _, port = record.site.partition(":")
            if path == ROOT and port.startswith("in") and record.pass_ == "free":
                self._before.setdefault(record.sample, {})[port] = record

    @property
    def num_steps(self) -> int:
        return len(self._manifest.tokens.samples)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the module, with gradients in training mode alone; returns what the module
        does. With ``like`` it is run twice, and raises UsageError for inputs that are not that
        run's."""
        with self._lock:
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_open:
            raise UsageError("the run is complete: its `with` block has ended")
        number, tokens = self.num_steps, self._manifest.tokens
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        constants: dict[str, ConfigValue] = {
            name: value
            for name, value in given.items()
            if value is None or isinstance(value, bool | int | float | str)
        }
        sample = SampleTokens(prompt_ids=[])
        if len(tensors) + len(constants) == len(given):
            sample = SampleTokens(prompt_ids=[], inputs=tensors, constants=constants)
        if self._like is not None:
            self._check_inputs(number, args, kwargs, sample)
        sample.weights = self._changed_weights()
        tokens.samples.append(sample)
        tokens.groups.append([number])
        grad = self._module.training and torch.is_grad_enabled()
        free, *again = self._recorders
        twins = self._past.twins((args, kwargs)) if again else ()
        chance = chance_of(self._structure)
        with torch.set_grad_enabled(grad):
            result = self._forward(free, number, args, kwargs)
        note_changes(self._structure, self._manifest.model.derived, number)
        if isinstance(result, GeneratorType):
            raise UsageError(
                "the module's forward is a generator: its modules run when the step is over",
                hint="record a module whose forward returns list(...) of it",
            )
        for recorder in again:
            before = _AGAIN.set(True)
            try:
                with torch.no_grad(), self._past.in_place(), chance():
                    self._forward(recorder, number, *twins)
            finally:
                _AGAIN.reset(before)
        return result

    def _changed_weights(self) -> str | None:
        """The digest of all parameters; None where they are still those that the run began with."""
        if (marks := _marks(self._structure)) != self._marks:
            named = [(n, digest_tensor(p)) for n, p in self._structure.named_parameters()]
            own = self._manifest.model.digests
            changed = any(own.get(name) != digest for name, digest in named)
            by_place = ((str(place), digest) for place, (_, digest) in enumerate(named))
            self._marks, self._weights = marks, digest_many(by_place) if changed else None
        return self._weights

    def _forward(
        self, recorder: Recorder, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder.begin(sample=number, batch=1, num_tokens=0)
        self._guard.thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            for door, call in self._doors:
                stack.enter_context(patched(door, CALL, call))
            stack.enter_context(recorder.installed())
            return self._module(*args, **kwargs)

    @contextlib.contextmanager
    def calls_recorded(self) -> Iterator[None]:
        """Within the block, who calls the module makes a step: ``step`` runs where the module is
        called, as a compiled forward does. It keeps its class, and copies of it and what is saved
        of it do not have it."""

        def stepping(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if _AGAIN.get() else self.step(*args, **kwargs)

        try:
            with contextlib.ExitStack() as stack:
                for door, call in self._doors:
                    own = functools.partial(stepping, call or door._call_impl)
                    if "torch._dynamo" in sys.modules:  # compiled code may call it
                        own = torch.compiler.disable(own)
                    stack.enter_context(patched(door, CALL, own))
                yield
        finally:
            self.is_open = False

    def repeat(self) -> None:
        """Makes every step of the run in ``like``, with its inputs. Raises UsageError where it does
        not hold them all."""
        like = self._like
        if like is None:
            raise UsageError("there is no run to repeat", hint="record(module, out=..., like=RUN)")
        names = self._names
        device = next((parameter.device for parameter in self._module.parameters()), None)
        for number, sample in enumerate(like.manifest.tokens.samples):
            values: dict[str, Any] = {}
            for index, name in enumerate(sample.inputs):
                port = f"in.{names[int(name)] if name.isdecimal() else name}" if index else "in"
                record = self._before.get(number, {}).get(port)
                if record is None or not like.has_bytes(record):
                    break
                values[name] = like.read(record).to(device=device, copy=True)
            if not sample.inputs or len(values) < len(sample.inputs):
                raise UsageError(
                    f"{like.path} holds no inputs of step {number} that could be given again: they "
                    "are more than tensors and plain values, or were not recorded in full",
                    hint="recording.step(x), with the inputs of that step",
                )
            values |= sample.constants
            by_place = [values[name] for name in sorted(filter(str.isdecimal, values), key=int)]
            self.step(*by_place, **{n: v for n, v in values.items() if not n.isdecimal()})

    def _check_inputs(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], sample: SampleTokens
    ) -> None:
        like = self._like
        assert like is not None
        if number >= len(like.manifest.tokens.samples):
            raise UsageError(f"{like.path} has {number} steps, and this is another one")
        given = dict(input_leaves(args, kwargs, self._names))
        before = self._before.get(number, {})
        wrong = [
            join_site(ROOT, port)
            for port, record in before.items()
            if port not in given or record.xxh3 not in (None, digest_tensor(given[port]))
        ]
        wrong += [join_site(ROOT, port) for port in given if before and port not in before]
        values, constants = like.manifest.tokens.samples[number], sample.constants
        if values.inputs and sample.inputs:
            names = {**values.constants, **constants}
            wrong += [name for name in names if values.constants.get(name) != constants.get(name)]
        if wrong:
            raise UsageError(
                f"step {number}: {wrong[0]} is not what {like.path} was given",
                hint="recording.repeat() makes each step with that run's inputs",
            )


def _marks(module: torch.nn.Module) -> list[Any]:
    """Marks of a module's parameters, equal where nothing wrote to them in between or put others in
    their place. Torch does not count what is written by way of ``.data``, so that a row of each is
    among them."""
    marks: list[Any] = []
    for parameter in module.parameters():
        marks.append(stamp(parameter))
        if type(parameter) is torch.nn.Parameter and not parameter.is_meta and parameter.numel():
            row = parameter.detach()
            while row.ndim > 1:
                row = row[len(row) // 2]
            marks.append((parameter.data_ptr(), row.reshape(-1)[:_OF_ROW].tolist()))
    return marks


_OF_ROW = 64


@contextlib.contextmanager
def record(
    module: torch.nn.Module,
    *,
    out: str | Path,
    like: str | Path | Run | None = None,
    sites: str | Sequence[str] = ("modules",),
    label: str | None = None,
    force: bool = False,
) -> Iterator[Recording]:
    """Record every ``step`` of ``module``, and every call of it, into the run ``out``, complete
    when the block ends.

    ``sites``: as in ``capture``. ``label``: what to call this machine. The module runs as it is: in
    the mode (train or eval), dtype and device that it is in. A block that raises leaves an
    incomplete run, which can be read. ``like``: a run of ``record`` on another machine, whose steps
    are made again with the same inputs, each once more anchored to it.

    Raises UsageError for what is no module, for sites that it has not, and where no step was made;
    for ``like`` a run that cannot anchor this module; RunExistsError where ``out`` holds something
    and ``force`` is false.
    """
    if not isinstance(module, torch.nn.Module):
        hint = "a pipeline's is pipeline.model" if hasattr(module, "model") else "record(module, …)"
        raise UsageError(f"{type(module).__name__} is no torch.nn.Module", hint=hint)
    place = location_of(out)
    check_output(place, force=force, like=None)
    with unwrapped(module) as (inner, structure):
        notes = describe_modules(structure)
        source = None if like is None else Run.open(like)
        reason = None
        if source is not None:
            reason = can_anchor(source, notes)
            if not any(note.role == "block" for note in notes.values()):
                reason = "the module has no blocks"
            if any(sample.prompt_ids for sample in source.manifest.tokens.samples):
                reason = "it was made of prompts: divergence capture --like repeats it"
        if source is not None and reason is not None:
            raise UsageError(f"{source.path} cannot be repeated: {reason}")
        selection = SiteSelection([sites] if isinstance(sites, str) else list(sites), notes)
        # class and weights: equal weights have equal digests, as in a capture
        state = {
            name: t for name, t in structure.state_dict().items() if isinstance(t, torch.Tensor)
        }
        digests = {name: digest_tensor(tensor) for name, tensor in state.items()}
        sizes = [
            (format_of(tensor.dtype).name, tensor.numel())
            for tensor in state.values()
            if tensor.is_floating_point()
        ]
        own = configured(structure)
        own |= {
            "config_digest": "",  # by which a run of a module is known
            "config": {**own.get("config", {}), "training": module.training},
        }
        identity = ModelIdentity(
            source=type(structure).__qualname__,
            model_class=type(structure).__name__,
            task="encoder",
            dtype=usual_dtype(sizes) or "float32",
            num_parameters=sum(parameter.numel() for parameter in structure.parameters()),
            digest=digest_many(digests),
            digests=digests,
            derived=derived_state(structure),
            **own,
        )
        device = next((str(parameter.device) for parameter in structure.parameters()), "cpu")
        manifest = Manifest(
            **provenance(device, label=label, command=None),
            model=identity,
            tokens=Tokens(samples=[], groups=[]),
            settings=Settings(
                deterministic=torch.are_deterministic_algorithms_enabled(),
                seed=0,
                device=device,
                max_new_tokens=1,
                batch=False,
            ),
            plan=Plan(
                passes=["free"] if source is None else ["free", "anchored"],
                sites=selection.sites,
                anchored_to=None if source is None else source.manifest.id,
                modules={path: note for path, note in notes.items() if path in selection.hooked},
            ),
        )
        with RunWriter(place, manifest, force=force) as writer:
            recorder = functools.partial(
                Recorder,
                structure,
                notes,
                sink=writer,
                wanted=selection.wanted,
                hooked=selection.hooked,
            )
            recorders = [recorder()]
            if source is not None:
                tokens = source.manifest.tokens
                anchor = RecordedInputs(source, tokens.samples, tokens.groups)
                recorders.append(recorder(pass_="anchored", anchor=anchor))
            recording = Recording(module, inner, structure, recorders, manifest, source)
            with recording.calls_recorded():
                yield recording
            if not recorders[0].num_emitted:
                raise UsageError(
                    "no step was made, or no tensor passed the sites",
                    where=str(out),
                    hint="with record(module, out=...) as r: r.step(x)",
                )
    Run.open(place)


def capture_inputs(
    module: object,
    inputs: Sequence[Inputs] | None,
    *,
    out: str | Path,
    sites: str | Sequence[str],
    label: str | None,
    force: bool,
) -> Run:
    """The run of ``module``, one step for each of ``inputs``. Raises what ``record`` raises, and
    UsageError for inputs that are none."""
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"inputs are for a torch.nn.Module, and the model is {type(module).__name__}",
            hint="capture(module, inputs=[x], out=...), or a path with prompts=...",
        )
    if isinstance(inputs, torch.Tensor | Mapping | str) or not inputs:
        raise UsageError(
            "a module needs inputs: a list with one entry for each forward",
            hint="capture(module, inputs=[x], out=...); a tuple holds several arguments, a dict "
            "named ones",
        )
    with record(module, out=out, sites=sites, label=label, force=force) as recording:
        for given in inputs:
            if isinstance(given, Mapping):
                recording.step(**given)
            else:
                recording.step(*(given if isinstance(given, tuple) else (given,)))
    return Run.open(out)


def refuse_beside_inputs(options: CaptureOptions, like: object) -> None:
    """Raise UsageError where an option was given that a module alone cannot follow."""
    given = ["like"] if like is not None else []
    given += [
        name
        for name, value in vars(options).items()
        if value != getattr(CaptureOptions(), name) and name not in _APPLY
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: a module is run as it is, on its inputs",
            hint="inputs, out, sites, label and force apply; capture(PATH, ...) takes all others",
        )
