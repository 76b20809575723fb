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
from divergence.recording.forwards import Sink, patched
from divergence.recording.new_run import check_output, provenance
from divergence.recording.passes import RecordedInputs, why_no_anchor
from divergence.recording.past import Past, WeightsWatch, chance_of
from divergence.recording.recorder import Hook, Recorder
from divergence.recording.selection import SiteSelection
from divergence.recording.structure import CALL, describe_modules, unwrapped
from divergence.run.captured import DEFAULT_BUFFER_BYTES, CapturedTensor
from divergence.run.manifest import (
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
        sink: _StepSink,
    ) -> None:
        """``given``: what the caller has, which may wrap ``module``, which is called in its place,
        and ``structure``, whose modules are recorded."""
        self._module, self._structure = module, structure
        self._recorders, self._manifest, self._like = recorders, manifest, like
        self._sink = sink
        self._failed: tuple[Any, ...] | None = None  # what a step was given that raised
        self._names, self._past = argument_names(structure), Past(structure)
        self._weights = WeightsWatch(structure, manifest.model.digests)
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
        tokens = self._manifest.tokens
        if (
            self._failed is not None
            and self._sink.is_whole
            and self._failed == self._told(args, kwargs)
        ):  # it is made again
            tokens.samples.pop()
            tokens.groups.pop()
            self._sink.drop()
            self._failed = None
        number, sample = self.num_steps, SampleTokens(prompt_ids=[])
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        if not all([_noted(name, value, sample) for name, value in given.items()]):
            sample = SampleTokens(prompt_ids=[])
        if self._like is not None:
            self._check_inputs(number, args, kwargs, sample)
        sample.weights = self._weights.changed()
        tokens.samples.append(sample)
        tokens.groups.append([number])
        self._sink.hand_on()  # of a step that raised, and was not made again
        self._failed = None
        try:
            result = self._passes(number, args, kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # a device that failed may not be read
                self._failed = self._told(args, kwargs)
            raise
        self._sink.hand_on()  # a process that is killed later leaves the step
        return result

    def _told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What tells one call's tensors and plain values from another's."""
        given = (*args, *kwargs.values())
        leaves = input_leaves(args, kwargs, self._names)
        digests = [(port, digest_tensor(tensor)) for port, tensor in leaves]
        return digests, [value for value in given if isinstance(value, int | float | str)]

    def _passes(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            self._sink.hand_on()

    def repeat(self) -> None:
        """Makes every step of the run in ``like``, with its inputs. Raises UsageError where it does
        not hold them all."""
        like = self._like
        if like is None:
            raise UsageError("there is no run to repeat", hint="record(module, out=..., like=RUN)")
        names = self._names
        device = next((parameter.device for parameter in self._module.parameters()), None)
        for number, sample in enumerate(like.manifest.tokens.samples):
            values: dict[str, Any] = {**sample.constants}
            for index, name in enumerate(sample.inputs):
                first, *rest = name.split(".")
                if first.isdecimal() and int(first) < len(names):
                    first = names[int(first)]
                port = ".".join(["in", first, *rest]) if index else "in"
                record = self._before.get(number, {}).get(port)
                if record is not None and like.has_bytes(record):
                    values[name] = like.read(record).to(device=device, copy=True)
            try:
                given = {
                    name: _built(name, values, sample.parts)
                    for name in [*sample.inputs, *sample.constants, *sample.parts]
                    if "." not in name
                }
            except (KeyError, ValueError):
                given = {}
            if not sample.inputs or not given:
                raise UsageError(
                    f"{like.path} holds no inputs of step {number} that could be given again: they "
                    "are more than tensors and plain values, or were not recorded in full",
                    hint="recording.step(x), with the inputs of that step",
                )
            by_place = [given.pop(name) for name in sorted(filter(str.isdecimal, given), key=int)]
            self.step(*by_place, **given)

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


def _noted(name: str, value: Any, sample: SampleTokens) -> bool:
    """Can the argument be given again? Notes it, and what it holds, where it can."""
    if isinstance(value, torch.Tensor):
        sample.inputs.append(name)
    elif value is None or isinstance(value, bool | int | float | str):
        sample.constants[name] = value
    elif type(value) in (list, tuple, dict):
        parts = value if type(value) is dict else {str(n): item for n, item in enumerate(value)}
        if not all(isinstance(key, str) and "." not in key for key in parts):
            return False
        sample.parts[name] = [type(value).__name__, *parts]
        return all([_noted(f"{name}.{key}", item, sample) for key, item in parts.items()])
    else:
        return False
    return True


def _built(name: str, values: Mapping[str, Any], nested: Mapping[str, list[str]]) -> Any:
    """The argument of that name. Raises KeyError or ValueError where a part of it is missing."""
    if name not in nested:
        return values[name]
    kind, *keys = nested[name]
    parts = {key: _built(f"{name}.{key}", values, nested) for key in keys}
    return parts if kind == "dict" else (tuple if kind == "tuple" else list)(parts.values())


class _StepSink:
    """Keeps what the forwards of a step give, up to a buffer's size: where one raises, the step may
    be made again, and leaves nothing of the first time."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._items: list[tuple[CapturedTensor, dict[str, Any]]] = []
        self._bytes, self.is_whole = 0, True

    def put(self, item: CapturedTensor, **place: Any) -> None:
        self._items.append((item, place))
        self._bytes += item.num_bytes
        if self._bytes > DEFAULT_BUFFER_BYTES:
            self.hand_on()
            self.is_whole = False

    def hand_on(self) -> None:
        """The step is over, and stays."""
        for item, place in self._items:
            self._sink.put(item, **place)
        self.drop()

    def drop(self) -> None:
        self._items, self._bytes, self.is_whole = [], 0, True


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
            reason = why_no_anchor(source, notes)
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
            step_sink = _StepSink(writer)
            recorder = functools.partial(
                Recorder,
                structure,
                notes,
                sink=step_sink,
                wanted=selection.wanted,
                hooked=selection.hooked,
            )
            recorders = [recorder()]
            if source is not None:
                tokens = source.manifest.tokens
                anchor = RecordedInputs(source, tokens.samples, tokens.groups)
                recorders.append(recorder(pass_="anchored", anchor=anchor))
            recording = Recording(module, inner, structure, recorders, manifest, source, step_sink)
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
    like: object,
    options: CaptureOptions,
    force: bool,
) -> Run:
    """The run of ``module``, one step for each of ``inputs``. Raises what ``record`` raises, and
    UsageError for inputs that are none, and for options that a module alone cannot follow."""
    given = ["like"] if like is not None else []
    given += [
        name
        for name, value in vars(options).items()
        if value != getattr(CaptureOptions(), name) and name not in ("sites", "label")
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: a module is run as it is, on its inputs",
            hint="inputs, out, sites, label and force apply; capture(PATH, ...) takes all others",
        )
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
    sites = options.sites or ("modules",)
    with record(module, out=out, sites=sites, label=options.label, force=force) as recording:
        for values in inputs:
            if isinstance(values, Mapping):
                recording.step(**values)
            else:
                recording.step(*(values if isinstance(values, tuple) else (values,)))
    return Run.open(out)
