"""What changes in a capture when several ranks make it: whose tensor it is, and what of it.

``Division`` stands between the recorder and the writer. It lets through the tensors that this rank
answers for, says how each lies on the mesh, and joins the ranks' parts of the manifest. Everything
else in a capture goes on as if this rank were alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from divergence.errors import UsageError
from divergence.recording.dry_run import forward_shapes
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.placement import tensor_plan
from divergence.recording.hooks.plant import Plant
from divergence.recording.hooks.sink import Sink
from divergence.recording.ranks.placement import TensorPlacement
from divergence.recording.ranks.processes import Ranks
from divergence.recording.request import Request
from divergence.recording.selection import SiteSelection, step_selected
from divergence.run.schema.manifest import Environment, Manifest, ModuleNote, SampleTokens
from divergence.run.schema.site import ROOT, escape_path, module_of, of_parameter, split_site
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["Division", "LocalKeeper", "check_request"]

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
    if request.train and not {"dp", "fsdp"} >= set(axes):
        raise UsageError(
            f"--train with --mesh {','.join(axes)}: a step is recorded among dp or fsdp ranks",
            hint="--mesh dp, or --mesh fsdp",
        )
    if request.train and len(axes) > 1:
        raise UsageError("--train with --mesh of two axes", hint="--mesh dp, or --mesh fsdp")
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
        self._stages = self._who_has_what(module, notes) if "pp" in ranks.sizes else None
        self._first = self.groups[0][0] if self.groups else -1
        self._tensor: TensorPlacement | None = None
        if "tp" in ranks.sizes and self.groups:
            group = self.groups[0]
            first = samples[group[0]]
            length = first.num_padded
            self._tensor = TensorPlacement(
                tensor_plan(module),
                forward_shapes(request, loaded, selection, notes, batch=len(group), tokens=length),
                size=ranks.sizes["tp"],
                place=ranks.places["tp"],
                containers=self._containers,
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
        if of_parameter(site):
            return True
        if self.ranks.idle or not self.ranks.owns(sample):
            return False
        if self._stages is None:
            return True
        known = self._owned.get(site)
        if known is None:
            known = self._owned[site] = self._stage_answers(site)
        return known

    def order(self, order: int) -> int:
        return order + _STAGE * self.ranks.places.get("pp", 0)

    def place(
        self, site: str, item: CapturedTensor, *, sample: int, step: int, pass_: str
    ) -> tuple[str, ...] | None:
        """The record's placement; None where one axis leaves it open."""
        words: list[str] = []
        for axis in self.ranks.mesh.axes:
            word: str | None
            if of_parameter(site):  # of all prompts, reduced among the ranks
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
        mine = {number: samples[number] for group in owned for number in group}
        for theirs, texts in self.ranks.gather((mine, manifest.tokens.texts)):
            for number, sample in theirs.items():
                samples[number].generated_ids = sample.generated_ids
                samples[number].chosen_ids = sample.chosen_ids
                samples[number].decoder_prompt_ids = sample.decoder_prompt_ids
            manifest.tokens.texts = texts | manifest.tokens.texts

    def note_environments(self, manifest: Manifest) -> None:
        """Notes the mesh, and the ranks' machines where they are not all alike."""
        environments: list[Environment] = self.ranks.gather(manifest.environment)
        differing = any(environment != environments[0] for environment in environments)
        manifest.mesh = msgspec.structs.replace(
            self.ranks.mesh, environments=environments if differing else []
        )

    def count(self, manifest: Manifest, record_digests: dict[str, str]) -> None:
        """Adds up all ranks' sizes, warnings and repeatability, once all have written.
        ``record_digests``: of this rank's file; those of all go into the manifest."""
        repeated, settings = manifest.repeatability, manifest.settings
        mine = (manifest.sizes, repeated, settings.nondeterministic_warnings,
                settings.cpu_fallbacks, record_digests)  # fmt: skip
        for rank, (sizes, theirs, warnings, fallbacks, digests) in enumerate(
            self.ranks.gather(mine)
        ):
            manifest.record_digests |= digests
            if rank == self.ranks.rank:
                continue
            _add(manifest.sizes, sizes, sizes.__struct_fields__)
            _add(repeated, theirs, ("num_compared", "num_different"))
            if repeated.first_difference is None and theirs.first_difference is not None:
                repeated.first_difference = f"{theirs.first_difference} on rank {rank}"
            settings.nondeterministic_warnings = list(
                dict.fromkeys([*settings.nondeterministic_warnings, *warnings])
            )
            settings.cpu_fallbacks = list(dict.fromkeys([*settings.cpu_fallbacks, *fallbacks]))

    def _who_has_what(
        self, module: torch.nn.Module, notes: Mapping[str, ModuleNote]
    ) -> dict[str, set[int]]:
        """Module path → the pipeline stages that have it, and not a stand-in."""
        own = {
            escape_path(name)
            for name, part in module.named_modules()
            if type(part).__name__ != "PipelineIdentityLayer"
        }
        stages: dict[str, set[int]] = {path: set() for path in notes}
        for place, paths in self.ranks.gather((self.ranks.places["pp"], own)):
            for path in paths & stages.keys():
                stages[path].add(place)
        return stages

    def _stage_answers(self, site: str) -> bool:
        """A container of blocks begins on the first stage and ends on the last; of a module on
        several stages (a rotary table) the first has the input that one process would see."""
        path, port = module_of(site), split_site(site)[1]
        own, last = self.ranks.places["pp"], self.ranks.sizes["pp"] - 1
        if path in self._containers:
            return own == (0 if port.startswith("in") else last)
        return own == min((self._stages or {}).get(path) or [own])


def _add(total: msgspec.Struct, other: msgspec.Struct, names: Sequence[str]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(other, name))


class _Share:
    """Passes on the tensors that this rank answers for, with their placement."""

    def __init__(self, division: Division, sink: Sink) -> None:
        self._division, self._sink = division, sink

    def put(
        self, item: CapturedTensor, *, pass_: Any, sample: int, step: int, site: str, order: int,
        **rest: Any,
    ) -> None:  # fmt: skip
        division = self._division
        if not division.answers(sample, site):
            return
        self._sink.put(
            item, pass_=pass_, sample=sample, step=step, site=site, order=division.order(order),
            placement=division.place(site, item, sample=sample, step=step, pass_=pass_), **rest,
        )  # fmt: skip


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
