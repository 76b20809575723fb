"""The passes of a capture: free, its repeats, and anchored.

Free: the model runs on its own values (tokens forced where a run is repeated).
Repeat: the free pass again, its digests held against the first. Anchored: every
block gets the recorded input of the run that is repeated, so that what differs at
its output was made there; caches are the own ones, made from those inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from divergence.numerics.summaries.fold import folds_of
from divergence.recording.engines.generate import GroupResult, run_group
from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks.modules import Anchor, Recorder
from divergence.recording.options.selection import step_selected
from divergence.recording.passes.rows import RecordedRows
from divergence.run.process_tuning import frozen_heap, quick_thread_switches
from divergence.run.reader import Run
from divergence.run.schema.contents import why_no_bytes
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.manifest import ModuleNote, Repeatability, SampleTokens
from divergence.run.schema.record import PassName
from divergence.run.schema.site import module_of
from divergence.run.writing.captured_tensor import CapturedTensor
from divergence.run.writing.writer import RunWriter

if TYPE_CHECKING:
    import torch

__all__ = [
    "Pass",
    "RememberingSink",
    "RepeatSink",
    "TensorKey",
    "can_anchor",
    "recorded_inputs",
    "run_pass",
]

TensorKey = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all prompts."""

    name: PassName
    anchored: bool = False
    """Each block gets the inputs that the repeated run recorded."""
    compute_dtype: torch.dtype | None = None
    """What every operator is computed in; None for the model's own dtype."""
    whole: bool = False
    """Prompt and fed tokens in one forward, anchored to this run's own free pass."""


class RememberingSink:
    """Passes everything on to the writer and remembers what was seen where."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self.items: dict[TensorKey, CapturedTensor] = {}

    def put(self, item: CapturedTensor, *, sample: int, step: int, site: str, **rest: Any) -> None:
        self.items[sample, step, site] = item
        self._writer.put(item, sample=sample, step=step, site=site, **rest)


class RepeatSink:
    """Holds a repeated run's digests against the first run's. ``first`` must be written out."""

    def __init__(self, first: dict[TensorKey, CapturedTensor], result: Repeatability) -> None:
        self._first = first
        self._result = result

    def put(self, item: CapturedTensor, *, sample: int, step: int, site: str, **_: object) -> None:
        if item.reduced is not None:
            item.fold, item.reduced = folds_of([item.reduced.sums])[0], None
        elif item.digest is None and item.fold is None:
            tensor = item.tensor
            assert tensor is not None  # no digest yet: it holds its bytes
            item.digest, item.tensor = digest_tensor(tensor), None
        earlier = self._first.get((sample, step, site))
        self._result.num_compared += 1
        same = earlier is not None and (
            earlier.fold == item.fold if item.digest is None else earlier.digest == item.digest
        )
        if not same:
            self._result.num_different += 1
            if self._result.first_difference is None:
                self._result.first_difference = f"{site} (sample {sample}, step {step})"


def run_pass(
    loaded: LoadedModel,
    recorder: Recorder,
    samples: Sequence[SampleTokens],
    groups: Sequence[list[int]],
    *,
    max_new_tokens: int,
    forced: Sequence[list[int]] | None = None,
    on_group: Callable[[list[int], GroupResult], None] | None = None,
) -> None:
    """Run every group once under the recorder's hooks."""
    with recorder.installed(), quick_thread_switches(), frozen_heap():
        for group in groups:
            members = [samples[number] for number in group]
            first = members[0]
            recorder.begin(
                sample=group[0],
                batch=len(group),
                num_tokens=first.num_left_pad + len(first.prompt_ids) + first.num_right_pad,
            )
            wanted = (
                None if forced is None else [forced[number][:max_new_tokens] for number in group]
            )
            result = run_group(loaded, members, max_new_tokens=max_new_tokens, forced=wanted)
            if on_group is not None:
                on_group(group, result)


def can_anchor(run: Run, notes: Mapping[str, ModuleNote]) -> str | None:
    """None if the run holds what an anchored pass over a model of these modules needs, else why
    it does not, and what to do."""
    plan = run.manifest.plan
    if plan.positions is not None:
        return f"it holds only the token positions {plan.positions}; capture it again without them"
    if plan.steps is not None and not step_selected(plan.steps, 0):
        return f"it holds only the steps {plan.steps}; capture it again with the prefill"
    found = [
        record
        for record in run.records
        if record.pass_ == "free" and record.step == 0 and record.site.endswith(":in")
    ]
    inputs = {module_of(record.site) for record in found}
    without = [
        record
        for record in found
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
    if groups != run.manifest.tokens.groups:
        return RecordedRows(run, samples, groups)

    def anchor(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
        record = run.find((free, sample, step, site))
        # of what was not kept (an input beside the stream, say) the own value stays
        return None if record is None or not run.has_bytes(record) else run.read(record)

    return anchor
