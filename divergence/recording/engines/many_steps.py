"""The decode steps of a truth, many in one forward.

A truth feeds tokens that are known beforehand, and in float64 the result does not depend, but for
rounding at 2^-53, on whether they go through the model one by one or together. One by one each
forward reads every weight for a single row. So after the prefill up to ``MOST_STEPS`` tokens are
fed at once behind the same cache, and what each step would have given is cut out.

Of each such forward the first and the last step are made alone as well, the last one behind a cache
that was filled in another division, and all that is recorded must agree (Rows). Where it does
not (a model with a state, rotary tables that depend on the length, tensors without a row a token),
the cache is set back and all further steps are made one by one. Caches of other kinds than keys and
values, whole or of a sliding window, are not tried.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from divergence.recording.engines.engine import (
    GroupResult,
    can_generate,
    control,
    failures,
    generate,
    inputs,
)
from divergence.recording.engines.load import LoadedModel
from divergence.recording.forwards import Anchor
from divergence.recording.recorder import Recorder
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import SampleTokens

MOST_STEPS = 32
FEWEST_STEPS = 6
"""Checked, fewer steps take longer together than one by one."""
FORWARDS_ALONE = 4
"""What a forward of many steps takes with its checks, in forwards of about a prompt's length."""
HELD_BYTES = 64 << 20
"""Of what one forward gives, held until it is known to be right."""

# Several decode steps in one forward: what each of them would have given alone.
#
# Where a step alone gives one row, a forward of ``count`` steps gives ``count``, (B, 1, D) and (B,
# count, D); where it attends to the tokens up to its own, (B, H, 1, past + 1), all attend to the
# last one's, (B, H, count, past + count), masked. Which axis is which tell the shapes of the first
# step, made alone. A causal mask that a step alone does not have is left out.
#
# The first and the last step are also made alone, and must agree in sites, their order, shapes,
# dtypes and values. Float64 rounds at 2^-53 and float32, the finest dtype that a truth is held
# against, at 2^-24; what differs by more than 2^-30 is another function.

AGREEMENT = 2**-30
"""Relative L2 up to which two float64 results are the same."""


class HeldSink:
    """Keeps what one forward gave, by site and in order."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, item: CapturedTensor, *, site: str, **_: Any) -> None:
        assert item.tensor is not None  # a copy of every byte was kept
        self.tensors[site] = item.tensor

    @property
    def num_bytes(self) -> int:
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())


class Rows:
    """``count`` steps in one forward, of a batch that had ``past`` tokens before."""

    def __init__(self, count: int, *, batch: int, past: int) -> None:
        self._count, self._batch, self._past = count, batch, past
        self.anchored = True
        """Whether each input was recorded as one row in every step, or in none."""

    def of(self, anchor: Anchor) -> Anchor:
        """An Anchor for one forward of all steps."""

        def together(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
            rows = [anchor(sample, step + number, site, own) for number in range(self._count)]
            present = [row for row in rows if row is not None]
            if not present:
                return None
            shape = present[0].shape
            alike = len(present) == self._count and all(row.shape == shape for row in present)
            if not alike or len(shape) < 2 or shape[1] != 1:
                self.anchored = False
                return None
            return torch.cat(present, dim=1)

        return together

    def cut(
        self,
        whole: Mapping[str, torch.Tensor],
        first: Mapping[str, torch.Tensor],
        last: Mapping[str, torch.Tensor],
    ) -> list[dict[str, torch.Tensor]] | None:
        """Cut out what each step would have given alone, by site. None if ``first`` and ``last``,
        which were made alone, are not what is cut for them."""
        sites = list(first)
        if list(last) != sites or [site for site in whole if site in first] != sites:
            return None
        steps: list[dict[str, torch.Tensor]] = [{} for _ in range(self._count)]
        cuts: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
        for site, alone in first.items():
            key = id(whole[site]), alone.shape  # what passes unchanged is cut, and kept, once
            parts = cuts.get(key) or self._parts(whole[site], alone.shape)
            if not (parts and agree(parts[0], alone) and agree(parts[-1], last[site])):
                return None
            cuts[key] = parts
            for step, part in zip(steps, parts, strict=True):
                step[site] = part
        return steps

    def _parts(self, whole: torch.Tensor, alone: Sequence[int]) -> list[torch.Tensor]:
        """One a step; empty where the shapes do not tell how to cut."""
        count, past = self._count, self._past
        if whole.ndim != len(alone):
            return []
        parts = [whole] * count
        for axis, (size, single) in enumerate(zip(whole.shape, alone, strict=True)):
            if size == single:
                continue
            if (size, single) == (count, 1):
                parts = [part.narrow(axis, n, 1) for n, part in enumerate(parts)]
            elif (size, single) == (past + count, past + 1):
                parts = [part.narrow(axis, 0, past + 1 + n) for n, part in enumerate(parts)]
            elif (size, single) == (self._batch * count, self._batch):  # rows of the whole batch
                split = (self._batch, count)
                parts = [
                    part.unflatten(axis, split).select(axis + 1, n) for n, part in enumerate(parts)
                ]
            else:
                return []
        return parts


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, or float64 within rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if a.dtype not in (torch.float64, torch.complex128):
        return False
    distance, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b)
    return bool(distance <= AGREEMENT * size)


class Enough(Exception):  # no error: what fitted was made
    """The time that a truth may take is used up."""


class Allowance:
    """Decides how far a truth goes. ``seconds``: in all; None for as far as the run.
    ``num_tokens``: of the prompts of each group."""

    def __init__(self, seconds: float | None, num_tokens: Sequence[int]) -> None:
        self.seconds, self._num_tokens = seconds, num_tokens
        self.num_steps: list[int] = []
        self.together = False
        """Are the steps counted by who makes many in one forward?"""
        self._begun = self._last = time.monotonic()
        self._until = self._cost = self._per_token = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def begins(self) -> bool:
        """Is the next group's prefill made? The first one's always is."""
        group = len(self.num_steps)
        self.num_steps.append(0)
        self._last = time.monotonic()
        expected = self.elapsed + self._per_token * self._num_tokens[group]
        return group == 0 or self.seconds is None or expected <= self.seconds

    def count(self, num_steps: int = 1) -> None:
        """So many steps more were made."""
        now = time.monotonic()
        self._cost, self._last = now - self._last, now
        first = self.num_steps[-1] == 0
        self.num_steps[-1] += num_steps
        if first and self.seconds is not None:
            group = len(self.num_steps) - 1
            self._per_token = self._cost / max(1, self._num_tokens[group])
            rest = self._num_tokens[group + 1 :]
            reserved = self._per_token * sum(rest)
            spare = max(0.0, self.seconds - self.elapsed - reserved)
            self._until = now + spare / (1 + len(rest))

    def goes_on(self, factor: float = 1.0) -> bool:
        """Does another forward fit, at ``factor`` times the cost of the last?"""
        return self.seconds is None or time.monotonic() + factor * self._cost <= self._until

    def after_forward(self) -> None:
        """Raises Enough where no further forward fits."""
        if self.together:
            return
        self.count()
        if not self.goes_on():
            raise Enough


class ManySteps:
    """Runs groups of prompts, and knows whether this model's steps can (still) be made together."""

    def __init__(self, loaded: LoadedModel, samples: Sequence[SampleTokens]) -> None:
        self._loaded = loaded
        self._works = (
            loaded.ranks is None
            and loaded.task == "causal-lm"
            and can_generate(loaded.module)
            and _continues(loaded, samples[0].prompt_ids)
        )

    def suits(self, count: int) -> bool:
        """Are the forwards of ``count`` tokens worth it?"""
        return self._works and count > FEWEST_STEPS  # the first is the prefill's

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        forced: list[list[int]],
        allowance: Allowance | None = None,
    ) -> GroupResult:
        """The prompts in one forward, then the ``forced`` tokens, as far as the ``allowance``
        goes."""
        count = len(forced[0])
        with failures(self._loaded, samples, count), torch.no_grad():
            group = _Group(self._loaded, samples, forced)
            step = 1
            if allowance is not None:
                allowance.count()
            while step < count and (allowance is None or allowance.goes_on()):
                made = 0
                fits = allowance is None or allowance.goes_on(FORWARDS_ALONE)
                if self._works and count - step >= FEWEST_STEPS and fits:
                    made = _make_many(group, recorder, step, count - step)
                    self._works = made > 0
                if not made:
                    group.choose(group.forward(step))
                step += made or 1
                if allowance is not None:
                    allowance.count(made or 1)
        none: list[list[int]] = [[] for _ in samples]
        chosen = [list(row) for row in zip(*group.control.chosen, strict=True)]
        return GroupResult([row[:step] for row in forced], chosen, none, group.control.seen)


def _continues(loaded: LoadedModel, prompt_ids: Sequence[int]) -> bool:
    """Does the model go on from a cache that can be set back? Tried with two tokens and one more,
    in its own dtype."""
    ids = torch.tensor([(list(prompt_ids) * 3)[:3]], device=loaded.device)
    mask, modules = torch.ones_like(ids), _states(loaded.module)
    try:
        with torch.no_grad():
            begun = generate(loaded, ids[:, :2], mask[:, :2], 1, with_cache=True)
            cache = getattr(begun, "past_key_values", None)
            if _marks(cache, num_fed=2) is None:
                return False
            generate(loaded, ids, mask, 1, cache=cache)
        return _marks(cache, num_fed=3) is not None
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # one by one it fails with its own words, or does not
    finally:
        _restore(modules)


class _Group:
    """Prompts under way: their tokens, and the cache of what was fed."""

    def __init__(
        self, loaded: LoadedModel, samples: list[SampleTokens], forced: list[list[int]]
    ) -> None:
        self._loaded = loaded
        self._model: torch.nn.Module = loaded.module
        ids, mask = inputs(loaded, samples)
        self.batch, self.num_prompt = ids.shape
        self._ids = torch.cat([ids, ids.new_tensor(forced)], dim=1)
        self._mask = torch.cat([mask, torch.ones_like(self._ids[:, self.num_prompt :])], dim=1)
        self.control = control(forced, len(forced[0]), set(), None)
        output = generate(loaded, ids, mask, 1, control=self.control, with_cache=True)
        self._cache, self._num_fed = output.past_key_values, self.num_prompt

    def forward(self, step: int, *, num_steps: int = 1) -> torch.Tensor:
        """Feed what the cache lacks up to ``step``'s token; the logits (B, num_steps, V)."""
        upto = self.num_prompt + step
        parts: list[torch.Tensor] = []
        with self._model.register_forward_hook(
            lambda module, args, output: parts.append(output.logits)
        ):
            generate(
                self._loaded,
                self._ids[:, :upto],
                self._mask[:, :upto],
                1,
                num_logits=num_steps,
                cache=self._cache,
            )
        self._num_fed = upto
        return parts[-1][:, -num_steps:]

    def choose(self, logits: torch.Tensor) -> None:
        """Note the greedy choices of one step or several."""
        for row in logits.unbind(dim=1):
            self.control(None, row)

    def mark(self) -> _Mark | None:
        """Return where the group stands; None for a cache that cannot be set back."""
        layers = _marks(self._cache, num_fed=self._num_fed)
        if layers is None:
            return None
        return self._num_fed, layers, _states(self._model)

    def set_back(self, mark: _Mark) -> None:
        """Forget what was fed since ``mark``: in the cache, and in modules that note lengths
        (dynamic rotary tables)."""
        self._num_fed, layers, modules = mark
        for number, kept in enumerate(layers):
            layer = self._cache.layers[number]
            if kept is not None:
                self._cache.layers[number] = copy.copy(kept)
                continue
            layer.keys, layer.values = (
                tensor[..., : self._num_fed, :] for tensor in (layer.keys, layer.values)
            )
        _restore(modules)


_States = list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]]
_Mark = tuple[int, list[Any], _States]
"""Number of tokens that were fed, the cache's layers, what modules held."""


def _states(model: torch.nn.Module) -> _States:
    """Each module's attributes and buffers, and what is in these (masks apart, which stay)."""
    with _disable_current_modes():  # as stored, not widened
        return [
            (
                module,
                dict(module.__dict__),
                dict(module._buffers),
                {
                    name: buffer.clone()
                    for name, buffer in module._buffers.items()
                    if buffer is not None and buffer.dtype != torch.bool
                },
            )
            for module in model.modules()
        ]


def _restore(states: _States) -> None:
    with _disable_current_modes():
        for module, attributes, buffers, contents in states:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, content in contents.items():
                buffers[name].copy_(content)


def _marks(cache: Any, *, num_fed: int) -> list[Any] | None:
    """Return, by layer, what must be kept to set the cache back to here. None for a cache that is
    not one of keys and values of ``num_fed`` tokens."""
    if type(cache).__name__ != "DynamicCache" or not getattr(cache, "layers", None):
        return None
    marks: list[Any] = []
    for layer in cache.layers:
        kind = type(layer).__name__
        if not kind.startswith("Dynamic") or layer.get_seq_length() != num_fed:
            return None
        if kind == "DynamicLayer":
            marks.append(None)  # it is cut off
        elif kind == "DynamicSlidingWindowLayer":  # it forgets, so it is kept: a window's worth
            marks.append(copy.copy(layer))
        else:
            return None
    return marks


def _make_many(group: _Group, recorder: Recorder, first: int, most: int) -> int:
    """Make and record steps from ``first`` on, at most ``most``; how many, 0 if it cannot be."""
    mark = group.mark()
    if mark is None:
        return 0
    alone, end, whole = HeldSink(), HeldSink(), HeldSink()
    with recorder.aside(alone, step=first, num_reports=1):
        begun = group.forward(first)
    fit = HELD_BYTES // max(alone.num_bytes, begun.nbytes)
    count = min(most, MOST_STEPS, fit)
    last, past = first + count - 1, group.num_prompt + first - 1
    steps = None
    if alone.tensors and count >= FEWEST_STEPS:
        middle = Rows(count - 2, batch=group.batch, past=past + 1)
        with recorder.aside(None, step=first + 1, num_reports=count - 2, anchored=middle.of):
            group.forward(last - 1)
        with recorder.aside(end, step=last, num_reports=1):
            ended = group.forward(last)
        group.set_back(mark)
        rows = Rows(count, batch=group.batch, past=past)
        with recorder.aside(whole, step=first, num_reports=0, anchored=rows.of):
            logits = group.forward(last, num_steps=count)
        if (
            middle.anchored
            and rows.anchored
            and agree(logits[:, :1], begun)
            and agree(logits[:, -1:], ended)
        ):
            steps = rows.cut(whole.tensors, alone.tensors, end.tensors)
    if steps is None:
        group.set_back(mark)
        recorder.go_to(first)
        return 0
    for number, tensors in enumerate(steps):
        recorder.record(first + number, tensors)
    recorder.go_to(last + 1)
    group.choose(logits)
    return count
