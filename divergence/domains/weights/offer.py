"""Relates the weights of two runs that differ, where their checkpoints are at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from divergence.comparison.preflight import holders_of, match_parameters, moved, tied_alone
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.command import Command, command
from divergence.run.manifest import ModelIdentity, digest_tensor
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.run.site import starred

if TYPE_CHECKING:
    import torch

    from divergence.domains.weights.checkpoint import Stored
    from divergence.domains.weights.relations import Relation

_MOST_WORK = 2**43
"""Products of numbers where rows are looked for among each other, at most: some minutes."""


def other_weights(a: Run, b: Run) -> tuple[list[Fact], list[Command]]:
    """What relates the first of each kind of parameter that differs, as far as both checkpoints
    hold what ran, and the command that relates all; nothing where one lies elsewhere."""
    models = [run.manifest.model for run in (a, b)]
    paths = [expanded(model.source) for model in models]
    # names of runs from elsewhere: a share of Windows' would be asked for over the network
    local = all(path.drive[:2] != "\\\\" and os.path.exists(path) for path in paths)
    pairs = match_parameters(models[0].digests, models[1].digests).pairs
    alike = 2 * len(pairs) >= min(len(model.digests) for model in models)  # one architecture
    if paths[0] == paths[1] or not (local and alike):
        return [], []
    try:
        relations = _relations(models, pairs)
    except Exception:  # no torch, or whatever stands in such files: the runs are compared
        relations = []
    facts = [fact("preflight.relations", relations=relations)] if relations else []
    return facts, [command("weights", *(model.source for model in models))]


def _relations(models: list[ModelIdentity], pairs: Mapping[str, str]) -> list[Fact]:
    from divergence.domains.weights.adapter import open_weights
    from divergence.domains.weights.relations import Relation, relation

    stored = [open_weights(str(expanded(model.source))).tensors for model in models]
    kinds: dict[str, tuple[str, str]] = {}
    for names in pairs.items():
        if models[0].digests[names[0]] != models[1].digests[names[1]]:
            kinds.setdefault(starred(names[0]), names)
    groups: dict[Fact, list[tuple[str, Relation]]] = {}
    work, holders = 0, (holders_of(models[0]), holders_of(models[1]))
    for names in sorted(kinds.values(), key=lambda names: _work(names, stored)):
        work += _work(names, stored)
        if work > _MOST_WORK:
            break
        values: list[torch.Tensor] = []
        for name, model, tensors in zip(names, models, stored, strict=True):
            note = model.parameters.get(name)
            if note is not None and name in tensors:
                value = tensors[name].read().to(format_named(note.dtype).torch_dtype)
                values += [value] * (digest_tensor(value) == model.digests[name])
        if len(values) == 2:
            other = moved(*names, holders[0], models[1], pairs)
            how = relation(*values) if other is None else Relation("moved", False, other)
            if how.name in ("near", "unrelated"):
                tied = tied_alone(*names, models[0], models[1], holders)
                how = how if tied is None else Relation("copy", False, tied)
            groups.setdefault(how.kind, []).append((names[0], how))
    return [
        fact(
            "preflight.relation", names=[name for name, _ in some], how=some[0][1].fact, apart=None
        )
        for some in groups.values()
    ]


def _work(names: tuple[str, str], stored: list[dict[str, Stored]]) -> int:
    """Bound the products of relating two tensors, the larger of them; 2**27 for what is small."""
    shapes = [own[name].shape for name, own in zip(names, stored, strict=True) if name in own]
    rows = max((size for shape in shapes for size in shape), default=1)
    num = max(map(math.prod, shapes), default=1)
    return max(num, 64 * rows, 2**12) * max(rows, 2**15)
