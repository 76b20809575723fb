"""Tokens and distributions: whether the runs chose the same, and by how much not.

A decoded token is quoted, since it may hold a newline or begin with a space.
"""

from __future__ import annotations

from divergence.compare.result import SiteResult, TokenChoice, TokenDifference, TokensResult
from divergence.report.lines import BLANK, Line, columns, heading, prose
from divergence.report.numbers import decimal, fixed

__all__ = ["logits_lines", "token_lines"]


def token_lines(tokens: TokensResult | None) -> list[Line]:
    if tokens is None or tokens.num_tokens == 0:
        return []
    how = (
        "the candidate was fed the reference's tokens" if tokens.forced else "each run chose alone"
    )
    lines = [heading("tokens", f"{tokens.num_equal} of {tokens.num_tokens} equal; {how}")]
    first = tokens.first_difference
    if first is not None:
        lines += _difference_lines(first, forced=tokens.forced)
    return [*lines, BLANK]


def _difference_lines(first: TokenDifference, *, forced: bool) -> list[Line]:
    order = {
        "before": ", before the onset",
        "same step": ", in the step of the onset",
        "after": ", after the onset",
        None: "",
    }[first.order_to_onset]
    later = "" if forced else "; later steps continue different texts and are not compared"
    lines = [
        prose(
            "  first difference: ",
            f"sample {first.sample}, step {first.step}{order}{later}",
            style="yellow",
            width=4,
        )
    ]
    lines += columns(
        [
            (name, _token(choice), f"margin {fixed(margin)} logits over the next{sigmas}")
            for name, choice, margin, sigmas in (
                ("reference", first.reference, first.margin, _sigmas(first.z)),
                ("candidate", first.candidate, first.candidate_margin, ""),
            )
        ],
        indent=4,
        widest=40,
    )
    tops = list(_tops(first.reference_top, first.candidate_top))
    if tops:
        rows = [("top of the reference", "logprob", "top of the candidate", "logprob"), *tops]
        lines += columns(rows, indent=4, widest=32)
    return lines


def _sigmas(z: float | None) -> str:
    """The margin in standard deviations of the logits' difference."""
    return "" if z is None else f" ({z:.1f} σ of the diff)"


def _tops(
    reference: list[TokenChoice], candidate: list[TokenChoice], num: int = 5
) -> list[tuple[str, str, str, str]]:
    """Both top lists side by side, the shorter one padded."""
    rows = []
    for i in range(min(num, max(len(reference), len(candidate)))):
        cells: list[str] = []
        for side in (reference, candidate):
            if i < len(side):
                cells += [_token(side[i]), fixed(side[i].logprob)]
            else:
                cells += ["", ""]
        rows.append((cells[0], cells[1], cells[2], cells[3]))
    return rows


def _token(choice: TokenChoice) -> str:
    """``' the' (262)``: quoted, so that spaces and newlines are seen."""
    return f"#{choice.id}" if choice.text is None else f"{choice.text!r} #{choice.id}"


def logits_lines(sites: list[SiteResult]) -> list[Line]:
    """Distributions, worst over the steps of each phase and pass."""
    rows = []
    for pass_ in ("anchored", "free"):
        for phase in ("prefill", "decode"):
            group = [
                site.logits
                for site in sites
                if site.logits is not None
                and site.pass_ == pass_
                and (site.step == 0) == (phase == "prefill")
            ]
            if group:
                rows.append(
                    (
                        f"{phase}, {pass_}",
                        decimal(max(item.kl_mean for item in group)),
                        decimal(max(item.kl_max for item in group)),
                        f"{100 * min(item.top1_agreement for item in group):.4g}%",
                        f"{100 * min(item.top5_overlap for item in group):.4g}%",
                        fixed(min(item.margin_min for item in group)),
                        decimal(max(item.chosen_logprob_diff_max for item in group)),
                    )
                )
    if not rows:
        return []
    titles = (
        "pass",
        "KL mean",
        "KL max",
        "same top 1",
        "same top 5",
        "least margin",
        "chosen Δlogp",
    )
    return [
        heading("logits", "KL in nats from reference to candidate; the worst of all steps"),
        *columns([titles, *rows]),
        BLANK,
    ]
