"""What would make a set-up see smaller faults, as commands."""

from __future__ import annotations

from divergence.comparison.advice import Advice, beside
from divergence.comparison.measured import Measured
from divergence.numerics.rounding.chance import spread
from divergence.run.command import command_line

__all__ = ["deeper"]


def deeper(measured: Measured, *, made_here: bool, escalated: bool) -> list[str]:
    """Commands, the one that gains most first: an escalated pass for a 16-bit dtype, a truth,
    and more tokens where so few are judged that chance widens the limits."""
    a, b = measured.reference, measured.candidate
    advice = Advice(a, b)
    commands: list[str] = []
    known, narrow = measured.truth, measured.narrow
    here, there = str(a.path), str(b.path)
    truth = beside(here, "-truth") if known is None else str(known.run.path)
    candidate = None if made_here else there
    if narrow and not escalated and not made_here:
        candidate = beside(there, "-escalated")
        commands.append(advice.escalate()[0])
    if known is None:
        commands.append(advice.truth()[0])
    if commands:
        also = "and an escalated pass, which is then made too" if narrow and made_here else ""
        commands.append(
            command_line("sensitivity", here, candidate=candidate, truth=truth, note=also)
        )
    num_tokens = sum(len(sample.prompt_ids) for sample in a.manifest.tokens.samples)
    if spread(num_tokens) > 1:
        commands.append(
            command_line(
                "capture", a.manifest.model.source, o=beside(here, "-more"), prompts="FILE",
                note=f"more prompts: with {num_tokens} tokens chance widens some limits",
            )
        )  # fmt: skip
    return commands
