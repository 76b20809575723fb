"""One capture, from top to bottom: where it is kept, its passes, and what is run in which order.

Free: the model runs on its own values (tokens forced where a run is repeated). Repeat: the free
pass again, its digests compared with the first. Anchored: every block gets the recorded input of
the run that is repeated, so that a difference at its output was made in it; caches are made from
those inputs.

Whole: one forward over the prompt and every token that was fed to decoding. A decode step with a
cache must compute what one forward over the whole sequence computes for that token. So the tokens
of this run's own free pass are run once more without a cache, and each block gets as input the rows
that the free pass recorded. A difference in a block's output, in the row of a decoded token, was
made there: by the cache or the state, or by the kernel of the other shape. Only those rows are
kept. The recorded rows are read back from the shards written so far, one input at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from divergence.errors import ModelError, UsageError
from divergence.layout import size
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.numerics.kernels import RESIDENT_BYTES, Kernel, kernel_for
from divergence.numerics.summaries import folds_of, sketch_tensor
from divergence.numerics.summary import summarize
from divergence.options.commands import CaptureOptions
from divergence.options.option import recorded_in
from divergence.recording import optimizer as asked
from divergence.recording.engines.derived import note_changes
from divergence.recording.engines.engine import DEFAULT as TRANSFORMERS
from divergence.recording.engines.engine import (
    Feature,
    GroupResult,
    Session,
    check_ids,
    pad_id,
    padded_right,
    refuse_lacking,
)
from divergence.recording.engines.load import LoadedModel, map_text
from divergence.recording.engines.together import Allowance, Enough, Together
from divergence.recording.hooks import USUAL, Anchor, Sink
from divergence.recording.keeper import BufferKeeper, Keeper, ReducedKeeper, can_pin
from divergence.recording.machine import Determinism, free_bytes
from divergence.recording.modules import Recorder
from divergence.recording.new_run import probed, provenance, unlike
from divergence.recording.plant import Plant, check_fired, check_places
from divergence.recording.processes import Ranks, closed, on_all, own_part, started
from divergence.recording.prompts import group_samples, token_texts, tokenize
from divergence.recording.ranks import Division, LocalKeeper
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, check_operators, step_selected
from divergence.recording.structure import (
    CompiledWatch,
    compiled_regions,
    inside,
    noting_calls,
    output_paths,
)
from divergence.recording.training import leaves
from divergence.recording.widening import Widening, check_device
from divergence.run.captured import Buffer, BufferLimits, CapturedTensor
from divergence.run.contents import first_nonfinite, nonfinite_text, why_no_bytes
from divergence.run.location import Location, Url
from divergence.run.manifest import (
    Manifest,
    ModuleNote,
    OwnTruth,
    Plan,
    Repeatability,
    SampleTokens,
    Settings,
    Sizes,
    Tokens,
    Training,
    digest_tensor,
)
from divergence.run.reader import OwnFloor, Run
from divergence.run.record import OWN_TRUTH, PassName, Record
from divergence.run.site import ROOT, module_of, of_parameter
from divergence.run.writer import RunWriter, reducer_for, wants_fold
from divergence.words import Progress

# Where a capture puts what it sees: the writer, its buffer and the keeper between, made to fit.

_SHARE = 4
"""Compiled loops may take this part of the buffer."""


@contextlib.contextmanager
def storage(
    request: Request,
    out: Location,
    manifest: Manifest,
    *,
    device: torch.device,
    num_bytes: int,
    ranks: Ranks | None = None,
    force: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[RunWriter, Keeper]]:
    """The writer of this rank's part of ``out``, and the keeper that fills its buffer.
    ``num_bytes``: of tensors, about as many as will be seen. ``note``: told what is done otherwise
    than usual."""
    kernel = _kernel(num_bytes, buffer_bytes=request.buffer_bytes)
    if kernel == "compiled":  # loaded now: the writer's thread would keep Python's lock for it
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tensor = torch.ones(1, 16, dtype=dtype)
            summarize(tensor, kernel=kernel)
            if request.store == "sketch":
                sketch_tensor(tensor, 8, kernel=kernel)
    buffer = Buffer(BufferLimits.of(request.buffer_bytes, kernel=kernel), pinned=can_pin(device))
    reducer = reducer_for(
        request.store, like=request.like, only_changed=request.only_changed, kernel=kernel
    )
    rank = 0 if ranks is None else ranks.rank
    with started(
        ranks,
        lambda: RunWriter(
            out, manifest, force=force, rank=rank, reducer=reducer, buffer=buffer, device=device
        ),
    ) as writer:
        keeper: Keeper = BufferKeeper(writer, buffer)
        # Does the run to be repeated hold nothing but hosts' digests of what is not to be kept? A
        # device's own could be held against nothing: its tensors go to the host, and are reduced
        # there. (Hosts that keep sketches note both kinds.)
        of_hosts = (
            request.like is not None
            and request.store in ("stats", "hash")
            and not wants_fold(request.like)
            and any(record.place is None for record in request.like.records)
        )
        if request.store != "full" and not of_hosts:
            keeper = ReducedKeeper(request.store, keeper, note=note)
        yield writer, keeper if ranks is None else LocalKeeper(keeper)


def _kernel(num_bytes: int, *, buffer_bytes: int) -> Kernel:
    """Compiled loops where they pay, and where their memory is a small part of the buffer, in whose
    bound it is."""
    return kernel_for(num_bytes) if buffer_bytes >= _SHARE * RESIDENT_BYTES else "numpy"


# The passes, and what stands in place of a block's own input.

TensorKey = tuple[int, int, str]

OWN_KEPT_BYTES = 256 << 20
"""Widened weights that a capture's own truth keeps from forward to forward, where they are no more:
it takes an operator's memory beside the model, not a second model's."""


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
    device: str | None = None
    """Where every operator is computed; None for where the model lies."""

    @property
    def is_own_truth(self) -> bool:
        """Of this run's own weights, in float64: anchored to its own free pass, or free."""
        return self.name in OWN_TRUTH


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
        self._forwards: set[tuple[int, int]] = set()
        self._begun: dict[int, int] = {}
        """Of a sample the step in which it began to differ."""

    def put(self, item: CapturedTensor, *, sample: int, step: int, site: str, **_: object) -> None:
        if item.reduced is not None:
            item.fold, item.reduced = folds_of([item.reduced.sums])[0], None
        elif item.digest is None and item.fold is None:
            tensor = item.tensor
            assert tensor is not None  # no digest yet: it holds its bytes
            item.digest, item.tensor = digest_tensor(tensor), None
        earlier = self._first.get((sample, step, site))
        self._result.num_compared += 1
        if sample not in self._begun and (sample, step) not in self._forwards:
            self._forwards.add((sample, step))
            self._result.num_forwards += 1
        same = earlier is not None and (
            earlier.fold == item.fold if item.digest is None else earlier.digest == item.digest
        )
        if not same:
            self._result.num_different += 1
            if self._result.first_difference is None:
                self._result.first_difference = f"{site} (prompt {sample}, step {step})"
            if sample not in self._begun:
                self._begun[sample] = step
                self._result.begins[site] = self._result.begins.get(site, 0) + 1


def run_pass(
    session: Session,
    recorder: Recorder,
    samples: Sequence[SampleTokens],
    groups: Sequence[list[int]],
    *,
    max_new_tokens: int,
    forced: Sequence[list[int]] | None = None,
    on_group: Callable[[list[int], GroupResult], None] | None = None,
    together: Together | None = None,
    allowance: Allowance | None = None,
) -> None:
    """Run every group once under the recorder's hooks; forced steps ``together`` where it suits,
    and as far as the ``allowance`` goes."""
    with recorder.installed():
        for group in groups:
            if allowance is not None and not allowance.begins():
                recorder.cut_short()
                continue
            members = [samples[number] for number in group]
            first = members[0]
            recorder.begin(sample=group[0], batch=len(group), num_tokens=first.num_padded)
            wanted = (
                None if forced is None else [forced[number][:max_new_tokens] for number in group]
            )
            chunked = together is not None and wanted and together.suits(len(wanted[0]))
            if allowance is not None:
                allowance.together = bool(chunked)
            if together is not None and wanted and chunked:
                result = together.run_group(recorder, members, wanted, allowance)
            else:
                try:
                    result = session.run_group(
                        recorder, members, max_new_tokens=max_new_tokens, forced=wanted
                    )
                except Enough:
                    continue
            if on_group is not None:
                on_group(group, result)


ESCALATED = Pass("escalated", anchored=True, compute_dtype=torch.float32)


def planned_passes(
    request: Request, loaded: LoadedModel, selection: SiteSelection,
    notes: Mapping[str, ModuleNote], *, lacks: Mapping[Feature, str],
    compute_dtype: torch.dtype | None = None,
) -> tuple[list[Pass], list[str]]:  # fmt: skip
    """What a capture makes, but for its own truth; and of what was asked for and cannot be made
    why. ``lacks``: what the engine cannot do."""
    passes, missed, escalate = [Pass("free", compute_dtype=compute_dtype)], [], request.escalate
    if request.like is not None and (request.anchor or escalate):
        unfit = can_anchor(request.like, notes)
        if "anchor" in lacks:
            escalate = False
            missed.append(f"no anchored pass: {lacks['anchor']}")
        elif unfit is not None:
            what = "anchored or escalated" if escalate else "anchored"
            escalate = False
            missed.append(f"no {what} pass: {request.like.path} cannot anchor one, {unfit}")
        elif request.anchor:
            passes.append(Pass("anchored", anchored=True, compute_dtype=compute_dtype))
    if escalate:
        reason = lacks.get("anchor") or lacks.get("escalate")
        reason = reason or why_not_escalated(request, loaded.module)
        passes += [ESCALATED] if reason is None else []
        missed += [] if reason is None else [f"no escalated pass: {reason}"]
    if request.whole:
        reason = lacks.get("whole") or why_not_whole(request, loaded.task, selection, notes)
        passes += [Pass("whole", whole=True)] if reason is None else []
        missed += [] if reason is None else [f"no whole pass: {reason}"]
    return passes, missed


def why_not_whole(
    request: Request, task: str, selection: SiteSelection, notes: Mapping[str, ModuleNote]
) -> str | None:
    """None if this capture can make a whole pass, else why it cannot."""
    if task == "encoder":
        return "an encoder makes no decode steps"
    if not request.use_cache:
        return "without a cache each decode step is such a forward"
    if task == "encoder-decoder":
        return "it is made for causal language models alone, and this is an encoder-decoder"
    if request.max_new_tokens < 2:
        return (
            f"with --max-new-tokens {request.max_new_tokens} there is no decode step; "
            "ask for 2 or more"
        )
    if request.positions is not None:
        return f"only the token positions {request.positions} are recorded; leave out --positions"
    if request.store != "full":
        return (
            f"it repeats the free pass block by block, of which --store {request.store} keeps no "
            "bytes; give --store full"
        )
    like = request.like
    if like is not None and request.only_changed and like.manifest.plan.store != "full":
        return "what has not changed is in no run; leave out --only-changed"
    if not all(step_selected(request.steps, step) for step in range(request.max_new_tokens)):
        return f"only the steps {request.steps} are recorded; leave out --steps"
    some = torch.empty(0)
    missing = [
        path
        for path, note in notes.items()
        if note.role == "block"
        and not (path in selection.hooked and selection.wanted(path, "in", some))
    ]
    if missing:
        return f"the input of {missing[0]} is not recorded; add --sites blocks"
    return None


@contextlib.contextmanager
def widened(pass_: Pass, loaded: LoadedModel, training: Training) -> Iterator[Widening | None]:
    """The dtype that a pass computes in. Widened weights are kept if there is ample room; those of
    a training step are wide for its length, since their gradients are as wide as they are."""
    with contextlib.ExitStack() as stack:
        model: Any = loaded.module
        if pass_.is_own_truth and hasattr(model, "set_attn_implementation"):
            attention = getattr(model.config, "_attn_implementation", None)
            if attention not in (None, "eager", "sdpa"):  # fused kernels have no float64
                model.set_attn_implementation("eager")
                stack.callback(model.set_attn_implementation, attention)
        if training.train:
            stack.enter_context(leaves(loaded.module, pass_.compute_dtype, training))
        if pass_.compute_dtype is None:
            yield None
            return
        # a tensor class that holds codes has no memory of its own
        weights = [
            parameter for parameter in loaded.module.parameters() if not hasattr(parameter, "qdata")
        ]
        needed = sum(weight.numel() for weight in weights) * pass_.compute_dtype.itemsize
        room = OWN_KEPT_BYTES if pass_.is_own_truth else free_bytes(loaded.device) // 2
        keep = needed if needed <= room and not training.train else 0
        wide = Widening(
            pass_.compute_dtype, weights=weights, keep_bytes=keep, codes=loaded.codes,
            device=pass_.device,
        )  # fmt: skip
        yield stack.enter_context(wide)


def check_forwards(request: Request, session: Session) -> None:
    """Raise UsageError for forwards that this model or its engine cannot make."""
    asked = {
        "--no-hooks": not request.hooks,
        "--no-cache": not request.use_cache,
        "--prefill-chunk": request.prefill_chunk is not None,
    }
    options = [option for option, given in asked.items() if given]
    if not options:
        return
    option, loaded = options[-1], session.loaded
    if not getattr(session, "makes_forwards", False):
        raise UsageError(f"{option}: the engine {session.note().name} cannot be told")
    if option == "--no-hooks":
        return
    if loaded.task != "causal-lm":
        raise UsageError(f"{option} is for causal language models, and this is an {loaded.task}")
    if option != "--prefill-chunk":
        return
    if not request.use_cache:
        raise UsageError("--prefill-chunk feeds a cache, and with --no-cache there is none")
    if not getattr(session, "has_cache", True):
        raise UsageError(f"--prefill-chunk feeds a cache, and {session.note().name} runs without")
    if "past_key_values" not in inspect.signature(loaded.module.forward).parameters:
        raise UsageError(
            "--prefill-chunk needs a cache of keys and values, and this model keeps a state"
        )


def own_inputs(run: Run) -> Anchor:
    """An Anchor over a run's own free pass: the rows of all steps of a group, one after another.
    None where a site was not seen in every step, or where its tensors are not made of rows."""
    samples = run.manifest.tokens.samples

    def anchor(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
        records = [
            run.find(("free", sample, number, site))
            for number in range(len(samples[sample].generated_ids))
        ]
        held = [record for record in records if record is not None]
        if len(held) < len(records):
            return None
        rows = [record.shape[:1] + record.shape[2:] for record in held]
        if any(len(record.shape) < 2 for record in held) or len(set(rows)) > 1:
            return None
        return torch.cat([run.read(record) for record in held], dim=1)  # (B, T, ...)

    return anchor


def run_whole(
    session: Session,
    recorder: Recorder,
    samples: Sequence[SampleTokens],
    groups: Sequence[list[int]],
) -> None:
    """Run every group that made decode steps once, whole. The last generated token was never fed
    forward, so it is left out."""
    with recorder.installed():
        for group in groups:
            num_decoded = len(samples[group[0]].generated_ids) - 1
            if num_decoded < 1:
                continue
            members = [
                msgspec.structs.replace(
                    sample,
                    prompt_ids=sample.prompt_ids + sample.generated_ids[:-1],
                    generated_ids=[],
                )
                for sample in (samples[number] for number in group)
            ]
            first = members[0]
            recorder.begin(
                sample=group[0],
                batch=len(group),
                num_tokens=first.num_left_pad + len(first.prompt_ids),
                num_kept=num_decoded,
            )
            # logits of the prefill's last token too: what the free pass handed to the head
            session.run_group(recorder, members, max_new_tokens=1, num_logits=num_decoded + 1)


# The sums of a run's own error, made while its float64 pass runs (run.floor).
#
# A's recorded tensor is read as its inputs are; the float64 one goes on to where it is stored, if
# it is. The sums are written when the pass is over, into shards of their own: a golden takes them
# along and leaves the tensors behind.


class FloorSink:
    """Takes the tensors of the float64 pass. ``own``: the run whose free pass it is anchored to;
    ``sink``: where the tensors go, or None where none is to be kept."""

    def __init__(self, own: Run, notes: Mapping[str, ModuleNote], sink: Sink | None) -> None:
        self._own, self._notes, self._sink = own, notes, sink
        self._rows: dict[tuple[int, str], dict[int, np.ndarray]] = defaultdict(dict)
        self._channels: dict[str, np.ndarray] = {}
        self._orders: dict[str, int] = {}
        self._free: dict[str, dict[tuple[int, int], Record]] = defaultdict(dict)
        """By site, and by prompt and step, what has a floor."""
        for record in own.records:
            note = notes.get(module_of(record.site))
            outer = note is not None and note.role != "inner" and ":out" in record.site
            rows = len(record.shape) >= 2 and record.numel > 0
            rows = rows and format_named(record.dtype).kind == "float"
            if record.pass_ == "free" and outer and rows and own.has_bytes(record):
                self._free[record.site][record.sample, record.step] = record
        self._scales: dict[str, np.ndarray] = {}

    def put(
        self, item: CapturedTensor, *, sample: int, step: int, site: str, order: int, **rest: Any
    ) -> None:
        record = self._free[site].get((sample, step))
        if record is not None and item.tensor is not None:
            with _disable_current_modes():
                self._rows[sample, site][step] = self._sums(record, item.tensor)
            self._orders[site] = order
        if self._sink is not None:
            self._sink.put(item, sample=sample, step=step, site=site, order=order, **rest)

    def _sums(self, record: Record, truth: torch.Tensor) -> np.ndarray:
        """Of each row, and into the channels'."""
        columns = record.shape[-1]
        num_rows = record.numel // columns
        if tuple(truth.shape) != record.shape:
            return np.full((num_rows, 6), np.nan)
        a = self._read(record)
        update = a
        if self._is_block(record.site):
            path = record.site.partition(":")[0]
            entered = self._own.find(("free", record.sample, record.step, f"{path}:in"))
            if entered is not None and entered.shape == record.shape:
                update = a - self._read(entered)
        error = a - truth.double().reshape(-1, columns).numpy()
        with np.errstate(all="ignore"):
            squares = np.square(error)
            scaled = np.square(error / self._scale(record.site, columns))
            if self._is_block(record.site):
                good = np.isfinite(squares).all(axis=1)
                sums = np.stack([squares[good].sum(axis=0), np.square(a[good]).sum(axis=0)])
                self._channels[record.site] = self._channels.get(record.site, 0.0) + sums
            seconds = [squares, np.square(a), np.square(update), scaled]
            error2, size, updated, scaled2 = (np.sqrt(part.sum(axis=1)) for part in seconds)
            fourth, scaled4 = (np.square(x).sum(axis=1) ** 0.25 for x in (squares, scaled))
        return np.stack([error2, size, updated, fourth, scaled2, scaled4], axis=1)

    def _scale(self, site: str, columns: int) -> np.ndarray:
        """Each channel's rms over all forwards; of a channel that is 0 throughout any number."""
        if site not in self._scales:
            total, count = np.zeros(columns), 0
            for record in self._free[site].values():
                if record.shape[-1] == columns:
                    total += np.square(np.nan_to_num(self._read(record))).sum(axis=0)
                    count += record.numel // columns
            rms = np.sqrt(total / max(1, count))
            self._scales[site] = np.where(rms > 0, rms, 1.0)
        scale = self._scales[site]
        return scale if len(scale) == columns else np.ones(columns)

    def _read(self, record: Record) -> np.ndarray:
        rows: np.ndarray = self._own.read(record).double().reshape(-1, record.shape[-1]).numpy()
        return rows

    def _is_block(self, site: str) -> bool:
        note = self._notes.get(module_of(site))
        return note is not None and note.role == "block" and site.endswith(":out")

    def write(self, writer: RunWriter) -> bool:
        """The records of the pass ``floor``, by site and prompt. False where there is none."""
        writer.flush()  # behind all shards of tensors
        for (sample, site), steps in self._rows.items():
            rows = np.concatenate([steps[step] for step in sorted(steps)])
            self._put(writer, rows, sample=sample, step=0, site=site)
        first = min((sample for sample, _ in self._rows), default=0)
        for site, sums in self._channels.items():
            self._put(writer, np.sqrt(sums), sample=first, step=1, site=site)
        return bool(self._rows)

    def _put(
        self, writer: RunWriter, values: np.ndarray, *, sample: int, step: int, site: str
    ) -> None:
        tensor = torch.from_numpy(values).to(torch.bfloat16)
        writer.put(
            CapturedTensor(tensor), pass_="floor", sample=sample, step=step, site=site,
            order=self._orders[site],
        )  # fmt: skip


# Anchors: recorded inputs that a pass puts in place of a block's own.
#
# ``--like RUN --batch`` runs together what RUN ran one by one (``--no-batch`` the other way round).
# The anchored pass is then put together row by row: RUN's recorded tokens of each prompt go where
# the new batch has them. Everything else stays the forward's own:
#
# * pads. A mask gives them the weight zero, so they cannot reach a token; if they do (a wrong mask,
#   a kernel whose result depends on the whole batch), that must show;
# * rows of prompts that had ended in RUN while others go on: they are fed padding;
# * masks, positions, whatever has no row of tokens for each prompt, and what does not fit.


def tokens_of(
    request: Request, loaded: LoadedModel
) -> tuple[list[SampleTokens], list[list[int]], list[list[int]] | None]:
    """(samples, groups, forced tokens) in the batches asked for: of the prompts, or of the run that
    is repeated."""
    left = loaded.task == "causal-lm" and not request.pad_right
    if request.like is None:
        samples = tokenize(request.prompts, loaded.tokenizer, chat=request.chat)
        return samples, group_samples(samples, pad_left=left, **request.grouping), None
    recorded = request.like.manifest.tokens
    forced = [sample.generated_ids for sample in recorded.samples]
    samples = [
        SampleTokens(text=sample.text, prompt_ids=sample.prompt_ids, labels=sample.labels)
        for sample in recorded.samples
    ]
    if request.regrouped:
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


# The truth that a run carries: its own anchored pass in float64, and with ``full`` the free one, in
# which errors add up and tokens flip.
#
# The weights are there, so it takes no second command: each block gets the input that the free pass
# recorded, and every operator is computed in float64 (recording.widening), on the CPU where the
# device has none. It is made last, so that nothing else that is recorded depends on it.
#
# ``auto`` keeps to a share of the time that the capture has taken until then: the prompts' prefills
# first, then as many decode steps as fit, equally long for each group of prompts. What was covered
# stands in the manifest.

DEFAULT_TRUTH = "auto"
"""Where no run is repeated and nothing else is asked for."""
SHARE = 0.5
"""Of the time that the capture has taken before."""
LEAST_SECONDS = 5.0
"""Less is not worth a share: small models get all of their truth."""
_BEYOND = 16.0
"""Times what rounding makes, from which on a capture says that its own float64 disagrees. The
widest limit of one token's ratio is 12."""


def mode_of(request: Request) -> str:
    """``auto``, ``full``, ``floor`` or ``no``. A run that repeats another is judged by that one's
    truth."""
    return request.truth or (DEFAULT_TRUTH if request.like is None and request.hooks else "no")


def keeps_tensors(request: Request) -> bool:
    """Are the truth's tensors kept, or its floor alone? No other tensors are kept, no true ones."""
    return mode_of(request) in ("auto", "full") and request.store == "full"


def why_no_truth(request: Request, session: Session, device: str, out: Location) -> str | None:
    """None if a capture can make its own truth, else why it cannot."""
    engine, plan = session.note(), "divergence truth makes one"
    if session.loaded.ranks is not None:
        return f"the work is divided between processes; {plan} in a single one"
    if engine.name != TRANSFORMERS and not engine.simulates:
        lacks = f"the engine {engine.name} has no weights that could be widened"
        return f"{lacks}; {plan} with transformers"
    if compiled_regions(session.loaded.module):
        return "compiled code cannot be widened"
    if request.device_map is not None:
        return f"the weights are spread over devices; {plan} on a CPU"
    if isinstance(out, Url):
        return f"it reads the recorded inputs, which lie far away; {plan}"
    if request.train and not keeps_tensors(request):
        return "of a training step there is no floor; --store full keeps its truth"
    model, elsewhere = session.loaded.module, other_device(device) is not None
    if elsewhere and (request.train or session.loaded.codes is not None):
        what = "gradients must lie" if request.train else "codes are dequantised"
        return f"{device} has no float64, and there {what}; {plan} on a CPU"
    if request.train and mode_of(request) != "full":  # gradients are as wide as their parameters
        needed = 2 * 8 * sum(parameter.numel() for parameter in model.parameters())
        if needed > free_bytes(session.loaded.device) // 2 > 0:
            return (
                f"of a training step it takes {needed / 2**30:,.1f} GiB, for all weights and "
                "their gradients in float64; --truth full makes one"
            )
    return None


def other_device(device: str) -> str | None:
    """Where the operators of a truth are computed, if ``device`` has no float64."""
    try:
        check_device(device, torch.float64)
    except UsageError:
        return "cpu"
    return None


def why_no_room(num_bytes: int) -> str | None:
    """None if what the float64 pass starts from fits beside a run that keeps none of it."""
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if num_bytes <= free // 2:
        return None
    return (
        f"its inputs take {size(num_bytes)} for the time of the capture, and {place} has "
        f"{size(free)}; TMPDIR names another place"
    )


def why_not_anchored(own: Run, notes: Mapping[str, ModuleNote]) -> str | None:
    """None if the free pass holds what the truth starts from, else why it does not."""
    if not any(note.role == "block" for note in notes.values()):
        return "the model has no blocks"
    return can_anchor(own, notes)


def why_not_escalated(request: Request, module: torch.nn.Module) -> str | None:
    """None if the weights and what is kept allow an escalated pass, else why they do not."""
    if all(parameter.dtype.itemsize >= 4 for parameter in module.parameters()):
        return "the model is in float32, as such a pass would be"
    if request.like is None and request.store != "full":
        return (
            f"without --like it repeats this run's own free pass, of which --store {request.store} "
            "keeps no bytes"
        )
    return None


def disagreement(run: Run) -> tuple[str, float] | None:
    """The block whose own float64 is farthest from the free pass, in units of what rounding makes,
    where that is far beyond it."""
    ratios: dict[str, float] = {}
    free = {record.site: record for record in run.records if record.pass_ == "free"}
    work = format_named(run.manifest.model.dtype)
    for site, record in OwnFloor(run).channels.items():
        own = free[site]
        forms = [format_named(own.dtype), work]  # a residual in float32 is of 16-bit products
        weight = max(
            max(floor_weights(form, num_features=own.shape[-1], role="block"))
            for form in forms
            if form.itemsize >= 2  # 8-bit weights are widened first
        )
        error, energy = run.read(record).double().square().sum(dim=1).tolist()
        if weight and energy:
            ratios[site] = math.sqrt(error / energy) / weight
    worst = max(ratios, key=ratios.__getitem__, default=None)
    if worst is None or not ratios[worst] > _BEYOND:
        return None
    return module_of(worst), ratios[worst]


# One capture under way: tokens, plan, manifest, and the passes one after another.
#
# A pass has a name, may be anchored (every block gets the recorded input of the run that is
# repeated) and may compute every operator in a wider dtype than the model's own. A capture makes
# the free pass, with ``--like`` the anchored one, with ``--escalate`` the escalated one (float32;
# anchored to the run that is repeated, or to this run's own free pass), with ``--whole`` the whole
# one, and last the run's own truth, anchored to its own free pass, in float64. A truth of another
# run makes the first two, in float64.


class Execution:
    """One capture under way: the pieces that the passes share."""

    def __init__(
        self,
        request: Request,
        session: Session,
        device: str,
        determinism: Determinism,
        on_progress: Progress,
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._begun = time.monotonic()
        self.request, self.session, self.on_progress = request, session, on_progress
        loaded = self.loaded = session.loaded
        self.compute_dtype, self.device, self.determinism = compute_dtype, device, determinism
        self.samples, self.groups, self.forced = tokens_of(request, loaded)
        like = None if request.like is None else request.like.manifest
        session.settle(self.samples, self.forced, like)
        self.notes = session.notes()
        self.selection = SiteSelection(request.sites, self.notes, recorded=request.recorded_sites)
        check_operators(self.selection, store=request.store, only_changed=request.only_changed)
        self.keeper: Keeper | None = None
        self._made: list[Pass] = []
        self.plants, self.training = request.plants, asked.training_of(request, loaded.ranks)
        ranks = self.ranks = loaded.ranks
        places = asked.places_of(self.notes, self.training)
        check_places(request.plants, places, num_ranks=1 if ranks is None else ranks.size)
        check_forwards(request, session)
        first = self.samples if like is None else like.tokens.samples
        session.check_ids(first, request.max_new_tokens)
        refuse_lacking(
            session, plants=bool(request.plants), pads_right=padded_right(loaded, self.samples),
            operators=bool(self.selection.operators or request.substitutes),
            batch=any(len(group) > 1 for group in self.groups),
        )  # fmt: skip
        self.division: Division | None = None
        self.own_groups = self.groups
        if ranks is not None:
            self.division = Division(
                ranks, loaded, request, self.selection, self.notes, self.samples, self.groups
            )
            self.own_groups = self.division.groups
            self.plants = self.division.plants(request.plants)

    def run(self, out: Location, *, force: bool, command: str | None) -> Run:
        """Write the run to ``out``, and open it."""
        request = self.request
        passes, missed = planned_passes(
            request, self.loaded, self.selection, self.notes, lacks=self.session.lacks,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip
        for text in missed:
            self._note(text)
        self._made = passes
        plain = not (self.selection.operators or self.plants or request.substitutes)
        plain = plain and request.use_cache and request.prefill_chunk is None
        truth = self.compute_dtype == torch.float64 and plain
        self._together = Together(self.loaded, self.samples) if truth else None
        manifest = self._manifest(passes, command)
        own_truth = self.compute_dtype is None and mode_of(request) != "no"
        lacking = why_no_truth(request, self.session, self.device, out) if own_truth else None
        if lacking is not None:
            self._no_truth(manifest, lacking)
        watch = CompiledWatch(self.loaded.module)
        for note in watch.beforehand(self.selection.operators, self.selection.hooked):
            self._note(note)
        seen = self.session.num_bytes(self.selection.hooked, self.samples, request.max_new_tokens)
        with storage(
            request, out, manifest, device=self.loaded.device, num_bytes=seen * len(passes),
            ranks=self.ranks, force=force, note=self._note,
        ) as (writer, self.keeper), watch.watching():  # fmt: skip
            remembering = RememberingSink(writer) if request.repeat > 1 else None
            num_substituted = 0
            for made_pass in passes:
                free = made_pass.name == "free"
                anchor = None
                if made_pass.anchored:
                    inputs = request.like or Run.open(writer.flush())
                    reason = why_not_anchored(inputs, self.notes) if request.like is None else None
                    if reason is not None:
                        manifest.plan.passes.remove(made_pass.name)
                        self._note(f"no {made_pass.name} pass: {reason}")
                        continue
                    anchor = recorded_inputs(inputs, self.samples, self.groups)
                if made_pass.whole:
                    rank = 0 if self.ranks is None else self.ranks.rank
                    own = own_part(Run.open(writer.flush()), rank)
                    own.set_fallback(request.like)
                    anchor = own_inputs(own)
                recorder = self._recorder(
                    remembering or writer if free else writer, made_pass, anchor
                )
                self._run_pass(recorder, made_pass, writer if free else None)
                self._check_pass(recorder, made_pass, manifest)
                if recorder.operators is not None:
                    num_substituted += recorder.operators.num_substituted
                    for reason, count in recorder.operators.skipped.items():
                        skipped = manifest.plan.skipped_operators
                        skipped[reason] = skipped.get(reason, 0) + count
            if request.substitutes and not num_substituted:
                self._note("no operator was met whose result was to be replaced")
            self.determinism.note_in(manifest.settings)
            manifest.engine, manifest.plan.compiled = self.session.note(), watch.notes()
            precision = getattr(self.session, "precision", None)  # of the dtypes as they were
            manifest.training = msgspec.structs.replace(self.training, precision=precision)
            for note in watch.afterwards():
                self._note(note)
            if remembering is not None:
                writer.drain()
                repeatability = Repeatability(num_runs=request.repeat)
                for number in range(1, request.repeat):
                    self.on_progress("repeat", number, request.repeat - 1, "")
                    sink = RepeatSink(remembering.items, repeatability)
                    run_pass(
                        self.session, self._recorder(sink, Pass("free")), self.samples,
                        self.own_groups, max_new_tokens=request.max_new_tokens,
                        forced=self.forced or [sample.generated_ids for sample in self.samples],
                    )  # fmt: skip
                manifest.repeatability = repeatability
            if own_truth and lacking is None:
                self._make_truth(writer, manifest)
            if self.division is not None:
                writer.flush()
                self.division.count(manifest, writer.record_digests)
        run = Run.open(out) if self.ranks is None else closed(self.ranks, manifest, out, self._note)
        bad = first_nonfinite(run.manifest, run.records)
        if bad is not None:
            self._note(f"no usable run: {nonfinite_text(bad)}; what follows from it is no result")
        return run

    def _no_truth(self, manifest: Manifest, reason: str) -> None:
        """Says why this run carries no truth, although it was to, and notes it in the run."""
        self._note(f"no truth: {reason}")
        manifest.plan.truth = OwnTruth(
            mode=cast(Literal["auto", "full", "floor"], mode_of(self.request)),
            num_steps=[0] * len(self.groups), device=self.device, seconds=0.0, stopped_by=reason,
        )  # fmt: skip

    def _make_truth(self, writer: RunWriter, manifest: Manifest) -> None:
        """The run's own truth and floor: what fails in them ends them, and nothing else."""
        request = self.request
        with contextlib.ExitStack() as stack:
            if request.store == "full":
                own = Run.open(writer.flush())
                own.set_fallback(request.like)
                stack.callback(own.close)
            else:
                writer.flush()
                room = why_no_room(manifest.sizes.seen_bytes)
                if room is not None:
                    self._no_truth(manifest, room)
                    return
                own = stack.enter_context(self._again_in_full(manifest))
            full, keeps = mode_of(request) == "full", keeps_tensors(request)
            reason = why_not_anchored(own, self.notes)
            if reason is not None and full and keeps:
                self._note(f"no anchored truth: {reason}")
            elif reason is not None:
                self._no_truth(manifest, reason)
            device = other_device(self.device)
            passes = [
                Pass(name, anchored=kind == "anchored", compute_dtype=torch.float64, device=device)
                for name, kind in OWN_TRUTH.items()
                if (reason is None if kind == "anchored" else full and keeps)
            ]
            if passes:
                self._make_passes(writer, manifest, own, passes)

    @contextlib.contextmanager
    def _again_in_full(self, manifest: Manifest) -> Iterator[Run]:
        """The free pass once more, on the same tokens, in a temporary run that keeps what this one
        does not: blocks get their inputs from it, and their outputs are what float64 is held to."""
        request = dataclasses.replace(self.request, store="full")
        with tempfile.TemporaryDirectory(prefix="divergence-") as folder:
            out, keeper = Path(folder) / "run", self.keeper
            plan = msgspec.structs.replace(manifest.plan, passes=["free"], store="full")
            with storage(
                request, out, msgspec.structs.replace(manifest, plan=plan, sizes=Sizes()),
                device=self.loaded.device, num_bytes=manifest.sizes.seen_bytes,
            ) as (writer, self.keeper):  # fmt: skip
                run_pass(
                    self.session, self._recorder(writer, Pass("free")), self.samples,
                    self.own_groups, max_new_tokens=self.request.max_new_tokens,
                    forced=[sample.generated_ids for sample in self.samples],
                )  # fmt: skip
                own = Run.open(writer.flush())
                yield own
                own.close()
            self.keeper = keeper

    def _make_passes(
        self, writer: RunWriter, manifest: Manifest, own: Run, passes: Sequence[Pass]
    ) -> None:
        """In float64; what is anchored is so to the free pass of ``own``."""
        request, full = self.request, mode_of(self.request) == "full"
        keeps, self._made = keeps_tensors(request), list(passes)
        plain = request.use_cache and request.prefill_chunk is None
        if plain and not self.selection.operators:
            self._together = Together(self.loaded, self.samples)
        begun = time.monotonic()
        seconds = max(LEAST_SECONDS, SHARE * (begun - self._begun))
        lengths = [sum(self.samples[n].num_padded for n in group) for group in self.groups]
        sums = None if request.train else FloorSink(own, self.notes, writer if keeps else None)
        allowances: list[Allowance] = []
        stopped_by = None
        try:
            where = torch.device(passes[0].device or self.device)
            check_ids(dataclasses.replace(self.loaded, device=where), self.samples, itemsize=8)
            for pass_ in passes:
                allowance = Allowance(None if full else seconds, lengths)
                allowances.append(allowance)
                manifest.plan.passes += [pass_.name] * keeps
                anchor = recorded_inputs(own, self.samples, self.groups) if pass_.anchored else None
                sink = sums if pass_.anchored and sums is not None else writer
                recorder = self._recorder(
                    sink, pass_, anchor, after_forward=allowance.after_forward
                )
                self._run_pass(recorder, pass_, None, allowance=allowance)
                self._check_pass(recorder, pass_, manifest)
        except ModelError as error:
            stopped_by = error.message
            self._note(f"the truth was not finished: {error.message}")
        kept: Literal["auto", "full", "floor"] = "full" if full else "auto"
        manifest.plan.truth = OwnTruth(
            mode=kept if keeps else "floor", num_steps=allowances[0].num_steps,
            device=passes[0].device or self.device, seconds=round(time.monotonic() - begun, 2),
            budget_seconds=allowances[0].seconds, stopped_by=stopped_by,
        )  # fmt: skip
        if sums is not None and sums.write(writer):
            manifest.plan.passes.append("floor")
        made = Run.open(writer.flush())
        apart = disagreement(made)
        made.close()
        if apart is not None:
            block, ratio = apart
            kernel = "this machine's kernel, or the code's own casts"
            cause = "a planted fault" if self.plants else kernel
            self._note(f"{block}: its float64 differs by {ratio:,.0f} x rounding: {cause}")

    def _check_pass(self, recorder: Recorder, pass_: Pass, manifest: Manifest) -> None:
        num_emitted, num_anchored = on_all(self.ranks, recorder.num_emitted, recorder.anchored)
        if pass_.whole and num_emitted == 0:
            manifest.plan.passes.remove(pass_.name)
            self._note("no whole pass: no decode step was made, so there is nothing to hold to it")
            return
        if (pass_.anchored or pass_.whole) and num_anchored == 0:
            self._note(
                f"the {pass_.name} pass replaced no input: the recorded inputs fit none of "
                "this model's"
            )
        if pass_.name != "free":
            return
        check_fired(self.plants, recorder.fired)
        if num_emitted == 0:
            raise UsageError(
                "nothing was recorded: no tensor passed the chosen sites, steps and positions",
                where=f"--sites {' '.join(manifest.plan.sites)}",
                hint="`divergence capture MODEL --sites modules --dry-run` lists every site",
            )

    def _note(self, text: str) -> None:
        self.on_progress("note", 0, None, text)

    def _is_own(self, pass_: Pass) -> bool:
        """An escalated pass that is anchored to this run's own free pass?"""
        return pass_.name == ESCALATED.name and self.request.like is None

    def _manifest(self, passes: list[Pass], command: str | None) -> Manifest:
        request, like = self.request, self.request.like
        like_id = None if like is None else like.manifest.id
        kept = self.selection.hooked | asked.owners_of(self.loaded.structure, self.training)
        plan = Plan(
            passes=[made_pass.name for made_pass in passes],
            **{**recorded_in(request, "plan", CaptureOptions), "sites": self.selection.sites},
            only_changed=like_id if request.only_changed else None,
            anchored_to=like_id if any(made_pass.anchored for made_pass in passes) else None,
            plants=[f"{plant.site}={plant.fault}" for plant in request.plants],
            substitutes=[str(substitute) for substitute in request.substitutes.values()],
            logits_site=f"{ROOT}:out" if self.loaded.task != "encoder" else None,
            modules={
                path: note
                for path, note in self.notes.items()
                if path in kept or inside(path, self.selection.operators)
            },
        )
        identity = self.session.identity(
            lambda done, total, name: self.on_progress("digest", done, total, name)
        )
        if like is not None:
            for text in unlike(like.manifest, identity, self.session.note(), self.notes):
                self._note(text)
        manifest = Manifest(
            **provenance(
                self.device, label=request.label, command=command,
                like=None if like is None else like.manifest,
            ),
            model=identity,
            engine=self.session.note(),
            tokens=Tokens(
                samples=self.samples, groups=self.groups,
                forced_by=like_id,
            ),
            settings=Settings(
                **recorded_in(request, "settings", CaptureOptions),
                device=self.device,
                device_map=map_text(request.device_map),
                switches=self.determinism.switches,
                compute_dtype=None
                if self.compute_dtype is None
                else str(self.compute_dtype).removeprefix("torch."),
            ),
            training=self.training,
            arithmetic=probed(self.device, self.on_progress) if request.probe else [],
            plan=plan,
            overrides=request.overrides,
        )  # fmt: skip
        if self.division is not None:
            manifest.mesh = self.division.ranks.mesh_of(manifest.environment)
        return manifest

    def _recorder(
        self, sink: Any, pass_: Pass, anchor: Anchor | None = None,
        *, after_forward: Callable[[], None] | None = None,
    ) -> Recorder:  # fmt: skip
        request, task = self.request, self.loaded.task
        steps = 1 if pass_.whole or task == "encoder" else request.max_new_tokens
        forwards = steps * len(self.groups) or len(self.groups)
        num_blocks = sum(note.role == "block" for note in self.notes.values())
        # in a wide pass one forward may take minutes: progress goes by blocks
        # (of an encoder-decoder not each forward passes every block)
        wide = pass_.compute_dtype is not None
        by_block = wide and num_blocks > 0 and task != "encoder-decoder"
        decides = task == "causal-lm" and not padded_right(self.loaded, self.samples)
        # in the anchored passes, where there are any: there an error is where it is made
        anchored = any(made.anchored and not self._is_own(made) for made in self._made)
        with_operators = not pass_.whole and pass_.anchored == anchored
        total, done = forwards * (num_blocks if by_block else 1), itertools.count(1)

        def advance(what: str) -> None:
            self.on_progress(pass_.name, min(next(done), total), total, what)

        def end_of_forward(step: int) -> None:
            if not by_block:
                advance(f"step {step - 1}")
            if after_forward is not None:
                after_forward()

        plants: list[Plant] = [] if pass_.is_own_truth else self.plants
        if pass_.whole or self._is_own(pass_):  # inputs from the free pass have theirs already
            plants = [
                plant for plant in plants
                if not plant.port.startswith("in") or self.notes[plant.path].role == "inner"
            ]  # fmt: skip
        return self.session.recorder(
            self.notes,
            wanted=self.selection.wanted,
            hooked=self.selection.hooked,
            flat=self.selection.is_routing,
            sink=sink if self.division is None else self.division.sink(sink),
            pass_=pass_.name,
            steps=request.steps,
            positions=request.positions,
            logit_paths=output_paths(self.loaded.structure) if decides else (),
            plants=plants,
            anchor=anchor,
            keeper=self.keeper,
            operators=self.selection.operators if with_operators else None,
            weights=request.weights,
            forwards=USUAL if pass_.whole else self.loaded.forwards,
            substitutes={} if pass_.is_own_truth else request.substitutes,
            on_step=None if by_block and after_forward is None else end_of_forward,
            on_block=advance if by_block else None,
        )

    def _run_pass(
        self, recorder: Recorder, pass_: Pass, writer: RunWriter | None,
        *, allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        """Run all groups; with ``writer`` the tokens are noted and the manifest kept up to date."""

        def note_tokens(group: list[int], result: GroupResult) -> None:
            if self.ranks is not None and not self.ranks.owns(group[0]):
                return
            assert writer is not None  # or it is not called
            note_changes(self.loaded.module, writer.manifest.model.derived, group[-1])
            tokens, like = writer.manifest.tokens, self.request.like
            for place, number in enumerate(group):
                sample = self.samples[number]
                sample.generated_ids = result.generated[place]
                sample.chosen_ids = result.chosen[place]
                sample.decoder_prompt_ids = result.decoder_prompt[place]
                if like is not None and self.request.regrouped:
                    theirs = like.manifest.tokens.samples[number]
                    del sample.chosen_ids[len(theirs.chosen_ids or theirs.generated_ids) :]
            tokens.texts.update(token_texts(self.loaded.tokenizer, result.seen_ids))
            writer.update_manifest()

        self.on_progress(pass_.name, 0, None, "")
        if pass_.whole:
            run_whole(self.session, recorder, self.samples, self.own_groups)
            return
        with widened(pass_, self.loaded, self.training) as wide, noting_calls(self.loaded, writer):
            run_pass(
                self.session,
                recorder,
                self.samples,
                self.own_groups,
                max_new_tokens=self.request.max_new_tokens,
                forced=[sample.generated_ids for sample in self.samples]
                if allowance is not None or self._is_own(pass_)
                else self.forced,
                on_group=None if writer is None else note_tokens,
                together=self._together,
                allowance=allowance,
            )
        if writer is not None and self.division is not None:
            self.division.join_tokens(self.samples, writer.manifest)
            writer.update_manifest()
        if wide is not None and wide.num_rounded:
            self._note(
                f"the model writes into narrower tensors of its own in {wide.num_rounded} places: "
                f"there the {pass_.name} pass is rounded to them"
            )
