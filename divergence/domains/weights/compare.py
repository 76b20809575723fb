"""Two checkpoints, parameter by parameter.

Names are matched first: as they stand, by a prefix that one side lacks, by the names that GGUF has
for an architecture. What is left on one side may be a part of what the other side fuses (queries,
keys and values in one matrix), or a copy of what the other side has tied.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.preflight import Matching, match_parameters, related
from divergence.domains.weights.adapter import (
    merged_relation,
    open_adapter,
    open_weights,
    product_relation,
)
from divergence.domains.weights.checkpoint import (
    ONE_RANK,
    Stored,
    StoredWeights,
    gguf_names,
    open_checkpoint,
)
from divergence.domains.weights.fused import IN_BLOCK, FusedRows, find_layout
from divergence.domains.weights.naming import IN_GROUPS, renamed, split_experts, wanted_of
from divergence.domains.weights.relations import Relation, relation, row_digests
from divergence.domains.weights.result import WeightsRelation, WeightsReport, WeightsSide
from divergence.errors import UsageError
from divergence.facts import Fact, fact, with_sentences
from divergence.outside import json_value, read_bytes
from divergence.recording.engines.identity import parameter_note
from divergence.run.manifest import ModelIdentity, ParameterNote, digest_tensor
from divergence.run.reader import Run
from divergence.run.site import starred
from divergence.words import SIDES, Progress, silent

_TABLES = re.compile(
    r"(^|\.)(inv_freq|rotary_emb\.\w+|masked_bias|attn\.bias|(input|output|[qkv])_scale"
    r"|_extra_state)$|^rope_(freqs|factors_\w+)\.weight$"
)
"""What some checkpoints hold beside their weights: loaders make it anew, or quantise activations
by it."""


@with_sentences
def compare_weights(
    reference: str | Path, candidate: str | Path, *, progress: Progress | None = None
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
    runs = [Run.open(s) if Path(s, "manifest.json").is_file() else None for s in sources]
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
    a, names_a, program_a = renamed(a)
    b, names_b, program_b = renamed(b)
    a, b = split_experts(a, b), split_experts(b, a)
    pairs, facts = _matched(a, b)
    _refuse_part(a, b, pairs)
    facts += [
        fact("weights.program", side=side, program=program)
        for side, program in zip(SIDES, (program_a, program_b), strict=True)
        if program is not None
    ]
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
    digests: dict[str, tuple[bytes, bytes]] = {}
    for number, (name, other) in enumerate(pairs.items()):
        on_progress("weights", number, len(pairs), name)
        stored = a.tensors[name], b.tensors[other]
        values = stored[0].read(), stored[1].read()
        how = _stored_as(relation(*values), name, stored, (a, b), (program_a, program_b))
        if not how.same:
            digests[name] = row_digests(values[0][None])[0], row_digests(values[1][None])[0]
        if how.name in ("unrelated", "near") and not IN_BLOCK.match(name):
            how = _copied(a, b, name, other) or how
        if how.name != "equal" and None not in adapters:
            how = product_relation(*values) or how
        elif how.name != "equal":
            # an adapter is held against the other side's values
            for adapter, own, value in zip(adapters, (name, other), values[::-1], strict=True):
                if adapter is not None and own in adapter.products:
                    how = merged_relation(adapter, own, value) or how
        relations.append((name, how))
    places = {digest: name for name, (digest, _) in digests.items()}
    for number, (name, how) in enumerate(relations):
        other_name = places.get(digests[name][1], name) if name in digests else name
        if other_name != name and how.name in ("unrelated", "near"):
            moved = fact("weights.moved", other=other_name)
            relations[number] = name, Relation("moved", False, moved)
    rest = _left_over(a, b, pairs, names_a | names_b)
    fused = [how.fact for _, how in rest if how.fact.code == "weights.fused"]
    num = len(pairs) + sum(len(f["names"]) if f["side"] == SIDES[1] else 1 for f in fused)
    relations += _in_usual_order(rest)
    if any(how.name == "transposed" and how.same for _, how in relations):  # all matrices are
        for number, (name, how) in enumerate(relations):
            if how.name == "transposed" and how.fact["rest"] is None:
                relations[number] = name, Relation(how.name, True, how.fact)
    return _report([_side(side) for side in (a, b)], num, relations, facts)


def _in_usual_order(relations: list[tuple[str, Relation]]) -> list[tuple[str, Relation]]:
    """Of what is fused: other weights where its parts stand otherwise than its name says, or than
    other blocks have them."""
    usual: dict[str, Counter[Fact]] = {}
    for name, how in relations:
        usual.setdefault(starred(name), Counter())[how.fact] += how.name == "fused"
    judged = []
    for name, how in relations:
        names, order = how.fact["names"], how.fact["order"] or []
        if how.name == "fused" and how.same:
            module = name.rpartition(".")[0].rpartition(".")[2]
            places = {part: module.find(part.partition("_")[0]) for part in names}
            by_name = sorted(names, key=places.__getitem__)
            (most, num), *_ = usual[starred(name)].most_common(1)
            other = None
            if -1 not in places.values() and by_name != names:
                other = fact("weights.fused_otherwise", by="name", names=by_name, order=None)
            elif most != how.fact and 2 * num > usual[starred(name)].total():
                values = {key: most[key] for key in ("names", "order")}
                other = fact("weights.fused_otherwise", by="blocks", **values)
            if other is not None:
                order = [*order, *[", "] * bool(order), other]
                how = Relation("fused", False, how.fact.with_values(order=order))
        judged.append((name, how))
    return judged


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
    names = dict.fromkeys(a.tensors, ""), dict.fromkeys(b.tensors, "")
    matching = _by_names(*names, (a.source, b.source))
    facts = matching.describe()
    return matching.pairs, [item for item in facts if item.code != "preflight.left_over"]


def _by_names(a: dict[str, str], b: dict[str, str], sources: Sequence[str]) -> Matching:
    matching = match_parameters(a, b)
    if not matching.pairs:
        raise UsageError(
            f"no parameter of {sources[0]} has a partner in {sources[1]} by its name: "
            f"{next(iter(a), 'none')} / {next(iter(b), 'none')}",
            hint="are these checkpoints of one architecture?",
        )
    return matching


def _refuse_part(a: StoredWeights, b: StoredWeights, pairs: dict[str, str]) -> None:
    """Raise UsageError for one rank of several, whose matrices are all one share of the others'."""
    shapes = [(a.tensors[name].shape, b.tensors[other].shape) for name, other in pairs.items()]
    ratios = {math.prod(own) / math.prod(other) for own, other in shapes if len(own) == 2}
    ratio = ratios.pop() if len(ratios) == 1 else 1.0
    for side, share in ((a, 1 / ratio), (b, ratio)):
        if side.form.endswith(ONE_RANK) and share.is_integer() and share > 1:
            raise UsageError(
                f"{side.source} holds one rank of {share:.0f}, and the others are missing",
                hint="copy the folders of all ranks together, and name the folder that holds them",
            )


def _stored_as(
    how: Relation,
    name: str,
    stored: tuple[Stored, Stored],
    sides: tuple[StoredWeights, ...],
    programs: Sequence[str | None],
) -> Relation:
    """With what the files say of it: GGUF's type of codes, and the order that a program wants."""
    for side, own in zip(SIDES, stored, strict=True):
        if not own.dtype.islower() or own.dtype.startswith(("float8", "int8")):
            coded = _coded(how.fact, side, own.dtype)
            kind = "quantised" if coded.code == "weights.coded" else how.name
            how = Relation(kind, how.same and coded == how.fact, coded)
    programs = [
        f"llama.cpp's {side.architecture[0]}" if side.architecture is not None else own
        for side, own in zip(sides, programs, strict=True)
    ]
    both = [wanted_of(program, name) for program in programs]
    wanted, program = next(((w, p) for w, p in zip(both, programs, strict=True) if w), ("", None))
    if both[0] == both[1]:
        return how
    kind, value = {"pairs": ("reordered", "to"), "shifted": ("shifted", "constant")}[wanted]
    if how.name == kind and how.fact[value] == _WANTED[wanted][both[0] is not None]:
        rest = how.fact["rest"]
        same = not isinstance(rest, Fact) or rest.code == "weights.rounded"
        return Relation("turned", same, fact("weights.turned", rest=how.fact, program=program))
    if how.name in ("equal", "dtype", "rounded", "quantised", "near"):
        code = "weights.unturned" if wanted == "pairs" else "weights.unshifted"
        return Relation("unturned", False, fact(code, rest=how.fact, program=program))
    return how


def _coded(how: Fact, side: str, form: str) -> Fact:
    """What a quantisation looks like whose groups are too small to tell it, as its form."""
    if isinstance(rest := how["rest"], Fact):
        return how.with_values(rest=_coded(rest, side, form))
    if how.code not in ("weights.near", "weights.rounding", "weights.low_rank"):
        return how
    return fact("weights.coded", side=side, percent=how["percent"], form=form)


_WANTED = {"pairs": ("pairs", "halves"), "shifted": (1.0, -1.0)}
"""What becomes of A's where B, and where A, is stored so."""


def _copied(a: StoredWeights, b: StoredWeights, name: str, other: str) -> Relation | None:
    """One side's is a copy of another parameter of that side: tied there, and not on the other."""
    for side, weights, own in ((SIDES[0], a, name), (SIDES[1], b, other)):
        key = _copy_of(weights.tensors, own)
        if key is not None:
            return Relation("copy", False, fact("weights.copy", side=side, key=key))
    return None


def _left_over(
    a: StoredWeights, b: StoredWeights, pairs: dict[str, str], own_names: dict[str, str]
) -> list[tuple[str, Relation]]:
    """Say what has no partner by name: fused with others, a copy of a tied one, or alone.
    ``own_names``: what names are called in files whose names were read as others."""
    alone: dict[str, list[str]] = {
        "reference": [name for name in a.tensors if name not in pairs],
        "candidate": [name for name in b.tensors if name not in set(pairs.values())],
    }
    sides: dict[str, StoredWeights] = {"reference": a, "candidate": b}
    relations: list[tuple[str, Relation]] = []
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        layouts: dict[str, FusedRows] = {}
        # matrices first: a bias is cut as its matrix is
        for name in sorted(alone[side], key=lambda name: -len(sides[side].tensors[name].shape)):
            layout = find_layout(
                name, sides[side].tensors, alone[other], sides[other].tensors, layouts
            )
            if layout is None:
                continue
            alone[side].remove(name)
            alone[other] = [part for part in alone[other] if part not in layout.names]
            file_name, names = own_names.get(name, name), list(layout.names)
            whole, parts = sides[side].tensors[name].read(), []
            for part, own in layout.cut(whole):
                there = sides[other].tensors[part].read()
                if layout.parts_flipped and there.ndim == 2:
                    there = there.T
                both = (there, own) if side == "candidate" else (own, there)
                parts.append((part, relation(*both), there))
            grouped = IN_GROUPS.search(file_name)
            is_plain = layout.num_groups == 1 or grouped is not None
            kind = "fused"
            order: list[Any] = [] if is_plain else [fact("weights.fused_mixed")]
            if layout.num_groups > 1:
                each = [num // layout.num_groups for num in layout.rows]
                groups = fact("weights.fused_groups", num=layout.num_groups, rows=each)
                order += [", "] * (not is_plain) + [groups]
            if any(how.name in ("near", "unrelated") for _, how, _ in parts):
                rows = row_digests(whole.T if layout.flipped else whole)
                each_rows = [row_digests(own) for *_, own in parts]
                if sum(map(Counter, each_rows), Counter[bytes]()) == Counter(rows):
                    is_plain, order, parts = False, [fact("weights.fused_mixed")], []
                    first = [rows.index(own[0]) for own in each_rows]
                    names = [name for _, name in sorted(zip(first, names, strict=True))]
            if grouped is not None and grouped[1] == "linear_qkv":
                heads = _key_heads(a, b)
                if layout.num_groups != heads and (heads or layout.num_groups == 1):
                    # of one group none can tell whether keys have more heads
                    kind = "fused" if heads or not is_plain else "ungrouped"
                    is_plain = False
                    order += [", "] * bool(order) + [fact("weights.fused_heads", num=heads)]
            how = fact(
                "weights.fused",
                side=side,
                other=other,
                whole=file_name.rpartition(".")[0].rpartition(".")[2],
                names=[part.rpartition(".")[0].rpartition(".")[2] for part in names],
                order=order or None,
            )
            relations.append((name, Relation(kind, is_plain, how)))
            relations += [(part, how) for part, how, _ in parts if not how.same]
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        tensors = sides[side].tensors
        for name in alone[side]:
            source = None if IN_BLOCK.match(name) else _copy_of(tensors, name)
            packed = next((kind for end, kind in _PACKED if name.endswith(end)), None)
            if source is not None:
                how = fact("weights.tied", side=side, other=other, key=source)
                relations.append((name, Relation("tied", True, how)))
            elif packed is not None:
                how = fact("weights.packed", side=side, kind=packed)
                relations.append((name, Relation("packed", False, how)))
            else:
                table = _TABLES.search(name) is not None
                relations.append((name, Relation("alone", table, fact("weights.alone", side=side))))
    return relations


_PACKED = (
    (".qweight", "GPTQ or AWQ"),
    (".weight_packed", "compressed-tensors"),
    ("_blocks", "MXFP4"),
    (".quant_map", "bitsandbytes"),
)


def _key_heads(*sides: StoredWeights) -> int | None:
    """How many heads keys have, by a configuration that lies beside a side's weights."""
    for side in sides:
        place = Path(side.source).expanduser()
        file = (place if place.is_dir() else place.parent) / "config.json"
        if file.is_file():
            config = json_value(read_bytes(file, error=UsageError), where=str(file))
            config = config.get("text_config", config) if isinstance(config, dict) else {}
            config = config if isinstance(config, dict) else {}
            for key in ("num_key_value_heads", "num_attention_heads"):
                if type(num := config.get(key)) is int and num > 0:
                    return num
    return None


def _copy_of(tensors: dict[str, Stored], name: str) -> str | None:
    own = tensors[name]
    alike = [key for key, other in tensors.items() if key != name and other.shape == own.shape]
    return next((key for key in alike if torch.equal(own.read(), tensors[key].read())), None)


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
        checkpoint = open_weights(source)
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
    matching = _by_names(a.digests, b.digests, sources)
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
    everywhere = Counter(starred(name) for name, _ in relations)
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
                names=_named([name for name, _ in members], everywhere),
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
        relations=sorted(rows, key=lambda r: (r.same, r.name in _BY_FORM, -r.num_parameters)),
    )


_BY_FORM = ("quantised", "turned")
"""What a form of storage makes of every matrix: behind what happened to some."""


def _named(names: list[str], everywhere: Counter[str]) -> list[str]:
    """By kind: ``*`` for the numbers of all, else the numbers, where they are few."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(starred(name), []).append(name)
    shown = []
    for kind, members in kinds.items():
        numbers = [re.findall(r"(?<=\.)\d+(?=\.)", name) for name in members]
        if len(members) == 1:
            kind = members[0]
        elif len(members) < everywhere[kind] and kind.count("*") == 1 and len(members) <= _FEW:
            kind = kind.replace("*", "{" + ",".join(number for (number, *_) in numbers) + "}")
        shown.append(kind)
    return shown


_FEW = 6
