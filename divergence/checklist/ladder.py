"""The ladder of causes: tokens, weights, code, prefill, decode, sampling, ranks.

Each rung may explain all those below it, so the ladder stops at the first that does. What it says
of numbers is what compare says: where that abstains the rung is unknown, for compare's own reason.
A rung that differs without explaining what was found fails too, and the ladder goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from divergence.checklist.code import code, settings_differ
from divergence.checklist.numbers import Said, decode, prefill, ranks, sampling
from divergence.checklist.pair import Pair, worst
from divergence.checklist.points import tokens
from divergence.checklist.result import Rung, RungName
from divergence.checklist.weights import precision, weights
from divergence.comparison.advice import Advice
from divergence.run.command import command_line
from divergence.words import printable

__all__ = ["Ladder", "ladder_of"]


_TITLES: dict[RungName, str] = {
    "tokens": "the same tokens, by the same template",
    "weights": "the same weights in the same precision",
    "code": "the same code, configuration and attention",
    "prefill": "the prefill is within rounding",
    "decode": "the decode steps are within rounding",
    "sampling": "each token is the largest of its own logits",
    "ranks": "ranks agree on what several of them hold",
}


@dataclass(frozen=True, slots=True)
class Ladder:
    """All rungs, and the one at which it stops."""

    rungs: list[Rung]
    explained_by: RungName | None


def ladder_of(pair: Pair) -> Ladder:
    """All seven rungs, in order."""
    asks = {
        "tokens": _tokens, "weights": _weights, "code": code, "prefill": prefill,
        "decode": decode, "sampling": sampling, "ranks": ranks,
    }  # fmt: skip
    rungs: list[Rung] = []
    stop: RungName | None = None
    for name, title in _TITLES.items():
        if stop is not None:
            text = f"{stop} may explain it" if stop == "code" else f"explained by {stop}"
            rungs.append(Rung(name=name, title=title, state="not_reached", evidence=text))
            continue
        state, evidence, explains = asks[name](pair)
        rungs.append(
            Rung(
                name=name, title=title, state=state, explains=explains,
                evidence=printable(evidence),
                next=_next(name, pair) if state == "fail" else None,
            )
        )  # fmt: skip
        stop = name if explains else None
    return Ladder(rungs, stop)


def _tokens(pair: Pair) -> Said:
    state, evidence = tokens(pair)
    return state, evidence, state == "fail"


def _weights(pair: Pair) -> Said:
    """Other values make another computation. Another precision of the same values is allowed for
    in every limit, so it explains what is within them."""
    (state, text), (same, how) = weights(pair), precision(pair)
    if state == "fail":
        return "fail", f"{how}; {text}", True
    verdict = pair.verdict
    if same == "fail" and not (verdict is not None and verdict.kind == "identical"):
        within = verdict is not None and verdict.kind == "within_floor"
        return "fail", f"{how}; {text}", within
    if same == "fail":  # and every bit is equal
        same = "pass"
    return worst(state, same), f"{how}; {text}", False


def _next(name: RungName, pair: Pair) -> str:
    if name in ("tokens", "weights") or (name == "code" and settings_differ(pair)):
        return Advice(pair.a, pair.b).alike()
    if pair.verdict is not None and pair.verdict.next:
        return pair.verdict.next[0].removesuffix("; or by hand:")
    return command_line("compare", pair.a.path, pair.b.path, verbose=True)
