"""Routing: which tokens both sides, and the truth, sent to the same experts.

A router chooses k of E experts for each token: a discrete choice. Where two scores are nearer
than rounding, correct machines choose differently, and from there on that token's rows are other
rows: an error of any size, without any fault. All other tokens are computed by the same experts
on both sides, and one of them that is far off is a fault, of one expert perhaps.

So in an anchored forward (of which every block gets recorded inputs, so that no choice of an
earlier block plays in) a token is *kept* for judging if it is chosen for alike. One that is not
is left out and counted, unless rounding does not explain it: where the recorded logits L decide
(each side's experts are its k largest on every token that is chosen for alike, or one side's on
every token at all; ten closer ones among them: of this forward, or of all that this side's router
made), a token whose experts are not the largest of its own side's L was sent elsewhere by the
choice itself. It is kept, and convicts. So it is where something beside the logits decides, and
more of the router's tokens went elsewhere than lie near a tie. That the logits themselves are no
farther off than rounding is judged at the router, like any other result. Nor does rounding choose
an expert twice.

Known only where every side recorded the choice (recording.model.structure), else None.
The free pass tells nothing: one rerouted token changes all later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from divergence.comparison.align.pieces import Pair, Piece
from divergence.comparison.results import SiteResult
from divergence.numerics.formats import format_named
from divergence.numerics.sums import RowMetrics
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import BACKWARD, is_operator_site, module_of
from divergence.words import Side

if TYPE_CHECKING:
    import torch

    from divergence.comparison.routers import Flips

__all__ = [
    "Routed", "Routes", "Routing", "Unexplained", "choices_in", "kept_rows", "route_key",
    "routed_blocks",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routed:
    """One pair's tokens. ``kept`` (T,) bool: judged; None where all are. ``num_rerouted``: left
    out; ``margin``: the largest gap of the reference's logits that was decided the other way, None
    where none was or it is not known. ``experts``: (T, k) the reference's, None where the pair
    comes before the choice. ``unexplained``: the first choice that rounding does not explain."""

    kept: torch.Tensor | None
    num_rerouted: int
    margin: float | None
    experts: torch.Tensor | None
    unexplained: Unexplained | None = None


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A choice of one forward that no rounding explains at ``tokens``, rows of ``num_tokens``:
    ``site`` has it, ``router`` made it (of unknown name: None), ``experts`` are both sides';
    ``follows``: does a side's every token go to the largest of its own logits?"""

    site: str
    router: str | None
    tokens: list[int]
    num_tokens: int
    experts: tuple[torch.Tensor, torch.Tensor]
    follows: tuple[bool, bool]


_ALL = Routed(None, 0, None, None)

_Choice = tuple[str | int | None, ...]
"""(pass, sample, step, block); with ``logits`` before it, of the router."""


class Routing:
    """Routing choices of two runs, read when asked for."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._reference, self._candidate = reference, candidate
        self._blocks = routed_blocks(reference.manifest)
        self._choices: dict[int, dict[_Choice, list[Record]]] = {}
        self._read: dict[tuple[int, str, int, int, str], torch.Tensor | None] = {}
        self._usual: dict[tuple[int, str, str], torch.Tensor | None] = {}
        self._flips: dict[tuple[str, str], Flips] = {}

    def of(
        self, pair: Pair, num_rows: int, truth: tuple[Run, Record] | None = None
    ) -> Routed | None:
        """What may be judged of a pair of ``num_rows`` rows; None where that is not known.
        ``truth``: its run and record, whose choices must agree as well."""
        if not self._blocks:
            return _ALL
        block = _block_of(module_of(pair.reference.record.site), self._blocks)
        if block is None and pair.pass_ != "free":
            return _ALL

        import torch

        from divergence.comparison.routers import explained_choices, follows, same_experts

        if BACKWARD in pair.reference.record.site:
            return self._of_backward(pair, num_rows, truth)
        if block is None:
            return _ALL
        if pair.pass_ == "free":
            return None
        sides = [(self._reference, pair.reference), (self._candidate, pair.candidate)]
        if truth is not None:
            sides.append((truth[0], _like(truth[1], pair)))
        choices = [self._of_forward(run, piece.record) for run, piece in sides]
        if not all(choices) or len({len(records) for records in choices}) > 1:
            return None
        kept = experts = margin = unexplained = None
        for choice in zip(*choices, strict=True):
            if choice[0].order > pair.reference.record.order:
                continue  # chosen later: it plays no part here
            read = [self._rows(run, record, piece) for (run, piece), record in
                    zip(sides, choice, strict=True)]  # fmt: skip
            rows = [row for row in read if row is not None]
            if len(rows) < len(read) or any(row.shape != rows[0].shape for row in rows):
                return None
            alike = same_experts(rows)
            logits = [self._logits(run, record, piece) for (run, piece), record in
                      zip(sides[:2], choice[:2], strict=True)]  # fmt: skip
            made = [(run, record) for (run, _), record in zip(sides[:2], choice[:2], strict=True)]
            usual = partial(self._usual_leads, made)
            flips = partial(self._flips_of, made, rows[:2], logits)
            explained, gap = explained_choices(alike, rows[:2], logits, usual, flips)
            tokens = (~explained & ~same_experts(rows[:2])).nonzero().flatten().tolist()
            if tokens and unexplained is None:
                router = self._router_of(self._reference, choice[0])
                unexplained = Unexplained(
                    choice[0].site, None if router is None else router.site, tokens, len(alike),
                    (rows[0][tokens], rows[1][tokens]),
                    (follows(rows[0], logits[0]), follows(rows[1], logits[1])),
                )  # fmt: skip
            alike = alike | ~explained
            kept = alike if kept is None else kept & alike
            experts = rows[0]
            margin = gap if margin is None else max(margin, gap or margin)
        if kept is None:
            return _ALL
        num_rerouted = int((~kept).sum())
        if len(kept) != num_rows:  # rows that are no tokens: sorted by expert, or parts of them
            return (
                _ALL
                if num_rerouted == 0
                else Routed(torch.zeros(num_rows, dtype=torch.bool), num_rerouted, margin, None)
            )
        return Routed(kept if num_rerouted else None, num_rerouted, margin, experts, unexplained)

    def _of_backward(self, pair: Pair, num_rows: int, truth: tuple[Run, Record] | None) -> Routed:
        """All rows or none: attention carries a rerouted token's gradient to all before it, and a
        parameter's gradient is a sum over the tokens of all prompts."""
        import torch

        from divergence.comparison.routers import same_experts

        record = pair.reference.record
        nothing = Routed(torch.zeros(num_rows, dtype=torch.bool), 0, None, None)
        if pair.pass_ == "free":
            return nothing
        sides = [(self._reference, record), (self._candidate, pair.candidate.record)]
        sides += [] if truth is None else [truth]  # each in its own pass
        whole = ":out." in record.site  # of a parameter
        samples = [group[0] for group in self._reference.manifest.tokens.groups]
        count = 0
        for sample in samples if whole else [record.sample]:
            choices = [
                self._of_forward(run, msgspec.structs.replace(own, sample=sample))
                for run, own in sides
            ]
            if not all(choices) or len({len(records) for records in choices}) > 1:
                return nothing
            for choice in zip(*choices, strict=True):
                read = [self._tensor(run, rec) for (run, _), rec in zip(sides, choice, strict=True)]
                rows = [ids.flatten(0, -2).sort().values for ids in read if ids is not None]
                if len(rows) < len(read) or any(row.shape != rows[0].shape for row in rows):
                    return nothing
                count += int((~same_experts(rows)).sum())
        return _ALL if count == 0 else replace(nothing, num_rerouted=count)

    def is_known(self, pair: Pair) -> bool:
        """Did both sides record the choices of this pair's forward? True where there are none."""
        if _block_of(module_of(pair.reference.record.site), self._blocks) is None:
            return True
        sides = (self._reference, pair.reference), (self._candidate, pair.candidate)
        return pair.pass_ != "free" and all(
            self._of_forward(run, piece.record) for run, piece in sides
        )

    def _of_forward(self, run: Run, record: Record, *kind: str) -> list[Record]:
        """The choices that a record's block made in its forward, in order; with ``logits``, the
        routers' results."""
        known = self._choices.get(id(run))
        if known is None:
            known = self._choices[id(run)] = choices_in(run)
        block = _block_of(module_of(record.site), routed_blocks(run.manifest))
        return known.get((*kind, record.pass_, record.sample, record.step, block), [])

    def _rows(self, run: Run, choice: Record, piece: Piece) -> torch.Tensor | None:
        """(T, k): the experts of the piece's tokens, in ascending order."""
        tensor = self._tensor(run, choice)
        if tensor is None:
            return None
        return _of_piece(tensor, choice, run.manifest, piece)

    def _logits(self, run: Run, choice: Record, piece: Piece) -> torch.Tensor | None:
        """(T, E) of the router beside the experts that were chosen."""
        record = self._router_of(run, choice)
        tensor = None if record is None else self._tensor(run, record)
        if record is None or tensor is None:
            return None
        return _of_piece(tensor, record, run.manifest, piece)

    def _router_of(self, run: Run, choice: Record) -> Record | None:
        """The logits that the choice was made of."""
        parent = module_of(choice.site).rpartition(".")[0] + "."
        beside = (record for record in self._of_forward(run, choice, "logits")
                  if module_of(record.site).startswith(parent))  # fmt: skip
        return next(beside, None)

    def _flips_of(
        self, made: Sequence[tuple[Run, Record]], rows: Sequence[torch.Tensor],
        logits: Sequence[torch.Tensor | None],
    ) -> Flips:  # fmt: skip
        """What this router sent elsewhere in all forwards of the pass that both sides batched
        alike; where that is none, in the one of these ``rows``."""
        from divergence.comparison.routers import Flips

        (a, choice_a), (b, choice_b) = made
        key = choice_a.pass_, choice_a.site
        if key not in self._flips:
            theirs = {
                (record.sample, record.step): record
                for records in self._choices[id(b)].values()
                for record in records
                if (record.pass_, record.site) == (choice_b.pass_, choice_b.site)
            }
            forwards = []
            for records in self._choices[id(a)].values():
                for record in records:
                    other = theirs.get((record.sample, record.step))
                    if (record.pass_, record.site) != key or other is None:
                        continue
                    pieces = [(run, own, Piece(own, own.sample, None, 0, 0, 0))
                              for run, own in ((a, record), (b, other))]  # fmt: skip
                    chosen = [rows for rows in (self._rows(*side) for side in pieces)
                              if rows is not None]  # fmt: skip
                    if len(chosen) == 2 and chosen[0].shape == chosen[1].shape:
                        forwards.append(Flips.of(chosen, [self._logits(*side) for side in pieces]))
            self._flips[key] = Flips.together(forwards or [Flips.of(rows, logits)])
        return self._flips[key]

    def _usual_leads(self, made: Sequence[tuple[Run, Record]]) -> list[torch.Tensor | None]:
        """Of each run's choice the leads of all tokens that this router chose for in this pass, in
        whatever prompt and step; None where one did not follow its logits, or that is not known."""
        import torch

        for run, choice in made:
            key = id(run), choice.pass_, choice.site
            if key not in self._usual:
                leads = [
                    self._leads_of(run, record)
                    for records in self._choices[id(run)].values()
                    for record in records
                    if (record.pass_, record.site) == (choice.pass_, choice.site)
                ]
                known = [lead for lead in leads if lead is not None]
                self._usual[key] = torch.cat(known) if len(known) == len(leads) else None
        return [self._usual[id(run), choice.pass_, choice.site] for run, choice in made]

    def _leads_of(self, run: Run, choice: Record) -> torch.Tensor | None:
        """Of one forward, if all follow."""
        from divergence.comparison.routers import follows, lead_of

        whole = Piece(choice, choice.sample, None, 0, 0, 0)
        chosen, logits = self._rows(run, choice, whole), self._logits(run, choice, whole)
        if chosen is None or logits is None or not follows(chosen, logits):
            return None
        return lead_of(chosen, logits.double())

    def _tensor(self, run: Run, record: Record) -> torch.Tensor | None:
        key = (id(run), record.pass_, record.sample, record.step, record.site)
        if key not in self._read:
            if len(self._read) > _REMEMBERED:
                self._read.clear()
            self._read[key] = run.read(record) if run.has_bytes(record) else None
        return self._read[key]


_REMEMBERED = 512


def routed_blocks(manifest: Manifest) -> list[str]:
    """The blocks that choose experts."""
    return [path for path, note in manifest.plan.modules.items() if note.routed]


def _block_of(path: str, blocks: Sequence[str]) -> str | None:
    return next((b for b in blocks if path == b or path.startswith(b + ".")), None)


def choices_in(run: Run) -> dict[_Choice, list[Record]]:
    """By (pass, sample, step, block): which experts, (T, k) integers; with ``logits`` before it,
    the routers' first results."""
    blocks, by_choice = routed_blocks(run.manifest), dict[_Choice, list[Record]]()
    notes = run.manifest.plan.modules
    beside = {path.rpartition(".")[0] for path in notes if path.endswith(".experts")}
    for record in run.records if blocks else ():
        path, port = module_of(record.site), record.site.rpartition(":")[2]
        block = _block_of(path, blocks)
        if block is None or is_operator_site(record.site) or len(record.shape) < 2:
            continue
        key = (record.pass_, record.sample, record.step, block)
        floats = format_named(record.dtype).kind == "float"
        if path.endswith(".experts"):
            if port.startswith("in.") and not floats:
                by_choice.setdefault(key, []).append(record)
        elif port == "out" and floats and path.rpartition(".")[0] in beside:
            by_choice.setdefault(("logits", *key), []).append(record)
    for records in by_choice.values():
        records.sort(key=lambda record: record.order)
    return by_choice


def _like(true_record: Record, pair: Pair) -> Piece:
    """The truth's piece: cut like the side whose batches it has."""
    own = pair.reference if true_record.shape == pair.reference.record.shape else pair.candidate
    return Piece(true_record, own.sample, own.row, own.left, own.right, own.pads)


def _of_piece(
    tensor: torch.Tensor, told: Record, manifest: Manifest, piece: Piece
) -> torch.Tensor | None:
    """The rows that a piece has, (T, n), of what ``told`` records of its forward's tokens."""
    record = piece.record
    if tensor.ndim == 2:
        group = manifest.tokens.group_of(record.sample) or [0]
        if len(tensor) % max(len(group), 1):
            return None
        tensor = tensor.reshape(max(len(group), 1), -1, tensor.shape[-1])
    if record.positions != told.positions:
        wanted = list(record.positions or ())
        if told.positions is not None or max(wanted, default=0) >= tensor.shape[1]:
            return None
        tensor = tensor[:, wanted]
    if piece.row is not None:
        tensor = tensor[piece.row : piece.row + 1, piece.left : piece.right]
    return tensor.reshape(-1, tensor.shape[-1])


def kept_rows(rows: RowMetrics, routed: Routed) -> RowMetrics:
    """The rows that are judged; the others count as masked."""
    if routed.kept is None:
        return rows
    return msgspec.structs.replace(
        rows, rel_l2=np.where(routed.kept.numpy(), rows.rel_l2, math.nan)
    )


RouteKey = tuple[Side | None, str, int, int, str]
"""(whose escalated pass, pass, sample, step, site)"""


@dataclass(slots=True)
class Routes:
    """By (whose, pass, sample, step, site), of what lies behind a choice: each token's ratio (T,),
    nan where it is not judged, and its experts (T, k); ``margin``: the widest gap of logits that
    rounding decided; ``unexplained``: by the first result behind it, a choice that it did not.
    Whose: the side of an escalated pass, else None."""

    found: dict[RouteKey, tuple[np.ndarray, torch.Tensor]] = field(default_factory=dict)
    margin: float | None = None
    unexplained: dict[tuple[int, int, str], tuple[SiteResult, Unexplained]] = field(
        default_factory=dict
    )

    def take(self, other: Routes, of: Side | None) -> None:
        """Those of an escalated pass."""
        self.found |= {(of, *key[1:]): value for key, value in other.found.items()}

    def add(self, result: SiteResult, routed: Routed, ratio: np.ndarray | None) -> None:
        if routed.margin is not None:
            self.margin = max(routed.margin, self.margin or 0.0)
        if routed.unexplained is not None:
            place = result.sample, result.step, routed.unexplained.site
            self.unexplained.setdefault(place, (result, routed.unexplained))
        if ratio is not None and routed.experts is not None and len(ratio) == len(routed.experts):
            self.found[route_key(result)] = ratio, routed.experts


def route_key(result: SiteResult) -> RouteKey:
    return result.of, result.pass_, result.sample, result.step, result.site
