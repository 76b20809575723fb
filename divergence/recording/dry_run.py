"""--dry-run: sites × steps × bytes, without loading a weight.

The model is built on torch's meta device (shapes without storage) and two forwards
run through the same hooks as a real capture: the prefill, and one decode step that
stands for all of them. Equal tensors cannot be told from shapes; those that pass
from one module to the next unchanged are counted once, as in a real run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from divergence.errors import ModelError
from divergence.numerics.formats import format_named
from divergence.numerics.summaries.sketch import sketch_bytes
from divergence.options.capture import CaptureOptions
from divergence.recording.engines.load import LoadedModel, empty_model
from divergence.recording.engines.tokenizing import group_samples, tokenize
from divergence.recording.hooks.modules import Recorder
from divergence.recording.keep.keeper import ShapeKeeper
from divergence.recording.model.structure import describe_modules, output_paths
from divergence.recording.options.request import Request, resolve_request
from divergence.recording.options.selection import step_selected
from divergence.recording.options.sites import SiteSelection
from divergence.recording.options.store_modes import check_operators
from divergence.recording.options.wishes import plain_wishes
from divergence.recording.passes.free import can_anchor
from divergence.recording.passes.rows import unpadded
from divergence.recording.passes.whole import why_not_whole
from divergence.recording.planned import DryRun, PlannedSite
from divergence.recording.suites import opened, plan_suite, wants_suite
from divergence.run.reader import Run
from divergence.run.schema.manifest import ModuleNote, StoreMode
from divergence.run.schema.site import module_of
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["forward_shapes", "plan_capture"]


class _Counter:
    """A sink that keeps shapes and sizes by (step, site)."""

    def __init__(self, store: StoreMode) -> None:
        self._store = store
        self.seen: dict[tuple[int, str], tuple[CapturedTensor, int]] = {}
        self._counted: set[int] = set()
        self._alive: list[CapturedTensor] = []

    def put(self, item: CapturedTensor, *, step: int, site: str, **_: object) -> None:
        fresh = id(item) not in self._counted
        self._counted.add(id(item))
        self._alive.append(item)  # keeps ids unique
        self.seen[step, site] = (item, self._bytes_of(item) if fresh else 0)

    def _bytes_of(self, item: CapturedTensor) -> int:
        if self._store == "full":
            return item.num_bytes
        if self._store == "sketch":
            return sketch_bytes(item.shape, format_named(item.dtype))
        return 0  # statistics and digests stand in the records


def plan_capture(
    model: str | Path | None = None, *, like: str | Path | Run | None = None, **options: Any
) -> DryRun:
    """What ``capture`` with the same parameters would write (``out``, ``force``
    and ``probe`` are ignored).

    Raises what capture raises before it loads weights, and ModelError where the
    architecture cannot be run without values (a data-dependent forward).
    """
    for name in ("out", "force", "command", "progress", "probe"):
        options.pop(name, None)
    chosen = CaptureOptions(**plain_wishes(**options))
    like = opened(like)
    if wants_suite(model, like, chosen.impl):
        return plan_suite(model, like=like, options=chosen)
    request = resolve_request(None if model is None else str(model), like=like, options=chosen)
    loaded = empty_model(
        request.model,
        task=request.task,
        revision=request.revision,
        dtype=request.dtype,
        attn_implementation=request.attn_implementation,
        trust_remote_code=request.trust_remote_code,
    )
    lengths, groups = _lengths(request, loaded)
    notes = describe_modules(loaded.module)
    selection = SiteSelection(request.sites, notes)
    check_operators(selection, store=request.store, only_changed=request.only_changed)
    steps = max(request.max_new_tokens, 1) if loaded.task != "encoder" else 1
    counters = [_count(request, loaded, selection, notes, group, lengths) for group in groups]
    rows = _rows(request, counters, notes, steps)
    passes, total = ["free"], sum(row.bytes for row in rows)
    said = []
    if request.only_changed:
        said.append("of these bytes only those are stored that the run to be repeated has not")
    if request.like is not None and request.anchor and can_anchor(request.like, notes) is None:
        passes.append("anchored")
        total *= 2
        said.append("the anchored pass is counted like the free one; equal tensors are stored once")
    if request.whole:
        reason = why_not_whole(request, loaded.task, selection, notes)
        if reason is None:
            passes.append("whole")
            total += sum(row.bytes - row.bytes_prefill for row in rows)
            said.append("the whole pass is counted like the decode steps")
        else:
            said.append(f"no whole pass: {reason}")
    return DryRun(
        model=request.model,
        rows=rows,
        num_sites=len(rows),
        num_prompts=len(lengths),
        num_prompt_tokens=sum(lengths),
        num_steps=steps,
        passes=passes,
        total_bytes=total,
        notes=said,
    )


def forward_shapes(
    request: Request,
    loaded: LoadedModel,
    selection: SiteSelection,
    notes: Mapping[str, ModuleNote],
    *,
    batch: int,
    tokens: int,
) -> dict[str, tuple[int, ...]]:
    """Site → shape in a prefill of ``loaded.structure`` whole, from shapes alone; as far as the
    architecture can be run without values."""
    whole = replace(loaded, module=loaded.structure, device=torch.device("meta"))
    one = msgspec.structs.replace(request, max_new_tokens=1)
    counter = _Counter(request.store)
    for attempt in range(2):
        counter = _Counter(request.store)
        try:
            _count(one, whole, selection, notes, [0] * batch, [tokens], counter)
            break
        except ModelError:
            experts: Any = getattr(whole.module, "set_experts_implementation", None)
            if experts is None or attempt:
                break
            experts("batched_mm")  # the one way to run experts whose shapes need no values
    return {site: item.shape for (_, site), (item, _) in counter.seen.items()}


def _lengths(request: Request, loaded: LoadedModel) -> tuple[list[int], list[list[int]]]:
    """Prompt lengths as padded, and the groups they run in."""
    if request.like is not None:
        tokens = request.like.manifest.tokens
        samples, groups = tokens.samples, tokens.groups
        if request.regrouped:
            samples = unpadded(samples)
            groups = group_samples(samples, batch=request.batch, pad_left=True)
    else:
        samples = tokenize(request.prompts, loaded.tokenizer, chat=request.chat)
        groups = group_samples(samples, batch=request.batch, pad_left=True)
    lengths = [s.num_left_pad + len(s.prompt_ids) + s.num_right_pad for s in samples]
    return lengths, groups


def _count(
    request: Request,
    loaded: LoadedModel,
    selection: SiteSelection,
    notes: Mapping[str, ModuleNote],
    group: Sequence[int],
    lengths: Sequence[int],
    counter: _Counter | None = None,
) -> _Counter:
    """Shapes of one group's prefill (step 0) and of one decode step (step 1)."""
    counter = counter or _Counter(request.store)
    recorder = Recorder(
        loaded.module,
        notes,
        wanted=selection.wanted,
        hooked=selection.hooked,
        flat=selection.is_routing,
        sink=counter,
        positions=request.positions,
        logit_paths=frozenset(output_paths(loaded.module))
        if loaded.task == "causal-lm"
        else frozenset(),
        keeper=ShapeKeeper(),
        operators=selection.operators,
        weights=request.weights,
    )
    batch, tokens = len(group), lengths[group[0]]
    recorder.begin(sample=group[0], batch=batch, num_tokens=tokens)
    decode = loaded.task != "encoder" and request.max_new_tokens > 1
    try:
        with torch.no_grad():
            forwards = [
                _inputs(request, loaded, batch, tokens, step)
                for step in ((0, 1) if decode else (0,))
            ]
            with recorder.installed():
                for inputs in forwards:
                    loaded.module(**inputs)
    except Exception as error:  # whatever an architecture raises without values
        raise ModelError(
            f"the shapes of {loaded.source} cannot be computed without weights: "
            f"{(str(error).splitlines() or [type(error).__name__])[0][:200]}",
            hint="capture with --max-new-tokens 1 --positions 0 to see its sites",
        ) from error
    return counter


def _inputs(
    request: Request, loaded: LoadedModel, batch: int, tokens: int, step: int
) -> dict[str, Any]:
    """Arguments for a prefill (step 0) or decode step on the meta device, tried out."""
    module: Any = loaded.module
    known = inspect.signature(module.forward).parameters
    length = tokens if step == 0 else 1
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in known:
        inputs["use_cache"] = False
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = 1
    if loaded.task == "encoder-decoder":
        inputs["decoder_input_ids"] = ids[:, :1]
        inputs["input_ids"] = ids.new_zeros(batch, tokens)
        if step > 0:  # the encoder ran once, before the first decoder step
            width = module.config.hidden_size
            encoded = torch.zeros(batch, tokens, width, dtype=module.dtype, device="meta")
            inputs["encoder_outputs"] = (encoded,)
    # A finished mask is tried first: building one from tokens looks at their values.
    mask = torch.zeros(batch, 1, length, length, dtype=module.dtype, device="meta")
    try:
        module(**inputs, attention_mask=mask)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return inputs
    return {**inputs, "attention_mask": mask}


def _rows(
    request: Request, counters: Sequence[_Counter], notes: Mapping[str, ModuleNote], steps: int
) -> list[PlannedSite]:
    kept_prefill = step_selected(request.steps, 0)
    kept_decode = sum(step_selected(request.steps, step) for step in range(1, steps))
    rows = []
    for site in dict.fromkeys(site for counter in counters for _, site in counter.seen):
        prefill = sum(counter.seen.get((0, site), (None, 0))[1] for counter in counters)
        decode = [counter.seen.get((1, site), (None, 0))[1] for counter in counters]
        item = next(
            counter.seen[step, site][0]
            for counter in counters
            for step in (0, 1)
            if (step, site) in counter.seen
        )
        path = module_of(site)
        rows.append(
            PlannedSite(
                site=site,
                role=notes[path].role,
                shape=item.shape,
                dtype=item.dtype,
                bytes_prefill=prefill if kept_prefill else 0,
                bytes_per_step=max(decode, default=0),
                num_steps=kept_prefill + kept_decode,
                bytes=prefill * kept_prefill + sum(decode) * kept_decode,
            )
        )
    return rows
