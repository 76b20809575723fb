"""--dry-run: sites × steps × bytes, without loading a weight.

The model is built on torch's meta device (shapes without storage), and two forwards run through
the same hooks as a real capture: the prefill, and one decode step that stands for all of them.
Tensors that pass from one module to the next unchanged are counted once, as in a real run; other
equal ones cannot be told from shapes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from divergence.errors import ModelError, first_line
from divergence.numerics.formats import format_named
from divergence.numerics.summaries import sketch_bytes
from divergence.options.commands import CaptureOptions
from divergence.recording.engines.load import LoadedModel, Loading, empty_model
from divergence.recording.keeper import ShapeKeeper
from divergence.recording.modules import Recorder
from divergence.recording.new_run import PlannedSite
from divergence.recording.passes import keeps_tensors, mode_of, planned_passes, tokens_of
from divergence.recording.prompts import plain_wishes, plan_options
from divergence.recording.request import Request, resolve_request
from divergence.recording.selection import SiteSelection, check_operators, step_selected
from divergence.recording.structure import describe_modules, output_paths
from divergence.recording.suites import (
    of_collectives,
    refuse_of_collectives,
    refuse_options,
    wants_suite,
)
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import SUITE, ModuleNote, StoreMode
from divergence.run.reader import Run
from divergence.run.site import escape_path, module_of
from divergence.training.plan.result import TrainingPlan


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture would write."""

    model: str
    rows: list[PlannedSite]
    """One for each site."""
    num_sites: int
    num_prompts: int
    num_prompt_tokens: int
    num_steps: int
    """Forwards of each prompt, decoding included."""
    passes: list[str]
    total_bytes: int
    """Sum over all sites."""
    notes: list[str] = []
    training: TrainingPlan | None = None
    """Of a training step: the memory and traffic of the step itself."""


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
    and ``probe`` are ignored). With ``train`` also what the step itself takes; ``main_weights``,
    ``micro_batch_size``, ``sequence_length`` and ``link_rate`` are for that alone
    (docs/training.md).

    Raises what capture raises before it loads weights, and ModelError where the
    architecture cannot be run without values (a data-dependent forward).
    """
    for name in ("out", "force", "command", "progress", "probe"):
        options.pop(name, None)
    planned = plan_options(options)
    chosen = CaptureOptions(**plain_wishes(**options))
    like = None if like is None else Run.open(like)
    if wants_suite(model, like, chosen.impl):
        return _plan_suite(model, like=like, options=chosen)
    request = resolve_request(model, like=like, options=chosen)
    refuse_of_collectives(chosen, planned=bool(request.train))
    loaded = empty_model(request.loading)
    samples, groups, _ = tokens_of(request, loaded)
    lengths = [sample.num_padded for sample in samples]
    notes = describe_modules(loaded.module)
    selection = SiteSelection(request.sites, notes, recorded=request.recorded_sites)
    check_operators(selection, store=request.store, only_changed=request.only_changed)
    steps = max(request.max_new_tokens, 1) if loaded.task != "encoder" else 1
    counters = [_count(request, loaded, selection, notes, group, lengths) for group in groups]
    kept_prefill = step_selected(request.steps, 0)
    kept_decode = sum(step_selected(request.steps, step) for step in range(1, steps))
    rows = []
    for site in dict.fromkeys(site for counter in counters for _, site in counter.seen):
        prefill = sum(counter.seen.get((0, site), (None, 0))[1] for counter in counters)
        decode = [counter.seen.get((1, site), (None, 0))[1] for counter in counters]
        seen = (counter.seen.get((step, site)) for counter in counters for step in (0, 1))
        item = next(entry[0] for entry in seen if entry is not None)
        rows.append(
            PlannedSite(
                site=site,
                role=notes[module_of(site)].role,
                shape=item.shape,
                dtype=item.dtype,
                bytes_prefill=prefill if kept_prefill else 0,
                bytes_per_step=max(decode, default=0),
                num_steps=kept_prefill + kept_decode,
                bytes=prefill * kept_prefill + sum(decode) * kept_decode,
            )
        )
    made, said = planned_passes(request, loaded, selection, notes, lacks={})
    passes, total = [pass_.name for pass_ in made], sum(row.bytes for row in rows)
    if request.only_changed:
        said.append("of these bytes only those are stored that the run to be repeated has not")
    if "anchored" in passes:
        total *= 2
        said.append("the anchored pass is counted like the free one; equal tensors are stored once")
    if "escalated" in passes:
        said.append(
            "the escalated pass is not counted: 4 bytes a number of each output that it reaches"
        )
    if "whole" in passes:
        total += sum(row.bytes - row.bytes_prefill for row in rows)
        said.append("the whole pass is counted like the decode steps")
    if mode_of(request) != "no":
        if keeps_tensors(request):
            passes.append("truth")
            said.append("the truth is not counted: 8 bytes a number of each output that it reaches")
        if not request.train:
            passes.append("floor")
            said.append(
                "the floor is not counted: 12 bytes a token of each block and of what stands "
                "outside"
            )
    training = None
    if request.train:
        from divergence.training.plan.plan import plan_request

        shapes = [(len(group), lengths[group[0]]) for group in groups]
        training = plan_request(loaded, request, planned, shapes, forward_bytes=total)
        total = training.dump_bytes
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
        training=training,
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
    prefill = replace(request, max_new_tokens=1)
    for attempt in range(2):
        counter = _Counter(request.store)
        try:
            _count(prefill, whole, selection, notes, [0] * batch, [tokens], counter)
            break
        except ModelError:
            experts: Any = getattr(whole.module, "set_experts_implementation", None)
            if experts is None or attempt:
                break
            experts("batched_mm")  # the one way to run experts whose shapes need no values
    return {site: item.shape for (_, site), (item, _) in counter.seen.items()}


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
        logit_paths=output_paths(loaded.module) if loaded.task == "causal-lm" else (),
        keeper=ShapeKeeper(),
        operators=selection.operators,
        weights=request.weights,
    )
    batch, tokens = len(group), lengths[group[0]]
    recorder.begin(sample=group[0], batch=batch, num_tokens=tokens)
    decode = loaded.task != "encoder" and request.max_new_tokens > 1
    try:
        with torch.no_grad():
            steps = (0, 1) if decode else (0,)
            forwards = [_inputs(loaded, batch, tokens, step, bool(request.train)) for step in steps]
            with recorder.installed():
                for inputs in forwards:
                    loaded.module(**inputs)
    except Exception as error:  # whatever an architecture raises without values
        raise ModelError(
            f"the shapes of {loaded.source} cannot be computed without weights: "
            f"{first_line(error)}",
            hint="capture with --max-new-tokens 1 --positions 0 to see its sites",
        ) from error
    return counter


def _inputs(loaded: LoadedModel, batch: int, tokens: int, step: int, train: bool) -> dict[str, Any]:
    """Arguments for a prefill (step 0) or decode step on the meta device, tried out."""
    module: Any = loaded.module
    known = inspect.signature(module.forward).parameters
    length = tokens if step == 0 else 1
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in known:
        inputs["use_cache"] = False
    if "logits_to_keep" in known and not train:
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


def plantable_module(
    model: str | Path, *, dtype: str | None = None, trust_remote_code: bool = False
) -> tuple[str, str]:
    """Where a known fault goes in a model that nobody has described: (path of its middle block,
    path of the last module in it with weights whose output is as large as the block's).

    That is the projection back into the residual stream (`mlp.down_proj`, `mlp.c_proj`,
    `mixer.out_proj`, `mlp.experts`, `output.dense`), or the norm behind it, where there is one: a
    norm would take a scale error of what comes before it away again. What makes the block's output
    itself is left out: a fault there has nothing of its block behind it, and no operator to be
    found at. Order and shapes come from the plan of a capture, so from no weights. Where a forward
    cannot be run without values, the order is the one in which the model registers its modules.

    Raises ModelError for a model that cannot be found or loaded, and for one without blocks.
    """
    module = empty_model(
        Loading(str(model), dtype=dtype, trust_remote_code=trust_remote_code)
    ).module
    notes = describe_modules(module)
    blocks = [path for path, note in notes.items() if note.role == "block"]
    if not blocks:
        raise ModelError(
            "this model has no list of blocks to plant a fault in", where=str(model),
            hint="capture it and name a module of your own: --plant 'MODULE:out=scale:1.5'",
        )  # fmt: skip
    block = blocks[len(blocks) // 2]
    weighted = [
        escape_path(path) for path, part in module.named_modules()
        if path and any(p.ndim > 0 for p in part.parameters(recurse=False))
        and escape_path(path).startswith(f"{block}.")
    ]  # fmt: skip
    if not weighted:
        raise ModelError(f"block {block} has no module with weights", where=str(model))
    try:
        plan = plan_capture(
            model, sites=["modules"], prompts=[list(range(1, 9))], dtype=dtype,
            trust_remote_code=trust_remote_code, device="cpu", max_new_tokens=1,
        )  # fmt: skip
    except ModelError:
        return block, weighted[-1]
    outputs = [row for row in plan.rows if row.site.startswith((f"{block}:out", f"{block}."))
               and row.site.endswith(":out")]  # fmt: skip
    # ``outputs`` are in the order in which they are made, the block's own last
    result = next((row for row in outputs if row.site == f"{block}:out"), None)
    if result is None:
        return block, weighted[-1]
    inner = [row for row in outputs if row is not result and row.bytes_prefill > 0]
    if result.bytes_prefill == 0:  # it is what the last of them made
        inner = inner[:-1]
    whole = [module_of(row.site) for row in inner
             if math.prod(row.shape) == math.prod(result.shape)]  # fmt: skip
    writers = [path for path in whole if path in weighted]
    return block, (writers or weighted)[-1]


def _plan_suite(model: str | Path | None, *, like: Run | None, options: CaptureOptions) -> DryRun:
    """The cases that a capture would run, with the bytes of their inputs."""
    collectives = of_collectives(model, like)
    refuse_options(options, collectives=collectives)
    if collectives:
        from divergence.collectives.capturing import plan_collectives

        rows = plan_collectives(like, options)
    else:
        from divergence.ops.suite.capturing import plan_cases

        rows = plan_cases(str(model).removeprefix(SUITE), like=like, sites=options.sites)
    return DryRun(
        model=str(model or ("" if like is None else like.manifest.model.source)),
        rows=rows,
        num_sites=len(rows),
        num_prompts=0,
        num_prompt_tokens=0,
        num_steps=1,
        passes=["free" if like is None else "replayed"],
        total_bytes=sum(row.bytes for row in rows),
        notes=["shapes and sizes are of the inputs; equal ones are stored once"],
    )
