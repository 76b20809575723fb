"""What probes found of a machine, for people: a line a subject, grouped by probe.

Without ``verbose`` what nearly every machine does is counted and not listed: exact inputs, nearest
rounding, functions within one ulp.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from divergence.layout.lines import BLANK, Line, columns, heading, line, prose
from divergence.layout.numbers import count
from divergence.run.command import command_line
from divergence.run.schema.arithmetic import ArithmeticFact
from divergence.run.schema.manifest import Manifest

__all__ = ["TITLES", "arithmetic_lines", "probed_lines"]

TITLES = {
    "order": "order of additions",
    "accumulator": "partial sums",
    "input bits": "bits kept of float32 inputs",
    "fma": "multiply-adds",
    "rows": "one row against sixteen",
    "batch": "row 0 in batches of 1 to 17",
    "subnormals": "subnormal numbers",
    "rounding": "rounding",
    "ulp": "elementary functions, worst error",
    "lanes": "vector code against scalar code",
    "probe": "not probed",
}
"""Probe → heading, in the order shown."""

_USUAL = (
    "to nearest, ties to even", "kept in, kept out", "23 bits (float32)", "invariant",
    "24 bits (float32), rounded to nearest", "the same bits at M=1 and M=16",
    "same bits alone and in a vector",
)  # fmt: skip
_USUAL_ULP = 1.0


def arithmetic_lines(facts: Sequence[ArithmeticFact], *, verbose: bool = False) -> list[Line]:
    """A section, or nothing where nothing was probed."""
    if not facts:
        return []
    unverified = sum(not fact.verified for fact in facts)
    told = count(len(facts), "fact") + (f", {unverified} unverified" if unverified else "")
    lines = [heading("arithmetic", told + ("" if verbose else " (inspect -v lists all)"))]
    for probe in dict.fromkeys([*TITLES, *(fact.probe for fact in facts)]):
        mine = [fact for fact in facts if fact.probe == probe]
        shown = [fact for fact in mine if verbose or not _usual(fact)]
        if not mine:
            continue
        rest = len(mine) - len(shown)
        more = f"{rest} as usual" if rest else ""
        lines.append(prose(f"  {TITLES.get(probe, probe)}:", more, width=38))
        lines += columns(
            [(fact.subject, _answer(fact, verbose=verbose)) for fact in shown], indent=4
        )
    return [*lines, BLANK]


def _usual(fact: ArithmeticFact) -> bool:
    if fact.probe == "ulp" and fact.verified:
        return fact.numbers.get("worst", 2.0) <= _USUAL_ULP
    return fact.verified and fact.value in _USUAL


def _answer(fact: ArithmeticFact, *, verbose: bool) -> str:
    text = fact.value
    if not fact.verified:
        text += f" [unverified: {fact.evidence}]" if fact.evidence else " [unverified]"
    return f"{text} [{fact.evidence}]" if verbose and fact.verified and fact.evidence else text


def probed_lines(path: str | os.PathLike[str], manifest: Manifest, *, verbose: bool) -> list[Line]:
    """What `divergence probe` says when it is done."""
    trees = [fact for fact in manifest.arithmetic if fact.probe == "order"]
    proven = sum(fact.verified for fact in trees)
    return [
        line(
            ("probed", "bold green"),
            f" {os.fspath(path)}: {count(len(manifest.arithmetic), 'fact')}; {proven} of "
            f"{count(len(trees), 'order')} of additions replayed bit by bit",
        ),
        prose("machine", f"{manifest.environment.label}, on {manifest.settings.device}"),
        BLANK,
        *arithmetic_lines(manifest.arithmetic, verbose=verbose),
        heading("next"),
        line("  divergence probe -o OTHER    # on the other machine"),
        line("  " + command_line("compare", os.fspath(path), "OTHER")),
    ]
