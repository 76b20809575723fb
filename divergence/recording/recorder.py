"""The recorder and its hooks: every wanted tensor is seen, no bit of the result changes.

One pre-hook and one hook a module. Each calls a list of hooks: what puts a recorded input in place
(anchored pass), what plants faults, what records, and those that an engine or a training step adds.
The keeper takes what it keeps at once, because later operators may write to the tensor in place. A
tensor that passes unchanged from one module to the next is kept once. A kernel that bypasses
torch's counter of writes is noticed where its module returns the tensor it was given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from divergence.domain import hook_places, placed
from divergence.recording.dispatch import (
    OperatorRecorder,
    argument_names,
    input_leaves,
    map_inputs,
    map_output,
    output_leaves,
)
from divergence.recording.forwards import USUAL, Anchor, Forwards, Sink, patched, steps_joined
from divergence.recording.keeper import CopyKeeper, Keeper, Recent
from divergence.recording.plant import FORWARDS, Plant, Substitute
from divergence.recording.selection import narrowed, step_selected
from divergence.recording.structure import by_token, compiled_regions, hooked, inside
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote
from divergence.run.record import Call, PassName
from divergence.run.site import ROOT, escape_path, join_site


@dataclass(slots=True, kw_only=True)
class Lane:
    """Holds what a recorder knows of the step under way, and where that is recorded. Usually there
    is one lane; steps that are made beside others have lanes of their own."""

    sink: Sink
    keep: Callable[[torch.Tensor], CapturedTensor]
    on_step: Callable[[int], None] | None = None
    on_block: Callable[[str], None] | None = None
    step: int = 0
    order: int = 0
    """Of the next record."""
    num_tokens: int = 0
    """That the forward is fed."""
    selected: bool = True
    """Is the step recorded?"""
    calls: dict[str, str] = field(default_factory=dict)
    """By path, what its last call in this forward adds to it."""
    num_calls: dict[str, dict[str, int]] = field(default_factory=dict)


Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Changed = tuple[tuple[Any, ...], dict[str, Any]]


class Hook:
    """Sees the modules of a model while a pass runs: four methods, each of which may do nothing.

    Those of a recorder stand in one list (``Recorder.hooks``) and are called in its order: recorded
    inputs are put in place, then faults, and what a module then gets and gives is recorded.
    """

    def sees(self, path: str) -> bool:
        """Is it called around this module?"""
        return True

    def before(
        self, path: str, call: str, args: Args, kwargs: Kwargs, names: Sequence[str]
    ) -> Changed | None:
        """Called before the module: returns other arguments, or None. ``call``: what tells this
        call of it from others (``#2``); ``names``: of its positional parameters."""
        return None

    def after(self, path: str, call: str, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Called after the module: returns the result, or another one."""
        return output

    def end_of_forward(self) -> None:
        """The model has given its result."""


class Anchoring(Hook):
    """Puts another run's recorded inputs in place of a module's own."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def sees(self, path: str) -> bool:
        return path != ROOT and self._recorder._notes[path].role != "inner"

    def before(
        self, path: str, call: str, args: Args, kwargs: Kwargs, names: Sequence[str]
    ) -> Changed | None:
        recorder = self._recorder
        if recorder._anchor_broken:
            return None
        put = functools.partial(recorder._recorded_input, path + call)
        with recorder._quiet():
            return map_inputs(args, kwargs, put, names)


class Planting(Hook):
    """Plants faults in what a module gets and gives."""

    def __init__(self, recorder: Recorder, plants: Sequence[Plant]) -> None:
        self._recorder, self._plants = recorder, plants

    def sees(self, path: str) -> bool:
        return any(plant.path == path for plant in self._plants)

    def _change(self, path: str, side: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
        here = [p for p in self._plants if p.path == path and p.port.startswith(side)]
        return self._recorder._planter(here)

    def before(
        self, path: str, call: str, args: Args, kwargs: Kwargs, names: Sequence[str]
    ) -> Changed | None:
        return map_inputs(args, kwargs, self._change(path, "in"), names)

    def after(self, path: str, call: str, args: Args, kwargs: Kwargs, output: Any) -> Any:
        return map_output(output, self._change(path, "out"))


class Recorder(Hook):
    """Installs the hooks of one pass over one model; ``with recorder.installed():``.

    ``wanted(path, port, tensor)`` decides what is recorded. ``logit_paths``: modules of
    whose output only the last position decides (causal models). ``fired`` holds the
    plants that met a tensor, ``anchored`` the number of inputs that were replaced."""

    _operator_recorder = OperatorRecorder

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        wanted: Callable[[str, str, torch.Tensor], bool],
        hooked: set[str],
        sink: Sink,
        pass_: PassName = "free",
        steps: str | None = None,
        positions: str | None = None,
        logit_paths: Collection[str] = (),
        plants: Sequence[Plant] = (),
        anchor: Anchor | None = None,
        on_step: Callable[[int], None] | None = None,
        on_block: Callable[[str], None] | None = None,
        keeper: Keeper | None = None,
        flat: Callable[[str, str, torch.Tensor], bool] | None = None,
        operators: set[str] | None = None,
        weights: bool = False,
        substitutes: Mapping[str, Substitute] | None = None,
        forwards: Forwards = USUAL,
    ) -> None:
        self._model, self._notes = model, notes
        self._wanted, self._flat = wanted, flat
        self._hooked = hooked | {ROOT} | {plant.path for plant in plants}
        if anchor is not None or on_block is not None:
            self._hooked |= {path for path, note in notes.items() if note.role != "inner"}
        self._pass: PassName = pass_
        self._steps, self._positions, self._logit_paths = steps, positions, logit_paths
        self._plants = plants
        self._anchor = anchor
        keep = (keeper or CopyKeeper()).keep
        self.lane = Lane(sink=sink, keep=keep, on_step=on_step, on_block=on_block)
        self.operators: OperatorRecorder | None = None
        if operators:
            self.operators = self._operator_recorder(
                model,
                operators,
                emit=self._put,
                call_of=lambda path: self.lane.calls.get(path, ""),
                active=lambda: self.lane.selected and not self._anchor_broken,
                keep=keep,
                weights=weights,
                substitute=self._substituted if substitutes else None,
            )
            self._hooked |= {path for path in notes if inside(path, operators)}
        self._forwards, self._substitutes = forwards, substitutes or {}
        self.hooks: list[Hook] = [] if anchor is None else [Anchoring(self)]
        self.hooks += [Planting(self, plants), self] if plants else [self]
        self._anchored_ports: set[str] = set()
        """Ports whose tensors, in the call that begins, are another run's."""
        self.fired: set[str] = set()
        self.anchored = self.num_emitted = 0
        self._recent = Recent()
        self._sites: dict[tuple[str, str, str], tuple[str | None, bool]] = {}
        """By path, call and port: the site, or None where nothing is recorded; and whether its rows
        are all samples' tokens."""
        self.begin(sample=0, batch=1, num_tokens=0)

    def begin(
        self, *, sample: int, batch: int, num_tokens: int, num_kept: int | None = None
    ) -> None:
        """A new group of samples: ``batch`` sequences of ``num_tokens`` prompt tokens, of which
        the last ``num_kept`` are recorded (logits of the last one alone where that is None)."""
        self._sample, self._batch, self._num_prompt = sample, batch, num_tokens
        self._num_kept = num_kept
        self.go_to(0)
        self._chunks = self._forwards.chunks(num_tokens)
        self._anchor_broken = False
        self.lane.calls, self.lane.num_calls = {}, {}
        if self.operators is not None:
            self.operators.end_of_forward()

    def cut_short(self) -> None:
        """A group of samples is left out: what is of all of them is not recorded."""

    def go_to(self, step: int) -> None:
        """The next forward is this one."""
        self.lane.step, self.lane.order = step, 0
        self.lane.num_tokens = self._num_prompt + (0 if self._forwards.cached else step)
        self.lane.selected = step_selected(self._steps, step)

    @contextlib.contextmanager
    def aside(
        self,
        sink: Sink | None,
        *,
        step: int,
        num_reports: int,
        anchored: Callable[[Anchor], Anchor] | None = None,
    ) -> Iterator[None]:
        """The next forward is ``step``, or several from there on, for which ``anchored`` changes
        the anchor; copies of what it gives go to ``sink`` alone, or nowhere. Progress is reported
        ``num_reports`` times."""
        lane, anchor, broken = self.lane, self._anchor, self._anchor_broken
        counts = self.num_emitted, self.anchored

        def repeated(tell: Callable[[Any], None], what: Any) -> None:
            for _ in range(num_reports):
                tell(what)

        on_step = lane.on_step and functools.partial(repeated, lane.on_step)
        on_block = lane.on_block and functools.partial(repeated, lane.on_block)
        beside = replace(
            lane, sink=sink or lane.sink, keep=CopyKeeper().keep, on_step=on_step, on_block=on_block
        )
        with self.on_lane(beside):
            self.go_to(step)
            beside.selected = beside.selected and sink is not None
            if anchored is not None and anchor is not None:
                self._anchor = anchored(anchor)
            try:
                yield
            finally:
                self._anchor, self._anchor_broken = anchor, broken
                self.num_emitted, self.anchored = counts

    @contextlib.contextmanager
    def on_lane(self, lane: Lane) -> Iterator[None]:
        """The forwards made meanwhile are those of that lane."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def record(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record what forward ``step`` gave, by site."""
        self.go_to(step)
        for site, tensor in tensors.items():
            self._put(site, self._kept(ROOT, tensor)[0])
        self._recent.items.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Hooks on; off again on any exit."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._recent.items.clear)
            for hooks in self._mounted():
                stack.enter_context(hooks)
            for place in hook_places("watch").values():
                stack.enter_context(placed(place)(self._model, self._codes, self._quiet))
            # after these: what an anchor puts in place is no operator, what a plant does is one
            if self.operators is not None:
                stack.enter_context(self.operators.installed())
            yield self

    def _mounted(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """The hooks of each module; an engine puts them where it has another name or form."""
        compiled = bool(compiled_regions(self._model))
        if not self._forwards.hooks:
            # The result alone, seen by no hook: the model is called through another ``forward``.
            forward, post = self._model.forward, self._post_hook(ROOT)

            @functools.wraps(forward)
            def watching(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                post(self._model, args, kwargs, output)
                return output

            yield patched(self._model, "forward", watching)
        for name, module in self._model.named_modules():
            if (path := escape_path(name)) in self._hooked and self._forwards.hooks:
                pre = self._pre_hook(path, argument_names(module))
                yield hooked(module, pre, self._post_hook(path), compiled=compiled)

    def _pre_hook(self, path: str, names: Sequence[str]) -> Callable[..., Any]:
        """The hooks of a module, one after another: each sees what those before it changed."""
        hooks = [hook for hook in self.hooks if hook.sees(path)]
        alone = hooks == [self]

        def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if alone and not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
                self._emit(path, self._numbered(path, ""), "in", args[0])  # nearly always
                return None
            # What this call adds to the module's path: nothing, ``#2`` for the second one, or the
            # word it is told apart by. Rotary tables are asked for by layer type, and in the order
            # of a set of strings, which differs from process to process.
            words = (word for word in (*args, *kwargs.values()) if type(word) is str)
            word = next((word for word in words if word.isidentifier()), "")
            call = self._numbered(path, f"#{word}" if word and path != ROOT else "")
            changed = None
            self._anchored_ports.clear()
            for hook in hooks:
                new = hook.before(path, call, args, kwargs, names)
                if new is not None:
                    changed = args, kwargs = new
            return changed

        return pre_hook

    def _post_hook(self, path: str) -> Callable[..., Any]:
        hooks = [hook for hook in self.hooks if hook.sees(path)]
        is_block = self._notes[path].role == "block"

        def post_hook(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Any:
            new, call = output, self.lane.calls.get(path, "")
            for hook in hooks:
                new = hook.after(path, call, args, kwargs, new)
            if is_block and self.lane.on_block is not None:
                self.lane.on_block(path)
            if path == ROOT:
                self._end_of_forward()
            return None if new is output else new

        return post_hook

    def before(
        self, path: str, call: str, args: Args, kwargs: Kwargs, names: Sequence[str]
    ) -> None:
        """Records what a module is given."""
        for port, tensor in input_leaves(args, kwargs, names):
            if port not in self._anchored_ports:  # what the other run has is no news of this one
                self._emit(path, call, port, tensor)

    def after(self, path: str, call: str, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Records what it gives. A kernel may write to what it was given, uncounted: what is given
        back is kept anew."""
        recent = self._recent.items
        if isinstance(output, torch.Tensor) and id(output) not in recent:  # nearly always
            self._emit(path, call, "out", output)
            return output
        leaves = output_leaves(output)
        if any(id(tensor) in recent for _, tensor in leaves):
            for _, tensor in input_leaves(args, kwargs):
                recent.pop(id(tensor), None)
        for port, tensor in leaves:
            self._emit(path, call, port, tensor)
        return output

    def _numbered(self, path: str, call: str = "") -> str:
        calls = self.lane.calls
        if path in calls:  # not its first call in this forward
            counts = self.lane.num_calls.setdefault(path, {calls[path]: 1})
            count = counts[call] = counts.get(call, 0) + 1
            if count > 1:
                call += f"#{count}"
        calls[path] = call
        return call

    def _end_of_forward(self) -> None:
        done = self.lane.step or self._chunks is None or self._chunks.end()
        if done:
            self.go_to(self.lane.step + 1)
        self.lane.calls.clear()
        for hook in self.hooks:
            hook.end_of_forward()
        if self.operators is not None:
            self.operators.end_of_forward()
        self._recent.items.clear()  # nothing of a forward is held beyond it
        self.lane.num_calls.clear()
        if done and self.lane.on_step is not None:
            self.lane.on_step(self.lane.step)

    def _recorded_input(self, path: str, port: str, tensor: torch.Tensor) -> torch.Tensor:
        """The other run's tensor for this input; the own one where none was recorded."""
        if not tensor.is_floating_point() or "mask" in port:
            return tensor
        recorded = self._recorded_rows(join_site(path, port), tensor)
        if recorded is not None and recorded.shape != tensor.shape:
            # of what enters the head only the deciding positions were kept: the others stay own
            num = (self._num_kept or 0) + 1
            last, recorded = recorded, None
            if path in self._logit_paths and last.shape == tensor[:, -num:].shape:
                recorded = tensor.clone()
                recorded[:, -num:] = last.to(device=tensor.device, dtype=tensor.dtype)
        if recorded is None:
            if port == "in" and self._notes[path.partition("#")[0]].role == "block":
                # From here on the caches would hold own values: no longer anchored.
                self._anchor_broken = True
            return tensor
        self._anchored_ports.add(port)
        self.anchored += 1
        # A copy: the model may write to its inputs in place, and the recording must not change.
        return recorded.to(device=tensor.device, dtype=tensor.dtype, copy=True)

    def _codes(
        self, path: str, port: str, codes: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor | None:
        """Record a quantiser's codes; the other run's, where it is anchored to one."""
        call = (
            self.lane.calls.get(path, "") if path in self._hooked else self._numbered(path + port)
        )
        if self._pass != "escalated":  # which repeats values: nothing has codes of that dtype
            self._emit(path, call, port, values)
        free = self._anchor is None or self._anchor_broken
        return None if free else self._recorded_rows(join_site(path + call, port), codes)

    def _recorded_rows(self, site: str, own: torch.Tensor) -> torch.Tensor | None:
        """Return what the other run has there of the rows of this forward: of a chunk its rows of
        the prefill, without a cache the rows of all steps so far. None where one has none, or they
        do not fit."""
        anchor, sample, step = self._anchor, self._sample, self.lane.step
        assert anchor is not None  # asked where there is one
        recorded = anchor(sample, step, site, own)
        if recorded is None:
            return None
        if step == 0 and self._chunks is not None:
            return self._chunks.rows(recorded, own)
        if step == 0 or self._forwards.cached or recorded.shape == own.shape:
            return recorded  # without a cache: it holds no more than the step's own
        return steps_joined(anchor, sample, range(step + 1), site, own)

    def _substituted(self, site: str) -> torch.Tensor | None:
        """Return what is put in the place of an operator's result in this forward, or None."""
        path, _, port = site.rpartition(":")
        substitute = self._substitutes.get(path)
        step = self.lane.step
        return None if substitute is None else substitute.find(self._pass, self._sample, step, port)

    def _planter(self, plants: Sequence[Plant]) -> Callable[[str, torch.Tensor], torch.Tensor]:
        def change(port: str, tensor: torch.Tensor) -> torch.Tensor:
            forward = self._sample * FORWARDS + self.lane.step
            for plant in plants:
                if plant.port == port and plant.meets(forward):
                    self.fired.add(plant.site)
                    tensor = plant.apply(tensor, forward)
            return tensor

        return change

    def _emit(self, path: str, call: str, port: str, tensor: torch.Tensor) -> None:
        """Hand one tensor to the sink if it is wanted. Runs for every port: kept lean."""
        lane = self.lane
        if not lane.selected or self._anchor_broken:
            return
        try:
            site, flat = self._sites[path, call, port]
        except KeyError:  # the tensors of one place are of one kind, so the first decides for all
            site = join_site(path + call, port) if self._wanted(path, port, tensor) else None
            flat = self._flat is not None and self._flat(path, port, tensor)
            self._sites[path, call, port] = site, flat
        if site is None:
            return
        if flat:
            tensor = by_token(tensor, self._batch)
        if self._chunks is not None and not lane.step:
            deciding = path in self._logit_paths
            joined = self._chunks.joined(site, tensor, deciding=deciding)
            if joined is None:
                return
            tensor = joined
        if lane.step and self._forwards.cached and self.operators is None:
            item, positions = self._recent.kept(tensor, lane.keep), None
        else:
            with self._quiet():
                item, positions = self._kept(path, tensor)
        self._put(site, item, None, positions)

    def _kept(
        self, path: str, tensor: torch.Tensor
    ) -> tuple[CapturedTensor, tuple[int, ...] | None]:
        """The kept item, made now or when this very tensor last came by; and its token positions,
        where not all."""
        if self.lane.step == 0 or not self._forwards.cached:
            own_alone = self.lane.step > 0  # without a cache: its own token of the whole sequence
            tensor, positions = narrowed(
                tensor,
                tokens=self.lane.num_tokens,
                batch=self._batch,
                positions=self._positions,
                num_kept=1 if own_alone else self._num_kept or 0,
                deciding=path in self._logit_paths,
            )
            if positions is not None:
                return self.lane.keep(tensor), positions
        return self._recent.kept(tensor, self.lane.keep), None

    def _put(
        self,
        site: str,
        item: CapturedTensor,
        call: Call | None = None,
        positions: tuple[int, ...] | None = None,
    ) -> None:
        lane = self.lane
        lane.sink.put(
            item,
            pass_=self._pass,
            sample=self._sample,
            step=lane.step,
            site=site,
            order=lane.order,
            positions=positions,
            call=call,
        )
        lane.order += 1
        self.num_emitted += 1

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Operators that this recorder runs itself are not the model's."""
        return contextlib.nullcontext() if self.operators is None else self.operators.paused()
