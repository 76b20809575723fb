"""Tokens and distributions: whether the runs chose the same, and by how much not.

A decoded token is quoted, since it may hold a newline or begin with a space.
"""

from __future__ import annotations

import itertools

from divergence.comparison.result import Report
from divergence.comparison.results import Explanation, TokenChoice, TokenDifference, TokensResult
from divergence.layout import BLANK, Line, columns, count, decimal, fixed, heading, prose, times
from divergence.words import letter

"""How the note begins that says why a token was not explained."""


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """How many of the tokens are equal, and the differences with their margins."""
    tokens = report.tokens
    if tokens is None or tokens.num_tokens + tokens.num_missing == 0:
        return []
    how = "B was fed A's tokens" if tokens.forced else "each run chose alone"
    if tokens.num_missing:
        how += f"; {tokens.num_missing} of A's it did not generate"
    total = tokens.num_tokens + tokens.num_missing
    lines = [heading("tokens", f"{tokens.num_equal} of {total} equal; {how}")]
    first = tokens.first_difference
    if first is not None:
        lines += _difference_lines(first, forced=tokens.forced)
    lines += _other_lines(tokens)
    lines += kl_lines(tokens)
    if tokens.explanation is not None:
        lines += _explanation_lines(tokens.explanation, tokens.first_difference)
    return [*lines, BLANK]


def explained_lines(report: Report) -> list[Line]:
    """The answer of --explain-token for the first screen, also where it has none."""
    if report.tokens is None or report.tokens.explanation is None:
        unexplained = (item for item in report.remarks if item.code == "experiments.unexplained")
        return [prose("explained", item.text) for item in unexplained]
    explanation = report.tokens.explanation
    where = f"prompt {explanation.sample}, step {explanation.step}"
    text = f"{where}, by {_cause(explanation)} alone: {_effect(explanation)}"
    return [prose("explained", text, style="yellow")]


def _difference_lines(first: TokenDifference, *, forced: bool) -> list[Line]:
    order = {
        "before": ", before the onset",
        "same step": ", in the step of the onset",
        "after": ", after the onset",
        None: "",
    }[first.order_to_onset]
    later = "" if forced else "; later steps continue different texts and are not compared"
    place = f"prompt {first.sample}, step {first.step}{order}{later}"
    lines = [prose("  first difference: ", place, style="yellow", width=4)]
    sides = (
        ("A", first.reference, first.margin, _sigmas(first)),
        ("B", first.candidate, first.candidate_margin, ""),
    )
    rows = [
        (name, _token(choice), f"margin {fixed(margin)} logits over the next{sigmas}")
        for name, choice, margin, sigmas in sides
    ]
    lines += columns(rows, indent=4, widest=40)
    lines += judgement_lines(first)
    tops = top_rows(first.reference_top, first.candidate_top)
    if tops:
        titles = ("top of A", "logprob", "top of B", "logprob")
        lines += columns([titles, *tops], indent=4, widest=32)
    return lines


def _sigmas(first: TokenDifference) -> str:
    """The margin in standard deviations of the logits' difference; a judged z has its own line."""
    if first.z is None or first.z_of in ("floor", "model"):
        return ""
    return f" ({first.z:.1f} σ of the diff)"


_JUDGEMENTS = {
    "tie": "a tie: rounding may flip it",
    "fault": "a fault: no rounding of this dtype moves logits that far",
    None: "between: more than the floor's own rounding flips, less than the coarsest healthy "
    "kernels might",
}


def judgement_lines(first: TokenDifference) -> list[Line]:
    """What a truth says of the flip; without one, that there is none to say it."""
    if first.z_of == "difference":
        text = "not judged: σ is that of the diff itself, which a fault widens; give --truth"
        return [prose("    ", text, width=4)]
    if first.z_of is None or first.z is None:
        return []
    if first.z_of == "model":
        says = "not judged: more than the rounding model makes of it; --truth tells"
        says = _JUDGEMENTS["tie"] if first.judgement == "tie" else says
        text = f"{says} ({first.z:.1f} σ of what all blocks together may make by rounding)"
        return [prose("    ", text, style="green" if first.judgement else "yellow", width=4)]
    judged = (
        f"{_JUDGEMENTS[first.judgement]} (gap {fixed(abs(first.truth_margin or 0.0))} logits in "
        f"the truth, {first.z:.1f} σ of the logit error that rounding makes)"
    )
    styles = {"tie": "green", "fault": "red", None: "yellow"}
    lines = [prose("    ", judged, style=styles[first.judgement], width=4)]
    true_choice = first.truth_choice
    if true_choice is not None:
        who = "with neither"
        if true_choice.id in (first.reference.id, first.candidate.id):
            who = f"with {'A' if true_choice.id == first.reference.id else 'B'}"
        lines.append(
            prose("    ", f"the truth chose {_token(true_choice)}: it agrees {who}", width=4)
        )
    return lines


def _other_lines(tokens: TokensResult) -> list[Line]:
    """The other flips, counted by what they are."""
    rest = tokens.differences[1:]
    if not rest:
        return []
    names = {"tie": "tie", "fault": "fault", None: "unjudged"}
    counts = [
        f"{number} {name}{'s' if number > 1 and judgement else ''}"
        for judgement, name in names.items()
        if (number := sum(flip.judgement == judgement for flip in rest))
    ]
    return [prose("  later differences: ", f"{len(rest)} ({', '.join(counts)})", width=4)]


def kl_lines(tokens: TokensResult) -> list[Line]:
    """The distributions of all decided positions, beside the floor's distance from the truth."""
    if tokens.kl_mean is None:
        return []
    text = f"mean {decimal(tokens.kl_mean)}, p99 {decimal(tokens.kl_p99)} nats"
    style = ""
    if tokens.kl_ratio is not None:
        limit = "no limit where experts or codes are chosen"
        if tokens.kl_limit is not None:
            limit = f"limit {times(tokens.kl_limit)}"
            style = "red" if tokens.kl_ratio > tokens.kl_limit else ""
        text += (
            f"; the floor ({letter(tokens.floor_side)} from the truth): mean "
            f"{decimal(tokens.floor_kl_mean)}, p99 {decimal(tokens.floor_kl_p99)}; "
            f"{times(tokens.kl_ratio)} ({limit})"
        )
    return [prose("  KL of what decided them: ", text, style=style, width=4)]


def _explanation_lines(explanation: Explanation, first: TokenDifference | None) -> list[Line]:
    """What one block's error alone does to the decision, on this machine."""
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
    lines = [
        prose("  explained: ", f"{what}, {whence}{why}", width=4),
        prose("    ", f"{added}, here in {explanation.dtype} on {explanation.device}", width=4),
    ]
    rows = [
        (f"logit of {_token(explanation.reference)} over {_token(explanation.candidate)}", ""),
        ("  in A", fixed(explanation.reference_margin)),
        ("  in B", fixed(explanation.candidate_margin)),
        ("  here, as it is", fixed(explanation.baseline_margin)),
        ("  here, with the error", fixed(explanation.injected_margin)),
    ]
    lines += columns(rows, indent=4, widest=60)
    chosen = f"; chosen with it: {_token(explanation.injected_choice)}"
    lines.append(prose("    ", _effect(explanation) + chosen, style="yellow", width=4))
    return lines


def _cause(explanation: Explanation) -> str:
    """``the candidate's error at model.layers.1:out``."""
    sites = ", ".join(explanation.sites[:3])
    if len(explanation.sites) > 3:
        sites += f" and {len(explanation.sites) - 3} more"
    other = "candidate" if explanation.disturbed == "reference" else "reference"
    return f"{letter(other)}'s error at {sites}"


def _effect(explanation: Explanation) -> str:
    share = "the two runs' margins are equal: nothing moved"
    if explanation.share is not None:
        share = f"{100 * explanation.share:.0f}% of the movement explained"
    return f"{share}; the error {'flips' if explanation.flips else 'does not flip'} the token"


def top_rows(
    reference: list[TokenChoice], candidate: list[TokenChoice], num: int = 5
) -> list[tuple[str, ...]]:
    """Both top lists side by side, the shorter one padded."""

    def cells(choice: TokenChoice | None) -> tuple[str, str]:
        return ("", "") if choice is None else (_token(choice), fixed(choice.logprob))

    pairs = itertools.islice(itertools.zip_longest(reference, candidate), num)
    return [(*cells(ours), *cells(theirs)) for ours, theirs in pairs]


def _token(choice: TokenChoice) -> str:
    """``' the' (262)``: quoted, so that spaces and newlines are seen."""
    return f"#{choice.id}" if choice.text is None else f"{choice.text!r} #{choice.id}"
