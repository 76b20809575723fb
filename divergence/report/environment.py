"""A machine: what it is, what probes and `selftest` found of it, and its determinism switches.

Without ``verbose`` what nearly every machine does is counted and not listed: exact inputs, nearest
rounding, functions within one ulp.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from divergence.comparison.result import REPORT_SCHEMA_VERSION, Report, strict_json
from divergence.comparison.results import LogitsDiff, NonfiniteCount, SiteResult, TruthDiff
from divergence.document import Sentence, named
from divergence.experiments.result import Selftest, StepStatus
from divergence.facts import fact, sentence
from divergence.layout import BLANK, Line, columns, count, heading, line, next_lines, prose
from divergence.numerics.sums import Estimate
from divergence.run.command import command_line
from divergence.run.manifest import (
    ArithmeticFact,
    Environment,
    Manifest,
    Repeatability,
    Settings,
    Switch,
)
from divergence.words import printable

# Reports for programs: strict, versioned JSON and CSV with full precision.
#
# JSON holds no nan and no inf, so those are the strings "nan", "inf" and "-inf".
# Every document has ``schema_version``; keys are only ever added within a version.


def check_json(result: Any) -> str:
    """The answer of `check`, a CheckResult of divergence.gate.check.

    Its report is the one that `compare --json` gives.
    """
    keys = (
        "passed", "num_ties", "excused", "known", "notes", "failures", "policy", "report",
    )  # fmt: skip
    answer = {key: msgspec.to_builtins(getattr(result, key)) for key in keys}
    return strict_json({"schema_version": REPORT_SCHEMA_VERSION} | answer)


def blessing_json(blessing: Any) -> str:
    """The answer of `check --bless`, a Blessing of divergence.gate.golden."""
    return strict_json(
        {"schema_version": REPORT_SCHEMA_VERSION, "blessed": msgspec.to_builtins(blessing)}
    )


def csv_columns() -> list[str]:
    """The columns of the CSV, whatever a report holds."""
    names: list[str] = []
    for name in SiteResult.__struct_encode_fields__:
        if name == "prompts":
            continue  # a list of its own
        nested = _NESTED.get(name)
        keys = [] if nested is None else nested.__struct_encode_fields__
        names += [f"{name}_{key}" for key in keys] or [name]
    return names


_NESTED: dict[str, type[msgspec.Struct]] = {
    "logits": LogitsDiff, "nonfinite": NonfiniteCount, "truth": TruthDiff, "estimated": Estimate,
}  # fmt: skip


def report_csv(report: Report) -> str:
    """One line per compared site; an absent number is an empty cell.

    Shapes are written ``1x12x64`` and indices ``0 3 17``.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, csv_columns(), restval="", lineterminator="\n")
    writer.writeheader()
    for row in report.to_records():
        for key, value in row.items():
            if isinstance(value, list | tuple):
                row[key] = ("x" if key == "shape" else " ").join(str(size) for size in value)
            elif isinstance(value, str):
                row[key] = printable(value)
        writer.writerow(row)
    return file.getvalue()


_NAMED = 8  # operators in a line


def environment_lines(environment: Environment) -> list[Line]:
    """The machine: device, CPU, versions and the variables that change arithmetic."""
    device = environment.device_name
    if environment.num_devices:
        device += f" x {environment.num_devices}"
    for name, value in (("driver", environment.driver), ("runtime", environment.runtime)):
        device += f", {name} {value}" if value else ""
    threads = count(environment.num_threads, "thread")
    facts = [
        ("  device", f"{environment.device_type}: {device}"),
        ("  cpu", f"{environment.cpu}, {environment.cpu_capability}, {threads}"),
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


def switch_lines(
    switches: Sequence[Switch], *, verbose: bool = False, more: str = "-v"
) -> list[Line]:
    """Determinism switches: those that the machine did not take, all of them with ``verbose``.
    ``more``: what lists them."""
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
    hint = "" if verbose else f" ({more} lists them)"
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


def changes(plants: Sequence[str], substitutes: Sequence[str]) -> list[Sentence]:
    """What was done to a run on purpose."""
    done = (("PLANTED FAULT", plants), ("SUBSTITUTED", substitutes))
    return [named("", f"{what}: {', '.join(at)}", "yellow") for what, at in done if at]


def repeat_lines(repeat: Repeatability) -> list[Line]:
    if repeat.num_runs <= 1:
        return []
    first = f", first at {repeat.first_difference}" if repeat.first_difference else ""
    differ = f"{repeat.num_different:,} of {repeat.num_compared:,} repeated tensors differ"
    text = f"{repeat.num_runs} runs: " + (differ if repeat.num_different else "all bits equal")
    if repeat.begins:
        num, total = sum(repeat.begins.values()), repeat.num_forwards
        begins = fact("preflight.begins", num=num, total=total, places=repeat.places)
        first += f"; {sentence(begins)}"
    return [prose("  repeated", text + first, width=14)]


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
    for probe in dict.fromkeys([*TITLES, *(each.probe for each in facts)]):
        mine = [each for each in facts if each.probe == probe]
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
    again = "divergence probe -o OTHER    # on the other machine"
    return [
        line(
            ("probed", "bold green"),
            f" {os.fspath(path)}: {count(len(manifest.arithmetic), 'fact')}; {proven} of "
            f"{count(len(trees), 'order')} of additions replayed bit by bit",
        ),
        prose("machine", f"{manifest.environment.label}, on {manifest.settings.device}"),
        BLANK,
        *arithmetic_lines(manifest.arithmetic, verbose=verbose),
        *next_lines([again, command_line("compare", os.fspath(path), "OTHER")]),
    ]


_STYLES: dict[StepStatus, str] = {"ok": "green", "failed": "red", "skipped": "yellow"}


def selftest_answer(result: Selftest) -> list[Line]:
    """One line: how many steps did what."""
    tally = Counter(step.status for step in result.steps)
    told = ", ".join(f"{tally[name]} {name}" for name in _STYLES if tally[name])
    told = told or "nothing was run"
    text = f"{told}{'' if result.complete else '; interrupted'}"
    return [prose(result.device, text, width=12, style="red" if result.failed else "green")]


def selftest_lines(result: Selftest, *, verbose: bool = False) -> list[Line]:
    """The answer, the steps, the machine and its switches."""
    lines = [*selftest_answer(result), BLANK, heading("steps")]
    for step in result.steps:
        lines.append(prose(f"  {step.status}", f"{step.name}  ({step.seconds:.1f} s)", width=11,
                           style=_STYLES[step.status]))  # fmt: skip
        lines.append(prose("", step.detail, width=11))
    if result.fallbacks:
        lines += [BLANK, prose("on the CPU", ", ".join(result.fallbacks), width=12, style="yellow")]
    lines += [BLANK, *environment_lines(result.environment)]
    return lines + switch_lines(result.switches, verbose=verbose)
