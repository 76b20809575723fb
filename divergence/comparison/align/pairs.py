"""Records of two runs brought together: by coordinates, and by names that a map gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from divergence.comparison.align.pieces import Pair, Piece, indexed, why_no_pair
from divergence.comparison.results import Skipped
from divergence.errors import ConfigError
from divergence.facts import Fact, fact, plain, sentence
from divergence.run.contents import site_names
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Coordinates
from divergence.run.site import module_of

# Name maps: the same module under two names.
#
# A base model and its causal-LM wrapper differ by a prefix (``layers.0`` and
# ``model.layers.0``); two ports of one model may differ everywhere. Prefixes are found
# automatically; anything else is given as a file:
#
#     [map]
#     "model.layers.{n}.mlp" = "transformer.h.{n}.ffn"
#     "model.embed_tokens" = "transformer.wte"
#
# A key maps a module and everything below it; ``{n}`` stands for a number.

_MAX_PREFIXES = 64
"""A model has some ten modules and lists of modules above its blocks."""


class _MapFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    map: dict[str, str]


def load_name_map(path: str | Path) -> Callable[[str], str]:
    """Read a name map by path, or by name from configs/. Raises ConfigError."""
    from divergence.config import decode, find_config, load_toml

    file = find_config(path, what="name map")
    content = decode(load_toml(file), _MapFile, where=str(file))
    rules: list[tuple[re.Pattern[str], str]] = []
    for source, target in sorted(content.map.items(), key=lambda item: -len(item[0])):
        if source.count("{n}") != target.count("{n}"):
            raise ConfigError(
                f"{source!r} and {target!r} do not hold equally many {{n}}", where=str(file)
            )
        pattern = re.escape(source).replace(re.escape("{n}"), r"(\d+)")
        rules.append((re.compile(rf"{pattern}(?=$|[.#:])"), target))

    def rename(path: str) -> str:
        for pattern, target in rules:
            match = pattern.match(path)
            if match:
                named = target
                for number in match.groups():
                    named = named.replace("{n}", number, 1)
                return named + path[match.end() :]
        return path

    return rename


def find_prefix(reference: Iterable[str], candidate: Iterable[str]) -> tuple[str, str] | None:
    """(prefix in the reference, prefix in the candidate) under which most sites agree.

    None where no pair of prefixes matches more sites than the names as they stand. Of each run
    the ``_MAX_PREFIXES`` with the most sites are tried, so that time grows with the sites alone.
    """
    ours, theirs = set(reference), set(candidate)
    if ours <= theirs or theirs <= ours:
        return None
    rests, others = _by_rest(ours), _by_rest(theirs)
    counts: Counter[tuple[str, str]] = Counter()
    for rest in rests.keys() & others.keys():
        counts.update((a, b) for a in rests[rest] for b in others[rest] if a != b)
    if not counts:
        return None
    best = min(counts, key=lambda pair: (-counts[pair], *map(_simplest, pair)))
    return best if counts[best] > len(ours & theirs) else None


def _simplest(prefix: str) -> tuple[int, str]:
    return (prefix.count("."), prefix)


def _by_rest(sites: set[str]) -> dict[str, list[str]]:
    """What is left of the sites without a prefix, with the prefixes worth trying that they have:
    '', 'model.', 'model.language_model.' …"""
    holds: Counter[str] = Counter()
    for site in sites:
        holds.update(_prefixes(site))
    kept = set(sorted(holds, key=lambda head: (-holds[head], *_simplest(head)))[:_MAX_PREFIXES])
    rests: dict[str, list[str]] = {}
    for site in sites:
        for prefix in _prefixes(site):
            if prefix in kept:
                rests.setdefault(site[len(prefix) :], []).append(prefix)
    return rests


def _prefixes(site: str) -> list[str]:
    """Up to three leading components of the path; a number is none to end with."""
    parts = module_of(site).split(".", 4)
    return [
        "",
        *(
            ".".join(parts[:count]) + "."
            for count in range(1, min(3, len(parts) - 1) + 1)
            if not parts[count - 1].isdigit()
        ),
    ]


# Alignment: which tensor of one run belongs to which of the other.
#
# By (pass, sample, step, site). What has no partner is listed with its reason and is never a pass.
# A batch is split into its samples where the other run formed other batches, so that a batched run
# can be compared with a run of single prompts. Forwards are comparable while both sides had been
# fed the same tokens.
#
# Operators are matched elsewhere (calls.match). A replay holds nothing else: its operators each
# got the inputs that its source recorded, so the source and other replays of it are its partners.

REPLAYED = "replayed"

NameMap = Callable[[str], str]
"""A reference site (or module path) → the candidate's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """All pairs in the reference's execution order, and everything without a partner."""

    pairs: list[Pair]
    only_reference: list[Skipped]
    only_candidate: list[Skipped]
    skipped: list[Skipped]
    """Tensors with a partner that they cannot be compared with."""
    prefix: tuple[str, str] | None
    """The automatic prefix rule in use, if any."""
    anchored: bool
    """Pairs of an anchored pass are among ``pairs``."""
    notes: list[Fact]
    """Why no anchored pass was used although one was recorded."""

    @property
    def unmatched(self) -> list[Skipped]:
        """The tensors without a partner and the skipped ones."""
        return [*self.only_reference, *self.only_candidate, *self.skipped]


def align(reference: Run, candidate: Run, *, name_map: NameMap | None = None) -> Alignment:
    """Pair the two runs' records."""
    a, b = reference.manifest, candidate.manifest
    split = a.tokens.layout != b.tokens.layout
    rename, prefix = renaming(reference, candidate, name_map)
    rule = fact("align.name_map")
    if prefix is not None:
        own, other = (name or None for name in prefix)
        rule = fact("align.prefix", reference=own, candidate=other)
    match_by_rule = sentence(rule)
    notes: list[Fact] = []
    passes = compared_passes(a, b, notes)
    replays = a.plan.replayed_pass is not None or b.plan.replayed_pass is not None
    theirs = {} if replays else indexed(candidate, split=split)
    ours = {} if replays else indexed(reference, split=split)
    pairs: list[Pair] = []
    only_reference: list[Skipped] = []
    only_candidate: list[Skipped] = []
    skipped: list[Skipped] = []
    used: set[Coordinates] = set()
    parts = _Parts(reference, candidate, passes, rename)
    last_step = last_comparable_steps(a, b)
    for pass_, ours_in, theirs_in in passes:
        for (found_in, sample, step, site), piece in ours.items():
            if found_in != ours_in:
                continue
            key = (theirs_in, sample, step, rename(site))
            partner = theirs.get(key)
            if partner is None:
                if pass_ == "free":
                    why = parts.of_candidate(key) or why_no_step(b, "candidate", sample, step)
                    only_reference.append(Skipped(pass_, sample, step, site, "reference", why))
                continue
            used.add(key)
            reason = why_no_pair(piece, partner)
            if step > last_step.get(sample, step):
                reason = fact("align.other_tokens_before")
            if reason is not None:
                skipped.append(Skipped(pass_, sample, step, site, "both", reason))
                continue
            match = "exact" if key[3] == site else match_by_rule
            pairs.append(Pair(reference=piece, candidate=partner, pass_=pass_, match=match))
    compared = {theirs_in for _, _, theirs_in in passes}
    for key in theirs:
        if key in used:
            continue
        why = fact("align.pass_without_partner")
        if key[0] in compared:
            why = parts.of_reference(key) or why_no_step(a, "reference", *key[1:3])
        only_candidate.append(Skipped(*key, "candidate", why))
    return Alignment(
        pairs=sorted(pairs, key=_order), only_reference=only_reference,
        only_candidate=only_candidate, skipped=[*skipped, *parts.on_no_side(ours, theirs)],
        prefix=prefix, anchored=any(label == "anchored" for label, _, _ in passes), notes=notes,
    )  # fmt: skip


def renaming(
    reference: Run, candidate: Run, name_map: NameMap | None
) -> tuple[NameMap, tuple[str, str] | None]:
    """What a site of the reference is called in the candidate, and the prefixes by which, where the
    names as they stand do not fit."""
    if name_map is not None:
        return name_map, None
    mine, known = site_names(reference.records), site_names(candidate.records)
    prefix = None
    if not (mine <= known or known <= mine):
        prefix = find_prefix(mine, known)
    if prefix is None:
        return lambda site: site, None
    own, other = prefix

    def rename(site: str) -> str:
        if site.startswith(own) and other + site[len(own) :] in known:
            return other + site[len(own) :]
        return site

    return rename, prefix


def _order(pair: Pair) -> tuple[bool, int, int, int]:
    record = pair.reference.record
    return (pair.pass_ == "free", pair.reference.sample, record.step, record.order)


class _Parts:
    """Tensors that a run's ranks hold in parts which make none (run.unshard): with the reason."""

    def __init__(
        self, reference: Run, candidate: Run, passes: list[tuple[str, str, str]], rename: NameMap
    ) -> None:
        unmade = _reasons(reference)
        self._named = [
            (coordinates, (theirs, *coordinates[1:3], rename(coordinates[3])))
            for coordinates in unmade
            for _, ours, theirs in passes
            if coordinates[0] == ours
        ]
        self._ours = {key: unmade[coordinates] for coordinates, key in self._named}
        self._theirs = _reasons(candidate)
        self._compared = {theirs for _, _, theirs in passes}

    def of_reference(self, key: Coordinates) -> Fact | None:
        reason = self._ours.get(key)
        return reason and fact("align.parts_make_none", side="reference", reason=reason)

    def of_candidate(self, key: Coordinates) -> Fact | None:
        reason = self._theirs.get(key)
        return reason and fact("align.parts_make_none", side="candidate", reason=reason)

    def on_no_side(
        self, ours: Mapping[Coordinates, Piece], theirs: Mapping[Coordinates, Piece]
    ) -> list[Skipped]:
        """Those that the other side has not either, or not in one piece: nothing else tells."""
        skipped = [
            Skipped(*coordinates, "reference", self._ours[key])
            for coordinates, key in self._named
            if key not in theirs
        ]
        known = {key[1:] for key in (*ours, *self._ours)}
        skipped += [
            Skipped(*key, "candidate", reason)
            for key, reason in self._theirs.items()
            if key[0] in self._compared and key[1:] not in known
        ]
        return skipped


def _reasons(run: Run) -> dict[Coordinates, Fact]:
    """Why tensors of a run's ranks make no whole, in the words of who put them together."""
    unmade: dict[Coordinates, str] = getattr(run, "unmade", {})
    return {coordinates: plain(reason) for coordinates, reason in unmade.items()}


def compared_passes(a: Manifest, b: Manifest, notes: list[Fact]) -> list[tuple[str, str, str]]:
    """(name of the comparison, reference's pass, candidate's pass) of all that are compared tensor
    by tensor; the escalated pass is measured apart (measure.escalated)."""
    anchored = anchored_passes(a, b, notes)
    passes = [] if anchored is None else [("anchored", *anchored)]
    return [*passes, ("free", "free", "free")]


def anchored_passes(a: Manifest, b: Manifest, notes: list[Fact]) -> tuple[str, str] | None:
    """(reference's pass, candidate's pass) in which blocks had equal inputs, or where one side is a
    replay each operator had; if there is one."""
    replayed = replayed_from(a, b)
    if a.plan.replayed_pass is not None or b.plan.replayed_pass is not None:
        if replayed is None:
            notes.append(fact("align.no_source_of_replay"))
            return None
        own = [REPLAYED if m.plan.replayed_pass is not None else replayed[1] for m in (a, b)]
        return own[0], own[1]
    if b.plan.anchored_to is not None and b.plan.anchored_to == a.id:
        return "free", "anchored"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.id:
        return "anchored", "free"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.plan.anchored_to:
        return "anchored", "anchored"
    if a.plan.anchored_to or b.plan.anchored_to:
        notes.append(fact("align.anchored_to_others"))
    return None


def replayed_from(a: Manifest, b: Manifest) -> tuple[str, str] | None:
    """(id of the run, its pass) whose operators both sides ran on the same inputs: one is a replay
    of the other, or both are replays of one run. None where that is not so."""
    ours, theirs = a.plan, b.plan
    if theirs.replayed_pass is not None and theirs.anchored_to == a.id:
        return a.id, theirs.replayed_pass
    if ours.replayed_pass is not None and ours.anchored_to == b.id:
        return b.id, ours.replayed_pass
    if ours.replayed_pass is not None and ours.anchored_to is not None:
        source = ours.anchored_to, ours.replayed_pass
        return source if source == (theirs.anchored_to, theirs.replayed_pass) else None
    return None


def why_nothing(alignment: Alignment) -> Fact:
    """What to say where no tensor has a partner."""
    if alignment.notes and not (alignment.only_reference or alignment.only_candidate):
        return alignment.notes[0]
    if alignment.skipped:
        first = alignment.skipped[0]
        return fact("align.all_skipped", num=len(alignment.skipped), why=first.why)
    if alignment.only_reference and alignment.only_candidate:
        reference, candidate = alignment.only_reference[0], alignment.only_candidate[0]
        return fact("align.first_sites", reference=reference.site, candidate=candidate.site)
    return fact("align.empty_run")


def last_comparable_steps(a: Manifest, b: Manifest) -> dict[int, int]:
    """Per sample, the last step at which both sides had been fed the same tokens."""
    last: dict[int, int] = {}
    for number, (ours, theirs) in enumerate(zip(a.tokens.samples, b.tokens.samples, strict=False)):
        tokens = zip(ours.generated_ids, theirs.generated_ids, strict=False)
        different = next((index for index, (x, y) in enumerate(tokens) if x != y), None)
        if different is not None:
            last[number] = different
    for manifest in (a, b):  # a batched forward is as comparable as its worst sample
        for group in manifest.tokens.groups:
            steps = [last[number] for number in group if number in last]
            if steps:
                for number in group:
                    last[number] = min(steps)
    return last


def why_no_step(manifest: Manifest, side: str, sample: int, step: int) -> Fact:
    """Why that side has no such record: a prompt that met its end is fed padding where its batch
    goes on, and by itself it just ends."""
    samples = manifest.tokens.samples
    num = len(samples[sample].generated_ids) if sample < len(samples) else 0
    if 0 < num <= step and num < manifest.settings.max_new_tokens:
        return fact("align.prompt_ended", side=side, sample=sample, num_tokens=num)
    return _NO_PARTNER


_NO_PARTNER = fact("align.no_partner")
