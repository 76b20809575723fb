"""Two series of one task, document by document.

A pair is one document with a usable score on both sides, asked in the same words, with the same
right answer. Everything else is counted and is in no number. A document's score is the mean of its
repeats: repeats are no documents of their own, so they make a score surer and n no larger.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from divergence.comparison.results import PreflightLine, PreflightStatus
from divergence.evaluations.result import Pairing
from divergence.evaluations.rows import ScoreRow, Series
from divergence.facts import Fact, fact, sentence

__all__ = ["Pairs", "pair", "preflight"]

_DIGITS = 1e-6


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of each paired document: both scores, its cluster, one row of each side."""

    pairing: Pairing
    reference: np.ndarray
    candidate: np.ndarray
    clusters: np.ndarray | None
    """None where each document is its own."""
    rows: list[tuple[ScoreRow, ScoreRow]]
    same_order: bool
    single: bool
    """One answer a document, on both sides."""

    @property
    def binary(self) -> bool:
        """Are all scores 0 or 1?"""
        values = np.concatenate([self.reference, self.candidate])
        return bool(np.isin(values, (0.0, 1.0)).all())


@dataclass(slots=True)
class _Side:
    """One side's documents: the rows of each that have a score."""

    scored: dict[str, list[ScoreRow]]
    unscored: set[str]
    duplicates: int
    conflicting: set[str]
    whys: Counter[Fact]


def pair(a: Series, b: Series, *, force: bool = False) -> Pairs:
    """``force``: also pairs documents that were asked in other words."""
    reference, other = _side(a.rows), _side(b.rows)
    rows: list[tuple[ScoreRow, ScoreRow]] = []
    scores: list[tuple[float, float]] = []
    num_prompt = num_target = num_answers = num_other_answers = 0
    for document, mine in reference.scored.items():
        theirs = other.scored.get(document)
        if theirs is None:
            continue
        first, second = mine[0], theirs[0]
        if _differ(first.target, second.target) and not force:
            num_target += 1
            continue
        if _differ(first.prompt, second.prompt) and not force:
            num_prompt += 1
            continue
        rows.append((first, second))
        scores.append((_mean(mine), _mean(theirs)))
        num_answers, num_other_answers = num_answers + len(mine), num_other_answers + len(theirs)
    num = len(rows)
    values = np.array(scores, dtype=float).reshape(num, 2)
    clusters = _clusters([first.cluster or second.cluster for first, second in rows])
    conflicting = reference.conflicting | other.conflicting
    unscored = (reference.unscored | other.unscored) - conflicting
    lost = unscored | conflicting
    pairing = Pairing(
        num_paired=num, num_clusters=num if clusters is None else int(clusters.max()) + 1,
        num_reference=_count(reference), num_candidate=_count(other),
        num_reference_only=len(reference.scored.keys() - other.scored.keys() - lost),
        num_candidate_only=len(other.scored.keys() - reference.scored.keys() - lost),
        num_other_prompt=num_prompt, num_other_target=num_target,
        num_unscored=len(unscored),
        num_duplicates=reference.duplicates + other.duplicates,
        num_conflicting=len(conflicting),
        repeats=(num_answers / num, num_other_answers / num) if num else (0.0, 0.0),
        whys={sentence(why): count for why, count in (reference.whys + other.whys).items()},
    )  # fmt: skip
    positions = {document: number for number, document in enumerate(other.scored)}
    order = [positions[second.document] for _, second in rows]
    return Pairs(
        pairing, values[:, 0], values[:, 1], clusters, rows,
        same_order=all(x < y for x, y in itertools.pairwise(order)),
        single=num_answers == num_other_answers == num,
    )  # fmt: skip


def _side(rows: list[ScoreRow]) -> _Side:
    by_answer: dict[tuple[str, int], ScoreRow] = {}
    side = _Side({}, set(), 0, set(), Counter())
    for row in rows:
        held = by_answer.setdefault((row.document, row.repeat), row)
        if held is not row:
            same = held.score == row.score and not _differ(held.prompt, row.prompt)
            side.duplicates += same
            if not same:
                side.conflicting.add(row.document)
            continue
        if row.score is None:
            side.whys[row.why or fact("evaluations.without_score")] += 1
            side.unscored.add(row.document)
        else:
            side.scored.setdefault(row.document, []).append(row)
    side.unscored -= side.scored.keys()  # some of its repeats were scored
    for document in side.conflicting:
        side.scored.pop(document, None)
    side.unscored -= side.conflicting
    return side


def _count(side: _Side) -> int:
    return len(side.scored) + len(side.unscored) + len(side.conflicting)


def _mean(rows: list[ScoreRow]) -> float:
    if len(rows) == 1:
        return rows[0].score or 0.0
    scores = [row.score for row in rows if row.score is not None]
    return sum(scores) / len(scores)


def _differ(a: str | None, b: str | None) -> bool:
    return a is not None and b is not None and a != b


def _clusters(names: list[str | None]) -> np.ndarray | None:
    """A number for each document; one without a name is a cluster of its own."""
    if not any(name is not None for name in names):
        return None
    numbers: dict[tuple[str | None, int], int] = {}
    clusters = [
        numbers.setdefault((name, -1 if name is not None else place), len(numbers))
        for place, name in enumerate(names)
    ]
    return None if len(numbers) == len(clusters) else np.array(clusters)


def preflight(a: Series, b: Series, pairs: Pairs) -> list[PreflightLine]:
    """What must be equal before any number is believed."""
    pairing = pairs.pairing
    unusable = [fact("evaluations.unusable", num=pairing.num_unscored)] + [
        fact("evaluations.unusable_why", num=num, why=why) for why, num in pairing.whys.items()
    ]
    all_usable = sentence(fact("evaluations.all_usable"))
    lines = [
        _line("documents", [f"{pairing.num_reference:,}", f"{pairing.num_candidate:,}"],
              fact("evaluations.only_in", num=pairing.num_reference_only, side="reference"),
              fact("evaluations.only_in", num=pairing.num_candidate_only, side="candidate"),
              same=not pairing.num_reference_only and not pairing.num_candidate_only,
              blocks=not pairing.num_paired),
        _hashes("prompts", a, b, fact("evaluations.other_words", num=pairing.num_other_prompt)),
        _hashes("targets", a, b, fact("evaluations.other_answer", num=pairing.num_other_target)),
        _line("scores", ["", ""] if pairing.num_unscored else [all_usable] * 2, *unusable,
              same=not pairing.num_unscored),
        _line("duplicates", [f"{pairing.num_duplicates + pairing.num_conflicting:,}"] * 2,
              fact("evaluations.duplicates", num=pairing.num_duplicates),
              fact("evaluations.conflicting", num=pairing.num_conflicting),
              same=not pairing.num_duplicates and not pairing.num_conflicting),
        _line("repeats", [f"{repeat:g}" for repeat in pairing.repeats],
              same=pairing.repeats[0] == pairing.repeats[1]),
        _line("order", ["", ""], *([] if pairs.same_order else [fact("evaluations.other_order")]),
              same=pairs.same_order),
    ]  # fmt: skip
    if (tops := _other_units(pairs)) is not None:
        units = [sentence(fact("evaluations.scores_up_to", largest=top)) for top in tops]
        lines.append(_line("units", units, same=False, blocks=True))
    if a.higher_is_better != b.higher_is_better:
        better = [
            sentence(fact("evaluations.direction", higher=side.higher_is_better)) for side in (a, b)
        ]
        lines.append(_line("direction", better, same=False, blocks=True))
    if num := _regrouped(pairs.rows):
        other = fact("evaluations.other_clusters", num_documents=num)
        lines.append(_line("clusters", ["", ""], other, same=False, blocks=True))
    for name in dict.fromkeys((*a.settings, *b.settings)):
        mine, theirs = a.settings.get(name), b.settings.get(name)
        told = mine is not None and theirs is not None
        lines.append(PreflightLine(
            check=name, status="unknown" if not told else "same" if mine == theirs else "blocking",
            reference=mine or _said(False), candidate=theirs or _said(False),
        ))  # fmt: skip
    return lines


def _other_units(pairs: Pairs) -> tuple[float, float] | None:
    """Percent on one side and shares on the other, or another such scale, by the largest scores of
    both: by what most documents show, else by these, where none is below 0."""
    tops = [float(np.abs(side).max(initial=0.0)) for side in (pairs.reference, pairs.candidate)]
    least, most = sorted(tops)
    below = min(pairs.reference.min(initial=0.0), pairs.candidate.min(initial=0.0)) < 0
    by_tops = not below and 0 < least <= 1 and 50 <= most / least <= 200 and most >= 20
    if not by_tops and not _rescaled(pairs):
        return None
    return tops[0], tops[1]


def _rescaled(pairs: Pairs) -> bool:
    """Are most scores a hundred times the other side's, or ten times or more to the last digit?"""
    both = (pairs.reference != 0) & (pairs.candidate != 0)
    if int(both.sum()) < 2:
        return False
    powers = np.log10(np.abs(pairs.candidate[both])) - np.log10(np.abs(pairs.reference[both]))
    middle = float(np.median(powers))
    exact = float(np.mean(np.abs(powers - middle) < _DIGITS)) > 0.5
    return 1.9 <= abs(middle) <= 2.1 or (exact and abs(middle) > 1 - _DIGITS)


def _regrouped(rows: list[tuple[ScoreRow, ScoreRow]]) -> int:
    """Documents of clusters that both sides tell, and do not tell alike. Names may differ."""
    ours: dict[str, set[str]] = {}
    theirs: dict[str, set[str]] = {}
    named = [(a.cluster, b.cluster) for a, b in rows if a.cluster and b.cluster]
    for mine, other in ((a, b) for a, b in named if a and b):
        ours.setdefault(mine, set()).add(other)
        theirs.setdefault(other, set()).add(mine)
    return sum(len(ours[a]) > 1 or len(theirs[b]) > 1 for a, b in named if a and b)


def _line(
    check: str, shown: list[str], *details: Fact, same: bool, blocks: bool = False
) -> PreflightLine:
    """``details``: what is counted, left out where it is 0."""
    status: PreflightStatus = "blocking" if blocks else "same" if same else "differs"
    parts = [item for item in details if item["num"] != 0]
    counted = [fact("evaluations.parts", parts=parts)] if parts else []
    return PreflightLine(
        check=check, status=status, reference=shown[0], candidate=shown[1], details=counted
    )


def _hashes(check: str, a: Series, b: Series, differing: Fact) -> PreflightLine:
    field = check.removesuffix("s")
    told = [any(getattr(row, field) is not None for row in series.rows[:1]) for series in (a, b)]
    if not all(told):
        return PreflightLine(
            check=check, status="unknown", reference=_said(told[0]), candidate=_said(told[1])
        )
    return _line(check, ["", ""], differing, same=not differing["num"])


def _said(known: bool) -> str:
    return sentence(fact("evaluations.said", known=known))
