"""What a run says of the tokens of its prompts: log-probabilities, whatever they come from.

A run of log-probabilities holds them. A run of a model holds logits, and its log-probabilities are
their log-softmax in float64: the row at a token decides the next one.

A sequence is prompt and answer. Two sides are compared at a token where all tokens before it
are the same: at equal tokens Δ = log p(candidate) - log p(reference), at the first other one the
margin. Where a side does not tell its prompt, answers are laid side by side from their first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from divergence.comparison.align.pieces import Pieces, pieces_in
from divergence.errors import RunFormatError, UsageError
from divergence.run.command import command_line
from divergence.run.contents import name_of
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import LOGPROB_IDS_SITE, LOGPROBS, LOGPROBS_SITE

__all__ = ["Distribution", "Sequence", "facts_of", "sequences_of"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is known of one token's distribution: ids and log-probabilities, the likeliest first.
    ``whole``: of all ids."""

    ids: np.ndarray
    log: np.ndarray
    whole: bool = False

    def of(self, token: int) -> float | None:
        """log p of a token, if it is known."""
        indices = np.flatnonzero(self.ids == token)
        return float(self.log[indices[0]]) if len(indices) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One prompt with its answer. ``rows``: of each scored token, by its index in ``ids``."""

    ids: list[int]
    num_prompt: int
    """0 where the prompt is not told."""
    rows: dict[int, int]
    """Index in ``ids`` → row of ``logprobs``."""
    logprobs: np.ndarray
    distribution: Callable[[int], Distribution]
    """Of a row."""


def facts_of(run: Run) -> dict[str, str]:
    """What the run's source said of itself."""
    engine = run.manifest.engine
    return {} if engine is None else engine.facts


def sequences_of(run: Run) -> list[Sequence]:
    """One a prompt. Raises UsageError for a model's run that kept no logits."""
    if run.manifest.plan.sites == [LOGPROBS]:
        return [_recorded(run, number) for number in range(len(run.manifest.tokens.samples))]
    site = run.manifest.plan.logits_site
    records = [] if site is None else [
        record for record in run.records if record.pass_ == "free" and record.site == site
    ]  # fmt: skip
    if not records or not all(map(run.has_bytes, records)):
        raise UsageError(
            f"{run.path} holds no logits, from which its log-probabilities would follow",
            hint=command_line("capture", like=run.path, o="RUN") + " --sites blocks --store full",
        )
    return _from_logits(run, str(site))


def _recorded(run: Run, number: int) -> Sequence:
    sample = run.manifest.tokens.samples[number]
    ids = [*sample.prompt_ids, *sample.generated_ids]
    record = run.find(("free", number, 0, LOGPROBS_SITE))
    tokens = run.find(("free", number, 0, LOGPROB_IDS_SITE))
    # a nan beside a character was written by an earlier version, and nobody told it
    untold = facts_of(run).get("units") == "characters"
    if record is None or tokens is None or record.positions is None or untold:
        empty = Distribution(np.empty(0, np.int64), np.empty(0))
        return Sequence(ids=ids, num_prompt=len(sample.prompt_ids), rows={},
                        logprobs=np.empty(0), distribution=lambda row: empty)  # fmt: skip
    _check(run, record, tokens)
    values = run.read(record)[0].double().numpy()
    table = run.read(tokens)[0].numpy().astype(np.int64)

    def distribution(row: int) -> Distribution:
        told = table[row] >= 0
        known, first = np.unique(table[row][told], return_index=True)
        order = np.argsort(-values[row][told][first], kind="stable")
        return Distribution(known[order], values[row][told][first][order])

    return Sequence(
        ids=ids, num_prompt=len(sample.prompt_ids),
        rows={p: row for row, p in enumerate(record.positions) if p < len(ids)},
        logprobs=values[:, 0], distribution=distribution,
    )  # fmt: skip


def _check(run: Run, record: Record, tokens: Record) -> None:
    """Raises RunFormatError for records of another form than docs/dump-format.md has."""
    kinds = record.dtype, tokens.dtype
    fits = len(record.shape) == 3 and record.shape[0] == 1 and record.shape[2] > 0
    if not fits or record.shape != tokens.shape or kinds != ("float32", "int32"):
        raise RunFormatError(
            f"log-probabilities of {record.dtype} {list(record.shape)} with ids of {tokens.dtype} "
            f"{list(tokens.shape)}: float32 and int32 (1, T, K) are expected",
            where=f"{run.path}, {name_of(record)}",
        )


def _from_logits(run: Run, site: str) -> list[Sequence]:
    """Of a model's run, each row once: read when it is asked for, since a vocabulary is long."""
    reader = Pieces(run, run)
    places: list[dict[int, tuple[object, int]]] = [{} for _ in run.manifest.tokens.samples]
    for (number, step, _), piece in sorted(
        pieces_in(run, "free", split=True, sites=[site]).items(), key=lambda item: item[0][:2]
    ):
        sample, record = run.manifest.tokens.samples[number], piece.record
        if len(record.shape) != 3:
            continue
        count = (piece.right - piece.left) if piece.row is not None else record.shape[1]
        for row in range(count):
            if record.positions is not None:
                at = record.positions[row + piece.left] - piece.pads
            elif count == 1 and step == 0:
                at = len(sample.prompt_ids) - 1
            else:
                at = row + (len(sample.prompt_ids) + step - 1 if step else 0)
            places[number][at + 1] = piece, row
    return [_of_places(run, reader, number, held) for number, held in enumerate(places)]


def _of_places(run: Run, reader: Pieces, number: int, places: dict[int, tuple]) -> Sequence:  # type: ignore[type-arg]  # (Piece, row)
    sample = run.manifest.tokens.samples[number]
    num_prompt = len(sample.prompt_ids)
    fed, chosen = sample.generated_ids, sample.chosen_ids
    ids = [*sample.prompt_ids, *fed]
    if chosen[: len(fed)] == fed:  # its own choice: the last one was never fed
        ids += chosen[len(fed) :]
    order = sorted(place for place in places if 0 < place < len(ids))

    def log_softmax(place: int) -> np.ndarray:
        piece, row = places[place]
        logits = reader.tensor(run, piece)[0, row].double().numpy()
        top = logits.max()
        log_probs: np.ndarray = logits - (top + math.log(np.exp(logits - top).sum()))
        return log_probs

    def distribution(row: int) -> Distribution:
        values = log_softmax(order[row])
        by_size = np.argsort(-values, kind="stable")
        return Distribution(by_size, values[by_size], whole=True)

    return Sequence(
        ids=ids, num_prompt=num_prompt, rows={place: row for row, place in enumerate(order)},
        logprobs=np.array([log_softmax(place)[ids[place]] for place in order]),
        distribution=distribution,
    )  # fmt: skip
