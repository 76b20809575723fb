"""vLLM as an engine: its batches, taken apart into prompts and steps."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
import torch
import transformers

from divergence.config import config_names, decode, find_config, load_toml
from divergence.domains.vllm.worker import EXTENSION, FORMAT, register_loader
from divergence.errors import DivergenceError, ModelError, PlantError, UsageError, first_line
from divergence.recording.dispatch import argument_names
from divergence.recording.engines.engine import (
    EngineOptions,
    Feature,
    GroupResult,
    check_ids,
    control,
    ends_of,
    failures,
    pad_id,
)
from divergence.recording.engines.identity import identify
from divergence.recording.engines.load import LoadedModel, Loading, empty_model
from divergence.recording.engines.sessions import TorchSession
from divergence.recording.forwards import patched
from divergence.recording.keeper import CopyKeeper
from divergence.recording.recorder import Lane, Recorder
from divergence.recording.structure import describe_modules, output_paths, routing_modules
from divergence.run.captured import CapturedTensor
from divergence.run.command import command_line
from divergence.run.manifest import (
    UNKNOWN,
    EngineNote,
    EngineValue,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
    digest_many,
)
from divergence.run.site import ROOT, did_you_mean, escape_path

# Where the modules of transformers are in vLLM's: name maps, by family (docs/engines.md). ``*``
# stands for one part of a path. A matrix is split by vLLM's word on it, or by the sizes that
# transformers' own model has.

_FOLDER = "maps/"
_OWN_ROWS = "output_partition_sizes"
"""Of a fused module: the rows of each part that this rank has."""


class ModuleMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of configs/maps/."""

    models: tuple[str, ...]
    """``model_type`` of the configurations that it is for."""
    same: tuple[str, ...]
    """Modules with one path in both."""
    renamed: dict[str, str] = {}
    """vLLM's module → transformers'."""
    split: dict[str, tuple[str, ...]] = {}
    """vLLM's module → transformers' modules that it computes in one."""
    weights: dict[str, str] = {}
    """vLLM's parameter → transformers', where the modules are not one another's."""
    tables: dict[str, str] = {}
    """vLLM's rotary module in one block → transformers', whose output is read from its table."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """Says where one module of transformers is found."""

    theirs: str
    """Path of vLLM's module, as torch writes it."""
    rows: slice | None = None
    """The part of its output (last axis) and of its weight (first axis), where it is fused."""
    is_table: bool = False
    """A rotary table, of which the rows are recorded that a forward reads."""


def map_for(model_type: str, given: str | None = None) -> ModuleMap | None:
    """The map of a family, or the one that was named (by name or path); None where there is none.
    Raises ConfigError for a file that is no map, or is not there."""
    if given is not None:
        return _read(given)
    maps = (_read(name) for name in config_names(_FOLDER))
    return next((name_map for name_map in maps if model_type in name_map.models), None)


def places_of(
    map_: ModuleMap | None, *, structure: torch.nn.Module, module: torch.nn.Module, model_type: str
) -> dict[str, ModulePlace]:
    """Return the places by transformers' (escaped) path. ``structure``: transformers' model;
    ``module``: vLLM's. Raises UsageError for a pattern of the map that matches nothing, with near
    names, and for a model of which not even the blocks are found."""
    ours = dict(structure.named_modules(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))
    places = {ROOT: ModulePlace("")}
    if map_ is None:
        notes = describe_modules(structure)
        blocks = [path for path, note in notes.items() if note.role == "block"]
        if not blocks or any(path not in modules for path in blocks):
            models = sorted({name for each in config_names(_FOLDER) for name in _read(each).models})
            raise UsageError(
                f"--engine vllm: the modules of a {model_type} model have other names in vLLM, and "
                "no name map is known",
                hint=f"known: {', '.join(models)}; or --engine-option name_map=FILE.toml "
                "(docs/engines.md)",
            )
        return places | {path: ModulePlace(path) for path in blocks}
    named = {shared: shared for shared in map_.same} | map_.renamed
    for pattern, other in (named | map_.tables).items():
        for path, (name,) in _pairs(pattern, (other,), modules, ours):
            places[escape_path(name)] = ModulePlace(path, is_table=pattern in map_.tables)
    for pattern, parts in map_.split.items():
        for path, names in _pairs(pattern, parts, modules, ours):
            first, own = 0, getattr(modules[path], _OWN_ROWS, None)
            for number, name in enumerate(names):
                weight = getattr(ours[name], "weight", None)
                num_rows = 0 if weight is None else int(weight.shape[0])
                if own is not None:
                    num_rows = int(own[number])
                places[escape_path(name)] = ModulePlace(path, slice(first, first + num_rows))
                first += num_rows
    return places


def parameters_of(
    map_: ModuleMap | None, *, structure: torch.nn.Module, module: torch.nn.Module
) -> dict[str, str]:
    """transformers' parameter → vLLM's, of those that the map names one by one."""
    ours = dict(structure.named_parameters(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    weights = {} if map_ is None else map_.weights
    return {
        name: path
        for pattern, other in weights.items()
        for path, (name,) in _pairs(pattern, (other,), parameters, ours)
    }


def _read(name: str) -> ModuleMap:
    path = find_config(name, prefix=_FOLDER, what="name map")
    return decode(load_toml(path), ModuleMap, where=str(path))


def _pairs(
    pattern: str,
    others: Iterable[str],
    parameters: Mapping[str, object],
    ours: Mapping[str, object],
) -> Iterator[tuple[str, list[str]]]:
    """(path in vLLM, paths in transformers) of each module that the patterns name, at least one."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
    hits = [(path, match.groups()) for path in parameters if (match := expression.fullmatch(path))]
    if not hits:
        _nothing(pattern, "vLLM", parameters)
    for path, stars in hits:
        names = [_filled(other, stars) for other in others]
        for name in names:
            if name not in ours:
                _nothing(name, "transformers", ours)
        yield path, names


def _filled(pattern: str, stars: Iterable[str]) -> str:
    values = iter(stars)
    return re.sub(r"\*", lambda _: next(values, "*"), pattern)


def _nothing(pattern: str, library: str, paths: Iterable[str]) -> None:
    near = did_you_mean(pattern.replace("*", "0"), [path for path in paths if path])
    raise UsageError(
        f"the name map's {pattern!r} matches no module of the model in {library}",
        hint=near or "is it a map for another family?",
    )


# Digests of the weights as vLLM has read them, under transformers' names.


def identity_of(
    twin: LoadedModel,
    module: torch.nn.Module,
    places: Mapping[str, ModulePlace],
    more: Mapping[str, str],
    *,
    gather: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
) -> ModelIdentity:
    """Say who the model is, by the weights of ``module``, which vLLM has not packed yet.

    ``twin``: transformers' model of the same checkpoint, without weights; ``more``: parameters
    whose modules have no place; ``gather``: every rank's part of a weight. A weight that is found
    nowhere, or in another form, is unknown.
    What code ran is told by the engine's version.
    """
    filled = copy.deepcopy(twin.module)
    names = set(twin.module.state_dict())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shared: dict[int, torch.nn.Parameter] = {}
    for path, part in filled.named_modules():
        place = places.get(escape_path(path))
        for name, empty in list(part._parameters.items()):
            if empty is None:
                continue
            if id(empty) not in shared:
                key = more.get(f"{path}.{name}")
                if key is None and place is not None and path:
                    key = f"{place.theirs}.{name}"
                rows, read = None if place is None else place.rows, None
                if key in parameters:
                    read = _weights_read(parameters[key], rows, empty, gather)
                if read is None:
                    part._parameters[name] = None
                    continue
                shared[id(empty)] = torch.nn.Parameter(read, requires_grad=False)
            part._parameters[name] = shared[id(empty)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = None
    identity = identify(replace(twin, module=filled, device=torch.device("cpu")))
    unknown = sorted(names - set(identity.digests))
    digests = identity.digests | dict.fromkeys(unknown, UNKNOWN)
    count = sum(weight.numel() for weight in twin.module.parameters())
    sizes: dict[str, Any] = {"num_parameters": count}
    if unknown:
        sizes |= {"digests": digests, "digest": digest_many(digests), "rounded_digests": {}}
    return msgspec.structs.replace(identity, code={}, attn_implementation=None, **sizes)


def _weights_read(
    weight: torch.nn.Parameter,
    rows: slice | None,
    empty: torch.nn.Parameter,
    gather: Callable[[torch.Tensor], list[torch.Tensor]] | None,
) -> torch.Tensor | None:
    """The part of vLLM's weight that is transformers' ``empty``, put together of all ranks' and
    without rows that vLLM added (a vocabulary made longer); None where it has another form."""
    part = weight.detach() if rows is None else weight.detach()[rows]
    if part.ndim != empty.ndim or part.dtype != empty.dtype:
        return None
    if gather is not None:
        sizes = zip(part.shape, empty.shape, strict=True)
        divided = next((axis for axis, (here, whole) in enumerate(sizes) if here < whole), None)
        part = part if divided is None else torch.cat(gather(part), divided)
    part = part[: empty.shape[0]] if part.ndim else part
    return part if part.shape == empty.shape else None


# Whose rows they are: what vLLM's scheduler put into one forward, as samples and steps.
#
# vLLM runs the tokens of all scheduled requests as rows (N, ...): request after request, without
# padding, in an order of its own. transformers runs a batch as (B, T, ...), with pads. A
# ``StepRows`` is the rows of one forward that belong to one step, laid out as transformers does,
# with zeros where nothing was computed. A forward has one part for each step in it: usually one;
# several where some prompts wait and run their prefill beside other prompts' decode steps (then
# ``Gathered``).

Shown = Callable[[torch.Tensor], torch.Tensor | None]
"""A hook on values in transformers' form: what it puts in their place; None for nothing."""
Through = Callable[[Shown, torch.Tensor], torch.Tensor | None]
"""Shows rows (N, ...) to such a hook; gives the rows with what it put there; None for nothing."""


def alone(shown: Shown, rows: torch.Tensor) -> torch.Tensor | None:
    """Through of one prompt: (N, ...) is (1, N, ...)."""
    new = shown(rows.unsqueeze(0))
    return None if new is None else new[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one forward that belong to one step."""

    step: int
    members: tuple[int, ...]
    """Places in the batch of the prompts that are in it."""
    shape: tuple[int, int]
    """(B, T) of the whole batch at this step."""
    rows: torch.Tensor
    """(n,) which rows of the forward they are."""
    places: torch.Tensor
    """(n,) where in (B · T) each of them belongs."""
    in_order: bool
    """These are all rows of the forward and all of the batch, one after the other."""

    def spread(self, tensor: torch.Tensor, *, fill: int = 0) -> torch.Tensor:
        """(N, ...) → (B, T, ...)"""
        batch = tensor
        if not self.in_order:
            batch = tensor.new_full((self.shape[0] * self.shape[1], *tensor.shape[1:]), fill)
            batch[self.places] = tensor[self.rows]
        return batch.reshape(*self.shape, *tensor.shape[1:])

    def put(self, batch: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (N, ...) with the values of ``batch`` (B, T, ...) in this part's rows."""
        values = batch.flatten(0, 1)
        if self.in_order:
            return values
        tensor = tensor.clone()
        tensor[self.rows] = values[self.places].to(tensor.dtype)
        return tensor


@dataclass(frozen=True, slots=True)
class EngineForward:
    """One forward of vLLM."""

    parts: tuple[StepRows, ...]
    """By step."""
    last: tuple[StepRows, ...]
    """The same of its requests' last rows, of which vLLM computes logits."""
    requests: tuple[int, ...]
    """The place in the batch of each request, in the order of rows."""
    num_rows: int


def forward_of(runner: Any, samples: Sequence[SampleTokens]) -> EngineForward:
    """The forward that vLLM's worker is about to run. A request is named by its place in the batch.
    Raises ModelError for rows that are no whole prompt and no decode step."""
    batch, ends = runner.input_batch, runner.query_start_loc.np
    steps: dict[int, list[tuple[int, int, int]]] = {}  # step → (place, number, first row)
    requests = tuple(int(name.partition("-")[0]) for name in batch.req_ids)
    for number, place in enumerate(requests):
        count = int(ends[number + 1] - ends[number])
        done, length = int(batch.num_computed_tokens_cpu[number]), len(samples[place].prompt_ids)
        expected = 1 if done else length
        if count != expected or 0 < done < length:
            raise ModelError(
                f"vLLM runs {count} tokens of prompt {place} behind {done}, where {expected} were "
                "expected: its scheduler has divided the prompt, or begun it again",
                hint="a larger --engine-option kv_cache_gib, or fewer prompts in a batch",
            )
        step = done - length + 1 if done else 0
        steps.setdefault(step, []).append((place, number, int(ends[number])))
    size, padded = len(samples), samples[0].num_padded
    parts, last = [], []
    for step, prompts in sorted(steps.items()):
        rows: list[int] = []
        places: list[int] = []
        for place, _, start in prompts:
            count = 1 if step else len(samples[place].prompt_ids)
            begin = place if step else place * padded + samples[place].num_left_pad
            rows += range(start, start + count)
            places += range(begin, begin + count)
        members = tuple(place for place, _, _ in prompts)
        shape = size, 1 if step else padded
        parts.append(_part(step, members, shape, rows, places, num_rows=int(ends[len(requests)])))
        numbers = [number for _, number, _ in prompts]
        last.append(_part(step, members, (size, 1), numbers, list(members), num_rows=len(requests)))
    return EngineForward(tuple(parts), tuple(last), requests, int(ends[len(requests)]))


def _part(
    step: int,
    members: tuple[int, ...],
    shape: tuple[int, int],
    rows: list[int],
    places: list[int],
    *,
    num_rows: int,
) -> StepRows:
    whole = list(range(shape[0] * shape[1]))
    return StepRows(
        step=step,
        members=members,
        shape=shape,
        rows=torch.tensor(rows),
        places=torch.tensor(places),
        in_order=rows == places == whole and num_rows == len(whole),
    )


class Gathered:
    """A sink for one step that several forwards run: each gives the rows of its own prompts."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        """The prompts that are there."""
        self.part: tuple[int, ...] = ()
        """Those of the present forward."""
        self.tensors: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {}
        """By site: tensor (B, ...), token positions where not all."""

    def put(
        self,
        item: CapturedTensor,
        *,
        site: str,
        positions: tuple[int, ...] | None = None,
        **_: object,
    ) -> None:
        tensor = item.tensor
        assert tensor is not None  # a copy of every byte was kept
        if site not in self.tensors:
            self.tensors[site] = tensor.clone(), positions
            return
        rows = list(self.part)
        self.tensors[site][0][rows] = tensor[rows]


# vLLM's modules as transformers' would look to a hook: docs/engines.md has what differs. A decoder
# layer takes and gives the residual stream as a sum that is not yet made, (hidden, residual), which
# its norms make. What a hook puts in its place goes in as hidden, with a residual of zeros where
# there was one, so that the same kernels run; the sum is exact.

Before = Callable[..., Any]
After = Callable[..., Any]
_RESIDUAL = "residual"


@contextlib.contextmanager
def viewed(
    module: torch.nn.Module,
    before: Before,
    after: After,
    *,
    is_block: bool = False,
    rows: slice | None = None,
    through: Through = alone,
) -> Iterator[None]:
    """The hooks of a recorder on a module, which show them transformers' form of it. ``is_block``:
    what it gives is (hidden, residual), a stream. ``rows``: the part of the output that is meant.
    ``through``: shows the tokens of a forward as batches."""
    names = _names(module)
    with contextlib.ExitStack() as stack:
        if rows is None:
            view = _View(before, after, names, through, is_block=is_block)
            stack.enter_context(module.register_forward_pre_hook(view.pre, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(view.post, with_kwargs=True))
        else:
            part = _views_part(before, after, names, rows, through)
            stack.enter_context(module.register_forward_hook(part, with_kwargs=True))
        yield


def table_viewed(
    attention: torch.nn.Module, rotary: Any, after: After, *, through: Through = alone
) -> contextlib.AbstractContextManager[Any]:
    """The rows of a rotary table that a forward reads, seen as the output of transformers' module:
    (cos, sin), each (B, T, D) with both halves alike. Told once, by the ``attention`` of one block.
    A table of another form is not shown."""
    names = argument_names(attention)

    def pre(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        table, positions = getattr(rotary, "cos_sin_cache", None), given.get("positions")
        if table is None or positions is None or positions.ndim != 1 or not rotary.is_neox_style:
            return
        _, hidden = _hidden(given)
        halves = table[positions].to(hidden.dtype).unflatten(-1, (2, -1))

        def shown(seen: torch.Tensor) -> None:
            pair = tuple(half.repeat(1, 1, 2) for half in seen.unbind(2))
            if after(rotary, (), {}, pair) is not None:
                raise PlantError(
                    "vLLM reads its rotary table inside its kernels",
                    hint="plant at the output of a module, or change the table by prepare",
                )

        through(shown, halves)

    return attention.register_forward_pre_hook(pre, with_kwargs=True)


class _View:
    """Both hooks of one module."""

    def __init__(
        self, before: Before, after: After, names: list[str], through: Through, *, is_block: bool
    ) -> None:
        self._before, self._after, self._names, self._is_block = before, after, names, is_block
        self._through = through
        self._stream: torch.Tensor | None = None
        """What a norm was given, where a hook put something else in its place."""

    def pre(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        name, hidden = _hidden(given)
        residual = given.get(_RESIDUAL)
        seen = hidden if residual is None else hidden + residual
        self._stream = None
        new = self._through(_entering(self._before, module), seen)
        if new is None:
            return None
        given[name] = new.reshape(hidden.shape)
        if residual is not None:
            given[_RESIDUAL] = torch.zeros_like(residual)
            self._stream = seen
        # by position as they came: a forward may take more than it names
        count = len(args)
        return (
            tuple(given.get(n, a) for n, a in zip(self._names, args, strict=False))
            + args[len(self._names) :],
            {key: given[key] for key in given if key not in self._names[:count]},
        )

    def post(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        parts = output if isinstance(output, tuple) else (output,)
        first, residual = parts[0], parts[1] if len(parts) > 1 else None
        stream = residual if self._is_block and isinstance(residual, torch.Tensor) else None
        seen = first if stream is None else first + stream
        new = self._through(_leaving(self._after, module), seen)
        changed = None if new is None else new.reshape(first.shape)
        if stream is not None:
            return None if changed is None else (changed, torch.zeros_like(stream), *parts[2:])
        if self._stream is not None and isinstance(residual, torch.Tensor):
            # what was put in place was the norm's input alone: the stream goes on as it was
            return (first if changed is None else changed, self._stream, *parts[2:])
        if changed is None:
            return None
        return (changed, *parts[1:]) if isinstance(output, tuple) else changed


def _views_part(
    before: Before, after: After, names: list[str], rows: slice, through: Through
) -> Callable[..., Any]:
    """One hook for a part of a fused module: input and output are told when both are there."""

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        _, hidden = _hidden(dict(zip(names, args, strict=False)) | kwargs)
        if through(_entering(before, module), hidden) is not None:
            raise PlantError(
                "vLLM computes this module in one with others, which take the same input",
                hint="plant at its output, or at the input of the module around it",
            )
        whole = output[0] if isinstance(output, tuple) else output
        new = through(_leaving(after, module), whole[..., rows])
        if new is None:
            return None
        whole = whole.clone()
        whole[..., rows] = new
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return hook


@contextlib.contextmanager
def head_hooked(
    model: Any,
    *,
    head: tuple[Before, After] | None,
    after_root: After,
    choose: Callable[[torch.Tensor], torch.Tensor],
    through: Through = alone,
) -> Iterator[None]:
    """Around ``compute_logits``, which vLLM calls after the forward: the hooks of the output matrix
    (its module is never called), then the root's, then the choice of a token.

    The matrix is asked where vLLM has its product in a method of its own: what scales or caps the
    logits comes after it. ``choose``: logits (requests, V) → what vLLM's sampler gets.
    """
    processor = getattr(model, "logits_processor", None)
    owner, name = (
        (processor, _PRODUCT) if hasattr(processor, _PRODUCT) else (model, "compute_logits")
    )
    module = getattr(model, "lm_head", model)

    def product(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert head is not None
        new = through(_entering(head[0], module), hidden_states)
        logits = own_product(hidden_states if new is None else new, *args, **kwargs)
        changed = through(_leaving(head[1], module), logits)
        return logits if changed is None else changed

    own_product = getattr(owner, name)
    with contextlib.nullcontext() if head is None else patched(owner, name, product):
        own_logits = model.compute_logits

        def whole(*args: Any, **kwargs: Any) -> Any:
            logits = own_logits(*args, **kwargs)
            changed = through(_leaving(after_root, model), logits)
            return choose(logits if changed is None else changed)

        with patched(model, "compute_logits", whole):
            yield


_PRODUCT = "_get_logits"


def _names(module: Any) -> list[str]:
    """Return the names of the positional parameters. vLLM's kernels stand behind a forward that
    hides them, beside one in torch's own operators."""
    names = argument_names(module)
    native = getattr(module, "forward_native", None)
    if names or native is None:
        return names
    return list(inspect.signature(native).parameters)


def _hidden(given: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Return what the module computes on, and its name: positions stand before it in some."""
    tensors = [(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)]
    for name, value in tensors:
        if name == "hidden_states":
            return name, value
    return next((item for item in tensors if item[0] not in ("positions", _RESIDUAL)), tensors[0])


def _entering(before: Before, module: torch.nn.Module) -> Shown:
    """A pre-hook, as what it puts in place of what it is shown."""

    def shown(seen: torch.Tensor) -> torch.Tensor | None:
        changed = before(module, (seen,), {})
        return None if changed is None or changed[0][0] is seen else changed[0][0]

    return shown


def _leaving(after: After, module: torch.nn.Module) -> Shown:
    """A hook, likewise."""

    def shown(seen: torch.Tensor) -> torch.Tensor | None:
        new = after(module, (), {}, seen)
        return None if new is seen else new

    return shown


# Hooks on vLLM's modules, as transformers' of the same places, step by step and prompt by prompt.
#
# A forward that runs one step of the whole batch is recorded as it goes. Of one that runs several
# steps each has a lane: the state that this recorder has at that step. What a lane records is held
# until all prompts have made the step, and is then recorded as if one forward had made it.

Choose = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(places of the prompts, their logits (n, V)) → what vLLM's sampler gets."""

_OWN_CODE = "vllm.model_executor.models.transformers."
"""Where vLLM runs transformers' own code of a model, modules see all rows as a batch (1, N, H)."""


class VllmRecorder(Recorder):
    """``runner``: of vLLM's worker, which knows what each forward holds."""

    num_mixed = 0
    """Forwards that held several steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        runner: Any,
        places: Mapping[str, ModulePlace],
        heads: set[str],
        **how: Any,
    ) -> None:
        super().__init__(model, notes, **how)
        self._runner, self._places, self._heads = runner, places, heads
        self._routers = {path for path, part in routing_modules(notes).items() if part == "router"}
        self._has_batch = any(base.__module__.startswith(_OWN_CODE) for base in type(model).__mro__)
        self._forward = EngineForward((), (), (), 0)
        self._gathered: dict[int, Gathered] = {}
        self._lanes: dict[int, Lane] = {}
        self._samples: list[SampleTokens] = []
        self._pad = 0
        self._choose: Choose = lambda places, logits: logits

    def expect(self, samples: list[SampleTokens], choose: Choose, *, pad: int) -> None:
        """The forwards that follow are of these prompts. ``pad``: the token id of padding."""
        self._samples, self._choose, self._pad = samples, choose, pad
        self._gathered.clear()

    def _mounted(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        for path, place in self._places.items():
            if path == ROOT or path in self._heads or path not in self._hooked:
                continue
            module = self._model.get_submodule(place.theirs)
            if place.is_table:
                attention = self._model.get_submodule(place.theirs.rpartition(".")[0])
                yield table_viewed(attention, module, self._post_hook(path), through=self._through)
                continue
            yield viewed(
                module,
                self._pre_hook(path, ()),
                self._post_hook(path),
                is_block=self._notes[path].role == "block",
                rows=place.rows,
                through=self._routed if path in self._routers else self._through,
            )
        yield self._root_hooked()

    def _through(self, shown: Shown, rows: torch.Tensor) -> torch.Tensor | None:
        """Shows each part of the forward as a batch (B, T, ...)."""
        return self._in_parts(self._forward.parts, shown, rows[0] if self._has_batch else rows)

    def _routed(self, shown: Shown, rows: torch.Tensor) -> torch.Tensor | None:
        """The same to a router, which has no axis of prompts: (B · T, n)."""

        def flat(batch: torch.Tensor) -> torch.Tensor | None:
            new = shown(batch.flatten(0, 1))
            return None if new is None else new.unflatten(0, batch.shape[:2])

        return self._through(flat, rows)

    def _in_parts(
        self, parts: Sequence[StepRows], shown: Shown, rows: torch.Tensor, *, fill: int = 0
    ) -> torch.Tensor | None:
        changed, now = False, rows
        for part in parts:
            with self.on_lane(self._lanes.get(part.step, self.lane)):
                new = shown(part.spread(rows, fill=fill))
            if new is not None:
                changed, now = True, part.put(new, now)
        return now if changed else None

    def _begin_forward(self, num_rows: int) -> None:
        """Note who is in the forward that begins, and make a lane for each step that it does not
        make for the whole batch."""
        forward = self._forward = forward_of(self._runner, self._samples)
        if num_rows != forward.num_rows:
            raise ModelError(
                f"vLLM runs {num_rows} rows where its scheduler has {forward.num_rows} tokens: it "
                "pads them",
                hint="that belongs to CUDA graphs, which this engine leaves off",
            )
        self.num_mixed += len(forward.parts) > 1
        self._lanes.clear()
        for part in forward.parts:
            self.go_to(part.step)
            if len(part.members) == self._batch:
                continue
            gathered = self._gathered.setdefault(part.step, Gathered())
            gathered.part = part.members
            gathered.members.update(part.members)
            self._lanes[part.step] = Lane(
                sink=gathered,
                keep=CopyKeeper().keep,
                step=part.step,
                num_tokens=self.lane.num_tokens,
                selected=self.lane.selected,
            )

    def _end_parts(self, places: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Record, after a forward, the steps that all prompts have made now."""
        self._lanes.clear()
        for step, gathered in sorted(self._gathered.items()):
            if len(gathered.members) < self._batch:
                continue
            self.go_to(step)
            for site, (tensor, positions) in gathered.tensors.items():
                self._put(site, self.lane.keep(tensor), None, positions)
            del self._gathered[step]
            self._end_of_forward()
        return self._choose(places, logits)

    @contextlib.contextmanager
    def _root_hooked(self) -> Iterator[None]:
        """The forward begins at the root and ends with the logits."""
        before = self._pre_hook(ROOT, ())

        def first(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._begin_forward(len(ids))
            self._in_parts(
                self._forward.parts, lambda seen: before(module, (seen,), {}), ids, fill=self._pad
            )

        head = next((path for path in self._heads & self._hooked if path in self._places), None)
        pair = None if head is None else (self._pre_hook(head, ()), self._post_hook(head))
        with (
            self._model.register_forward_pre_hook(first, with_kwargs=True),
            head_hooked(
                self._model,
                head=pair,
                after_root=self._post_hook(ROOT),
                through=lambda shown, rows: self._in_parts(self._forward.last, shown, rows),
                choose=lambda logits: self._end_parts(self._forward.requests, logits),
            ),
        ):
            yield


# A model that vLLM runs in this process, seen as transformers' model.


class VllmSession(TorchSession):
    """``loaded.module`` is vLLM's model, ``loaded.structure`` transformers' of the same
    checkpoint, without weights."""

    name: ClassVar[str] = "vllm"
    makes_forwards: ClassVar[bool] = False
    lacks: Mapping[Feature, str] = {
        "operators": "its kernels are its own",
        "escalate": "its kernels are made for the model's own dtype",
        "pads_right": "its prompts are not padded",
        "whole": "it takes no prompt without making its cache",
        "media": "it has a processor of its own",
    }

    def __init__(
        self,
        loaded: LoadedModel,
        options: Mapping[str, EngineValue],
        *,
        llm: Any,
        runner: Any,
        places: Mapping[str, ModulePlace],
        identity: ModelIdentity,
        facts: Mapping[str, str],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(loaded, options)
        self._llm, self._runner, self._module = llm, runner, loaded.module
        self._places, self._identity, self._facts = places, identity, dict(facts)
        self._on_close = on_close
        self._num_mixed = 0

    def notes(self) -> dict[str, ModuleNote]:
        notes = describe_modules(self.loaded.structure)
        # experts are seen nowhere, and tell which module is their router
        paths = self._places.keys() | routing_modules(notes).keys()
        return {path: note for path, note in notes.items() if path in paths}

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        return self._identity

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        check_ids(self.loaded, samples)
        limit = self._llm.llm_engine.vllm_config.model_config.max_model_len
        for number, sample in enumerate(samples):
            count = min(len(sample.generated_ids) or max_new_tokens, max_new_tokens)
            length = len(sample.prompt_ids) + max(count, 1)
            if length > limit:
                raise UsageError(
                    f"prompt {number} has {len(sample.prompt_ids)} tokens, {count} are to follow, "
                    f"and vLLM was made for {limit}",
                    hint=f"--engine-option max_model_len={length}, as far as the model has "
                    "positions; or --max-new-tokens",
                )

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        if self.loaded.module is not self._module:
            raise UsageError(
                "--engine vllm runs the model that it made: prepare may change its modules, and "
                "cannot return another"
            )
        heads = output_paths(self.loaded.structure) - {ROOT}
        return VllmRecorder(
            self._module, notes, runner=self._runner, places=self._places, heads=heads, **how
        )

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        **_: Any,
    ) -> GroupResult:
        from vllm import SamplingParams

        assert isinstance(recorder, VllmRecorder)  # made above
        count = max_new_tokens if forced is None else len(forced[0])
        pad, ranks = pad_id(self.loaded), self.loaded.ranks
        tokens = PromptTokens(
            forced if count else None,
            num=len(samples),
            count=count,
            pad=pad,
            ends=ends_of(self.loaded, forced),
            agree=None if ranks is None else ranks.agree,
        )
        recorder.expect(samples, tokens.choose, pad=pad)
        params = SamplingParams(
            temperature=0.0, max_tokens=max(count, 1), ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        with failures(self.loaded, samples, count), torch.no_grad():
            for place, sample in enumerate(samples):
                engine.add_request(str(place), {"prompt_token_ids": sample.prompt_ids}, params)
            while engine.has_unfinished_requests() and not tokens.done:
                engine.step()
            if engine.has_unfinished_requests():
                engine.abort_request([str(place) for place in range(len(samples))])
        self._num_mixed += recorder.num_mixed
        return tokens.result()

    def note(self) -> EngineNote:
        return EngineNote(
            name=self.name,
            version=self.version(),
            options=self.options,
            facts=self._facts | {"forwards of several steps": str(self._num_mixed)},
        )

    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def close(self) -> None:
        self._on_close()


class PromptTokens:
    """Holds the tokens of ``num`` prompts, ``count`` each. ``forced``: what to feed; ``ends``:
    after which a prompt has ended; ``agree``: makes several ranks feed the same."""

    def __init__(
        self,
        forced: list[list[int]] | None,
        *,
        num: int,
        count: int,
        pad: int,
        ends: set[int],
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        rows = [None] * num if forced is None else [[row] for row in forced]
        self._controls = [control(row, count, ends, None) for row in rows]
        self._fed: list[list[int]] = [[] for _ in rows]
        self._count, self._pad, self._ends, self._agree = count, pad, ends, agree

    def choose(self, places: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, V) of the prompts at ``places`` → what lets vLLM's sampler no other choice."""
        only = torch.full_like(logits, float("-inf"), dtype=torch.float32)
        for number, place in enumerate(places):
            token = self._pad
            if self._num_steps(place) is None:
                scores = logits[number : number + 1].float()
                token = int(self._controls[place](None, scores).argmax())
            if self._agree is not None:
                token = self._agree([token])[0]
            self._fed[place].append(token)
            only[number, token] = 0.0
        return only

    def _num_steps(self, place: int) -> int | None:
        """Up to the prompt's end; None where it has not ended."""
        fed = self._fed[place]
        return next((step + 1 for step, token in enumerate(fed) if token in self._ends), None)

    @property
    def done(self) -> bool:
        """Has each prompt ended, and made the steps of those that ended last?"""
        counts = [self._num_steps(place) for place in range(len(self._fed))]
        lengths = [num for num in counts if num is not None]
        return len(lengths) == len(counts) and min(map(len, self._fed)) >= max(lengths)

    def result(self) -> GroupResult:
        """Raises ModelError where vLLM made fewer forwards than were asked for."""
        ended = [self._num_steps(place) or self._count for place in range(len(self._fed))]
        count = max(ended) if self.done else self._count
        made = min(map(len, self._fed))
        if made < count:
            raise ModelError(
                f"vLLM made {made} forwards where {count} tokens were to be fed",
                hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
            )
        return GroupResult(
            [fed[:count] for fed in self._fed],
            [[choice[0] for choice in control.chosen[:count]] for control in self._controls],
            [[] for _ in self._fed],
            {token for control in self._controls for token in control.seen},
        )


# vLLM as an engine: in this process, eager, greedy, whole prompts; a batch through its scheduler.
#
# What would make a forward depend on others of its batch, or on what ran before, is off: prefix
# caching, chunked prefill, speculative decoding, CUDA graphs, asynchronous scheduling. The
# structure of transformers' model of the same checkpoint, without weights, gives names and roles;
# a name map says where its modules are in vLLM's (``names``), views show them in its form
# (``views``), and the rows of a forward are divided into its prompts (``batches``).
#
# vLLM reads many settings from environment variables as it is imported or starts. Those that this
# engine needs are set before that, recorded, and put back when it is done.

_OLDEST = (0, 32)
"""The version that it is tested with; names that it uses moved before."""
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Set where the user has not: they change no number."""
_MOST_TOKENS = 4096
_MOST_AT_ONCE = 8192


_Count = Annotated[int, msgspec.Meta(ge=1)]


class VllmOptions(EngineOptions, frozen=True, kw_only=True):
    """Says what vLLM is given."""

    max_model_len: _Count | None = None
    """Tokens of a prompt and what follows it; None: the model's own, at most 4096."""
    block_size: _Count | None = None
    """Tokens in a block of the cache; None: vLLM's choice."""
    max_num_seqs: _Count = 64
    """Prompts of a batch that run at a time; the others wait."""
    max_num_batched_tokens: _Count | None = None
    """Tokens that one forward may have; prompts that do not fit wait for the next. None: 8192, or
    max_model_len where that is more."""
    kv_cache_dtype: str = "auto"
    """``auto``: the model's."""
    kv_cache_gib: _Count = 1
    """GiB of the cache."""
    batch_invariant: bool = False
    """``VLLM_BATCH_INVARIANT``: kernels whose result does not depend on the batch."""
    tensor_parallel_size: _Count | None = None
    """Processes that a model is divided among; None: as many as ``--mesh tp`` says."""
    name_map: str | None = None
    """A name map, by name (configs/maps/) or path; None: the family's own."""


class VllmEngine:
    """Models as vLLM runs them."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[EngineOptions]] = VllmOptions

    def load(self, loading: Loading, options: VllmOptions) -> VllmSession:
        twin = empty_model(replace(loading, attn_implementation="eager"))
        _check(loading, options, twin)
        family = str(getattr(twin.module.config, "model_type", ""))
        name_map = map_for(family, options.name_map)
        shown: dict[str, Any] = {}

        def on_loaded(module: torch.nn.Module) -> None:
            places = shown["places"] = places_of(
                name_map, structure=twin.module, module=module, model_type=family
            )
            more = parameters_of(name_map, structure=twin.module, module=module)
            gather = None if loading.ranks is None else loading.ranks.gather
            shown["identity"] = identity_of(twin, module, places, more, gather=gather)

        variables = _QUIET | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_BATCH_INVARIANT": str(int(options.batch_invariant)),
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        }
        closing, llm = contextlib.ExitStack(), None
        try:
            closing.enter_context(_surroundings(variables))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it and its packages find outdated
                _import()
                closing.callback(lambda: _let_go(llm, with_group=loading.ranks is None))
                register_loader(on_loaded)
                llm = _made(loading, options, twin)
            runner = llm.collective_rpc("divergence_runner")[0]
            module = runner.get_model()
            module.generation_config = _generation_config(loading)
        except BaseException:
            closing.close()
            raise
        loaded = replace(
            twin,
            module=module,
            device=torch.device(loading.device),
            twin=twin.module,
            ranks=loading.ranks,
        )
        return VllmSession(
            loaded,
            msgspec.structs.asdict(options),
            llm=llm,
            runner=runner,
            places=shown["places"],
            identity=shown["identity"],
            facts=_facts(llm, module, variables),
            on_close=closing.close,
        )


def _check(loading: Loading, options: VllmOptions, twin: LoadedModel) -> None:
    """Raise UsageError for what this engine does not do."""
    if twin.task != "causal-lm":
        raise UsageError(
            f"--engine vllm: {loading.source} is no causal language model but an {twin.task}",
            hint="--engine transformers runs it",
        )
    if loading.device_map is not None:
        raise UsageError("--engine vllm places the model itself: --device-map cannot be given")
    ranks, size = loading.ranks, _num_ranks(loading)
    if ranks is not None and set(ranks.sizes) != {"tp"}:
        raise UsageError(
            f"--engine vllm divides matrices alone, and --mesh is {ranks.mesh}", hint="--mesh tp"
        )
    if options.tensor_parallel_size not in (None, 1, size):
        count = options.tensor_parallel_size
        raise UsageError(
            f"--engine-option tensor_parallel_size={count}: "
            f"{'this is one process' if size == 1 else f'--mesh tp has {size} processes'}",
            hint=command_line(
                "capture", loading.source, ranks=count, engine="vllm", mesh="tp", o="RUN"
            ),
        )


def _num_ranks(loading: Loading) -> int:
    return 1 if loading.ranks is None else loading.ranks.size


def _import() -> None:
    """Raise ModelError where vLLM is not there, cannot be imported, or is too old."""
    try:
        import vllm
    except Exception as error:  # its compiled parts raise their own kinds
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise ModelError(
                "--engine vllm: vllm is not installed",
                hint="install it in an environment of its own (docs/engines.md); runs are compared "
                "anywhere",
            ) from error
        raise ModelError(
            f"--engine vllm: vllm cannot be imported: {first_line(error, most=300)}",
            hint="python -c 'import vllm' shows why",
        ) from error
    version = str(vllm.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST:
        raise ModelError(
            f"--engine vllm: vllm {version} is too old",
            hint=f"{'.'.join(map(str, _OLDEST))} or newer",
        )


def _made(loading: Loading, options: VllmOptions, twin: LoadedModel) -> Any:
    """vLLM with its model. Raises ModelError."""
    from vllm import LLM
    from vllm.platforms import current_platform

    kind = loading.device.partition(":")[0]
    if current_platform.device_type != kind:
        raise ModelError(
            f"--engine vllm: this vllm runs on {current_platform.device_type or 'no device'}, not "
            f"on {kind}",
            hint=f"--device {current_platform.device_type or 'cpu'}",
        )
    config: Any = twin.module.config
    own = getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS
    length = options.max_model_len or min(own, _MOST_TOKENS)
    dtype = next(p.dtype for p in twin.module.parameters() if p.dtype.is_floating_point)
    at_once = options.max_num_batched_tokens or max(length, _MOST_AT_ONCE)
    if at_once < length:
        raise UsageError(
            f"--engine-option max_num_batched_tokens={at_once}: a prompt may have max_model_len="
            f"{length} tokens, and is not divided",
            hint=f"max_num_batched_tokens={length}, or a smaller max_model_len",
        )
    optional: dict[str, Any] = {}
    if options.block_size is not None:
        optional["block_size"] = options.block_size
    if loading.ranks is not None:  # torchrun's processes, each with its worker in it
        optional["distributed_executor_backend"] = "external_launcher"
    try:
        return LLM(
            model=os.path.expanduser(loading.source),
            revision=loading.revision,
            trust_remote_code=loading.trust_remote_code,
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            load_format=FORMAT,
            use_tqdm_on_load=False,
            worker_extension_cls=EXTENSION,
            tensor_parallel_size=_num_ranks(loading),
            max_model_len=length,
            max_num_batched_tokens=at_once,
            max_num_seqs=min(options.max_num_seqs, at_once),  # vLLM wants no more
            kv_cache_dtype=options.kv_cache_dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            async_scheduling=False,
            disable_log_stats=True,
            seed=0,
            **optional,
        )
    except DivergenceError:
        raise
    except Exception as error:  # a configuration that it refuses, memory, a kernel: its own kinds
        raise ModelError(
            f"vLLM cannot load {loading.source!r}: {_reason(error)}",
            hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
        ) from error


def _reason(error: Exception) -> str:
    """Its first line; of one that counts what it found wrong, the first of these."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    counted = len(lines) > 1 and "validation error" in lines[0]
    return lines[1].partition(" [type=")[0][:300] if counted else first_line(error, most=300)


def _facts(llm: Any, module: torch.nn.Module, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what was found set, in vLLM's own words."""
    config = llm.llm_engine.vllm_config
    attention = {
        str(backend.get_name())
        for part in module.modules()
        if (backend := getattr(part, "attn_backend", None)) is not None
    }
    cache, scheduler = config.cache_config, config.scheduler_config

    def said(value: object) -> str:
        return {True: "on", False: "off"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]

    return {
        "attention backend": ", ".join(sorted(attention)) or "unknown",
        "prefix caching": said(cache.enable_prefix_caching),
        "chunked prefill": said(scheduler.enable_chunked_prefill),
        "asynchronous scheduling": said(scheduler.async_scheduling),
        "speculative decoding": said(config.speculative_config is not None),
        "CUDA graphs": said(not config.model_config.enforce_eager),
        "compilation": str(getattr(config.compilation_config.mode, "name", "unknown")).lower(),
        "sequences at a time": str(scheduler.max_num_seqs),
        "tokens at a time": str(scheduler.max_num_batched_tokens),
        "max model length": str(config.model_config.max_model_len),
        "block size": str(cache.block_size),
        "cache dtype": str(cache.cache_dtype),
        "transformers": transformers.__version__,
    } | {name: value for name, value in variables.items() if name not in _QUIET}


def _generation_config(loading: Loading) -> Any:
    """The model's own, as transformers takes it: which tokens end a sample, which is padding."""
    source, kind = os.path.expanduser(loading.source), transformers.GenerationConfig
    try:
        return kind.from_pretrained(source, revision=loading.revision or "main")
    except OSError:  # it has none
        return kind.from_model_config(
            transformers.AutoConfig.from_pretrained(
                source, revision=loading.revision, trust_remote_code=loading.trust_remote_code
            )
        )


@contextlib.contextmanager
def _surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """Run with these variables; afterwards the process has its own again, and the number of its
    threads can be set as before (vLLM takes that away on a CPU)."""
    before = dict(os.environ)
    own = {name: before[name] for name in _QUIET if name in before}
    os.environ.update({**variables, **own})
    try:
        with patched(torch, "set_num_threads", torch.set_num_threads):
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _let_go(llm: Any | None, *, with_group: bool) -> None:
    """Its memory and process groups, so that another can be made. ``with_group``: the default group
    too, where vLLM made it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    destroy = torch.distributed.destroy_process_group

    def without_default(group: Any = None) -> None:
        if with_group or group is not None:  # it ends the default group, whoever made it
            destroy(group)

    with (
        patched(torch.distributed, "destroy_process_group", without_default),
        contextlib.suppress(Exception),  # it is done with, whatever it has to say
    ):
        if llm is None:
            cleanup_dist_env_and_memory()
        else:
            llm.llm_engine.engine_core.shutdown()
