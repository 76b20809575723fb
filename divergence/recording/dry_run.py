"""--dry-run: sites × steps × bytes, without loading a weight.

The model is built on torch's meta device (shapes without storage), and two forwards run through
the same hooks as a real capture: the prefill, and one decode step that stands for all of them.
Tensors that pass from one module to the next unchanged are counted once, as in a real run; other
equal ones cannot be told from shapes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from divergence.domain import hook_places, placed
from divergence.errors import UsageError
from divergence.options.commands import CaptureOptions
from divergence.recording.api import Capture
from divergence.recording.cases import CaseRequest, plan_cases, refuse_options, suite_meant
from divergence.recording.engines.load import empty_model
from divergence.recording.engines.sessions import TorchSession
from divergence.recording.machine import Determinism
from divergence.recording.new_run import PlannedSite
from divergence.recording.passes import keeps_tensors, mode_of
from divergence.recording.ranks import count_shapes
from divergence.recording.request import plain_arguments, plan_options, resolve_request
from divergence.recording.selection import step_selected
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.words import silent


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a capture would write."""

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
    """What domains add, by their names: None where one has nothing to say."""


def plan_capture(
    model: str | Path | None = None, *, like: str | Path | Run | None = None, **options: Any
) -> DryRun:
    """Plan what ``capture`` with the same parameters would write (``out``, ``force`` and ``probe``
    are ignored), and what domains plan, by their own options of ``--dry-run``.

    Raises what capture raises before it loads weights, and ModelError where the
    architecture cannot be run without values (a data-dependent forward).
    """
    for name in ("out", "force", "command", "progress", "probe"):
        options.pop(name, None)
    planned = plan_options(options)
    chosen = CaptureOptions(**plain_arguments(**options))
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
            parts=dict.fromkeys(hook_places("plan")),
        )
    request = resolve_request(model, like=like, options=chosen)
    refuse_options(None, replace(chosen, link_rate=None) if request.stepping else chosen)
    session: Any = TorchSession(empty_model(request.loading))
    planned_request = replace(request, plants=[])  # what a fault changes is no shape
    capture = Capture(planned_request, session, "meta", Determinism(), silent)
    if capture.media:
        raise UsageError(
            "--dry-run counts prompts of text, and these have pictures or sound",
            hint="capture them with --max-new-tokens 1, and `divergence inspect` tells its size",
        )
    loaded, notes, groups = capture.loaded, capture.notes, capture.groups
    lengths = [sample.num_padded for sample in capture.samples]
    steps = max(request.max_new_tokens, 1) if loaded.task != "encoder" else 1
    counters = [
        count_shapes(request, loaded, capture.selection, notes, group, lengths) for group in groups
    ]
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
    passes: list[str] = [planned.name for planned in capture.passes]
    texts = capture.missed
    total = sum(row.bytes for row in rows)
    if request.only_changed:
        texts.append("of these bytes only those are stored that the run to be repeated has not")
    if "anchored" in passes:
        total *= 2
        texts.append(
            "the anchored pass is counted like the free one; equal tensors are stored once"
        )
    if "escalated" in passes:
        texts.append(
            "the escalated pass is not counted: 4 bytes a number of each output that it reaches"
        )
    if "whole" in passes:
        total += sum(row.bytes - row.bytes_prefill for row in rows)
        texts.append("the whole pass is counted like the decode steps")
    if mode_of(request) != "no":
        if keeps_tensors(request):
            passes.append("truth")
            texts.append(
                "the truth is not counted: 8 bytes a number of each output that it reaches"
            )
        if not request.stepping:
            passes.append("floor")
            texts.append(
                "the floor is not counted: 12 bytes a token of each block and of what stands "
                "outside"
            )
    parts: dict[str, Any] = {}
    shapes = [(len(group), lengths[group[0]]) for group in groups]
    for field, place in hook_places("plan").items():
        parts[field] = placed(place)(
            loaded, request, planned.get(field), shapes, forward_bytes=total
        )
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
        notes=texts,
        parts=parts,
    )
