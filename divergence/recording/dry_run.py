"""--dry-run: sites × steps × bytes, without loading a weight.

The model is built on torch's meta device (shapes without storage), and two forwards run through
the same hooks as a real capture: the prefill, and one decode step that stands for all of them.
Tensors that pass from one module to the next unchanged are counted once, as in a real run; other
equal ones cannot be told from shapes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from divergence.domain import added, placed
from divergence.errors import ModelError
from divergence.options.commands import CaptureOptions
from divergence.recording.cases import CaseRequest, plan_cases, refuse_options, suite_meant
from divergence.recording.engines.load import Loading, empty_model
from divergence.recording.execution import keeps_tensors, mode_of, planned_passes, tokens_of
from divergence.recording.new_run import PlannedSite
from divergence.recording.prompts import plain_wishes, plan_options
from divergence.recording.ranks import count_shapes
from divergence.recording.request import resolve_request
from divergence.recording.selection import SiteSelection, check_operators, step_selected
from divergence.recording.structure import describe_modules
from divergence.run.reader import Run
from divergence.run.site import escape_path, module_of


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
    parts: dict[str, Any] = {}
    """What domains add, by ``Domain.plans``: None where one has nothing to say."""


def plan_capture(
    model: str | Path | None = None, *, like: str | Path | Run | None = None, **options: Any
) -> DryRun:
    """What ``capture`` with the same parameters would write (``out``, ``force``
    and ``probe`` are ignored), and what domains plan, by their own options of ``--dry-run``.

    Raises what capture raises before it loads weights, and ModelError where the
    architecture cannot be run without values (a data-dependent forward).
    """
    for name in ("out", "force", "command", "progress", "probe"):
        options.pop(name, None)
    planned = plan_options(options)
    chosen = CaptureOptions(**plain_wishes(**options))
    like = None if like is None else Run.open(like)
    if (suite := suite_meant(model, like)) is not None:
        planned_cases = plan_cases(suite, CaseRequest(like=like, options=chosen))
        return DryRun(
            model=str(model or ("" if like is None else like.manifest.model.source)),
            rows=planned_cases,
            num_sites=len(planned_cases),
            num_prompts=0,
            num_prompt_tokens=0,
            num_steps=1,
            passes=["free" if like is None else "replayed"],
            total_bytes=sum(row.bytes for row in planned_cases),
            notes=["shapes and sizes are of the inputs; equal ones are stored once"],
            parts=dict.fromkeys(added("plans")),
        )
    request = resolve_request(model, like=like, options=chosen)
    refuse_options(None, replace(chosen, link_rate=None) if request.train else chosen)
    loaded = empty_model(request.loading)
    samples, groups, _ = tokens_of(request, loaded)
    lengths = [sample.num_padded for sample in samples]
    notes = describe_modules(loaded.module)
    selection = SiteSelection(request.sites, notes, recorded=request.recorded_sites)
    check_operators(selection, store=request.store, only_changed=request.only_changed)
    steps = max(request.max_new_tokens, 1) if loaded.task != "encoder" else 1
    counters = [count_shapes(request, loaded, selection, notes, group, lengths) for group in groups]
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
    passes: list[str] = [pass_.name for pass_ in made]
    total = sum(row.bytes for row in rows)
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
    parts: dict[str, Any] = {}
    shapes = [(len(group), lengths[group[0]]) for group in groups]
    for field, package in added("plans").items():
        make = placed(f"{package}.plan:plan")
        parts[field] = make(loaded, request, planned.get(field), shapes, forward_bytes=total)
        if parts[field] is not None:
            total = parts[field].dump_bytes
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
        parts=parts,
    )


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
