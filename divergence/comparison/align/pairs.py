"""Alignment: which tensor of one run belongs to which of the other.

By (pass, sample, step, site). What has no partner is listed with its reason and is
never a pass. A batch is split into its samples where the other run formed other
batches, so that a batched run can be compared with a run of single prompts.

Operators are matched elsewhere (calls.match). A replay holds nothing else: its operators each
got the inputs that its source recorded, so the source and other replays of it are its partners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from divergence.comparison.align.fed import last_comparable_steps, why_no_step
from divergence.comparison.align.kinds import kinds_of
from divergence.comparison.align.names import NameMap, find_prefix
from divergence.comparison.result import Skipped
from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Coordinates, Record
from divergence.words import SideOrBoth

__all__ = [
    "Alignment",
    "Pair",
    "Piece",
    "align",
    "anchored_passes",
    "compared_passes",
    "indexed",
    "pieces_in",
    "renaming",
    "replayed_from",
    "why_no_pair",
]

REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A record, or one sample's rows of it: ``[row, left : right]`` where ``row`` is set."""

    record: Record
    sample: int
    row: int | None = None
    """The sample's row of the batch; None for the whole record."""
    left: int = 0
    right: int = 0
    pads: int = 0
    """Positions that the batch put before the sample's first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two pieces that hold the same tensor of the model."""

    reference: Piece
    candidate: Piece
    pass_: str
    """The pass that they are compared as."""
    match: str
    """``exact``, or the name map's rule."""


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
    notes: list[str]
    """Why no anchored pass was used although one was recorded."""


def align(reference: Run, candidate: Run, *, name_map: NameMap | None = None) -> Alignment:
    """Pair the two runs' records."""
    a, b = reference.manifest, candidate.manifest
    split = a.tokens.groups != b.tokens.groups
    rename, prefix = renaming(reference, candidate, name_map)
    notes: list[str] = []
    passes = compared_passes(a, b, notes)
    anchored = any(label == "anchored" for label, _, _ in passes)
    replays = a.plan.replayed_pass is not None or b.plan.replayed_pass is not None
    theirs = {} if replays else indexed(candidate, split=split)
    ours = {} if replays else indexed(reference, split=split)
    pairs: list[Pair] = []
    only_reference: list[Skipped] = []
    skipped: list[Skipped] = []
    used: set[Coordinates] = set()
    parts = _Parts(reference, candidate, passes, rename)
    last_step = last_comparable_steps(a, b)
    for pass_, ours_in, theirs_in in passes:
        for (found_in, sample, step, site), piece in ours.items():
            if found_in != ours_in:
                continue
            key = (theirs_in, sample, step, rename(site))
            other = theirs.get(key)
            if other is None:
                if pass_ == "free":
                    why = parts.of_candidate(key) or why_no_step(b, "candidate", sample, step)
                    only_reference.append(_skip(pass_, sample, step, site, why, "reference"))
                continue
            used.add(key)
            reason = why_no_pair(piece, other)
            if step > last_step.get(sample, step):
                reason = "after the first different token the two sides were fed different tokens"
            if reason is not None:
                skipped.append(_skip(pass_, sample, step, site, reason, "both"))
                continue
            match = "exact" if key[3] == site else _rule(prefix)
            pairs.append(Pair(reference=piece, candidate=other, pass_=pass_, match=match))
    compared = {theirs_in for _, _, theirs_in in passes}
    alone = "pass without a partner"
    only_candidate = [
        _skip(
            *key,
            (parts.of_reference(key) or why_no_step(a, "reference", *key[1:3]))
            if key[0] in compared
            else alone,
            "candidate",
        )
        for key in theirs
        if key not in used
    ]
    skipped += parts.on_no_side(ours, theirs)
    order = {"anchored": 0, "free": 1}
    pairs.sort(
        key=lambda pair: (
            order[pair.pass_],
            pair.reference.sample,
            pair.reference.record.step,
            pair.reference.record.order,
        )
    )
    return Alignment(
        pairs=pairs, only_reference=only_reference, only_candidate=only_candidate,
        skipped=skipped, prefix=prefix, anchored=anchored, notes=notes,
    )  # fmt: skip


class _Parts:
    """Tensors that a run's ranks hold in parts which make none (run.unshard): with the reason."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        passes: list[tuple[str, str, str]],
        rename: NameMap,
    ) -> None:
        unmade: dict[Coordinates, str] = getattr(reference, "unmade", {})
        self._named = [
            (coordinates, (theirs, *coordinates[1:3], rename(coordinates[3])))
            for coordinates in unmade
            for _, ours, theirs in passes
            if coordinates[0] == ours
        ]
        self._ours = {key: unmade[coordinates] for coordinates, key in self._named}
        self._theirs: dict[Coordinates, str] = getattr(candidate, "unmade", {})
        self._compared = {theirs for _, _, theirs in passes}

    def of_reference(self, key: Coordinates) -> str | None:
        reason = self._ours.get(key)
        return None if reason is None else f"in the reference {reason}"

    def of_candidate(self, key: Coordinates) -> str | None:
        reason = self._theirs.get(key)
        return None if reason is None else f"in the candidate {reason}"

    def on_no_side(
        self, ours: Mapping[Coordinates, Piece], theirs: Mapping[Coordinates, Piece]
    ) -> list[Skipped]:
        """Those that the other side has not either, or not in one piece: nothing else tells."""
        found = [
            _skip(*coordinates, self._ours[key], "reference")
            for coordinates, key in self._named
            if key not in theirs
        ]
        known = {key[1:] for key in (*ours, *self._ours)}
        found += [
            _skip(*key, reason, "candidate")
            for key, reason in self._theirs.items()
            if key[0] in self._compared and key[1:] not in known
        ]
        return found


def compared_passes(a: Manifest, b: Manifest, notes: list[str]) -> list[tuple[str, str, str]]:
    """(name of the comparison, reference's pass, candidate's pass) of all that are compared tensor
    by tensor; the escalated pass is measured apart (measure.escalated)."""
    anchored = anchored_passes(a, b, notes)
    passes = [] if anchored is None else [("anchored", *anchored)]
    return [*passes, ("free", "free", "free")]


def anchored_passes(a: Manifest, b: Manifest, notes: list[str]) -> tuple[str, str] | None:
    """(reference's pass, candidate's pass) in which blocks had equal inputs, or where one side is a
    replay each operator had; if there is one."""
    if a.plan.replayed_pass is not None or b.plan.replayed_pass is not None:
        return _replayed_passes(a, b, notes)
    if b.plan.anchored_to is not None and b.plan.anchored_to == a.id:
        return "free", "anchored"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.id:
        return "anchored", "free"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.plan.anchored_to:
        return "anchored", "anchored"
    if a.plan.anchored_to or b.plan.anchored_to:
        notes.append("an anchored pass was recorded, but to another run's inputs: not used")
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
        one = ours.anchored_to, ours.replayed_pass
        return one if one == (theirs.anchored_to, theirs.replayed_pass) else None
    return None


def _replayed_passes(a: Manifest, b: Manifest, notes: list[str]) -> tuple[str, str] | None:
    """(reference's pass, candidate's pass) whose operators had equal inputs, each by itself."""
    found = replayed_from(a, b)
    if found is None:
        notes.append(
            "a replay is compared with the run whose operators it ran again, or with another "
            "replay of the same pass of that run"
        )
        return None
    one, two = (REPLAYED if m.plan.replayed_pass is not None else found[1] for m in (a, b))
    return one, two


def renaming(
    reference: Run, candidate: Run, name_map: NameMap | None
) -> tuple[NameMap, tuple[str, str] | None]:
    if name_map is not None:
        return name_map, None
    prefix = find_prefix({r.site for r in reference.records}, {r.site for r in candidate.records})
    if prefix is None:
        return lambda site: site, None
    own, other = prefix
    known = {r.site for r in candidate.records}

    def rename(site: str) -> str:
        if site.startswith(own) and other + site[len(own) :] in known:
            return other + site[len(own) :]
        return site

    return rename, prefix


def _rule(prefix: tuple[str, str] | None) -> str:
    if prefix is None:
        return "name map"
    return f"prefix {prefix[0] or '(none)'} → {prefix[1] or '(none)'}"


def indexed(run: Run, *, split: bool) -> dict[tuple[str, int, int, str], Piece]:
    """The tensors that are paired one by one, by (pass, sample, step, site); ``split``: batches are
    taken apart into their samples."""
    pieces: dict[tuple[str, int, int, str], Piece] = {}
    kinds = kinds_of(run)
    for record in run.records:
        if kinds(record) != "tensor":
            continue
        for piece in _pieces(record, run.manifest) if split else [Piece(record, record.sample)]:
            pieces[record.pass_, piece.sample, record.step, record.site] = piece
    return pieces


def pieces_in(run: Run, pass_: str, *, split: bool) -> dict[tuple[int, int, str], Piece]:
    """Every piece of one pass by (sample, step, site); ``split``: batches into their samples."""
    return {
        (piece.sample, record.step, record.site): piece
        for record in run.records
        if record.pass_ == pass_
        for piece in (_pieces(record, run.manifest) if split else [Piece(record, record.sample)])
    }


def _pieces(record: Record, manifest: Manifest) -> Iterable[Piece]:
    """One piece for each sample in the record's batch, pads cut off."""
    group = next((g for g in manifest.tokens.groups if g and g[0] == record.sample), [])
    members = [manifest.tokens.samples[number] for number in group]
    padded = any(sample.num_left_pad or sample.num_right_pad for sample in members)
    if len(group) > 1 and record.shape[:1] == (1,) and not padded:  # one table for all prompts
        right = record.shape[1] if len(record.shape) > 1 else 0
        return [Piece(record, number, 0, 0, right) for number in group]
    if len(group) <= 1 or not record.shape or record.shape[0] != len(group):
        return [Piece(record, record.sample)]
    pieces = []
    for row, (number, sample) in enumerate(zip(group, members, strict=True)):
        length = sample.num_left_pad + len(sample.prompt_ids) + sample.num_right_pad
        left, right = 0, record.shape[1] if len(record.shape) > 1 else 0
        encoded = manifest.model.task == "encoder-decoder"  # goes into every step
        if (
            (record.step == 0 or encoded) and len(record.shape) > 2 and record.shape[1] == length
        ):  # fmt: skip
            left, right = sample.num_left_pad, length - sample.num_right_pad
        pieces.append(Piece(record, number, row, left, right, sample.num_left_pad))
    return pieces


def _shape(piece: Piece) -> tuple[int, ...]:
    shape = piece.record.shape
    if piece.row is None:
        return shape
    return (1, piece.right - piece.left, *shape[2:]) if len(shape) > 1 else (1,)


def why_no_pair(piece: Piece, other: Piece, *, exactly: bool = False) -> str | None:
    """None if the pieces can be compared, element by element; ``exactly``: as they are, with no
    token positions picked out of one of them."""
    one, two = piece.record, other.record
    if _shape(piece) != _shape(other):
        narrowed = one.positions is None or two.positions is None
        if not exactly and narrowed and _selectable(piece, other):
            return None
        return f"shapes differ: {list(_shape(piece))} and {list(_shape(other))}"
    if one.positions is not None and two.positions is not None:
        mine, theirs = _positions(piece), _positions(other)
        if mine != theirs:
            return f"token positions differ: {mine} and {theirs}"
    return None


def _positions(piece: Piece) -> list[int]:
    """The record's token positions, pads not counted."""
    return [position - piece.pads for position in piece.record.positions or ()]


def _selectable(piece: Piece, other: Piece) -> bool:
    """One side holds only some token positions, the other all: those can be picked out."""
    if piece.row is not None or other.row is not None:
        return False
    few, many = (
        (piece.record, other.record) if piece.record.positions else (other.record, piece.record)
    )
    return (
        few.positions is not None
        and many.positions is None
        and len(few.shape) == len(many.shape) >= 2
        and few.shape[1] == len(few.positions)
        and many.shape[1] > max(few.positions, default=0)
        and few.shape[:1] + few.shape[2:] == many.shape[:1] + many.shape[2:]
    )


def _skip(pass_: str, sample: int, step: int, site: str, reason: str, side: SideOrBoth) -> Skipped:
    return Skipped(pass_=pass_, sample=sample, step=step, site=site, reason=reason, side=side)


def why_nothing(alignment: Alignment) -> str:
    """What to say where no tensor has a partner."""
    if alignment.notes and not (alignment.only_reference or alignment.only_candidate):
        return alignment.notes[0]
    if alignment.skipped:
        return f"{len(alignment.skipped)} were skipped, the first because: " + (
            alignment.skipped[0].reason
        )
    if alignment.only_reference and alignment.only_candidate:
        return (
            f"the first sites are {alignment.only_reference[0].site} and "
            f"{alignment.only_candidate[0].site}; if they mean the same, give --map FILE"
        )
    return "one of the runs is empty"
