"""What `capture` says: what it would record, and what it has recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from divergence.layout import BLANK, Line, columns, count, line, next_lines, prose, shape_text, size
from divergence.report.environment import changes, fallback_lines, repeat_lines, switch_lines
from divergence.report.inspection import (
    model_lines,
    skipped_lines,
    stored,
    training_text,
    truth_name,
    truth_text,
)
from divergence.report.text import sentence_line
from divergence.run.command import command_line
from divergence.run.manifest import COLLECTIVES, UNKNOWN, Manifest
from divergence.run.record import Record
from divergence.run.site import LOGPROBS, LOSS, join_site
from divergence.training.plan.show import training_lines


def captured_lines(
    path: str,
    manifest: Manifest,
    records: Sequence[Record],
    *,
    like: str | os.PathLike[str] | None = None,
) -> list[Line]:
    """What `capture` says when it is done: briefly what was made, and what to do with it."""
    settings, plan = manifest.settings, manifest.plan
    done = "captured" if plan.replayed_pass is None else "replayed"
    state = (done, "bold green") if manifest.complete else ("INCOMPLETE", "bold yellow")
    num_records = len(records) or manifest.sizes.num_records  # not at hand: on several disks
    lines = [line(state, f" {path}: {count(num_records, 'record')}, {stored(manifest)}")]
    lines += model_lines(manifest)[:1]
    wide = "" if settings.compute_dtype is None else f", computed in {settings.compute_dtype}"
    served = plan.sites == [LOGPROBS]  # the numbers' dtype is not what was computed in
    dtype = settings.dtype or UNKNOWN if served else manifest.model.dtype
    machine = f"{manifest.environment.label}, {dtype}{wide} on {settings.device}"
    lines.append(prose("machine", machine))
    if manifest.mesh is not None:
        lines.append(prose("ranks", str(manifest.mesh)))
    if plan.truth is not None and any(plan.truth.num_steps):  # else a note says why
        lines.append(prose(truth_name(plan.truth), truth_text(plan.truth, manifest)))
    lines += map(sentence_line, changes(plan.plants, plan.substitutes))
    for item in manifest.overrides:
        lines.append(prose("", f"{item.name}: {item.used} instead of {item.reference}"))
    lines += repeat_lines(manifest.repeatability)
    lines += switch_lines(settings.switches, more=command_line("inspect", path, v=True))
    lines += fallback_lines(settings)
    lines += skipped_lines(manifest)
    if manifest.training.train:
        lines.append(prose("training", f"{training_text(manifest)}{_loss(records)}"))
    no_tokens = plan.replayed_pass is not None or manifest.model.task == "operators"
    no_tokens = no_tokens or manifest.training.train
    for number, sample in enumerate(() if no_tokens else manifest.tokens.samples[:8]):
        # the prompt and what was generated, as far as texts were recorded
        texts = [manifest.tokens.texts.get(str(token)) for token in sample.generated_ids]
        prompt = repr(sample.text) if sample.text is not None else f"{len(sample.prompt_ids)} ids"
        prompt = prompt if len(prompt) <= 60 else prompt[:59] + "…"
        made = count(len(sample.generated_ids), "token")
        if texts and None not in texts:
            made = repr("".join(text or "" for text in texts))
        lines.append(prose(f"prompt {number}", f"{prompt} -> {made}"))
    if settings.compute_dtype is not None and like is not None:
        following = [command_line("compare", os.fspath(like), "OTHER", truth=path)]
    elif like is None and manifest.model.source == COLLECTIVES:
        following = [
            command_line("compare", path, note="does every rank hold what it should?"),
            command_line(
                "capture",
                ranks=manifest.num_ranks,
                like=path,
                o="OTHER",
                note="on the other machine",
            ),
        ]
    elif like is None:
        server: dict[str, Any] = (
            {"endpoint": "URL", "model": manifest.model.source} if served else {}
        )
        note = "of the other server" if served else "on the other machine"
        following = [command_line("capture", **server, like=path, o="OTHER", note=note)]
    else:
        following = [command_line("compare", os.fspath(like), path)]
    if "whole" in manifest.plan.passes:
        following.append(command_line("compare", path, note="its decode steps, against the whole"))
    return [*lines, BLANK, *next_lines(following)]


def _loss(records: Sequence[Record]) -> str:
    """The loss of the step: what its prompts add up to."""
    site = join_site(LOSS, "out")
    parts = [
        record.summary.mean * record.shape[0]
        for record in records
        if record.site == site and record.pass_ == "free"
        and record.summary is not None and record.summary.mean is not None
    ]  # fmt: skip
    return f": loss {sum(parts):.6g}" if parts else ""


def copied_lines(what: str, path: str, manifest: Manifest, records: Sequence[Record]) -> list[Line]:
    """What `pack` and `unpack` say when they are done."""
    text = f" {path}: {count(len(records), 'record')}, {stored(manifest)}"
    lines = [line((what, "bold green"), text)]
    if not manifest.complete:
        lines.append(prose("", "the run is INCOMPLETE, as it was", style="yellow"))
    return lines


def plan_lines(plan: dict[str, Any]) -> list[Line]:
    """What `capture --dry-run` would record. ``plan``: the planned capture as plain data."""
    lines = [
        line(
            ("DRY RUN", "bold"),
            f": {count(plan['num_sites'], 'site')}, {count(plan['num_steps'], 'step')}, "
            f"at most {size(plan['total_bytes'])}; nothing was written",
        )
    ]
    lines += [prose("note", note, width=6) for note in plan.get("notes") or []]
    if plan.get("training"):
        lines += [BLANK, *training_lines(plan["training"])]
    rows = [
        (row["site"], row["role"] or "-", shape_text(row["shape"]), row["dtype"],
         str(row["num_steps"]), size(row["bytes"]))
        for row in plan["rows"]
    ]  # fmt: skip
    titles = ("site", "role", "shape", "dtype", "steps", "size")
    return [*lines, BLANK, *columns([titles, *rows], widest=48)]
