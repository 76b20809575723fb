"""Two checkpoints, parameter by parameter.

Names are matched first: as they stand, by a prefix that one side lacks, by the names that GGUF has
for an architecture. What is left on one side may be a part of what the other side fuses (queries,
keys and values in one matrix), or a copy of what the other side has tied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.preflight.lines import match_parameters, related
from divergence.domains.weights.adapter import merged_relation, open_adapter, product_relation
from divergence.domains.weights.checkpoint import Stored, StoredWeights, gguf_names, open_checkpoint
from divergence.domains.weights.relations import Relation, relation, row_digests
from divergence.domains.weights.result import WeightsRelation, WeightsReport, WeightsSide
from divergence.errors import UsageError
from divergence.facts import Fact, fact, with_sentences
from divergence.recording.engines.identity import parameter_note
from divergence.run.manifest import ModelIdentity, ParameterNote, digest_tensor
from divergence.run.reader import Run
from divergence.run.site import starred
from divergence.words import SIDES, Progress, silent

_BLOCK = re.compile(r"^(.*\.\d+)\.")
_TABLES = re.compile(r"(^|\.)(inv_freq|rotary_emb\.\w+|masked_bias|attn\.bias)$")
"""What some checkpoints hold beside their weights, and loaders make anew."""


@with_sentences
def compare_weights(
    reference: str | Path,
    candidate: str | Path,
    *,
    progress: Progress | None = None,
) -> WeightsReport:
    """Compare what two checkpoints store, and say how parameters that differ are related.

    ``reference``, ``candidate``: directories or files of safetensors, GGUF or ``torch.save``, whole
    or in shards; LoRA adapters, two by what they add, else merged into their base; or runs, of
    which only digests are compared. One tensor of each side is in memory
    at a time, of fused ones their parts.

    Raises UsageError for what holds no weights or cannot be read, and DumpError for a file that
    would run code.
    """
    on_progress = progress or silent
    sources = [str(source) for source in (reference, candidate)]
    is_run = [Path(source, "manifest.json").is_file() for source in sources]
    runs = [Run.open(s) if run else None for s, run in zip(sources, is_run, strict=True)]
    if any(runs):
        return _with_runs(sources, runs, on_progress)
    adapters = [open_adapter(source) for source in sources]
    if all(adapter is not None for adapter in adapters):  # by what they add: no base is needed
        a, b = (adapter.changes for adapter in adapters if adapter is not None)
    else:
        a, b = (
            open_checkpoint(source) if adapter is None else adapter.merged()
            for source, adapter in zip(sources, adapters, strict=True)
        )
    pairs, facts = _matched(a, b)
    facts += [
        fact(
            "weights.adapter",
            side=side,
            base=adapter.base,
            rank=adapter.rank,
            alpha=adapter.alpha,
            num=len(adapter.products),
            merged=None in adapters,
        )
        for side, adapter in zip(SIDES, adapters, strict=True)
        if adapter is not None
    ]
    relations: list[tuple[str, Relation]] = []
    for number, (name, other) in enumerate(pairs.items()):
        on_progress("weights", number, len(pairs), name)
        values = a.tensors[name].read(), b.tensors[other].read()
        how = relation(*values)
        if how.name != "equal" and None not in adapters:
            how = product_relation(*values) or how
        elif how.name != "equal":
            for adapter, own, value in zip(adapters, (name, other), values[::-1], strict=True):
                if adapter is not None and own in adapter.products:
                    how = merged_relation(adapter, own, value) or how
        relations.append((name, how))
    relations += _left_over(a, b, pairs)
    if any(how.name == "transposed" and how.same for _, how in relations):  # all matrices are
        relations = [
            (name, Relation(how.name, True, how.fact) if how.name == "transposed" else how)
            for name, how in relations
        ]
    return _report([_side(side) for side in (a, b)], len(pairs), relations, facts)


def _matched(a: StoredWeights, b: StoredWeights) -> tuple[dict[str, str], list[Fact]]:
    """A's names → B's, and how they were read."""
    if (a.architecture is None) != (b.architecture is None):
        own, other = (a, b) if a.architecture is not None else (b, a)
        assert own.architecture is not None
        table = gguf_names(list(other.tensors), own.architecture)
        table = {name: there for name, there in table.items() if there in own.tensors}
        pairs = table if own is b else {there: name for name, there in table.items()}
        if pairs:
            return pairs, [fact("weights.gguf", architecture=own.architecture[0])]
    matching = match_parameters(dict.fromkeys(a.tensors, ""), dict.fromkeys(b.tensors, ""))
    if not matching.pairs:
        first = [next(iter(side.tensors)) for side in (a, b)]
        raise UsageError(
            f"no parameter of {a.source} has a partner in {b.source} by its name: "
            f"{first[0]} / {first[1]}",
            hint="are these checkpoints of one architecture?",
        )
    return matching.pairs, [item for item in matching.describe() if item.code != _LEFT]


_LEFT = "preflight.left_over"


def _left_over(
    a: StoredWeights, b: StoredWeights, pairs: dict[str, str]
) -> list[tuple[str, Relation]]:
    """Say what has no partner by name: fused with others, a copy of a tied one, or alone."""
    alone: dict[str, list[str]] = {
        "reference": [name for name in a.tensors if name not in pairs],
        "candidate": [name for name in b.tensors if name not in set(pairs.values())],
    }
    sides: dict[str, StoredWeights] = {"reference": a, "candidate": b}
    relations: list[tuple[str, Relation]] = []
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        for name in list(alone[side]):
            parts = _parts(sides[side].tensors, name, sides[other].tensors, alone[other])
            if parts is None:
                continue
            names, mixed = parts
            alone[side].remove(name)
            alone[other] = [part for part in alone[other] if part not in names]
            how = fact(
                "weights.fused",
                side=side,
                other=other,
                whole=name.rpartition(".")[0].rpartition(".")[2],
                names=[part.rpartition(".")[0].rpartition(".")[2] for part in names],
                order=[fact("weights.fused_mixed")] if mixed else None,
            )
            relations.append((name, Relation("fused", not mixed, how)))
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        tensors = sides[side].tensors
        for name in alone[side]:
            key = None if _BLOCK.match(name) else _copy_of(tensors, name)
            if key is not None:
                how = fact("weights.tied", side=side, other=other, key=key)
                relations.append((name, Relation("tied", True, how)))
            else:
                table = _TABLES.search(name) is not None
                relations.append((name, Relation("alone", table, fact("weights.alone", side=side))))
    return relations


def _copy_of(tensors: dict[str, Stored], name: str) -> str | None:
    own = tensors[name]
    alike = [key for key, other in tensors.items() if key != name and other.shape == own.shape]
    return next((key for key in alike if torch.equal(own.read(), tensors[key].read())), None)


def _parts(
    tensors_a: dict[str, Stored], name: str, tensors_b: dict[str, Stored], alone: Sequence[str]
) -> tuple[list[str], bool] | None:
    """Tensors of the other side, of the same block and kind, whose rows (or columns, of a layer
    that stores its matrix transposed) are together those of ``name``; and whether in turn."""
    shape, block = tensors_a[name].shape, _BLOCK.match(name)
    kind = name.rpartition(".")[2]
    near = [
        other
        for other in alone
        if other.rpartition(".")[2] == kind
        and (there := _BLOCK.match(other)) is not None
        and block is not None
        and re.findall(r"\d+", there[1]) == re.findall(r"\d+", block[1])
        and len(tensors_b[other].shape) == len(shape)
    ]
    if len(near) < 2 or not shape:
        return None
    whole = tensors_a[name].read()
    for flipped in (False, True) if len(shape) == 2 else (False,):
        rows = row_digests(whole.T if flipped else whole)
        have = Counter(rows)
        chosen: dict[str, list[bytes]] = {}
        for other in near:
            tensor = tensors_b[other].read()
            if tensor.shape[1:] != (whole.T if flipped else whole).shape[1:]:
                continue
            part = row_digests(tensor.to(whole.dtype) if whole.itemsize < 4 else tensor)
            if not Counter(part) - have:
                chosen[other] = part
        together = sum(map(Counter, chosen.values()), Counter[bytes]())
        if len(chosen) > 1 and together == have:
            ordered = sorted(chosen, key=lambda other: rows.index(chosen[other][0]))
            in_turn = [digest for other in ordered for digest in chosen[other]] == rows
            return ordered, not in_turn
    return None


def _with_runs(sources: list[str], runs: list[Run | None], on_progress: Progress) -> WeightsReport:
    """Add, where a side is a run, what its manifest tells of each parameter."""
    models: list[ModelIdentity] = []
    sides: list[WeightsSide] = []
    of_run = next(run.manifest.model for run in runs if run is not None)
    for source, run in zip(sources, runs, strict=True):
        if run is not None:
            models.append(run.manifest.model)
            notes = run.manifest.model.parameters
            sizes = [torch.Size(note.shape).numel() for note in notes.values()]
            sides.append(
                WeightsSide(
                    source=source,
                    form="run",
                    num_parameters=len(run.manifest.model.digests),
                    num_elements=sum(sizes),
                    dtypes=Counter(note.dtype for note in notes.values()),
                )
            )
            continue
        checkpoint = open_checkpoint(source)
        digests: dict[str, str] = {}
        parameters: dict[str, ParameterNote] = {}
        for number, (name, stored) in enumerate(checkpoint.tensors.items()):
            on_progress("weights", number, len(checkpoint.tensors), name)
            tensor = stored.read()
            digests[name] = digest_tensor(tensor)
            note = parameter_note(tensor, digests[name])
            if note is not None:
                parameters[name] = note
        models.append(
            replace(
                of_run,
                source=source,
                digests=digests,
                parameters=parameters,
                quantization=None,
                missing=[],
            )
        )
        sides.append(_side(checkpoint))
    a, b = models
    matching = match_parameters(a.digests, b.digests)
    equal = [n for n, other in matching.pairs.items() if a.digests[n] == b.digests[other]]
    relations = [(name, Relation("equal", True, fact("weights.equal"))) for name in equal]
    for name, other in matching.pairs.items():
        if name in equal:
            continue
        pair = related(a, b, {name: other})
        how = pair.facts[0]["how"] if pair is not None and pair.facts else None
        same = pair is not None and pair.only_dtypes
        relations.append((name, Relation("dtype" if same else "other", same, how or _OTHER)))
    for side, names in zip(("reference", "candidate"), matching.alone, strict=True):
        for name in names:
            how = fact("weights.alone", side=side)
            relations.append((name, Relation("alone", _TABLES.search(name) is not None, how)))
    facts = [
        fact("weights.digests", side=side)
        for side, run in zip(("reference", "candidate"), runs, strict=True)
        if run is not None
    ]
    return _report(sides, len(matching.pairs), relations, facts)


_OTHER = fact("weights.other")


def _side(checkpoint: StoredWeights) -> WeightsSide:
    return WeightsSide(
        source=checkpoint.source,
        form=checkpoint.form,
        num_parameters=len(checkpoint.tensors),
        num_elements=checkpoint.num_elements,
        dtypes=dict(Counter(stored.dtype for stored in checkpoint.tensors.values())),
    )


def _report(
    sides: list[WeightsSide], num: int, relations: list[tuple[str, Relation]], facts: list[Fact]
) -> WeightsReport:
    """Relations of one kind and the same values but for how far apart, together."""
    groups: dict[Fact, list[tuple[str, Relation]]] = {}
    for name, how in relations:
        if how.name != "equal":
            groups.setdefault(how.kind, []).append((name, how))
    rows = []
    for members in groups.values():
        first, how = members[0]
        percents = [each.percent for _, each in members if each.percent is not None]
        rows.append(
            WeightsRelation(
                name=how.name,
                same=how.same,
                num_parameters=len(members),
                first=first,
                names=list(dict.fromkeys(starred(name) for name, _ in members)),
                facts=[how.fact],
                percent=[min(percents), max(percents)] if percents else None,
            )
        )
    return WeightsReport(
        tool_version=__version__,
        reference=sides[0],
        candidate=sides[1],
        num_compared=num,
        num_equal=len(relations) - sum(row.num_parameters for row in rows),
        facts=facts,
        relations=sorted(rows, key=lambda row: (row.same, -row.num_parameters)),
    )
