"""Answers that both sides drew at temperature 1: are they of one distribution?

Drawn texts part at once, so that no token is compared; the two sets of answers are, prompt by
prompt (numerics.two_sample). That nothing is seen is no more than the power that stands beside.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from msgspec.structs import replace

from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.sequences import Sequence as Text
from divergence.analyses.logprobs.sequences import facts_of
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Check, Finding, PreflightLine
from divergence.comparison.results.tokens import LogprobTexts
from divergence.facts import plain
from divergence.layout import count, decimal
from divergence.numerics.two_sample import LEVEL, two_sample
from divergence.run.reader import Run
from divergence.run.schema.manifest import UNKNOWN
from divergence.run.schema.site import LOGPROBS
from divergence.run.writing.scores import DRAWN
from divergence.words import Side, letter

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
        detail="one side's answers were drawn, the other's are greedy" if other else "",
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
    who = "both sides give" if len(sides) == 2 else f"{letter(sides[0])} gives"
    text = f"{who} one answer to each prompt, as often as it is asked"
    if told is not None and told.kind == "systematic":
        return replace(told, headline=[
            *told.headline, plain(f"; {text}: it may not obey the temperature"),
        ])  # fmt: skip
    return Finding(
        claim="logprobs", kind="undetermined",
        headline=[plain(f"{text}: temperature or seed are not obeyed, or nothing else is likely, and "
        "answers that are not drawn tell no distribution")],
        rests_on=[Check(name="told", state="failed", detail=text)],
    )  # fmt: skip


def _find(texts: LogprobTexts | None) -> Finding:
    """Is it one distribution? Never said of too few answers."""
    if texts is None or texts.p_value is None:
        num = 0 if texts is None else texts.num_answers
        return Finding(
            claim="logprobs", kind="undetermined",
            headline=[plain(f"{count(num, 'drawn answer')} are too few for a test of their distribution")],
            rests_on=[Check(name="answers", state="failed", detail="--answers 10, more prompts")],
        )  # fmt: skip
    tested = f"{texts.num_answers} answers to {count(texts.num_prompts, 'prompt')} each side"
    said = f"{tested}: MMD² {decimal(texts.mmd)}, p = {texts.p_value:.2g} by permutation"
    alone = "texts do not tell a precision from another model, or from another sampling setting"
    if texts.p_value <= LEVEL:
        return Finding(
            claim="logprobs", kind="systematic",
            headline=[plain(f"the answers are of another distribution ({said}): another model, "
            "quantisation, template or sampling")],
            rests_on=[check("scale", False, alone)],
        )  # fmt: skip
    share = texts.smallest_share
    power = "not even another model" if share is None else (
        f"another model in {share:.0%} of the answers"
    )  # fmt: skip
    return Finding(
        claim="logprobs", kind="within_floor" if share is not None else "undetermined",
        headline=[plain(f"no difference is seen ({said}); so many answers would show {power}")],
        rests_on=[Check(name="scale", state="failed", detail="texts alone: a test sees no "
                        "more than its power")],
    )  # fmt: skip
