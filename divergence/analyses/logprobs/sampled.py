"""Answers that both sides drew at temperature 1: are they of one distribution?

Drawn texts part at once, so that no token is compared; the two sets of answers are, prompt by
prompt (numerics.two_sample). That nothing is seen is no more than the power that stands beside.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from msgspec.structs import asdict, replace

from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.sequences import Sequence as Text
from divergence.analyses.logprobs.sequences import facts_of
from divergence.comparison.decide import check
from divergence.comparison.results import Finding, LogprobTexts, PreflightLine
from divergence.facts import fact
from divergence.numerics.statistics import LEVEL, two_sample
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.scores import DRAWN
from divergence.run.site import LOGPROBS
from divergence.words import Side

__all__ = ["are_drawn", "decoding_line", "of_drawn", "texts_of"]


def are_drawn(a: Run, b: Run) -> bool:
    return all(_decoding(run) == DRAWN for run in (a, b))


def _decoding(run: Run) -> str:
    """How its tokens were chosen: greedy, drawn, sampled (in training), given; or unknown."""
    if run.manifest.plan.sites == [LOGPROBS]:
        return facts_of(run).get("tokens", UNKNOWN)
    return "greedy" if run.manifest.tokens.forced_by is None else "given"


def decoding_line(a: Run, b: Run) -> PreflightLine:
    """Drawn answers against greedy ones are another experiment."""
    kinds = _decoding(a), _decoding(b)
    other = set(kinds) == {DRAWN, "greedy"}
    known = UNKNOWN not in kinds
    return PreflightLine(
        check="decoding", reference=kinds[0], candidate=kinds[1],
        status="blocking" if other else "unknown" if not known
        else "same" if kinds[0] == kinds[1] else "differs",
        details=[fact("logprobs.drawn_and_greedy")] if other else [], detail="",
    )  # fmt: skip


def texts_of(pairs: Sequence[PromptPair]) -> LogprobTexts | None:
    """None with fewer than two answers to a prompt."""
    groups: dict[Hashable, list[PromptPair]] = {}
    for pair in pairs:
        groups.setdefault(pair.prompt, []).append(pair)
    if not groups or min(map(len, groups.values())) < 2:
        return None
    result = two_sample([
        (_table([row.reference for row in group], width), _table([row.candidate for row in group],
                                                                 width))
        for group in groups.values()
        if (width := max(len(_answer(side)) for row in group
                         for side in (row.reference, row.candidate)))
    ])  # fmt: skip
    return LogprobTexts(
        num_prompts=result.num_prompts, num_answers=result.num_answers, mmd=result.mmd,
        p_value=result.p_value, smallest_share=result.smallest_share,
    )  # fmt: skip


def _answer(text: Text) -> list[int]:
    return text.ids[text.num_prompt :]


def _table(texts: Sequence[Text], width: int) -> np.ndarray:
    """(n, width); below all ids behind the ends."""
    table = np.full((len(texts), width), -9, np.int64)
    for row, text in zip(table, texts, strict=True):
        row[: len(_answer(text))] = _answer(text)
    return table


def of_drawn(
    finding: Finding, texts: LogprobTexts | None, pairs: Sequence[PromptPair]
) -> Finding:  # fmt: skip
    """``finding``, of tokens behind equal text, where it raises an alarm; else what texts tell."""
    if finding.kind not in ("identical", "within_floor", "undetermined"):
        return finding
    sides: tuple[Side, Side] = ("reference", "candidate")
    repeats = [side for side in sides if _repeats(pairs, side)]
    told = _find(texts)
    if texts is not None and repeats:
        told = _repeated(repeats, told if len(repeats) == 1 else None)
    return replace(told, evidence=[*told.evidence, *finding.evidence])


def _repeats(pairs: Sequence[PromptPair], side: Side) -> bool:
    """Does a side give the same answer to a prompt, whatever the seed, to each of them?"""
    answers: dict[Hashable, set[tuple[int, ...]]] = {}
    for pair in pairs:
        answers.setdefault(pair.prompt, set()).add(tuple(_answer(getattr(pair, side))))
    return len(pairs) > len(answers) == sum(map(len, answers.values()))


def _repeated(sides: Sequence[Side], told: Finding | None) -> Finding:
    """Answers that were not drawn tell of no distribution: a test would count one as many. ``told``
    where the other side's were: that they differ is then true, whatever the cause."""
    repeats = fact("logprobs.repeats", side="both" if len(sides) == 2 else sides[0])
    if told is not None and told.kind == "systematic":
        ignores = fact("logprobs.ignores_temperature", repeats=repeats)
        return replace(told, headline=[*told.headline, ignores])
    return Finding(
        claim="logprobs", kind="undetermined",
        headline=[fact("logprobs.not_drawn", repeats=repeats)],
        rests_on=[check("told", False, repeats)],
    )  # fmt: skip


def _find(texts: LogprobTexts | None) -> Finding:
    """Is it one distribution? Never said of too few answers."""
    if texts is None or texts.p_value is None:
        num = 0 if texts is None else texts.num_answers
        return Finding(
            claim="logprobs", kind="undetermined",
            headline=[fact("logprobs.few_drawn", num_answers=num)],
            rests_on=[check("answers", False, fact("logprobs.more_answers"))],
        )  # fmt: skip
    test = fact("logprobs.test", **asdict(texts))
    if texts.p_value <= LEVEL:
        return Finding(
            claim="logprobs", kind="systematic",
            headline=[fact("logprobs.other_distribution", test=test)],
            rests_on=[check("scale", False, fact("logprobs.texts_blur_cause"))],
        )  # fmt: skip
    share = texts.smallest_share
    return Finding(
        claim="logprobs", kind="within_floor" if share is not None else "undetermined",
        headline=[fact("logprobs.no_difference", test=test, share=share)],
        rests_on=[check("scale", False, fact("logprobs.power_of_test"))],
    )  # fmt: skip
