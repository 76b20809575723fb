"""Tokens on a page: both sides' choices as a strip, the first flip with its margins, all flips."""

from __future__ import annotations

from collections.abc import Iterable

from divergence.analyses.tokens.show import judgement_lines, kl_lines, top_rows
from divergence.comparison.result import Report
from divergence.comparison.results import Background, TokenChoice, TokenDifference, TokensResult
from divergence.html.parts import (
    Element,
    Node,
    Section,
    Table,
    details,
    el,
    facts,
    prose_block,
    shortened,
    table,
)
from divergence.layout import count, fixed
from divergence.run.manifest import SampleTokens

_MOST_STRIPS = 8
_MOST_TOKENS = 128
"""Of one prompt."""
_MOST_FLIPS = 60

Places = dict[tuple[int, int], TokenDifference]


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no token was generated."""
    tokens = report.tokens
    if tokens is None or tokens.num_tokens + tokens.num_missing == 0:
        return []
    body: list[Node] = []
    if tokens.first_difference is not None:
        body += _first(tokens.first_difference)
    body += _strips(tokens, background)
    if len(tokens.differences) > 1:
        body.append(details(f"All {len(tokens.differences)} different choices",
                            table(_flips(tokens.differences))))  # fmt: skip
    body += [el("p", line.text.strip(), class_="note") for line in kl_lines(tokens)]
    return [Section(id="tokens", title="Tokens", lead=_lead(tokens), body=tuple(body))]


def _lead(tokens: TokensResult) -> str:
    total = tokens.num_tokens + tokens.num_missing
    how = (
        "B continued A's text, so every step can be compared"
        if tokens.forced
        else "each continued its own text, so steps behind a difference say nothing"
    )
    return f"{tokens.num_equal} of {count(total, 'choice')} of the next token agree; {how}."


def _first(first: TokenDifference) -> list[Node]:
    rows = [
        ("where", f"prompt {first.sample}, step {first.step}"),
        ("A chose", f"{_quoted(first.reference)}, ahead by {fixed(first.margin)} logits"),
        ("B chose", f"{_quoted(first.candidate)}, ahead by {fixed(first.candidate_margin)} logits"),
    ]
    if first.truth_choice is not None:
        rows.append(("the truth chose", _quoted(first.truth_choice)))
    says = [prose_block(line.text.strip(), class_="note") for line in judgement_lines(first)]
    tops = top_rows(first.reference_top, first.candidate_top)
    shown: list[Node] = [el("h3", "The first different choice"), facts(rows), *says]
    if tops:
        content = Table(
            caption="The most likely tokens there", num_left=2, names=True,
            titles=("A", "B", "A, log-probability", "B, log-probability"),
            rows=[(token_a, token_b, a, b) for token_a, a, token_b, b in tops],
        )  # fmt: skip
        shown.append(table(content))
    return shown


def _strips(tokens: TokensResult, background: Background) -> list[Node]:
    """Prompts with different choices first; of equal ones a few."""
    flips: Places = {
        (difference.sample, difference.step): difference for difference in tokens.differences
    }
    samples = [
        (number, reference, candidate)
        for number, (reference, candidate) in enumerate(background.samples())
        if reference.chosen_ids or candidate.chosen_ids
    ]
    if not samples:
        return []
    apart = [item for item in samples if item[1].chosen_ids != item[2].chosen_ids]
    equal = [item for item in samples if item not in apart]
    strips, folded = (
        [
            _strip(number, reference, candidate, flips, background, forced=tokens.forced)
            for number, reference, candidate in group[:_MOST_STRIPS]
        ]
        for group in (apart, equal)
    )
    legend = el(
        "p", el("span", "A", class_="a"), " above, ", el("span", "B", class_="b"),
        " below where they differ. Below a difference: by how many logits A's choice was ahead.",
        class_="note",
    )  # fmt: skip
    gone = sum(max(0, len(group) - _MOST_STRIPS) for group in (apart, equal))
    shown: list[Node] = [el("h3", "Both sides' choices"), legend, *strips] if strips else []
    if folded:
        shown.append(details(f"{count(len(equal), 'prompt')} with the same choices", *folded))
    last = el("p", f"{count(gone, 'more prompt')} not shown.", class_="note") if gone else None
    return [*shown, last]


def _strip(
    number: int, ours: SampleTokens, theirs: SampleTokens, flips: Places, background: Background, *,
    forced: bool,
) -> Element:  # fmt: skip
    ids = ours.chosen_ids, theirs.chosen_ids
    steps = max(map(len, ids))
    parted = next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), steps)
    shown = min(_MOST_TOKENS, steps if forced else parted + 1, steps)
    cells = []
    for step in range(shown):
        a, b = (background.text_of(side[step]) if step < len(side) else None for side in ids)
        cells.append(_cell(a, b, flips.get((number, step))))
    rest = [
        "".join(background.text_of(token) for token in side[shown : shown + _MOST_TOKENS])
        for side in ids
    ]
    more = max(0, steps - shown)
    return el(
        "div", el("p", f"Prompt {number}", class_="of-prompt"),
        el("p", shortened(ours.text, 400), class_="prompt") if ours.text else None,
        el("p", *cells, class_="strip"),
        _apart(rest) if not forced and any(rest) else None,
        el("p", f"{count(more, 'more token')}.", class_="note") if more and forced else None,
        class_="sample",
    )  # fmt: skip


def _apart(texts: list[str]) -> Element:
    """How each went on by itself, side by side."""
    sides = zip(("A", "B"), ("a", "b"), texts, strict=True)
    parts = [
        el("div", el("p", f"{letter} went on", class_=kind), el("p", text, class_="prompt"))
        for letter, kind, text in sides
    ]
    return el("div", *parts, class_="texts")


def _cell(a: str | None, b: str | None, flip: TokenDifference | None) -> Element:
    if a == b and a is not None:
        return el("span", _visible(a), class_="tok")
    margin = None if flip is None or flip.margin is None else fixed(flip.margin, 2)
    return el(
        "span",
        el("span", "differs: A ", class_="aside"),
        el("span", _visible(a), class_="a"),
        el("span", ", B ", class_="aside"),
        el("span", _visible(b), class_="b"),
        el("small", margin) if margin is not None else None,
        class_="tok flip",
    )


def _visible(text: str | None) -> str:
    """A token in a strip: line feeds as a sign, an absent one as a dash."""
    if text is None:
        return "–"
    return shortened(text.replace("\n", "⏎"), 40) or "∅"


def _flips(differences: Iterable[TokenDifference]) -> Table:
    flips = list(differences)
    shown = flips[:_MOST_FLIPS]
    more = len(flips) - len(shown)
    judged = any(flip.judgement for flip in shown)
    with_truth = any(flip.truth_choice for flip in shown)
    return Table(
        caption="Different choices", num_left=4,
        titles=("prompt", "step", "A chose", "B chose", "A ahead by", "B ahead by",
                *(["the truth chose"] if with_truth else []), *(["judged"] if judged else [])),
        rows=[
            (str(flip.sample), str(flip.step), _quoted(flip.reference), _quoted(flip.candidate),
             fixed(flip.margin), fixed(flip.candidate_margin),
             *([_quoted(flip.truth_choice)] if with_truth else []),
             *([flip.judgement or "-"] if judged else []))
            for flip in shown
        ],
        marks=["flagged" if flip.judgement == "fault" else "" for flip in shown],
        note=f"{more:,} more are in the JSON." if more else "",
    )  # fmt: skip


def _quoted(choice: TokenChoice | None) -> str:
    """In quotes, so that spaces and line feeds are seen."""
    if choice is None:
        return "-"
    return f"#{choice.id}" if choice.text is None else shortened(repr(choice.text), 80)
