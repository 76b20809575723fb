"""The passes of a capture: what each computes, and what it is held against.

Free: the model runs on its own values (tokens forced where a run is repeated). Anchored: every
block gets the recorded input of the run that is repeated, so that a difference at its output was
made in it; caches are made from those inputs. Escalated: anchored, and every operator in float32;
without a run that is repeated it is anchored to this run's own free pass.

Whole: one forward over the prompt and every token that was fed to decoding. A decode step with a
cache must compute what one forward over the whole sequence computes for that token. So the tokens
of this run's own free pass are run once more without a cache, and each block gets as input the rows
that the free pass recorded. A difference in a block's output, in the row of a decoded token, was
made there: by the cache or the state, or by the kernel of the other shape. Only those rows are
kept.

Truth: anchored to this run's own free pass, in float64 (recording.widening), on the CPU where the
device has none; with ``--truth full`` also free, where errors add up and tokens flip.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from divergence.errors import UsageError
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.numerics.sketches import folds_of
from divergence.recording.engines.engine import DEFAULT as TRANSFORMERS
from divergence.recording.engines.engine import GroupStep, Session
from divergence.recording.engines.load import LoadedModel
from divergence.recording.forwards import Sink
from divergence.recording.machine import free_bytes
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, step_selected
from divergence.recording.structure import compiled_regions
from divergence.recording.widening import Widening, check_device
from divergence.run.captured import CapturedTensor, Slot
from divergence.run.contents import why_no_bytes
from divergence.run.manifest import ModuleNote, Repeatability, SampleTokens, Tokens, digest_tensor
from divergence.run.reader import COLUMNS, OwnFloor, Run
from divergence.run.record import OWN_TRUTH, PassName, Record
from divergence.run.site import is_of_parameter, is_scaled_with_loss, module_of
from divergence.run.storage import Location, Url
from divergence.run.writer import RunWriter
from divergence.words import size

OWN_KEPT_BYTES = 256 << 20
"""Widened weights that a capture's own truth keeps from forward to forward, where they are no more:
it takes an operator's memory beside the model, not a second model's."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all prompts."""

    name: PassName
    anchored_to: Literal["like", "own"] | None = None
    """Whose recorded inputs each block gets: those of the run that is repeated, or of this run's
    own free pass."""
    compute_dtype: torch.dtype | None = None
    """What every operator is computed in; None for the model's own dtype."""
    whole: bool = False
    """Prompt and fed tokens in one forward."""
    device: str | None = None
    """Where every operator is computed; None for where the model lies."""
    operators: bool = True
    """Are operators recorded? Where there are anchored passes, in these: there an error is where it
    is made."""

    @property
    def is_own_truth(self) -> bool:
        """Is it of this run's own weights in float64, anchored to its own free pass or free?"""
        return self.name in OWN_TRUTH


def planned_passes(
    request: Request,
    session: Session,
    selection: SiteSelection,
    notes: Mapping[str, ModuleNote],
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[list[Pass], list[str]]:
    """Plan the passes of a capture, but for its own truth; and say why what was asked for cannot be
    made."""
    loaded, lacks = session.loaded, session.lacks
    like, passes, missed = request.like, [Pass("free", compute_dtype=compute_dtype)], []
    escalate = request.escalate
    if like is not None and (request.anchor or escalate):
        unfit = why_no_anchor(like, notes)
        if "anchor" in lacks:
            escalate = False
            missed.append(f"no anchored pass: {lacks['anchor']}")
        elif unfit is not None:
            what = "anchored or escalated" if escalate else "anchored"
            escalate = False
            missed.append(f"no {what} pass: {like.path} cannot anchor one, {unfit}")
        elif request.anchor:
            passes.append(Pass("anchored", "like", compute_dtype))
    if escalate:
        reason = lacks.get("anchor") or lacks.get("escalate")
        if reason is None and all(p.dtype.itemsize >= 4 for p in loaded.module.parameters()):
            reason = "the model is in float32, as such a pass would be"
        elif reason is None and like is None and request.store != "full":
            reason = (
                "without --like it repeats this run's own free pass, of which --store "
                f"{request.store} keeps no bytes"
            )
        if reason is None:
            passes.append(Pass("escalated", "own" if like is None else "like", torch.float32))
        else:
            missed.append(f"no escalated pass: {reason}")
    if request.whole:
        reason = lacks.get("whole") or _why_not_whole(request, loaded.task, selection, notes)
        if reason is None:
            passes.append(Pass("whole", "own", whole=True))
        else:
            missed.append(f"no whole pass: {reason}")
    place = "like" if any(planned.anchored_to == "like" for planned in passes) else None
    return [replace(planned, operators=planned.anchored_to == place) for planned in passes], missed


def _why_not_whole(
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


def why_no_anchor(run: Run, notes: Mapping[str, ModuleNote]) -> str | None:
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
    idle = tuple(f"{path}." for path in plan.not_called)  # as the tower of a model without pictures
    missing = [
        path
        for path, note in notes.items()
        if note.role == "block" and path not in inputs and not f"{path}.".startswith(idle)
    ]
    others = [p for p, note in plan.modules.items() if note.role == "block" and p not in notes]
    if missing and others:
        return f"its blocks have other names ({others[0]}, here {missing[0]}): wrap the model alike"
    if missing:
        return (
            f"it holds no input of {missing[0]}"
            + (f" and {len(missing) - 1} more blocks" if len(missing) > 1 else "")
            + f" (its sites: {', '.join(plan.sites)}); capture it again with --sites blocks"
        )
    return None


def why_not_anchored(own: Run, notes: Mapping[str, ModuleNote]) -> str | None:
    """None if the free pass holds what the truth starts from, else why it does not."""
    if not any(note.role == "block" for note in notes.values()):
        return "the model has no blocks"
    return why_no_anchor(own, notes)


@contextlib.contextmanager
def widened(pass_: Pass, loaded: LoadedModel, step: GroupStep) -> Iterator[Widening | None]:
    """The dtype that a pass computes in. Widened weights are kept if there is ample room; those of
    a training step are wide for its length, since their gradients are as wide as they are."""
    with contextlib.ExitStack() as stack:
        model: Any = loaded.module
        if pass_.is_own_truth and hasattr(model, "set_attn_implementation"):
            attention = getattr(model.config, "_attn_implementation", None)
            if attention not in (None, "eager", "sdpa"):  # fused kernels have no float64
                model.set_attn_implementation("eager")
                stack.callback(model.set_attn_implementation, attention)
        stack.enter_context(step.in_dtype(pass_.compute_dtype))
        if pass_.compute_dtype is None:
            yield None
            return
        # a tensor class that holds codes has no memory of its own
        weights = [
            parameter for parameter in loaded.module.parameters() if not hasattr(parameter, "qdata")
        ]
        needed = sum(weight.numel() for weight in weights) * pass_.compute_dtype.itemsize
        room = OWN_KEPT_BYTES if pass_.is_own_truth else free_bytes(loaded.device) // 2
        keep = needed if needed <= room and not step.training.train else 0
        widening = Widening(
            pass_.compute_dtype,
            weights=weights,
            keep_bytes=keep,
            codes=loaded.codes,
            device=pass_.device,
        )
        yield stack.enter_context(widening)


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
    if not session.makes_forwards:
        raise UsageError(f"{option}: the engine {session.note().name} cannot be told")
    if option == "--no-hooks":
        return
    if loaded.task != "causal-lm":
        raise UsageError(f"{option} is for causal language models, and this is an {loaded.task}")
    if option != "--prefill-chunk":
        return
    if not request.use_cache:
        raise UsageError("--prefill-chunk feeds a cache, and with --no-cache there is none")
    if not session.has_cache:
        raise UsageError(f"--prefill-chunk feeds a cache, and {session.note().name} runs without")
    if "past_key_values" not in inspect.signature(loaded.module.forward).parameters:
        raise UsageError(
            "--prefill-chunk needs a cache of keys and values, and this model keeps a state"
        )


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


class RecordedInputs:
    """An Anchor over ``run``'s free pass, for ``samples`` that run in ``groups``."""

    def __init__(
        self,
        run: Run,
        samples: Sequence[SampleTokens],
        groups: Sequence[list[int]],
        loss_scale: float | None = None,
    ) -> None:
        """``loss_scale``: what the loss is multiplied by here; gradients are given so, too."""
        self._run, self._samples = run, samples
        self._scale = (loss_scale or 1.0) / (run.manifest.training.loss_scale or 1.0)
        recorded = run.manifest.tokens
        self._alike = Tokens(samples=list(samples), groups=list(groups)).layout == recorded.layout
        self._groups = {group[0]: group for group in groups}
        self._places = {
            number: (group, row) for group in recorded.groups for row, number in enumerate(group)
        }
        blocks = {path for path, note in run.manifest.plan.modules.items() if note.role == "block"}
        run.expect(
            record
            for record in run.records
            if record.pass_ == "free" and ":in" in record.site and module_of(record.site) in blocks
        )

    def __call__(self, sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
        """``own`` (B, ...) with the recorded rows in it; of the last tokens alone (B, n, ...) where
        no more were recorded. None where nothing was (an input beside the stream, say), or it does
        not fit: the own value stays."""
        if self._alike or is_of_parameter(site):  # a parameter: of all prompts, behind the first
            return self._read(sample, step, site)
        group = self._groups[sample]
        recorded = [self._rows(number, step, site) for number in group]
        present = [rows for rows in recorded if rows is not None]
        if not present or own.ndim < 2:
            return None
        records = (self._run.find(("free", self._places[n][0][0], step, site)) for n in group)
        if any(record is not None and record.positions is not None for record in records):
            # the last tokens alone were kept, as of what enters the head
            return torch.cat(present) if len(present) == len(group) else None
        if own.shape[0] == 1 < len(group):  # one table for all
            first = present[0]
            same = all(rows.shape == own.shape and torch.equal(rows, first) for rows in present)
            return first if same else None
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

    def _read(self, sample: int, step: int, site: str) -> torch.Tensor | None:
        record = self._run.find(("free", sample, step, site))
        if record is None or not self._run.has_bytes(record):
            return None
        tensor = self._run.read(record)
        scaled = self._scale != 1.0 and is_scaled_with_loss(site)
        return tensor * self._scale if scaled else tensor

    def _rows(self, number: int, step: int, site: str) -> torch.Tensor | None:
        """A prompt's own rows (1, T, ...) in the recorded run, without the pads it had there."""
        group, row = self._places[number]
        tensor, there = self._read(group[0], step, site), self._run.manifest.tokens.samples[number]
        if tensor is None:
            return None
        pads = there.num_left_pad, there.num_right_pad
        if len(group) > 1:
            if tensor.ndim < 2 or (tensor.shape[0] == 1 and any(pads)):
                return None
            if tensor.shape[0] == len(group):
                tensor = tensor[row : row + 1]
        length = len(there.prompt_ids)
        if any(pads) and tensor.ndim > 2 and tensor.shape[1] == sum(pads) + length:
            tensor = tensor[:, pads[0] : tensor.shape[1] - pads[1]]
        return tensor

    def _place(self, number: int, rows: torch.Tensor, own: torch.Tensor) -> slice | None:
        """Find where in its row of ``own`` a prompt's recorded tokens belong."""
        if rows.shape[0] != 1 or rows.shape[2:] != own.shape[2:]:
            return None
        sample = self._samples[number]
        end = sample.num_left_pad + len(sample.prompt_ids)
        padded = own.ndim > 2 and own.shape[1] == end + sample.num_right_pad
        if padded and rows.shape[1] == len(sample.prompt_ids):
            return slice(sample.num_left_pad, end)
        return slice(None) if rows.shape[1] == own.shape[1] else None


# What becomes of the tensors of a pass that is not simply written down.


class RepeatSink:
    """Holds a repeated run's digests against those of ``first``, the same run's free pass."""

    def __init__(self, first: Run, result: Repeatability) -> None:
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
        earlier = self._first.find(("free", sample, step, site))
        self._result.num_compared += 1
        if sample not in self._begun and (sample, step) not in self._forwards:
            self._forwards.add((sample, step))
            self._result.num_forwards += 1
        same = earlier is not None and (
            earlier.fold == item.fold if item.digest is None else earlier.xxh3 == item.digest
        )
        if not same:
            self._result.num_different += 1
            if self._result.first_difference is None:
                self._result.first_difference = f"{site} (prompt {sample}, step {step})"
            if sample not in self._begun:
                self._begun[sample] = step
                self._result.begins[site] = self._result.begins.get(site, 0) + 1


class FloorSink:
    """Sums a run's own error while its float64 pass runs (run.reader.OwnFloor).

    A's recorded tensor is read as its inputs are; the float64 one goes on to ``sink``, if it is to
    be kept. The sums are written when the pass is over, into shards of their own: a golden takes
    them along and leaves the tensors behind. ``own``: the run whose free pass it is anchored to."""

    def __init__(self, own: Run, notes: Mapping[str, ModuleNote], sink: Sink | None) -> None:
        self._own, self._notes, self._sink = own, notes, sink
        self._rows: dict[tuple[int, str], dict[int, np.ndarray]] = defaultdict(dict)
        self._last: tuple[CapturedTensor | None, Slot | None, torch.Tensor | None] = (None,) * 3
        """The last output, with its place: it may come by again as that of the module around its
        own, when the writer has let go of its bytes."""
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

    def put(
        self, item: CapturedTensor, *, sample: int, step: int, site: str, order: int, **rest: Any
    ) -> None:
        record = self._free[site].get((sample, step))
        if ":out" in site and self._last[0] is not item:
            self._last = item, item.slot, item.tensor
        if record is not None and (tensor := self._last[2]) is not None:
            with _disable_current_modes():
                self._rows[sample, site][step] = self._sums(record, tensor)
            self._orders[site] = order
        if self._sink is not None:
            self._sink.put(item, sample=sample, step=step, site=site, order=order, **rest)

    def _sums(self, record: Record, truth: torch.Tensor) -> np.ndarray:
        """Sum each row, and add the rows to the channels'."""
        columns = record.shape[-1]
        num_rows = record.numel // columns
        if tuple(truth.shape) != record.shape:
            return np.full((num_rows, len(COLUMNS)), np.nan)
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
            if self._is_block(record.site):
                good = np.isfinite(squares).all(axis=1)
                sums = np.stack([squares[good].sum(axis=0), np.square(a[good]).sum(axis=0)])
                self._channels[record.site] = self._channels.get(record.site, 0.0) + sums
            seconds = (squares, np.square(a), np.square(update))
            roots = [np.sqrt(part.sum(axis=1)) for part in seconds]
            fourth = np.square(squares).sum(axis=1) ** 0.25
        return np.stack([*roots, fourth], axis=1)

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
        item, order = CapturedTensor(tensor), self._orders[site]
        writer.put(item, pass_="floor", sample=sample, step=step, site=site, order=order)


# The truth that a run carries.
#
# The weights are there, so it takes no second command: each block gets the input that the free pass
# recorded. It is made last, so that nothing else that is recorded depends on it. ``auto`` keeps to
# a share of the time that the capture has taken until then: the prompts' prefills first, then as
# many decode steps as fit, equally long for each group of prompts. What was covered stands in the
# manifest.

DEFAULT_TRUTH = "auto"
"""Where no run is repeated and nothing else is asked for."""
_BEYOND = 16.0
"""Times what rounding makes, from which on a capture says that its own float64 disagrees: more than
the widest limit of one token's ratio, which is 12. It decides a note of the capture alone."""


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
    if request.stepping and not keeps_tensors(request):
        return "of a training step there is no floor; --store full keeps its truth"
    model, elsewhere = session.loaded.module, other_device(device) is not None
    if elsewhere and (request.stepping or session.loaded.codes is not None):
        what = "gradients must lie" if request.stepping else "codes are dequantised"
        return f"{device} has no float64, and there {what}; {plan} on a CPU"
    if request.stepping and mode_of(request) != "full":  # gradients are as wide as their parameters
        needed = 2 * 8 * sum(parameter.numel() for parameter in model.parameters())
        if needed > free_bytes(session.loaded.device) // 2 > 0:
            return (
                f"of a training step it takes {needed / 2**30:,.1f} GiB, for all weights and "
                "their gradients in float64; --truth full makes one"
            )
    return None


def other_device(device: str) -> str | None:
    """Name where the operators of a truth are computed, if ``device`` has no float64."""
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
            max(floor_weights(form, num_features=own.shape[-1]))
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
