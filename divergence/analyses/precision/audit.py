"""The precision audit: in which dtype each part of a model really ran, beside what is expected.

Read from operator records alone: no tensor is opened. Every operator rounds its result to the
result's dtype, so a part made of several was computed in the narrowest dtype among their
results; that much is known. Not known, and not claimed: what one kernel does inside. A
fused attention or norm is named as such; a 16-bit softmax or matrix product says what it took
and gave, and what it adds up in is for the probe to tell.

A part is below what is expected where that narrowest dtype has fewer bits or less range than every
dtype that would do (precision.expectations). A run computed in float64 is not audited. A finding
is made where the sides computed the same module's part in different dtypes, or where a side is
below what the model's own code asks for; below common practice alone is shown in the table and
accuses nobody.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from divergence.analyses.precision.expectations import (
    OperatorFamily,
    expectation,
    family_of,
    is_below,
)
from divergence.analyses.precision.graph import PartOperators, accumulates
from divergence.analyses.precision.parts import find_parts
from divergence.analyses.precision.step import step_rows
from divergence.comparison.calls.graph import forwards_of, operator_passes
from divergence.comparison.results import (
    INSIDE,
    PARTS,
    AuditedPlace,
    AuditFinding,
    AuditResult,
    AuditRow,
)
from divergence.facts import Fact, fact, with_sentences
from divergence.numerics.formats import format_named
from divergence.run.contents import records_at
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.site import BACKWARD, is_operator_site, module_of
from divergence.words import Side, SideOrBoth

__all__ = ["audit_runs", "audited_places", "differing", "finding"]

MAX_OPERATORS = 64
"""Named at one place; a scan calls the same line once for every token."""

_PASSES = ("anchored", "free", "whole", "replayed")


@with_sentences
def audit_runs(
    reference: Run, candidate: Run | None = None, *, rename: Callable[[str], str] = lambda s: s
) -> AuditResult | None:
    """The audit of one run or two; None where neither holds operators that can be audited, nor a
    training step.

    ``rename``: a site of the reference → the candidate's.
    """
    ours = audited_places(reference)
    theirs = None if candidate is None else audited_places(candidate)
    step, step_findings = step_rows(
        reference.manifest, None if candidate is None else candidate.manifest
    )
    if ours is None and theirs is None:
        return AuditResult(rows=step, findings=step_findings) if step else None
    remarks = []
    alike = candidate is None or reference.manifest.model.dtype == candidate.manifest.model.dtype
    if ours is not None and theirs is not None and not alike:
        remarks = [fact("precision.other_dtypes")]
    probed: dict[tuple[str, ...], list[Fact]] = {}
    for name, run, places in (("reference", reference, ours), ("candidate", candidate, theirs)):
        if run is not None and places is not None:
            side = None if candidate is None else name
            model = run.manifest.model.model_class
            if family_of(model) is None:
                remarks.append(fact("precision.model_not_known", model=model, side=side))
            for key in _probed(run.manifest, places):
                probed.setdefault(key, []).append(fact("precision.side", side=side))
    for (dtype, accumulator, *operators), sides in probed.items():
        remarks.append(
            fact("precision.probed", sides=sides, dtype=dtype, accumulator=accumulator,
                 operators=operators)
        )  # fmt: skip
    rows, findings = [], []
    for part in PARTS:
        mine, other = ([p for p in places or () if p.part == part] for places in (ours, theirs))
        if not mine and not other:
            continue
        pairs = differing(mine, other, rename) if alike else []
        row = msgspec.structs.replace(
            _row(mine, other),
            reference=None if ours is None else _computed(mine),
            candidate=None if theirs is None else _computed(other),
            differs=bool(pairs),
        )
        rows.append(row)
        item = finding(row, mine, other, pairs, alone=candidate is None)
        if item is not None:
            findings.append(item)
    return AuditResult(
        rows=rows + step, findings=findings + step_findings, reference=ours, candidate=theirs,
        remarks=remarks,
    )  # fmt: skip


def _row(mine: list[AuditedPlace], other: list[AuditedPlace]) -> AuditRow:
    judged = next((place for place in (*mine, *other) if place.expected), None)
    below = any(place.below for place in mine), any(place.below for place in other)
    whose: SideOrBoth | None = None
    if any(below):
        whose = "both" if all(below) else "reference" if below[0] else "candidate"
    return AuditRow(
        part=(*mine, *other)[0].part,
        expected=judged.expected if judged else [],
        expected_from=judged.expected_from if judged else None,
        own=judged.own if judged else False,
        below=whose,
        num_places=max(sum(place.num_calls for place in side) for side in (mine, other)),
    )


def audited_places(run: Run) -> list[AuditedPlace] | None:
    """Each part at each place, in execution order; None where the run is not to be audited."""
    manifest = run.manifest
    passes = operator_passes(run)
    chosen = next((name for name in _PASSES if name in passes), None)
    if chosen is None or manifest.settings.compute_dtype or manifest.model.task == "operators":
        return None
    family = family_of(manifest.model.model_class)
    blocks = {path for path, note in manifest.plan.modules.items() if note.role == "block"}
    logits = manifest.plan.logits_site
    head = None if logits is None else module_of(logits)
    places: dict[tuple[str | None, ...], AuditedPlace] = {}
    for nodes in forwards_of(run, chosen).values():
        forward = [node for node in nodes if BACKWARD not in node.module]
        for part in find_parts(forward, blocks, head):
            place = _place(part, manifest, family)
            key = (place.part, place.module, place.source, place.computed, place.kernel,
                   place.result, *place.operands)  # fmt: skip
            seen = places.get(key)
            places[key] = place if seen is None else _again(seen, place)
    kept = list(places.values())
    if logits is not None and not any(place.part == "logits" for place in kept):
        kept += _recorded_logits(run, logits, family)
    return kept


def _place(part: PartOperators, manifest: Manifest, family: OperatorFamily | None) -> AuditedPlace:
    root = part.root
    dtypes = [node.results[0].dtype for node in part.nodes]
    results = [(n, _COMPONENT.get(d, d)) for n, d in zip(part.nodes, dtypes, strict=True)]
    narrow, narrowest = min(results, key=lambda item: _width(item[1]))
    same = {dtype for _, dtype in results} == {narrowest}
    computed = narrowest
    taken = [
        _COMPONENT.get(operand.dtype, operand.dtype) for operand in part.nodes[0].call.operands
    ]
    if part.part in ("matrix product", "router product", "logits"):
        # what is multiplied is rounded to the operands' dtype before anything is added up
        factors = [t for t in taken if format_named(t).kind == "float" or t in _CODES]
        computed = min([computed, *factors], key=_width)
    chosen = root if same else narrow
    dtype = manifest.model.dtype
    wanted = expectation(part.part, family, dtype)
    if manifest.model.quantization is not None and part.part != "norm statistics":
        wanted = None if part.part in ("matrix product", "logits", "kv cache") else wanted
    expected = () if wanted is None else wanted.dtypes
    note = manifest.plan.modules.get(root.module.partition("#")[0])
    return AuditedPlace(
        part=part.part,
        module=root.module,
        kind=None if note is None else note.kind,
        site=chosen.path,
        operators=[node.path for node in part.nodes],
        near=list(part.near),
        source=chosen.call.source,
        operands=list(dict.fromkeys(taken)),
        result=part.nodes[-1].results[0].dtype,
        computed=None if part.kernel else computed,
        kernel=root.name if part.kernel else None,
        accumulates=not part.kernel
        and all(accumulates(node) for node, dtype in results if dtype == narrowest),
        expected=list(expected),
        expected_from=None if wanted is None else wanted.by,
        own=wanted is not None and wanted.own,
        below=not part.kernel and is_below(computed, expected),
    )


def _again(seen: AuditedPlace, place: AuditedPlace) -> AuditedPlace:
    """The place once more: in another forward, or for another tensor there."""
    operators, near = (
        list(dict.fromkeys([*old, *new]))[:MAX_OPERATORS]
        for old, new in ((seen.operators, place.operators), (seen.near, place.near))
    )
    return msgspec.structs.replace(
        seen, operators=operators, near=near, num_calls=seen.num_calls + 1
    )


def _recorded_logits(run: Run, site: str, family: OperatorFamily | None) -> Iterable[AuditedPlace]:
    """The logits as the model gave them, where the operators of the head were not recorded."""
    records = [] if is_operator_site(site) else records_at(run.records, [site])
    if not records:
        return []
    manifest = run.manifest
    wanted = expectation("logits", family, manifest.model.dtype)
    expected = () if wanted is None else wanted.dtypes
    dtype = records[0].dtype
    return [
        AuditedPlace(
            part="logits", module=module_of(site), site=site, operators=[], operands=[],
            result=dtype, computed=dtype, expected=list(expected),
            expected_from=None if wanted is None else wanted.by,
            own=wanted is not None and wanted.own, below=is_below(dtype, expected),
            num_calls=len(records),
        )
    ]  # fmt: skip


_COMPONENT = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The dtype of a complex number's parts."""
_CODES = ("int8", "uint8")


def _width(dtype: str) -> tuple[int, float]:
    form = format_named(dtype)
    return (form.mantissa_bits, form.max) if form.kind == "float" else (0, 0.0)


def _computed(places: list[AuditedPlace]) -> list[str]:
    counts: Counter[str] = Counter()
    for place in places:
        counts[place.computed or f"{INSIDE}{place.kernel}"] += place.num_calls
    return [name for name, _ in counts.most_common()]


def _probed(manifest: Manifest, places: list[AuditedPlace]) -> list[tuple[str, ...]]:
    """What verified probes say of the accumulators behind these places: dtype, accumulator and the
    operators that were probed."""
    stored = {place.computed for place in places if place.accumulates}
    by_probe: dict[tuple[str, str], list[str]] = {}
    for item in manifest.arithmetic:
        *words, dtype = item.subject.split() or [""]
        if item.probe == "accumulator" and item.verified and dtype in stored:
            what = " ".join(itertools.takewhile(lambda word: "=" not in word, words))
            by_probe.setdefault((dtype, item.value), []).append(what)
    return [(*key, *dict.fromkeys(names)) for key, names in by_probe.items()]


PlacePair = tuple[AuditedPlace, AuditedPlace]


def differing(
    ours: list[AuditedPlace], theirs: list[AuditedPlace], rename: Callable[[str], str]
) -> list[PlacePair]:
    """Places of the same module and part whose dtypes are known on both sides, and differ."""
    reference = _by_module(ours, lambda path: rename(f"{path}:out").rpartition(":")[0])
    candidate = _by_module(theirs, lambda path: path)
    pairs = []
    for module in reference.keys() & candidate.keys():
        mine, other = reference[module], candidate[module]
        if mine.keys() != other.keys():
            odd = [place for dtype, place in mine.items() if dtype not in other]
            new = [place for dtype, place in other.items() if dtype not in mine]
            pairs.append(((odd or list(mine.values()))[0], (new or list(other.values()))[0]))
    return sorted(pairs, key=lambda pair: pair[0].site)


def _by_module(
    places: list[AuditedPlace], named: Callable[[str], str]
) -> dict[str, dict[str, AuditedPlace]]:
    by_module: dict[str, dict[str, AuditedPlace]] = {}
    for place in places:
        if place.computed is not None:
            by_module.setdefault(named(place.module), {}).setdefault(place.computed, place)
    return by_module


def finding(
    row: AuditRow,
    ours: list[AuditedPlace],
    theirs: list[AuditedPlace],
    pairs: list[PlacePair],
    *,
    alone: bool,
) -> AuditFinding | None:
    """What there is to say of one part; None where nothing is. ``pairs``: see ``differing``."""
    accused = row.below if row.own else None
    if pairs:
        what, places = _against_each_other(row, pairs)
    elif accused:
        places = [place for place in (*ours, *theirs) if place.below]
        other = {"reference": theirs, "candidate": ours}.get(accused, [])
        what = fact(
            "precision.computes_below", who="run" if alone else accused, part=row.part,
            place=_dtype_and_place(places[0]), expected=row.expected,
            expected_from=row.expected_from,
            kernel=next((place.kernel for place in other if place.kernel), None),
        )  # fmt: skip
    else:
        return None
    sites = [site for place in places for site in (*place.operators, *place.near)]
    return AuditFinding(part=row.part, what=what, operators=list(dict.fromkeys(sites)))


def _against_each_other(row: AuditRow, pairs: list[PlacePair]) -> tuple[Fact, list[AuditedPlace]]:
    """The odd side first: the one below what is expected, else the one that is not as expected,
    else the narrower one, else the candidate."""
    reference, candidate = pairs[0]
    sides = [("reference", reference, candidate), ("candidate", candidate, reference)]
    (odd, first, second) = max(
        sides,
        key=lambda side: (
            side[1].below,
            side[1].computed not in side[1].expected,
            is_below(side[1].computed or "", [side[2].computed or ""]),
            side[0] == "candidate",
        ),
    )
    other: Side = "candidate" if odd == "reference" else "reference"
    what = fact(
        "precision.computes", side=odd, part=row.part, place=_dtype_and_place(first), other=other,
        dtype=second.computed, num_more=len({place.module for place, _ in pairs}) - 1 or None,
        expected=row.expected, expected_from=row.expected_from,
    )  # fmt: skip
    return what, [place for pair in pairs for place in pair]


def _dtype_and_place(place: AuditedPlace) -> Fact:
    # one kernel: it rounds what it gives; what it adds up in is not in the records
    where = (place.source or place.site).partition(" in ")[0]
    return fact("precision.place", dtype=place.computed, where=where, accumulates=place.accumulates)
