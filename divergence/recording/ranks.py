"""Several processes that record one run: who holds which part of what."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from divergence.errors import ModelError, UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.numerics.sketches import sketch_bytes
from divergence.recording.engines.load import LoadedModel, tensor_plan
from divergence.recording.forwards import Sink
from divergence.recording.keeper import ShapeKeeper
from divergence.recording.plant import Plant
from divergence.recording.processes import Ranks
from divergence.recording.recorder import Recorder
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, step_selected
from divergence.recording.structure import inside, output_paths
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Manifest, ModuleNote, SampleTokens, StoreMode
from divergence.run.site import ROOT, escape_path, is_of_parameter, module_of, split_site

# The shapes of a forward, from the structure alone: what a dry run counts, and what a rank's parts
# are held against.


class ShapeCounter:
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
        counter = ShapeCounter(request.store)
        try:
            count_shapes(prefill, whole, selection, notes, [0] * batch, [tokens], counter)
            break
        except ModelError:
            experts: Any = getattr(whole.module, "set_experts_implementation", None)
            if experts is None or attempt:
                break
            experts("batched_mm")  # the one way to run experts whose shapes need no values
    return {site: item.shape for (_, site), (item, _) in counter.seen.items()}


def count_shapes(
    request: Request,
    loaded: LoadedModel,
    selection: SiteSelection,
    notes: Mapping[str, ModuleNote],
    group: Sequence[int],
    lengths: Sequence[int],
    counter: ShapeCounter | None = None,
) -> ShapeCounter:
    """Shapes of one group's prefill (step 0) and of one decode step (step 1)."""
    counter = counter or ShapeCounter(request.store)
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
            forwards = [_inputs(loaded, batch, tokens, step, request.stepping) for step in steps]
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
    parameters = inspect.signature(module.forward).parameters
    length = tokens if step == 0 else 1
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "logits_to_keep" in parameters and not train:
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


# What each rank holds of a tensor that a module handed over: known by rule, or not stated.
#
# Under transformers' tensor parallelism the tensors between modules are plain local ones. Three
# sources tell their meaning, and must not contradict one another:
#
# * the plan: what a style says of its module's input and output (transformers 5.23,
#   ``distributed/tensor_parallel.py``): ``colwise`` takes whole rows and gives its share of the
#   features, ``rowwise`` the reverse, its partial products summed before anybody sees them; the
#   embedding and a gathering head give whole tensors;
# * the shape: the whole model's, run once on the meta device with the same batch. A dimension that
#   is smaller here by exactly this rank's share (torch.chunk's) is divided; a tensor of the whole
#   shape is a copy, except inside modules that sum in the end (experts), of which nothing is said;
# * DTensor, where a model hands over one: its own placements.
#
# Where they leave it open the record says nothing, and a comparison counts the tensor as not
# compared. An unknown style leaves everything inside its block open.

LAST = "last"
_STYLES: dict[str, tuple[str | None, str | None]] = {
    # style → input, output; None: by shape
    "colwise": ("replicate", LAST),
    "rowwise": (LAST, "replicate"),
    "all_reduce": (None, "replicate"),
    **dict.fromkeys("replicated_with_grad_allreduce replicate local_params".split(), (None, None)),
    **dict.fromkeys(
        "colwise_gather_output colwise_rep rowwise_split_input rowwise_rep embedding_rowwise "
        "embedding_colwise mla_kv_a_proj moe_tp_experts".split(),
        ("replicate", "replicate"),
    ),
}
_SUMMING = frozenset({"moe_tp_experts", "all_reduce"})
"""Inside these a tensor of the whole shape may be a term of a sum."""
_INTERLEAVED = frozenset({"packed_colwise"})
"""Several matrices in one, each divided: the shares laid side by side are not the whole."""


class TensorPlacement:
    """Says for each site what of it one rank of the ``tp`` axis holds.

    ``plan``: module path → style. ``whole``: site → shape in the undivided model, for the batch
    whose prefill decides a site, once for every step. ``containers``: the modules that hold the
    blocks; their inputs are given to all ranks. ``blocks``: all of them. What has no part in any
    that the plan divides (a tower of pictures, for the shapes of a text) every rank has whole.
    """

    def __init__(
        self,
        plan: Mapping[str, str],
        whole: Mapping[str, tuple[int, ...]],
        *,
        size: int,
        place: int,
        containers: Collection[str] = (),
        blocks: Collection[str] = (),
    ) -> None:
        self._plan, self._whole = plan, whole
        self._blocks = {block for block in blocks if any(inside(path, (block,)) for path in plan)}
        self._containers = frozenset(containers)
        self._size, self._place = size, place
        self._known: dict[str, str | None] = {}
        self._summing = [path for path, style in plan.items() if style in _SUMMING]
        strange = [path for path, style in plan.items() if style not in {*_STYLES, *_INTERLEAVED}]
        self._strange = {path.rpartition(".")[0] or ROOT for path in strange}

    def __call__(self, site: str, shape: tuple[int, ...], *, settled: bool) -> str | None:
        """The word for the record, or None where nothing can be said. ``settled``: is this the
        batch and the step that ``whole`` was made for?"""
        if (settled or site not in self._whole) and site not in self._known:
            self._known[site] = self._decide(site, shape)
        word = self._known.get(site)
        if word is not None and word.startswith("shard:") and int(word[6:]) >= len(shape):
            return None
        return word

    def _decide(self, site: str, shape: tuple[int, ...]) -> str | None:
        path, port = module_of(site), split_site(site)[1]
        style = self._plan.get(path)
        if style in _INTERLEAVED:
            return self._by_shape(site, shape) if port == "in" else None
        if inside(path, self._strange):
            return None
        if path in self._containers and port.startswith("in"):  # before any division
            return "replicate"
        by_style = None
        if style is not None and port in ("in", "out"):
            by_style = _STYLES[style][port == "out"]
            if by_style == LAST:
                by_style = f"shard:{len(shape) - 1}"
        seen = self._by_shape(site, shape)
        if by_style is not None:
            # where the shapes are known they must agree
            return by_style if site not in self._whole or seen == by_style else None
        if seen == "replicate" and any(path.startswith(prefix + ".") for prefix in self._summing):
            return None
        divided = inside(path, {*self._blocks, *self._plan})
        apart = not (divided or any(inside(planned, (path,)) for planned in self._plan))
        return "replicate" if self._blocks and apart and site not in self._whole else seen

    def _by_shape(self, site: str, shape: tuple[int, ...]) -> str | None:
        """Return what the shape says of the placement."""
        whole = self._whole.get(site)
        if whole is None or len(whole) != len(shape):
            return None
        different = [dim for dim, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
        if not different:
            return "replicate"
        dim = different[0]
        if len(different) == 1 and shape[dim] == share_of(whole[dim], self._size, self._place):
            return f"shard:{dim}"
        return None


def share_of(length: int, size: int, place: int) -> int:
    """Return how much of ``length`` place ``place`` of ``size`` gets: torch.chunk's division."""
    chunk = -(-length // size)
    return max(0, min(chunk, length - place * chunk))


# What changes in a capture when several ranks make it: whose tensor it is, and what of it.
#
# ``Division`` stands between the recorder and the writer. It lets through the tensors that this
# rank answers for, says how each lies on the mesh, and joins the ranks' parts of the manifest.
# Everything else in a capture goes on as if this rank were alone.

_STAGE = 10**6
"""Added to the order of each pipeline stage: what it runs comes after the stage before it."""


def check_request(request: Request, selection: SiteSelection, axes: Collection[str]) -> None:
    """Raise UsageError for what needs the whole model in one process, or leaves every placement
    open."""
    if "tp" in axes and not step_selected(request.steps, 0):
        raise UsageError(
            f"--mesh tp needs the prefill, and --steps {request.steps} leaves it out: what a rank "
            "holds of a tensor is settled there",
            hint=f"--steps 0,{request.steps}",
        )
    operators = "operators are seen whole in one process"
    asked = (
        ("--escalate", request.escalate, "the float32 pass is made by one process"),
        ("ops@ sites", bool(selection.operators), operators),
        ("--substitute", bool(request.substitutes), operators),
    )
    for name, wanted, why in asked:
        if wanted:
            raise UsageError(
                f"{name} cannot be combined with --mesh: {why}",
                hint="repeat the run without torchrun: divergence capture --like RUN -o RUN2",
            )


class Division:
    """This rank's share of one capture."""

    def __init__(
        self,
        ranks: Ranks,
        loaded: LoadedModel,
        request: Request,
        selection: SiteSelection,
        notes: Mapping[str, ModuleNote],
        samples: Sequence[SampleTokens],
        groups: Sequence[list[int]],
    ) -> None:
        check_request(request, selection, ranks.sizes)
        self.ranks = ranks
        module: Any = loaded.module
        together = bool(getattr(module, "_is_fsdp_managed_module", False))
        self.groups = ranks.deal(groups, together=together)
        blocks = [path for path, note in notes.items() if note.role == "block"]
        self._containers = {
            path
            for path in notes
            if path == ROOT or any(block.startswith(path + ".") for block in blocks)
        }
        self._stages: dict[str, set[int]] | None = None
        """By module path, the pipeline stages that have it, and not a stand-in."""
        if "pp" in ranks.sizes:
            own = {
                escape_path(name)
                for name, part in module.named_modules()
                if type(part).__name__ != "PipelineIdentityLayer"
            }
            self._stages = {path: set() for path in notes}
            for place, paths in ranks.gather((ranks.places["pp"], own)):
                for path in paths & self._stages.keys():
                    self._stages[path].add(place)
        self._first = self.groups[0][0] if self.groups else -1
        self._tensor: TensorPlacement | None = None
        if "tp" in ranks.sizes and self.groups:
            group = self.groups[0]
            length = samples[group[0]].num_padded
            self._tensor = TensorPlacement(
                tensor_plan(module),
                forward_shapes(request, loaded, selection, notes, batch=len(group), tokens=length),
                size=ranks.sizes["tp"],
                place=ranks.places["tp"],
                containers=self._containers,
                blocks=blocks,
            )
        self._owned: dict[str, bool] = {}

    def sink(self, sink: Sink) -> _Share:
        return _Share(self, sink)

    def has(self, path: str) -> bool:
        """Does this rank run the module? Of a pipeline a stage has its own alone."""
        return self._stages is None or self.ranks.places["pp"] in self._stages.get(path, ())

    def plants(self, plants: Sequence[Plant]) -> list[Plant]:
        """Those that this rank gets."""
        rank = self.ranks.rank
        return [plant for plant in plants if plant.rank in (None, rank) and self.has(plant.path)]

    def answers(self, sample: int, site: str) -> bool:
        """Is this tensor this rank's to record?"""
        if is_of_parameter(site):
            return True
        if self.ranks.idle or not self.ranks.owns(sample):
            return False
        if self._stages is None:
            return True
        if site not in self._owned:
            path, port = module_of(site), split_site(site)[1]
            own, last = self.ranks.places["pp"], self.ranks.sizes["pp"] - 1
            if path in self._containers:  # it begins on the first stage and ends on the last
                answers = own == (0 if port.startswith("in") else last)
            else:  # of several stages' (a rotary table) the first has what one process would see
                answers = own == min(self._stages.get(path) or [own])
            self._owned[site] = answers
        return self._owned[site]

    def order(self, order: int) -> int:
        return order + _STAGE * self.ranks.places.get("pp", 0)

    def place(
        self, site: str, item: CapturedTensor, *, sample: int, step: int, pass_: str
    ) -> tuple[str, ...] | None:
        """The record's placement; None where one axis leaves it open."""
        words: list[str] = []
        for axis in self.ranks.mesh.axes:
            word: str | None
            if is_of_parameter(site):  # of all prompts, reduced among the ranks
                word = (item.placement or {}).get(axis.name, "replicate")
            elif axis.name != "tp":
                word = "single" if axis.name == "pp" or self.ranks.dealt else "replicate"
            elif item.placement is not None:  # where it has no word the shape would mislead
                word = item.placement.get("tp")
            elif self._tensor is None:
                word = None
            else:
                settled = sample == self._first and step == 0 and pass_ != "whole"
                word = self._tensor(site, item.shape, settled=settled)
            if word is None:
                return None
            words.append(word)
        return tuple(words)

    def join_tokens(self, samples: Sequence[SampleTokens], manifest: Manifest) -> None:
        """Takes over the tokens of other ranks' prompts, and their texts."""
        owned = [group for group in self.groups if self.ranks.owns(group[0])]
        own = {number: samples[number] for group in owned for number in group}
        for others, texts in self.ranks.gather((own, manifest.tokens.texts)):
            for number, sample in others.items():
                samples[number].generated_ids = sample.generated_ids
                samples[number].chosen_ids = sample.chosen_ids
                samples[number].decoder_prompt_ids = sample.decoder_prompt_ids
            manifest.tokens.texts = texts | manifest.tokens.texts

    def count(self, manifest: Manifest, record_digests: dict[str, str]) -> None:
        """Adds up all ranks' sizes, warnings and repeatability, once all have written.
        ``record_digests``: of this rank's file; those of all go into the manifest."""
        repeated, settings = manifest.repeatability, manifest.settings
        own = (
            manifest.sizes,
            repeated,
            settings.nondeterministic_warnings,
            settings.cpu_fallbacks,
            record_digests,
        )
        for rank, (sizes, other, warnings, fallbacks, digests) in enumerate(self.ranks.gather(own)):
            manifest.record_digests |= digests
            if rank == self.ranks.rank:
                continue
            _add(manifest.sizes, sizes, sizes.__struct_fields__)
            _add(repeated, other, ("num_compared", "num_different"))
            if not repeated.begins:  # of the first rank that differs: others may inherit it
                repeated.num_forwards, repeated.begins = other.num_forwards, other.begins
            if repeated.first_difference is None and other.first_difference is not None:
                repeated.first_difference = f"{other.first_difference} on rank {rank}"
            settings.nondeterministic_warnings = list(
                dict.fromkeys([*settings.nondeterministic_warnings, *warnings])
            )
            settings.cpu_fallbacks = list(dict.fromkeys([*settings.cpu_fallbacks, *fallbacks]))


def _add(total: msgspec.Struct, other: msgspec.Struct, names: Sequence[str]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(other, name))


class _Share:
    """Passes on the tensors that this rank answers for, with their placement."""

    def __init__(self, division: Division, sink: Sink) -> None:
        self._division, self._sink = division, sink

    def put(
        self,
        item: CapturedTensor,
        *,
        pass_: Any,
        sample: int,
        step: int,
        site: str,
        order: int,
        **rest: Any,
    ) -> None:
        division = self._division
        if not division.answers(sample, site):
            return
        self._sink.put(
            item,
            pass_=pass_,
            sample=sample,
            step=step,
            site=site,
            order=division.order(order),
            placement=division.place(site, item, sample=sample, step=step, pass_=pass_),
            **rest,
        )


class LocalKeeper:
    """Keeps this rank's part of a DTensor, with its placement along the axes of its mesh."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        local = getattr(tensor, "to_local", None)
        if local is None:
            kept: CapturedTensor = self._keeper.keep(tensor)
            return kept
        item: CapturedTensor = self._keeper.keep(local())
        divided: Any = tensor  # a DTensor
        names = divided.device_mesh.mesh_dim_names or ()
        item.placement = {
            name: word
            for name, placement in zip(names, divided.placements, strict=False)
            if (word := _word(placement, tensor.ndim)) is not None
        }
        return item


def _word(placement: Any, ndim: int) -> str | None:
    """DTensor's placement in the words of the format; None for one that it has no word for."""
    if placement.is_replicate():
        return "replicate"
    if placement.is_partial():
        how = {"sum": "sum", "avg": "mean", "max": "max", "min": "min"}.get(placement.reduce_op)
        return None if how is None else f"partial:{how}"
    if type(placement).__name__ == "Shard":  # a strided one is none of contiguous parts
        return f"shard:{placement.dim % ndim}"
    return None
