"""One pass over a graph: what is fetched from it, what is put in place, what is recorded.

The graph runs without a cache: each step is a forward over the whole sequence so far, of which the
rows of that step are recorded (of a decode step the last one).

In an anchored pass each block, and what of the trunk has an input of its own, is a piece of the
graph that runs by itself. Its input is made of the rows that the other run recorded, of this step
and of all before it: so a block sees for earlier tokens what the other run's cache was made from.
Rotary tables are the recorded ones where they are; masks are computed from the tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.recording.engines.generate import (
    GroupResult,
    choices,
    control,
    ends_of,
    inputs,
    pad_id,
)
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.onnx_runtime.graph import Graph, Port
from divergence.recording.engines.onnx_runtime.pieces import Runtime, Subgraph
from divergence.recording.hooks.modules import Recorder
from divergence.run.schema.manifest import ModuleNote, SampleTokens
from divergence.run.schema.site import ROOT, join_site

__all__ = ["GraphRecorder", "decode", "feeds"]

_DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
_MAX_INPUT = 1 << 26
"""Numbers of a further input, which is zeros: caches are empty."""
_TABLES = "in.position_embeddings."
"""How transformers hands rotary tables to a block."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A module that an anchored pass runs by itself."""

    path: str
    ins: tuple[Port, ...]
    """What may be put in place: its input, and rotary tables."""
    outs: tuple[str, ...]
    is_block: bool


class GraphRecorder(Recorder):
    """Records what pieces of a graph give, in place of hooks."""

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        graph: Graph,
        runtime: Runtime,
        **how: Any,
    ) -> None:
        self._graph, self._runtime = graph, runtime
        self._given: dict[tuple[str, int], torch.Tensor | None] = {}
        self._pieces: dict[str, Subgraph] = {}
        self._replaced: set[tuple[str, str]] = set()
        super().__init__(model, notes, **how)
        parts = _parts(graph, notes)
        self._parts = [] if self._anchor is None else parts
        self._ports = [port for port in _with_tables(graph.ports, parts) if self._takes(port)]
        self.num_taps = 0

    def _takes(self, port: Port) -> bool:
        if not (self._forwards.hooks or port.path == ROOT):
            return False
        dtype = _DTYPES.get(self._graph.types.get(port.value, 1), torch.int64)
        return port.path in self._hooked and self._wanted(
            port.path, port.port, torch.empty(0, dtype=dtype)
        )

    def begin(self, **group: Any) -> None:
        self._given.clear()
        super().begin(**group)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Sessions are made when they are first needed, and let go here."""
        try:
            yield self
        finally:
            self._pieces.clear()
            self._given.clear()
            self._recent.items.clear()

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits (or the graph's first output); what passes chosen sites is recorded."""
        graph, fed = self._graph, dict[str, dict[str, torch.Tensor]]()
        if self._anchor is None:
            targets = [graph.logits, *(port.value for port in self._ports)]
            piece = self._piece(ROOT, targets, whole=True)
            self.num_taps = len(set(piece.targets) - set(graph.outputs))
            made = given | piece.run(given)
        else:
            made, fed = self._run_parts(given)
        num_tokens = given[graph.tokens].shape[1]
        rows: dict[int, torch.Tensor] = {}
        for port in self._ports:
            own = fed.get(self._owner(port.path), {})
            if (port.path, port.port) in self._replaced:
                continue  # an anchored input is the other run's, not news of this one
            tensor = own.get(port.value, made[port.value])
            if id(tensor) not in rows:
                rows[id(tensor)] = self._rows(tensor, num_tokens)
            self._emit(port.path, "", port.port, rows[id(tensor)])
        self._end_of_forward()
        return made[graph.logits]

    def _rows(self, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Of a decode step the row of its token."""
        whole = self._step == 0 or not self._forwards.cached  # then it is narrowed where it is kept
        if whole or tensor.ndim < 2 or tensor.shape[1] != num_tokens:
            return tensor
        return tensor[:, -1:].contiguous()

    def _piece(self, key: str, targets: list[str], **how: Any) -> Subgraph:
        if key not in self._pieces:
            self._pieces[key] = Subgraph(self._graph, self._runtime, targets=targets, **how)
        return self._pieces[key]

    def _owner(self, path: str) -> str:
        """The part that a module is in, or none."""
        owners = (p.path for p in self._parts if path == p.path or path.startswith(f"{p.path}."))
        return next(owners, "")

    def _run_parts(
        self, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """(what was computed, what was put in place by part)."""
        made, fed = dict(given), dict[str, dict[str, torch.Tensor]]()
        self._replaced.clear()
        for part in self._parts:
            lacking = [entry.value for entry in part.ins if entry.value not in made]
            if lacking:
                before = self._piece(f"{part.path} before", lacking, cuts=made.keys() - given)
                made |= before.run(made)
            own = fed[part.path] = {}
            for entry in part.ins:
                recorded = self._recorded(entry, made[entry.value])
                if recorded is not None:
                    own[entry.value] = recorded
                    self._replaced.add((entry.path, entry.port))
                    self.anchored += 1
                elif entry.port == "in" and part.is_block:
                    self._anchor_broken = True
            inside = [port.value for port in self._ports if self._owner(port.path) == part.path]
            cuts = {entry.value for entry in part.ins}
            piece = self._piece(part.path, [*part.outs, *inside], cuts=cuts)
            made |= piece.run(made | own)
        rest = [port.value for port in self._ports if port.value not in made]
        if rest or self._graph.logits not in made:
            targets = [*rest, self._graph.logits]
            after = self._piece(f"{ROOT} after", targets, cuts=made.keys() - given.keys())
            made |= after.run(made)
        return made, fed

    def _recorded(self, port: Port, own: torch.Tensor) -> torch.Tensor | None:
        """What was recorded of an input, of this step and those before it; None where that is not
        all there. Of what enters the head the deciding rows alone may be: the others stay own."""
        if own.ndim < 2 or own.shape[1] != self._num_prompt + self._step:
            return None
        assert self._anchor is not None  # asked where there is one
        whole, site = own.clone(), join_site(port.path, port.port)
        for step in range(self._step + 1):
            stop = self._num_prompt + step
            rows = own[:, (stop - 1 if step else 0) : stop]
            if (site, step) not in self._given:
                self._given[site, step] = self._anchor(self._sample, step, site, rows)
            recorded = self._given[site, step]
            few = port.path in self._logit_paths
            if recorded is None or recorded.shape not in (
                rows.shape,
                rows[:, -1:].shape if few else (),
            ):
                return None
            whole[:, stop - recorded.shape[1] : stop] = recorded.to(own.dtype)
        return whole


def _tables(graph: Graph) -> list[Port]:
    """What the one rotary table of the trunk gives; nothing where there are several."""
    paths = [path for path, kind in graph.kinds.items() if kind.endswith("RotaryEmbedding")]
    if len(paths) != 1 or any(part.isdecimal() for part in paths[0].split(".")):
        return []
    return [port for port in graph.ports if port.path == paths[0] and port.port.startswith("out")]


def _parts(graph: Graph, notes: Mapping[str, ModuleNote]) -> list[_Part]:
    """In the order of a forward: modules that take a value of the stream which others made."""
    tables, parts = _tables(graph), list[_Part]()
    for port in graph.ports:
        note = notes.get(port.path)
        if note is None or note.role == "inner" or port.port != "in" or port.value in graph.inputs:
            continue
        outs = tuple(p.value for p in graph.ports if p.path == port.path and p.port != "in")
        ins = [port]
        if note.role == "block":
            _, met, _ = graph.slice(outs, {port.value, *(table.value for table in tables)})
            ins += [Port(port.path, f"{_TABLES}{n}", table.value)
                    for n, table in enumerate(tables) if table.value in met]  # fmt: skip
        if outs:
            parts.append(_Part(port.path, tuple(ins), outs, note.role == "block"))
    return parts


def _with_tables(ports: list[Port], parts: list[_Part]) -> list[Port]:
    """The graph's ports, and those at which blocks take rotary tables."""
    tables = {part.path: part.ins[1:] for part in parts}
    return [
        tap
        for port in ports
        for tap in (port, *(tables.get(port.path, ()) if port.port == "in" else ()))
    ]


def feeds(graph: Graph, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The graph's inputs for a whole forward. A cache that it wants is empty."""
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    made = {
        graph.tokens: ids,
        "attention_mask": mask,
        "position_ids": positions,
        "token_type_ids": torch.zeros_like(ids),
        "use_cache_branch": torch.tensor([False]),
    }
    fed = {}
    for value in graph.model.graph.input:
        if value.name not in graph.inputs:
            continue
        kind = value.type.tensor_type
        if value.name in made:
            tensor = made[value.name]
            fed[value.name] = tensor.to(torch.int32) if kind.elem_type == 6 else tensor
            continue
        sizes = [dim.dim_value for dim in kind.shape.dim]  # 0 where it has a name
        sizes[0] = ids.shape[0]
        if min(sizes) < 0 or math.prod(sizes) > _MAX_INPUT:
            raise ModelError(
                f"the graph wants the input {value.name[:80]} of {sizes} numbers",
                hint="export it without a cache, or with one of any length",
            )
        fed[value.name] = torch.zeros(sizes, dtype=_DTYPES.get(kind.elem_type, torch.float32))
    return fed


def decode(
    loaded: LoadedModel,
    graph: Graph,
    recorder: GraphRecorder,
    samples: list[SampleTokens],
    count: int,
    forced: list[list[int]] | None,
) -> GroupResult:
    """Greedy or forced tokens, each step a forward over all of them so far."""
    ids, mask = inputs(loaded, samples)
    if loaded.task == "encoder" or count == 0:
        recorder.forward(feeds(graph, ids, mask))
        return GroupResult([[] for _ in samples], [[] for _ in samples], [[] for _ in samples])
    ends = ends_of(loaded, forced)
    made = control(forced, count, ends, None)
    num_prompt, ended = ids.shape[1], torch.zeros(len(samples), dtype=torch.bool)
    for _ in range(count):
        logits = recorder.forward(feeds(graph, ids, mask))[:, -1].float()
        token = made(ids, logits).argmax(dim=-1)
        token = torch.where(ended, pad_id(loaded), token)
        ended |= torch.tensor([int(token_id) in ends for token_id in token])
        ids = torch.cat([ids, token[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(token)[:, None]], dim=1)
        if bool(ended.all()):
            break
    generated = ids[:, num_prompt:].tolist()
    return GroupResult(generated, choices(made, generated, ends), [[] for _ in samples], made.seen)
