"""What would make a set-up see smaller faults, as commands."""

from __future__ import annotations

import shlex

from divergence.compare.advice import Advice
from divergence.compare.api import Measured
from divergence.numerics.chance import spread

__all__ = ["deeper"]


def deeper(measured: Measured, *, made_here: bool, escalated: bool) -> list[str]:
    """Commands, the one that gains most first: an escalated pass for a 16-bit dtype, a truth,
    and more tokens where so few are judged that chance widens the limits."""
    a, b = measured.reference, measured.candidate
    advice, commands = Advice(a, b), []
    known, narrow = measured.truth is not None, measured.case.narrow
    truth = measured.truth.run.path if known else f"{a.path}-truth"
    candidate = None if made_here else b.path
    if narrow and not escalated and not made_here:
        candidate = f"{b.path}-escalated"
        commands.append(advice.escalate()[0])
    if not known:
        commands.append(advice.truth()[0])
    if commands:
        words = ["divergence", "sensitivity", str(a.path)]
        words += [] if candidate is None else ["--candidate", str(candidate)]
        words += ["--reference", str(truth)]
        also = "   # and an escalated pass, which is then made too" if narrow and made_here else ""
        commands.append(shlex.join(words) + also)
    num_tokens = sum(len(sample.prompt_ids) for sample in a.manifest.tokens.samples)
    if spread(num_tokens) > 1:
        words = ["divergence", "capture", a.manifest.model.source, "-o", f"{a.path}-more"]
        commands.append(
            f"{shlex.join(words)} --prompts FILE   # more prompts: with {num_tokens} tokens "
            "chance widens some limits"
        )
    return commands
