"""Hooks on vLLM's modules, as transformers' of the same places, step by step and prompt by prompt.

A forward that runs one step of the whole batch is recorded as it goes. Of one that runs several
steps each has a lane: the state that this recorder has at that step. What a lane records is held
until all prompts have made the step, and is then recorded as if one forward had made it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.recording.engines.vllm.batches import (
    EngineForward,
    Gathered,
    Shown,
    StepRows,
    forward_of,
)
from divergence.recording.engines.vllm.names import ModulePlace
from divergence.recording.engines.vllm.views import head_hooked, table_viewed, viewed
from divergence.recording.hooks.modules import Recorder
from divergence.recording.keeper import CopyKeeper
from divergence.recording.model.structure import routing_modules
from divergence.run.schema.manifest import ModuleNote, SampleTokens
from divergence.run.schema.site import ROOT

__all__ = ["VllmRecorder"]

Choose = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(places of the prompts, their logits (n, V)) → what vLLM's sampler gets."""

_OWN_CODE = "vllm.model_executor.models.transformers."
"""Where vLLM runs transformers' own code of a model, modules see all rows as a batch (1, N, H)."""

_LANE = ("_step", "_order", "_num_tokens", "_selected", "_calls", "_num_calls", "sink", "_keep",
         "_on_step", "_on_block")  # fmt: skip
"""What a recorder knows of one step."""


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
        self._lanes: dict[int, dict[str, Any]] = {}
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
                module, self._pre_hook(path, ()),
                self._post_hook(path), is_block=self._notes[path].role == "block",
                rows=place.rows, through=self._routed if path in self._routers else self._through,
            )  # fmt: skip
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

    def _last(self, shown: Shown, rows: torch.Tensor) -> torch.Tensor | None:
        """The same of the requests' last rows."""
        return self._in_parts(self._forward.last, shown, rows)

    def _in_parts(
        self, parts: Sequence[StepRows], shown: Shown, rows: torch.Tensor, *, fill: int = 0
    ) -> torch.Tensor | None:
        changed, now = False, rows
        for part in parts:
            with self._lane(part):
                new = shown(part.spread(rows, fill=fill))
            if new is not None:
                changed, now = True, part.put(new, now)
        return now if changed else None

    @contextlib.contextmanager
    def _lane(self, part: StepRows) -> Iterator[None]:
        """As the recorder is at this part's step."""
        lane = self._lanes.get(part.step)
        if lane is None:
            yield
            return
        before = {name: getattr(self, name) for name in _LANE}
        self.__dict__.update(lane)
        try:
            yield
        finally:
            self._lanes[part.step] = {name: getattr(self, name) for name in _LANE}
            self.__dict__.update(before)

    def _begin_forward(self, num_rows: int) -> None:
        """Who is in the forward that begins, and a lane for each step that it does not make for the
        whole batch."""
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
            own: dict[str, Any] = {
                "_calls": {}, "_num_calls": {}, "sink": gathered, "_keep": CopyKeeper().keep,
                "_on_step": None, "_on_block": None,
            }  # fmt: skip
            self._lanes[part.step] = {name: getattr(self, name) for name in _LANE} | own

    def _end_parts(self, places: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """After a forward: records the steps that all prompts have made now."""
        self._lanes.clear()
        for step, gathered in sorted(self._gathered.items()):
            if len(gathered.members) < self._batch:
                continue
            self.go_to(step)
            for site, (tensor, positions) in gathered.tensors.items():
                self._put(site, self._keep(tensor), None, positions)
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
        with self._model.register_forward_pre_hook(first, with_kwargs=True), head_hooked(
            self._model, head=pair, after_root=self._post_hook(ROOT), through=self._last,
            choose=lambda logits: self._end_parts(self._forward.requests, logits),
        ):  # fmt: skip
            yield
