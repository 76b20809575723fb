"""Repetition: does a run that was captured again repeat the run that it stands for?

Conclusions from a run made again hold for the first one only if both are the same computation. The
same model, code, kernels and settings give the same bits (recording operators changes none), so
every tensor that both runs hold must be equal, as long as both were fed the same tokens. The fields
of an environment cannot show that: what changes the numbers need not be in any field.

Some runs are known not to repeat their bits: their own repeats differed, they have operators
without a deterministic form or compiled modules, or several processes made them and one repeats
them. Then the error against the truth must be the same at the block that is looked into: the median
row's, within ``_SAME_ERROR`` either way. Runs that share no tensor do not repeat each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from divergence.comparison.measure.reduced import equal_contents
from divergence.experiments.result import Repetition
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS, spread
from divergence.numerics.sums import ratio
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import BACKWARD, is_operator_site, module_of

_SAME_ERROR = THRESHOLDS.widen  # the room that compare gives what a trusted run shows
_PASSES = ("anchored", "escalated", "free")  # in this order the first difference is named


def check_repetition(
    made: Run, own: Run, *, name: str, side: str, truth: Run | None = None, block: str | None = None
) -> Repetition:
    """Hold ``made`` (called ``name``) against ``own``, the ``side``'s run.

    ``truth`` and ``block``: for the error that stands in for bits, see the module's head.
    """
    original = fact("experiments.side", side=side)
    result = _repetition(made, own, _shared(made, own), name=name, original=original)
    if result.how != "differs":
        return result
    why = why_not_bits(own.manifest, made.manifest)
    if why is None or truth is None or block is None:
        return result
    # in a training step the gradient which leaves the block counts, too
    at = [_same_error(made, own, truth, f"{block}{end}:out") for end in ("", BACKWARD)]
    same = any(at) and all(alike is not False for alike in at)
    return msgspec.structs.replace(result, how="error" if same else "differs", because=why)


def check_substituted(made: Run, own: Run, *, site: str, block: str, name: str) -> Repetition:
    """A run with one operator's result replaced: what comes before that operator, and the other
    blocks in passes that give each block its input, must repeat ``own`` all the same."""
    places: dict[tuple[str, int, int], int] = {}
    for r in own.records:
        if r.site.rpartition(":")[0] == site.rpartition(":")[0] and ":out" in r.site:
            forward = r.pass_, r.sample, r.step
            places[forward] = min(r.order, places.get(forward, r.order))

    def untouched(record: Record) -> bool:
        if is_operator_site(record.site) and record.site.rpartition(":")[2].startswith("in"):
            return False  # it may be memory as it was found, which is written to
        place = places.get((record.pass_, record.sample, record.step))
        if place is not None and record.order < place:
            return True
        note = made.manifest.plan.modules.get(module_of(record.site).partition("/")[0])
        other = note is not None and note.role == "block" and module_of(record.site) != block
        return record.pass_ != "free" and other

    pairs = ((new, old) for new, old in _shared(made, own) if untouched(new))
    original = fact("experiments.without_substitute")
    return _repetition(made, own, pairs, name=name, original=original)


def why_not_bits(own: Manifest, made: Manifest) -> Fact | None:
    """Say why equal bits cannot be asked for, or None."""
    for manifest in (own, made):
        seen = manifest.repeatability
        if seen.num_runs > 1 and seen.num_different:
            return fact(
                "experiments.repeats_differ", num=seen.num_different, total=seen.num_compared
            )
        if manifest.settings.nondeterministic_warnings:
            return fact("experiments.no_deterministic_form")
        notes = (getattr(manifest.model, "code", None) or {}).values()
        if any(getattr(note, "compiled", None) for note in notes):
            return fact("experiments.runs_eagerly")
    if own.mesh is not None and made.mesh is None:
        return fact("experiments.several_processes")
    return None


def _shared(made: Run, own: Run) -> Iterator[tuple[Record, Record]]:
    """Records of one meaning in both: of passes that gave blocks the same inputs, and of forwards
    before which both were fed the same tokens."""
    new, old = made.manifest, own.manifest
    if new.tokens.groups != old.tokens.groups:
        return
    last: dict[int, float] = {}  # by batch, the last forward to which both were fed the same
    for group in new.tokens.groups:
        last[group[0]] = math.inf
        for number in group:
            a, b = new.tokens.samples[number], old.tokens.samples[number]
            if (a.prompt_ids, a.decoder_prompt_ids, a.num_left_pad, a.num_right_pad) != (
                b.prompt_ids,
                b.decoder_prompt_ids,
                b.num_left_pad,
                b.num_right_pad,
            ):
                last[group[0]] = -1
                break
            fed = zip(a.generated_ids, b.generated_ids, strict=False)
            same = next((step for step, (x, y) in enumerate(fed) if x != y), math.inf)
            last[group[0]] = min(last[group[0]], same)
    passes = {"free"}
    if new.plan.anchored_to is not None and new.plan.anchored_to == old.plan.anchored_to:
        passes |= {"anchored", "escalated"}
    for record in made.records:
        if record.pass_ not in passes or record.step > last.get(record.sample, -1):
            continue
        other = own.find(record.coordinates)
        if other is not None and other.positions == record.positions:
            yield record, other


def _repetition(
    made: Run,
    own: Run,
    pairs: Iterator[tuple[Record, Record]],
    *,
    name: str,
    original: Fact,
) -> Repetition:
    """Compare the bits of ``pairs``; an error names the first that differs."""
    count, different = 0, []
    for new, old in pairs:
        equal = equal_contents(made, new, own, old)  # a device's digest is made of a host's bytes
        if equal is None:
            continue
        count += 1
        if not equal:
            different.append((new, old))
    if not different:
        return Repetition(
            run=name, original=original, how="bits" if count else "unknown", num_compared=count
        )

    def place(pair: tuple[Record, Record]) -> tuple[bool, int, int, int, int]:
        """A module's before an operator's, an anchored pass first."""
        record, operator = pair[0], is_operator_site(pair[0].site)
        return operator, _PASSES.index(record.pass_), record.sample, record.step, record.order

    first, old = min(different, key=place)
    rel_l2 = None
    if first.shape == old.shape and made.has_bytes(first) and own.has_bytes(old):
        x, y = own.read(old).double(), made.read(first).double()
        rel_l2 = ratio(float((x - y).norm()), float(x.norm()))
    return Repetition(
        run=name,
        original=original,
        how="differs",
        num_compared=count,
        num_different=len(different),
        site=first.site,
        pass_=first.pass_,
        sample=first.sample,
        step=first.step,
        rel_l2=rel_l2,
    )


def _same_error(made: Run, own: Run, truth: Run, site: str) -> bool | None:
    """Is the median row as far from the truth in both? None where the truth has not the site."""
    import torch

    rows: dict[str, list[torch.Tensor]] = {"made": [], "own": []}
    numel = 0
    for record in truth.records:
        if record.pass_ != "anchored" or record.site != site:
            continue
        true = truth.read(record).double()
        place = (record.sample, record.step, record.site)
        for which, run in (("made", made), ("own", own)):
            anchored = run.find(("anchored", *place))
            if which == "own" and run.manifest.id == truth.manifest.like:
                anchored = run.find(("free", *place))  # it is what anchors the others
            if anchored is None or anchored.shape != record.shape or not run.has_bytes(anchored):
                return False
            error = (run.read(anchored).double() - true).flatten(0, -2).norm(dim=-1)
            rows[which].append(error / true.flatten(0, -2).norm(dim=-1).clamp_min(1e-300))
        numel += record.numel
    if not rows["made"]:
        return None
    made_error, own_error = (float(torch.cat(rows[which]).median()) for which in ("made", "own"))
    if made_error == own_error:
        return True
    limit = _SAME_ERROR * spread(numel)
    return own_error > 0 and 1 / limit <= made_error / own_error <= limit
