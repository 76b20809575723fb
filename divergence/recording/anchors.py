"""Anchors: recorded inputs that a pass puts in place of a block's own.

``--like RUN --batch`` runs together what RUN ran one by one (``--no-batch`` the other way
round). The anchored pass is then put together row by row: of each prompt, RUN's recorded tokens
go where the new batch has that prompt's tokens.

Everything else stays the forward's own:

* pads. A mask gives them the weight zero, so they cannot reach a token; if they do (a wrong mask, a
  kernel whose result depends on the whole batch), that must show. Zeros would hide half of it.
* rows of prompts that had ended in RUN while others go on: they are fed padding.
* masks, positions and whatever else has no row of tokens for each prompt.

A tensor that cannot be put together is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from divergence.recording.engines.generate import pad_id
from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks.sink import Anchor
from divergence.recording.prompts import group_samples
from divergence.recording.request import Request
from divergence.recording.selection import step_selected
from divergence.run.reader import Run
from divergence.run.schema.contents import why_no_bytes
from divergence.run.schema.manifest import ModuleNote, SampleTokens, Tokens
from divergence.run.schema.record import PassName
from divergence.run.schema.site import module_of, of_parameter

__all__ = ["can_anchor", "recorded_inputs", "repeated_tokens", "unpadded"]


def unpadded(samples: Sequence[SampleTokens]) -> list[SampleTokens]:
    """The same prompts without padding."""
    return [
        SampleTokens(text=sample.text, prompt_ids=sample.prompt_ids, labels=sample.labels)
        for sample in samples
    ]


def repeated_tokens(
    request: Request, loaded: LoadedModel
) -> tuple[list[SampleTokens], list[list[int]], list[list[int]]]:
    """(samples, groups, forced tokens) of the run that is repeated, in the batches asked for."""
    assert request.like is not None
    recorded = request.like.manifest.tokens
    forced = [sample.generated_ids for sample in recorded.samples]
    samples = unpadded(recorded.samples)
    if request.regrouped:
        left = loaded.task == "causal-lm" and not request.pad_right
        groups = group_samples(samples, pad_left=left, **request.grouping)
        for group in groups:  # each is fed equally many tokens: padding after it has ended
            longest = max(len(forced[number]) for number in group)
            for number in group:
                padding = [pad_id(loaded)] * (longest - len(forced[number]))
                forced[number] = forced[number] + padding
        return samples, groups, forced
    for sample, theirs in zip(samples, recorded.samples, strict=True):
        sample.num_left_pad, sample.num_right_pad = theirs.num_left_pad, theirs.num_right_pad
    return samples, recorded.groups, forced


class _RecordedRows:
    """An Anchor over a run's free pass, for ``samples`` that run in other ``groups`` than there."""

    def __init__(
        self, run: Run, samples: Sequence[SampleTokens], groups: Sequence[Sequence[int]]
    ) -> None:
        self._run, self._samples = run, samples
        self._groups = {group[0]: list(group) for group in groups}
        self._theirs = {
            number: (group, row)
            for group in run.manifest.tokens.groups
            for row, number in enumerate(group)
        }

    def __call__(self, sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
        """``own`` (B, ...) with the recorded rows in it; of the last tokens alone (B, n, ...) where
        no more were recorded. None where nothing was, or it does not fit."""
        if of_parameter(site):  # of all prompts together, recorded behind the first
            record = self._run.find(("free", sample, step, site))
            if record is None or not self._run.has_bytes(record):
                return None
            return self._run.read(record)
        group = self._groups[sample]
        recorded = [self._recorded(number, step, site) for number in group]
        known = [rows for rows in recorded if rows is not None]
        if not known or own.ndim < 2:
            return None
        records = (self._run.find(("free", self._theirs[n][0][0], step, site)) for n in group)
        if any(record is not None and record.positions is not None for record in records):
            # the last tokens alone were kept, as of what enters the head
            return torch.cat(known) if len(known) == len(group) else None
        if own.shape[0] == 1 < len(group):  # one table for all
            same = all(rows.shape == own.shape and torch.equal(rows, known[0]) for rows in known)
            return known[0] if same else None
        if own.shape[0] != len(group):
            return None
        laid = own.clone()
        for row, (number, rows) in enumerate(zip(group, recorded, strict=True)):
            if rows is None:
                continue
            place = self._place(number, rows, own)
            if place is None:
                return None
            laid[row, place] = rows[0].to(device=own.device, dtype=own.dtype)
        return laid

    def _recorded(self, number: int, step: int, site: str) -> torch.Tensor | None:
        """A prompt's own rows (1, T, ...) in the recorded run, without the pads it had there."""
        group, row = self._theirs[number]
        record = self._run.find(("free", group[0], step, site))
        if record is None or not self._run.has_bytes(record):
            return None
        tensor, theirs = self._run.read(record), self._run.manifest.tokens.samples[number]
        pads = theirs.num_left_pad, theirs.num_right_pad
        if len(group) > 1:
            if tensor.ndim < 2 or (tensor.shape[0] == 1 and any(pads)):
                return None
            if tensor.shape[0] == len(group):
                tensor = tensor[row : row + 1]
        length = len(theirs.prompt_ids)
        if any(pads) and tensor.ndim > 2 and tensor.shape[1] == sum(pads) + length:
            tensor = tensor[:, pads[0] : tensor.shape[1] - pads[1]]
        return tensor

    def _place(self, number: int, rows: torch.Tensor, own: torch.Tensor) -> slice | None:
        """Where in its row of ``own`` a prompt's recorded tokens belong."""
        if rows.shape[0] != 1 or rows.shape[2:] != own.shape[2:]:
            return None
        mine = self._samples[number]
        end = mine.num_left_pad + len(mine.prompt_ids)
        padded = own.ndim > 2 and own.shape[1] == end + mine.num_right_pad
        if padded and rows.shape[1] == len(mine.prompt_ids):
            return slice(mine.num_left_pad, end)
        return slice(None) if rows.shape[1] == own.shape[1] else None


def can_anchor(run: Run, notes: Mapping[str, ModuleNote]) -> str | None:
    """None if the run holds what an anchored pass over a model of these modules needs, else why
    it does not, and what to do."""
    plan = run.manifest.plan
    if plan.positions is not None:
        return f"it holds only the token positions {plan.positions}; capture it again without them"
    if plan.steps is not None and not step_selected(plan.steps, 0):
        return f"it holds only the steps {plan.steps}; capture it again with the prefill"
    recorded = [
        record
        for record in run.records
        if record.pass_ == "free" and record.step == 0 and record.site.endswith(":in")
    ]
    inputs = {module_of(record.site) for record in recorded}
    without = [
        record
        for record in recorded
        if not run.has_bytes(record)
        and (note := notes.get(module_of(record.site))) is not None
        and note.role == "block"
    ]
    if without:
        return f"it keeps no bytes of {without[0].site} ({why_no_bytes(run.manifest)})"
    missing = [path for path, note in notes.items() if note.role == "block" and path not in inputs]
    if missing:
        return (
            f"it holds no input of {missing[0]}"
            + (f" and {len(missing) - 1} more blocks" if len(missing) > 1 else "")
            + f" (its sites: {', '.join(plan.sites)}); capture it again with --sites blocks"
        )
    return None


def recorded_inputs(
    run: Run, samples: Sequence[SampleTokens], groups: Sequence[list[int]]
) -> Anchor:
    """An Anchor over a run's free pass, for these batches of its prompts."""
    free: PassName = "free"
    blocks = {path for path, note in run.manifest.plan.modules.items() if note.role == "block"}
    run.expect(
        record for record in run.records
        if record.pass_ == free and ":in" in record.site and module_of(record.site) in blocks
    )  # fmt: skip
    if Tokens(samples=list(samples), groups=list(groups)).layout != run.manifest.tokens.layout:
        return _RecordedRows(run, samples, groups)

    def anchor(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
        record = run.find((free, sample, step, site))
        # of what was not kept (an input beside the stream, say) the own value stays
        return None if record is None or not run.has_bytes(record) else run.read(record)

    return anchor
