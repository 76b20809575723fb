"""What `selftest` says: step by step, what worked on this device."""

from __future__ import annotations

from collections import Counter

from divergence.experiments.result import Selftest, StepStatus
from divergence.layout.lines import BLANK, Line, heading, prose
from divergence.report.environment import environment_lines, switch_lines

__all__ = ["answer_lines", "selftest_lines"]

_STYLES: dict[StepStatus, str] = {"ok": "green", "failed": "red", "skipped": "yellow"}


def answer_lines(result: Selftest) -> list[Line]:
    """One line: how many steps did what."""
    tally = Counter(step.status for step in result.steps)
    told = ", ".join(f"{tally[name]} {name}" for name in _STYLES if tally[name])
    told = told or "nothing was run"
    text = f"{told}{'' if result.complete else '; interrupted'}"
    return [prose(result.device, text, width=12, style="red" if result.failed else "green")]


def selftest_lines(result: Selftest, *, verbose: bool = False) -> list[Line]:
    """The answer, the steps, the machine and its switches."""
    lines = [*answer_lines(result), BLANK, heading("steps")]
    for step in result.steps:
        lines.append(prose(f"  {step.status}", f"{step.name}  ({step.seconds:.1f} s)", width=11,
                           style=_STYLES[step.status]))  # fmt: skip
        lines.append(prose("", step.detail, width=11))
    if result.fallbacks:
        lines += [BLANK, prose("on the CPU", ", ".join(result.fallbacks), width=12, style="yellow")]
    lines += [BLANK, *environment_lines(result.environment)]
    return lines + switch_lines(result.switches, verbose=verbose)
