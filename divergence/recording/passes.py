"""The passes of a capture: free, its repeats, anchored and whole.

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
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from divergence.errors import UsageError
from divergence.numerics.summaries import folds_of
from divergence.recording.anchors import Allowance, Enough
from divergence.recording.engines.engine import GroupResult, Session
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.together import Together
from divergence.recording.hooks import Anchor
from divergence.recording.machine import free_bytes
from divergence.recording.modules import Recorder
from divergence.recording.plant import Plant
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, step_selected
from divergence.recording.training import leaves
from divergence.recording.widening import Widening
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote, Repeatability, SampleTokens, Training, digest_tensor
from divergence.run.process_tuning import frozen_heap, quick_thread_switches
from divergence.run.reader import Run
from divergence.run.record import OWN_TRUTH, PassName
from divergence.run.writer import RunWriter

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
    with recorder.installed(), quick_thread_switches(), frozen_heap():
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
        if pass_.is_own_truth:
            stack.enter_context(_plain_attention(loaded.module))
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


@contextlib.contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Fused attention kernels have no float64: ``eager`` in their place."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention in (None, "eager", "sdpa") or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


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

    None where a site was not seen in every step, or where its tensors are not made of rows.
    """
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


def own_plants(plants: Sequence[Plant], notes: Mapping[str, ModuleNote]) -> list[Plant]:
    """The faults to plant in a pass that starts from the free one: not those in inputs that come
    from there, which have them already."""
    return [
        plant
        for plant in plants
        if not (plant.port.startswith("in") and notes[plant.path].role != "inner")
    ]


def run_whole(
    session: Session,
    recorder: Recorder,
    samples: Sequence[SampleTokens],
    groups: Sequence[list[int]],
) -> None:
    """Run every group that made decode steps once, whole.

    The last generated token was never fed forward, so it is left out.
    """
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
