"""Shows what `capture` says: what it would record, and what it has recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from divergence.document import Column, Document, Headline, Section, Table, each_in, named
from divergence.domain import hook_places, placed
from divergence.report.inspection import (
    following,
    happened,
    model_facts,
    stored,
    training_text,
    truth_name,
    truth_text,
)
from divergence.run.command import command_line
from divergence.run.contents import prompt_names
from divergence.run.manifest import UNKNOWN, Manifest
from divergence.run.record import Record
from divergence.run.site import LOSS, join_site
from divergence.words import count, shape_text, shortened, size


def captured_document(
    path: str,
    manifest: Manifest,
    records: Sequence[Record],
    *,
    like: str | os.PathLike[str] | None = None,
) -> Document:
    """Return what `capture` says when it is done: briefly what was made, and what to do with it."""
    settings, plan = manifest.settings, manifest.plan
    done = "captured" if plan.replayed_pass is None else "replayed"
    wide = "" if settings.compute_dtype is None else f", computed in {settings.compute_dtype}"
    dtype = manifest.model_dtype
    computed = f"{dtype}{wide} on {settings.device}"
    if dtype == UNKNOWN and UNKNOWN in settings.device:
        computed = "dtype and device unknown"
    facts = [
        *(named(*item) for item in model_facts(manifest) if item[0] in ("model", "  engine")),
        named("machine", f"{manifest.environment.label}, {computed}"),
    ]
    if manifest.mesh is not None:
        facts.append(named("ranks", str(manifest.mesh)))
    if plan.truth is not None and any(plan.truth.num_steps):  # else a note says why
        facts.append(named(truth_name(plan.truth), truth_text(plan.truth, manifest)))
    facts += happened(manifest, more=command_line("inspect", path, v=True))
    if manifest.training.train:
        facts.append(named("training", f"{training_text(manifest)}{_loss(records)}"))
    no_tokens = plan.replayed_pass is not None or manifest.model.task == "operators"
    no_tokens = no_tokens or manifest.training.train
    prompts = prompt_names(manifest.tokens.samples)
    for number, sample in enumerate(() if no_tokens else manifest.tokens.samples[:8]):
        # the prompt and what was generated, as far as texts were recorded
        texts = [manifest.tokens.texts.get(str(token)) for token in sample.generated_ids]
        made = count(len(sample.generated_ids), "token")
        if texts and None not in texts:
            made = repr("".join(text or "" for text in texts))
        facts.append(named(f"prompt {number}", f"{shortened(prompts[number], 60)} -> {made}"))
    later = command_line("compare", path, "OTHER")  # when that is there
    commands = [item for item in following(path, manifest) if item != later]
    if like is not None and settings.compute_dtype is not None:
        commands = [command_line("compare", os.fspath(like), "OTHER", truth=path)]
    elif like is not None:
        whole = commands[-1:] if "whole" in plan.passes else []
        # one that was fed nothing of the other's, and holds inputs, may be there to be repeated
        has_inputs = any(record.site.endswith(":in") for record in records)
        again = commands[:1] if has_inputs and "anchored" not in plan.passes else []
        commands = [command_line("compare", os.fspath(like), path), *again, *whole]
    num_records = len(records) or manifest.sizes.num_records  # not at hand: on several disks
    text = f"{path}: {count(num_records, 'record')}, {stored(manifest)}"
    top = Headline("", f"{done} {text}", "green", facts)
    if not manifest.complete:
        top = Headline("", f"INCOMPLETE {text}", "bold yellow", facts)
    return Document(headline=top, next=commands)


def _loss(records: Sequence[Record]) -> str:
    """The loss of the step: what its prompts add up to."""
    site = join_site(LOSS, "out")
    parts = [
        record.summary.mean * record.shape[0]
        for record in records
        if record.site == site
        and record.pass_ == "free"
        and record.summary is not None
        and record.summary.mean is not None
    ]
    return f": loss {sum(parts):.6g}" if parts else ""


def copied_document(what: str, path: str, manifest: Manifest, num_records: int) -> Document:
    """Return what `pack`, `unpack` and `import` say when they are done."""
    text = f"{what} {path}: {count(num_records, 'record')}, {stored(manifest)}"
    partly = [named("", "the run is INCOMPLETE, as it was", "yellow")]
    return Document(headline=Headline("", text, "green", [] if manifest.complete else partly))


def plan_document(plan: dict[str, Any]) -> Document:
    """Return what `capture --dry-run` would record. ``plan``: the planned capture as plain data."""
    text = (
        f"{count(plan['num_sites'], 'site')}, {count(plan['num_steps'], 'step')}, "
        f"at most {size(plan['total_bytes'])}; nothing was written"
    )
    notes = [named("note", note) for note in plan.get("notes") or []]
    table = Table(
        num_left=2,
        **each_in(
            plan["rows"],
            ("site", itemgetter("site")),
            ("role", lambda row: row["role"] or None),
            (Column("shape", shape_text, left=True), itemgetter("shape")),
            (Column("dtype", left=True), itemgetter("dtype")),
            ("steps", itemgetter("num_steps")),
            (Column("size", size), itemgetter("bytes")),
        ),
    )
    parts = [
        section
        for field, place in hook_places("plan_sections").items()
        if plan.get(field)
        for section in placed(place)(plan[field])
    ]
    return Document(
        headline=Headline("DRY RUN", text, "bold", notes), sections=[*parts, Section(body=[table])]
    )
