"""Records of two runs brought together, by coordinates and by names that a map gives; and coverage:
what became of every record of both.

A verdict is worth what it looked at. ``align`` pairs the tensors of the passes that both runs hold.
``account`` adds what alignment alone does not see: passes, operators and forwards that the
candidate lacks, sites that an anchored pass should have shown and did not, and modules that only
the candidate has. It then counts, pass by pass, what the reference holds and what became of it
(PassCoverage). A record that is none of paired, unmatched, skipped and judged elsewhere would be a
fault of this tool; it is listed as missing, so that it can never pass unseen.

When is a site that only the candidate has a lack of coverage? Not where the candidate was asked to
record more (``--sites``), but where the *reference* was asked to record it too and has no such
module: its ``plan.sites`` select the site, and its ``plan.modules``, every module it had hooks on,
does not hold the module. That is another architecture, an extra block for instance. A module that
both have but that ran on one side alone (an expert that no token was sent to) is none.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from divergence.comparison.result import (
    OperatorsResult,
    PassCoverage,
    SiteResult,
    Skipped,
    TokensResult,
)
from divergence.errors import ConfigError, IncomparableError
from divergence.facts import Fact, fact, in_one, plain, sentence
from divergence.numerics.formats import format_named
from divergence.run.contents import call_passes, records_at, site_names
from divergence.run.manifest import Manifest, ModuleNote
from divergence.run.reader import Run, own_truth
from divergence.run.record import INPUTS, OWN_TRUTH, Coordinates, Record
from divergence.run.site import (
    BUILTIN_SITES,
    ROOT,
    compile_patterns,
    is_operator_site,
    is_scaled_with_loss,
    module_of,
    unescape_path,
)

# Runs as they are compared: of several ranks, one run.


def opened(run: str | Path | Run) -> Run:
    """The run, its ranks' tensors put together."""
    run = run if isinstance(run, Run) else Run.open(run)
    if run.manifest.mesh is None:
        return run
    from divergence.run.ranks import unsharded

    return unsharded(run)


def opened_truth(run: str | Path | Run) -> Run:
    """The truth that ``run`` is, or else the one that it carries, its ranks' tensors put together.
    The caller checks that it fits the runs."""
    run = opened(run)
    return run if run.manifest.settings.compute_dtype is not None else own_truth(run) or run


# Pieces of records: what is paired and read, a whole record or the rows of one sample.


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A record, or one sample's rows of it: ``[row, left : right]`` where ``row`` is set."""

    record: Record
    sample: int
    row: int | None = None
    """The sample's row of the batch; None for the whole record."""
    left: int = 0
    right: int = 0
    pads: int = 0
    """Positions that the batch put before the sample's first token."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows that it is."""
        whole = self.record.shape
        if self.row is None:
            return whole
        return (1, self.right - self.left, *whole[2:]) if len(whole) > 1 else (1,)


class Pair(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Two pieces that hold the same tensor of the model."""

    reference: Piece
    candidate: Piece
    pass_: str
    """The pass that they are compared as."""
    match: str
    """``exact``, or the name map's rule."""


def piece_like(true_record: Record, pair: Pair) -> Piece:
    """The truth's piece: cut like the side whose batches it has."""
    own = pair.reference if true_record.shape == pair.reference.record.shape else pair.candidate
    return Piece(true_record, own.sample, own.row, own.left, own.right, own.pads)


def indexed(run: Run, *, split: bool) -> dict[tuple[str, int, int, str], Piece]:
    """The tensors that are paired one by one, by (pass, sample, step, site); ``split``: batches are
    taken apart into their samples."""
    kinds = kinds_of(run)
    tensors = (record for record in run.records if kinds(record) == "tensor")
    if not split:
        return {
            (record.pass_, record.sample, record.step, record.site): Piece(record, record.sample)
            for record in tensors
        }
    return {
        (record.pass_, piece.sample, record.step, record.site): piece
        for record in tensors
        for piece in _pieces(record, run.manifest)
    }


def pieces_in(
    run: Run, pass_: str, *, split: bool, sites: Collection[str] | None = None
) -> dict[tuple[int, int, str], Piece]:
    """Every piece of one pass by (sample, step, site); ``split``: batches into their samples;
    ``sites``: of these alone."""
    records = run.records if sites is None else records_at(run.records, sites)
    return {
        (piece.sample, record.step, record.site): piece
        for record in records
        if record.pass_ == pass_
        for piece in (_pieces(record, run.manifest) if split else [Piece(record, record.sample)])
    }


def _pieces(record: Record, manifest: Manifest) -> Iterable[Piece]:
    """One piece for each sample in the record's batch, pads cut off."""
    group = manifest.tokens.group_of(record.sample)
    members = [manifest.tokens.samples[number] for number in group]
    padded = any(sample.num_left_pad or sample.num_right_pad for sample in members)
    if len(group) > 1 and record.shape[:1] == (1,) and not padded:  # one table for all prompts
        right = record.shape[1] if len(record.shape) > 1 else 0
        return [Piece(record, number, 0, 0, right) for number in group]
    alone = len(group) <= 1 and not padded
    if alone or not record.shape or record.shape[0] != len(group):
        return [Piece(record, record.sample)]
    pieces = []
    for row, (number, sample) in enumerate(zip(group, members, strict=True)):
        length = sample.num_padded
        left, right = 0, record.shape[1] if len(record.shape) > 1 else 0
        encoded = manifest.model.task == "encoder-decoder"  # goes into every step
        whole = record.step == 0 or encoded
        if whole and len(record.shape) > 2 and record.shape[1] == length:
            left, right = sample.num_left_pad, length - sample.num_right_pad
        pieces.append(Piece(record, number, row, left, right, sample.num_left_pad))
    return pieces


def why_no_pair(piece: Piece, other: Piece, *, exactly: bool = False) -> Fact | None:
    """Tells why two pieces cannot be compared, element by element, if so; ``exactly``: as they are,
    with no token positions picked out of one of them, and none held against several."""
    record, other_record = piece.record, other.record
    if piece.shape != other.shape:
        few, many = (record, other_record) if record.positions else (other_record, record)
        if (  # one side holds only some token positions, the other all: those can be picked out
            not exactly
            and piece.row is None
            and other.row is None
            and few.positions is not None
            and many.positions is None
            and len(few.shape) == len(many.shape) >= 2
            and few.shape[1] == len(few.positions)
            and many.shape[1] > max(few.positions, default=0)
            and few.shape[:1] + few.shape[2:] == many.shape[:1] + many.shape[2:]
        ):
            return None
        if exactly or not is_repeated(piece, other):
            return fact("align.shapes", reference=piece.shape, candidate=other.shape)
    if record.positions is not None and other_record.positions is not None:
        positions_a, positions_b = (
            [position - half.pads for position in half.record.positions or ()]
            for half in (piece, other)
        )
        if positions_a != positions_b:
            return fact("align.positions", reference=positions_a, candidate=positions_b)
    return None


def is_repeated(piece: Piece, other: Piece) -> bool:
    """Does one side hold once what the other holds for each prompt or head: rows of tokens, or
    integers for each token? It means the same as its copies (a table that all prompts share)."""
    short, long = sorted((piece.shape, other.shape), key=len)
    whole = all(format_named(side.record.dtype).kind == "int" for side in (piece, other))
    own = 1 if whole and len(long) == 2 else 2  # axes of one prompt's rows
    return (
        short != long
        and len(short) >= own
        and short[-own:] == long[-own:]
        and all(
            1 in sizes or len(set(sizes)) == 1
            for sizes in zip(short[::-1], long[::-1], strict=False)
        )
    )


class Pieces:
    """Reads pairs of two runs. ``inputs``: the run whose inputs anchored them, where at hand."""

    def __init__(self, reference: Run, candidate: Run, inputs: Run | None = None) -> None:
        self.reference, self.candidate = reference, candidate
        self._inputs = inputs
        groups = reference.manifest.tokens.groups
        self._groups = {group[0]: group for group in reversed(groups) if group}
        """By its first sample."""

    def array(self, run: Run, piece: Piece) -> np.ndarray:
        return self.rows_of(run.array(piece.record), piece)

    def rows_of(self, array: np.ndarray, piece: Piece) -> np.ndarray:
        """The piece's own part of a record's array, or of one of the same shape."""
        if piece.row is None:
            return array
        if array.ndim == 1:
            return array[piece.row : piece.row + 1]
        return array[piece.row : piece.row + 1, piece.left : piece.right]

    def base(self, pair: Pair) -> np.ndarray | None:
        """The pair's part of the block's input in the reference, if it has the output's shape.

        In an anchored pass that is the free input of the run which anchored it. Where that is
        a third run, which is not at hand, the reference's own stands in for it.
        """
        run, record, piece = self._base(pair)
        if record is None or not run.has_bytes(record):
            return None
        return self.rows_of(run.array(record), piece)

    def base_source(self, pair: Pair) -> tuple[Run, Record] | None:
        """The run and record that ``base`` reads, if it reads any."""
        run, record, _ = self._base(pair)
        return None if record is None or not run.has_bytes(record) else (run, record)

    def base_record(self, pair: Pair) -> Record | None:
        """The record of the block's input in the reference, where that is the one that counts."""
        run, record, _ = self._base(pair)
        return record if run is self.reference else None

    def _base(self, pair: Pair) -> tuple[Run, Record | None, Piece]:
        run, piece = self.reference, pair.reference
        if pair.pass_ != "free" and self._inputs is not None:
            run = self._inputs
            piece = pair.candidate if run is self.candidate else piece
        other = piece.record
        site = other.site.rpartition(":")[0] + ":in"
        record = run.find(("free", other.sample, other.step, site))
        fits = (
            record is not None
            and (record.shape, record.positions) == (other.shape, other.positions)
            and format_named(record.dtype).kind == "float"
        )
        return run, record if fits else None, piece

    def row_mask(self, piece: Piece, shape: Sequence[int]) -> np.ndarray | None:
        """True for real tokens, per row (all leading axes); None where nothing is padded."""
        if piece.row is not None or piece.record.step > 0 or len(shape) < 2:
            return None
        pads = self.reference.manifest.tokens.pads(piece.record.sample)
        if pads is None:
            return None
        kept = piece.record.positions
        mask = ~pads if kept is None else ~pads[:, list(kept)]
        flat = len(shape) == 2 and shape[0] == mask.size  # a router's tokens
        if not flat and (len(shape) < 3 or tuple(shape[:2]) != mask.shape):
            return None
        inner = 1 if flat else math.prod(shape[2:-1])
        return np.repeat(mask.reshape(-1), inner)

    def members(self, piece: Piece, shape: Sequence[int]) -> list[int]:
        """The prompts whose rows follow each other in equal parts; fewer than two where the forward
        held one, or the first axis is none of prompts."""
        if piece.row is not None or len(shape) < 2:
            return []
        group = self._groups.get(piece.record.sample, [])
        return group if len(group) > 1 and shape[0] == len(group) else []

    def locate(
        self, piece: Piece, shape: Sequence[int], row: int | None
    ) -> tuple[int | None, int | None]:
        """Finds (sample, token index) of a row, where rows are tokens: pads are not counted."""
        if row is None:
            return None, None
        if len(shape) < 3:
            members = self.members(piece, shape)
            return (members[row], None) if members else (None, None)
        record, tokens = piece.record, self.reference.manifest.tokens
        inner = max(math.prod(shape[2:-1]), 1)
        member, token = row // (inner * shape[1]), row // inner % shape[1]
        group = self._groups.get(record.sample) or [piece.sample]
        split = piece.row is not None or shape[0] != len(group)
        number = piece.sample if split else group[member]
        sample = tokens.samples[number]
        token += piece.left
        pads = sample.num_left_pad if piece.row is None else piece.pads
        if record.positions is not None:
            in_positions = token < len(record.positions)
            return number, record.positions[token] - pads if in_positions else None
        if record.step == 0:
            length = pads + len(sample.prompt_ids) + sample.num_right_pad
            length = length or self._num_fed(record.sample)
            rows = shape[1] == length if sample.media else shape[1] <= length  # not a tower's
            return number, token - pads if rows else None
        # what was fed before: an encoder-decoder's decoder has a prompt of its own
        before = len(sample.decoder_prompt_ids or sample.prompt_ids)
        return number, before + record.step - 1 + token

    def _num_fed(self, sample: int) -> int:
        """Tokens of a prompt whose ids no manifest tells (a model's own inputs), by the model's
        recorded input; 0 where that is none of tokens."""
        record = self.reference.find(("free", sample, 0, f"{ROOT}:in"))
        if record is None or len(record.shape) != 2 or format_named(record.dtype).kind != "int":
            return 0
        return record.shape[1]


def same_positions(
    a: np.ndarray, record_a: Record, b: np.ndarray, record_b: Record
) -> tuple[np.ndarray, np.ndarray]:
    """Picks out the tokens that both sides hold, and repeats what one side holds once and the other
    several times."""
    if a.shape == b.shape:
        return a, b
    if record_a.positions != record_b.positions:
        if record_a.positions is not None:
            return a, b[:, list(record_a.positions)]
        assert record_b.positions is not None  # they differ from those of the other side
        return a[:, list(record_b.positions)], b
    return repeated(a, b)


def repeated(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both in the shape of the larger: what one side holds once stands for each of the other's."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    return np.broadcast_to(a, shape), np.broadcast_to(b, shape)


_DIGEST = re.compile("[0-9a-f]{32}")

Kind = Literal["tensor", "operator", "weight", "whole", "truth"]


def kinds_of(run: Run) -> Callable[[Record], Kind]:
    """Return what a record of the run is, and with that how it is compared: an ``operator``'s by
    its place in the sequence of calls, which may differ (comparison.calls); a ``weight``, stored
    for replays, by its digest in preflight; a ``whole`` pass with its own run's decode steps
    (comparison.within); a ``truth``, or its floor, with nothing: both sides are held against it;
    any other ``tensor`` with the one at the same site.

    An operator is known by its call and not by the ``/`` in its site alone.
    """
    manifest = run.manifest
    calls: set[str] = set()
    if call_passes(run.records):
        calls = {r.site.rpartition(":")[0] for r in run.records if r.call is not None}
    sites: dict[str, tuple[bool, str | None]] = {}
    """By site: is it an operator's, and the digest of the weight that is named like it."""

    def look_up(site: str) -> tuple[bool, str | None]:
        operator = "/" in site and is_operator_site(site) and site.rpartition(":")[0] in calls
        path, _, port = site.partition(":")
        digest = None
        if port.startswith("in."):
            name = f"{unescape_path(path)}.{port.removeprefix('in.')}".removeprefix(".")
            digest = manifest.model.digests.get(name)
        sites[site] = operator, digest
        return sites[site]

    def kind(record: Record) -> Kind:
        if record.pass_ in (*OWN_TRUTH, "floor", INPUTS):
            return "truth"
        operator, digest = sites.get(record.site) or look_up(record.site)
        if operator:
            return "operator"
        if digest is not None:
            # an argument of a module may be named like a weight, too: the digest tells, but not of
            # a rank's part, an offloaded weight or on an accelerator
            exact = manifest.mesh is None and record.xxh3 is not None and _DIGEST.fullmatch(digest)
            if not exact or record.xxh3 == digest:
                return "weight"
        return "whole" if record.pass_ == "whole" else "tensor"

    return kind


PromptStep = tuple[int, int]
"""(sample, step)."""


def is_given(manifest: Manifest, site: str) -> bool:
    """Is it an input that an anchored or a whole pass puts in place?"""
    note = manifest.plan.modules.get(module_of(site))
    port = site.rpartition(":")[2]
    return port.startswith("in") and note is not None and note.role in ("block", "trunk")


def logits_record(run: Run, sample: int, step: int) -> tuple[Record | None, int]:
    """The logits that decided this token, if they were recorded, and which of their rows did."""
    site = run.manifest.plan.logits_site
    group = next((g for g in run.manifest.tokens.groups if sample in g), [sample])
    record = run.find(("free", group[0], step, site)) if site else None
    return record, group.index(sample)


def logits_row(run: Run, sample: int, step: int) -> np.ndarray | None:
    """The logits (V,) that decided this token, if they were recorded."""
    record, row = logits_record(run, sample, step)
    if record is None or not run.has_bytes(record):
        return None
    array = run.array(record)
    return array[row, -1] if array.ndim == 3 and row < array.shape[0] else None


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
    """Finds the (prefix in the reference, in the candidate) under which most sites agree.

    None where no pair of prefixes matches more sites than the names as they stand. Of each run
    the ``_MAX_PREFIXES`` with the most sites are tried, so that time grows with the sites alone.
    """
    names_a, names_b = set(reference), set(candidate)
    if names_a <= names_b or names_b <= names_a:
        return None
    rests, others = _by_rest(names_a), _by_rest(names_b)
    counts: Counter[tuple[str, str]] = Counter()
    for rest in rests.keys() & others.keys():
        counts.update((a, b) for a in rests[rest] for b in others[rest] if a != b)
    if not counts:
        return None
    best = min(counts, key=lambda pair: (-counts[pair], *map(_simplest, pair)))
    return best if counts[best] > len(names_a & names_b) else None


def _simplest(prefix: str) -> tuple[int, str]:
    return (prefix.count("."), prefix)


def _by_rest(sites: set[str]) -> dict[str, list[str]]:
    """Return what is left of the sites without a prefix, with the prefixes worth trying that they
    have: '', 'model.', 'model.language_model.' …"""
    holds = Counter(prefix for site in sites for prefix in _prefixes(site))
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
    ends = (n for n in range(1, min(4, len(parts))) if not parts[n - 1].isdigit())
    return ["", *(".".join(parts[:n]) + "." for n in ends)]


# Alignment: which tensor of one run belongs to which of the other.
#
# By (pass, sample, step, site). What has no partner is listed with its reason and is never a pass.
# A batch is split into its samples where the other run formed other batches, so that a batched run
# can be compared with a run of single prompts. Forwards are comparable while both sides had been
# fed the same tokens.
#
# Operators are matched elsewhere (comparison.calls). A replay holds nothing else: its operators
# each got the inputs that its source recorded, so the source and other replays of it are its
# partners.

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
    passes: Sequence[tuple[str, str, str]] = ()
    """Those that are compared tensor by tensor (``compared_passes``)."""
    pieces: tuple[Mapping[Coordinates, Piece], Mapping[Coordinates, Piece]] = ({}, {})
    """Of the reference and the candidate, what may be paired."""
    rename: NameMap = str
    """Maps a site of the reference to the candidate's."""

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
    passes = compared_passes(a, b)
    replays = a.plan.replayed_pass is not None or b.plan.replayed_pass is not None
    pieces_b = {} if replays else indexed(candidate, split=split)
    pieces_a = {} if replays else indexed(reference, split=split)
    pairs: list[Pair] = []
    only_reference: list[Skipped] = []
    only_candidate: list[Skipped] = []
    skipped: list[Skipped] = []
    used: set[Coordinates] = set()
    # tensors that a run's ranks hold in parts which make none (run.ranks): with the reason
    unmade, parts_b = _reasons(reference), _reasons(candidate)
    named = [
        (coordinates, (theirs_in, *coordinates[1:3], rename(coordinates[3])))
        for coordinates in unmade
        for _, ours_in, theirs_in in passes
        if coordinates[0] == ours_in
    ]
    parts_a = {key: unmade[coordinates] for coordinates, key in named}
    last_step = last_comparable_steps(a, b)
    scales = [manifest.training.loss_scale or 1.0 for manifest in (a, b)]
    for pass_, ours_in, theirs_in in passes:
        for (found_in, sample, step, site), piece in pieces_a.items():
            if found_in != ours_in:
                continue
            key = (theirs_in, sample, step, rename(site))
            partner = pieces_b.get(key)
            if partner is None:
                if pass_ == "free":
                    why = why_no_step(b, "candidate", sample, step)
                    if key in parts_b:
                        reason = parts_b[key]
                        why = fact("align.parts_make_none", side="candidate", reason=reason)
                    only_reference.append(Skipped(pass_, sample, step, site, "reference", why))
                continue
            used.add(key)
            apart = why_no_pair(piece, partner)
            if step > (last := last_step.get(sample, step)):
                apart = fact("align.other_tokens_before" if last >= 0 else "align.other_weights")
            elif scales[0] != scales[1] and is_scaled_with_loss(site):
                apart = fact("align.loss_scales", reference=scales[0], candidate=scales[1])
            if apart is not None:
                skipped.append(Skipped(pass_, sample, step, site, "both", apart))
                continue
            match = "exact" if key[3] == site else match_by_rule
            pairs.append(Pair(reference=piece, candidate=partner, pass_=pass_, match=match))
    compared = {theirs_in for _, _, theirs_in in passes}
    for key in pieces_b:
        if key in used:
            continue
        why = fact("align.pass_without_partner")
        if key[0] in compared:
            why = why_no_step(a, "reference", *key[1:3])
            if key in parts_a:
                reason = parts_a[key]
                why = fact("align.parts_make_none", side="reference", reason=reason)
        only_candidate.append(Skipped(*key, "candidate", why))
    # parts that the other side has not either, or not in one piece: nothing else tells
    skipped += [
        Skipped(*coordinates, "reference", parts_a[key])
        for coordinates, key in named
        if key not in pieces_b
    ]
    keys_a = {key[1:] for key in (*pieces_a, *parts_a)}
    skipped += [
        Skipped(*key, "candidate", reason)
        for key, reason in parts_b.items()
        if key[0] in compared and key[1:] not in keys_a
    ]
    return Alignment(
        pairs=sorted(
            pairs,
            key=lambda pair: (
                pair.pass_ == "free",
                pair.reference.sample,
                pair.reference.record.step,
                pair.reference.record.order,
            ),
        ),
        only_reference=only_reference,
        only_candidate=only_candidate,
        skipped=skipped,
        prefix=prefix,
        anchored=any(label == "anchored" for label, _, _ in passes),
        notes=why_not_anchored(a, b),
        passes=passes,
        pieces=(pieces_a, pieces_b),
        rename=rename,
    )


def renaming(
    reference: Run, candidate: Run, name_map: NameMap | None
) -> tuple[NameMap, tuple[str, str] | None]:
    """Return what a site of the reference is called in the candidate, and the prefixes by which,
    where the names as they stand do not fit."""
    if name_map is not None:
        return name_map, None
    names_a, names_b = site_names(reference.records), site_names(candidate.records)
    prefix = find_prefix(names_a, names_b)
    if prefix is None:
        return lambda site: site, None
    own, other = prefix

    def rename(site: str) -> str:
        if site.startswith(own) and other + site[len(own) :] in names_b:
            return other + site[len(own) :]
        return site

    return rename, prefix


def _reasons(run: Run) -> dict[Coordinates, Fact]:
    """Say why tensors of a run's ranks make no whole, in the words of who put them together."""
    return {coordinates: plain(reason) for coordinates, reason in run.unmade.items()}


def compared_passes(a: Manifest, b: Manifest) -> list[tuple[str, str, str]]:
    """Lists (name of the comparison, reference's pass, candidate's pass) of all that are compared
    tensor by tensor; the escalated pass is measured apart (measure.pairs)."""
    anchored = anchored_passes(a, b)
    return [*([("anchored", *anchored)] if anchored else []), ("free", "free", "free")]


def anchored_passes(a: Manifest, b: Manifest) -> tuple[str, str] | None:
    """Finds the (reference's pass, candidate's pass) in which blocks had equal inputs, or where one
    side is a replay each operator had; if there is one."""
    if a.plan.replayed_pass is not None or b.plan.replayed_pass is not None:
        replayed = replayed_from(a, b)
        if replayed is None:
            return None
        own = [REPLAYED if m.plan.replayed_pass is not None else replayed[1] for m in (a, b)]
        return own[0], own[1]
    if b.plan.anchored_to is not None and b.plan.anchored_to == a.id:
        return "free", "anchored"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.id:
        return "anchored", "free"
    if a.plan.anchored_to is not None and a.plan.anchored_to == b.plan.anchored_to:
        return "anchored", "anchored"
    return None


def why_not_anchored(a: Manifest, b: Manifest) -> list[Fact]:
    """Say why no anchored pass is used although one was recorded."""
    plans = a.plan, b.plan
    if anchored_passes(a, b) is not None:
        return []
    if any(plan.replayed_pass is not None for plan in plans):
        return [fact("align.no_source_of_replay")]
    return [fact("align.anchored_to_others")] if any(plan.anchored_to for plan in plans) else []


def replayed_from(a: Manifest, b: Manifest) -> tuple[str, str] | None:
    """Finds the (id of the run, its pass) whose operators both sides ran on the same inputs: one is
    a replay of the other, or both are replays of one run. None where that is not so."""
    plan_a, plan_b = a.plan, b.plan
    if plan_b.replayed_pass is not None and plan_b.anchored_to == a.id:
        return a.id, plan_b.replayed_pass
    if plan_a.replayed_pass is not None and plan_a.anchored_to == b.id:
        return b.id, plan_a.replayed_pass
    if plan_a.replayed_pass is not None and plan_a.anchored_to is not None:
        source = plan_a.anchored_to, plan_a.replayed_pass
        return source if source == (plan_b.anchored_to, plan_b.replayed_pass) else None
    return None


def why_nothing(alignment: Alignment) -> Fact:
    """Return what to say where no tensor has a partner."""
    if alignment.notes and not (alignment.only_reference or alignment.only_candidate):
        return alignment.notes[0]
    if alignment.skipped:
        whys = [item.why for item in alignment.skipped]
        alike = all(why == whys[0] for why in whys)
        return fact("align.all_skipped", num=len(whys), alike=alike, why=whys[0])
    if alignment.only_reference and alignment.only_candidate:
        reference, candidate = alignment.only_reference[0], alignment.only_candidate[0]
        sides = alignment.only_reference, alignment.only_candidate
        steps = [{item.step for item in side} for side in sides]
        if steps[0].isdisjoint(steps[1]):
            return fact("align.first_steps", reference=min(steps[0]), candidate=min(steps[1]))
        return fact("align.first_sites", reference=reference.site, candidate=candidate.site)
    return fact("align.empty_run")


def last_comparable_steps(a: Manifest, b: Manifest) -> dict[int, int]:
    """Per sample, the last step at which both sides had been fed the same tokens; -1 where they ran
    with weights that had become other ones."""
    last: dict[int, int] = {}
    for number, (ids_a, ids_b) in enumerate(zip(a.tokens.samples, b.tokens.samples, strict=False)):
        if ids_a.weights != ids_b.weights:
            last[number] = -1
            continue
        tokens = zip(ids_a.generated_ids, ids_b.generated_ids, strict=False)
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
    """Say why that side has no such record: a prompt that met its end is fed padding where its
    batch goes on, and by itself it just ends."""
    samples = manifest.tokens.samples
    num = len(samples[sample].generated_ids) if sample < len(samples) else 0
    if 0 < num <= step and num < manifest.settings.max_new_tokens:
        return fact("align.prompt_ended", side=side, sample=sample, num_tokens=num)
    return fact("align.no_partner")


UNACCOUNTED = fact("align.unaccounted")


@dataclass(slots=True)
class _Row:
    """Counts of one pass under way."""

    pass_: str
    what: Literal["tensors", "operators", "tokens"]
    counts: Counter[str] = field(default_factory=Counter)
    ways: list[Fact] = field(default_factory=list)
    why: Fact | None = None

    def add(self, fate: str, why: Fact | None = None, number: int = 1) -> None:
        self.counts[fate] += number
        if fate == "elsewhere" and why is not None and why not in self.ways:
            self.ways.append(why)
        elif fate in ("missing", "skipped", "extra") and self.why is None:
            self.why = why

    def result(self) -> PassCoverage:
        counts = {f"num_{fate}": number for fate, number in self.counts.items()}
        total = sum(number for fate, number in self.counts.items() if fate != "extra")
        return PassCoverage(
            pass_=self.pass_,
            what=self.what,
            num_reference=total,
            ways=in_one(self.ways),
            why=self.why,
            **cast(dict[str, Any], {"num_compared": 0, **counts}),
        )


def account(
    alignment: Alignment,
    a: Run,
    b: Run,
    *,
    escalated: Sequence[SiteResult] = (),
    operators: OperatorsResult | None = None,
) -> tuple[Alignment, list[PassCoverage]]:
    """The alignment with all that has no partner, and the coverage by pass.

    ``escalated``: what compare_escalated measured. ``operators``: those that were compared.
    Raises IncomparableError where all that was paired holds no element.
    """
    empty = sum(_is_empty(pair.reference, pair.candidate) for pair in alignment.pairs)
    if alignment.pairs and empty == len(alignment.pairs) and operators is None:
        raise IncomparableError(
            f"nothing was compared: none of the {empty} tensors in common has an element",
            where=f"{a.path} and {b.path}",
            hint="capture other sites, or a prompt that has tokens",
        )
    runs, rename = (a.manifest, b.manifest), alignment.rename
    replays = any(manifest.plan.replayed_pass is not None for manifest in runs)
    kinds = kinds_of(a), kinds_of(b)
    pieces, partners = alignment.pieces
    rows: dict[tuple[str, str], _Row] = {}
    missing: list[Skipped] = []

    def row_of(pass_: str, what: Literal["tensors", "operators"] = "tensors") -> _Row:
        return rows.setdefault((pass_, what), _Row(pass_, what))

    def lack(row: _Row, place: Coordinates, reason: Fact) -> None:
        """A record of the reference that nothing was held against."""
        row.add("missing", reason)
        missing.append(Skipped(*place, "reference", reason))

    # tensors of modules, in the passes that are compared one by one
    forwards = {key[:3] for key in partners}
    paired = {
        (pair.pass_, piece.sample, piece.record.step, piece.record.site): pair
        for pair in alignment.pairs
        for piece in (pair.reference,)
    }
    alone, skipped = (
        {(x.pass_, x.sample, x.step, x.site): x for x in items if x.side != "candidate"}
        for items in (alignment.only_reference, alignment.skipped)
    )
    for label, ours_in, theirs_in in alignment.passes:
        row = row_of(label)
        again = (ours_in, theirs_in) == ("free", "anchored")
        num_paired = num_empty = 0
        for found_in, sample, step, site in pieces:
            if found_in != ours_in:
                continue
            key = (label, sample, step, site)
            if (pair := paired.pop(key, None)) is not None:
                is_empty = _is_empty(pair.reference, pair.candidate)
                num_empty, num_paired = num_empty + is_empty, num_paired + 1
            elif again and (theirs_in, sample, step) not in forwards:
                continue  # no anchor reached it: judged in the free pass
            elif key in alone:
                row.add("missing", alone[key].why)
            elif key in skipped:
                row.add("skipped", skipped.pop(key).why)
            elif theirs_in == "anchored" and is_given(a.manifest, site):
                row.add("elsewhere", fact("align.given"))
            else:
                is_partner = (theirs_in, sample, step, rename(site)) in partners
                absent = fact("align.not_in_pass", pass_=theirs_in)
                lack(row, key, UNACCOUNTED if is_partner else absent)
        if num_empty:
            row.add("empty", number=num_empty)
        if num_paired > num_empty:
            row.add("compared", number=num_paired - num_empty)
    for item in skipped.values():  # parts of ranks that make no tensor
        if item.side == "reference":
            row_of(item.pass_).add("skipped", item.why)

    # passes of the reference that are not compared tensor by tensor, and its weights
    plan = b.manifest.plan
    compared = {own_pass for _, own_pass, _ in alignment.passes}
    judged = {(s.sample, s.step, s.site) for s in escalated if s.of != "candidate"}
    whole = {record.coordinates for record in b.records if record.pass_ == "whole"}
    for record in a.records:
        kind = kinds[0](record)
        pass_, sample, step, site = record.coordinates
        if kind in ("operator", "truth") or (
            kind == "tensor" and pass_ in compared and not replays
        ):
            continue
        row = row_of(pass_)
        if kind == "weight":
            row.add("elsewhere", fact("align.by_digest"))
        elif replays:
            row.add("missing", fact("align.replay_has_operators_alone"))
        elif kind == "whole":
            if ("whole", sample, step, rename(site)) in whole:
                row.add("elsewhere", fact("align.whole_alone"))
            else:
                lack(row, record.coordinates, fact("align.no_whole_pass"))
        elif pass_ == "escalated":
            if {(sample, step, site), (sample, step, rename(site))} & judged:
                row.add("compared")
            elif format_named(record.dtype).kind != "float":
                row.add("elsewhere", fact("align.not_widened"))
            elif "escalated" in plan.passes:
                lack(row, record.coordinates, fact("align.other_escalated_inputs"))
            else:
                reason = fact("align.no_such_pass", pass_=pass_, other_inputs=False)
                lack(row, record.coordinates, reason)
        elif plan.anchored_to == a.manifest.id:
            row.add("elsewhere", fact("align.closer"))
        else:
            reason = fact("align.no_such_pass", pass_=pass_, other_inputs=pass_ in plan.passes)
            lack(row, record.coordinates, reason)

    # operators, by module and forward: the calls may differ (comparison.calls)
    lone = set()
    if operators is not None:
        lone = {call.site for call in operators.unmatched if call.side == "reference"}
    called = [record for record in a.records if kinds[0](record) == "operator"]
    callers = {
        (r.pass_, r.sample, r.step, _caller(r))
        for r in (b.records if called else ())
        if kinds[1](r) == "operator"
    }
    passes = {own_pass: other for label, own_pass, other in alignment.passes if label == "anchored"}
    if runs[0].escalated_to is not None and runs[0].escalated_to == runs[1].escalated_to:
        passes["escalated"] = "escalated"
    for record in called:
        row = row_of(record.pass_, "operators")
        other = passes.get(record.pass_)
        caller = rename(f"{_caller(record)}:out").rpartition(":")[0]
        if other is None and record.pass_ in ("anchored", "free") and "free" in passes:
            row.add("elsewhere", fact("align.closer"))
        elif other is None and record.pass_ == "free" and operators is not None:
            row.add("elsewhere", fact("align.in_anchored_pass"))
        elif other is None:
            lack(row, record.coordinates, fact("align.no_anchored_operators"))
        elif (other, record.sample, record.step, caller) not in callers:
            reason = fact("align.no_operator_of", module=caller, pass_=other)
            lack(row, record.coordinates, reason)
        elif operators is None:
            lack(row, record.coordinates, fact("align.operators_not_compared"))
        else:
            own = record.site.rpartition(":")[0] in lone
            row.add("elsewhere" if own else "compared", fact("align.other_calls"))

    # sites of modules that the reference has not, though it was asked to record them; but a rank
    # hooks what it has
    if a.manifest.plan.modules and all(manifest.mesh is None for manifest in runs):
        known_paths = {rename(f"{path}:out").rpartition(":")[0] for path in a.manifest.plan.modules}
        selects = _selects(a.manifest.plan.sites, plan.sites)
        for item in alignment.only_candidate:
            path = module_of(item.site)
            note = plan.modules.get(path)
            if note is None or path in known_paths or item.pass_ not in ("free", "anchored"):
                continue
            if selects(path, note):
                row_of(item.pass_).add("extra", fact("align.no_such_module", module=path))

    alignment = replace(alignment, only_reference=[*alignment.only_reference, *missing])
    return alignment, [row.result() for row in rows.values() if row.counts]


def tokens_row(tokens: TokensResult | None) -> list[PassCoverage]:
    """The generated tokens as one more row: nothing where the reference generated none."""
    if tokens is None or not tokens.num_reference:
        return []
    row = _Row("free", "tokens")
    row.add("compared", number=tokens.num_tokens - tokens.num_other_text)
    if tokens.num_missing:
        row.add("missing", fact("align.fewer_tokens"), tokens.num_missing)
    rest = tokens.num_reference - sum(row.counts.values())
    if rest > 0:
        row.add("elsewhere", fact("align.other_text"), rest)
    return [row.result()]


def _is_empty(piece: Piece, other: Piece) -> bool:
    return piece.record.numel == 0 and other.record.numel == 0


def _selects(sites: Sequence[str], others: Sequence[str]) -> Callable[[str, ModuleNote], bool]:
    """Would a capture with these sites record something of a module, which one with ``others``
    has recorded? A run's regular expressions may be anything: what one selected on the other side
    it is taken to select here, and else to select nothing."""
    again = set(others) <= set(sites) and any(site.startswith("re:") for site in others)
    patterns = [
        site for site in sites if site not in BUILTIN_SITES and not site.startswith(("ops@", "re:"))
    ]
    match = compile_patterns([pattern.rpartition(":")[0] or pattern for pattern in patterns])

    def selects(path: str, note: ModuleNote) -> bool:
        trunk = "blocks" in sites and note.role in ("block", "trunk")
        if again or "modules" in sites or trunk:
            return True
        return any(match(f"{path}:{port}") for port in ("out", "in"))

    return selects


def _caller(record: Record) -> str:
    return record.site.rpartition(":")[0].rpartition("/")[0]


def run_notes(a: Run, b: Run, alignment: Alignment) -> list[Fact]:
    """Say what to know of the runs: names, cut off records, settings that were not met."""
    notes = list(alignment.notes)
    if alignment.prefix is not None:
        reference, candidate = (name or None for name in alignment.prefix)
        notes.append(fact("measure.prefix_read", reference=reference, candidate=candidate))
    for side, run in (("reference", a), ("candidate", b)):
        if run.torn_tail:
            notes.append(fact("measure.torn_tail", side=side))
        both = a.manifest.overrides if run is b else b.manifest.overrides
        for override in run.manifest.overrides:
            if override in both or override.name in ("sites", "model"):
                continue  # shared, or no influence on the numbers
            values = {"name": override.name, "used": override.used}
            notes.append(
                fact("measure.told_to_use", side=side, reference=override.reference, **values)
            )
        changed = run.manifest.plan.only_changed
        if changed is not None and not all(run.has_bytes(record) for record in run.records):
            notes.append(fact("measure.only_changed", side=side, run=changed))
    return notes
