"""Tokens and distributions: whether the runs chose the same, and by how much not; on a page both
sides' choices as strips.

A decoded token is quoted, since it may hold a newline or begin with a space.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from divergence.analyses.tokens.find import kl_fact
from divergence.comparison.result import (
    Background,
    Explanation,
    Report,
    TokenChoice,
    TokenDifference,
    TokensResult,
)
from divergence.document import (
    Block,
    Column,
    Fold,
    Section,
    Sentence,
    Strip,
    Strips,
    Table,
    each_in,
    named,
)
from divergence.facts import has, sentence
from divergence.run.manifest import SampleTokens
from divergence.words import both_ends, count, figure, fixed, letter, list_names

_MOST_STRIPS = 8
_MOST_TOKENS = 128
"""Of one prompt."""
_MOST_FLIPS = 12


def sections(report: Report, *, background: Background | None = None, **_: object) -> list[Section]:
    """Nothing where no token was generated."""
    tokens = report.tokens
    if tokens is None or tokens.num_tokens + tokens.num_missing == 0:
        return []
    total = tokens.num_tokens + tokens.num_missing
    missing = f"; {tokens.num_missing} of A's it did not generate" if tokens.num_missing else ""
    how = "each run chose alone, so steps behind a difference say nothing"
    how = "B was fed A's tokens, so every step can be compared" if tokens.forced else how
    first, flips = tokens.first_difference, tokens.differences
    body: list[Block | None] = []
    if first is not None:
        body += _first(first, forced=tokens.forced)
    body += [] if background is None else _strips(tokens, background)
    if flips[1:]:
        body.append(_flips(flips))
    if tokens.kl_mean is not None and not has(report.verdict.evidence, "tokens.kl"):
        beyond = (tokens.kl_ratio or 0.0) > (tokens.kl_limit or math.inf)
        style = "red" if beyond else ""
        body.append(Sentence(sentence(kl_fact(tokens)), style=style, indent=2))
    if tokens.explanation is not None:
        body += _explained(tokens.explanation, first)
    return [
        Section(
            id="tokens",
            title="tokens",
            body=body,
            detail=f"{tokens.num_equal} of {total} equal; {how}{missing}",
        )
    ]


def explained_facts(report: Report) -> list[Sentence]:
    """The answer of --explain-token for the first screen, also where it has none."""
    if report.tokens is None or report.tokens.explanation is None:
        unexplained = (item for item in report.remarks if item.code == "experiments.unexplained")
        return [named("explained", item.text) for item in unexplained]
    explanation = report.tokens.explanation
    where = f"prompt {explanation.sample}, step {explanation.step}"
    text = f"{where}, by {_cause(explanation)} alone: {_effect(explanation)}"
    return [named("explained", text, "yellow")]


def _first(first: TokenDifference, *, forced: bool) -> list[Block]:
    """Tell where the first difference is, both choices, what it is, and what else was likely."""
    order = {
        "before": ", before the onset",
        "same step": ", in the step of the onset",
        "after": ", after the onset",
        None: "",
    }[first.order_to_onset]
    later = "" if forced else "; later steps continue different texts and are not compared"
    place = f"prompt {first.sample}, step {first.step}{order}{later}"
    # the margin in standard deviations of the logits' difference; a judged z has its own line
    sigmas = None if first.z_of in ("floor", "model") else first.z
    sides = (
        ("A", first.reference, (first.margin, sigmas)),
        ("B", first.candidate, (first.candidate_margin, None)),
    )
    body: list[Block] = [
        Sentence(place, "first difference:", style="yellow", indent=2, hang=4),
        Table(
            title="what each side chose",
            columns=("", Column("", _token), Column("", _margin)),
            num_left=3,
            indent=4,
            rows=sides,
        ),
        *_judgement(first),
    ]
    tops = itertools.zip_longest(first.reference_top, first.candidate_top)
    rows = [(a, a and a.logprob, b, b and b.logprob) for a, b in tops]
    if rows:
        body.append(
            Table(
                title="the most likely tokens there",
                names=True,
                rows=rows,
                indent=4,
                columns=(
                    Column("top of A", _token, ""),
                    Column("logprob", fixed, ""),
                    Column("top of B", _token, "", left=True),
                    Column("logprob", fixed, ""),
                ),
            )
        )
    return body


def _margin(margin: tuple[float | None, float | None]) -> str:
    """The logits that a choice is ahead by, and where they are known that in ``σ``."""
    logits, sigmas = margin
    more = "" if sigmas is None else f" ({figure(sigmas)} σ of the diff)"
    return f"margin {fixed(logits)} logits over the next{more}"


_JUDGEMENTS = {
    "tie": "a tie: rounding may flip it",
    "fault": "a fault: no rounding of this dtype moves logits that far",
    None: "between: more than the floor's own rounding flips, less than the coarsest healthy "
    "kernels might",
}


def _judgement(first: TokenDifference) -> list[Sentence]:
    """Return what a truth says of the flip; without one, that there is none to say it."""
    if first.z_of == "difference":
        text = "not judged: σ is that of the diff itself, which a fault widens; give --truth"
        return [Sentence(text)]
    if first.z_of is None or first.z is None:
        return []
    if first.z_of == "model":
        says = "not judged: more than the rounding model makes of it; --truth tells"
        says = _JUDGEMENTS["tie"] if first.judgement == "tie" else says
        text = f"{says} ({figure(first.z)} σ of what all blocks together may make by rounding)"
        return [Sentence(text, style="green" if first.judgement else "yellow")]
    judged = (
        f"{_JUDGEMENTS[first.judgement]} (gap {fixed(abs(first.truth_margin or 0.0))} logits in "
        f"the truth, {figure(first.z)} σ of the logit error that rounding makes)"
    )
    styles = {"tie": "green", "fault": "red", None: "yellow"}
    sentences = [Sentence(judged, style=styles[first.judgement])]
    choice = first.truth_choice
    if choice is not None:
        agreeing = [
            name
            for name, side in (("A", first.reference), ("B", first.candidate))
            if side.id == choice.id
        ]
        who = agreeing[0] if agreeing else "neither"
        sentences.append(Sentence(f"the truth chose {_token(choice)}: it agrees with {who}"))
    return sentences


def _explained(explanation: Explanation, first: TokenDifference | None) -> list[Block]:
    what = "the closest decision (no token differs)"
    if explanation.differs:
        same = first is not None and (first.sample, first.step) == (
            explanation.sample,
            explanation.step,
        )
        what = "the first difference" if same else "the first difference that is a fault"
    why = "" if explanation.flagged else "; nothing is flagged, this block's error is the largest"
    forwards = count(explanation.num_forwards, "forward")
    whence = f"prompt {explanation.sample}, step {explanation.step}, by {_cause(explanation)} alone"
    added = f"added to {letter(explanation.disturbed)}'s model in {forwards}"
    over = f"logit of {_token(explanation.reference)} over {_token(explanation.candidate)}"
    chosen = f"; chosen with it: {_token(explanation.injected_choice)}"
    return [
        Sentence(f"{what}, {whence}{why}", "explained:", indent=2, hang=4),
        Sentence(f"{added}, here in {explanation.dtype} on {explanation.device}"),
        Table(
            title="its margin",
            columns=("", Column("", fixed, "", left=True)),
            indent=4,
            rows=[
                (over, None),
                ("  in A", explanation.reference_margin),
                ("  in B", explanation.candidate_margin),
                ("  here, as it is", explanation.baseline_margin),
                ("  here, with the error", explanation.injected_margin),
            ],
        ),
        Sentence(_effect(explanation) + chosen, style="yellow"),
    ]


def _cause(explanation: Explanation) -> str:
    """``the candidate's error at model.layers.1:out``."""
    sites = list_names(explanation.sites, 3)
    other = "candidate" if explanation.disturbed == "reference" else "reference"
    return f"{letter(other)}'s error at {sites}"


def _effect(explanation: Explanation) -> str:
    share = "the two runs' margins are equal: nothing moved"
    if explanation.share is not None:
        share = f"{100 * explanation.share:.0f}% of the movement explained"
    return f"{share}; the error {'flips' if explanation.flips else 'does not flip'} the token"


def _token(choice: TokenChoice) -> str:
    """``' the' #262``: quoted, so that spaces and newlines are seen."""
    return f"#{choice.id}" if choice.text is None else f"{choice.text!r} #{choice.id}"


def _strips(tokens: TokensResult, background: Background) -> list[Block]:
    """Prompts with different choices first; of equal ones a few."""
    flips = {(difference.sample, difference.step): difference for difference in tokens.differences}
    samples = [
        (number, reference, candidate)
        for number, (reference, candidate) in enumerate(background.samples())
        if reference.chosen_ids or candidate.chosen_ids
    ]
    apart = [item for item in samples if item[1].chosen_ids != item[2].chosen_ids]
    equal = [item for item in samples if item not in apart]
    strips, folded = (
        [
            _strip(number, reference, candidate, flips, background, forced=tokens.forced)
            for number, reference, candidate in group[:_MOST_STRIPS]
        ]
        for group in (apart, equal)
    )
    shown: list[Block] = []
    if strips:
        shown.append(Strips("Both sides' choices", strips))
    if folded:
        words = f"{count(len(equal), 'prompt')} with the same choices"
        shown.append(Fold(words, [Strips("", folded)]))
    gone = sum(max(0, len(group) - _MOST_STRIPS) for group in (apart, equal))
    return shown + [Sentence(f"{count(gone, 'more prompt')} not shown.")] * bool(gone)


def _strip(
    number: int,
    sample_a: SampleTokens,
    sample_b: SampleTokens,
    flips: dict[tuple[int, int], TokenDifference],
    background: Background,
    *,
    forced: bool,
) -> Strip:
    ids = sample_a.chosen_ids, sample_b.chosen_ids
    steps = max(map(len, ids))
    parted = next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), steps)
    shown = min(_MOST_TOKENS, steps if forced else parted + 1, steps)
    cells = []
    for step in range(shown):
        a, b = (background.text_of(side[step]) if step < len(side) else None for side in ids)
        flip = flips.get((number, step))
        cells.append((a, b, None if flip is None else flip.margin))
    a, b = (
        "" if forced else "".join(map(background.text_of, side[shown : shown + _MOST_TOKENS]))
        for side in ids
    )
    more = max(0, steps - shown)
    return Strip(
        title=f"Prompt {number}",
        lead=both_ends(sample_a.text, 400) if sample_a.text else "",
        cells=cells,
        apart=(a, b),
        note=f"{count(more, 'more token')}." if more and forced else "",
    )


def _flips(flips: Sequence[TokenDifference]) -> Table:
    tally = Counter(flip.judgement for flip in flips)
    counts = [count(tally[name], name) for name in ("tie", "fault") if tally[name]]
    counts += [f"{tally[None]} not judged"] * bool(tally[None])
    return Table(
        title="different choices",
        detail=", ".join(counts),
        num_left=4,
        sparse=True,
        most=_MOST_FLIPS,
        folded=f"All {len(flips)} different choices",
        **each_in(
            flips,
            ("prompt", "sample"),
            ("step", "step"),
            (Column("A chose", _token), "reference"),
            (Column("B chose", _token), "candidate"),
            (Column("A ahead by", fixed), "margin"),
            (Column("B ahead by", fixed), "candidate_margin"),
            (Column("the truth chose", _token), "truth_choice"),
            ("judged", "judgement"),
        ),
        marks=["flagged" if flip.judgement == "fault" else "" for flip in flips],
    )
