"""Relates the weights of two runs that differ, where their checkpoints are at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.comparison.preflight import match_parameters, moved
from divergence.errors import DivergenceError
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.command import Command, command
from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.run.site import starred

if TYPE_CHECKING:
    import torch

    from divergence.domains.weights.relations import Relation


def other_weights(a: Run, b: Run) -> tuple[list[Fact], list[Command]]:
    """What relates the first of each kind of parameter that differs, as far as both checkpoints
    hold what ran, and the command that relates all; nothing where one lies elsewhere."""
    models = [run.manifest.model for run in (a, b)]
    sources = [expanded(model.source) for model in models]
    if sources[0] == sources[1] or not all(source.exists() for source in sources):
        return [], []
    offered = [command("weights", *(model.source for model in models))]
    try:
        from divergence.domains.weights.checkpoint import open_checkpoint
        from divergence.domains.weights.relations import Relation, relation
    except ImportError:  # runs are compared without torch, and weights are not
        return [], offered
    try:
        stored = [open_checkpoint(str(source)).tensors for source in sources]
    except DivergenceError:
        return [], offered
    kinds: dict[str, tuple[str, str]] = {}
    pairs = match_parameters(models[0].digests, models[1].digests).pairs
    for names in pairs.items():
        if models[0].digests[names[0]] != models[1].digests[names[1]]:
            kinds.setdefault(starred(names[0]), names)
    groups: dict[Fact, list[tuple[str, Relation]]] = {}
    for names in kinds.values():
        values: list[torch.Tensor] = []
        for name, model, tensors in zip(names, models, stored, strict=True):
            note = model.parameters.get(name)
            if note is not None and name in tensors:
                value = tensors[name].read().to(format_named(note.dtype).torch_dtype)
                values += [value] * (digest_tensor(value) == model.digests[name])
        if len(values) == 2:
            other = moved(*names, models[0], models[1], pairs)
            how = relation(*values) if other is None else Relation("moved", False, other)
            groups.setdefault(how.kind, []).append((names[0], how))
    relations = [
        fact(
            "preflight.relation", names=[name for name, _ in some], how=some[0][1].fact, apart=None
        )
        for some in groups.values()
    ]
    return [fact("preflight.relations", relations=relations)] if relations else [], offered
