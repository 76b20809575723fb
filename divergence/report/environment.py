"""The machine of a run: what it is, and what it did with the determinism switches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from divergence.layout.lines import Line, columns, heading, prose
from divergence.layout.numbers import count
from divergence.run.schema.manifest import Environment, Repeatability, Settings, Switch

__all__ = ["environment_lines", "fallback_lines", "repeat_lines", "switch_lines"]

_NAMED = 8  # operators in a line


def environment_lines(environment: Environment) -> list[Line]:
    """The machine: device, CPU, versions and the variables that change arithmetic."""
    device = environment.device_name
    if environment.num_devices:
        device += f" x {environment.num_devices}"
    for name, value in (("driver", environment.driver), ("runtime", environment.runtime)):
        device += f", {name} {value}" if value else ""
    facts = [
        ("  device", f"{environment.device_type}: {device}"),
        (
            "  cpu",
            f"{environment.cpu}, {environment.cpu_capability}, "
            f"{count(environment.num_threads, 'thread')}",
        ),
        *([("  cpu model", environment.cpu_model)] if environment.cpu_model else []),
        ("  platform", f"{environment.platform}, Python {environment.python}"),
        ("  versions", ", ".join(f"{k} {v}" for k, v in sorted(environment.versions.items()))),
    ]
    if environment.torch_build:
        build = ", ".join(f"{k} {v}" for k, v in environment.torch_build.items())
        facts.append(("  torch build", build))
    if environment.variables:
        text = ", ".join(f"{k}={v}" for k, v in sorted(environment.variables.items()))
        facts.append(("  variables", text))
    return [heading("machine", environment.label), *(prose(*fact, width=14) for fact in facts)]


def switch_lines(switches: Sequence[Switch], *, verbose: bool = False) -> list[Line]:
    """Determinism switches: those that the machine did not take, all of them with ``verbose``."""
    if not switches:
        return []
    asked = [item for item in switches if item.asked != "-"]
    tally = Counter(item.status for item in asked)
    told = ", ".join(
        f"{tally[name]} {name}"
        for name in ("accepted", "set", "refused", "absent")
        if name != "set" or tally[name]
    )
    if not asked:
        told = f"{len(switches)} left as found"
    hint = "" if verbose else " (inspect -v lists them)"
    lines = [prose("  switches", told + hint, width=14)]
    rows = [
        (item.status, item.name, f"asked {item.asked}, found {item.found}", item.note or "")
        for item in switches
        if verbose or item.status == "refused"
    ]
    return lines + columns(rows, indent=4)


def fallback_lines(settings: Settings) -> list[Line]:
    """Operators that the CPU ran in the device's place."""
    if not settings.cpu_fallbacks:
        return []
    named = ", ".join(settings.cpu_fallbacks[:_NAMED])
    more = len(settings.cpu_fallbacks) - _NAMED
    text = f"{named}{f' and {more} more' if more > 0 else ''} ran on the CPU: the device has none"
    return [prose("  fell back", text, width=14, style="yellow")]


def repeat_lines(repeat: Repeatability) -> list[Line]:
    if repeat.num_runs <= 1:
        return []
    first = f", first at {repeat.first_difference}" if repeat.first_difference else ""
    differ = f"{repeat.num_different:,} of {repeat.num_compared:,} repeated tensors differ"
    text = f"{repeat.num_runs} runs: " + (differ if repeat.num_different else "all bits equal")
    return [prose("  repeated", text + first, width=14)]
